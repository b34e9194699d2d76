"""The training goes on, but its checkpoints do not keep up: a fault now costs more than one save interval."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.snapshot import Snapshot, Unknown
from tr11ops.units import duration

WARN_INTERVALS = 1.5  # a save in the background may take a part of the next interval
CRITICAL_INTERVALS = 2.5


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Counts iterations since the newest sound checkpoint, while a job is active."""
    interval, done = snapshot.run.checkpoint_interval, signs.iteration(snapshot)
    checkpoints = snapshot.checkpoints
    if isinstance(checkpoints, Unknown) or interval is None or done is None or not signs.active_jobs(snapshot):
        return
    sound = checkpoints.newest_sound
    if sound is None and checkpoints.steps:
        return  # checkpoint-unsound has said it
    unsaved = done - (sound.step if sound else 0)
    if unsaved <= WARN_INTERVALS * interval:
        return
    pace = signs.seconds_per_iteration(snapshot)
    at_stake = "" if pace is None else f", {duration(unsaved * pace)} of work"
    since = f"since {sound.step}" if sound else "and none was ever saved"
    yield Finding(
        "checkpoint-overdue",
        Severity.CRITICAL if unsaved > CRITICAL_INTERVALS * interval else Severity.WARNING,
        f"no checkpoint for {unsaved} iterations (the interval is {interval})",
        evidence=(f"iteration {done}, {since}{at_stake}",),
        fix=signs.command(snapshot, "logs"),
    )
