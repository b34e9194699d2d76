"""Carrying out a launch plan: one launch at a time, everything kept, and no job that no one knows
of.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import LaunchBusy, SchedulerError, SchedulerUnreachable, SubmissionUnknown
from tr11ops.base.observed import known
from tr11ops.base.units import timestamp
from tr11ops.cluster.base import Scheduler
from tr11ops.launch.facts import LaunchFacts
from tr11ops.launch.plan import LaunchPlan
from tr11ops.launch.queue_checks import without_trace
from tr11ops.launch.software import versions_for
from tr11ops.runcard.card import RunCard, card_from_resolved
from tr11ops.rundir.fallback import keep_reserve
from tr11ops.rundir.journal import Journal, user_name
from tr11ops.rundir.kill_switch import mark_switch
from tr11ops.rundir.paths import (
    BEING_SUBMITTED,
    SUPERSEDED,
    RunDirectory,
    Submission,
    SubmissionPaths,
    is_in_doubt,
    job_of_tag,
    require_run_id,
)
from trainer.contract.files import host_name, make_shared, open_shared, write_atomically, write_json
from trainer.contract.state_file import is_damage, set_aside

LOOKUPS = 5
LOOKUP_PAUSE_SECONDS = 2.0


@contextmanager
def launch_lock(path: Path) -> Iterator[None]:
    """Hold the run's launch lock for a block of code. Raises as `hold_launch_lock` does."""
    descriptor = hold_launch_lock(path)
    try:
        yield
    finally:
        os.close(descriptor)


def hold_launch_lock(path: Path) -> int:
    """Take the run's launch lock; returns the open descriptor that holds it, until it is closed.

    Raises LaunchBusy when another launch holds it, OSError when it cannot be made. A file system
    without locks leaves launches unguarded against each other; the trainer's lease on the
    checkpoints still holds.
    """
    make_shared(path.parent)
    try:
        descriptor = open_shared(path, os.O_RDWR)
    except OSError as error:
        if not is_damage(error):
            raise
        set_aside(path)  # a folder, or a link in a circle: there is nothing in it that anyone holds
        descriptor = open_shared(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}:
            return descriptor
        os.close(descriptor)
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            raise LaunchBusy(
                f"another launch or training of this run is under way: {_lock_holder(path)}; look with `tr11 status`"
            ) from None
        raise
    with suppress(OSError):  # a full disk keeps no one from launching
        who = {"who": user_name(), "host": host_name(), "pid": os.getpid(), "time": time.time()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(who).encode(), 0)
    return descriptor


def _lock_holder(path: Path) -> str:
    """Who holds the lock, and since when; in words."""
    try:
        held = json.loads(path.read_bytes())
        since = timestamp(float(held["time"]), UTC)
        return f"{held['who']} on {held['host']}, process {held['pid']}, since {since} ({path})"
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return f"{path} is locked, and does not say by whom"


def keep_inputs(paths: SubmissionPaths, card_toml: str, card: dict[str, Any]) -> None:
    """Keep what a submission was made from: the card as written, as resolved, and the versions of
    what will run.
    """
    write_atomically(paths.card_toml, card_toml)
    write_json(paths.card, card)
    write_json(paths.versions, versions(card_from_resolved(card, "the card")))


def versions(card: RunCard) -> dict[str, str]:
    """Versions of what will run, as far as this machine's installation tells them."""
    return {
        **versions_for(card),
        "host": platform.node(),
        "system": platform.platform(),
    }


def submit(
    plan: LaunchPlan,
    scheduler: Scheduler,
    *,
    card_toml: str,
    user: str,
    why: str = "",
    chain: str = "",
    left: int = 0,
    pause: Callable[[float], None] = time.sleep,
) -> Submission:
    """Keep script, card and versions, submit, and record the job id. The caller holds the launch
    lock.

    What is sent is recorded before, so that a client that dies at any moment leaves its tag to be
    looked up. `chain` and `left` are kept in the record. Raises SchedulerError with the scheduler's
    reason (nothing was submitted), SubmissionUnknown when its answer was lost and the job is not
    found by its comment, OSError when the run directory cannot be written to.
    """
    record = record_before(
        plan, scheduler.name, card_toml=card_toml, user=user, why=why, chain=chain, left=left
    )
    try:
        job_id = scheduler.submit(plan.request)
    except SchedulerUnreachable as error:
        found = look_up(plan.tag, scheduler, pause)
        if found is None:
            record_lost(plan.directory, record, error)
            raise SubmissionUnknown(plan.tag, str(error)) from None
        job_id = found
    except SchedulerError as error:
        record_refused(plan.directory, record, error)
        raise
    return record_taken(plan.directory, record, job_id, why)


