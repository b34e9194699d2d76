"""The newest checkpoint is not whole, or `latest` names one that is not there: a resume falls back
to an older one.

Or it is whole, and what begins from it fails: then the agent has gone back to an older one.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Checkpoint, Snapshot
from trainer.contract.checkpoint_names import checkpoint_name

BOUND = "manifest, sizes, the last reading of all bytes; launches that fail at one step after it"
SEVERITIES = "WARNING, CRITICAL when none is whole; INFO while an older one is tried"
NAME = "checkpoint-unsound"
NEEDS = ("checkpoints", "checkpoints.latest", "jobs", "heartbeats", "training.launch_ends")


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
            f"{checkpoint_name(entry.step)}: {entry.faults[0] if entry.faults else 'no manifest'}"
            for entry in bad
        ]
        if sound:
            fall_back = f"a resume takes {checkpoint_name(sound.step)}"
        else:
            fall_back = "no sound checkpoint was found"
        yield Finding(
            NAME,
            Severity.WARNING if sound else Severity.CRITICAL,
            f"{checkpoint_name(bad[0].step)} is not whole; {fall_back}",
            subject=str(bad[0].step),
            identity=(str(bad[0].step),),
            evidence=tuple(lines[:3]),
            fix=derived.command(snapshot, "checkpoint-now --wait") if snapshot.active_jobs else "",
        )
    yield from _doubted(snapshot, sound)
    latest = checkpoints.latest
    if isinstance(latest, int) and latest not in checkpoints.steps:
        yield Finding(
            NAME,
            Severity.WARNING if sound else Severity.CRITICAL,
            f"latest names {checkpoint_name(latest)}, which is not there",
            subject=f"latest-{latest}",
            identity=(f"latest-{latest}",),
        )


def _doubted(snapshot: Snapshot, sound: Checkpoint | None) -> Iterator[Finding]:
    """The checkpoint that launches failed after again and again, until one is saved beyond where
    they ended.

    INFO until the older one has come past that iteration: only then was it the checkpoint. Silent
    where the training fails there from the older one too: then it was not.
    """
    ends = [
        one for one in known(snapshot.training.launch_ends, ()) if one.older_checkpoint is not None
    ]
    last = max(ends, key=lambda one: one.time, default=None)
    if last is None or last.began_at is None:
        return
    passed = max(last.began_at, last.reached or 0)
    if sound is not None and sound.step > passed and (sound.created or 0.0) > last.time:
        return
    later = [one for one in known(snapshot.training.launch_ends, ()) if one.time > last.time]
    if any(one.reached == last.reached and one.began_at != last.began_at for one in later):
        return
    steps = [
        step
        for step in known(snapshot.steps, ())
        if step.time is not None and step.time > last.time
    ]
    is_proven = any(step.record.iteration > passed for step in steps)
    name, older = checkpoint_name(last.began_at), checkpoint_name(last.older_checkpoint or 0)
    yield Finding(
        NAME,
        Severity.WARNING if is_proven else Severity.INFO,
        f"{name} is doubted: what begins from it ends at iteration {last.reached}; {older} is tried",
        subject=str(last.began_at),
        identity=(f"doubted-{last.began_at}",),
        evidence=(last.why,),
        fix=derived.command(snapshot, f"checkpoints verify {last.began_at}"),
    )


def _may_be_saving(snapshot: Snapshot) -> bool:
    """Whether a rank is saving, or no one can see that none is."""
    if isinstance(snapshot.jobs, Unknown) or isinstance(snapshot.heartbeats, Unknown):
        return True
    active = snapshot.active_jobs
    return any(beat.phase == "saving" for job in active for beat in derived.beats_of(snapshot, job))
