"""What one round of backup is asked for, where it happens, and what came of it."""

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
from tr11ops.backup.due import CopyRequest
from tr11ops.backup.transfer import RetriedArchive, Transfer
from tr11ops.base.errors import ArchiveUnavailable, CopyStopped
from tr11ops.base.observed import cause
from tr11ops.base.retry import RetryPolicy, retry
from tr11ops.rundir.copies import CopyRecord
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard


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
    asked: CopyRequest = CopyRequest()
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
