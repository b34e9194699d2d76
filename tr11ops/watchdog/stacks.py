"""Keeps the stacks of a hanging job's workers before the job is ended: without them no one learns why it hung.

    state/attempts/JOB/stacks/NODE.txt       every worker of the node
    state/attempts/JOB/stacks/verdict.txt    who stood out

They are collected as `tr11 stacks` collects them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tr11ops.base.units import counted
from tr11ops.cluster.base import SchedulerError
from tr11ops.cluster.slurm_command import follow_command
from tr11ops.diagnose.stacks.collect import AskedAttempt, CommandFollower, collect
from tr11ops.diagnose.stacks.look import StacksLook
from tr11ops.diagnose.stacks.records import look_at_records
from tr11ops.diagnose.stacks.screen import lines, text_of
from trainer.contract.files import write_atomically
from trainer.contract.paths import RunPaths
from trainer.contract.sharing import make_shared

NODE_SECONDS = 60.0  # a node that has not answered by then is dead itself
VERDICT = "verdict.txt"


def folder_of(paths: RunPaths, job_id: str) -> Path:
    """Where the stacks of an attempt are kept."""
    return paths.attempt(job_id) / "stacks"


def has_stacks(paths: RunPaths, job_id: str) -> bool:
    """Whether any were kept. Raises OSError when that cannot be seen."""
    try:
        return any(path.suffix == ".txt" for path in folder_of(paths, job_id).iterdir())
    except FileNotFoundError:
        return False


def keep_stacks(
    paths: RunPaths,
    job_id: str,
    nodes: tuple[str, ...],
    node_count: int,
    environment: Mapping[str, str],
    is_local: bool = False,
    follow: CommandFollower = follow_command,
) -> str:
    """Ask every node of a job for the stacks of its workers; returns in words what came. `node_count`: without names.

    Raises SchedulerError when none came, SchedulerUnreachable when srun was silent, OSError for the folder.
    """
    folder = folder_of(paths, job_id)
    make_shared(folder)
    asked = AskedAttempt(job_id, paths.heartbeats, nodes, is_local, node_count)
    collected = collect(asked, environment, NODE_SECONDS, follow=follow)
    reported = [answer for answer in collected.answers if answer.workers]
    if not reported:
        why = collected.trouble or f"no worker of job {job_id} runs there"
        raise SchedulerError(f"no node told the stacks of its workers: {why}")
    for answer in reported:
        write_atomically(folder / f"{answer.node}.txt", text_of(answer.node, answer.workers))
    look = StacksLook.after(None, job_id, time.time(), collected, look_at_records(paths.flight_records(job_id)))
    write_atomically(folder / VERDICT, "".join(f"{line}\n" for line in lines(look)))
    return f"the stacks of {counted(len(reported), 'node')} are in {folder}: {look.verdict.sentence}"
