"""Holding the checkpoints of a job that is only watched: by one of those who watch, and never in the
way of the training.

Who holds has a claim. Where another process has it, nothing is held here, until that one has died:
on this host it is known at once. One of another host, or one that is frozen (stopped, or waiting for a
file system), is followed once its claim has run out: six renewals late. That is soon, for a mistake costs
nothing: who comes back finds the newer claim before it publishes. What another one left half done is
gone on with.

A link takes no room until the training deletes its own file; from then on the bytes that it counted
on are not free. So only as much is held as it never misses: see `lacks_room`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from tr11ops.base.observed import cause
from tr11ops.rundir.claims import ClaimTaken, CopyLock
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trainers.checkpoints import FoundCheckpoint
from tr11ops.trainers.held import WORD, ForeignFile, HoldPlace, NotHeld, read_origin
from tr11ops.trainers.hold import Holder
from trainer.contract.checkpoint_names import checkpoint_steps, set_apart
from trainer.contract.errors import LeaseLost
from trainer.contract.files import make_shared
from trainer.contract.record import Count, Record
from trainer.contract.units import size

CLAIM = "held"
RENEW_SECONDS = 30.0
CLAIM_SECONDS = 6 * RENEW_SECONDS
SPARE = 256 << 20  # bytes that are left besides
LINES_KEPT = 5


class OwnersRoom(Record):
    """The file system of a training that is someone else's, in bytes. `free`: there now; `linked`:
    what it would not free by deleting its own, because it is held; `save`: of one checkpoint.
    """

    free: Count
    linked: Count
    save: Count


def lacks_room(room: OwnersRoom) -> str:
    """Why one more checkpoint is not held, "" where it may be. Pure.

    Whatever the training deletes of what is held, this one included, as much must be free for what it
    writes instead, and one more save.
    """
    needed = room.linked + 2 * room.save + SPARE
    if room.free >= needed:
        return ""
    return f"its training may need the room: {size(needed)} would have to be free there"


class GuestHold:
    """Holds what is whole in the folder of a watched job. `said`: the last lines about it; `other`:
    who holds instead, "" where this process does.
    """

    def __init__(self, directory: RunDirectory, place: HoldPlace) -> None:
        self.said: deque[str] = deque(maxlen=LINES_KEPT)
        self.other = ""
        self._directory, self._place = directory, place
        self._lock: CopyLock | None = None
        self._holder: Holder | None = None

    @property
    def newest(self) -> int | None:
        """The newest step that is held; None where none is, or another process holds."""
        if self._holder is None:
            return None
        return self._holder.held

    def keep_on(self) -> None:
        """Begin to hold, or see to it that it goes on: for each look. What the file system refuses is
        said, and tried again.
        """
        if self._holder is not None and not self._holder.lost:
            return
        self.end()
        try:
            self._begin()
        except ClaimTaken as taken:
            self.other = f"{taken} holds its checkpoints"
        except (LeaseLost, OSError) as error:
            self._say(f"nothing is held: {cause(error)}")
            self.end()

    def _begin(self) -> None:
        make_shared(self._place.paths.checkpoints)
        lock = CopyLock(
            self._directory,
            CLAIM,
            threading.Event(),
            renew_seconds=RENEW_SECONDS,
            seconds=CLAIM_SECONDS,
        )
        lock.__enter__()
        self._lock, self.other = lock, ""
        self._holder = Holder(self._place, self._fence, self._say, consent=self._consent)
        self._holder.start()

    def catch_up(self, is_over: bool) -> None:
        """Hold what is whole now, to its last digest. `is_over`: the job has ended, so that what was
        written last is waited for.
        """
        if self._holder is None:
            return
        if is_over:
            self._holder.finish(2 * self._place.rules.quiet)
        self._holder.catch_up()

    def end(self) -> None:
        """Stop holding, and let another process do it."""
        if self._holder is not None:
            self._holder.stop()
        if self._lock is not None:
            with suppress(OSError):  # then it is over when this process is
                self._lock.__exit__()
        self._holder = self._lock = None

    def _fence(self) -> None:
        """Raises LeaseLost where another process has taken over, OSError."""
        assert self._lock is not None
        try:
            self._lock.check()
        except ClaimTaken as taken:
            raise LeaseLost(f"{taken} holds its checkpoints by now") from None

    def _consent(self, found: FoundCheckpoint) -> None:
        """Raises NotHeld where the training may need the room, OSError."""
        fault = lacks_room(_room(self._place, found.bytes))
        if _is_shared(self._place) and fault:
            raise NotHeld(fault)

    def _say(self, line: str) -> None:
        self.said.append(line.removeprefix("tr11: "))


def _is_shared(place: HoldPlace) -> bool:
    """Whether what is held lies on the training's own file system. Raises OSError."""
    return place.folder.stat().st_dev == place.paths.checkpoints.stat().st_dev


def _room(place: HoldPlace, save: int) -> OwnersRoom:
    """Raises OSError."""
    facts = os.statvfs(place.folder)
    folder = place.paths.checkpoints
    held = [place.paths.checkpoint(step) for step in checkpoint_steps(folder)]
    held += [path for path, _ in set_apart(folder, WORD)]
    linked = sum(_linked(place.folder, one) for one in held)
    return OwnersRoom(facts.f_bavail * facts.f_frsize, linked, save)


def _linked(folder: Path, held: Path) -> int:
    """How many bytes of a held checkpoint are files that the trainer still has. Raises OSError."""
    try:
        origin = read_origin(held)
    except ValueError:
        return 0
    if origin is None:
        return 0
    return sum(one.bytes for one in origin.files if one.linked and _has(folder, one))


def _has(folder: Path, file: ForeignFile) -> bool:
    try:
        facts = (folder / file.path).stat()
    except FileNotFoundError:
        return False
    return (facts.st_dev, facts.st_ino) == (file.device, file.inode)
