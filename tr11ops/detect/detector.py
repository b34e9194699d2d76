"""What a detector is: a pure function from a snapshot to findings, and what it must see for it; and
which finding follows from which: one incident has one cause, and that is what people are told first.

`CAUSES` places every detector. What follows from another finding of the same look (or is its lesser
sign) is listed below that one, wherever findings are shown: in mails, in alerts, on the screen, in
the verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, StrEnum
from functools import total_ordering
from itertools import chain
from typing import TypeAlias

from msgspec.structs import replace

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


# Faults for which the training stands still, or whose cure goes on in another job.
STANDS_STILL = frozenset(
    {
        "dead-chain",
        "directory-unseen",
        "down",
        "held",
        "hung",
        "node-lost",
        "nodes-short",
        "stalled",
        "start-failed",
        "suspended",
        "two-attempts",
        "unfinished-end",
        "waits-for-site",
        "zombie",
    }
)


# Faults with which the training goes on, and takes longer.
COSTS_TIME = frozenset({"slow", "slow-node"})


class Finding(Record):
    """One conclusion from a snapshot.

    `detector` is the detector's name (its file in `tr11ops/detect/`), `subject` what it is about (a
    job, a node, a step), as it is shown. `fix` is the command that helps with it, or ""; `then` are
    those that let the run go on when that is done.

    `fault` is the class of fault that the run's own records give as its reason ("storage",
    "numerics", ...), "" where they give none. `consequences` are findings of the same look that
    follow from this one: `by_cause` puts them here.

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

    @property
    def costs_time(self) -> bool:
        """Whether the training goes on with it, and takes longer: what is merely worth knowing does not."""
        return self.detector in COSTS_TIME and self.severity is not Severity.INFO

    @property
    def commands(self) -> tuple[str, ...]:
        """All that is to be typed against it, one after another: of a first cause (`by_cause`) also what lets
        go on what followed from it.
        """
        after = once_fixed(self.fix, self.then, *(one.then for one in self.consequences))
        return tuple(filter(None, (self.fix, *after)))


def once_fixed(fix: str | None, *then: Iterable[str]) -> tuple[str, ...]:
    """What is still to be typed when the `fix` of a fault has helped, each command once."""
    return tuple(command for command in dict.fromkeys(chain(*then)) if command not in {"", fix})


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


class Same(StrEnum):
    """What two findings must share for the one to follow from the other."""

    RUN = "run"  # nothing more: the run has one of each
    SUBJECT = "subject"  # what they are about: the job, the attempt
    IDENTITY = "identity"  # the node, the file system, the periodic job


class CauseLink(Record):
    """That findings follow from those of the detector `cause`; with `fault`, only where that fault
    is on record.

    `outlasts`: what follows stays when the cause is gone, until its own `then` is typed.
    """

    cause: str
    same: Same = Same.RUN
    fault: str = ""
    outlasts: bool = False


def _of_job(*causes: str) -> tuple[CauseLink, ...]:
    return tuple(CauseLink(cause, Same.SUBJECT) for cause in causes)


def _of_run(*causes: str, outlasts: bool = False) -> tuple[CauseLink, ...]:
    return tuple(CauseLink(cause, outlasts=outlasts) for cause in causes)


NONE: tuple[CauseLink, ...] = ()
OLDER = frozenset({"exclusion-cap"})  # states that may have stood before what they are told below
# what a held queue goes on without, where that is why it is held
OF_HOLD = tuple(CauseLink(cause, fault=HELD_FOR_FAULT) for cause in ("unfinished-end", "held"))
# Of each detector: what its findings follow from, the strongest cause first. NONE: it is always
# told for itself. The strongest detector comes first, what stops the training before what makes it
# slow, and that before a short queue, which costs nothing yet; each after what its findings follow
# from: see `lead`.
CAUSES: Mapping[str, tuple[CauseLink, ...]] = {
    "directory-unseen": NONE,
    "filesystem-full": NONE,
    "two-attempts": NONE,
    "node-lost": NONE,
    "silent-corruption": NONE,
    "loss-not-finite": NONE,
    "start-failed": NONE,
    "suspended": NONE,
    "zombie": (CauseLink("node-lost", Same.IDENTITY),),
    "unfinished-end": (
        CauseLink("start-failed", Same.SUBJECT),
        CauseLink("node-lost", Same.SUBJECT),
        CauseLink("filesystem-full", fault="storage"),
        CauseLink("loss-not-finite", fault="numerics"),
    ),
    "hung": _of_job("suspended", "zombie"),
    "stalled": _of_job("suspended", "zombie", "hung"),
    "down": _of_run("start-failed", "unfinished-end", outlasts=True),
    "slow-node": NONE,
    "slow": _of_run("slow-node"),
    "limit-reached": NONE,
    "reservation-ended": NONE,
    "waits-for-site": NONE,
    "held": (
        CauseLink("start-failed", fault=HELD_FOR_FAULT, outlasts=True),
        CauseLink("unfinished-end", fault=HELD_FOR_FAULT, outlasts=True),
    ),
    "nodes-short": (CauseLink("waits-for-site"), *OF_HOLD),
    "dead-chain": (CauseLink("nodes-short", fault="nodes"),),
    "queued-too-long": _of_run("nodes-short", "waits-for-site"),
    "chain-end": _of_run("held", "dead-chain", "limit-reached", "reservation-ended"),
    "limit-changed": NONE,
    "kill-switch-left-on": NONE,
    "switch-unseen": NONE,
    "lingering": _of_job("zombie"),
    "no-spare": _of_run("node-lost"),
    "exclusion-cap": (CauseLink("node-lost", Same.IDENTITY, outlasts=True), *OF_HOLD),
    "loss-spike": _of_run("loss-not-finite"),
    "gradient-norm": _of_run("loss-not-finite", "loss-spike"),
    "validation-loss-rises": _of_run("loss-not-finite", "loss-spike"),
    "counters-jump": NONE,
    "check-failing": NONE,
    "log-not-growing": NONE,
    "checkpoint-unsound": NONE,
    "checkpoint-overdue": (CauseLink("filesystem-full", fault="storage", outlasts=True),),
    "copy-damaged": NONE,
    "secret-in-log": NONE,
    "cron-dead": NONE,
    "backup-overdue": _of_run("cron-dead"),
    "sync-overdue": _of_run("cron-dead"),
    "exclusion-due": _of_run("cron-dead"),
    "periodic-job-failed": NONE,
    "filesystem-filling": (CauseLink("filesystem-full", Same.IDENTITY),),
    "purge-near": NONE,
    "clock-skew": NONE,
    "namesake": NONE,
    "damaged-state": NONE,
}


