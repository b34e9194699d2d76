"""How samples are made of an indexed data set: the protocol that each kind of training implements, and a GPT's."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from trainer.contract.record import Record
from trainer.data.array_cache import CacheKey
from trainer.data.dataset import GPTDataset, SampleSource
from trainer.data.index_cache import IndexMapsCache, IndexMapsKey, digest_sizes
from trainer.data.indexed import IndexedDataset
from trainer.data.rows import NextTokenRow, RowFormat


class SampleTask(Protocol):
    """A kind of samples, with all its settings. Small, and can be sent between processes."""

    @property
    def row(self) -> RowFormat:
        """What a sample's row holds."""

    @property
    def unit(self) -> str:
        """What a split shares out, in the plural."""

    def units(self, data: IndexedDataset) -> int:
        """How many of them there are."""

    def key(self, data: IndexedDataset, name: str, samples: int, units: range) -> CacheKey:
        """Everything that the maps of some units depend on. `name`: of the split."""

    def ensure(self, key: CacheKey, folder: Path, data: IndexedDataset) -> bool:
        """Build the maps unless sound ones are there; True when they were built. Raises DataError."""

    def open(self, key: CacheKey, folder: Path, data: IndexedDataset) -> SampleSource:
        """The samples, once the maps are there. Raises DataError when they do not appear in time."""


class NextTokenTask(Record):
    """A GPT's samples: windows over sequences laid end to end."""

    sequence_length: int
    seed: int
    unit = "sequences"

    @property
    def row(self) -> NextTokenRow:
        """Tokens that follow each other."""
        return NextTokenRow(self.sequence_length)

    def units(self, data: IndexedDataset) -> int:
        """Sequences, each of them a document to this training."""
        return len(data)

    def key(self, data: IndexedDataset, name: str, samples: int, units: range) -> IndexMapsKey:
        """Of the three index maps."""
        return IndexMapsKey(
            data_set=data.name,
            name=name,
            samples=samples,
            sequence_length=self.sequence_length,
            seed=self.seed,
            first_document=units.start,
            end_document=units.stop,
            sizes_digest=digest_sizes(data.sizes, units),
        )

    def ensure(self, key: CacheKey, folder: Path, data: IndexedDataset) -> bool:
        """Build the three maps unless they are there."""
        assert isinstance(key, IndexMapsKey)
        return IndexMapsCache(folder).ensure(key, data.sizes)

    def open(self, key: CacheKey, folder: Path, data: IndexedDataset) -> GPTDataset:
        """The samples in the order of the maps."""
        assert isinstance(key, IndexMapsKey)
        return GPTDataset(data, IndexMapsCache(folder).wait(key), self.sequence_length, key.samples)
