"""The circuit breaker's count: a fault burns at most two tasks of an array, whatever else of tr11
is alive.

The task that fails is the one that acts (see `remedy`): where other nodes help, it bars the bad one
from the waiting tasks; where they would not, or have not, it holds them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Unknown, observed
from tr11ops.base.units import counted
from tr11ops.cluster.base import JobState, Scheduler
from tr11ops.observe.files import read_details
from tr11ops.rundir.attempts import (
    SUPERSEDED,
    LaunchRecord,
    attempts_before,
)
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_steps,
    read_latest,
)
from trainer.contract.files import write_atomically
from trainer.contract.lease import clocks_of, living_claim
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.recovery import read_recovery
from trainer.contract.resumable import ResumeNeed, search, size_faults

NO_VERDICT = "it ended without a word"
TIMED_OUT = "it was killed at its time limit"
UNTOLD = frozenset({NO_VERDICT, TIMED_OUT})  # faults of which no one could say more
OUT_OF_TIME = "the job's time limit left no time to train"
LEAVING_SECONDS = 60.0  # for a job that is over to give its nodes back
# ends that someone wanted, or that the next node may not meet: they tell nothing of a fault that
# would come again
WANTED = frozenset({JobState.CANCELLED, JobState.PREEMPTED, JobState.PENDING})


class Burned(Record):
    """An attempt that failed without any progress."""

    job_id: str
    fault: str


def must_hold(fault: str, before: Sequence[Burned], most: int) -> str:
    """Why the waiting tasks must be held after an attempt that failed without progress; "" when
    they may go on.

    `before`: the attempts just before it that failed without progress too, newest first. `most`
    tasks may be burned by one fault, twice as many by different ones in a row.
    """
    same = 1
    for burned in before:
        if burned.fault != fault:
            break
        same += 1
    if same >= most:
        what = ""
        if fault in UNTOLD:
            what = f" ({fault})"
        return f"{counted(same, 'task was', 'tasks were')} ended by the same fault without progress{what}"
    if len(before) + 1 >= 2 * most:
        return f"{len(before) + 1} tasks in a row ended without progress"
    return ""


def why_not_begin(before: Sequence[Burned], most: int) -> str:
    """Why an attempt holds the waiting tasks in place of training; "" when it may begin.

    What ended with a verdict has held them itself where it must. What was killed could not: the
    next attempt counts it.
    """
    if not before or before[0].fault not in UNTOLD:
        return ""
    return must_hold(before[0].fault, before[1:], most)


def read_burned(
    directory: RunDirectory, job_id: str, scheduler: Scheduler | None = None
) -> tuple[Burned, ...]:
    """The attempts before `job_id` that failed without progress, newest first, up to the first
    other one.

    One without a verdict has failed when no checkpoint was added, whatever it trained: that is
    lost. Of its end the `scheduler` is asked. An attempt that was held for comes to an end too: who
    released the work has looked at it.
    """
    found: list[Burned] = []
    after = _newest_checkpoint(directory.paths)  # when the attempt had ended
    for attempt, verdict in attempts_before(directory.paths, job_id):
        began = checkpoint_before(attempt)
        # an unknown one may be new; an older one was a person's choice
        added = began is not None and after != began
        after = after if began is None else began
        if verdict is not None:
            if verdict.reason == SUPERSEDED:
                continue  # it tells nothing of the fault
            if verdict.fault in WANTED_FAULTS:
                continue
            failed = verdict.reason in {"error", "unexplained"} or verdict.fault == OUT_OF_TIME
            if not failed or verdict.progress or verdict.held:
                break
            found.append(Burned(attempt.name, verdict.fault))
            continue
        state = _state_of(attempt.name, scheduler)
        if state in WANTED or not state.is_final:
            continue
        if added:
            break
        found.append(
            Burned(
                attempt.name,
                fault_of_end(state, read_details(attempt / "attempt.json").get("nodes") or ()),
            )
        )
    return tuple(found)


def has_trained_since(directory: RunDirectory, job_id: str, since: str) -> bool:
    """Whether an attempt after `since` and before `job_id` has added an iteration or a checkpoint,
    as far as records tell; also one that was killed.
    """
    newest = _newest_checkpoint(directory.paths) or 0
    for attempt, verdict in attempts_before(directory.paths, job_id):
        if attempt.name == since:
            return False
        began = checkpoint_before(attempt)
        if (verdict is not None and verdict.progress) or (began is not None and newest > began):
            return True
    return False


def fault_of_end(state: JobState, nodes: Sequence[str]) -> str:
    """What ended an attempt on these nodes, by how its job ended; a batch host that is lost is a
    fault of its own.
    """
    if state is JobState.TIMEOUT:
        return TIMED_OUT
    if state in WANTED:
        return _wanted(state)
    if state in {JobState.NODE_FAIL, JobState.RUNNING} and nodes:
        return f"node {nodes[0]}"
    return NO_VERDICT


def _wanted(state: JobState) -> str:
    return f"its job was ended: {state.value}"


WANTED_FAULTS = frozenset(map(_wanted, WANTED))


def _newest_checkpoint(paths: RunPaths) -> int | None:
    """The step of the newest checkpoint, 0 for none; None where it cannot be told."""
    newest = observed(read_latest, paths.checkpoints)
    if isinstance(newest, Unknown):
        return None
    return newest or 0


def checkpoint_before(attempt: Path) -> int | None:
    """The newest checkpoint when an attempt's first launch began, 0 for none; None where it had no
    launch.
    """
    path = LaunchRecord.path(attempt, 1)
    if not path.exists():
        return None
    step = read_details(path).get("checkpoint_before")
    if isinstance(step, int):
        return step
    return 0


def _state_of(job_id: str, scheduler: Scheduler | None) -> JobState:
    """How a job ended, as far as the scheduler knows; one that it has forgotten, or that had none,
    is over. One that still gives its nodes back is waited for: the next may start meanwhile.
    """
    if scheduler is None:
        return JobState.FAILED
    until = time.monotonic() + LEAVING_SECONDS
    while True:
        try:
            job = scheduler.job(job_id)
        except SchedulerError:
            return JobState.UNKNOWN
        if job is None:
            return JobState.FAILED
        if job.state is not JobState.COMPLETING or time.monotonic() >= until:
            return job.state
        time.sleep(1.0)


# ----------------------------------------------------------------------------- an older checkpoint
# Going on from an older checkpoint, where launches that begin from the newest one fail at one
# step again and again. The newest one is whole, as far as sizes and digests tell, and may be
# wrong all the same. Nothing is renamed: `latest` names the older one, as a person would write
# it there, and the next saves follow it.
def older_sound(paths: RunPaths, step: int, need: ResumeNeed) -> int | None:
    """The newest checkpoint before `step` from which a training resumes; None where there is none.

    Raises OSError, or ValueError for a record of roll-backs that cannot be read.
    """
    older = [one for one in checkpoint_steps(paths.checkpoints) if one < step]
    return search(
        paths.checkpoints,
        read_recovery(paths).usable(older),
        latest=None,
        need=need,
        faults_of=size_faults,
    ).step


def point_to(paths: RunPaths, step: int, job_id: str) -> None:
    """Let `latest` name the checkpoint of `step`, for the launches to come of attempt `job_id` and
    after.

    Raises OSError, also where a trainer of another job has the run.
    """
    holder = living_claim(paths, *clocks_of(paths, time.time()))
    if holder is not None and holder.job_id != job_id:
        raise OSError(f"{holder.told(paths)} has the run: {LATEST_FILE} is not touched")
    write_atomically(paths.checkpoints / LATEST_FILE, checkpoint_name(step))


def point_back(
    paths: RunPaths, tried: int | None, newest: int | None, need: ResumeNeed, job_id: str
) -> bool:
    """Let `latest` name the newest checkpoint again, where it still names the older one that was
    tried in vain.

    Whether it did. Raises OSError or ValueError as the others do.
    """
    if (
        tried is None
        or newest is None
        or newest <= tried
        or read_latest(paths.checkpoints) != tried
    ):
        return False
    if (
        search(paths.checkpoints, [newest], latest=None, need=need, faults_of=size_faults).step
        is None
    ):
        return False
    point_to(paths, newest, job_id)
    return True
