"""Checkpoints: whether the newest is whole, and whether one is saved in time."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from operator import attrgetter

from tr11ops.base.observed import Unknown, known, seen
from tr11ops.base.units import duration
from tr11ops.detect.detector import Finding, Severity, detector
from tr11ops.detect.storage import make_room
from tr11ops.observe import derived
from tr11ops.observe.liveness import (
    beats_of,
    iteration_of,
    launch_trained_since,
    liveness_of,
    longest_phase,
    step_times,
)
from tr11ops.observe.observations import TrainingEvent
from tr11ops.observe.snapshot import Checkpoint, Snapshot
from tr11ops.runcard.kinds import ForeignCard
from trainer.contract.attempt import UnheldCheckpoint
from trainer.contract.errors import RangeError
from trainer.contract.metrics_record import SAVE_FAILED
from trainer.schedule.path import merge_ranges, parse_range

FALLS_BACK = "A resume takes the newest checkpoint that is whole."


@detector(
    "checkpoint-unsound",
    needs=("checkpoints",),
    uses=("checkpoints.latest", "jobs", "heartbeats", "training.launch_ends"),
    bound="manifest, sizes, the last reading of all bytes; launches that fail at one step after it",
    severities="WARNING, CRITICAL when none is whole; INFO while an older one is tried",
)
def checkpoint_unsound(snapshot: Snapshot) -> Iterator[Finding]:
    """The newest checkpoint is not whole, or `latest` names one that is not there: a resume falls back
    to an older one.

    Or it is whole, and what begins from it fails: then the agent has gone back to an older one.

    CRITICAL when no sound checkpoint was found at all, although there are some.
    """
    checkpoints = seen(snapshot.checkpoints)
    sound = checkpoints.newest_sound
    bad = [entry for entry in checkpoints.examined if not entry.is_sound]
    if bad and not bad[0].complete and _may_be_saving(snapshot):
        bad = bad[1:]
    if bad:
        lines = [
            f"{derived.checkpoint_label(snapshot, entry.step)}: {(*entry.faults, 'no manifest')[0]}"
            for entry in bad
        ]
        if sound:
            fall_back = f"a resume takes {derived.checkpoint_label(snapshot, sound.step)}"
        else:
            fall_back = "no sound checkpoint was found"
        yield Finding(
            checkpoint_unsound.name,
            Severity.WARNING if sound else Severity.CRITICAL,
            f"{derived.checkpoint_label(snapshot, bad[0].step)} is not whole; {fall_back}",
            subject=str(bad[0].step),
            identity=(str(bad[0].step),),
            evidence=tuple(lines[:3]),
            fix=derived.command(snapshot, "checkpoint-now --wait") if snapshot.active_jobs else "",
            by_itself=FALLS_BACK,
        )
    yield from _doubted(snapshot, sound)
    latest = checkpoints.latest
    if isinstance(latest, int) and latest not in checkpoints.steps:
        yield Finding(
            checkpoint_unsound.name,
            Severity.WARNING if sound else Severity.CRITICAL,
            f"latest names {derived.checkpoint_label(snapshot, latest)}, which is not there",
            subject=f"latest-{latest}",
            identity=(f"latest-{latest}",),
            by_itself=FALLS_BACK,
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
    name = derived.checkpoint_label(snapshot, last.began_at)
    older = derived.checkpoint_label(snapshot, last.older_checkpoint or 0)
    yield Finding(
        checkpoint_unsound.name,
        Severity.WARNING if is_proven else Severity.INFO,
        f"{name} is doubted: what begins from it ends at iteration {last.reached}; {older} is tried",
        subject=str(last.began_at),
        identity=(f"doubted-{last.began_at}",),
        evidence=(last.why,),
        fix=derived.command(snapshot, f"checkpoints verify {last.began_at}"),
        by_itself=FALLS_BACK,
    )


def _may_be_saving(snapshot: Snapshot) -> bool:
    """Whether a rank is saving, or no one can see that none is."""
    if isinstance(snapshot.jobs, Unknown) or isinstance(snapshot.heartbeats, Unknown):
        return True
    active = snapshot.active_jobs
    return any(beat.phase == "saving" for job in active for beat in beats_of(snapshot, job))


STORAGE = "storage"
# as systems say ENOSPC and EDQUOT
WANT_OF_ROOM = ("No space left on device", "Disk quota exceeded")

LEAVES_NODE = (
    "After a second save in a row that fails there, the attempt leaves that node by itself: a spare "
    "takes its place, or the next task goes on."
)
WARN_INTERVALS = 1.5  # a save in the background may take a part of the next interval
CRITICAL_INTERVALS = 2.5


@detector(
    "checkpoint-overdue",
    needs=("jobs", "checkpoints"),
    uses=(
        "steps",
        "heartbeats",
        "training.phases",
        "training.events",
        "operation.save_room",
        "operation.shut_folders",
    ),
    bound="one save that failed, or 1.5 intervals; 2.5",
    severities="WARNING, CRITICAL",
    runbook="save-failed.md",
)
def checkpoint_overdue(snapshot: Snapshot) -> Iterator[Finding]:
    """The training goes on, but a save failed, or none keeps up: a fault now costs more than one save
    interval.

    What to do: `tr11 logs`, look for `SAVE FAILED`; make room on the disk; `tr11 checkpoint-now`.

    Counts iterations, and minutes of training, since the newest sound checkpoint, while a job is
    active.

    Only what that job itself has trained: what an attempt before it left unsaved is lost already,
    or was given up by a roll-back; what is passed over was not trained. A save that is under way
    may take as long as one has taken, and more. Where a full disk has room again it is no more than
    a WARNING until the next save is due.
    """
    checkpoints = seen(snapshot.checkpoints)
    if not snapshot.active_jobs:
        return
    sound = checkpoints.newest_sound
    if sound is None and checkpoints.steps:
        return  # checkpoint-unsound has said it
    if snapshot.run.standing is not None and isinstance(snapshot.heartbeats, Unknown):
        return  # what such a trainer has saved, and no one has held yet, only they tell
    unheld = _unheld(snapshot)
    saved = max((one.step for one in (sound, unheld) if one is not None), default=0)
    trained = iteration_of(snapshot, snapshot.active_jobs)
    done = saved if trained is None else trained
    unsaved = max(0, done - saved - skipped_iterations(snapshot, saved, done))
    intervals, title = max(_of_iterations(snapshot, unsaved), _of_minutes(snapshot, sound, unheld))
    failed = _failed_since(snapshot, sound)
    is_late = intervals > WARN_INTERVALS and not _is_saving(snapshot)
    if not is_late and failed is None:
        return
    event = failed.values if failed is not None else {}
    alone, why = (str(event.get(name) or "") for name in ("said", "why"))
    if alone:
        title = alone
    elif not is_late:
        title = f"the save of step {event.get('step')} failed"
    pace = derived.seconds_per_iteration(snapshot)
    if pace is None:
        at_stake = ""
    else:
        at_stake = f", {duration(unsaved * pace)} of work"
    save = derived.command(snapshot, "checkpoint-now --wait")
    if saved:
        since = f"since {saved}"
    elif snapshot.run.standing is None:
        since = "and none was ever saved"
    else:
        since = "and none that is whole was seen"
        if not snapshot.run.is_watched:
            save = _look_at_folder(snapshot)
    due = _next_due(snapshot, failed)
    can_save = due is not None and done < due
    if can_save:
        title = f"{title}; there is room again, and the next save is due at iteration {due}"
    is_for_room = _is_for_want_of_room(snapshot, why) and not can_save
    is_critical = is_late and intervals > CRITICAL_INTERVALS and not can_save
    yield Finding(
        checkpoint_overdue.name,
        Severity.CRITICAL if is_critical else Severity.WARNING,
        title,
        evidence=(f"iteration {done}, {since}{at_stake}", *filter(None, [why])),
        fix=make_room(snapshot) if is_for_room else save,
        then=(save,) if is_for_room else (),
        fault=STORAGE if is_for_room else "",
        by_itself=LEAVES_NODE if alone else "",
    )


def _look_at_folder(snapshot: Snapshot) -> str:
    """The command that says of each checkpoint in another trainer's folder why it is not whole."""
    card = snapshot.run.source
    if not isinstance(card, ForeignCard) or not card.trainer.folder or not card.trainer.dialect:
        return derived.command(snapshot, "checkpoints list")
    words = f"trainer check --dialect {shlex.quote(card.trainer.dialect)} --folder {shlex.quote(card.trainer.folder)}"
    return derived.command(snapshot, words)


