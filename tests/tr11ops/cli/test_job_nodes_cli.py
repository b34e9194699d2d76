"""`tr11 nodes check` in a job that is no run's: on the embedded scheduler, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tests.waiting import end_of_file

TR11 = Path(sys.executable).parent / "tr11"


@pytest.fixture
def outside(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> LocalBench:
    """No job around, and no card in the folder that is found by itself."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    assert not (bench.folder / "tr11.toml").exists()
    return bench


def job_around(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("SLURM_JOB_ID", "12")
    patch.setenv("SLURM_JOB_NODELIST", "n[1-2]")


def test_a_job_of_the_embedded_scheduler_checks_its_nodes(outside: LocalBench) -> None:
    """Without a card: all good, then one that a script of one's own calls bad, and what a script
    does with the answer.
    """
    own = outside.folder / "fan.sh"
    own.write_text('#!/bin/bash\n[ "$TR11_FAN" = still ] || exit 0\necho "fan 3"\nexit 1\n')
    own.chmod(0o755)
    number = outside.submit(
        f"set -e\n{TR11} nodes check --json > good.json\n"
        f"LIST=$({TR11} nodes check --need 1 --print good)\necho list=$LIST\n"
        f"set +e\nTR11_FAN=still {TR11} nodes check --script fan.sh --print bad\necho code=$?"
    )
    log = outside.folder / f"{number}.out"
    outside.wait(lambda jobs: all(one.state.is_final for one in jobs if one.raw_id == number))
    said = end_of_file(log)
    found = json.loads((outside.folder / "good.json").read_text())
    assert found["job"] == number and found["gpus_per_node"] == 0, said
    names = [entry["node"] for entry in found["nodes"]]
    assert found["good"] == names and len(names) == 2 and not found["bad"] + found["unknown"]
    checked = {one["name"] for one in found["nodes"][0]["checks"]}
    assert {"memory", "shared-memory", "local-disk", "clock"} <= checked, "as before a launch"
    assert f"list={names[0]}\n" in said and "bad: script:fan.sh: fan 3" in said
    assert "code=1" in said and not list(outside.folder.glob(".tr11*"))


def test_outside_a_job_it_says_so_in_one_line(outside: LocalBench) -> None:
    answer = outside.tr11("nodes", "check")
    assert answer.code == 2 and len(answer.err.splitlines()) == 1
    assert "SLURM_JOB_ID is not set" in answer.err and "--run CARD" in answer.err


@pytest.mark.parametrize(
    "words,said",
    [
        (("n3",), "n3 is not among the nodes of job 12: n[1-2]"),
        (("n[1",), "NODE: "),
        (("--need", "3"), "--need 3: only 2 nodes are there"),
        (("--need", "0"), "--need"),
        (("--skip", "fans"), "--skip fans: no such check"),
        (("--script", "absent.sh"), "--script"),
        (("--script", "plain.sh"), "may not be run"),
        (("--folder", "absent"), "there is no such folder"),
        (("--print", "good", "--json"), "--print and --json"),
        (("--due",), "--due is of a run's exclusions"),
        (("--print", "fine"), "--print"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    outside: LocalBench, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    job_around(monkeypatch)
    (outside.folder / "plain.sh").write_text("#!/bin/bash\n")
    answer = outside.tr11("nodes", "check", *words)
    assert (answer.code, len(answer.err.splitlines())) == (2, 1), answer.err
    assert said in answer.err


def test_what_is_of_a_job_is_refused_of_a_run(outside: LocalBench) -> None:
    answer = outside.tr11("nodes", "check", "--run", str(outside.card), "--print", "good")
    assert answer.code == 2 and "--print is of a job's nodes: give --job too" in answer.err


def test_a_node_list_that_cannot_be_read_is_refused(
    outside: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-")
    answer = outside.tr11("nodes", "check")
    assert answer.code == 2 and "SLURM_JOB_NODELIST" in answer.err
