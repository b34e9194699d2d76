"""What a foreign trainer finds when it is started: a look at its checkpoints before each launch.

In this order, each of which can be done again by the next launch wherever this one was killed:
what is whole and not held yet is linked (its digests are read later: `tr11ops.trainers.hold`); a
checkpoint that the run holds and the trainer's folder lacks, newer than all whole ones there, is
put back; a broken one in its way is set aside. No file of the trainer's is deleted or written to.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tr11ops.base.errors import Refusal
from tr11ops.base.observed import cause
from tr11ops.base.units import counted
from tr11ops.rundir.checkpoint_digests import note_damage
from tr11ops.rundir.copies import identity_of
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trainers.aside import Aside, move_aside, plan_aside, set_aside
from tr11ops.trainers.checkpoints import CheckpointSurvey, FoundCheckpoint, settled, survey
from tr11ops.trainers.held import (
    WORD,
    Fence,
    HoldPlace,
    NotHeld,
    NotLinked,
    Origin,
    Report,
    check_room,
    copy,
    is_held,
    is_older,
    is_same,
    link,
    modified_at,
    note_overwritten,
    read_origin,
    take_hold,
    with_held,
)
from tr11ops.trainers.moved import aside_place
from tr11ops.trainers.seal import seal, sealed_files
from trainer.contract.checkpoint_formats import FOREIGN, FOREIGN_FILE
from trainer.contract.checkpoint_names import (
    checkpoint_name,
    checkpoint_steps,
    read_latest,
    set_apart,
)
from trainer.contract.checkpoints import refusal
from trainer.contract.files import make_shared, sync_folder, write_atomically
from trainer.contract.manifest import Manifest, file_digest
from trainer.contract.record import Record
from trainer.contract.replacing import free_name, settle_replaced
from trainer.contract.resumable import ResumeNeed, ResumeSearch, search, size_faults

NEED = ResumeNeed(trainer="foreign")
_STAGING = ".put-back"  # what is being put back, beside the folder of the checkpoints


class ResumePoint(Record):
    """What the trainer resumes from: the step, where the name or the file says one, the name in the
    trainer's folder, and the path.
    """

    step: int | None
    name: str
    path: Path


class _Preparing(Record):
    """What a preparation goes by."""

    place: HoldPlace
    fence: Fence
    report: Report
    clock: Callable[[], float]
    pause: Callable[[float], None]

    def look(self) -> CheckpointSurvey:
        """The checkpoints once none is being written. Raises Refusal where they cannot be read."""
        place = self.place
        look = partial(survey, place.rules, place.folder, place.ranks)
        try:
            found = settled(look, place.rules.quiet, self.clock, pause=self.pause)
            return with_held(place, found)
        except FileNotFoundError:
            return CheckpointSurvey(str(place.folder), (), None, None)
        except OSError as error:
            raise Refusal(
                f"{place.folder}: its checkpoints cannot be read ({cause(error)}), so it is not known "
                "what the trainer would start from; repair that first"
            ) from None


def prepare(
    place: HoldPlace,
    fence: Fence,
    report: Report,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> ResumePoint | None:
    """See the module. Returns what the trainer must resume from; None where it starts from the beginning, as there
    is nothing to resume from.

    Only for the holder of the run's lease, before the trainer starts. Waits while something seems to
    be written, twice the dialect's `quiet` at most. Raises Refusal where a start would be a risk, in
    one line with the fix; what `fence` raises.
    """
    run = _Preparing(place, fence, report, clock=clock, pause=pause)
    fence()
    try:
        settle_replaced(place.paths.checkpoints, report)
        shutil.rmtree(_staging(place), ignore_errors=True)
        found = run.look()
        _hold_all(run, found)
        found = _with_newest(run, found)
        found = _without_broken(run, found)
    except OSError as error:
        raise Refusal(f"the checkpoints could not be made ready: {cause(error)}") from None
    return _resume_point(place, found)


def _staging(place: HoldPlace) -> Path:
    return place.folder.with_name(f"{place.folder.name}{_STAGING}")


# ----------------------------------------------------------------------------- hold
def _hold_all(run: _Preparing, found: CheckpointSurvey) -> None:
    """Take hold of what is whole, the newest first. What cannot be held keeps no training from its
    start: it is said.
    """
    place = run.place
    for one in reversed(found.found):
        if one.state != "whole" or _is_taken(place, one) or is_older(place, one):
            continue
        try:
            take_hold(place, one, run.clock())
        except NotLinked:
            return  # the holder copies it while the trainer is at work
        except (NotHeld, OSError) as error:
            run.report(f"tr11: WARNING: {one.name} is not held: {cause(error)}")


def _is_taken(place: HoldPlace, found: FoundCheckpoint) -> bool:
    """Whether a checkpoint is held, or its files are in a hidden folder. Raises OSError."""
    if is_held(place, found):
        return True
    for hidden, _ in set_apart(place.paths.checkpoints, WORD):
        try:
            origin = read_origin(hidden)
        except ValueError:
            continue
        if origin is not None and is_same(origin, place, found):
            return True
    return False


# ----------------------------------------------------------------------------- put back
def _with_newest(run: _Preparing, found: CheckpointSurvey) -> CheckpointSurvey:
    """The checkpoints once the newest that is held is among them. Raises Refusal, OSError."""
    place = run.place
    held = _newest_held(place)
    _refuse_newer(found, held)
    if held.step is None:
        if held.passed and found.wanted is None:
            folder = place.paths.checkpoints
            raise Refusal("; ".join(refusal(folder, [step for step, _ in held.passed], held)))
        return found
    if found.wanted is not None and (found.wanted.step is None or found.wanted.step >= held.step):
        return found
    home = place.paths.checkpoint(held.step)
    origin = _origin_at(home)
    if found.wanted is not None and modified_at(place, found.wanted) > origin.modified:
        run.report(
            f"tr11: {found.wanted.name} was written after {home.name}, which the run holds of an earlier "
            "course: the trainer goes on from the one that it wrote last"
        )
        return found
    there = next((one for one in found.found if one.name == origin.foreign.name), None)
    _check_ranks(place, origin)
    if there is not None and there.state in ("not known", "being written"):
        raise Refusal(
            f"whether {there.name} in {found.folder} is whole is not known ({there.why}), and {home.name} "
            "holds a whole one; look at it, and start again"
        )
    assert held.manifest is not None
    if _is_damaged(place, home, held.manifest):
        return _with_newest(run, found)
    run.fence()
    if there is not None:
        moved = move_aside(there, place.rules, place.folder, run.clock())
        run.report(
            f"tr11: {there.name} is {there.state} ({there.why}): it lies in {moved[0].parent} now"
        )
    _put_back(run, home, origin)
    run.report(f"tr11: {origin.foreign.name} was put back from {home.name}")
    again = run.look()
    if again.wanted is None or again.wanted.name != origin.foreign.name:
        back = next((one for one in again.found if one.name == origin.foreign.name), None)
        if back is None:
            why = "it is not there"
        else:
            why = f"it is {back.state}: {back.why}"
        raise Refusal(f"{origin.foreign.name} was put back from {home}, and {why}; look at it")
    return again


def _refuse_newer(found: CheckpointSurvey, held: ResumeSearch) -> None:
    """Raises Refusal where a newer tr11 has left a checkpoint that is newer than all that the trainer has:
    its steps would be trained again, and it would be replaced.
    """
    reached = -1
    if found.wanted is not None:
        if found.wanted.step is None:
            return
        reached = found.wanted.step
    for step, fault in held.passed:
        if fault.kind == "newer format" and step > reached:
            raise Refusal(
                f"{checkpoint_name(step)} is newer than what the trainer has in {found.folder}, and not for this "
                f"tr11 to judge: {fault.text}; use the tr11 that wrote it, or move it away to go on from an older one"
            )


def _newest_held(place: HoldPlace) -> ResumeSearch:
    """What a training could resume from, of what is held. Raises OSError."""
    folder = place.paths.checkpoints
    try:
        latest = read_latest(folder)
    except ValueError:
        latest = None
    steps = checkpoint_steps(folder)
    return search(folder, steps, latest=latest, need=NEED, faults_of=partial(_faults, place))


def _faults(place: HoldPlace, home: Path, manifest: Manifest) -> list[str]:
    """What sizes and records show of a held checkpoint, and whether its trainer wrote over it. Raises
    OSError, ValueError.
    """
    origin = read_origin(home)
    if origin is None:
        return [f"it has no {FOREIGN_FILE}, which says where its files belong"]
    note_overwritten(place, home, origin)
    return size_faults(home, manifest)


def _is_damaged(place: HoldPlace, home: Path, manifest: Manifest) -> bool:
    """Whether a byte of it is not what its manifest says: all are read that are not as they were
    sealed, and damage is put on record.
    """
    directory, identity = RunDirectory(place.paths, kill_switch=place.paths.root), identity_of(home)
    known = sealed_files(place.paths, manifest.step)
    unread = [one for one in manifest.files if one.path not in known]
    bad = [one.path for one in unread if file_digest(home / one.path) != one.digest]
    noted = [
        note_damage(directory, manifest.step, identity, path=path, why="it was to be put back")
        for path in bad
    ]
    return any(noted)


def _origin_at(home: Path) -> Origin:
    """Raises Refusal."""
    try:
        origin = read_origin(home)
    except ValueError as error:
        raise Refusal(str(error)) from None
    if origin is None:
        raise Refusal(f"{home} does not say where its files belong; restore it from a copy")
    return origin


def _check_ranks(place: HoldPlace, origin: Origin) -> None:
    """Raises Refusal where the trainer could not resume from it on so many ranks."""
    wrote = origin.foreign.ranks
    if wrote is None or place.ranks is None or place.rules.world_size != "same":
        return
    if wrote != place.ranks:
        raise Refusal(
            f"{origin.foreign.name} was written by {counted(wrote, 'rank')}, this launch has "
            f"{place.ranks}, and the trainer resumes on the same number alone; launch with as many as then"
        )


def _put_back(run: _Preparing, home: Path, origin: Origin) -> None:
    """Make a held checkpoint one of the trainer's again. It is put together beside the trainer's
    folder, since some find a folder under whatever name it bears there.
    """
    place, name = run.place, origin.foreign.name
    stage = _staging(place) / uuid.uuid4().hex[:12]
    make_shared(stage)
    if place.copies:
        check_room(stage, origin.bytes)
    for file in origin.files:
        held, target = home / FOREIGN / file.path, stage / file.path
        make_shared(target.parent)
        if place.copies or not link(held, target):
            check_room(stage, file.bytes)
            copy(held, target, file)
        if target.stat().st_mtime_ns != file.modified:  # as where it was restored from a copy
            os.utime(target, ns=(file.modified, file.modified))
    folders = [path for path in stage.rglob("*") if path.is_dir()]
    newest = origin.modified
    for inner in sorted(folders, reverse=True):
        sync_folder(inner)
        os.utime(inner, ns=(newest, newest))
    make_shared(place.folder)
    if place.rules.tracker:
        tracker = (place.folder / place.rules.tracker).resolve()
        write_atomically(tracker, place.rules.tracked(name, origin.step))
    entries = sorted(path.name for path in stage.iterdir() if path.name != name)
    for entry in (*entries, name):  # the one by which it is found comes last
        goal = place.folder / entry
        if os.path.lexists(goal):  # a loose file of an earlier save of this step
            make_shared(aside_place(place.folder))
            goal.rename(free_name(aside_place(place.folder), entry))
        (stage / entry).rename(goal)
    sync_folder(place.folder)
    if not place.copies:
        with suppress(OSError):  # its files have new names, and new ctimes
            seal(place.paths, origin)
    shutil.rmtree(_staging(place), ignore_errors=True)


# ----------------------------------------------------------------------------- set aside
def _without_broken(run: _Preparing, found: CheckpointSurvey) -> CheckpointSurvey:
    """The checkpoints once nothing stands in the way of the newest whole one. Raises Refusal, OSError."""
    place = run.place
    plan = _plan(place, found)
    if plan is None:
        return found
    run.fence()
    set_aside(plan, place.rules, place.folder, run.clock())
    for one in plan.moved:
        run.report(
            f"tr11: {one.name} is {one.state} ({one.why}): it lies in {aside_place(place.folder)} now, "
            f"and the trainer goes on from {plan.back_to.name}"
        )
    return run.look()


def _plan(place: HoldPlace, found: CheckpointSurvey) -> Aside | None:
    """Pure. Raises Refusal."""
    if not (place.told or place.rules.newest == "told"):
        return plan_aside(place.rules, found)
    if not found.found:
        return None
    if found.wanted is None:
        last = found.found[-1]
        raise Refusal(
            f"{last.name} in {found.folder} is {last.state} ({last.why}), and none is whole; restore a copy, or "
            f"move {last.name} away to start from the beginning"
        )
    newer = found.found[found.found.index(found.wanted) + 1 :]
    unsure = [one for one in newer if one.state in ("being written", "not known")]
    if unsure:
        raise Refusal(
            f"whether {unsure[-1].name} in {found.folder} is whole is not known ({unsure[-1].why}); look at it, "
            "and start again"
        )
    broken = tuple(one for one in newer if one.state == "broken")
    if not broken:
        return None
    return Aside(broken, found.wanted)


def _resume_point(place: HoldPlace, found: CheckpointSurvey) -> ResumePoint | None:
    """Raises Refusal where the trainer would start from the beginning, or from another one."""
    if not found.found:
        return None
    if found.wanted is None:
        raise Refusal(f"{found.folder} holds {found.found[-1].name}, and none that is whole")
    problem = found.conflict
    if problem and not place.told:
        raise Refusal(f"{problem}; look at {found.folder}")
    wanted = found.wanted
    return ResumePoint(wanted.step, wanted.name, place.folder / wanted.name)
