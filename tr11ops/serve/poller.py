"""Looks at any number of runs again and again, each by itself: a folder that hangs holds up no other,
and no page.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.api import Run, open_run
from tr11ops.base import deadline
from tr11ops.base.errors import Late
from tr11ops.base.observed import Unknown, cause, known, observed
from tr11ops.hub.base import FILE_NAME
from tr11ops.observe.readers import SharedReaders
from tr11ops.runcard.find import run_directories
from tr11ops.serve.mirror import is_mirror, look_at_mirror
from tr11ops.status.published import table
from tr11ops.status.run_list import kept_verdict, kept_words
from tr11ops.status.run_use import RunUse, UseReader
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.errors import Tr11Error
from trainer.contract.record import Record

LOOK_EVERY_SECONDS = 20.0
FIND_EVERY_SECONDS = 60.0
GLANCE_SECONDS = 1.0
READ_SECONDS = 60.0  # a page that is open asks again sooner: it shows each look
# what every act on a run leaves behind, wherever it was typed; of a mirrored copy the document
MARKS = ("journal/*.jsonl", "kill-switch", FILE_NAME)
AT_ONCE = 2  # looks at the same time: pages are served beside them
MOST_RUNS = 500


class News(Record):
    """What is known of a run since the last look.

    `key` names it in addresses: no path is ever taken from one. `looked`: when, seconds since the
    epoch; `every`: seconds from one look to the next; `began`: when that look began, `acted`: when the
    newest act from a page was over; `stamp`: of MARKS at `began`. `document` is that of `tr11 status
    --json` or what the run publishes (`is_mirror`), None where it could not be seen, and `why` says
    why. `use` is what the run holds and costs. `run` is None where nothing can be changed.
    """

    key: str
    folder: Path
    looked: float = 0.0
    every: float = LOOK_EVERY_SECONDS
    began: float = 0.0
    acted: float = 0.0
    stamp: float = 0.0
    document: Mapping[str, Any] | None = None
    why: str = "it is being looked at for the first time"
    is_mirror: bool = False
    use: RunUse | None = None
    run: Run | None = None

    @property
    def can_act(self) -> bool:
        return self.run is not None and not self.run.is_copy

    @property
    def is_before_act(self) -> bool:
        """Whether the look began before the newest act was over: it is no verdict on what came of it."""
        return self.began < self.acted


def key_of(folder: Path) -> str:
    """Twelve hex digits that stand for a folder in an address."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


