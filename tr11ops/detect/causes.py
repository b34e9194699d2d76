"""Which finding follows from which: one incident has one cause, and the cause is what people are
told first. Pure.

`CAUSES` places every detector. What follows from another finding of the same look (or is its lesser
sign) is listed below that one, wherever findings are shown: in mails, in alerts, on the screen, in
the verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from msgspec.structs import replace

from tr11ops.detect.detector import HELD_FOR_FAULT, Finding, Severity
from trainer.contract.record import Record


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
# told for itself. The strongest detector comes first, and each after what its findings follow from:
# see `lead`.
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
    "slow-node": NONE,
    "slow": _of_run("slow-node"),
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
