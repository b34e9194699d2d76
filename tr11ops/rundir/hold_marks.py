"""A hold in the held job's own comment at the scheduler: for where the run directory is away when
it is made. Pure.

    tr11:TAG@MARK [the card's comment] held-by-tr11@1795465040/fault:WHY

It is read beside the records of `tr11ops.rundir.hold_store`, and is over once one of them says that
tr11 released the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tr11ops.base.redact import one_line
from tr11ops.cluster.arrays import LONGEST_COMMENT, names_of, without
from tr11ops.cluster.base import Job, JobState
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER
from tr11ops.rundir.hold_records import HoldRecord, ReleaseRecord

_MARK = re.compile(r" ?held-by-tr11@(\d{1,12})/(fault|switch):(.*)", re.DOTALL)
LONGEST_WHY = 200


def with_mark(comment: str, why: str, is_for_fault: bool, now: float) -> str:
    """A job's comment with the mark of a hold in place of the last one's. `now`: seconds since the
    epoch.
    """
    kind = "fault" if is_for_fault else "switch"
    mark = f"held-by-tr11@{int(now)}/{kind}:{one_line(why, limit=LONGEST_WHY)}"
    return f"{_MARK.sub('', comment)[: LONGEST_COMMENT - len(mark) - 1]} {mark}".strip()


def unmarked(comment: str) -> str:
    """A job's comment without a mark, as far as the longest mark fits behind it."""
    room = LONGEST_COMMENT - LONGEST_WHY - len(" held-by-tr11@123456789012/switch:")
    return _MARK.sub("", comment)[:room]


def marked_holds(jobs: Iterable[Job], releases: Iterable[ReleaseRecord]) -> Iterator[HoldRecord]:
    """What these jobs say of themselves that tr11 holds, less what it has released since."""
    gone = tuple(releases)
    for job in jobs:
        found = None
        if job.state is JobState.PENDING:
            found = _MARK.search(job.comment)
        if found is None:
            continue
        since = float(found[1])
        names = without(names_of([job], [job]), [one.job for one in gone if one.time > since])
        for name in names:
            yield HoldRecord(name, AUTOMATIC_OWNER, since, found[3], found[2] == "fault")
