"""What a detector concludes: one fault or remark, with its evidence and the command that repairs
it.
"""

from __future__ import annotations

from enum import Enum
from functools import total_ordering

from trainer.contract.record import Record


@total_ordering
class Severity(Enum):
    """INFO is worth knowing, WARNING wants a person in working hours, CRITICAL wants one now.
    Written by its name.
    """

    INFO = "INFO"
    WARNING = "WARNING"
    CRITICAL = "CRITICAL"

    @property
    def rank(self) -> int:
        """1 for the mildest."""
        return list(Severity).index(self) + 1

    def __lt__(self, other: Severity) -> bool:
        return self.rank < other.rank


# the `fault` of queued work that tr11 holds because the next task would meet the same
HELD_FOR_FAULT = "held"

NO_CAUSE = "unknown"  # the identity of the end of an attempt of which no cause is on record


class Finding(Record):
    """One conclusion from a snapshot.

    `detector` is the detector's name (its file in `tr11ops/detect/`), `subject` what it is about (a
    job, a node, a step), as it is shown. `fix` is the command that helps with it, or ""; `then` are
    those that let the run go on when that is done.

    `fault` is the class of fault that the run's own records give as its reason ("storage",
    "numerics", ...), "" where they give none. `consequences` are findings of the same look that
    follow from this one: `causes.by_cause` puts them here.

    `identity` tells two incidents of one detector apart: names that the next restart does not
    change (a node, a file system, a step). Two findings of one detector and one identity are one
    incident. Empty, where a run has at most one such incident at a time; ids of jobs are never in
    it.

    `is_to_be_passed`: a later attempt trains, but has not come past the iteration at which the
    fault was: an alert of it, if people know of one, is not over.

    `since`: when the fault began, by its evidence; None where that is the look. `patience`: of a
    standstill, for how many seconds it would have been none; None for other faults. `by_itself`: a
    sentence on what the run does about it without a person and without a watchdog; "" for nothing.
    """

    detector: str
    severity: Severity
    title: str
    subject: str = ""
    evidence: tuple[str, ...] = ()
    fix: str = ""
    identity: tuple[str, ...] = ()
    since: float | None = None
    then: tuple[str, ...] = ()
    fault: str = ""
    consequences: tuple[Finding, ...] = ()
    is_to_be_passed: bool = False
    patience: float | None = None
    by_itself: str = ""
