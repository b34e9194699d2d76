"""Samples of GPT training by number: one data set, or a weighted mixture, or all splits of a run at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.blend import Group, build_blend, member_samples, prefix_name, split_documents
from trainer.data.errors import DataError
from trainer.data.index import IndexMaps
from trainer.data.index_cache import IndexMapsCache, IndexMapsKey, digest_sizes
from trainer.data.indexed import IndexedDataset

# Token numbers are compared with the vocabulary over all of a .bin up to this size, beyond it over evenly spread parts.
FULL_TOKEN_CHECK_BYTES = 64 << 20
TOKEN_CHECK_PARTS = 256
TOKEN_CHECK_PART = 16_384


class SampleSource(Protocol):
    """Samples by number, int64 [sequence_length + 1]: inputs are all but the last token, labels all but the first."""

    sequence_length: int

    def __len__(self) -> int:
        """Number of samples."""

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        """Write sample `index` into `out` [sequence_length + 1]."""


class GPTDataset:
    """Samples of one data set, or of a range of its documents, in shuffled order. See `trainer.data.index`."""

    def __init__(self, tokens: IndexedDataset, maps: IndexMaps, sequence_length: int, samples: int) -> None:
        self.tokens = tokens
        self.maps = maps
        self.sequence_length = sequence_length
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        """Write sample `index` into `out` [sequence_length + 1], joining as many documents as it spans."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        row = int(self.maps.shuffle[index])
        (position, offset), (last, last_offset) = self.maps.samples[row].tolist(), self.maps.samples[row + 1].tolist()
        filled = 0
        while position < last:
            part = self.tokens.get(int(self.maps.documents[position]), offset)
            out[filled : filled + len(part)] = part
            filled += len(part)
            position, offset = position + 1, 0
        out[filled:] = self.tokens.get(int(self.maps.documents[last]), offset, last_offset - offset + 1)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return _one(self, index)


class BlendedDataset:
    """A weighted mixture of sample sources, in the greedy order of `trainer.data.blend.build_blend`."""

    def __init__(self, members: Sequence[SampleSource], weights: Sequence[float], samples: int) -> None:
        self.members = tuple(members)
        self.sequence_length = members[0].sequence_length
        self.sets, self.numbers = build_blend(weights, samples)

    def __len__(self) -> int:
        return len(self.sets)

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        """Write sample `index` of the mixture into `out` [sequence_length + 1]."""
        if not 0 <= index < len(self.sets):
            raise IndexError(f"sample {index} of {len(self.sets)}")
        self.members[int(self.sets[index])].read(int(self.numbers[index]), out)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return _one(self, index)


def _one(source: SampleSource, index: int) -> npt.NDArray[np.int64]:
    out = np.empty(source.sequence_length + 1, dtype=np.int64)
    source.read(index, out)
    return out


@dataclass(frozen=True)
class _Part:
    """One member of a group, opened, with the key of its index maps."""

    weight: float
    tokens: IndexedDataset
    key: IndexMapsKey
    cache: IndexMapsCache


