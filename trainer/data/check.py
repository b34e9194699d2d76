"""Is a data set fit to be trained on? Storms of one symbol, duplicates, empty and overlong
documents, foreign tokens.

Works on indexed pairs, token by token, and on JSON lines before they are tokenized, character by
character. Memory is a few pieces of data for each worker, whatever the size of the whole.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from trainer.contract.documents import document
from trainer.contract.errors import DataError, explain_os_errors
from trainer.contract.record import JsonObject, Record
from trainer.data.check_rules import DocumentLimits, find_storms, outside
from trainer.data.indexed import IndexedDataset
from trainer.data.lines import (
    MAX_LINE_MIB,
    MIB,
    PIECE_BYTES,
    BadLine,
    LineBlock,
    piece_size,
    read_pieces,
    texts_of,
)
from trainer.data.pool import PIECES_IN_FLIGHT, map_in_order
from trainer.data.text_file import TextFile
from trainer.data.tokenizer import EFFECT, FIX

# Duplicates among any number of documents in little memory: digests go to files by their first
# byte.

DIGEST_BYTES = 16
BUCKETS = 64  # each holds a 64th of the documents when duplicates are looked for
RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("source", "<u4"), ("document", "<u8")])
KEPT_RECORDS = 4096  # of each bucket, before they are written


# Documents that are equal, as (number of the source, number in it), the first of them first.
Copies = list[tuple[int, int]]


class DigestStore:
    """Digests of documents, by source and number. A context manager: its files go away when it is
    left.
    """

    def __init__(self, folder: Path | None = None) -> None:
        with explain_os_errors("making a temporary folder in", folder or "the temporary folder"):
            self._folder = tempfile.TemporaryDirectory(prefix="tr11-digests-", dir=folder)
        self._kept: list[list[npt.NDArray[np.void]]] = [[] for _ in range(BUCKETS)]
        self._streams: dict[int, BinaryIO] = {}

    def add(self, source: int, documents: npt.NDArray[np.int64], digests: bytes) -> None:
        """Remember the digests, back to back, of some documents. Raises DataError when the disk is
        full.
        """
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

    def __exit__(self, *error: object) -> None:
        for stream in self._streams.values():
            stream.close()
        self._folder.cleanup()


def _copies_in(records: npt.NDArray[np.void]) -> Iterator[Copies]:
    ordered = records[
        np.lexsort((records["document"], records["source"], records["low"], records["high"]))
    ]
    same = (ordered["high"][1:] == ordered["high"][:-1]) & (
        ordered["low"][1:] == ordered["low"][:-1]
    )
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    for begin, end in edges.reshape(-1, 2).tolist():
        yield [
            (int(record["source"]), int(record["document"])) for record in ordered[begin : end + 1]
        ]


PIECE_TOKENS = 2_000_000
EXAMPLES = 5  # of each kind of finding
UNREADABLE, EMPTY, OVERLONG, STORM, FOREIGN, DUPLICATE, BAD_LINE, END_TOKEN = (
    "unreadable",
    "empty",
    "overlong",
    "storm",
    "outside_vocabulary",
    "duplicate",
    "bad_line",
    "end_token_in_text",
)


class DataFinding(Record):
    """One example of what was found: in which data set, at which document or line (from 0; lines
    from 1).
    """

    kind: str
    source: str
    place: int | None
    detail: str


class CheckReport(Record):
    """What a check found. `counts`: documents of each kind of finding; `examples`: the first few of
    each.
    """

    sources: tuple[str, ...]
    documents: int
    symbols: int  # tokens, or characters of raw text
    counts: dict[str, int]
    examples: tuple[DataFinding, ...]
    seconds: float

    @property
    def clean(self) -> bool:
        """True when nothing was found."""
        return not self.counts


@dataclass
class Examined:
    """What one piece of a source holds, with few examples of each kind of finding. `numbers` and
    `digests` are of its documents that are not empty.
    """

    source: int
    input_bytes: int
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, int, str]] = field(default_factory=list)  # kind, place, detail
    documents: int = 0
    symbols: int = 0
    numbers: npt.NDArray[np.int64] = field(init=False)
    digests: bytes = field(init=False)

    def note(self, kind: str, place: int, detail: str) -> None:
        """Take in a finding."""
        self.counts[kind] += 1
        if self.counts[kind] <= EXAMPLES:
            self.examples.append((kind, place, detail))


# ----------------------------------------------------------------------------- documents
def _examine(
    piece: Examined,
    documents: Sequence[tuple[int, npt.NDArray[Any]]],
    limits: DocumentLimits,
    name_of: Callable[[int], str],
    vocabulary_size: int | None = None,
) -> Examined:
    """Examine the documents of a piece, given as (place, symbols), and return it."""
    places = np.array([place for place, symbols in documents if len(symbols)], dtype=np.int64)
    bodies = [symbols for _, symbols in documents if len(symbols)]
    for place, symbols in documents:
        if len(symbols) == 0:
            piece.note(EMPTY, place, "nothing but the end of the document")
        elif len(symbols) >= limits.longest:
            piece.note(OVERLONG, place, f"{len(symbols):,} long")
    if bodies:
        whole = np.concatenate(bodies)
        lengths = np.array([len(body) for body in bodies], dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        for storm in find_storms(whole, starts, limits):
            what = f"{storm.count:,} of its {lengths[storm.document]:,} are {name_of(storm.symbol)}"
            if storm.is_run:
                what = f"{name_of(storm.symbol)} stands {storm.count:,} times in a row"
            piece.note(STORM, int(places[storm.document]), what)
        if vocabulary_size is not None:
            for document, first, count in outside(whole, starts, vocabulary_size):
                piece.note(
                    FOREIGN,
                    int(places[document]),
                    f"{count:,} tokens such as {first}, of {vocabulary_size:,}",
                )
    piece.documents = len(documents)
    piece.symbols = sum(map(len, bodies))
    piece.numbers = places
    piece.digests = b"".join(
        hashlib.blake2b(body.tobytes(), digest_size=DIGEST_BYTES).digest() for body in bodies
    )
    return piece


# ----------------------------------------------------------------------------- pairs
class _PairState(Record):
    pairs: dict[int, IndexedDataset]
    limits: DocumentLimits
    vocabulary_size: int | None
    end_token: int | None
    widest: np.dtype[Any]


def _open_pairs(
    prefixes: dict[int, str],
    limits: DocumentLimits,
    vocabulary_size: int | None,
    end_token: int | None,
) -> _PairState:
    pairs = {number: IndexedDataset(prefix) for number, prefix in prefixes.items()}
    # Equal documents are equal whatever type holds them.
    if pairs:
        widest = np.result_type(*{pair.dtype for pair in pairs.values()})
    else:
        widest = np.dtype(np.int64)
    return _PairState(pairs, limits, vocabulary_size, end_token=end_token, widest=widest)


def _check_sequences(state: _PairState, piece: tuple[int, int, int]) -> Examined:
    """Examine sequences `first` to `end` - 1 of one pair. A single last end-of-document token does
    not count.
    """
    number, first, end = piece
    data = state.pairs[number]
    size = int(np.sum(data.sizes[first:end], dtype=np.int64)) * data.dtype.itemsize
    examined = Examined(number, size)
    documents = []
    for sequence in range(first, end):
        tokens = data.get(sequence)
        if state.end_token is not None and len(tokens):
            if tokens[-1] == state.end_token:
                tokens = tokens[:-1]
            inside = int(np.count_nonzero(tokens == state.end_token))
            if inside:
                examined.note(
                    END_TOKEN,
                    sequence,
                    f"token {state.end_token}, which ends a document, {inside:,} times",
                )
        documents.append((sequence, tokens.astype(state.widest, copy=False)))
    return _examine(
        examined,
        documents,
        state.limits,
        name_of=lambda token: f"token {token}",
        vocabulary_size=state.vocabulary_size,
    )


def _pieces_of(number: int, data: IndexedDataset) -> Iterator[tuple[int, int, int]]:
    ends = np.cumsum(data.sizes, dtype=np.int64)
    first = 0
    while first < len(ends):
        before = 0
        if first:
            before = int(ends[first - 1])
        end = max(first + 1, int(np.searchsorted(ends, before + PIECE_TOKENS, side="right")))
        yield number, first, end
        first = end


def check_pairs(
    prefixes: Sequence[str],
    *,
    vocabulary_size: int | None = None,
    end_token: int | None = None,
    limits: DocumentLimits | None = None,
    workers: int = 1,
    temporary: Path | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> CheckReport:
    """Read every token of some pairs once. Pairs that cannot be opened are findings, and the others
    are still checked.

    Duplicates are looked for over all of them together; tokens outside the vocabulary when its size is given.
    Digests of documents go to files in `temporary` (28 bytes for each document).
    Raises DataError when a worker is killed or the disk is full.
    """
    notes: list[DataFinding] = []
    readable: dict[int, str] = {}
    pieces: list[tuple[int, IndexedDataset]] = []
    for number, prefix in enumerate(prefixes):
        try:
            data = IndexedDataset(prefix)
            data.check_type()
        except DataError as error:
            notes.append(DataFinding(UNREADABLE, prefix, None, str(error)))
            continue
        readable[number] = prefix
        pieces.append((number, data))
    examined = map_in_order(
        _check_sequences,
        (piece for number, data in pieces for piece in _pieces_of(number, data)),
        set_up=_open_pairs,
        arguments=(readable, limits or DocumentLimits(), vocabulary_size, end_token),
        workers=workers,
        doing=f"checking {', '.join(prefixes)}"[:200],
    )
    return _report(tuple(prefixes), notes, examined, temporary=temporary, on_bytes=on_bytes)


# ----------------------------------------------------------------------------- raw text
class _RawState(Record):
    json_key: str
    limits: DocumentLimits
    end_tokens: tuple[str, ...]


def _check_lines(state: _RawState, piece: LineBlock) -> Examined:
    """Examine the texts of whole lines of JSON."""
    examined = Examined(0, piece.file_bytes)
    documents: list[tuple[int, npt.NDArray[Any]]] = []
    for number, text in texts_of(piece, state.json_key):
        if isinstance(text, BadLine):
            examined.note(BAD_LINE, number, text.reason)
            continue
        for token in state.end_tokens:
            if token in text:
                examined.note(
                    END_TOKEN, number, f"{token!r} {text.count(token):,} times in the text"
                )
        body = ""
        if text.strip():
            body = text
        symbols = np.frombuffer(body.encode("utf-32-le"), dtype="<u4")
        documents.append((number, symbols))
    return _examine(
        examined,
        documents,
        state.limits,
        name_of=lambda symbol: f"the character {chr(symbol)!r}",
    )


def check_raw(
    path: Path,
    *,
    json_key: str = "text",
    limits: DocumentLimits | None = None,
    end_tokens: Sequence[str] = (),
    max_line_mib: int = MAX_LINE_MIB,
    workers: int = 1,
    temporary: Path | None = None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> CheckReport:
    """Read JSON lines once, and examine their texts; `end_tokens` are spellings that a text should
    not hold.

    Raises DataError when the file is absent, damaged or no JSON lines, or as `check_pairs`.
    """
    most_bytes = max_line_mib * MIB
    with TextFile(path) as stream:
        examined = map_in_order(
            _check_lines,
            read_pieces(stream, max_line_bytes=most_bytes),
            set_up=_RawState,
            arguments=(json_key, limits or DocumentLimits(), tuple(end_tokens)),
            workers=workers,
            doing=f"checking {path}",
            size_of=piece_size,
            most_bytes=max(most_bytes, workers * PIECES_IN_FLIGHT * PIECE_BYTES),
        )
        return _report((str(path),), [], examined, temporary=temporary, on_bytes=on_bytes)


# ----------------------------------------------------------------------------- report
def _report(
    sources: tuple[str, ...],
    notes: list[DataFinding],
    pieces: Generator[Examined, None, None],
    temporary: Path | None,
    on_bytes: Callable[[int], None],
) -> CheckReport:
    started = time.monotonic()
    counts: Counter[str] = Counter(note.kind for note in notes)
    shown: Counter[str] = Counter()
    documents = symbols = 0
    with closing(pieces), DigestStore(temporary) as store:
        for piece in pieces:
            documents += piece.documents
            symbols += piece.symbols
            counts += piece.counts
            for kind, place, detail in piece.examples:
                shown[kind] += 1
                if shown[kind] <= EXAMPLES:
                    notes.append(DataFinding(kind, sources[piece.source], place, detail))
            store.add(piece.source, piece.numbers, piece.digests)
            on_bytes(piece.input_bytes)
        for copies in store.copies():
            counts[DUPLICATE] += len(copies) - 1
            shown[DUPLICATE] += 1
            if shown[DUPLICATE] <= EXAMPLES:
                notes.append(_duplicate(sources, copies))
    return CheckReport(
        sources,
        documents,
        symbols,
        counts=dict(counts),
        examples=tuple(notes),
        seconds=round(time.monotonic() - started, 3),
    )


def _duplicate(sources: tuple[str, ...], copies: Copies) -> DataFinding:
    first, *others = copies
    places = ", ".join(
        str(place) if source == first[0] else f"{place} of {sources[source]}"
        for source, place in others[:EXAMPLES]
    )
    more = ""
    if len(others) > EXAMPLES:
        more = f" and {len(others) - EXAMPLES:,} more"
    return DataFinding(DUPLICATE, sources[first[0]], first[1], f"the same as {places}{more}")


def as_result(report: CheckReport) -> JsonObject:
    """The report as one JSON object."""
    return {"clean": report.clean, **document(report)}


def describe_check(result: JsonObject) -> str:
    """The report as lines of text."""
    what = f"{result['documents']:,} documents, {result['symbols']:,} symbols of {', '.join(result['sources'])}"
    if result["clean"]:
        return f"{what}: nothing found"
    lines = [
        what,
        *(f"{kind.replace('_', ' ')}: {count:,}" for kind, count in result["counts"].items()),
    ]
    for found in result["examples"]:
        if found["place"] is None:
            place = ""
        else:
            place = f", {found['place']}"
        lines.append(
            f"  {found['kind'].replace('_', ' ')}: {found['source']}{place}: {found['detail']}"
        )
    if END_TOKEN in result["counts"]:
        lines.append(f"A token in a text that ends documents: {EFFECT}; {FIX}.")
    return "\n".join(lines)
