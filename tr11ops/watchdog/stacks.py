"""Keeps the stacks of a hanging job's workers: before people are told of the hang, so that the mail
names who holds the others up, and before the job is ended, for without them no one learns why it
hung.

They are collected as `tr11 stacks` collects them, and kept as `tr11ops.rundir.attempts` says.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from tr11ops.base.deadline import within
from tr11ops.base.errors import Late, SchedulerError
from tr11ops.base.observed import cause
from tr11ops.base.units import counted
from tr11ops.cluster.base import Job
from tr11ops.cluster.slurm_command import follow_command
from tr11ops.detect.detector import Finding
from tr11ops.detect.progress import HANGING, stacks_since
from tr11ops.diagnose.stacks.collect import AskedAttempt, CommandFollower, collect
from tr11ops.diagnose.stacks.look import StacksLook
from tr11ops.diagnose.stacks.records import look_at_records
from tr11ops.diagnose.stacks.screen import lines, text_of
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.attempts import (
    LOOKS_APART_SECONDS,
    KeptStacks,
    add_kept_stacks,
    stacks_folder,
)
from trainer.contract.files import make_shared, write_atomically
from trainer.contract.paths import RunPaths

NODE_SECONDS = 60.0  # a node that has not answered by then is dead itself
BEFORE_MAIL_SECONDS = 30.0  # of a hang that no one has been told of yet
# beside the nodes: what the run directory may take to read heartbeats and keep the answers
FILES_SECONDS = 10.0
SECOND_LOOK_SECONDS = 5.0  # what must be left for one
VERDICT = "verdict.txt"


def take_missing_stacks(
    paths: RunPaths,
    snapshot: Snapshot,
    findings: Iterable[Finding],
    environment: Mapping[str, str],
    follow: CommandFollower = follow_command,
) -> tuple[str, ...]:
    """Keep the stacks of each job that hangs and was not looked at since; returns what went wrong,
    a line each.

    Nothing is raised, and it takes no longer than its deadline: people are to hear of a hang in any
    case.
    """
    notes = []
    for job in hanging_jobs(snapshot, findings):
        try:
            within(
                BEFORE_MAIL_SECONDS + FILES_SECONDS,
                lambda job=job: keep_stacks(  # type: ignore[misc]
                    paths,
                    job.raw_id,
                    nodes=job.nodes,
                    node_count=len(job.nodes) or job.node_count,
                    environment=environment,
                    now=snapshot.time,
                    is_local=snapshot.scheduler != "slurm",
                    follow=follow,
                    seconds=BEFORE_MAIL_SECONDS,
                ),
            )
        except (SchedulerError, OSError, ValueError, Late) as error:
            notes.append(f"the stacks of job {job.job_id} could not be taken: {cause(error)}")
    return tuple(notes)


def hanging_jobs(snapshot: Snapshot, findings: Iterable[Finding]) -> tuple[Job, ...]:
    """The jobs that hang and are to be looked at now: not looked at since they do, or in one look that
    named a node, which a second one has to confirm. Of a job that is only watched none are asked for,
    since its processes are left alone.
    """
    if snapshot.run.is_watched:
        return ()
    return tuple(
        job
        for finding in findings
        if finding.detector in HANGING and finding.since is not None
        for job in snapshot.active_jobs
        if job.job_id == finding.subject and _wants_look(snapshot, job, finding.since)
    )


def _wants_look(snapshot: Snapshot, job: Job, since: float) -> bool:
    kept = stacks_since(snapshot, job, since)
    if kept is None:
        return True
    is_second_due = snapshot.time - kept.time >= LOOKS_APART_SECONDS
    return len(kept.nodes) == 1 and is_second_due and not kept.is_confirmed(since)


def keep_stacks(
    paths: RunPaths,
    job_id: str,
    nodes: tuple[str, ...],
    node_count: int,
    environment: Mapping[str, str],
    now: float,
    is_local: bool = False,
    follow: CommandFollower = follow_command,
    seconds: float = NODE_SECONDS,
) -> str:
    """Ask every node of a job for the stacks of its workers; returns in words what came.
    `node_count`: without names.

    `now` is the moment by the run's clock. Nodes have `seconds` to answer. Raises SchedulerError
    when no stacks came, SchedulerUnreachable when srun was silent, OSError for the folder.
    """
    folder = stacks_folder(paths, job_id)
    make_shared(folder)
    asked = AskedAttempt(
        job_id, paths.heartbeats, nodes=nodes, is_local=is_local, node_count=node_count
    )
    look = _look(paths, asked, environment=environment, follow=follow, seconds=seconds)
    reported = [answer for answer in look.collected.answers if answer.workers]
    if not reported:
        why = look.collected.trouble or f"no worker of job {job_id} runs there"
        raise SchedulerError(f"no node told the stacks of its workers: {why}")
    for answer in reported:
        write_atomically(folder / f"{answer.node}.txt", text_of(answer.node, answer.workers))
    write_atomically(folder / VERDICT, "".join(f"{line}\n" for line in lines(look)))
    verdict = look.verdict
    kept = KeptStacks(
        job_id,
        now,
        sentence=verdict.sentence,
        ranks=verdict.ranks,
        nodes=verdict.nodes,
        is_certain=verdict.is_certain,
        waits=tuple(dict.fromkeys(group.wait.kind.value for group in look.groups)),
        mark=look.mark,
    )
    add_kept_stacks(paths, kept)
    return f"the stacks of {counted(len(reported), 'node')} are in {folder}: {verdict.sentence}"


def _look(
    paths: RunPaths,
    asked: AskedAttempt,
    environment: Mapping[str, str],
    follow: CommandFollower,
    seconds: float,
) -> StacksLook:
    """One look, and a second one where the first names no one: who computes there too is not just
    on his way.
    """
    until = time.monotonic() + seconds
    records = look_at_records(paths.flight_records(asked.job_id))
    collected = collect(asked, environment, seconds, follow=follow)
    look = StacksLook.after(None, asked.job_id, time.time(), collected, records)
    left = until - time.monotonic()
    if look.verdict.needs_person or not collected.workers or left < SECOND_LOOK_SECONDS:
        return look
    again = collect(asked, environment, left, follow=follow)
    if len(again.workers) < len(collected.workers):
        return look
    return StacksLook.after(look, asked.job_id, time.time(), again, records)
