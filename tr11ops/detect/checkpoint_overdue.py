"""The training goes on, but a save failed, or none keeps up: a fault now costs more than one save
interval.

What to do: `tr11 logs`, look for `SAVE FAILED`; make room on the disk; `tr11 checkpoint-now`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.detect.filesystem_full import make_room
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.pass_over import skipped_iterations
from tr11ops.observe import derived, normal_silence
from tr11ops.observe.snapshot import Checkpoint, Snapshot
from tr11ops.observe.training import TrainingEvent
from trainer.contract.metrics_record import SAVE_FAILED

BOUND = "one save that failed, or 1.5 intervals; 2.5"
SEVERITIES = "WARNING, CRITICAL"
NAME = "checkpoint-overdue"
STORAGE = "storage"
# as systems say ENOSPC and EDQUOT
WANT_OF_ROOM = ("No space left on device", "Disk quota exceeded")
NEEDS = ("jobs", "steps", "checkpoints", "heartbeats", "training.phases", "training.events")

WARN_INTERVALS = 1.5  # a save in the background may take a part of the next interval
CRITICAL_INTERVALS = 2.5


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Counts iterations, and minutes of training, since the newest sound checkpoint, while a job is
    active.

    Only what that job itself has trained: what an attempt before it left unsaved is lost already,
    or was given up by a roll-back; what is passed over was not trained. A save that is under way
    may take as long as one has taken, and more.
    """
    checkpoints = snapshot.checkpoints
    if isinstance(checkpoints, Unknown) or not snapshot.active_jobs:
        return
    sound = checkpoints.newest_sound
    if sound is None and checkpoints.steps:
        return  # checkpoint-unsound has said it
    saved = sound.step if sound else 0
    trained = derived.iteration_of(snapshot, snapshot.active_jobs)
    done = saved if trained is None else trained
    unsaved = max(0, done - saved - skipped_iterations(snapshot, saved, done))
    intervals, title = max(_of_iterations(snapshot, unsaved), _of_minutes(snapshot, sound))
    failed = _failed_since(snapshot, sound)
    is_late = intervals > WARN_INTERVALS and not _is_saving(snapshot)
    if not is_late and failed is None:
        return
    if not is_late and failed is not None:
        title = f"the save of step {failed.values.get('step')} failed"
    pace = derived.seconds_per_iteration(snapshot)
    if pace is None:
        at_stake = ""
    else:
        at_stake = f", {duration(unsaved * pace)} of work"
    if sound:
        since = f"since {sound.step}"
    else:
        since = "and none was ever saved"
    save, is_for_room = (
        derived.command(snapshot, "checkpoint-now --wait"),
        _is_for_want_of_room(snapshot, failed),
    )
    yield Finding(
        NAME,
        Severity.CRITICAL if is_late and intervals > CRITICAL_INTERVALS else Severity.WARNING,
        title,
        evidence=(f"iteration {done}, {since}{at_stake}", *_why_failed(failed)),
        fix=make_room(snapshot) if is_for_room else save,
        then=(save,) if is_for_room else (),
        fault=STORAGE if is_for_room else "",
    )


def _is_for_want_of_room(snapshot: Snapshot, failed: TrainingEvent | None) -> bool:
    """Whether no save comes about as the disk is full: by the fault of the last one that failed; or
    by a look at the disk, for on a full one not even that is noted.
    """
    if any(folder.is_full for folder in known(snapshot.operation.shut_folders, ())):
        return True
    if failed is None:
        why = ""
    else:
        why = str(failed.values.get("why") or "")
    return any(words in why for words in WANT_OF_ROOM)


def _failed_since(snapshot: Snapshot, sound: Checkpoint | None) -> TrainingEvent | None:
    """The last save that failed, of a job that is there, where none has come about since."""
    names = frozenset().union(*(derived.identifiers(job) for job in snapshot.active_jobs))
    since = 0.0
    if sound is not None:
        since = sound.created or 0.0
    events = known(snapshot.training.events, ())
    failed = [
        one
        for one in events
        if one.kind == SAVE_FAILED and one.job_id in names and one.time > since
    ]
    if failed:
        return failed[-1]
    return None


def _why_failed(failed: TrainingEvent | None) -> Iterator[str]:
    """The node that alone is at fault, where there is one, and the fault."""
    if failed is not None:
        yield from (str(failed.values[name]) for name in ("said", "why") if failed.values.get(name))


def _of_iterations(snapshot: Snapshot, unsaved: int) -> tuple[float, str]:
    """How many save intervals are not saved, and the sentence that says so."""
    interval = snapshot.run.checkpoint_interval
    if interval is None:
        return 0.0, ""
    return (
        unsaved / interval,
        f"no checkpoint for {unsaved} iterations (the interval is {interval})",
    )


def _of_minutes(snapshot: Snapshot, sound: Checkpoint | None) -> tuple[float, str]:
    """The same by the clock: from the newest checkpoint, or from the launch's first step where that
    is later.
    """
    minutes = snapshot.run.checkpoint_minutes
    names = frozenset().union(*(derived.identifiers(job) for job in snapshot.active_jobs))
    stepped = derived.step_times(snapshot, names)
    if minutes is None or not stepped:
        return 0.0, ""
    began = normal_silence.launch_trained_since(snapshot, names)
    since = max(
        [
            min(stepped) if began is None else began,
            *([sound.created] if sound and sound.created else []),
        ]
    )
    late = max(0.0, snapshot.time - since)
    # What a save takes is no delay: the interval counts from the begin of one to the begin of the
    # next.
    saved_in = normal_silence.longest(snapshot, "saving") or 0.0
    return (late - saved_in) / (60.0 * minutes), (
        f"no checkpoint for {duration(late)} of training (the interval is {duration(60.0 * minutes)})"
    )


def _is_saving(snapshot: Snapshot) -> bool:
    """Whether a save stops the training right now, for no longer than its patience."""
    for job in snapshot.active_jobs:
        liveness = derived.liveness_of(snapshot, job)
        if liveness is not None and liveness.phase == "saving" and liveness.is_fresh(snapshot.time):
            return True
    return False
