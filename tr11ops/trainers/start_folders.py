"""A folder of its own for what each start of a foreign trainer saves, so that a start of the past, on a node
that was frozen and wakes, writes where no one looks any more.

    FOLDER/start-7/...                          what start 7 saves, and the whole ones that it took over
    FOLDER/current -> start-7                   what everyone else reads
    state/checkpoints/VARIANT/starts/6.json     what of start 6 counts, as it was when a later one took over

`FOLDER` is where the checkpoints lie otherwise; what lies in it directly counts as start 0. Numbers are the
epochs of the run's lease. A start takes over what is whole in the folders of all earlier ones: it is moved,
which takes no room, and leaves the paths of the earlier start without it. What is not on the list of an
earlier start, or not as it was then, no start goes on from. Each step can be done again by the next start
wherever this one was killed.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import Refusal
from tr11ops.base.observed import cause
from tr11ops.base.units import first_few
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.trainers.checkpoints import (
    CheckpointSurvey,
    FoundCheckpoint,
    files_of,
    look_at,
    settled,
    survey,
)
from tr11ops.trainers.held import Fence, HoldPlace, Report, link, with_held
from tr11ops.trainers.start_names import CURRENT, base_of, folder_of, start_numbers
from trainer.contract.documents import read_record, write_record
from trainer.contract.errors import Tr11Error
from trainer.contract.files import make_shared, sync_folder, write_atomically
from trainer.contract.record import Count, Finite, Record

SCHEMA = 1


class ListedCheckpoint(Record):
    """One that counts, as it lay there: its name, its bytes, and when it was last written."""

    name: str
    bytes: Count
    changed: Finite

    def is_still(self, found: FoundCheckpoint | None) -> bool:
        """Whether what is found is what was listed."""
        return found is not None and (found.bytes, found.changed) == (self.bytes, self.changed)


class ClosedStart(Record):
    """What of an earlier start counts since start `by` took over at `time`. `taken`: the one that its
    trainer would have gone on from; "" where that is not known, or is none of them.
    """

    number: Count
    by: Count
    time: Finite
    checkpoints: tuple[ListedCheckpoint, ...] = ()
    taken: str = ""
    schema: int = SCHEMA


def with_own_folder(
    place: HoldPlace, settings: TrainerSettings, epoch: int, fence: Fence, report: Report
) -> HoldPlace:
    """The place with the folder in which the start under lease `epoch` saves, made ready; as `take_over`
    where each has its own.
    """
    if settings.saves_apart and settings.checkpoint_folder is not None:
        return take_over(place, settings.checkpoint_folder.resolve(), epoch, fence, report=report)
    with suppress(FileNotFoundError):  # what lies beside such folders counts again
        place.paths.start_record(0).unlink()
    return place


def take_over(
    place: HoldPlace,
    base: Path,
    epoch: int,
    fence: Fence,
    report: Report,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> HoldPlace:
    """Make the folder of the start under lease `epoch`, with what is whole of all earlier starts in it; the
    place with that folder. `base`: where the folders of starts lie.

    Only for the holder of the run's lease, before the trainer starts. Raises Refusal where a start would be
    a risk, in one line with the fix; what `fence` raises.
    """
    run = _TakeOver(place, base, fence, report=report, clock=clock, pause=pause)
    fence()
    try:
        return replace(place, folder=run.begin(epoch))
    except Tr11Error:
        raise
    except (OSError, ValueError) as error:
        raise Refusal(f"the folder of this start could not be made: {cause(error)}") from None


def refuse_beginning(place: HoldPlace) -> None:
    """Raises Refusal where a start would begin from random weights beside what earlier ones have saved.
    `place`: of this start, in which nothing is whole.
    """
    base = base_of(place.folder)
    for number in (*start_numbers(base), 0):
        folder = folder_of(base, number)
        if folder != place.folder and _names(place, folder):
            raise Refusal(
                f"{folder} holds {first_few(_names(place, folder), 3)}, and nothing whole is left of any start; "
                "restore a copy, or move that away to start from the beginning"
            )


class _TakeOver(Record):
    """What a start goes by when it takes over."""

    place: HoldPlace
    base: Path
    fence: Fence
    report: Report
    clock: Callable[[], float]
    pause: Callable[[float], None]

    def begin(self, epoch: int) -> Path:
        """Raises Refusal, OSError, ValueError."""
        numbers = start_numbers(self.base)
        number = max([epoch, *(one + 1 for one in numbers)])
        mine = folder_of(self.base, number)
        make_shared(mine)
        closed = [self._close(one, number) for one in (*numbers, 0)]
        self._write_tracker(closed, mine)
        for one in closed:
            for listed in one.checkpoints:
                self._move(listed, folder_of(self.base, one.number), mine)
            self._tidy(one.number)
        self.fence()
        fresh = self.base / f".{CURRENT}.{uuid.uuid4().hex[:12]}"
        fresh.symlink_to(mine.name)
        fresh.replace(self.base / CURRENT)
        sync_folder(self.base)
        return mine

    # ------------------------------------------------------------------ what counts
    def _close(self, number: int, by: int) -> ClosedStart:
        """The list of an earlier start; written where no later one has done so. Raises Refusal, OSError,
        ValueError.
        """
        path = self.place.paths.start_record(number)
        known = read_record(ClosedStart, path, "what of a start counts", SCHEMA)
        if known is not None:
            return known
        folder = folder_of(self.base, number)
        found = self._look(folder)
        self._refuse_unsure(found)
        listed = tuple(ListedCheckpoint(one.name, one.bytes, one.changed) for one in found.whole)
        taken = ""
        if found.taken in found.whole and found.taken is not None:
            taken = found.taken.name
        for one in found.found:
            if one.state != "whole":
                self.report(
                    f"tr11: {folder / one.name} is {one.state} ({one.why}): it stays there, and no start takes it"
                )
        record = ClosedStart(number, by, time=self.clock(), checkpoints=listed, taken=taken)
        self.fence()
        make_shared(path.parent)
        write_record(path, record)
        return record

    def _look(self, folder: Path) -> CheckpointSurvey:
        """The checkpoints of an earlier start, once none is being written, or a while later. Raises OSError."""
        place = replace(self.place, folder=folder)
        look = partial(survey, place.rules, folder, place.ranks)
        try:
            return with_held(place, settled(look, place.rules.quiet, self.clock, pause=self.pause))
        except FileNotFoundError:
            return CheckpointSurvey(str(folder), (), None, None)

    def _refuse_unsure(self, found: CheckpointSurvey) -> None:
        newer = found.found
        if found.wanted is not None:
            newer = newer[newer.index(found.wanted) + 1 :]
        for one in newer:
            if one.state == "not known":
                raise Refusal(
                    f"whether {one.name} in {found.folder} is whole is not known ({one.why}); look at it, and "
                    "start again"
                )

    # ------------------------------------------------------------------ taking it over
    def _write_tracker(self, closed: Sequence[ClosedStart], mine: Path) -> None:
        """The file that names the newest, before what it names is there: it is found by the next start too."""
        rules = self.place.rules
        there = [
            one.name for start in closed for one in start.checkpoints if self._is_there(start, one)
        ]
        if not rules.tracker or not there:
            return
        named = next((one.taken for one in closed if one.taken in there), "")
        name = named or max(there, key=self._step_of)
        self.fence()
        write_atomically(mine / rules.tracker, rules.tracked(name, rules.names.step_of(name)))

    def _step_of(self, name: str) -> int:
        step = self.place.rules.names.step_of(name)
        if step is None:
            return -1
        return step

    def _is_there(self, start: ClosedStart, listed: ListedCheckpoint) -> bool:
        return listed.is_still(self._found(folder_of(self.base, start.number), listed.name))

    def _found(self, folder: Path, name: str) -> FoundCheckpoint | None:
        place = self.place
        return look_at(place.rules, folder, name, world_size=place.ranks, now=self.clock())

    def _move(self, listed: ListedCheckpoint, source: Path, mine: Path) -> None:
        """Move one checkpoint, unless it is not what was listed, or this step was saved again later."""
        found = self._found(source, listed.name)
        if found is None or os.path.lexists(mine / listed.name):
            return
        if not listed.is_still(found):
            self.report(
                f"tr11: {source / listed.name} was written to after a later start had taken over: it is not taken"
            )
            return
        self.fence()
        if self.place.rules.layout != "files":
            (source / listed.name).rename(mine / listed.name)
            return
        paths = files_of(self.place.rules, source, found)
        others = [path for path in paths if path != listed.name]
        for path in (*others, listed.name):  # the one by which it is found comes last
            if not os.path.lexists(mine / path) and not link(source / path, mine / path):
                (source / path).rename(mine / path)
        for path in (listed.name, *others):
            (source / path).unlink(missing_ok=True)

    def _tidy(self, number: int) -> None:
        """Remove the folder of an earlier start that holds nothing more than what names its newest."""
        folder, rules = folder_of(self.base, number), self.place.rules
        if not number or not folder.is_dir():
            return
        left = {one.name for one in folder.iterdir()}
        if left <= {rules.tracker}:
            if left:
                (folder / rules.tracker).unlink(missing_ok=True)
            folder.rmdir()


def _names(place: HoldPlace, folder: Path) -> list[str]:
    """What bears the name of a checkpoint in a folder."""
    if not folder.is_dir():
        return []
    return sorted(one.name for one in folder.iterdir() if place.rules.names.fits(one.name))
