"""What one round of backup is asked for, where it happens, whose turn it is on any number of hosts,
and what came of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import msgspec
from msgspec.structs import replace

from tr11ops.backup.archives import open_archive
from tr11ops.backup.base import ARCHIVE_RETRIES, Archive
from tr11ops.backup.due import Asked
from tr11ops.backup.transfer import RetriedArchive, Transfer
from tr11ops.base.errors import ArchiveUnavailable, CopyStopped
from tr11ops.base.observed import cause
from tr11ops.base.retry import RetryPolicy, retry
from tr11ops.rundir.claims import Claim, ClaimFolder, ClaimTaken
from tr11ops.rundir.copies import CopyRecord
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard


# One copying process for each archive, on any number of hosts; the others say who it is, and
# leave.
#
# The claim says which step is being copied, so that prune lets it be; it is renewed as long as the
# work goes on. A turn that was lost all the same (the process was frozen, and someone took over)
# stops the work.

CLAIM_SECONDS = 1800.0  # how long others on other hosts wait for one that was killed
RENEW_SECONDS = 120.0


def claims_of(directory: RunDirectory, archive: str) -> ClaimFolder:
    """The claims on copying to one archive."""
    return ClaimFolder(directory, f"copy-{archive}")


def owner_of(directory: RunDirectory, archive: str, now: float) -> Claim | None:
    """Who copies to an archive now; None when no one does. Raises OSError."""
    newest = claims_of(directory, archive).newest()
    if newest is not None and newest.is_living(now):
        return newest
    return None


@dataclass
class ArchiveLock:
    """The turn of this process on one archive: a context manager. Raises ClaimTaken, OSError as
    it begins.
    """

    directory: RunDirectory
    archive: str
    stop: threading.Event
    clock: Callable[[], float] = time.time
    renew_seconds: float = RENEW_SECONDS

    def __post_init__(self) -> None:
        self._folder = claims_of(self.directory, self.archive)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._claim: Claim | None = None
        self._thread: threading.Thread | None = None
        self.lost = ""

    def __enter__(self) -> ArchiveLock:
        self._claim = self._folder.acquire(self.clock(), CLAIM_SECONDS)
        self._thread = threading.Thread(target=self._renew, name="turn", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if self._claim is not None and not self.lost:
                self._folder.release(replace(self._claim, data={}))

    def copying(self, step: int | None) -> None:
        """Say which step is being copied from now on; look at its source only after this. Raises
        OSError.
        """
        self._write({} if step is None else {"step": step})

    def check(self) -> None:
        """Raise ClaimTaken when the turn was lost."""
        newest = self._folder.newest()
        if self._claim is None or newest is None or newest.epoch != self._claim.epoch:
            self.lost = f"the turn was lost to {newest}"
            self.stop.set()
            raise ClaimTaken(newest)

    def _write(self, data: dict[str, int] | None = None) -> None:
        with self._lock:
            assert self._claim is not None
            self.check()
            said = self._claim.data if data is None else data
            self._claim = replace(self._claim, expires=self.clock() + CLAIM_SECONDS, data=said)
            self._folder.write(self._claim)

    def _renew(self) -> None:
        while not self._over.wait(self.renew_seconds):
            try:
                self._write()
            except ClaimTaken:
                return
            except OSError:
                # the claim stands for a while without being renewed, and the work itself tells of
                # the fault
                continue


Reading: TypeAlias = Literal["none", "share", "all"]
CARDS_ARCHIVES = ("store", "url")


class ProgressCallback(Protocol):
    """Who is told how far it is."""

    def advance(self, count: int) -> None: ...

    def say(self, line: str) -> None: ...


class BackupContext(Record):
    """Where rounds happen. `watch(what, bytes)` shows progress; `stop`: set it, and the round ends
    soon.
    """

    card: RunCard
    directory: RunDirectory
    journal: Journal
    say: Callable[[str], None]
    watch: Callable[[str, int], AbstractContextManager[ProgressCallback]]
    stop: threading.Event = msgspec.field(default_factory=threading.Event)
    clock: Callable[[], float] = time.time
    open: Callable[[str, RunCard], Archive] = open_archive
    retries: RetryPolicy = ARCHIVE_RETRIES

    def opened(self, name: str) -> RetriedArchive:
        """An archive, by its name or address. Raises ArchiveError, CopyStopped."""
        policy = replace(self.retries, sleep=self._wait, say=self.say)
        return RetriedArchive(
            retry(lambda: self.open(name, self.card), policy, ArchiveUnavailable), policy
        )

    def check_stop(self) -> None:
        """Raise CopyStopped when a stop was asked for."""
        if self.stop.is_set():
            raise CopyStopped("stopped on request; the next round goes on from here")

    def _wait(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self.check_stop()

    def transfer(self, progress: ProgressCallback) -> Transfer:
        """The card's settings, watched by `progress`."""
        made = Transfer.of(
            self.card.backup, on_bytes=progress.advance, say=progress.say, stop=self.stop
        )
        return replace(made, retries=self.retries)


class RoundRequest(Record):
    """What a round shall do. `archives`: "store", "url" or addresses; `steps`: of which a re-read
    alone is asked.
    """

    archives: tuple[str, ...]
    asked: Asked = Asked()
    copies: bool = True
    logs: bool = True
    reading: Reading = "share"
    why: str = ""


@dataclass
class ArchiveTally:
    """What one archive's part of a round did. `busy`: who else is at it; `faults`: what went wrong,
    a line each.
    """

    archive: str
    address: str = ""
    copied: list[CopyRecord] = field(default_factory=list)
    logs: int = 0
    reread_files: int = 0
    reread_bytes: int = 0
    read_steps: set[int] = field(default_factory=set)
    damaged: list[CopyRecord] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    busy: str = ""
    is_away: bool = False
    is_stopped: bool = False
    copy_seconds: float = 0.0

    @property
    def copied_bytes(self) -> int:
        return sum(copy.bytes for copy in self.copied)

    def note_fault(self, error: Exception) -> None:
        """Take down what ended this part."""
        if isinstance(error, CopyStopped):
            self.is_stopped = True
            return
        self.is_away = self.is_away or isinstance(error, ArchiveUnavailable)
        # an archive's errors are no OSErrors
        is_nameless = isinstance(error, OSError) and not error.filename
        self.faults.append(f"the run directory: {cause(error)}" if is_nameless else cause(error))


class RoundResult(Record):
    """All archives' parts. Exit code 0: fine; 1: a person is needed, or it was stopped; 3: an
    archive is unreachable.
    """

    tallies: tuple[ArchiveTally, ...]

    @property
    def exit_code(self) -> int:
        faulty = [tally for tally in self.tallies if tally.faults]
        if any(tally.is_stopped or tally.damaged for tally in self.tallies):
            return 1
        if faulty:
            if all(tally.is_away and len(tally.faults) == 1 for tally in faulty):
                return 3
            return 1
        return 0


class RoundPruning(Record):
    """The prune after a round: the steps that it removed, their bytes, and why not all was done (""
    where it was).
    """

    steps: tuple[int, ...]
    bytes: int
    ended_early: str = ""


def card_archives(card: RunCard) -> tuple[str, ...]:
    """The archives that a card has."""
    return tuple(name for name in CARDS_ARCHIVES if getattr(card.backup, name) is not None)
