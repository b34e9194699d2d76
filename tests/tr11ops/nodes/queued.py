"""Jobs of a run, for tests of its nodes."""

from __future__ import annotations

from tr11ops.cluster.base import Job, JobState


def job(state: JobState, **changes: object) -> Job:
    plain = {
        "job_id": "5",
        "raw_id": "5",
        "array_id": None,
        "task_id": None,
        "name": "n",
        "user": "me",
        "state": state,
    }
    return Job(**{**plain, **changes})