def lead(detector: str, severity: Severity) -> tuple[int, int]:
    """The order in which faults are told, wherever several are: the most severe first, and of
    equals the strongest cause; one of a detector that is not known here last. Sort by it.
    """
    places = list(CAUSES)
    return -severity.rank, places.index(detector) if detector in CAUSES else len(places)


def cause_of(finding: Finding, others: Iterable[Finding]) -> Finding | None:
    """The strongest of `others` that a finding follows from; None where it is told for itself."""
    found = _link_of(finding, tuple(others))
    if found is None:
        return None
    return found[1]


def _link_of(finding: Finding, others: tuple[Finding, ...]) -> tuple[CauseLink, Finding] | None:
    for link in CAUSES.get(finding.detector, NONE):
        for other in others:
            if _is_linked(finding, other, link):
                return link, other
    return None


def _is_linked(finding: Finding, other: Finding, link: CauseLink) -> bool:
    """What is merely worth knowing (INFO) is no cause of what is worse."""
    if other.detector != link.cause or (link.fault and finding.fault != link.fault):
        return False
    if other.severity is Severity.INFO and finding.severity > Severity.INFO:
        return False
    if link.same is Same.SUBJECT:
        return finding.subject == other.subject
    return link.same is Same.RUN or finding.identity == other.identity


def first_cause(finding: Finding, findings: tuple[Finding, ...]) -> Finding:
    """What a finding follows from in the end; the finding itself where it follows from none."""
    while (cause := cause_of(finding, findings)) is not None:
        finding = cause
    return finding


def commands_after(finding: Finding, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """The `then` of a finding, as far as it is still to be typed when its cause is gone."""
    found = _link_of(finding, findings)
    if found is None or found[0].outlasts:
        return finding.then
    return ()


def by_cause(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The first causes, each with what follows from it as its `consequences`, as severe as the
    worst of them, and begun with the earliest but for a state that was there before.

    They come in the order of `lead`, equals as they are given.
    """
    given = tuple(findings)
    following: dict[int, list[Finding]] = {}
    first: list[Finding] = []
    for finding in given:
        cause = first_cause(finding, given)
        if cause is finding:
            first.append(finding)
        else:
            left = replace(finding, then=commands_after(finding, given))
            following.setdefault(id(cause), []).append(left)
    told = [_with(finding, following.get(id(finding), [])) for finding in first]
    return tuple(sorted(told, key=lambda finding: lead(finding.detector, finding.severity)))


def slow_by_cause(findings: Iterable[Finding]) -> list[Finding]:
    """Of the first causes those that make a training slow, in the order of `by_cause`."""
    return [finding for finding in by_cause(findings) if finding.costs_time]


def _with(finding: Finding, consequences: list[Finding]) -> Finding:
    every = (finding, *consequences)
    return replace(
        finding,
        severity=max(one.severity for one in every),
        since=earliest(one for one in every if one is finding or one.detector not in OLDER),
        consequences=tuple(consequences),
    )


def merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One finding for each fingerprint: the most severe, with the others' titles and evidence below
    its own.
    """
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.fingerprint, []).append(finding)
    for group in groups.values():
        first = max(group, key=lambda finding: finding.severity)
        others = [finding for finding in group if finding is not first]
        lines = [*first.evidence]
        for other in others:
            lines += [other.title, *other.evidence]
        more = ""
        if others:
            more = f" (and {len(others)} more)"
        fault = first.fault
        if any(other.fault != fault for other in others):
            fault = ""
        yield replace(
            first,
            title=first.title + more,
            evidence=tuple(lines),
            fault=fault,
            since=earliest(group),
        )


def earliest(findings: Iterable[Finding]) -> float | None:
    """When the first of these findings began; None where none says when."""
    return min((one.since for one in findings if one.since is not None), default=None)
