"""Who may do a thing of which only one may be done at a time, on any number of hosts, without
locks.

    state/cron/claims/THING/N.json     the claim of epoch N

The owner of the highest epoch has the thing until it lets go (see
`trainer/contract/files.py`). A claim never changes hands; who takes over makes the next
one.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.cluster.local_records import ProcessMark, is_alive, mark
from tr11ops.rundir.journal import user_name
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document, record_of_text
from trainer.contract.errors import Tr11Error
from trainer.contract.files import (
    NumberedFiles,
    file_system_time,
    host_name,
    make_shared,
    write_atomically,
)
from trainer.contract.record import Finite, Record

KEPT_CLAIMS = 4
UNREADABLE_SECONDS = 600.0  # a claim that cannot be read counts as held for so long
TOLERANCE_SECONDS = 600.0  # between two machines' clocks
COPY_SECONDS = 1800.0  # how long others on other hosts wait for a copier that was killed
COPY_CLAIMS = "copy-"  # claims of such a name hold {"step": N} while step N is being copied


class Clocks(Record):
    """What time it is, here and by the file server (None where it was not asked). Seconds since the
    epoch.
    """

    here: float
    server: float | None = None

    @property
    def both(self) -> tuple[float, ...]:
        """The clocks that were asked."""
        return tuple(clock for clock in (self.here, self.server) if clock is not None)

    def ages(self, moment: float) -> tuple[float, ...]:
        """How long ago that was, by each clock."""
        return tuple(clock - moment for clock in self.both)


def read_clocks(folder: Path) -> Clocks:
    """Ask both clocks: the server stamps a file that is made for it in `folder`. Raises OSError."""
    make_shared(folder)
    return Clocks(*file_system_time(folder))


class Claim(Record):
    """One claim. `process` made it, `child` is what it started, `expires` when others may doubt it
    (epoch seconds).
    """

    token: str
    host: str
    user: str
    time: Finite
    expires: Finite
    process: ProcessMark
    child: ProcessMark | None = None
    held: bool = True
    epoch: int = 0
    data: Mapping[str, Any] = {}

    @classmethod
    def of_this_process(cls, now: float, seconds: float, token: str = "", **data: Any) -> Claim:
        """A claim in this process's name; it gets its epoch when it is made."""
        return cls(
            token or secrets.token_hex(4),
            host_name(),
            user=user_name(),
            time=now,
            expires=now + seconds,
            process=mark(os.getpid()),
            data=data,
        )

    def __str__(self) -> str:
        return f"process {self.process.pid} of {self.user} on {self.host}"

    @property
    def step(self) -> int | None:
        """The step of the training that is copied under it, if one is."""
        step = self.data.get("step")
        if isinstance(step, int):
            return step
        return None

    def is_living(self, now: float) -> bool:
        """Whether its owner may still be at it. On this host the processes are asked, on another
        the clock is.

        The work of an owner that was killed goes on as long as its child lives, for at most the
        claim's own time.
        """
        if not self.held or now >= self.expires:
            return False
        if self.is_of_this_host:
            return self.has_process
        # else a clock was set back, and `expires` says nothing
        return self.time <= now + TOLERANCE_SECONDS

    @property
    def is_of_this_host(self) -> bool:
        return self.host == host_name() and self.process.boot == mark(os.getpid()).boot

    @property
    def has_process(self) -> bool:
        """Whether what made it, or what that started, runs on this host."""
        return is_alive(self.process) or is_alive(self.child)


class ClaimTaken(Tr11Error):
    """Someone else has the thing; `owner` is None where he was faster by a moment."""

    def __init__(self, owner: Claim | None) -> None:
        super().__init__(str(owner or "someone else, since this moment"))
        self.owner = owner

    @property
    def at_work(self) -> str:
        """Who is at it, and which step of the training it is about, where it is about one."""
        if self.owner is None:
            return "someone else has just begun"
        if self.owner.step is None:
            return f"{self} is at it"
        return f"{self} is at it (step {self.owner.step})"


