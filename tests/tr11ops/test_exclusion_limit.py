"""How many nodes may be excluded: one pure rule, and the same answer for everybody who asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tr11ops.detect.operation_cases import nodes, operated
from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.cluster.base import Partition
from tr11ops.detect.nodes_left import exclusion_limit
from tr11ops.evidence_operation import operation_facts
from tr11ops.exclusion_limit import ExclusionLimit, most_exclusions
from tr11ops.runcard import load_card


@given(st.integers(0, 400), st.integers(0, 400), st.none() | st.floats(0, 100, allow_nan=False))
def test_the_limit_never_reaches_into_what_is_needed(partition: int, needed: int, percent: float | None) -> None:
    most = most_exclusions(partition, needed, percent)
    assert most >= 0 and (most == 0 or partition - most >= needed)
    if percent is not None:
        assert most <= partition * percent / 100 + 1


@pytest.mark.parametrize(
    ("partition", "needed", "percent", "most"),
    [
        (52, 48, 10, 4), (500, 48, 10, 50), (6, 2, 10, 1), (48, 48, 10, 0), (5, 2, 10, 1), (8, 4, 0, 0),
        (8, 4, None, 2),  # two bad nodes do not stop a run of four
        (8, 7, None, 1), (8, 1, None, 1), (6, 2, None, 2), (5, 5, None, 0), (52, 48, None, 4), (500, 48, None, 50),
    ],
)  # fmt: skip
def test_the_limit(partition: int, needed: int, percent: float | None, most: int) -> None:
    assert most_exclusions(partition, needed, percent) == most


def test_what_is_outside_the_partition_or_gone_from_it_does_not_count() -> None:
    limit = ExclusionLimit.of(("n1", "n2", "n3", "n4"), 2, 25)
    assert (limit.most, limit.counted({"n1", "gone", "cpu1"})) == (1, 1)
    assert limit.forbids("n2", {"n1"}) and not limit.forbids("n2", {"gone"}) and not limit.forbids("n1", {"n1"})
    assert not limit.forbids("cpu1", {"n1"}), "it takes nothing from the run"
    assert ExclusionLimit(1).forbids("n2", {"anything"}), "where the partition is not known, all count"


def test_everybody_who_asks_gets_the_same_answer(tmp_path: Path) -> None:
    """The command and the job go by the card, the watchdog and the detectors by a snapshot: spares count for all."""
    card = load_card(write_card(tmp_path), ["slurm.spare_nodes=2", "slurm.partition=gpu_p5"], {})
    there = nodes(8)
    facts = operation_facts(card)
    seen = exclusion_limit(operated(facts=facts, nodes=there))
    partition = Partition("gpu_p5", None, tuple(node.name for node in there))
    percent = card.resilience.exclusion_cap_percent
    assert seen == ExclusionLimit.of(partition.node_names, card.slurm.allocated_nodes, percent)
    assert seen is not None and (seen.most, seen.needed) == (2, 4)
