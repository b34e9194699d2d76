"""What makes a document suspicious, as pure functions of arrays of symbols: token ids, or
characters of a text.

Documents are laid end to end in one array; `starts` are where they begin, ascending, the first one
0, none empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.record import Record

Symbols = npt.NDArray[Any]
Starts = npt.NDArray[np.int64]


class DocumentLimits(Record):
    """Beyond which a document is reported. Lengths in symbols.

    A storm is a document of at least `storm_length` of which more than half is one symbol, or one
    that holds the same symbol `storm_run` times in a row. `longest` is the length from which on a
    document is overlong.
    """

    storm_length: int = 64
    storm_run: int = 512
    longest: int = 1_000_000


class Storm(Record):
    """A document that mostly is, or for a long stretch is, one symbol."""

    document: int
    symbol: int
    count: int  # how often the symbol is there, or how long its longest run is
    is_run: bool


def find_storms(symbols: Symbols, starts: Starts, limits: DocumentLimits) -> list[Storm]:
    """The storms among the documents, in their order, each once."""
    ends = np.append(starts[1:], len(symbols))
    lengths = ends - starts
    found: dict[int, Storm] = {}
    for document, symbol, count in _long_runs(symbols, starts, limits.storm_run):
        known = found.get(document)
        if known is None or count > known.count:
            found[document] = Storm(document, symbol, count, is_run=True)
    for document in _candidates(symbols, starts, lengths, limits.storm_length).tolist():
        part = symbols[starts[document] : ends[document]]
        symbol = int(majority_symbol(part))
        count = int(np.count_nonzero(part == symbol))
        if 2 * count > len(part):
            found[document] = Storm(document, symbol, count, is_run=False)
    return [found[document] for document in sorted(found)]


def _candidates(
    symbols: Symbols, starts: Starts, lengths: npt.NDArray[np.int64], least: int
) -> npt.NDArray[np.int64]:
    """Documents of at least `least` symbols that may be mostly one symbol: all that are, and few
    others.

    Where one symbol stands at more than half of n places, at least (n - 1) / 4 of the ways from one
    of them to the next are of one or two steps.
    """
    near = np.zeros(len(symbols) + 1, dtype=np.uint8)
    near[2:] = symbols[1:] == symbols[:-1]
    near[3:] += symbols[2:] == symbols[:-2]
    before = np.cumsum(near, dtype=np.int64)
    pairs = before[starts + lengths] - before[starts]
    return np.flatnonzero((4 * pairs >= lengths - 1) & (lengths >= least))


def majority_symbol(symbols: Symbols) -> int:
    """The symbol that is more than half of a document, if there is one; otherwise any number: its
    median.
    """
    return int(np.partition(symbols, len(symbols) // 2)[len(symbols) // 2])


def _long_runs(symbols: Symbols, starts: Starts, least: int) -> list[tuple[int, int, int]]:
    """(document, symbol, length) of every run of at least `least` equal symbols inside one
    document.
    """
    if len(symbols) < least:
        return []
    begins = np.empty(len(symbols), dtype=bool)
    np.not_equal(symbols[1:], symbols[:-1], out=begins[1:])
    begins[starts] = True
    at = np.flatnonzero(begins)
    lengths = np.diff(np.append(at, len(symbols)))
    chosen = at[lengths >= least]
    documents = np.searchsorted(starts, chosen, side="right") - 1
    return list(
        zip(
            documents.tolist(),
            symbols[chosen].tolist(),
            lengths[lengths >= least].tolist(),
            strict=True,
        )
    )


def outside(symbols: Symbols, starts: Starts, size: int) -> list[tuple[int, int, int]]:
    """(document, first such symbol, how many) for each document with symbols that are not in 0 to
    `size` - 1.
    """
    if symbols.dtype.kind == "i":
        wrong = np.flatnonzero((symbols < 0) | (symbols >= size))
    else:
        wrong = np.flatnonzero(symbols >= size)
    if len(wrong) == 0:
        return []
    documents = np.searchsorted(starts, wrong, side="right") - 1
    names, first, counts = np.unique(documents, return_index=True, return_counts=True)
    return list(zip(names.tolist(), symbols[wrong[first]].tolist(), counts.tolist(), strict=True))