# ----------------------------------------------------------------------------- the record, before
# and after
def record_before(
    plan: LaunchPlan,
    scheduler: str,
    *,
    card_toml: str,
    user: str,
    why: str = "",
    chain: str = "",
    left: int = 0,
) -> Submission:
    """Keep what is about to be sent, and that it is. Raises OSError when the run directory cannot
    be written to.
    """
    directory = plan.directory
    request = plan.request
    paths = directory.submission(plan.tag)
    write_atomically(paths.script, request.script)
    keep_inputs(paths, card_toml, plan.card)
    name = plan.card["run"]["name"]
    # one that is damaged is a backup's concern, which refuses to go by it
    with suppress(ValueError):
        require_run_id(directory, name)
        mark_switch(directory, name)
    record = replace(_record(plan, scheduler, user), chain=chain, left=left)
    directory.write_submission(replace(record, note=BEING_SUBMITTED))
    keep_reserve(directory)
    said = {"tag": plan.tag, "array": request.array, "nodes": request.nodes, "scheduler": scheduler}
    if plan.card.get("data", {}).get("on_resume") == "switch":
        said["data_on_resume"] = "switch"
    Journal(directory.journal).write("launch", why, said, user)
    return record


def record_taken(
    directory: RunDirectory, record: Submission, job_id: str, why: str = ""
) -> Submission:
    """The scheduler has taken it as job `job_id`; returns the record that says so. Raises OSError."""
    done = replace(record, job_id=job_id)
    directory.write_submission(done)
    Journal(directory.journal).write(
        "submitted", why, {"tag": record.tag, "job_id": job_id}, record.user
    )
    return done


def record_refused(directory: RunDirectory, record: Submission, error: SchedulerError) -> None:
    """The scheduler has not taken it: there is no such submission. Raises OSError."""
    directory.submission(record.tag).record.unlink(missing_ok=True)
    Journal(directory.journal).write("launch-refused", str(error), {"tag": record.tag}, record.user)


def record_lost(directory: RunDirectory, record: Submission, error: SchedulerError) -> None:
    """No one knows whether it was taken. Raises OSError."""
    directory.write_submission(replace(record, note=f"the scheduler's answer was lost: {error}"))
    Journal(directory.journal).write("launch-unknown", str(error), {"tag": record.tag}, record.user)


def settle(
    directory: RunDirectory,
    facts: LaunchFacts,
    scheduler: Scheduler,
    tag: str,
) -> None:
    """Bring every submission in doubt to an end before `tag` is submitted. The caller holds the
    launch lock.

    Those whose job is found get its number. Of the others the scheduler is asked once more, after a
    while, because a controller that was frozen takes what lay before its door when it wakes; then
    they are superseded by `tag`, so that a job which comes still later leaves at once. Raises
    LaunchBusy when one has come meanwhile.
    """
    doubtful = [entry for entry in known(facts.submissions, ()) if is_in_doubt(entry)]
    if not doubtful:
        return
    jobs = known(facts.jobs, ())
    traces = known(facts.traces, {})
    if without_trace(facts, jobs):
        time.sleep(LOOKUP_PAUSE_SECONDS)
        jobs = scheduler.jobs()
    journal = Journal(directory.journal)
    arrived = []
    for entry in doubtful:
        number = job_of_tag(entry.tag, jobs, traces)
        if number is None:
            done = replace(entry, note=f"{SUPERSEDED}{tag}")
        else:
            done = replace(entry, job_id=number, note="")
        directory.write_submission(done)
        journal.write(
            "submission-settled", done.note, {"tag": entry.tag, "job_id": number}, facts.user
        )
        if number is not None and job_of_tag(entry.tag, known(facts.jobs, ()), traces) is None:
            arrived.append(number)
    if arrived:
        raise LaunchBusy(
            f"job {', '.join(arrived)} of an earlier launch has just come: look with `tr11 status`"
        )


def _record(plan: LaunchPlan, scheduler: str, user: str) -> Submission:
    request = plan.request
    return Submission(
        tag=plan.tag,
        job_id=None,
        scheduler=scheduler,
        time=time.time(),
        user=user,
        host=host_name(),
        run=request.name,
        variant=plan.variant,
        array=request.array,
        nodes=request.nodes,
        card_hash=str(plan.card["derived"]["card_hash"]),
        dependency=request.dependency,
        excluded=request.exclude,
    )


def look_up(
    tag: str, scheduler: Scheduler, pause: Callable[[float], None] = time.sleep
) -> str | None:
    """The job that carries a tag, once the scheduler answers again; None when it does not, or has
    no such job.

    A submission whose answer was lost may have been taken all the same (measured on Slurm 22.05).
    """
    for attempt in range(LOOKUPS):
        if attempt:
            pause(LOOKUP_PAUSE_SECONDS)
        try:
            jobs = scheduler.jobs()
        except SchedulerUnreachable:
            continue
        found = job_of_tag(tag, jobs, {})
        if found is not None:
            return found
    return None
