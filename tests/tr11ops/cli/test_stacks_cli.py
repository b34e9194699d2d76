"""`tr11 stacks` on the embedded scheduler: real processes of a running job, one of them stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.trainings import measure, running
from tests.tr11ops.diagnose.stacks.processes import require_stacks
from tests.waiting import until

# A package whose names are those of a real training's collective: what is told of a stack are
# names.
COLLECTIVE = "import time\n\n\ndef all_reduce():\n    time.sleep(3000)\n"
WORKER = """
import os, sys
from pathlib import Path
from torch.distributed import distributed_c10d
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
distributed_c10d.all_reduce()
"""
RANKS = 3


@pytest.fixture
def job(bench: LocalBench) -> Iterator[str]:
    """A job of the run with three workers; their process numbers are in the files pids/RANK."""
    require_stacks()
    pids = bench.folder / "pids"
    pids.mkdir()
    (bench.folder / "worker.py").write_text(WORKER)
    package = bench.folder / "torch" / "distributed"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / "distributed_c10d.py").write_text(COLLECTIVE)
    start = (
        f"TR11_JOB_ID=$SLURM_JOB_ID TR11_NODE_NAME=local-node1 {sys.executable} worker.py {pids} &"
    )
    script = "\n".join([*(f"RANK={rank} {start}" for rank in range(RANKS)), "wait"])
    number = running(bench, script)
    until(lambda: len(list(pids.glob("*"))) == RANKS, "the start of the workers")
    yield number


def stacks(bench: LocalBench, *words: str) -> Answer:
    return bench.tr11("stacks", "--run", str(bench.card), "--scheduler", "local", *words)


def until_all_wait(bench: LocalBench) -> Answer:
    """The first answer in which every rank stands in its collective."""
    until = time.monotonic() + 300
    while True:
        found = stacks(bench, "--json", "--timeout", "200s")
        if [(group["kind"], group["ranks"]) for group in found.json["groups"]] == [
            ("collective", [0, 1, 2])
        ]:
            return found
        assert time.monotonic() < until, found.out
        time.sleep(0.1)


def pid(bench: LocalBench, rank: int) -> int:
    return int((bench.folder / "pids" / str(rank)).read_text())


def test_a_stopped_rank_is_named(bench: LocalBench, job: str) -> None:
    all_wait = until_all_wait(bench)
    assert all_wait.code == 0 and all_wait.json["job"] == job
    os.kill(pid(bench, 1), signal.SIGSTOP)
    shown = stacks(bench, "--timeout", "200s", "--job", job)
    assert shown.code == 1
    assert (
        shown.out.splitlines()[0]
        == "rank 1 on node local-node1 is stopped (SIGSTOP); 2 ranks wait for it in"
    )
    assert f"rank 1, process {pid(bench, 1)}, innermost first:" in shown.out
    document = stacks(bench, "--json", "--timeout", "200s").json
    assert document["odd"] == {
        "ranks": [1],
        "nodes": ["local-node1"],
        "kind": "stopped",
        "certain": True,
    }
    os.kill(pid(bench, 1), signal.SIGCONT)


def test_the_slow_node_is_named_in_the_words_of_the_status(bench: LocalBench, job: str) -> None:
    assert until_all_wait(bench).json["slow_nodes"]["state"] == "unmeasured"
    measure(bench, job, "local-node1", (1.0, 1.0, 5.0))
    told = bench.tr11("status", "--run", str(bench.card), "--scheduler", "local", "--json").json
    assert told["slow_nodes"]["nodes"] == ["local-node1"]
    assert stacks(bench, "--json", "--timeout", "200s").json["slow_nodes"] == told["slow_nodes"]
    shown = stacks(bench, "--timeout", "200s")
    assert shown.code == 0, "that a rank is slow is no hang"
    assert told["slow_nodes"]["text"] in " ".join(shown.out.split())
    assert max(map(len, shown.out.splitlines())) <= 80


def test_watching_marks_what_stands(
    bench: LocalBench, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    until_all_wait(bench)
    looks = iter([0.0, 0.0])

    def sleep(seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr("tr11ops.cli.progress.time", clock)
    found = stacks(bench, "--watch", "5", "--json", "--timeout", "200s")
    documents = [json.loads(line) for line in found.out.splitlines()]
    assert [document["groups"][0]["looks"] for document in documents] == [1, 2, 3]
    assert found.code == 1 and documents[-1]["odd"]["ranks"] == [0, 1, 2], (
        "all stand in one operation"
    )


def test_the_flight_recorder_names_who_did_not_come(bench: LocalBench, job: str) -> None:
    until_all_wait(bench)
    folder = run_directory(bench).paths.flight_records(job)
    folder.mkdir(parents=True)
    for path in (Path(__file__).parents[2] / "data" / "stacks").glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    found = stacks(bench, "--json", "--timeout", "200s")
    assert found.code == 1 and found.json["odd"]["ranks"] == [2]
    assert (
        found.json["verdict"]
        == "rank 2 did not enter all-reduce 2 of group default_pg; ranks 0-1 wait in it"
    )


def test_nothing_that_runs_is_one_line(bench: LocalBench) -> None:
    run_directory(bench).root.mkdir()
    found = stacks(bench)
    assert found.code == 1 and len(found.err.splitlines()) == 1
    assert (
        "no attempt of this run is running; for one that has ended: `tr11 diagnose --run "
        in found.err
    )
    number = running(bench, "exec sleep 600")
    found = stacks(bench, "--job", "99")
    assert (
        found.code == 1
        and found.err == f"tr11: --job 99: is no running attempt of this run; running: {number}\n"
    )
    found = stacks(bench, "--job", number)
    assert (found.code, "no worker of this attempt runs on its nodes" in found.out) == (0, True)
    found = stacks(bench, "30")
    assert found.code == 2 and "SECONDS (30) goes with --watch: tr11 stacks --watch 30" in found.err
