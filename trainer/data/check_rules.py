"""What makes a document suspicious, as pure functions of arrays of symbols: token ids, or characters of a text.

Documents are laid end to end in one array; `starts` are where they begin, ascending, the first one 0, none empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Symbols = npt.NDArray[Any]
Starts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """Beyond which a document is reported. Lengths in symbols.

    A storm is a document of at least `storm_length` of which more than half is one symbol, or one that holds the same
    symbol `storm_run` times in a row. `longest` is the length from which on a document is overlong.
    """

    storm_length: int = 64
    storm_run: int = 512
    longest: int = 1_000_000


@dataclass(frozen=True)
class Storm:
    """A document that mostly is, or for a long stretch is, one symbol."""

    document: int
    symbol: int
    count: int  # how often the symbol is there, or how long its longest run is
    is_run: bool


def find_storms(symbols: Symbols, starts: Starts, limits: Limits) -> list[Storm]:
    """The storms among the documents, in their order, each once."""
    ends = np.append(starts[1:], len(symbols))
    lengths = ends - starts
    found: dict[int, Storm] = {}
    for document, symbol, count in _long_runs(symbols, starts, limits.storm_run):
        known = found.get(document)
        if known is None or count > known.count:
            found[document] = Storm(document, symbol, count, is_run=True)
    majority = majority_symbols(symbols, starts)
    counts = np.add.reduceat((symbols == np.repeat(majority, lengths)).astype(np.int64), starts)
    for document in np.flatnonzero((counts * 2 > lengths) & (lengths >= limits.storm_length)).tolist():
        found[document] = Storm(document, int(majority[document]), int(counts[document]), is_run=False)
    return [found[document] for document in sorted(found)]


def majority_symbols(symbols: Symbols, starts: Starts) -> npt.NDArray[Any]:
    """For each document the symbol that is more than half of it, if there is one; otherwise any number.

    Bit by bit: the bits of such a symbol are the bits of more than half of the document.
    """
    lengths = np.diff(np.append(starts, len(symbols)))
    result = np.zeros(len(starts), dtype=symbols.dtype)
    bits = int(symbols.max()).bit_length() if len(symbols) else 0
    for bit in range(bits):
        ones = np.add.reduceat(((symbols >> bit) & 1).astype(np.int32), starts)
        result |= ((ones * 2 > lengths).astype(symbols.dtype) << bit).astype(symbols.dtype)
    return result


def _long_runs(symbols: Symbols, starts: Starts, least: int) -> list[tuple[int, int, int]]:
    """(document, symbol, length) of every run of at least `least` equal symbols inside one document."""
    if len(symbols) < least:
        return []
    begins = np.empty(len(symbols), dtype=bool)
    np.not_equal(symbols[1:], symbols[:-1], out=begins[1:])
    begins[starts] = True
    at = np.flatnonzero(begins)
    lengths = np.diff(np.append(at, len(symbols)))
    chosen = at[lengths >= least]
    documents = np.searchsorted(starts, chosen, side="right") - 1
    return list(zip(documents.tolist(), symbols[chosen].tolist(), lengths[lengths >= least].tolist(), strict=True))


def outside(symbols: Symbols, starts: Starts, size: int) -> list[tuple[int, int, int]]:
    """(document, first such symbol, how many) for each document with symbols that are not in 0 to `size` - 1."""
    wrong = (
        np.flatnonzero((symbols < 0) | (symbols >= size))
        if symbols.dtype.kind == "i"
        else np.flatnonzero(symbols >= size)
    )
    if len(wrong) == 0:
        return []
    documents = np.searchsorted(starts, wrong, side="right") - 1
    names, first, counts = np.unique(documents, return_index=True, return_counts=True)
    return list(zip(names.tolist(), symbols[wrong[first]].tolist(), counts.tolist(), strict=True))
