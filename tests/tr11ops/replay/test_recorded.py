"""The replay decides as tr11 did on a real Slurm: a run that `tests/twin/test_same_decisions.py` recorded."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from tests.tr11ops.replay.recorded import HELD, Recording, decisions
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER
from tr11ops.rundir.journal import JournalEntry
from trainer.contract.documents import record_of

KEPT = Path(__file__).parents[2] / "data" / "replay" / "decisions-on-a-twin.json"


def kept() -> Recording:
    return record_of(Recording, json.loads(KEPT.read_text()))


def test_the_same_faults_at_the_same_moments_are_decided_alike_in_the_same_order(
    tmp_path: Path,
) -> None:
    recording = kept()
    assert len(recording.course.decisions) >= len(recording.faults) - 1  # a drain needs no decision
    assert recording.replayed(tmp_path) == recording.course


def test_one_fault_less_is_another_course(tmp_path: Path) -> None:
    recording = kept()
    assert replace(recording, faults=recording.faults[1:]).replayed(tmp_path) != recording.course


def test_a_hold_is_a_decision_and_what_people_hold_is_none() -> None:
    entries = [
        JournalEntry(float(at), writer="w", sequence=at, kind="array-held", who=who, why="a fault")
        for at, who in enumerate((AUTOMATIC_OWNER, "anna"))
    ]
    assert list(decisions(entries)) == [f"{HELD}: a fault"]
