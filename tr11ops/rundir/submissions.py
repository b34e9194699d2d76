"""What the record of a submission says, and which job it became. Pure, but for the traces of
attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tr11ops.cluster.arrays import array_number
from tr11ops.cluster.base import Job
from tr11ops.rundir.paths import RunDirectory, Submission, parse_comment
from trainer.contract.state_file import read_json

BEING_SUBMITTED = "being submitted"


SUPERSEDED = "superseded by "


def read_traces(directory: RunDirectory, submissions: Iterable[Submission]) -> Mapping[str, str]:
    """For submissions without a job: the job that has run under their tag, by the records of the
    attempts.
    """
    wanted = {entry.tag for entry in submissions if entry.job_id is None}
    found: dict[str, str] = {}
    if not wanted:
        return found
    for job_id in directory.attempt_ids():
        try:
            record = read_json(directory.paths.attempt(job_id) / "attempt.json") or {}
        except ValueError:
            continue  # it was being written: a living job, which the scheduler tells of
        if record.get("submission") in wanted:
            found.setdefault(str(record["submission"]), str(record.get("array_id") or job_id))
    return found


def is_in_doubt(record: Submission) -> bool:
    """Was it sent without any word whether the scheduler took it?"""
    return record.job_id is None and not is_superseded(record)


def is_superseded(record: Submission) -> bool:
    """Was it given up for another one? Its job, should it come after all, leaves at once."""
    return record.note.startswith(SUPERSEDED)


def job_of_tag(tag: str, jobs: Iterable[Job], traces: Mapping[str, str]) -> str | None:
    """The number of the submission's job: by the comment of one in the queue, else by the record of
    an attempt.
    """
    for job in jobs:
        mark = parse_comment(job.comment)
        if mark is not None and mark[0] == tag:
            return array_number(job)
    return traces.get(tag)
