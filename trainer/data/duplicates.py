"""Duplicates among any number of documents in little memory: digests go to files by their first byte."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from trainer.contract.record import Record
from trainer.data.errors import explain_os_errors

DIGEST_BYTES = 16
BUCKETS = 64  # each holds a 64th of the documents when duplicates are looked for
RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("source", "<u4"), ("document", "<u8")])
KEPT_RECORDS = 4096  # of each bucket, before they are written


class Copies(Record):
    """Documents that are equal: the first of them, and the others, as (number of the source, number in it)."""

    first: tuple[int, int]
    others: tuple[tuple[int, int], ...]


class DigestStore:
    """Digests of documents, by source and number. A context manager: its files go away when it is left."""

    def __init__(self, folder: Path | None = None) -> None:
        with explain_os_errors("making a temporary folder in", folder or "the temporary folder"):
            self._folder = tempfile.TemporaryDirectory(prefix="tr11-digests-", dir=folder)
        self._kept: list[list[npt.NDArray[np.void]]] = [[] for _ in range(BUCKETS)]
        self._streams: dict[int, BinaryIO] = {}

    def add(self, source: int, documents: npt.NDArray[np.int64], digests: bytes) -> None:
        """Remember the digests, back to back, of some documents. Raises DataError when the disk is full."""
        records = np.empty(len(documents), dtype=RECORD)
        halves = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
        records["high"], records["low"] = halves[:, 0], halves[:, 1]
        records["source"], records["document"] = source, documents
        buckets = (halves[:, 0] % BUCKETS).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        bounds = np.searchsorted(buckets[order], np.arange(BUCKETS + 1))
        for bucket in range(BUCKETS):
            part = records[order[bounds[bucket] : bounds[bucket + 1]]]
            if len(part):
                self._kept[bucket].append(part)
                if sum(map(len, self._kept[bucket])) > KEPT_RECORDS:
                    self._write(bucket)

    def _write(self, bucket: int) -> None:
        path = Path(self._folder.name) / str(bucket)
        with explain_os_errors("writing digests to", path):
            if bucket not in self._streams:
                self._streams[bucket] = path.open("w+b", buffering=0)
            self._streams[bucket].write(np.concatenate(self._kept[bucket]).tobytes())
        self._kept[bucket].clear()

    def copies(self) -> Iterator[Copies]:
        """Every set of documents of equal digest, one bucket in memory at a time."""
        for bucket in range(BUCKETS):
            parts = list(self._kept[bucket])
            if bucket in self._streams:
                self._streams[bucket].seek(0)
                parts.insert(0, np.frombuffer(self._streams[bucket].read(), dtype=RECORD))
            if parts:
                yield from _copies_in(np.concatenate(parts))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams.values():
            stream.close()
        self._folder.cleanup()


def _copies_in(records: npt.NDArray[np.void]) -> Iterator[Copies]:
    ordered = records[np.lexsort((records["document"], records["source"], records["low"], records["high"]))]
    same = (ordered["high"][1:] == ordered["high"][:-1]) & (ordered["low"][1:] == ordered["low"][:-1])
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    for begin, end in edges.reshape(-1, 2).tolist():
        places: Sequence[tuple[int, int]] = [
            (int(record["source"]), int(record["document"])) for record in ordered[begin : end + 1]
        ]
        yield Copies(places[0], tuple(places[1:]))
