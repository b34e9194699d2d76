"""A pair that is made over several lives of a process: a record beside the half-made pair, going on
from it, and the record of what the finished one was made from.

The record is replaced only after everything that it speaks of is on disk. So at any moment it
describes a beginning of the pair and the place in the input behind it, and to go on from there
gives the same bytes as not to have stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.documents import document, record_of
from trainer.contract.errors import DataError, InputFault, explain_os_errors
from trainer.contract.files import open_shared
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json
from trainer.data.encode import EncodeTally
from trainer.data.indexed import bin_path, idx_path, pair_exists
from trainer.data.indexed_write import IndexedWriter, ResumeMark, extra_files, partial_path
from trainer.data.made import begin_record, check_replaceable, end_record, recorded

SCHEMA = 1
SAVE_SECONDS = 15.0


def pair_record(prefix: Path | str) -> Path:
    """Where a pair keeps what it was made from."""
    return Path(f"{prefix}.report.json")


def pair_is_unchanged(prefix: Path | str, report: Mapping[str, Any]) -> bool:
    """Whether a pair still holds as many tokens as its report says. Raises as the file system and
    the report do.
    """
    return bool(
        bin_path(prefix).stat().st_size == report["tokens"] * np.dtype(report["dtype"]).itemsize
    )


class PreprocessProgress(Record):
    """How far a preprocess has come: what was noticed, how much of the pair is on disk, seconds
    taken so far.

    `report`: of the whole, once nothing is left but to publish.
    """

    tally: EncodeTally
    mark: ResumeMark
    seconds: float
    report: Mapping[str, Any] | None = None


class HalfMade:
    """The record of one request at one prefix."""

    def __init__(self, prefix: str, request: Mapping[str, Any]) -> None:
        self.prefix = prefix
        self._request = dict(request)
        self.path = partial_path(Path(f"{prefix}.progress"))
        self._fresh = self.path.with_name(f"{self.path.name}.new")

    def read(self) -> tuple[PreprocessProgress | None, str | None]:
        """What there is to go on from; where something is left that is of no use, why.

        Raises DataError when it cannot be seen now: that says nothing of its use.
        """
        with explain_os_errors("reading", self.path):
            try:
                return self._read()
            except (ValueError, KeyError, TypeError, AttributeError):
                return None, f"{self.path} cannot be read"

    def _read(self) -> tuple[PreprocessProgress | None, str | None]:
        value = read_json(self.path)
        if value is None:
            left = partial_path(bin_path(self.prefix))
            return None, "it left no record" if left.is_file() and left.stat().st_size else None
        if value["schema"] != SCHEMA:
            return None, f"{self.path} is of another version"
        differing = sorted(
            key for key in self._request if value["request"].get(key) != self._request[key]
        )
        if differing:
            return (
                None,
                f"since then {', '.join(name.replace('_', ' ') for name in differing)} changed",
            )
        return record_of(PreprocessProgress, value), None

    def save(self, writer: IndexedWriter, progress: PreprocessProgress) -> None:
        """Bring all up to a place to disk, then say so. Raises DataError; the record before it then
        still holds.
        """
        writer.save(progress.mark)
        with explain_os_errors("writing", self.path):
            self._write(
                json.dumps({"schema": SCHEMA, "request": self._request, **document(progress)})
            )

    def _write(self, text: str) -> None:
        # Only the one process that has the prefix comes here, so that one name will do, and a kill
        # leaves no litter.
        with os.fdopen(
            open_shared(self._fresh, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8"
        ) as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        self._fresh.replace(self.path)

    def published(self) -> Mapping[str, Any] | None:
        """The report of a pair whose writer was stopped while, or after, it was published;
        publishes what is left.
        """
        progress, _ = self.read()
        if (
            progress is None
            or progress.report is None
            or partial_path(bin_path(self.prefix)).exists()
        ):
            return None
        index = partial_path(idx_path(self.prefix))
        with explain_os_errors("publishing", self.prefix):
            if bin_path(self.prefix).is_file() and not pair_is_unchanged(
                self.prefix, progress.report
            ):
                return None
            if index.is_file() and not idx_path(self.prefix).exists():
                index.replace(idx_path(self.prefix))
            if pair_exists(self.prefix):
                return progress.report
            return None

    def remove(self) -> None:
        """Take the record away, after what only it needs."""
        for path in (*extra_files(self.prefix), self._fresh, self.path):
            path.unlink(missing_ok=True)


@dataclass
class PairWork:
    """One life of a command that writes a pair: what was done before it, and what it has done so
    far.
    """

    half: HalfMade
    writer: IndexedWriter
    save_seconds: float
    can_go_on: bool

    def __post_init__(self) -> None:
        self.progress: PreprocessProgress | None = None  # what it goes on from
        self._before = 0.0  # seconds of earlier lives
        self._started = time.monotonic()
        self._saved_at = self._started
        # Replaced in one step, so that an interruption between any two steps finds both of one
        # place.
        self._done = (EncodeTally(), self.writer.mark)
        self._kept: PreprocessProgress | None = None  # what is on record, as far as this life knows

    @property
    def tally(self) -> EncodeTally:
        """What was noticed so far, by this life and those before it."""
        return self._done[0]

    @property
    def seconds(self) -> float:
        """Seconds taken so far, by this life and those before it."""
        return self._before + time.monotonic() - self._started

    def begin(self, force: bool, tell: Callable[[str], None]) -> None:
        """Find what there is to go on from, the `progress`; where it starts from the beginning
        though something is left, say why.

        Raises DataError when it cannot be seen now what is left.
        """
        progress = None
        reason = None
        if self.can_go_on and not force:
            progress, reason = self.half.read()
        if self.writer.begin(progress.mark if progress else None):
            assert progress is not None
            self.progress = self._kept = progress
            self._before = progress.seconds
            self._done = (progress.tally, progress.mark)
            return
        if progress is not None:
            reason = "its files are not as it left them"
        self.half.remove()
        if reason is not None:
            tell(
                f"what an interrupted run left cannot be gone on with ({reason}): starting from the beginning"
            )

    def did(self, tally: EncodeTally) -> None:
        """All that the writer was given is finished work, of which this was noticed."""
        self._done = (tally, self.writer.mark)

    def save_when_due(self) -> None:
        """Save, unless the last save was a moment ago. Raises DataError."""
        if time.monotonic() - self._saved_at >= self.save_seconds:
            self.save()

    def save(self, report: Mapping[str, Any] | None = None) -> None:
        """Bring what is finished to disk, where a later run can go on from it. Raises DataError."""
        tally, mark = self._done
        if self.can_go_on and mark.sequences:
            progress = PreprocessProgress(tally, mark, self.seconds, report)
            self.half.save(self.writer, progress)
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


def make_pair(
    prefix: str,
    request: JsonObject,
    dtype: npt.DTypeLike,
    fill: Callable[[PairWork], JsonObject],
    *,
    kept: Callable[[PreprocessProgress], str],
    force: bool,
    tell: Callable[[str], None],
    save_seconds: float,
    can_go_on: bool = True,
) -> Mapping[str, Any]:
    """Let `fill` write a pair, in as many lives as it takes; returns its report, which the record
    beside the pair holds with the request.

    A pair that was not made so is replaced with `force` alone. What is finished is brought to disk
    every `save_seconds`; after an interruption the same request goes on from there, unless `force`.
    `tell` hears of an interruption, with what is `kept`. Raises DataError.
    """
    outputs = (bin_path(prefix), idx_path(prefix))
    record = pair_record(prefix)
    check_replaceable(outputs, record, lambda report: pair_is_unchanged(prefix, report), force)
    half = HalfMade(prefix, request)
    report = None
    if not force:
        report = half.published()
    if report is None:
        with recorded(record, outputs), IndexedWriter(prefix, dtype) as writer:
            pair = PairWork(half, writer, save_seconds, can_go_on)
            pair.begin(force, tell)
            with pair.kept_on_failure(tell, kept):
                report = fill(pair)
                pair.save(report)
            if writer.mark.tokens:  # else nothing appears
                begin_record(record, request)
            else:
                pair.forget()
    end_record(record, request, report)
    half.remove()
    return report
