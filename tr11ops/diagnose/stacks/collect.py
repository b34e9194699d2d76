"""Asks every node of an attempt for the stacks of its workers: through srun, or directly where all
run on one machine.

The one way in which stacks are collected: `tr11 stacks` and the watchdog use it. What nodes did not
tell in time is said, and keeps no one waiting.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from tr11ops.base.deadline import within
from tr11ops.base.errors import Late, SchedulerError, SchedulerUnreachable
from tr11ops.cluster.slurm_command import CommandResult, client_environment, follow_command
from tr11ops.diagnose.stacks.node import answers_here
from tr11ops.diagnose.stacks.worker import AnswerReader, CollectedStacks
from trainer.contract.record import Record
from trainer.contract.units import shortened

NODE_SECONDS = 20.0  # a node that has not answered by then is a row of its own
MOST_AT_ONCE = 64  # steps of one node each
# of it, for the reading itself: the rest is for srun, and for Python to start on a busy node
NODE_SHARE = 0.6


class CommandFollower(Protocol):
    """Runs a command and hands on its lines: see `tr11ops.cluster.slurm_command.follow_command`."""

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_seconds: float,
        on_line: Callable[[str], object],
    ) -> CommandResult: ...


class AskedAttempt(Record):
    """An attempt whose workers are asked for. `nodes`: of its allocation; `is_local`: they are all
    this machine.
    """

    job_id: str
    heartbeats: Path
    nodes: tuple[str, ...]
    is_local: bool
    node_count: int = 1  # where their names are not known


def collect(
    asked: AskedAttempt,
    environment: Mapping[str, str],
    seconds: float = NODE_SECONDS,
    on_answer: Callable[[int], object] = lambda count: None,
    follow: CommandFollower = follow_command,
) -> CollectedStacks:
    """Ask every node, all at once; `on_answer` is told how many have answered.

    Raises SchedulerError for another user's job, SchedulerUnreachable when srun cannot be started.
    """
    if asked.is_local:
        return _from_here(asked, seconds, on_answer)
    return _through_srun(asked, environment, seconds=seconds, on_answer=on_answer, follow=follow)


def _from_here(
    asked: AskedAttempt, seconds: float, on_answer: Callable[[int], object]
) -> CollectedStacks:
    try:
        answers = within(
            seconds,
            lambda: answers_here(asked.heartbeats, asked.job_id, None, max(1.0, seconds - 2.0)),
        )
    except Late:
        return CollectedStacks(
            (), asked.nodes, "this machine's processes, or the heartbeats' disk, do not answer"
        )
    on_answer(len(answers))
    # a node without a worker is a spare one: the machine has answered for it
    return CollectedStacks(answers)


def _through_srun(
    asked: AskedAttempt,
    environment: Mapping[str, str],
    seconds: float,
    on_answer: Callable[[int], object],
    follow: CommandFollower,
) -> CollectedStacks:
    """One step over all nodes. Where it ends without some, as it does for a dead node, each of
    these gets its own.
    """
    until = time.monotonic() + seconds
    reader, lock, client = AnswerReader(), threading.Lock(), client_environment(environment)

    def take(line: str) -> None:
        with lock:
            if reader.feed(line) is not None:
                on_answer(len(reader.answers))

    def ask(nodes: tuple[str, ...]) -> CommandResult:
        left = max(1.0, until - time.monotonic())
        return follow(
            srun_command(asked, nodes, left), environment=client, timeout_seconds=left, on_line=take
        )

    result = ask(asked.nodes)
    said = _one_line(result.stderr)
    if result.returncode not in (0, None) and _is_no_right(said):
        raise SchedulerError(_no_right(asked.job_id, said))
    missing = tuple(node for node in asked.nodes if node not in reader.answers)
    if missing and result.returncode is not None and len(asked.nodes) > 1:
        with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
            list(pool.map(lambda node: ask((node,)), missing))
        missing = tuple(node for node in missing if node not in reader.answers)
    answers = tuple(reader.answers[node] for node in sorted(reader.answers))
    if not answers and not asked.nodes:
        raise SchedulerUnreachable(
            f"srun reached no node of job {asked.job_id}{f' ({said})' if said else ''}"
        )
    if reader.garbled:
        said = f"{said} (the answer of {', '.join(sorted(reader.garbled))} was garbled)".strip()
    return CollectedStacks(answers, missing, said if missing else "")


def _one_line(text: str) -> str:
    return shortened(" ".join(text.split()), 300)


def srun_command(asked: AskedAttempt, nodes: tuple[str, ...], seconds: float) -> list[str]:
    """One probe on each of these nodes, beside what runs there; one that fails ends no other."""
    count = str(len(nodes) or asked.node_count)
    return [
        "srun",
        f"--jobid={asked.job_id}",
        "--overlap",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        *([f"--nodelist={','.join(nodes)}"] if nodes else []),
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--input=none",
        f"--immediate={max(1, round(seconds))}",
        sys.executable,
        "-m",
        "tr11ops.diagnose.stacks.node",
        str(asked.heartbeats),
        asked.job_id,
        f"{seconds * NODE_SHARE:g}",
    ]


def _is_no_right(said: str) -> bool:
    return "ermission denied" in said or "nvalid user" in said


def _no_right(job_id: str, said: str) -> str:
    return (
        f"job {job_id} is another user's, and srun lets only its owner and root look into it: "
        f"ask one of them to type `tr11 stacks --job {job_id}` ({said})"
    )
