"""Holding the checkpoints of a foreign trainer while it trains; see `tr11ops.trainers.held`.

For the keeper of node 0, which holds the run's lease:

    place = HoldPlace.of(settings, paths, ranks)
    start = prepare(place, fence, report)        # tr11ops.trainers.prepare; before the trainer starts
    holder = Holder(place, fence, report)
    holder.start()
    ...                                          # holder.seen, holder.held
    holder.finish(60.0)                          # after the trainer's end
    holder.stop()
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tr11ops.base.errors import StopAsked
from tr11ops.base.observed import cause
from tr11ops.trainers.checkpoints import CheckpointSurvey, FoundCheckpoint, signature, survey
from tr11ops.trainers.held import (
    Changed,
    Fence,
    HoldPlace,
    NotHeld,
    Origin,
    Report,
    adopt,
    entry_of,
    is_held,
    is_older,
    is_same,
    note_overwritten,
    publish,
    read_origin,
    take_hold,
)
from tr11ops.trainers.seal import renew, seal
from trainer.contract.errors import LeaseLost
from trainer.contract.manifest import FileEntry
from trainer.contract.paths import newest_step

LOOK_SECONDS = 3.0  # between two looks at the folder itself
SELDOM_SECONDS = 60.0  # between two looks at all of it while nothing seems to change
AGAIN_SECONDS = 30.0  # after a file system's refusal
NICENESS = 10
Consent = Callable[[FoundCheckpoint], None]


class _Hold:
    """One checkpoint whose digests are being read."""

    def __init__(self, hidden: Path, origin: Origin):
        self.hidden, self.origin = hidden, origin
        self.digests: dict[str, FileEntry] = {}
        self.unread = list(origin.files)

    @property
    def order(self) -> tuple[int, float]:
        return self.origin.step, self.origin.written


class Holder:
    """Holds each whole checkpoint that is not held yet, the newest first, in two threads: one looks
    and links, the other reads digests, niced, and publishes.

    `seen`: the last look at all checkpoints; None before the first. `held`: the newest step that is
    held, with its manifest. `read`: bytes whose digests were read. `lost`: why nothing is published
    any more, "" while it is. `refused`: why the last digest could not be read, or the last one not
    be published. `consent` raises NotHeld, or OSError, for a checkpoint that must not be held now.
    """

    def __init__(
        self,
        place: HoldPlace,
        fence: Fence,
        report: Report,
        clock: Callable[[], float] = time.time,
        consent: Consent | None = None,
    ):
        self.seen: CheckpointSurvey | None = None
        self.held = newest_step(place.paths)
        self.read, self.lost, self.refused = 0, "", ""
        self._consent = consent
        self._place, self._fence, self._report, self._clock = place, fence, report, clock
        self._over = threading.Event()
        self._news = threading.Event()
        self._idle = threading.Event()
        # all that was there has been linked: only then is one published, and what is older passed over
        self._linked = threading.Event()
        self._looking = threading.Lock()
        self._holds: list[_Hold] = []
        self._said: set[str] = set()
        self._settled: dict[str, FoundCheckpoint] = {}  # held, or not to be held as it is
        self._signature: object = None
        self._looked = float("-inf")
        self._threads = [
            threading.Thread(target=self._look_on, name="hold-look", daemon=True),
            threading.Thread(target=self._seal_on, name="hold-seal", daemon=True),
        ]

    def start(self) -> None:
        """Begin, with what an earlier launch left. Raises what the fence raises, OSError."""
        self._fence()
        for hidden in adopt(self._place.paths.checkpoints):
            origin = read_origin(hidden)
            if origin is not None:
                self._holds.append(_Hold(hidden, origin))
        for thread in self._threads:
            thread.start()

    def finish(self, seconds: float) -> bool:
        """Wait until all is held that can be, for so many seconds at most; returns whether it is. For the
        time after the trainer's end.
        """
        until = time.monotonic() + seconds
        while not self._over.is_set():
            self._look(self._clock())
            if self.is_done:
                return True
            if time.monotonic() >= until:
                return False
            awaited = self._over  # while something is being written
            if self._holds:
                awaited = self._idle
            awaited.wait(min(1.0, max(0.0, until - time.monotonic())))
        return False

    def catch_up(self) -> None:
        """Hold what is whole now, and wait for its digests; not for what the file system refuses."""
        self._look(self._clock())
        while self._holds and not self._over.is_set() and not self.refused:
            self._idle.wait(0.2)

    @property
    def is_done(self) -> bool:
        """Whether the last look left nothing to hold: nothing is being written, no digest is missing."""
        return not self._holds and not self._is_written

    @property
    def _is_written(self) -> bool:
        """Whether something was being written at the last look, or there was none yet."""
        if self.seen is None:
            return True
        return any(one.state == "being written" for one in self.seen.found)

    def stop(self) -> None:
        """End both threads. What is not finished stays, and is gone on with by the next launch."""
        self._over.set()
        self._news.set()
        self._linked.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    # ------------------------------------------------------------------ looking
    def _look_on(self) -> None:
        while not self._over.is_set():
            now = self._clock()
            if self._is_due(now):
                self._look(now)
            self._linked.set()
            self._over.wait(LOOK_SECONDS)

    def _is_due(self, now: float) -> bool:
        """Whether anything may have changed since the last look."""
        try:
            found = signature(self._place.rules, self._place.folder)
        except OSError as error:
            self._say(f"its checkpoints cannot be looked at: {cause(error)}")
            return False
        is_new = found != self._signature or self._is_written
        if not is_new and now - self._looked < SELDOM_SECONDS:
            return False
        self._signature = found
        return True

    def _look(self, now: float) -> None:
        with self._looking:
            place = self._place
            try:
                found = survey(place.rules, place.folder, place.ranks, now=now, before=self.seen)
            except FileNotFoundError:
                found = CheckpointSurvey(str(self._place.folder), (), None, None)
            except OSError as error:
                self._say(f"its checkpoints cannot be looked at: {cause(error)}")
                return
            self._looked, self.seen = now, found
            if self.held is not None:
                renew(place.paths, self.held)
            for one in reversed(found.found):
                if one.state == "whole" and not self._over.is_set():
                    self._hold(one, now)

    def _hold(self, found: FoundCheckpoint, now: float) -> None:
        if self._settled.get(found.name) == found:
            return
        try:
            if not is_held(self._place, found) and not self._is_being_held(found):
                self._note_overwritten(found)
                if is_older(self._place, found):
                    self._settled[found.name] = found
                    return
                if self._consent is not None:
                    self._consent(found)
                hidden = take_hold(self._place, found, now, self._over)
                origin = read_origin(hidden)
                assert origin is not None
                self._holds.append(_Hold(hidden, origin))
                self._idle.clear()
                self._news.set()
            self._settled[found.name] = found
        except (Changed, StopAsked):
            pass  # the next look, or launch, finds it as it is then
        except (NotHeld, OSError, ValueError) as error:
            self._say(f"{found.name} is not held: {cause(error)}")

    def _note_overwritten(self, found: FoundCheckpoint) -> None:
        """A step that is held already was saved again."""
        if found.step is None:
            return
        home = self._place.paths.checkpoint(found.step)
        origin = read_origin(home)
        if origin is not None and origin.foreign.name == found.name:
            note_overwritten(self._place, home, origin)

    def _is_being_held(self, found: FoundCheckpoint) -> bool:
        return any(is_same(one.origin, self._place, found) for one in list(self._holds))

    def _say(self, text: str) -> None:
        """Say a thing once."""
        if text not in self._said:
            self._said.add(text)
            self._report(f"tr11: WARNING: {text}")

    # ------------------------------------------------------------------ sealing
    def _seal_on(self) -> None:
        with suppress(OSError, AttributeError):  # then it has no lower rank
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._linked.wait()
        while not self._over.is_set():
            newest = max(list(self._holds), key=_order, default=None)
            if newest is None:
                self._idle.set()
                self._news.wait(1.0)
                self._news.clear()
                continue
            try:
                self._seal_some(newest)
                self.refused = ""
            except StopAsked:
                return
            except LeaseLost as error:
                self.lost = str(error)
                self._over.set()
            except Changed as error:
                self._give_up(newest, str(error))
            except (OSError, ValueError) as error:
                self.refused = cause(error)
                self._say(f"{newest.origin.foreign.name} is not held yet: {cause(error)}")
                self._over.wait(AGAIN_SECONDS)

    def _seal_some(self, hold: _Hold) -> None:
        """Read one more file of a checkpoint, so that a newer one is never far; after the last one,
        publish it.
        """
        if hold.unread:
            file = hold.unread[-1]
            hold.digests[file.path] = entry_of(hold.hidden, file, self._count, self._over)
            hold.unread.pop()
            return
        home = publish(
            self._place,
            hold.hidden,
            hold.origin,
            digests=hold.digests,
            fence=self._fence,
            report=self._report,
        )
        if not self._place.copies:
            with suppress(OSError):  # then its bytes are read before it is put back
                seal(self._place.paths, hold.origin)
        self._holds.remove(hold)
        self.held = max(self.held or 0, hold.origin.step)
        self._report(f"tr11: {hold.origin.foreign.name} is held in {home}")

    def _count(self, count: int) -> None:
        self.read += count

    def _give_up(self, hold: _Hold, why: str) -> None:
        self._holds.remove(hold)
        self._settled.pop(hold.origin.foreign.name, None)
        shutil.rmtree(hold.hidden, ignore_errors=True)
        self._say(f"{hold.origin.foreign.name} is not held as it was: {why}")


def _order(hold: _Hold) -> tuple[int, float]:
    return hold.order
