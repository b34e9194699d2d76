"""Whether the trainer would refuse what is queued: each job trains with the card that it was
submitted with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tr11ops.cluster.base import Job
from tr11ops.cluster.parts import array_number
from tr11ops.launch.facts import look_at_checkpoints
from tr11ops.launch.resume import start_checks
from tr11ops.runcard.check import Level, PreflightCheck
from tr11ops.runcard.exit_duration import card_as_written
from tr11ops.rundir.paths import RunDirectory, Submission, parse_comment
from trainer.contract.state_file import read_json


def refused_starts(directory: RunDirectory, jobs: Iterable[Job]) -> Mapping[str, PreflightCheck]:
    """The jobs that the trainer would refuse, by `job_id`, with the first reason.

    A job whose card or whose checkpoints cannot be read is not among them: nothing is concluded
    from that.
    """
    by_number = {
        entry.job_id: entry for entry in directory.read_submissions() if entry.job_id is not None
    }
    by_tag: dict[str, PreflightCheck | None] = {}
    found: dict[str, PreflightCheck] = {}
    for job in jobs:
        tag = _tag_of(job, by_number)
        if tag and tag not in by_tag:
            by_tag[tag] = _refusal(directory, tag)
        refusal = by_tag.get(tag)
        if refusal is not None:
            found[job.job_id] = refusal
    return found


def _tag_of(job: Job, by_number: Mapping[str, Submission]) -> str:
    mark = parse_comment(job.comment)
    if mark is not None:
        return mark[0]
    entry = by_number.get(array_number(job))
    if entry is not None:
        return entry.tag
    return ""


def _refusal(directory: RunDirectory, tag: str) -> PreflightCheck | None:
    path = directory.submission(tag).card
    try:
        card = card_as_written(read_json(path) or {}, str(path))
        checks = start_checks(card, look_at_checkpoints(card))
        return next((check for check in checks if check.level is Level.REFUSED), None)
    except (OSError, ValueError):
        return None
