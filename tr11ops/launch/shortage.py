"""A launch that waits for nodes which only the site can give raises the alert at once, and not at
the next look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tr11ops.detect import nodes_short
from tr11ops.observe.look import facts_of, observe
from tr11ops.runcard.check import Level

if TYPE_CHECKING:
    from tr11ops.alerts.service import AlertOutcome
    from tr11ops.launch.session import LaunchJob, LaunchView


def is_short(view: LaunchView) -> bool:
    """Whether the partition has nodes enough, of which too few can be used now."""
    return any(check.name == "nodes" and check.level is Level.WARNING for check in view.checks)


def report_shortage(job: LaunchJob, now: float, typed: str) -> AlertOutcome | None:
    """Hand it to the alerts, who tell those on duty and the site's support; None where a second
    look finds enough.
    """
    from tr11ops.alerts.service import process_some

    findings = tuple(
        nodes_short.detect(observe(job.directory, facts_of(job.card, typed), job.scheduler, now))
    )
    if findings:
        return process_some(job.directory, job.card, findings, now, typed)
    return None
