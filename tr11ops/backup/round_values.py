"""What one round of backup is asked for, where it happens, and what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from tr11ops.backup.archives import open_archive
from tr11ops.backup.base import Archive, ArchiveAway
from tr11ops.backup.due import Asked
from tr11ops.backup.patient import PatientArchive, patient
from tr11ops.backup.records import CopyRecord
from tr11ops.backup.retrying import Retrying, persist
from tr11ops.backup.transfer import CopyStopped, Transfer
from tr11ops.evidence import cause
from tr11ops.journal import Journal
from tr11ops.rundir import RunDirectory

if TYPE_CHECKING:
    from tr11ops.runcard import RunCard

Reading: TypeAlias = Literal["none", "share", "all"]
CARDS_ARCHIVES = ("store", "url")


class Progress(Protocol):
    """Who is told how far it is."""

    def advance(self, count: int) -> None: ...

    def say(self, line: str) -> None: ...


@dataclass(frozen=True)
class Place:
    """Where rounds happen. `watch(what, bytes)` shows progress; `stop`: set it, and the round ends soon."""

    card: RunCard
    directory: RunDirectory
    journal: Journal
    say: Callable[[str], None]
    watch: Callable[[str, int], AbstractContextManager[Progress]]
    stop: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.time
    open: Callable[[str, RunCard], Archive] = open_archive
    retrying: Retrying = field(default_factory=Retrying)

    def opened(self, name: str) -> PatientArchive:
        """An archive, by its name or address. Raises ArchiveError, CopyStopped."""
        archive = persist(lambda: self.open(name, self.card), self.retrying, self._wait, self.say)
        return patient(archive, self.retrying, self._wait, self.say)

    def check_stop(self) -> None:
        """Raise CopyStopped when a stop was asked for."""
        if self.stop.is_set():
            raise CopyStopped("stopped on request; the next round goes on from here")

    def _wait(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self.check_stop()

    def transfer(self, progress: Progress) -> Transfer:
        """The card's settings, watched by `progress`."""
        made = Transfer.of(self.card.backup, on_bytes=progress.advance, say=progress.say, stop=self.stop)
        return replace(made, retrying=self.retrying)


@dataclass(frozen=True)
class Request:
    """What a round shall do. `archives`: "store", "url" or addresses; `steps`: of which a re-read alone is asked."""

    archives: tuple[str, ...]
    asked: Asked = field(default_factory=Asked)
    copies: bool = True
    logs: bool = True
    reading: Reading = "share"
    why: str = ""


@dataclass
class Tally:
    """What one archive's part of a round did. `busy`: who else is at it; `faults`: what went wrong, a line each."""

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
        self.is_away = self.is_away or isinstance(error, ArchiveAway)
        is_nameless = isinstance(error, OSError) and not error.filename  # an archive's errors are no OSErrors
        self.faults.append(f"the run directory: {cause(error)}" if is_nameless else cause(error))


@dataclass(frozen=True)
class RoundResult:
    """All archives' parts. Exit code 0: fine; 1: a person is needed, or it was stopped; 3: an archive is away."""

    tallies: tuple[Tally, ...]

    @property
    def exit_code(self) -> int:
        faulty = [tally for tally in self.tallies if tally.faults]
        if any(tally.is_stopped or tally.damaged for tally in self.tallies):
            return 1
        if faulty:
            return 3 if all(tally.is_away and len(tally.faults) == 1 for tally in faulty) else 1
        return 0


def card_archives(card: RunCard) -> tuple[str, ...]:
    """The archives that a card has."""
    return tuple(name for name in CARDS_ARCHIVES if getattr(card.backup, name) is not None)
