"""The checkpoints of any trainer, as its dialect tells them: which are whole, which one it would take,
and which one it should. Looks at the disk each time; changes nothing.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from tr11ops.base.observed import cause
from tr11ops.base.units import duration
from tr11ops.dialects.dialect import CheckpointRules
from tr11ops.dialects.rules import (
    CheckpointPlace,
    RuleBroken,
    RuleNotKnown,
    check_rule,
    files_named,
    read_tracker,
    step_in,
)
from trainer.contract.record import Record

POLL_SECONDS = 1.0
State = Literal["whole", "being written", "weights only", "broken", "not known"]


class FoundCheckpoint(Record):
    """One checkpoint of a folder. `why` it is not whole, or not known; "" where it is whole.
    `changed`: when a file in it was last written, seconds since the epoch. `is_complete`: it has all
    that its dialect asks of a whole one, though it may have been written a moment ago.
    """

    name: str
    step: int | None
    state: State
    bytes: int
    changed: float
    why: str = ""
    is_complete: bool = False


class CheckpointSurvey(Record):
    """The checkpoints of a folder, the oldest first. `taken`: the one that the trainer would resume
    from; `wanted`: the newest that a training can go on from. `taken_unknown`: why it is not known
    which it would take, "" where it is. `lost`: what the file that names the newest says instead of
    one that is there; None where it names one, or is not there.
    """

    folder: str
    found: tuple[FoundCheckpoint, ...]
    taken: FoundCheckpoint | None
    wanted: FoundCheckpoint | None
    taken_unknown: str = ""
    lost: str | None = None

    @property
    def whole(self) -> tuple[FoundCheckpoint, ...]:
        """Those that a training can go on from, the oldest first."""
        return tuple(one for one in self.found if one.state == "whole")

    @property
    def is_fresh(self) -> bool:
        """Whether the one that it takes next was written a moment ago, so that no one can tell yet."""
        return self.taken is not None and self.taken.state == "being written"

    @property
    def unsure(self) -> str:
        """Why it is not known whether the next start would go well, "" where it is."""
        if self.taken is not None and self.taken.state == "not known":
            return f"whether {self.taken.name}, which it takes next, is whole: {self.taken.why}"
        if self.taken_unknown:
            return f"which checkpoint it takes next: {self.taken_unknown}"
        return ""

    @property
    def conflict(self) -> str:
        """What would go wrong at the next start, "" for nothing."""
        if self.lost is not None:
            return f"the next start would look for {self.lost!r}, which is not there"
        if self.taken is not None:
            return self._taken_conflict(self.taken)
        if self.taken_unknown or not self.found:
            return ""
        return f"it would start from the beginning beside {self.found[-1].name}"

    def _taken_conflict(self, taken: FoundCheckpoint) -> str:
        if self.is_fresh:
            return f"it would take {taken.name}, which was written a moment ago"
        if taken.state not in ("broken", "weights only"):
            return ""
        fault = f"it would take {taken.name}, which is {taken.state} ({taken.why})"
        if self.wanted is None:
            return f"{fault}, and no other is whole"
        return f"{fault}, in place of {self.wanted.name}"


class _Look(Record):
    """What a look goes by: the dialect's rules, the folder, how many ranks there are, when, and what was
    whole at an earlier look.
    """

    rules: CheckpointRules
    folder: Path
    world_size: int | None
    now: float
    known: Mapping[str, FoundCheckpoint] = {}

    def place(self, name: str) -> CheckpointPlace:
        base = self.folder
        if self.rules.layout == "folder":
            base = self.folder / name
        step = self.rules.names.step_of(name)
        return CheckpointPlace(self.folder, name, base, step=step, world_size=self.world_size)


def survey(
    rules: CheckpointRules,
    folder: Path,
    world_size: int | None,
    now: float,
    before: CheckpointSurvey | None = None,
) -> CheckpointSurvey:
    """Look at all checkpoints in a folder. `now`: seconds since the epoch. `before`: an earlier look; what
    was whole then and has the same length and moment is not read again. Raises OSError where the folder
    cannot be read.
    """
    known = {}
    if before is not None:
        known = {one.name: one for one in before.whole}
    look = _Look(rules, folder, world_size, now, known=known)
    names = [one.name for one in folder.iterdir() if rules.names.fits(one.name)]
    looked = (_found(look, name) for name in names)
    found = sorted((one for one in looked if one is not None), key=_age)
    resumable = [one for one in found if one.state == "whole"]
    choice = _taken(look, found)
    return CheckpointSurvey(
        folder=str(folder),
        found=tuple(found),
        taken=choice.taken,
        wanted=next(reversed(resumable), None),
        taken_unknown=choice.unknown,
        lost=choice.lost,
    )


def settled(
    look: Callable[[float], CheckpointSurvey],
    quiet: float,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> CheckpointSurvey:
    """The checkpoints once none is being written, or after twice the time that a save may pause (`quiet`).
    `look` is asked with the moment, and may raise.
    """
    until = clock() + 2 * quiet
    while True:
        found = look(clock())
        if not any(one.state == "being written" for one in found.found) or clock() > until:
            return found
        pause(POLL_SECONDS)


def look_at(
    rules: CheckpointRules, folder: Path, name: str, world_size: int | None, now: float
) -> FoundCheckpoint | None:
    """One checkpoint of a folder, as in `survey`; None where there is none of this name. Raises
    OSError.
    """
    return _found(_Look(rules, folder, world_size, now), name)


def signature(rules: CheckpointRules, folder: Path) -> object:
    """What changes when a checkpoint comes or goes, or is written over: a few looks at files, whatever
    lies in the folder. None where there is no folder. Raises OSError.
    """
    try:
        places = [folder]
        if rules.tracker:
            places.append(folder / rules.tracker)
        if rules.layout != "folder":
            places += [one for one in folder.iterdir() if rules.names.fits(one.name)]
    except FileNotFoundError:
        return None
    facts = []
    for place in places:
        with suppress(FileNotFoundError):
            status = place.stat()
            facts.append((place.name, status.st_mtime_ns, status.st_size, status.st_ino))
    return sorted(facts)


def files_of(rules: CheckpointRules, folder: Path, found: FoundCheckpoint) -> list[str]:
    """All files of a checkpoint, by their paths below `folder`. Of those that lie loose, the ones
    that its rules name. Raises OSError.
    """
    if rules.layout == "file":
        return [found.name]
    place = _Look(rules, folder, None, 0.0).place(found.name)
    if rules.layout == "files":
        named = files_named((*rules.complete, *rules.resumable), place)
        return sorted({found.name, *named})
    inner = [path for path in place.paths if not (place.base / path).is_dir()]
    links = [path for path in place.paths if _is_linked_folder(place.base / path)]
    return sorted(f"{found.name}/{path}" for path in (*inner, *links))


def _is_linked_folder(path: Path) -> bool:
    return path.is_symlink() and path.is_dir()


def _age(found: FoundCheckpoint) -> tuple[int, float]:
    if found.step is None:
        return -1, found.changed
    return found.step, found.changed


def _found(look: _Look, name: str) -> FoundCheckpoint | None:
    """One checkpoint; None for what only bears such a name, or has gone meanwhile."""
    place = look.place(name)
    size, changed = 0, 0.0
    try:
        if look.rules.layout == "folder" and not stat.S_ISDIR(place.base.stat().st_mode):
            return None
        size, changed = _extent(look.rules, place)
        known = look.known.get(name)
        if known is not None and (known.bytes, known.changed) == (size, changed):
            return known
        state, why = _state(look.rules, place)
    except OSError as error:
        if not os.path.lexists(look.folder / name):
            return None
        state, why = "not known", cause(error)
    is_complete = state == "whole"
    if state != "not known" and look.now - changed < look.rules.quiet:
        state, why = "being written", f"changed {max(0.0, look.now - changed):.0f} s ago"
    if changed - look.now > look.rules.quiet:
        state, why = (
            "not known",
            f"a clock is ahead: it was changed in {duration(changed - look.now)}",
        )
    step = place.step
    if step is None and look.rules.step_key and is_complete:
        step = _step_inside(look.rules, place)
    return FoundCheckpoint(
        name, step, state, bytes=size, changed=changed, why=why, is_complete=is_complete
    )


def _step_inside(rules: CheckpointRules, place: CheckpointPlace) -> int | None:
    try:
        return step_in(place.root / place.name, rules.step_key)
    except OSError:
        return None


def _state(rules: CheckpointRules, place: CheckpointPlace) -> tuple[State, str]:
    """What holds of a checkpoint, but for its age. Raises OSError."""
    failed = _first_fault(rules.complete, place)
    if failed is not None:
        return failed
    failed = _first_fault(rules.resumable, place)
    if failed is None:
        return "whole", ""
    state, why = failed
    if state == "broken":
        return "weights only", why
    return state, why


def _first_fault(texts: Sequence[str], place: CheckpointPlace) -> tuple[State, str] | None:
    """The first rule that is broken, else the first of which nothing is known; None where all
    hold. Raises OSError.
    """
    unknown = ""
    for text in texts:
        try:
            check_rule(text, place)
        except RuleBroken as fault:
            return "broken", str(fault)
        except RuleNotKnown as fault:
            unknown = unknown or str(fault)
    if unknown:
        return "not known", unknown
    return None


def _extent(rules: CheckpointRules, place: CheckpointPlace) -> tuple[int, float]:
    """The bytes of a checkpoint, and when it was last written. Raises OSError."""
    if rules.layout == "folder":
        facts = [(place.base / path).lstat() for path in place.paths]
        facts.append(place.base.lstat())
    else:
        facts = [(place.root / place.name).stat()]
    files = [one for one in facts if not stat.S_ISDIR(one.st_mode)]
    return sum(one.st_size for one in files), max(one.st_mtime for one in facts)


# ----------------------------------------------------------------------------- which it takes
class _Choice(NamedTuple):
    """As the fields of the survey: what it takes, why that is not known, what is named and gone."""

    taken: FoundCheckpoint | None = None
    unknown: str = ""
    lost: str | None = None


def _taken(look: _Look, found: Sequence[FoundCheckpoint]) -> _Choice:
    """The checkpoint that the trainer takes at its next start, or why that is not known."""
    if look.rules.tracker:
        return _tracked(look, found)
    if look.rules.newest == "told":
        return _Choice(unknown="its command says which one")
    if look.rules.newest == "only":
        return _Choice(next(reversed(found), None))
    return _highest(look, found)


def _tracked(look: _Look, found: Sequence[FoundCheckpoint]) -> _Choice:
    try:
        said = read_tracker(look.folder / look.rules.tracker)[:80]
    except FileNotFoundError:
        return _Choice()
    except OSError as error:
        return _Choice(unknown=cause(error))
    for one in found:
        if said in (one.name, str(one.step)):
            return _Choice(one)
    return _Choice(lost=said)


def _highest_whole(found: Sequence[FoundCheckpoint]) -> _Choice:
    """Where it is not known by what the trainer tells a whole one: it knows one when it sees it."""
    if not found:
        return _Choice()
    if found[-1].state == "whole":
        return _Choice(found[-1])
    return _Choice(unknown="by what it tells a whole one is not known")


def _highest(look: _Look, found: Sequence[FoundCheckpoint]) -> _Choice:
    if look.rules.believes is None:
        return _highest_whole(found)
    for one in reversed(found):
        try:
            failed = _first_fault(look.rules.believes, look.place(one.name))
        except OSError as error:
            return _Choice(unknown=cause(error))
        if failed is None:
            return _Choice(one)
        if failed[0] == "not known":
            return _Choice(unknown=f"of {one.name}: {failed[1]}")
    return _Choice()
