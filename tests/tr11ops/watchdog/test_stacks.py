"""The stacks of a hanging job's workers are kept before it ends: what some nodes told is enough,
none is no evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.slurm_command import CommandResult
from tr11ops.diagnose.stacks.worker import Frame, NodeStacks, WorkerStack
from tr11ops.rundir.attempts import read_kept_stacks, stacks_folder
from tr11ops.watchdog.stacks import keep_stacks
from trainer.contract.paths import RunPaths

JOB = "1234567"
NODES = ("n0", "n1", "n2")
WAITS = (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 2810),)


class Srun:
    """Answers for some nodes; rank 1, on n1, is stopped."""

    def __init__(self, *nodes: str, unreachable: bool = False):
        self.nodes, self.unreachable, self.asked = nodes, unreachable, list[list[str]]()

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_seconds: float,
        on_line: Callable[[str], object],
    ) -> CommandResult:
        self.asked.append(list(arguments))
        if self.unreachable:
            raise SchedulerUnreachable("srun cannot be started")
        for node in self.nodes:
            rank = int(node[1:])
            worker = WorkerStack(rank, node, 100 + rank, "T" if rank == 1 else "S", WAITS)
            for line in NodeStacks(node, (worker,)).lines():
                on_line(line)
        return CommandResult(1, "", "srun: error: n3: task 2: Exited with exit code 1\n")


def test_what_some_nodes_told_is_enough(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    assert read_kept_stacks(paths, JOB) is None
    srun = Srun("n0", "n1")
    reported = keep_stacks(paths, JOB, NODES, 3, {}, 5.0, follow=srun)
    assert (
        reported.startswith("the stacks of 2 nodes are in ")
        and "rank 1 on node n1 is stopped" in reported
    )
    assert read_kept_stacks(paths, JOB) is not None and {
        "--overlap",
        f"--jobid={JOB}",
        "--nodes=3",
    } <= set(srun.asked[0])
    kept = {path.name: path.read_text() for path in stacks_folder(paths, JOB).iterdir()}
    assert set(kept) == {"n0.txt", "n1.txt", "verdict.txt", "verdict.json"}
    assert kept["n0.txt"].startswith("rank 0, process 100, state S\n    all_reduce (torch/")
    assert kept["verdict.txt"].startswith(
        "rank 1 on node n1 is stopped (SIGSTOP); 1 rank waits for it in all-reduce"
    )


def test_no_word_from_any_node_is_an_error_and_no_evidence(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    with pytest.raises(
        SchedulerError, match="no node told the stacks of its workers: srun: error: n3"
    ):
        keep_stacks(paths, JOB, NODES, 3, {}, 5.0, follow=Srun())
    with pytest.raises(SchedulerUnreachable):
        keep_stacks(paths, JOB, NODES, 3, {}, 5.0, follow=Srun(unreachable=True))
    assert read_kept_stacks(paths, JOB) is None and stacks_folder(paths, JOB).is_dir()
