"""Asking the nodes: one step for all, one each for those it lost, and no one waits for a node that
is silent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.tr11ops.diagnose.stacks.made import worker
from tests.tr11ops.diagnose.stacks.processes import SLEEPS, started
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.slurm_command import CommandResult
from tr11ops.diagnose.stacks import collect as module
from tr11ops.diagnose.stacks.collect import AskedAttempt, collect
from tr11ops.diagnose.stacks.worker import NodeStacks

NODES = ("tw00", "tw01", "tw02")


class Srun:
    """Answers like srun. `lost`: nodes whose probe never answers; `aborts`: a step with one of them
    ends early.
    """

    def __init__(
        self, *lost: str, aborts: bool = False, said: str = "", late: bool = False
    ) -> None:
        self.lost, self.aborts, self.said, self.late = lost, aborts, said, late
        self.commands: list[list[str]] = []

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_seconds: float,
        on_line: Callable[[str], object],
    ) -> CommandResult:
        self.commands.append(list(arguments))
        assert timeout_seconds <= 20 and "SLURM_JOB_ID" not in environment
        [names] = [
            word.removeprefix("--nodelist=").split(",")
            for word in arguments
            if word.startswith("--nodelist=")
        ]
        if self.aborts and set(names) & set(self.lost):
            return CommandResult(1, "", self.said)
        for name in names:
            if name not in self.lost:
                for line in NodeStacks(name, (worker(int(name[-1])),)).lines():
                    on_line(f"{line}\n")
        return CommandResult(None if self.late else 0, "", self.said)


def asked(
    tmp_path: Path, nodes: tuple[str, ...] = NODES, is_local: bool = False, job: str = "77"
) -> AskedAttempt:
    return AskedAttempt(job, tmp_path, nodes, is_local)


def test_one_step_asks_all_nodes(tmp_path: Path) -> None:
    srun, counts = Srun(), list[int]()
    found = collect(
        asked(tmp_path), {"SLURM_JOB_ID": "5", "PATH": "/bin"}, 20.0, counts.append, srun
    )
    assert [one.rank for one in found.workers] == [0, 1, 2] and (found.silent, found.trouble) == (
        (),
        "",
    )
    assert counts == [1, 2, 3] and len(srun.commands) == 1
    assert {"--overlap", "--jobid=77", "--nodes=3", "--ntasks=3", "--kill-on-bad-exit=0"} <= set(
        srun.commands[0]
    )


def test_a_silent_node_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    srun = Srun("tw01", late=True)
    found = collect(asked(tmp_path), {}, 20.0, follow=srun)
    assert found.silent == ("tw01",) and [one.rank for one in found.workers] == [0, 2]
    assert len(srun.commands) == 1, "no time is left to ask again"


def test_a_dead_node_that_ends_the_step_costs_only_itself(tmp_path: Path) -> None:
    srun = Srun("tw01", aborts=True, said="srun: error: Task launch failed on node tw01\n")
    found = collect(asked(tmp_path), {}, 20.0, follow=srun)
    assert found.silent == ("tw01",) and [one.rank for one in found.workers] == [0, 2]
    assert (
        len(srun.commands) == 4 and found.trouble == "srun: error: Task launch failed on node tw01"
    )


def test_another_users_job_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    srun = Srun(
        *NODES,
        aborts=True,
        said="srun: error: Unable to confirm allocation: Access/permission denied\n",
    )
    with pytest.raises(
        SchedulerError,
        match=r"job 77 is another user's, .* ask one of them to type `tr11 stacks --job 77`",
    ):
        collect(asked(tmp_path), {}, 20.0, follow=srun)
    assert len(srun.commands) == 1


def test_no_answer_at_all_is_every_node_silent(tmp_path: Path) -> None:
    found = collect(
        asked(tmp_path), {}, 20.0, follow=Srun(*NODES, aborts=True, said="srun: error: x\n")
    )
    assert (found.answers, found.silent, found.trouble) == ((), NODES, "srun: error: x")


def test_the_machine_itself_is_asked_directly(tmp_path: Path) -> None:
    own = [
        {"TR11_JOB_ID": "local-9", "TR11_NODE_NAME": f"local-node{number}", "RANK": str(number)}
        for number in (1, 2)
    ]
    with started(*((SLEEPS, each) for each in own)) as processes:
        found = collect(asked(tmp_path, ("local-node1", "local-node2"), True, "local-9"), {}, 300.0)
        assert [(one.rank, one.node, one.pid) for one in found.workers] == [
            (number, f"local-node{number}", process.pid)
            for number, process in zip((1, 2), processes, strict=True)
        ]
        assert found.silent == ()


def test_a_machine_that_hangs_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(module, "answers_here", lambda *_: never.wait(3000))
    found = collect(asked(tmp_path, NODES, True), {}, 0.2)
    never.set()
    assert found.silent == NODES and "do not answer" in found.trouble
