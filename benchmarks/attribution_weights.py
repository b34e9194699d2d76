"""How sure each rule of the attribution may be, by labelled logs: `python
benchmarks/attribution_weights.py [--write]`.

Each rule of `tr11ops/diagnose/attribution/attributors.py` is asked about the evidence in every log
of `tests/data/diagnose`; its conclusion is right or wrong by the label. Its weight is the mean of a
beta distribution whose prior is the figure that the rule was given by hand, worth STRENGTH logs
(Gelman et al., Bayesian Data Analysis, 2.4). The weights keep the order of the priors (isotonic
regression by pooling adjacent violators) and their side of the threshold from which the agent takes
a blamed node for the fault itself: who wins, and what follows, stays as it was.

Printed are the Brier scores before and after (cross-validated: logs of one incident are never on
both sides), and how often the conclusions of each range of confidence were right.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tr11ops.diagnose.attribution.attributors import ATTRIBUTORS
from tr11ops.diagnose.attribution.evidence import Attribution, Kind
from tr11ops.diagnose.attribution.weights import FILE, read_weights
from tr11ops.diagnose.look import diagnose_files
from trainer.contract.record import Record

LOGS = Path(__file__).parents[1] / "tests" / "data" / "diagnose"
STRENGTH = 10.0  # labelled logs that a prior is worth
FOLDS = 10
CAUTIOUS, MOST = 0.9, 0.97  # as tr11ops.diagnose.causes has them
SURE = 0.8  # as tr11ops.agent.controller and tr11ops.watchdog.rules have it
STEP = 0.001  # between two rules of one pool: the order decides who wins
BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_STEPS: Mapping[Kind, str] = {
    Kind.CONFIGURATION: "fix_config", Kind.STORAGE: "fix_storage", Kind.NUMERICS: "rollback_and_skip",
}  # fmt: skip


class WeighedCase(Record):
    """One conclusion of one rule about one log. `incident`: logs of the same one share it."""

    incident: str
    rule: str
    right: bool
    wins: bool


def is_right(found: Attribution, label: Mapping[str, Any], has_nodes: bool) -> bool | None:
    """Whether a conclusion is what the label says: of the nodes where it names any, else of what to
    do.

    None where the label does not tell: labels that were made without nodes have none also where the
    log names one.
    """
    steps = {label["action"], *label.get("accepted_actions", ())}
    if (found.blamed or found.suspects) and not has_nodes:
        return False if found.blamed and "exclude_and_resubmit" not in steps else None
    if found.blamed:
        return "exclude_and_resubmit" in steps and found.blamed == (label.get("node"),)
    if found.suspects:
        return label.get("node") in found.suspects
    if found.kind in _STEPS:
        return _STEPS[found.kind] in steps
    return label["action"] != "exclude_and_resubmit"


def read_cases() -> list[WeighedCase]:
    """What each rule says of each labelled log."""
    cases = []
    for file in sorted(LOGS.glob("*.toml")):
        labels = tomllib.loads(file.read_text(encoding="utf-8"))
        has_nodes = any("node" in label for label in labels.values())
        for name, label in labels.items():
            [diagnosis] = diagnose_files([LOGS / one for one in label["files"]])
            evidence = diagnosis.log_evidence
            found = (
                []
                if evidence is None
                else [one for rule in ATTRIBUTORS if (one := rule(evidence)) is not None]
            )
            best = max(found, key=lambda one: one.confidence, default=None)
            incident = "-".join(name.removeprefix("signature-").split("-")[:2])
            for one in found:
                right = is_right(one, label, has_nodes)
                if right is not None and one.rule:
                    cases.append(WeighedCase(incident, one.rule, right, one is best))
    return cases


def fitted(cases: Iterable[WeighedCase], priors: Mapping[str, float]) -> dict[str, float]:
    """Weight by rule, in the order of the priors; rules of equal priors share one.

    What was given no more than CAUTIOUS by hand gets no more.
    """
    levels = np.array(sorted(set(priors.values())))
    right, count, rules = (np.zeros(len(levels)) for _ in range(3))
    place = {rule: int(np.searchsorted(levels, prior)) for rule, prior in priors.items()}
    for level in place.values():
        rules[level] += STRENGTH
    for case in cases:
        right[place[case.rule]] += case.right
        count[place[case.rule]] += 1
    means = pooled((rules * levels + right) / (rules + count), rules + count)
    high = np.select([levels < SURE, levels <= CAUTIOUS], [SURE - STEP, CAUTIOUS], MOST)
    means = np.clip(means, np.where(levels >= SURE, SURE, 0.0), high)
    for at in range(
        1, len(levels)
    ):  # the order decides who wins: none is as sure as the one after it
        means[at] = max(means[at], means[at - 1] + STEP)
    for at in range(len(levels) - 1, -1, -1):
        means[at] = min(means[at], high[at], means[at + 1] - STEP if at + 1 < len(levels) else MOST)
    return {
        rule: round(float(means[place[rule]]), 3)
        for rule in sorted(priors, key=lambda rule: priors[rule])
    }


def counted(cases: Iterable[WeighedCase], rules: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Right conclusions, and all, by rule."""
    right, count = np.zeros(len(rules)), np.zeros(len(rules))
    for case in cases:
        right[rules.index(case.rule)] += case.right
        count[rules.index(case.rule)] += 1
    return right, count