def open_splits(
    prefixes: Sequence[tuple[float, str | Path]],
    *,
    split: str,
    sequence_length: int,
    seed: int,
    train_samples: int,
    valid_samples: int = 0,
    test_samples: int = 0,
    vocabulary_size: int | None = None,
    cache_folder: str | Path | None = None,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> dict[str, SampleSource]:
    """`train`, `valid` and `test` of one mixture of (weight, prefix), each with as many samples as asked for.

    A split of which 0 samples are asked is absent from the result. `split` is as `949,50,1`. Index maps are kept in
    `cache_folder`, else beside each prefix. The rank with `is_builder` builds them and checks the token numbers
    against `vocabulary_size`; every rank that takes part in `barrier` must call this function, and reaches the barrier
    exactly once, whatever fails. Raises DataError: data missing, damaged, too short, out of the vocabulary, no space.
    """
    try:
        opened = _open_all(prefix for _, prefix in prefixes)
        parts = {}
        for position, (name, samples) in enumerate(
            (("train", train_samples), ("valid", valid_samples), ("test", test_samples))
        ):
            ranges = [split_documents(split, len(opened[str(prefix)]))[position] for _, prefix in prefixes]
            weights = [weight for weight, _ in prefixes]
            tokens = [opened[str(prefix)] for _, prefix in prefixes]
            if samples > 0:
                parts[name] = _plan(
                    name,
                    tokens,
                    weights,
                    ranges,
                    samples=samples,
                    sequence_length=sequence_length,
                    seed=seed,
                    cache_folder=cache_folder,
                )
        if is_builder:
            _build(parts, opened, vocabulary_size)
    finally:
        barrier()
    wanted = {"train": train_samples, "valid": valid_samples, "test": test_samples}
    return {name: _assemble(group, sequence_length, wanted[name]) for name, group in parts.items()}


def open_groups(
    groups: Mapping[Group, int],
    *,
    sequence_length: int,
    seed: int,
    vocabulary_size: int | None = None,
    cache_folder: str | Path | None = None,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> dict[str, SampleSource]:
    """Named mixtures with explicit ranges, each with its number of samples. Otherwise as `open_splits`."""
    try:
        opened = _open_all(member.prefix for group in groups for member in group.members)
        parts = {}
        for group, samples in groups.items():
            tokens = [opened[member.prefix] for member in group.members]
            ranges = [member.documents(len(data)) for member, data in zip(group.members, tokens, strict=True)]
            weights = [member.weight for member in group.members]
            parts[group.name] = _plan(
                group.name,
                tokens,
                weights,
                ranges,
                samples=samples,
                sequence_length=sequence_length,
                seed=seed,
                cache_folder=cache_folder,
            )
        if is_builder:
            _build(parts, opened, vocabulary_size)
    finally:
        barrier()
    return {group.name: _assemble(parts[group.name], sequence_length, samples) for group, samples in groups.items()}


def check_token_numbers(data: IndexedDataset, vocabulary_size: int) -> None:
    """Raise DataError when a token is not below `vocabulary_size`: the data was made with another tokenizer.

    All tokens are read when the file is small, else evenly spread parts of it.
    """
    if data.dtype.kind == "f":
        raise DataError(f"{data.path} holds {data.dtype} numbers, not tokens; prepare it with `tr11 data preprocess`")
    if data.bytes <= FULL_TOKEN_CHECK_BYTES:
        starts = range(0, data.token_count, 1 << 22)
        length = 1 << 22
    else:
        starts = range(0, data.token_count, max(1, data.token_count // TOKEN_CHECK_PARTS))
        length = TOKEN_CHECK_PART
    for start in starts:
        part = data.tokens[start : start + length]
        for worst in (int(part.max()), int(part.min())):
            if not 0 <= worst < vocabulary_size:
                raise DataError(
                    f"{data.path} holds token {worst}, the vocabulary has {vocabulary_size}: the data was made with"
                    " another tokenizer; prepare it again, or set the vocabulary that it was made with"
                )


def _open_all(prefixes: Iterable[str | Path]) -> dict[str, IndexedDataset]:
    opened: dict[str, IndexedDataset] = {}
    for prefix in prefixes:
        if str(prefix) not in opened:
            opened[str(prefix)] = IndexedDataset(prefix)
    if not opened:
        raise DataError("no data was named; give at least one weight and prefix")
    return opened


def _plan(
    name: str,
    tokens: Sequence[IndexedDataset],
    weights: Sequence[float],
    ranges: Sequence[range],
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    cache_folder: str | Path | None,
) -> list[_Part]:
    """What each member of a group has to provide. Members of which the group's part holds nothing are an error."""
    parts = []
    for data, weight, documents, wanted in zip(tokens, weights, ranges, member_samples(weights, samples), strict=True):
        if len(documents) == 0:
            raise DataError(
                f"{name} data: the split gives it none of the {len(data)} sequences of {data.prefix}; give more data or"
                f" a larger share of the split, or ask for no {name} samples"
            )
        key = IndexMapsKey(
            data_set=prefix_name(data.prefix),
            name=name,
            samples=wanted,
            sequence_length=sequence_length,
            seed=seed,
            first_document=documents.start,
            end_document=documents.stop,
            sizes_digest=digest_sizes(data.sizes, documents),
        )
        folder = Path(data.prefix).parent if cache_folder is None else Path(cache_folder)
        parts.append(_Part(weight, data, key, IndexMapsCache(folder)))
    return parts


def _build(
    groups: Mapping[str, list[_Part]], opened: Mapping[str, IndexedDataset], vocabulary_size: int | None
) -> None:
    if vocabulary_size is not None:
        for data in opened.values():
            check_token_numbers(data, vocabulary_size)
    for name, parts in groups.items():
        for part in parts:
            try:
                part.cache.ensure(part.key, part.tokens.sizes)
            except DataError as error:
                raise DataError(f"{name} data of {part.tokens.prefix}: {error}") from error


def _assemble(parts: Sequence[_Part], sequence_length: int, samples: int) -> SampleSource:
    members = [GPTDataset(part.tokens, part.cache.wait(part.key), sequence_length, part.key.samples) for part in parts]
    if len(members) == 1:
        return members[0]
    return BlendedDataset(members, [part.weight for part in parts], samples)
