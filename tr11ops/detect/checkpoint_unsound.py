"""The newest checkpoint is not whole, or `latest` names one that is not there: a resume falls back to an older one."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from trainer.contract.checkpoint_names import checkpoint_name

BOUND = "manifest, sizes, the last reading of all bytes"
SEVERITIES = "WARNING, CRITICAL when none is whole"
NAME = "checkpoint-unsound"
NEEDS = ("checkpoints", "checkpoints.latest", "jobs", "heartbeats")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """CRITICAL when no sound checkpoint was found at all, although there are some."""
    checkpoints = snapshot.checkpoints
    if isinstance(checkpoints, Unknown):
        return
    sound = checkpoints.newest_sound
    bad = [entry for entry in checkpoints.examined if not entry.is_sound]
    if bad and not bad[0].complete and _may_be_saving(snapshot):
        bad = bad[1:]
    if bad:
        lines = [
            f"{checkpoint_name(entry.step)}: {entry.faults[0] if entry.faults else 'no manifest'}" for entry in bad
        ]
        fall_back = f"a resume takes {checkpoint_name(sound.step)}" if sound else "no sound checkpoint was found"
        yield Finding(
            NAME,
            Severity.WARNING if sound else Severity.CRITICAL,
            f"{checkpoint_name(bad[0].step)} is not whole; {fall_back}",
            subject=str(bad[0].step),
            identity=(str(bad[0].step),),
            evidence=tuple(lines[:3]),
        )
    latest = checkpoints.latest
    if isinstance(latest, int) and latest not in checkpoints.steps:
        yield Finding(
            NAME,
            Severity.WARNING if sound else Severity.CRITICAL,
            f"latest names {checkpoint_name(latest)}, which is not there",
            subject=f"latest-{latest}",
            identity=(f"latest-{latest}",),
        )


def _may_be_saving(snapshot: Snapshot) -> bool:
    """Whether a rank is saving, or no one can see that none is."""
    if isinstance(snapshot.jobs, Unknown) or isinstance(snapshot.heartbeats, Unknown):
        return True
    active = snapshot.active_jobs
    return any(beat.phase == "saving" for job in active for beat in derived.beats_of(snapshot, job))
