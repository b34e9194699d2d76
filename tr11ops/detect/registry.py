"""All detectors. A new one is a file as `Detector` says, and a line here:
docs/contributing/detector.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tr11ops.base.observed import Unknown
from tr11ops.detect import (
    backup_overdue,
    chain_end,
    check_failing,
    checkpoint_overdue,
    checkpoint_unsound,
    clock_skew,
    copy_damaged,
    counters_jump,
    cron_dead,
    damaged_state,
    dead_chain,
    directory_unseen,
    down,
    exclusion_cap,
    exclusion_due,
    filesystem_filling,
    filesystem_full,
    gradient_norm,
    held,
    hung,
    kill_switch_left_on,
    limit_changed,
    limit_reached,
    lingering,
    log_not_growing,
    loss_not_finite,
    loss_spike,
    namesake,
    node_lost,
    nodes_short,
    periodic_job_failed,
    purge_near,
    queued_too_long,
    reservation_ended,
    secret_in_log,
    silent_corruption,
    slow,
    slow_node,
    stalled,
    start_failed,
    suspended,
    switch_unseen,
    sync_overdue,
    two_attempts,
    unfinished_end,
    waits_for_site,
    zombie,
)
from tr11ops.detect.causes import lead
from tr11ops.detect.finding import Finding
from tr11ops.observe.snapshot import Snapshot


class Detector(Protocol):
    """A module of `tr11ops/detect/`: one fault, judged from a snapshot alone.

    `NAME` is the file's name with hyphens. `NEEDS` are the observations without which it cannot
    judge, as attributes of the Snapshot, dotted where a part of one is meant
    (`checkpoints.latest`): where one of them is Unknown, its silence means nothing. `BOUND` and
    `SEVERITIES` are for people: from when on it is a finding, and how grave.
    """

    @property
    def BOUND(self) -> str: ...

    @property
    def SEVERITIES(self) -> str: ...

    @property
    def NAME(self) -> str: ...

    @property
    def NEEDS(self) -> tuple[str, ...]: ...

    def detect(self, snapshot: Snapshot, /) -> Iterator[Finding]:
        """The findings; none where the fault is not there, or where what is needed is Unknown."""
        ...


DETECTORS: tuple[Detector, ...] = (
    down,
    two_attempts,
    hung,
    stalled,
    suspended,
    lingering,
    zombie,
    node_lost,
    dead_chain,
    start_failed,
    held,
    limit_reached,
    reservation_ended,
    waits_for_site,
    nodes_short,
    queued_too_long,
    limit_changed,
    chain_end,
    directory_unseen,
    kill_switch_left_on,
    switch_unseen,
    unfinished_end,
    loss_not_finite,
    loss_spike,
    gradient_norm,
    counters_jump,
    silent_corruption,
    slow,
    slow_node,
    check_failing,
    log_not_growing,
    checkpoint_unsound,
    checkpoint_overdue,
    backup_overdue,
    copy_damaged,
    sync_overdue,
    secret_in_log,
    filesystem_full,
    filesystem_filling,
    purge_near,
    exclusion_cap,
    exclusion_due,
    periodic_job_failed,
    cron_dead,
    clock_skew,
    namesake,
    damaged_state,
)


def detect_all(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Every detector's findings, in the order of `causes.lead`."""
    findings = [finding for detector in DETECTORS for finding in detector.detect(snapshot)]
    return tuple(sorted(findings, key=lambda finding: lead(finding.detector, finding.severity)))


def unjudged_detectors(snapshot: Snapshot) -> frozenset[str]:
    """The names of the detectors that could not judge: no fault of theirs is over because they are
    silent.
    """
    return frozenset(
        detector.NAME
        for detector in DETECTORS
        if any(is_hidden(snapshot, need) for need in detector.NEEDS)
    )


def is_hidden(snapshot: Snapshot, need: str) -> bool:
    """Whether an observation, or what holds it, is Unknown. Raises AttributeError for one that
    there is not.
    """
    value: object = snapshot
    for name in need.split("."):
        value = getattr(value, name)
        if isinstance(value, Unknown):
            return True
    return False
