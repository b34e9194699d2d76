"""All detectors: the functions with `@detector` of these files. How to add one:
docs/contributing/detector.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

from tr11ops.detect import (
    attempts,
    copies,
    nodes,
    numbers,
    progress,
    queued_work,
    saved,
    site,
    speed,
    storage,
    unfinished_end,
    watch,
)
from tr11ops.detect.detector import HELD_FOR_FAULT, REGISTERED, Detector, Finding, lead
from tr11ops.observe.snapshot import Snapshot

# one subject each, and all of them loaded: that fills REGISTERED
FAMILIES: tuple[ModuleType, ...] = (
    attempts,
    unfinished_end,
    nodes,
    queued_work,
    site,
    progress,
    speed,
    numbers,
    saved,
    copies,
    storage,
    watch,
)
BY_NAME: Mapping[str, Detector] = REGISTERED
DETECTORS: tuple[Detector, ...] = tuple(
    detector
    for family in FAMILIES
    for detector in REGISTERED.values()
    if detector.judge.__module__ == family.__name__
)


def detect_all(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Every detector's findings, in the order of `lead`."""
    findings = [finding for detector in DETECTORS for finding in detector.detect(snapshot)]
    if snapshot.run.is_watched:
        from tr11ops.detect.possible import as_possible  # of no use to most runs

        findings = [as_possible(finding, snapshot) for finding in findings]
    return tuple(sorted(findings, key=lambda finding: lead(finding.detector, finding.severity)))


def unjudged_detectors(snapshot: Snapshot) -> frozenset[str]:
    """The names of the detectors that could not judge: no fault of theirs is over because they are
    silent.
    """
    return frozenset(detector.name for detector in DETECTORS if detector.is_blind(snapshot))


# What people call a trouble that goes by another name here.
WORDS = {
    "nan": "spike.md",
    "inf": "spike.md",
    "loss": "spike.md",
    "divergence": "spike.md",
    "diverged": "spike.md",
    "hang": "hung.md",
    "stuck": "hung.md",
    "deadlock": "hung.md",
    "nccl": "hung.md",
    "timeout": "hung.md",
    "crash": "unfinished-end.md",
    "oom": "unfinished-end.md",
    "killed": "unfinished-end.md",
    "segfault": "unfinished-end.md",
    "traceback": "unfinished-end.md",
    "xid": "bad-node.md",
    "ecc": "bad-node.md",
    "gpu": "bad-node.md",
    "health": "bad-node.md",
    "sdc": "silent-corruption.md",
    "straggler": "slow-node.md",
    "disk": "filesystem-full.md",
    "quota": "filesystem-full.md",
    "inodes": "filesystem-full.md",
    "space": "filesystem-full.md",
    "enospc": "filesystem-full.md",
    "purge": "purge-near.md",
    "pending": "queued-too-long.md",
    "queue": "queued-too-long.md",
    "queued": "queued-too-long.md",
    "maintenance": "waits-for-site.md",
    "hold": "array-held.md",
    "array": "chain-end.md",
    "dependency": "dead-chain.md",
    "lease": "two-trainers.md",
    "checkpoint": "checkpoint-unsound.md",
    "corrupt": "checkpoint-unsound.md",
    "resume": "resume-refused.md",
    "refused": "launch-refused.md",
    "save": "save-failed.md",
    "backup": "backup-overdue.md",
    "hub": "sync-overdue.md",
    "cron": "cron-dead.md",
    "watchdog": "cron-dead.md",
    "token": "secret-in-log.md",
    "password": "secret-in-log.md",
    "clock": "clock-skew.md",
    "kill": "stopped.md",
    "switch": "kill-switch-left-on.md",
    "exclusion": "exclusion-cap.md",
}


def page_of_word(word: str) -> str | None:
    """The page that treats what people call by this word; None where it is no such word."""
    return WORDS.get(word.lower())


def page_of(detector: str) -> str:
    """The file name of a detector's page in `runbooks/`; of another fault's, as its name has it."""
    known_here = BY_NAME.get(detector)
    if known_here is None:
        return f"{detector}.md"
    return known_here.page


def page_for(finding: Finding, consequences: Iterable[Finding]) -> str:
    """The page that treats a finding and what follows from it: where a failed attempt holds the
    array, the page that says for each cause what helps, and how the tasks are released; where it
    does because too many nodes are excluded, the page on that.
    """
    of_hold = {one.detector for one in consequences if one.fault == HELD_FOR_FAULT}
    if "exclusion-cap" in of_hold:
        return page_of("exclusion-cap")
    return page_of("held" if of_hold and finding.detector == "unfinished-end" else finding.detector)
