"""What an indexed pair holds, for people and for machines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.contract.documents import document
from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.data.indexed import IndexedDataset
from trainer.data.tokenizer import Tokenizer

TOKENS_SHOWN = 32  # of a sequence


class Peek(Record):
    """The beginning of one sequence: number, length, first token ids, and their text if it was asked for."""

    sequence: int
    tokens: int
    ids: tuple[int, ...]
    text: str | None


class Inspection(Record):
    """Facts of one pair. Lengths are in tokens; `largest_token` is over the whole file."""

    prefix: str
    kind: str
    dtype: str
    type_code: int
    sequences: int
    documents: int
    tokens: int
    bytes: int
    empty_sequences: int
    shortest: int
    median: float
    longest: int
    largest_token: int
    peeks: tuple[Peek, ...]


def inspect_pair(prefix: str | Path, tokenizer: Tokenizer | None = None, sequences: int = 3) -> Inspection:
    """Open a pair, with all its checks, and describe it; reads every token once for the largest.

    Raises DataError for a damaged pair, or a token outside the tokenizer's vocabulary.
    """
    data = IndexedDataset(prefix)
    largest = int(data.tokens[0])
    for at in range(0, data.token_count, 1 << 22):
        largest = max(largest, int(data.tokens[at : at + (1 << 22)].max()))
        foreign = None if tokenizer is None else data.foreign_token(at, at + (1 << 22), tokenizer.vocabulary_size)
        if tokenizer is not None and foreign is not None:
            raise DataError(
                f"{foreign}; the vocabulary of {tokenizer.path} has {tokenizer.vocabulary_size}: the data was made with"
                " another tokenizer; give that one"
            )
    sizes = np.asarray(data.sizes)
    peeks = []
    for number in range(min(sequences, len(data))):
        ids = tuple(int(token) for token in data.get(number)[:TOKENS_SHOWN])
        peeks.append(Peek(number, int(sizes[number]), ids, None if tokenizer is None else tokenizer.decode(ids)))
    return Inspection(
        prefix=str(prefix),
        kind=data.kind,
        dtype=str(data.dtype),
        type_code=data.code,
        sequences=len(data),
        documents=data.document_count,
        tokens=data.token_count,
        bytes=data.bytes,
        empty_sequences=int(np.count_nonzero(sizes == 0)),
        shortest=int(sizes.min()),
        median=float(np.median(sizes)),
        longest=int(sizes.max()),
        largest_token=largest,
        peeks=tuple(peeks),
    )


def describe(inspection: Inspection) -> str:
    """An inspection as lines of text."""
    facts = document(inspection)
    facts.pop("peeks")
    width = max(map(len, facts))
    lines = [f"{name.replace('_', ' '):<{width}}  {_grouped(value)}" for name, value in facts.items()]
    for peek in inspection.peeks:
        shown = repr(peek.text) if peek.text is not None else " ".join(map(str, peek.ids))
        lines.append(f"sequence {peek.sequence} ({peek.tokens:,} tokens): {shown}")
    return "\n".join(lines)


def _grouped(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)
