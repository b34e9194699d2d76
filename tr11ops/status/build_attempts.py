"""The attempts of a run in its status document: how each ended, and which workers were started again. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.cluster.base import Job
from tr11ops.detect.unfinished_end import how_it_ended, is_bad
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Attempt, Snapshot
from tr11ops.status.parts import Instant, ShownAttempt, ShownCode, ShownEnd, ShownRelaunch
from trainer.contract.end_marker import EndMarker


def attempts_of(snapshot: Snapshot) -> Iterator[ShownAttempt]:
    """The attempts on record, in their order (the newest first)."""
    attempts = known(snapshot.attempts, ())
    wanted = {attempt.job_id for attempt in attempts}
    jobs = {name: job for job in known(snapshot.jobs, ()) for name in (job.job_id, job.raw_id) if name in wanted}
    outside = derived.liveness_outside(snapshot)
    for attempt in attempts:
        job = jobs.get(attempt.job_id)
        lives = outside is not None and outside.job_id == attempt.job_id
        yield _attempt(attempt, job, attempt.end is not None or (not lives and _is_over(snapshot, job)))


def _attempt(attempt: Attempt, job: Job | None, is_over: bool) -> ShownAttempt:
    end = attempt.end if isinstance(attempt.end, EndMarker) else None
    marker = None if end is None else ShownEnd(
        end.reason, end.iteration, end.checkpoint_step, end.restart, end.message, Instant(end.time)
    )  # fmt: skip
    return ShownAttempt(
        attempt.label or attempt.job_id, attempt.job_id, Instant.of(attempt.start), attempt.changes, marker,
        Instant(attempt.changed), how_it_ended(attempt, job) if is_over else None, is_over and is_bad(attempt),
        _code(attempt), attempt.versions or None, attempt.is_told,
    )  # fmt: skip


def _code(attempt: Attempt) -> ShownCode | None:
    code = attempt.code
    if code is None:
        return None
    return ShownCode(
        code.commit or None, code.branch or None, code.folder or None, code.changed_count, code.digest or None,
        code.patch or None, code.why or None, str(code),
    )  # fmt: skip


def _is_over(snapshot: Snapshot, job: Job | None) -> bool:
    if isinstance(snapshot.jobs, Unknown):
        return False
    return job is None or job.state.is_final


def relaunches_of(snapshot: Snapshot) -> Iterator[ShownRelaunch]:
    """Where the running attempt has started its workers again: which launch it is, and why the one before ended."""
    for job in snapshot.active_jobs:
        ends = [end for end in known(snapshot.training.launch_ends, ()) if end.job_id in derived.identifiers(job)]
        if ends and derived.marker_of(snapshot, derived.identifiers(job)) is None:
            last = ends[-1]
            yield ShownRelaunch(
                job.job_id, last.launch + 1, Instant(last.time), last.why or None, last.decision or None
            )  # fmt: skip