def pooled(values: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The nearest values that never fall (pool adjacent violators), each with its share."""
    pools: list[list[float]] = []  # mean, share, members
    for value, share in zip(values, shares, strict=True):
        pools.append([value, share, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, weight, members = pools.pop()
            other = pools[-1]
            total = other[1] + weight
            pools[-1] = [(other[0] * other[1] + mean * weight) / total, total, other[2] + members]
    return np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])


def cross_validated(cases: Sequence[WeighedCase], priors: Mapping[str, float]) -> np.ndarray:
    """For each case the weight of its rule, fitted without its incident."""
    incidents = sorted({case.incident for case in cases})
    fold = {incident: place % FOLDS for place, incident in enumerate(incidents)}
    found = np.zeros(len(cases))
    for number in range(FOLDS):
        weights = fitted((case for case in cases if fold[case.incident] != number), priors)
        for place, case in enumerate(cases):
            if fold[case.incident] == number:
                found[place] = weights[case.rule]
    return found


def brier(said: np.ndarray, right: np.ndarray) -> float:
    """The mean square of what was said beside what was so: Brier (1950)."""
    return float(np.mean((said - right) ** 2))


def reliability(said: np.ndarray, right: np.ndarray) -> list[tuple[str, int, float, float]]:
    """(range, cases, mean of what was said, share that was right) of each range that has any."""
    found = []
    for low, high in pairwise(BINS):
        here = (said >= low) & ((said < high) | (high == BINS[-1]))
        if here.any():
            found.append(
                (
                    f"{low:.1f} to {high:.1f}",
                    int(here.sum()),
                    float(said[here].mean()),
                    float(right[here].mean()),
                )
            )
    return found


def text_of(
    weights: Mapping[str, float], priors: Mapping[str, float], cases: Sequence[WeighedCase]
) -> str:
    """The file of weights."""
    right, count = counted(cases, list(weights))
    head = "# How sure each rule of the attribution is; benchmarks/attribution_weights.py --write makes this file.\n"
    entries = [
        f"\n[{rule}]\nprior = {priors[rule]}\ncases = {int(count[place])}\nright = {int(right[place])}\n"
        f"confidence = {weight}\n"
        for place, (rule, weight) in enumerate(weights.items())
    ]
    return head + "".join(entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the file of weights")
    options = parser.parse_args()
    priors = {rule: entry["prior"] for rule, entry in read_weights().items()}
    cases = read_cases()
    right = np.array([case.right for case in cases], dtype=float)
    before, after = np.array([priors[case.rule] for case in cases]), cross_validated(cases, priors)
    wins = np.array([case.wins for case in cases])
    for name, chosen in (("all conclusions", np.ones_like(wins)), ("those that win", wins)):
        scores = brier(before[chosen], right[chosen]), brier(after[chosen], right[chosen])
        print(f"{name}: {chosen.sum()}, right {right[chosen].mean():.3f}")
        print(f"  Brier score {scores[0]:.3f} before, {scores[1]:.3f} after (cross-validated)")
        for words, said in (("before", before[chosen]), ("after", after[chosen])):
            for where, count, mean, share in reliability(said, right[chosen]):
                print(f"  {words:6} | {where} | {count:4} | said {mean:.2f} | right {share:.2f}")
    if options.write:
        FILE.write_text(text_of(fitted(cases, priors), priors, cases), encoding="utf-8")


if __name__ == "__main__":
    main()
