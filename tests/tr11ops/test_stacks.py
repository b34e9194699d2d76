"""The stacks of a hanging job's workers: real processes are found by their environment, and a dead node stops nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tr11ops.cluster.base import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.slurm_command import CommandResult
from tr11ops.stacks import folder_of, has_stacks, keep_stacks, probe
from trainer.contract import Heartbeat, RunPaths, write_heartbeat

JOB = "1234567"


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Ranks 8 and 9 on node a, rank 16 on node b, and two processes whose environment names no rank."""
    started = []
    for node, rank in (("a", "9"), ("a", "8"), ("b", "16"), ("a", ""), ("a", "")):
        own = {"TR11_JOB_ID": JOB, "SLURMD_NODENAME": node, "PATH": os.environ["PATH"], "RANK": rank}
        code = "import time; print(flush=True); time.sleep(600)"
        started.append(subprocess.Popen([sys.executable, "-c", code], env=own, stdout=subprocess.PIPE))
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_a_probe_tells_of_the_workers_of_its_node(workers: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    beats, kept = tmp_path / "heartbeat", tmp_path / "stacks"
    kept.mkdir()
    write_heartbeat(beats / "7.json", Heartbeat(7, "a", workers[4].pid, "training", 5, 1.0, JOB))
    (beats / "8.json").write_text("{")
    assert probe(kept, beats, JOB, "a") == 0
    text = (kept / "a.txt").read_text()
    ranks = [line.split(",")[0] for line in text.splitlines() if line.startswith("rank ")]
    assert ranks == ["rank 7", "rank 8", "rank 9"]
    assert f"rank 8, process {workers[1].pid}" in text and f"thread {workers[1].pid}: state S" in text
    assert probe(kept, beats, JOB, "c") == 1 and probe(kept, beats, "999", "a") == 1
    assert [path.name for path in kept.iterdir()] == ["a.txt"]


class Srun:
    """Answers like srun, after it has let some nodes write their files."""

    def __init__(self, *nodes: str, silent: bool = False):
        self.nodes, self.silent, self.asked = nodes, silent, list[str]()

    def __call__(self, arguments: Sequence[str], *, directory: Path | None = None, **_: Any) -> CommandResult:
        self.asked = list(arguments)
        assert directory is not None
        for node in self.nodes:
            (directory / f"{node}.txt").write_text("rank 0\n")
        if self.silent:
            raise SchedulerUnreachable("srun did not answer within 60 s")
        return CommandResult(1, "", "srun: error: n3: task 2: Exited with exit code 1\n")


def test_what_some_nodes_told_is_enough(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    assert not has_stacks(paths, JOB)
    srun = Srun("n1", "n2")
    assert keep_stacks(paths, JOB, 3, {}, srun).startswith("the stacks of 2 nodes are in ")
    assert has_stacks(paths, JOB) and {"--overlap", f"--jobid={JOB}", "--nodes=3"} <= set(srun.asked)
    assert keep_stacks(paths, "2", 3, {}, Srun("n1", silent=True)).startswith("the stacks of 1 node are in ")


def test_no_word_from_any_node_is_an_error_and_no_evidence(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    with pytest.raises(SchedulerError, match="no node told the stacks of its workers: srun: error: n3"):
        keep_stacks(paths, JOB, 3, {}, Srun())
    with pytest.raises(SchedulerUnreachable):
        keep_stacks(paths, JOB, 3, {}, Srun(silent=True))
    assert not has_stacks(paths, JOB) and folder_of(paths, JOB).is_dir()
