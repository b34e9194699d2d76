"""One deadline for a whole effect: time-outs of single reads do not end a conversation that drips."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import TypeVar

from tr11ops.base.errors import Late, Unobserved
from tr11ops.base.units import duration

T = TypeVar("T")

# The limits of docs/reference/deadlines.md. Time-outs of single reads do not bound a whole look; these do.
SCHEDULER_SECONDS = (
    # of one question of a look, or of a stop: a controller that is silent for longer is unreachable
    12.0
)
# of one question that only betters an answer; after one silence no other is asked
ADVICE_SECONDS = 5.0
LOOK_SECONDS = 60.0  # of one look, its files and the scheduler together
PASS_SECONDS = 600.0  # of one pass of the watchdog, which may launch and deliver mails
# of each step of a stop in the run directory: reading what is there, setting the switch
STOP_SECONDS = 15.0
SILENCE_SECONDS = 15.0  # of a file system, until who waits for it is told
PROBE_SECONDS = 5.0  # between two questions to one that answers
INTERRUPT_SECONDS = 1.0  # from Ctrl-C to the end of who waits for one that does not answer
WATCH_TICK_SECONDS = 0.25
NOT_WITHIN = "within {:g} s: a file system that it lies on, or the scheduler, does not answer"
_IN_TIME = "within"  # threads that have a deadline of their own


def within(seconds: float, work: Callable[[], T], abandon: Callable[[], None] = lambda: None) -> T:
    """What `work()` returns or raises, in a thread of its own. Raises Late after `seconds`, and
    calls `abandon`.

    `abandon` is to cut what the work waits for, such as a socket; what it waits for still does not
    keep the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again where the work was asked for
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(do,), name=_IN_TIME, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        abandon()
        raise Late(f"not done within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


def late_words(place: Path, seconds: float) -> str:
    """Why a look saw nothing: something that it reads does not answer."""
    return f"{place} was not read {NOT_WITHIN.format(seconds)}"


def is_abandoned(patience: float) -> bool:
    """Whether a call with a deadline still waits after so many seconds: it would keep the process
    from its end.
    """
    until = time.monotonic() + patience
    while any(thread.name == _IN_TIME for thread in threading.enumerate()):
        if time.monotonic() > until:
            return True
        time.sleep(0.002)  # one that is just being started cannot be joined
    return False


class FileWatch:
    """Watches beside a command whether the file systems that it reads still answer.

    One that does not is said in a line, and when it does again. `leave` must end the process: with
    KeyboardInterrupt where Ctrl-C did not end it (the main thread waits in the kernel, or for a
    thread that does), and with a Refusal (exit code 3) after `PASS_SECONDS` in which the command
    itself waited. One that `follows` waits for as long as it takes.
    """

    def __init__(self, leave: Callable[[BaseException], None]):
        self._leave = leave
        self._places: set[Path] = set()
        self._ended = threading.Event()
        self._interrupted = 0.0
        self.follows = False

    def interrupt(self, *_: object) -> None:
        """What Ctrl-C calls. Raises KeyboardInterrupt, as it does without a watch."""
        self._interrupted = time.monotonic()
        raise KeyboardInterrupt

    def add(self, place: Path) -> None:
        """Watch the file system of `place` until the command's end."""
        if place not in self._places:
            self._places.add(place)
            threading.Thread(target=self._watch, args=(place,), name="files", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _watch(self, place: Path) -> None:
        # what is pending for the whole process is seen only by who does not take it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asked, probe, is_told = time.monotonic(), _probe(place), False
        while not self._ended.wait(WATCH_TICK_SECONDS):
            now = time.monotonic()
            silent = now - asked
            if not self._interrupted and signal.SIGINT in signal.sigpending():
                self._interrupted = now
            since = now - (self._interrupted or now)
            if min(since, silent) > INTERRUPT_SECONDS:
                self._leave(KeyboardInterrupt())
            if probe.is_alive():
                line = f"the file system of {place} has not answered for {duration(silent)}"
                if silent > SILENCE_SECONDS and not is_told:
                    is_told = True
                    _say(f"{line}: waiting for it; Ctrl-C ends this")
                if silent > PASS_SECONDS and not self.follows and _waits_in_kernel():
                    self._leave(Unobserved(f"{line}: nothing may be concluded"))
            elif is_told or self._interrupted or silent > PROBE_SECONDS:
                if is_told:
                    _say(f"the file system of {place} answers again")
                asked, probe, is_told = now, _probe(place), False


_ASKED: dict[Path, tuple[float, threading.Thread]] = {}
FILES: ContextVar[FileWatch | None] = ContextVar("files", default=None)


def watch_files(place: Path) -> None:
    """Have the command that runs told when the file system of `place` stops answering."""
    watch = FILES.get()
    if watch is not None:
        watch.add(place)


def is_silent(place: Path, seconds: float) -> bool:
    """Whether the file system of `place` does not answer within so many seconds.

    One question at a time is put to it: while that waits, whoever asks again has waited too.
    """
    asked, probe = _ASKED.get(place, (0.0, None))
    if probe is None or not probe.is_alive():
        asked, probe = _ASKED[place] = time.monotonic(), _probe(place)
    probe.join(max(0.0, asked + seconds - time.monotonic()))
    return probe.is_alive()


def require_answer(place: Path) -> None:
    """Raises Late where the file system of `place` does not answer."""
    if is_silent(place, SILENCE_SECONDS):
        raise Late(f"the file system of {place} does not answer")


def keep_waiting() -> None:
    """The command follows what comes: no silence of a file system ends it."""
    watch = FILES.get()
    if watch is not None:
        watch.follows = True


def _say(line: str) -> None:
    print(f"tr11: {line}", file=sys.stderr, flush=True)


def _probe(place: Path) -> threading.Thread:
    """Asks for the room on a file system: no client answers that from what it remembers."""

    def ask() -> None:
        with suppress(OSError):  # an error is an answer
            os.statvfs(place)

    thread = threading.Thread(target=ask, name=_IN_TIME, daemon=True)
    thread.start()
    return thread


def _waits_in_kernel() -> bool:
    """Whether a thread without a deadline of its own waits for a device or a file server."""
    for thread in threading.enumerate():
        with suppress(OSError):
            stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
            if thread.name != _IN_TIME and stat.rpartition(")")[2].split()[0] == "D":
                return True
    return False
