"""Writing a pair over several lives of a process: going on, saving now and then, keeping what is
finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from trainer.contract.errors import DataError, InputFault
from trainer.data.encode import EncodeTally
from trainer.data.half_made import HalfMade, PreprocessProgress
from trainer.data.indexed_resume import ResumableWriter

SAVE_SECONDS = 15.0


@dataclass
class PairWork:
    """One life of a command that writes a pair: what was done before it, and what it has done so
    far.
    """

    half: HalfMade
    writer: ResumableWriter
    save_seconds: float
    can_go_on: bool = True

    def __post_init__(self) -> None:
        self._before = 0.0  # seconds of earlier lives
        self._started = time.monotonic()
        self._saved_at = self._started
        # Replaced in one step, so that an interruption between any two steps finds both of one
        # place.
        self._done = (EncodeTally(), self.writer.written())
        self._kept: PreprocessProgress | None = None  # what is on record, as far as this life knows

    @property
    def tally(self) -> EncodeTally:
        """What was noticed so far, by this life and those before it."""
        return self._done[0]

    @property
    def seconds(self) -> float:
        """Seconds taken so far, by this life and those before it."""
        return self._before + time.monotonic() - self._started

    def begin(self, force: bool, tell: Callable[[str], None]) -> PreprocessProgress | None:
        """What there is to go on from; None where it starts from the beginning, after saying why if
        something is left.

        Raises DataError when it cannot be seen now what is left.
        """
        if force or not self.can_go_on:
            progress, reason = (None, None)
        else:
            progress, reason = self.half.read()
        if self.writer.begin(progress.mark if progress else None):
            assert progress is not None
            self._before = progress.seconds
            self._kept = progress
            self._done = (progress.tally, self.writer.written())
            return progress
        if progress is not None:
            reason = "its files are not as it left them"
        self.half.remove()
        if reason is not None:
            tell(
                f"what an interrupted run left cannot be gone on with ({reason}): starting from the beginning"
            )
        return None

    def did(self, tally: EncodeTally) -> None:
        """All that the writer was given is finished work, of which this was noticed."""
        self._done = (tally, self.writer.written())

    def save_when_due(self) -> None:
        """Save, unless the last save was a moment ago. Raises DataError."""
        if time.monotonic() - self._saved_at >= self.save_seconds:
            self.save()

    def save(self, report: Mapping[str, Any] | None = None) -> None:
        """Bring what is finished to disk, where a later run can go on from it. Raises DataError."""
        tally, written = self._done
        if self.can_go_on and written.mark.sequences:
            progress = PreprocessProgress(tally, written.mark, self.seconds, report)
            self.half.save(self.writer, written, progress)
            self._kept = progress
        self._saved_at = time.monotonic()

    @contextmanager
    def kept_on_failure(
        self, tell: Callable[[str], None], kept: Callable[[PreprocessProgress], str]
    ) -> Iterator[None]:
        """Save as much as the disk takes when the block fails, and say what is `kept`.

        A fault of the input itself leaves nothing: the same command would only meet it again.
        """
        try:
            yield
        except InputFault:
            self.forget()
            raise
        except BaseException:
            with suppress(DataError):
                self.save()
            if self._kept is None:  # no save came to its end
                self.forget()
            else:
                tell(
                    f"kept: {kept(self._kept)}; the same command goes on from there, with --force it starts from the"
                    " beginning"
                )
            raise

    def forget(self) -> None:
        """Leave nothing to go on from."""
        self.writer.forget()
        self.half.remove()
