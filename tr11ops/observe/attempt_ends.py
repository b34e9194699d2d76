"""Dates the ends of attempts that no end marker dates: by the scheduler, else by their last sign of life."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from tr11ops.cluster.base import Job
from tr11ops.observe.snapshot import Attempt, Step
from tr11ops.rundir.attempt_end import last_sign_in, told_end
from trainer.contract.end_marker import EndMarker
from trainer.contract.heartbeat import Heartbeat
from trainer.contract.paths import RunPaths


def dated(
    paths: RunPaths,
    attempts: Iterable[Attempt],
    jobs: Iterable[Job],
    ended_jobs: Iterable[Job],
    beats: Iterable[Heartbeat],
    steps: Iterable[Step],
) -> tuple[Attempt, ...]:
    """The attempts with their ends, the newest first. `ended_jobs`: by the scheduler's own log.

    Of one that lives only what was read anyway counts; the folder of one that is over is looked through.
    """
    by_id = {job.raw_id: job for job in ended_jobs}
    by_id |= {job.raw_id: job for job in jobs if not job.state.is_final or job.end_time is not None}
    signs: dict[str, float] = {}
    for beat in beats:
        signs[beat.job_id] = max(signs.get(beat.job_id, 0.0), beat.time)
    for step in steps:
        if step.time is not None:
            signs[step.job_id] = max(signs.get(step.job_id, 0.0), step.time)
    found = [_dated(paths, attempt, by_id.get(attempt.job_id), signs) for attempt in attempts]
    return tuple(sorted(found, key=lambda attempt: attempt.changed, reverse=True))


def _dated(paths: RunPaths, attempt: Attempt, job: Job | None, signs: Mapping[str, float]) -> Attempt:
    if isinstance(attempt.end, EndMarker):
        return attempt
    sign = signs.get(attempt.job_id, 0.0)
    if job is not None and not job.state.is_final:
        return replace(attempt, changed=max(attempt.changed, sign), is_told=False)
    told = told_end(None if job is None else job.end_time, attempt.changed if attempt.is_told else None)
    if told is not None:
        return replace(attempt, changed=told, is_told=True)
    last = max(sign, attempt.start or 0.0, last_sign_in(paths.attempt(attempt.job_id)))
    return replace(attempt, changed=last or attempt.changed)
