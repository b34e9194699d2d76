"""One copying process for each archive, on any number of hosts; the others say who it is, and
leave.

The claim says which step is being copied, so that prune lets it be; it is renewed as long as the
work goes on. A turn that was lost all the same (the process was frozen, and someone took over)
stops the work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from msgspec.structs import replace

from tr11ops.rundir.claims import Claim, ClaimFolder, ClaimTaken
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.errors import Tr11Error

CLAIM_SECONDS = 1800.0  # how long others on other hosts wait for one that was killed
RENEW_SECONDS = 120.0


class ArchiveLocked(Tr11Error):
    """Another process copies to this archive now."""

    def __init__(self, owner: Claim | None) -> None:
        step = None
        if owner is not None:
            step = owner.data.get("step")
        doing = ""
        if step is not None:
            doing = f" (step {step})"
        super().__init__(
            f"{owner} is at it{doing}" if owner is not None else "someone else has just begun"
        )
        self.owner = owner


def claims_of(directory: RunDirectory, archive: str) -> ClaimFolder:
    """The claims on copying to one archive."""
    return ClaimFolder(directory, f"copy-{archive}")


def owner_of(directory: RunDirectory, archive: str, now: float) -> Claim | None:
    """Who copies to an archive now; None when no one does. Raises OSError."""
    newest = claims_of(directory, archive).newest()
    if newest is not None and newest.is_living(now):
        return newest
    return None


class ArchiveLock:
    """The turn of this process on one archive: a context manager. Raises ArchiveLocked, OSError as
    it begins.
    """

    def __init__(
        self,
        directory: RunDirectory,
        archive: str,
        stop: threading.Event,
        clock: Callable[[], float] = time.time,
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        self._folder = claims_of(directory, archive)
        self._stop = stop
        self._clock = clock
        self._renew_seconds = renew_seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._claim: Claim | None = None
        self._thread: threading.Thread | None = None
        self.lost = ""

    def __enter__(self) -> ArchiveLock:
        try:
            self._claim = self._folder.acquire(self._clock(), CLAIM_SECONDS)
        except ClaimTaken as taken:
            raise ArchiveLocked(taken.owner or self._folder.newest()) from None
        self._thread = threading.Thread(target=self._renew, name="turn", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Raise ArchiveLocked when the turn was lost."""
        newest = self._folder.newest()
        if self._claim is None or newest is None or newest.epoch != self._claim.epoch:
            self.lost = f"the turn was lost to {newest}"
            self._stop.set()
            raise ArchiveLocked(newest)

    def _write(self, data: dict[str, int] | None = None) -> None:
        with self._lock:
            assert self._claim is not None
            self.check()
            said = self._claim.data if data is None else data
            self._claim = replace(self._claim, expires=self._clock() + CLAIM_SECONDS, data=said)
            self._folder.write(self._claim)

    def _renew(self) -> None:
        while not self._over.wait(self._renew_seconds):
            try:
                self._write()
            except ArchiveLocked:
                return
            except OSError:
                # the claim stands for a while without being renewed, and the work itself tells of
                # the fault
                continue
