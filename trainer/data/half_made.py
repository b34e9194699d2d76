"""What an interrupted `preprocess` has finished: a record beside the half-made pair, and going on
from it.

The record is replaced only after everything that it speaks of is on disk. So at any moment it
describes a beginning of the pair and the place in the input behind it, and to go on from there
gives the same bytes as not to have stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.contract.documents import document
from trainer.contract.record import JsonObject, Record
from trainer.contract.sharing import open_shared
from trainer.contract.state_file import read_json
from trainer.data.encode import EncodeTally
from trainer.data.errors import explain_os_errors
from trainer.data.indexed import bin_path, idx_path, pair_exists
from trainer.data.indexed_resume import ResumableWriter, ResumeMark, Written, extra_files
from trainer.data.indexed_write import partial_path
from trainer.data.lines import TextPosition
from trainer.data.made import pair_is_unchanged

SCHEMA = 1


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
        return PreprocessProgress(
            _tally(value["tally"]), ResumeMark(**value["mark"]), value["seconds"], value["report"]
        ), None

    def save(self, writer: ResumableWriter, written: Written, progress: PreprocessProgress) -> None:
        """Bring all up to a place to disk, then say so. Raises DataError; the record before it then
        still holds.
        """
        writer.save(written)
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


def _tally(value: Mapping[str, Any]) -> EncodeTally:
    known: JsonObject = {
        name: tuple(item) if isinstance(item, list) else item for name, item in value.items()
    }
    return EncodeTally(**{**known, "end": TextPosition(**value["end"])})
