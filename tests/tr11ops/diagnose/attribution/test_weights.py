"""The weights of the attribution: fitted on the labelled logs, and never so that another decision
follows.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import attribution_weights as fit
from tests.tr11ops.diagnose.diagnose_logs import diagnosed
from tr11ops.agent.controller import SURE
from tr11ops.diagnose.attribution import by_machines, by_workers
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.diagnose.attribution.weights import read_weights, weights
from tr11ops.watchdog import rules

PRIORS = {rule: entry["prior"] for rule, entry in read_weights().items()}


@cache
def cases() -> list[fit.WeighedCase]:
    with patch.object(fit, "diagnose_files", diagnosed):
        return fit.read_cases()


def test_every_rule_has_a_weight_and_no_other() -> None:
    source = "".join(
        Path(module.__file__).read_text(encoding="utf-8") for module in (by_machines, by_workers)
    )
    named = set(re.findall(r'weighed\(\s*"([a-z-]+)"', source)) | set(
        re.findall(r'"(death[a-z-]*)"', source)
    )
    named |= {f"error-{kind}" for kind in (Kind.STORAGE, Kind.NUMERICS)}
    assert named == set(weights())


def test_the_order_and_the_threshold_are_those_of_the_priors() -> None:
    assert fit.SURE == SURE == rules.SURE
    for one, other in ((one, other) for one in PRIORS for other in PRIORS):
        assert (PRIORS[one] < PRIORS[other]) == (weights()[one] < weights()[other]), (one, other)
    assert all((PRIORS[rule] >= SURE) == (weight >= SURE) for rule, weight in weights().items())
    assert {rule for rule, weight in weights().items() if weight > 0.9} <= {
        "health",
        "lost-machine",
        "node-state",
        "refused",
    }


def test_the_weights_are_those_of_the_labelled_logs() -> None:
    assert len(cases()) >= 100
    anew = fit.fitted(cases(), PRIORS)
    # a few logs may come or go
    assert max(abs(anew[rule] - weight) for rule, weight in weights().items()) <= 0.03


def test_they_are_nearer_the_truth_than_the_priors() -> None:
    right = fit.np.array([case.right for case in cases()], dtype=float)
    before = fit.np.array([PRIORS[case.rule] for case in cases()])
    assert fit.brier(fit.cross_validated(cases(), PRIORS), right) < fit.brier(before, right) < 0.18


def test_nothing_wrong_is_concluded_with_certainty() -> None:
    assert [case for case in cases() if not case.right and weights()[case.rule] > 0.9] == []


def test_no_innocent_node_is_blamed_by_a_log() -> None:
    blaming = {"error-of-hardware", "node-state"}
    assert [case for case in cases() if case.rule in blaming and not case.right] == []


def test_pools_keep_the_order_and_the_mean() -> None:
    values, shares = (
        fit.np.array([0.2, 0.9, 0.3, 0.6, 0.5]),
        fit.np.array([1.0, 1.0, 2.0, 1.0, 1.0]),
    )
    assert fit.pooled(values, shares) == pytest.approx([0.2, 0.5, 0.5, 0.55, 0.55])


def test_a_fit_of_nothing_is_the_prior() -> None:
    assert fit.fitted([], {"a": 0.4, "b": 0.6, "c": 0.95}) == {"a": 0.4, "b": 0.6, "c": 0.95}
    right = [fit.WeighedCase(str(number), "a", True, True) for number in range(1000)]
    assert fit.fitted(right, {"a": 0.4, "b": 0.6})["a"] < 0.8  # no number of logs makes it certain
    wrong = [fit.WeighedCase(str(number), "c", False, True) for number in range(1000)]
    assert fit.fitted(wrong, {"a": 0.4, "c": 0.95})["c"] == 0.8
