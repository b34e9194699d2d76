"""What a failing attempt does about its fault: excludes bad nodes, holds the queued jobs, writes
its verdict.

Whatever asks the scheduler is done beside the launches, one thing after another, so that no launch
waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from msgspec.structs import replace

from tr11ops.agent.attempt_context import AttemptContext
from tr11ops.agent.node_exclusions import Background, NodeExclusions, in_background
from tr11ops.agent.step import LineTee
from tr11ops.base.errors import SchedulerError
from tr11ops.base.now import now
from tr11ops.cluster.base import JobScheduler, JobState, Scheduler
from tr11ops.observe.files import read_details
from tr11ops.observe.liveness import gone_host, has_lost_its_host, seconds_to_wait
from tr11ops.observe.look import facts_of, observe
from tr11ops.queue.queued_jobs import PendingChanges, PendingJobs
from tr11ops.rundir.attempts import (
    SUPERSEDED,
    AttemptVerdict,
    attempts_before,
    attempts_without_verdict,
)
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, publish
from tr11ops.rundir.hold_store import forget_holds, record_holds
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory, Submission
from trainer.contract.attempt import EXIT_FINE
from trainer.contract.paths import ATTEMPT_FILE
from trainer.contract.record import Record


class Mitigation(Background):
    """The effects of one attempt on the run's other work. `waiting` is None in the foreground.

    The run's nodes are `exclusions`, which have a thread of their own: a hold that the scheduler
    refuses is tried for minutes.
    """

    def __init__(self, context: AttemptContext, waiting: PendingJobs | None, tee: LineTee) -> None:
        super().__init__(context, waiting, tee)
        self._held: Future[PendingChanges] | None = None
        self.exclusions = NodeExclusions(context, waiting, tee)

    # ------------------------------------------------------------------ the queued jobs
    def hold(self, switch: str = "") -> None:
        """Begin to hold all of the run's queued jobs, once. What is held for a switch is put on
        record at once.
        """
        if self._waiting is not None and self._held is None:
            self._held = self._thread.submit(self._hold, self._waiting, switch)

    def _hold(self, waiting: PendingJobs, switch: str) -> PendingChanges:
        held = waiting.hold()
        if switch and held.changed:
            is_recorded = self._on_record(
                lambda: record_holds(
                    self._context.directory,
                    held.changed,
                    who=AUTOMATIC_OWNER,
                    why=switch,
                    switch=switch,
                )
            )
            if not is_recorded:
                self._mark(held.changed, switch, is_for_fault=False)
        return held

    def _on_record(self, change: Callable[[], None]) -> bool:
        """Write a record; whether it is in the run directory, and not in an empty one that hides
        it.
        """
        try:
            change()
        except OSError as error:
            self._say(f"what is held could not be put on record: {error}")
            return False
        return (self._context.folder / "attempt.json").exists()

    def _mark(self, held: tuple[str, ...], why: str, is_for_fault: bool) -> None:
        """Leave word of a hold with the held jobs, where the run directory has none of it."""
        if self._waiting is None or not held:
            return
        try:
            self._waiting.mark_held(held, why, is_for_fault)
            where = "who holds it, and why, is in the comment of"
        except SchedulerError as error:
            where = f"no record remains ({error}); release by hand what is held of"
        self._say(f"the run directory is away or cannot be written: {where} job {', '.join(held)}")

    def has_longer(self, seconds: float) -> bool:
        """Whether any of the queued jobs has a limit beyond these seconds; an unknown queue has
        none.
        """
        if self._waiting is None:
            return False
        try:
            queued = self._waiting.retry(self._waiting.look)
        except SchedulerError as error:
            self._say(f"the limits of the queued jobs are not known: {error}")
            return False
        return any(
            job.time_limit_seconds is None or job.time_limit_seconds > seconds for job in queued
        )

    @in_background
    def queue_behind(self, job_id: str) -> None:
        """Begin to make the array's other tasks wait for the end of job `job_id`, where the
        scheduler may take a job that lost a node for ended, and start the next task beside it.
        """
        ordering = self._context.ordering
        if ordering is not None and self._waiting is not None:
            self._waiting.run_after(ordering, job_id)

    @in_background
    def cancel(self, job_id: str) -> None:
        """Begin to end a job that nothing works in any more."""
        if self._context.scheduler is None:
            return
        label = self._context.label_of(job_id)
        try:
            self._context.scheduler.cancel(label)  # its number may be the whole array's
            self._say(f"job {label} had lost its batch host: cancelled")
        except SchedulerError as error:
            self._say(f"job {label} has lost its batch host and cannot be cancelled: {error}")

    def give_back(self, ordering: JobScheduler) -> None:
        """Put this very task back into the queue, and wait to be ended: it has done nothing, and is
        not used up.
        """
        try:
            ordering.requeue(self._context.job_id)
        except SchedulerError as error:
            words = "cannot be put back into the queue: its task is used up"
            self._say(f"job {self._context.allocation.label} {words}: {error}")

    def release(self) -> None:
        """Undo `hold`: its reason has gone."""
        if self._waiting is not None and self._held is not None:
            self._release(self._waiting, self._held)
            self._held = None

    @in_background
    def _release(self, waiting: PendingJobs, held: Future[PendingChanges]) -> None:
        numbers = held.result().changed
        done = waiting.release(numbers)
        # the rest is for `tr11 resume`, which goes by the record
        gone = numbers if done.complete else done.numbers
        self._on_record(lambda: forget_holds(self._context.directory, gone))

    @in_background
    def note(self, kind: str, why: str, data: dict[str, Any]) -> None:
        """Begin to write to the journal. One that cannot be written is said, and stops nothing."""
        try:
            Journal(self._context.directory.journal).write(
                kind, why, {"job_id": self._context.job_id, **data}, AUTOMATIC_OWNER
            )
        except OSError as error:
            self._say(f"the journal cannot be written: {error}")

    # ------------------------------------------------------------------ the end
    def wait(self) -> None:
        self.exclusions.wait()
        super().wait()

    def close(self) -> None:
        self.exclusions.close()
        super().close()

    def finish(self, verdict: AttemptVerdict, hold: str = "", switch: str = "") -> int:
        """Hold the queued jobs if `hold` says why, write the verdict, and return the batch script's
        exit status.

        `switch`: the kill switch or pause for which alone it is held; nothing speaks against going
        on without that.
        """
        self.wait()
        if hold:
            verdict = self._finish_hold(verdict, hold, switch)
        verdict = replace(
            verdict,
            job_id=self._context.job_id,
            submission=self._context.submission,
            time=now(),
        )
        if not self._write(verdict):
            self._mark(verdict.held, verdict.held_because, is_for_fault=not switch)
        saved = ""
        if verdict.checkpoint_step is not None:
            saved = f", checkpoint {verdict.checkpoint_step}"
        where = ""
        if verdict.iteration is not None:
            where = f" at iteration {verdict.iteration}{saved}"
        detail = ""
        if verdict.exit_status != EXIT_FINE:
            detail = f": {verdict.message}"
        self._say(
            f"attempt {self._context.allocation.label} ended: {verdict.reason}{where}{detail}"
        )
        self.wait()
        untold = publish(self._context.config.resilience.shared_exclusions, self._context.directory)
        if untold:
            self._say(untold)
        self.close()
        return verdict.exit_status

    def _write(self, verdict: AttemptVerdict) -> bool:
        """Whether the verdict is on record, where a later look finds it."""
        is_there = (self._context.folder / "attempt.json").exists()
        try:
            verdict.write(self._context.folder)
        except OSError as error:
            self._say(f"the verdict could not be recorded: {error}")
            return False
        return is_there

    def _finish_hold(self, verdict: AttemptVerdict, why: str, switch: str) -> AttemptVerdict:
        self.hold(switch)
        held: tuple[str, ...] = ()
        complete = True
        if self._held is not None:
            error = self._held.exception()
            if error is not None:
                changes = PendingChanges((), (), False)
            else:
                changes = self._held.result()
            # what was held before is no one's to release after a switch; after a fault nothing of
            # it may start either
            held = changes.changed if switch else changes.numbers
            complete = changes.complete
            if error is not None:
                self._say(f"{type(error).__name__} while the waiting tasks were held: {error}")
        if verdict.exit_status != EXIT_FINE and held:
            self._say(
                f"ALERT: job {', '.join(held)} is held, nothing trains: {why} (runbook: array-held)"
            )
        if not complete:
            self._say("not all that waits could be held: the next task will not train either")
        if held or not complete:
            data = {
                "jobs": list(held),
                "complete": complete,
                "cause": verdict.cause,
                "fault": verdict.fault,
            }
            self.note("array-held", why, data)
            super().wait()  # before the verdict
        restart = verdict.restart and bool(switch)
        return replace(
            verdict,
            restart=restart,
            held=held,
            hold_failed=not complete,
            held_because=why,
            held_for=switch,
        )


def forbidding_verdict(context: AttemptContext) -> AttemptVerdict | None:
    """The verdict of the attempt before, if it wanted this one held and could not do it; else None.

    It speaks for what waited then: not for a submission made later, nor where a person has released
    what was held.
    """
    for _, verdict in attempts_before(context.directory.paths, context.job_id):
        if verdict is None or verdict.reason == SUPERSEDED:
            continue
        if not verdict.hold_failed:
            return None
        try:
            record = Submission.read(context.directory.submission(context.submission).record)
        except (OSError, ValueError):
            record = None
        if record is None or record.time < verdict.time:
            return verdict
        return None
    return None


class ConcurrentAttempt(Record):
    """Another attempt of the same submission, whose job still runs.

    `is_zombie`: it has lost its batch host. `seconds_to_wait`: how much longer its trainers must be
    silent before they count as gone, 0 when they do. `gone_host`: its batch host, where the
    scheduler says now that it is gone; else "".
    """

    job_id: str
    is_zombie: bool
    seconds_to_wait: float
    gone_host: str = ""


def concurrent_attempt(context: AttemptContext, scheduler: Scheduler) -> ConcurrentAttempt | None:
    """The attempt that runs beside this one; None where there is none. Raises SchedulerError where that
    is not known.

    A job that lives on without a dead node counts as ended for its array (Slurm 22.05), so the next
    task starts. If the dead node was the batch host, no script ends the job any more, and it holds
    its other nodes for ever; its trainers may live on.
    """
    for folder in attempts_without_verdict(context.directory.paths, context.job_id):
        if read_details(folder / ATTEMPT_FILE).get("submission") != context.submission:
            continue
        job = scheduler.job(folder.name)
        if job is not None and job.state is JobState.RUNNING:
            seen = observe(context.directory, facts_of(context.config), scheduler, now())
            return ConcurrentAttempt(
                folder.name,
                has_lost_its_host(seen, job),
                seconds_to_wait(seen, job),
                gone_host(seen, job),
            )
    return None


def switch_of(directory: RunDirectory) -> str:
    """What stops everything of this run that waits: "kill-switch", "pause", or ""."""
    if directory.kill_switch_is_set():
        return "kill-switch"
    if os.path.lexists(directory.paths.pause):
        return "pause"
    return ""
