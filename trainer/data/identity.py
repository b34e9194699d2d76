"""What the data sets of a mixture hold, in numbers and digests that move with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from trainer.config.data_match import DataSetIdentity
from trainer.data.dataset import BlendedDataset, DocumentSource, SampleSource, read_rows
from trainer.data.index_cache import digest_sizes
from trainer.data.indexed import IndexedDataset

# Up to so many bytes all tokens of a data set are read, beyond it evenly spread parts: at a start, by one rank.
WHOLE_BYTES = 16 << 20
PARTS = 64
PART_BYTES = 16 << 10


def identities(source: SampleSource) -> Iterator[DataSetIdentity]:
    """Each data set of an opened source, in the order of its mixture. Raises DataError."""
    for member in source.members if isinstance(source, BlendedDataset) else (source,):
        assert isinstance(member, DocumentSource)  # as all that is read from an indexed data set
        data = member.tokens
        yield DataSetIdentity(
            name=data.name,
            sequences=len(data),
            size=data.token_count,
            lengths=_digest_lengths(data),
            tokens=_digest_tokens(data),
            sample=sample_digest(member, 0) or "",
        )


def sample_digest(source: SampleSource, number: int) -> str | None:
    """A digest of one sample's tokens; None when there are not so many."""
    if number >= len(source):
        return None
    row = read_rows(source, np.array([number]))[0]
    return hashlib.blake2b(row.astype("<i8").tobytes(), digest_size=8).hexdigest()


def _digest_lengths(data: IndexedDataset) -> str:
    """The same for both kinds of index."""
    digest = hashlib.blake2b(digest_sizes(data.sizes, range(len(data))).encode(), digest_size=16)
    for first in range(0, len(data.documents), 1 << 20):
        digest.update(np.asarray(data.documents[first : first + (1 << 20)]).astype("<i8").tobytes())
    return digest.hexdigest()


def _digest_tokens(data: IndexedDataset) -> str:
    """Of token numbers, whatever type they are stored in."""
    digest = hashlib.blake2b(digest_size=16)
    for start, stop in _parts(data.token_count, data.dtype.itemsize):
        digest.update(data.tokens[start:stop].astype("<i8").tobytes())
    return digest.hexdigest()


def _parts(tokens: int, token_bytes: int) -> Iterator[tuple[int, int]]:
    """Where the parts that are read begin and end: the first and the last of them at the ends."""
    if tokens * token_bytes <= WHOLE_BYTES:
        yield from ((start, start + (1 << 20)) for start in range(0, tokens, 1 << 20))
        return
    length = PART_BYTES // token_bytes
    for place in range(PARTS):
        start = (tokens - length) * place // (PARTS - 1)
        yield start, start + length