class RunPoller:
    """The runs below some folders. `version` rises with each change of what is known."""

    def __init__(self, roots: Sequence[Path], scheduler: str = "auto") -> None:
        self.roots = [root.absolute() for root in roots]
        self.version = 0
        self.asked = 0.0  # when someone last read a page, of the monotonic clock
        self.troubles: dict[Path, str] = {}
        self._scheduler = scheduler
        self._news: dict[str, News] = {}
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(AT_ONCE)
        self._over = threading.Event()
        self._uses = UseReader()
        self._readers = SharedReaders(scheduler, LOOK_EVERY_SECONDS / 2)

    def start(self) -> None:
        """Begin; each folder is searched in a thread of its own, and so is each run looked at."""
        for root in self.roots:
            self._spawn(self._search, root)

    def stop(self) -> None:
        """Look no more. What waits for a file system is left behind."""
        self._over.set()

    def news(self) -> tuple[News, ...]:
        """Of every run that was found, by folder."""
        with self._lock:
            return tuple(sorted(self._news.values(), key=attrgetter("folder")))

    def find(self, key: str) -> News | None:
        """Of one run; None for an unknown key."""
        with self._lock:
            return self._news.get(key)

    def look_again(self, key: str) -> None:
        """Look at one run now: something was changed. Until then nothing that was seen before counts."""
        with self._lock:
            news = self._news.get(key)
            if news is None:
                return
            news = self._news[key] = replace(news, acted=time.time())
        self._readers.forget()
        self._changed()
        self._spawn(self._look, news)

    # ------------------------------------------------------------------------- threads
    def _spawn(self, work: Any, argument: Any) -> None:
        threading.Thread(target=work, args=(argument,), name="serve", daemon=True).start()

    def _search(self, root: Path) -> None:
        while not self._over.is_set():
            trouble = ""
            try:
                for folder in _found(root):
                    self._follow(folder)
            except OSError as error:
                trouble = cause(error)
            if self.troubles.get(root, "") != trouble:
                self.troubles[root] = trouble
                self._changed()
            self._over.wait(FIND_EVERY_SECONDS)

    def _follow(self, folder: Path) -> None:
        key, kept = key_of(folder), kept_words(kept_verdict(folder), time.time())
        with self._lock:
            if key in self._news or len(self._news) >= MOST_RUNS:
                return
            self._news[key] = News(key, folder, why=f"it is being looked at; {kept}")
        self._changed()
        self._spawn(self._watch, key)

    def _watch(self, key: str) -> None:
        while not self._over.is_set():
            news = self.find(key)
            if news is None:
                return
            until = time.monotonic() + self._look(news)
            while time.monotonic() < until and not self._over.wait(GLANCE_SECONDS):
                is_read = time.monotonic() - self.asked < READ_SECONDS
                kept = self._news[key]
                stops = kept.every < LOOK_EVERY_SECONDS and time.time() > kept.looked + kept.every
                if is_read and (stops or stamp_of(news.folder) != kept.stamp):
                    self._readers.forget()
                    break

    def _look(self, news: News) -> float:
        """One look, whatever comes of it; the seconds until the next one."""
        began, stamp = time.monotonic(), stamp_of(news.folder)
        news = replace(news, began=time.time(), stamp=stamp)
        if deadline.is_silent(news.folder, deadline.PROBE_SECONDS):
            why = f"the file system of {news.folder} does not answer"
            return self._put(replace(news, why=why, document=None), began)
        with self._turns:
            # waiting for a turn is no cost of this run
            began, news = time.monotonic(), replace(news, began=time.time())
            try:
                seen = deadline.within(deadline.LOOK_SECONDS, partial(self._seen, news))
            except Late:
                why = deadline.late_words(news.folder, deadline.LOOK_SECONDS)
                seen = replace(news, document=None, why=why)
            except (Tr11Error, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                seen = replace(news, document=None, why=" ".join(str(error).split()))
        return self._put(seen, began)

    def _seen(self, news: News) -> News:
        if is_mirror(news.folder):
            told = look_at_mirror(news.folder, time.time())
            return replace(news, document=told, why="", is_mirror=True)
        run = open_run(news.folder, scheduler=self._scheduler, reader=Unknown("not asked yet"))
        run = replace(run, reader=self._readers.of(run.directory))
        seen = run.look()
        use = None  # of a copy: what it holds is counted where the run is
        if not run.is_copy:
            use = self._uses.read(run.card, run.directory, seen.snapshot)
        return replace(
            news,
            document=seen.document(),
            why="",
            run=run,
            use=use,
        )

    def _put(self, news: News, began: float) -> float:
        """Keep what a look has found; `began`: of the monotonic clock."""
        spent = min(time.monotonic() - began, LOOK_EVERY_SECONDS)
        every = max(LOOK_EVERY_SECONDS, 10 * spent)
        if table(news.document).get("verdict") == VerdictWord.STOPPING:
            every /= 4  # someone waits for what comes of it
        with self._lock:
            kept = self._news[news.key]
            if news.began < kept.began:
                return every  # one that began later was faster
            self._news[news.key] = replace(news, looked=time.time(), every=every, acted=kept.acted)
        self._changed()
        return every

    def _changed(self) -> None:
        with self._lock:
            self.version += 1


def stamp_of(folder: Path) -> float:
    """A number that changes with all that is done to a run; 0 where its file system does not answer,
    or refuses.
    """
    if deadline.is_silent(folder, deadline.PROBE_SECONDS):
        return 0.0
    return known(observed(_times_of_marks, folder), 0.0)


def _times_of_marks(folder: Path) -> float:
    return sum(place.stat().st_mtime for mark in MARKS for place in folder.glob(mark))


def _found(root: Path) -> Iterator[Path]:
    """Run directories and mirrors at and below a folder. Raises OSError."""
    if is_mirror(root):
        yield root
        return
    yield from run_directories(root)
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and is_mirror(folder):
            yield folder
