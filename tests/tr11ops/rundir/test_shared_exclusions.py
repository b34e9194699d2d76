"""The runs of a site tell each other of nodes: what is read, what is unknown, and that no writer
loses another's word.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from tr11ops.rundir.exclusion import Exclusion, NodeStanding
from tr11ops.rundir.exclusions import exclude, include, publish, read_shared, read_version, revise
from tr11ops.rundir.paths import RunDirectory, require_run_id, run_id
from trainer.contract.paths import RunPaths


def run(folder: Path, name: str) -> RunDirectory:
    made = RunDirectory(RunPaths(folder / name, "tr11", "main"), folder / name / "kill-switch")
    made.paths.run_record.parent.mkdir(parents=True)
    require_run_id(made, name)
    return made


@pytest.fixture
def site(tmp_path: Path) -> str:
    (tmp_path / "site").mkdir()
    return str(tmp_path / "site")


def test_what_one_run_knows_the_other_reads(tmp_path: Path, site: str) -> None:
    one, two = run(tmp_path, "one"), run(tmp_path, "two")
    assert exclude(one, "x1", why="Xid 79", owner="tr11", days=14)
    assert exclude(
        one, "x2", why="it died", owner="tr11", days=14, state=NodeStanding.AVOID, fault="died"
    )
    assert exclude(one, "x3", why="mine", owner="ana", days=14)
    seen = Exclusion("x4", "it died", "tr11", state="suspect", fault="died")
    assert revise(one, lambda version: replace(version, suspects=(seen,)))
    assert publish(site, one) == publish(site, two) == ""
    found = read_shared(site, two)
    assert found.faults == ()
    assert {(entry.node, entry.state) for entry in found.entries} == {
        ("x1", "exclude"), ("x2", "avoid"), ("x4", "suspect"),
    }  # fmt: skip
    assert read_shared(site, one).entries == () == read_version(two.exclusions).exclusions
    assert include(one, "x1", why="repaired", owner="ana")
    assert publish(site, one) == ""
    assert found.of("x1") and not read_shared(site, two).of("x1")


@pytest.mark.parametrize(
    "text",
    [
        '{"schema": 2, "exclusions": []}',
        '{"exclusions": [{"node": "x1"}]}',
        "{",
        '{"schema": 1}',
        "[]",
        "",
    ],
)
def test_a_list_that_is_none_is_unknown_and_excludes_no_one(
    tmp_path: Path, site: str, text: str
) -> None:
    one, two = run(tmp_path, "one"), run(tmp_path, "two")
    exclude(one, "x5", why="Xid 79", owner="tr11", days=14)
    publish(site, one)
    wrong = Path(site) / f"{'0' * 32}.json"
    wrong.write_text(text)
    (Path(site) / "notes.json").write_text("not a run's list, and none of ours")
    found = read_shared(site, two)
    assert [entry.node for entry in found.entries] == ["x5"]
    [line] = found.faults
    assert str(wrong) in line and "unknown" in line and "\n" not in line


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    one = run(tmp_path, "one")
    away = str(tmp_path / "away")
    [line] = read_shared(away, one).faults
    assert away in line and "unknown" in line
    (tmp_path / "away").write_text("a file")
    assert away in publish(away, one)
    assert read_shared(None, one) == read_shared(None, one) and publish(None, one) == ""


def test_machines_of_one_run_that_write_at_once_lose_nothing(tmp_path: Path, site: str) -> None:
    one, other = run(tmp_path, "one"), run(tmp_path, "two")

    def change(number: int) -> str:
        exclude(one, f"x{number}", why="it died", owner="tr11", days=1)
        return publish(site, one)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(change, range(24))) == {""}
    assert {entry.node for entry in read_shared(site, other).entries} == {
        f"x{number}" for number in range(24)
    }
    newest = json.loads((Path(site) / f"{run_id(one)}.json").read_text())
    assert (
        len(newest["exclusions"]) == 24 and len([*Path(site, f"{run_id(one)}.d").iterdir()]) <= 17
    )