class ClaimFolder:
    """The claims on one thing. Every method raises OSError as the file system does."""

    def __init__(self, directory: RunDirectory, thing: str):
        self._files = NumberedFiles(directory.paths.state / "cron" / "claims" / thing)
        self.path = self._files.path

    def newest(self) -> Claim | None:
        """The claim of the highest epoch, held or not; None when no one ever claimed."""
        epoch, content = self._files.newest()
        if epoch:
            return _parse(epoch, content, self._files.file(epoch))
        return None

    def holder(self, now: float) -> Claim | None:
        """Who has the thing and lives; None where no one does."""
        newest = self.newest()
        if newest is not None and newest.is_living(now):
            return newest
        return None

    def possible_holder(self, clocks: Clocks) -> Claim | None:
        """As `holder`, for who removes something: one wrong clock ends no life. A process of this
        host is asked for; the claim of another host is over when all `clocks` say so.
        """
        claim = self.newest()
        if claim is None or not claim.held:
            return None
        if claim.token and claim.is_of_this_host:
            if claim.has_process:
                return claim
            return None
        lasting = max(0.0, claim.expires - claim.time) + TOLERANCE_SECONDS
        # where it is not there any more, it has just been followed by another
        with suppress(FileNotFoundError):
            written = self._files.file(claim.epoch).stat().st_mtime
            if all(age > lasting for age in clocks.ages(written)):
                return None
        return claim

    @contextmanager
    def turn(self, now: float, seconds: float) -> Iterator[None]:
        """The thing for as long as the context lasts. Raises ClaimTaken as it begins."""
        mine = self.acquire(now, seconds)
        try:
            yield
        finally:
            with suppress(OSError):  # then it is over when this process is
                self.release(mine)

    def acquire(self, now: float, seconds: float) -> Claim:
        """The thing for this process, for so long. Raises ClaimTaken when someone living has it."""
        before = self.newest()
        if before is not None and before.is_living(now):
            raise ClaimTaken(before)
        mine = self.take(Claim.of_this_process(now, seconds), before)
        if mine is None:
            raise ClaimTaken(None)
        return mine

    def release(self, claim: Claim) -> None:
        """Let go of one's own claim; on a full disk, which takes no new word, by removing it."""
        try:
            self.write(replace(claim, held=False))
        except OSError:
            self._files.file(claim.epoch).unlink()

    def take(self, claim: Claim, after: Claim | None) -> Claim | None:
        """Make the claim that follows `after`; None when another was faster, or others went on
        while this one slept.
        """
        made = replace(claim, epoch=(after.epoch if after else 0) + 1)
        if not self._files.make(made.epoch, _text(made).encode()) or not self._files.is_newest(
            made.epoch
        ):
            return None
        self._files.clear(KEPT_CLAIMS)
        return made

    def write(self, claim: Claim) -> None:
        """Replace one's own claim, to name its child or to let go."""
        write_atomically(self._files.file(claim.epoch), _text(claim))


def copy_claims(directory: RunDirectory, to: str) -> ClaimFolder:
    """The claims on copying to one archive, or another place."""
    return ClaimFolder(directory, f"{COPY_CLAIMS}{to}")


@dataclass
class CopyLock:
    """The turn of this process on copying to one place (an archive, a repository): a context manager.
    Raises ClaimTaken, OSError as it begins.

    One process copies to each, on any number of hosts; the others say who it is, and leave. The
    claim says which step is being copied, so that prune lets it be; it is renewed as long as the
    work goes on. A turn that was lost all the same (the process was frozen, and someone took over)
    stops the work. Without a renewal it lasts for `seconds`: also of a process that is there, and frozen.
    """

    directory: RunDirectory
    to: str
    stop: threading.Event
    clock: Callable[[], float] = time.time
    renew_seconds: float = 120.0
    seconds: float = COPY_SECONDS

    def __post_init__(self) -> None:
        self._folder = copy_claims(self.directory, self.to)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._claim: Claim | None = None
        self._thread: threading.Thread | None = None
        self.lost = ""

    def __enter__(self) -> CopyLock:
        self._claim = self._folder.acquire(self.clock(), self.seconds)
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
            self._claim = replace(self._claim, expires=self.clock() + self.seconds, data=said)
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


def _text(claim: Claim) -> str:
    return json.dumps(document(claim), indent=1, sort_keys=True)


def _parse(epoch: int, content: bytes, path: Path) -> Claim:
    """The claim in a file. One that cannot be read is someone's, from when it was written and for a
    while.
    """
    try:
        return replace(record_of_text(Claim, content), epoch=epoch)
    except ValueError:
        try:
            written = path.stat().st_mtime
        except FileNotFoundError:  # a later one has been made meanwhile
            written = time.time()
        no_one = ProcessMark(0, "gone", "unknown")
        return Claim(
            "",
            "an unknown host",
            user="?",
            time=written,
            expires=written + UNREADABLE_SECONDS,
            process=no_one,
            epoch=epoch,
        )
