"""All detectors: the functions with `@detector` of these files. How to add one:
docs/contributing/detector.md.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    state,
    storage,
    unfinished_end,
    watch,
)
from tr11ops.detect.causes import lead
from tr11ops.detect.detector import REGISTERED, Detector
from tr11ops.detect.finding import Finding
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
    state,
)
BY_NAME: Mapping[str, Detector] = REGISTERED
DETECTORS: tuple[Detector, ...] = tuple(
    detector
    for family in FAMILIES
    for detector in REGISTERED.values()
    if detector.judge.__module__ == family.__name__
)


def detect_all(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Every detector's findings, in the order of `causes.lead`."""
    findings = [finding for detector in DETECTORS for finding in detector.detect(snapshot)]
    return tuple(sorted(findings, key=lambda finding: lead(finding.detector, finding.severity)))


def unjudged_detectors(snapshot: Snapshot) -> frozenset[str]:
    """The names of the detectors that could not judge: no fault of theirs is over because they are
    silent.
    """
    return frozenset(detector.name for detector in DETECTORS if detector.is_blind(snapshot))
