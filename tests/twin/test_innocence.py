"""The judge of the random faults: an innocent node that was excluded and taken back before anyone
looked is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.twin.fault_judge import InnocenceJudge
from tr11ops.rundir.exclusion import NodeStanding
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, exclude, include
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths

GUILTY = {"x01"}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(
        RunPaths(tmp_path / "run", "tr11", "main"), tmp_path / "run" / "kill-switch"
    )


def exclude_by_tr11(
    directory: RunDirectory, node: str, state: NodeStanding = NodeStanding.EXCLUDE
) -> None:
    assert exclude(directory, node, why="it was seen", owner=AUTOMATIC_OWNER, days=14, state=state)


def take_back(directory: RunDirectory, node: str) -> None:
    assert include(directory, node, why="it was another", owner=AUTOMATIC_OWNER)


def test_an_innocent_node_that_was_excluded_for_a_while_is_found(directory: RunDirectory) -> None:
    judge = InnocenceJudge(directory.exclusions)
    assert judge.excluded(GUILTY) == []
    exclude_by_tr11(directory, "x01")
    exclude_by_tr11(directory, "x02")
    take_back(directory, "x02")
    exclude(directory, "x03", why="a person wants it so", owner="anna", days=None)
    assert judge.excluded(GUILTY) == ["x02"]
    assert judge.excluded(GUILTY) == []  # told once


def test_a_node_that_was_guilty_before_is_innocent_after_its_repair(
    directory: RunDirectory,
) -> None:
    judge = InnocenceJudge(directory.exclusions)
    exclude_by_tr11(directory, "x01")
    take_back(directory, "x01")
    assert judge.excluded(GUILTY) == []
    exclude_by_tr11(directory, "x01")
    assert judge.excluded(set()) == ["x01"]


def test_innocents_that_were_only_avoided_are_listed_each_time(directory: RunDirectory) -> None:
    judge = InnocenceJudge(directory.exclusions)
    for _ in range(2):
        exclude_by_tr11(directory, "x02", NodeStanding.AVOID)
        exclude_by_tr11(directory, "x01", NodeStanding.AVOID)
        exclude_by_tr11(directory, "x03", NodeStanding.SUSPECT)  # left out for one task
        assert judge.excluded(GUILTY) == []
        for node in ("x01", "x02", "x03"):
            take_back(directory, node)
    assert judge.excluded(GUILTY) == []
    assert judge.avoided == ["x02", "x03", "x02", "x03"]


def test_one_that_was_avoided_and_then_excluded_is_found(directory: RunDirectory) -> None:
    judge = InnocenceJudge(directory.exclusions)
    exclude_by_tr11(directory, "x02", NodeStanding.AVOID)
    assert judge.excluded(GUILTY) == []
    exclude_by_tr11(directory, "x02")
    take_back(directory, "x02")
    assert judge.excluded(GUILTY) == ["x02"]


def test_versions_that_nobody_judged_are_no_proof_of_innocence(directory: RunDirectory) -> None:
    judge = InnocenceJudge(directory.exclusions)
    for _ in range(40):
        exclude_by_tr11(directory, "x02")
        take_back(directory, "x02")
    with pytest.raises(AssertionError, match="were never judged"):
        judge.excluded(GUILTY)


def launch(number: int, *blamed: str, end: float | None = 10.0) -> dict[str, Any]:
    return {"job_id": "7", "launch": number, "end": end, "blamed": list(blamed)}


def test_launches_that_blame_an_innocent_are_found_once_though_nothing_is_on_the_list(
    directory: RunDirectory,
) -> None:
    judge = InnocenceJudge(directory.exclusions)
    ended, running = [launch(1, "x01", "x04")], launch(2, end=None)
    assert judge.blamed([*ended, running], GUILTY) == ["x04"]
    assert judge.blamed([*ended, launch(2, "x05")], GUILTY) == ["x05"]
    assert judge.blamed([*ended, launch(2, "x05")], GUILTY) == []
