"""All detectors. A new one is a file with `detect(snapshot) -> Iterator[Finding]`, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tr11ops.detect import (
    chain_end,
    checkpoint_overdue,
    checkpoint_unsound,
    dead_chain,
    down,
    held,
    kill_switch_left_on,
    lingering,
    loss_not_finite,
    namesake,
    node_lost,
    stalled,
    suspended,
    two_attempts,
    unfinished_end,
    zombie,
)
from tr11ops.detect.finding import Finding
from tr11ops.snapshot import Snapshot

Detector = Callable[[Snapshot], Iterator[Finding]]

DETECTORS: tuple[Detector, ...] = (
    down.detect,
    two_attempts.detect,
    stalled.detect,
    suspended.detect,
    lingering.detect,
    zombie.detect,
    node_lost.detect,
    dead_chain.detect,
    held.detect,
    chain_end.detect,
    kill_switch_left_on.detect,
    unfinished_end.detect,
    loss_not_finite.detect,
    checkpoint_unsound.detect,
    checkpoint_overdue.detect,
    namesake.detect,
)


def detect_all(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Every detector's findings, the most severe first, otherwise in the order of the registry."""
    findings = [finding for detector in DETECTORS for finding in detector(snapshot)]
    return tuple(sorted(findings, key=lambda finding: -finding.severity))