def _unheld(snapshot: Snapshot) -> UnheldCheckpoint | None:
    """The newest checkpoint that another trainer has saved, which is a checkpoint of the run only once
    its digests are read; None of tr11's own trainer.
    """
    beats = [beat for job in snapshot.active_jobs for beat in beats_of(snapshot, job)]
    saved = [beat.saved for beat in beats if beat.saved is not None]
    return max(saved, key=attrgetter("step"), default=None)


def _is_for_want_of_room(snapshot: Snapshot, why: str) -> bool:
    """Whether no save comes about as the disk is full: by the fault of the last one that failed; or
    by a look at the disk, for on a full one not even that is noted.
    """
    if any(folder.is_full for folder in known(snapshot.operation.shut_folders, ())):
        return True
    return any(words in why for words in WANT_OF_ROOM)


def _active_names(snapshot: Snapshot) -> frozenset[str]:
    return frozenset().union(*(derived.identifiers(job) for job in snapshot.active_jobs))


def _next_due(snapshot: Snapshot, failed: TrainingEvent | None) -> int | None:
    """The iteration at which the next save is due, where those before it found no room, and a look at
    the disk shows that there is room for one now; None where that is not so, or not known.

    On a full disk lines are missing, and the note that a save failed may be: both tell until when.
    """
    interval, sound = snapshot.run.checkpoint_interval, snapshot.newest_sound
    room = known(snapshot.operation.save_room, None)
    if interval is None or room is None or sound is None or sound.bytes is None:
        return None
    if room.free_bytes < sound.bytes or known(snapshot.operation.shut_folders, ()):
        return None
    names = _active_names(snapshot)
    lines = [step.record.iteration for step in known(snapshot.steps, ()) if step.job_id in names]
    gap = snapshot.run.log_interval
    without = [after for before, after in pairwise(lines) if after > before + gap]
    if failed is not None and _is_for_want_of_room(snapshot, str(failed.values.get("why") or "")):
        without.append(int(failed.values.get("step") or 0))
    if not without:
        return None
    return (max(without) // interval + 1) * interval


def _failed_since(snapshot: Snapshot, sound: Checkpoint | None) -> TrainingEvent | None:
    """The last save that failed, of a job that is there, where none has come about since."""
    names = _active_names(snapshot)
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


def _of_iterations(snapshot: Snapshot, unsaved: int) -> tuple[float, str]:
    """How many save intervals are not saved, and the sentence that says so."""
    interval = snapshot.run.checkpoint_interval
    if interval is None:
        return 0.0, ""
    return (
        unsaved / interval,
        f"no checkpoint for {unsaved} iterations (the interval is {interval})",
    )


def _of_minutes(
    snapshot: Snapshot, sound: Checkpoint | None, unheld: UnheldCheckpoint | None
) -> tuple[float, str]:
    """The same by the clock: from the newest checkpoint, held or not, or from the launch's first step
    where that is later.
    """
    minutes = snapshot.run.checkpoint_minutes
    names = _active_names(snapshot)
    stepped = step_times(snapshot, names)
    if minutes is None or not stepped:
        return 0.0, ""
    began = launch_trained_since(snapshot, names)
    since = max(
        [
            min(stepped) if began is None else began,
            *([sound.created] if sound and sound.created else []),
            *([unheld.time] if unheld else []),
        ]
    )
    late = max(0.0, snapshot.time - since)
    # What a save takes is no delay: the interval counts from the begin of one to the begin of the
    # next.
    saved_in = longest_phase(snapshot, "saving") or 0.0
    return (late - saved_in) / (60.0 * minutes), (
        f"no checkpoint for {duration(late)} of training (the interval is {duration(60.0 * minutes)})"
    )


def _is_saving(snapshot: Snapshot) -> bool:
    """Whether a save stops the training right now, for no longer than its patience."""
    for job in snapshot.active_jobs:
        liveness = liveness_of(snapshot, job)
        if liveness is not None and liveness.phase == "saving" and liveness.is_fresh(snapshot.time):
            return True
    return False


def pass_over(snapshot: Snapshot, first: int, last: int, lasts: bool = False) -> str:
    """`tr11 rollback STEP --skip FIRST-LAST`, to the newest checkpoint before `first`; with the
    word STEP where there is none, or it is not known. Where nothing was saved as yet, a launch that
    leaves the data out from the start.

    `lasts`: more may follow until the command is typed, so that it names no end, `--skip FIRST-`:
    the roll-back finds how far the training had come. (A launch cannot; its range is that of the
    look.)

    An older one than the newest sound one was not looked into: the roll-back does that, and refuses
    one that is not whole.

    "" for another trainer than tr11's own, of whose data tr11 knows nothing.
    """
    if snapshot.run.standing is not None:
        return ""
    checkpoints = known(snapshot.checkpoints, None)
    if checkpoints is not None and not checkpoints.steps:
        ranges = shlex.quote(f'data.skip_ranges=["{first}-{last}"]')
        return derived.command(snapshot, f"launch --replace --set {ranges}")
    sound = checkpoints and checkpoints.newest_sound
    steps: tuple[int, ...] = ()
    if checkpoints is not None and sound:
        steps = tuple(step for step in checkpoints.steps if step <= sound.step and step < first)
    step = max(steps, default="STEP")
    return derived.command(snapshot, f"rollback {step} --skip {first}-{'' if lasts else last}")


def is_rollback(passing: str) -> bool:
    """Whether a command that passes over data goes back to a checkpoint; else it launches from the
    start.
    """
    return "rollback" in passing.split()


def after_passing(snapshot: Snapshot, passing: str) -> tuple[str, ...]:
    """What lets it train on after a roll-back; a launch that leaves the data out needs nothing
    more.
    """
    if not is_rollback(passing):
        return ()
    return derived.train_on(snapshot)


def iterations(first: int, last: int) -> str:
    """These iterations in words."""
    if first == last:
        return f"iteration {first}"
    return f"iterations {first} to {last}"


def skipped_iterations(snapshot: Snapshot, after: int, last: int) -> int:
    """How many of the iterations behind `after`, up to `last`, are passed over: by the card, or by
    a roll-back.
    """
    ranges = list(snapshot.run.skip_ranges)
    for event in derived.standing_rollbacks(snapshot):
        with suppress(RangeError):  # "nothing"
            ranges.append(parse_range(str(event.values.get("skip"))))
    return sum(
        max(0, min(one.last, last) - max(one.first, after + 1) + 1) for one in merge_ranges(ranges)
    )
