"""What a detector is: a pure function from a snapshot to findings, and what it must see for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import total_ordering
from typing import TypeAlias

from tr11ops.base.observed import Unknown
from tr11ops.observe.snapshot import Snapshot
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


FINGERPRINT_DIGITS = 12  # two of ten thousand incidents share one with a chance of 2e-7
UNNAMED = "(unnamed)"  # a name that could not be read is still not the incident without a name


def fingerprint(detector: str, identity: Iterable[str]) -> str:
    """Twelve hexadecimal digits that name the incident within its run."""
    text = f"{detector}\0" + "\0".join(word or UNNAMED for word in identity)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:FINGERPRINT_DIGITS]


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

    @property
    def fingerprint(self) -> str:
        """Of its incident: the same detector and the same identity have the same."""
        return fingerprint(self.detector, self.identity)


Judge: TypeAlias = Callable[[Snapshot], Iterator[Finding]]


class Detector(Record):
    """One fault, judged by `judge` from a snapshot alone; `name` is the function's, with hyphens.

    `needs` are the observations without which it cannot judge, as attributes of the Snapshot,
    dotted where a part of one is meant (`checkpoints.latest`): where one of them is Unknown, it is
    not run. Without one of those that it `uses` it says what the others show. Where any of both is
    Unknown, its silence means nothing. `bound` and `severities` are for people: from when on it is
    a finding, and how grave. `page` is the file in `runbooks/` that treats it.
    """

    name: str
    judge: Judge
    needs: tuple[str, ...]
    uses: tuple[str, ...]
    bound: str
    severities: str
    page: str

    @property
    def purpose(self) -> str:
        """What it finds: the first paragraph of the function's docstring."""
        return " ".join((self.judge.__doc__ or "").partition("\n\n")[0].split())

    def detect(self, snapshot: Snapshot) -> tuple[Finding, ...]:
        """The findings; none where the fault is not there, or where what is needed is Unknown."""
        if any(is_hidden(snapshot, need) for need in self.needs):
            return ()
        return tuple(self.judge(snapshot))

    def is_blind(self, snapshot: Snapshot) -> bool:
        """Whether it could not judge, so that no fault of its is over because it is silent."""
        return any(is_hidden(snapshot, part) for part in (*self.needs, *self.uses))


REGISTERED: dict[str, Detector] = {}  # by name, as their files are loaded


def detector(
    name: str,
    *,
    bound: str,
    severities: str,
    needs: tuple[str, ...] = (),
    uses: tuple[str, ...] = (),
    runbook: str = "",
) -> Callable[[Judge], Detector]:
    """Make a function of a snapshot a detector; see `Detector`.

    `runbook`: the page that treats it, where that is not one of its own name. Raises ValueError where the
    name is taken.
    """

    def register(judge: Judge) -> Detector:
        if name in REGISTERED:
            raise ValueError(f"two detectors are named {name}")
        made = Detector(
            name=name,
            judge=judge,
            needs=needs,
            uses=uses,
            bound=bound,
            severities=severities,
            page=runbook or f"{name}.md",
        )
        REGISTERED[name] = made
        return made

    return register


def is_hidden(snapshot: Snapshot, part: str) -> bool:
    """Whether an observation, or what holds it, is Unknown. Raises AttributeError for one that
    there is not.
    """
    value: object = snapshot
    for name in part.split("."):
        value = getattr(value, name)
        if isinstance(value, Unknown):
            return True
    return False
