"""From the names of data sets to sources of samples: planned by every rank, built by one, opened by
all.

A plan is small and says where everything is, so that other processes can open the same sources from
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.data.blend import member_samples
from trainer.data.dataset import BlendedDataset, GPTDataset, NextTokenRow, RowFormat, SampleSource
from trainer.data.groups import DataGroup
from trainer.data.index import IndexMaps
from trainer.data.index_cache import (
    Arrays,
    BlendKey,
    IndexMapsKey,
    MapsKey,
    digest_sizes,
    ensure_arrays,
    wait_for_arrays,
)
from trainer.data.indexed import Implementation, IndexedDataset


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

    def key(self, data: IndexedDataset, name: str, samples: int, units: range) -> MapsKey:
        """Everything that the maps of some units depend on. `name`: of the split."""

    def open(self, arrays: Arrays, samples: int, data: IndexedDataset) -> SampleSource:
        """So many samples, in the order of the maps."""


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

    def open(self, arrays: Arrays, samples: int, data: IndexedDataset) -> GPTDataset:
        """The samples in the order of the maps."""
        return GPTDataset(data, IndexMaps(*arrays), self.sequence_length, samples)


# At the start, token numbers are compared with the vocabulary over all of a .bin up to this size,
# beyond it over evenly spread parts: most foreign data is refused before anything trains. Each
# token is looked at when it is read.
FULL_TOKEN_CHECK_BYTES = 64 << 20
TOKEN_CHECK_PARTS = 256
TOKEN_CHECK_PART = 16_384


class ReadOptions(Record):
    """How a run reads its data, the same for all of it. Without a cache folder, maps are kept
    beside each prefix.

    `other_task`: how samples are made where they are not a GPT's.
    """

    sequence_length: int
    seed: int
    vocabulary_size: int | None = None
    cache_folder: str | Path | None = None
    implementation: Implementation = "infer"
    other_task: SampleTask | None = None

    @property
    def task(self) -> SampleTask:
        """How samples are made."""
        return self.other_task or NextTokenTask(self.sequence_length, self.seed)

    def folder_for(self, prefix: str) -> Path:
        """Where index maps of a prefix are kept."""
        if self.cache_folder is None:
            return Path(prefix).parent
        return Path(self.cache_folder)


class PlannedMember(Record):
    """One data set of a planned source: its prefix, and the key and folder of its index maps."""

    prefix: str
    key: MapsKey
    folder: Path


class PlannedSource(Record):
    """A source of samples that any process which sees the files can open. Small, and can be sent
    between processes.
    """

    name: str
    samples: int
    task: SampleTask
    implementation: Implementation
    members: tuple[PlannedMember, ...]
    blend: BlendKey | None  # of a mixture of several
    vocabulary_size: int | None = None  # beyond which no token is handed out

    def open(self) -> SampleSource:
        """Map the files. Raises DataError when something is missing or damaged."""
        members = [
            self.task.open(
                wait_for_arrays(member.folder, member.key),
                member.key.samples,
                IndexedDataset(member.prefix, self.implementation, self.vocabulary_size),
            )
            for member in self.members
        ]
        if self.blend is None:
            return members[0]
        return BlendedDataset(members, wait_for_arrays(self.members[0].folder, self.blend))


def plan_groups(
    groups: Mapping[DataGroup, int],
    reading: ReadOptions,
    *,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> dict[str, PlannedSource]:
    """Named mixtures, each with its number of samples; ready to be opened when this returns.

    The rank with `is_builder` builds the index maps and checks the token numbers against the
    vocabulary; every rank that takes part in `barrier` must call this function, and reaches the
    barrier exactly once, whatever fails. Raises DataError: data missing, damaged, too short, out of
    the vocabulary, no space.
    """
    try:
        opened = _open_all((part.prefix for group in groups for part in group.members), reading)
        plans = {
            group.name: _plan(group, samples, opened, reading) for group, samples in groups.items()
        }
        if is_builder:
            _build(plans.values(), opened, reading.vocabulary_size)
    finally:
        barrier()
    return plans


def weights_by_size(prefixes: Sequence[str], implementation: Implementation) -> list[float]:
    """Weights for data sets that were given none: their numbers of tokens."""
    if len(prefixes) == 1:
        return [1.0]
    return [float(IndexedDataset(prefix, implementation).token_count) for prefix in prefixes]


def _open_all(prefixes: Iterable[str], reading: ReadOptions) -> dict[str, IndexedDataset]:
    opened: dict[str, IndexedDataset] = {}
    for prefix in prefixes:
        if prefix not in opened:
            opened[prefix] = IndexedDataset(prefix, reading.implementation)
    if not opened:
        raise DataError("no data was named; give at least one weight and prefix")
    return opened


def _plan(
    group: DataGroup, samples: int, opened: Mapping[str, IndexedDataset], reading: ReadOptions
) -> PlannedSource:
    """What each member has to provide. A member of which the mixture's part holds nothing is an
    error.
    """
    weights = [part.weight for part in group.members]
    members = []
    for part, wanted in zip(group.members, member_samples(weights, samples), strict=True):
        data = opened[part.prefix]
        count = reading.task.units(data)
        units = part.documents(count)
        if len(units) == 0:
            raise DataError(
                f"{group.name} data: the split gives it none of the {count} {reading.task.unit} of {part.prefix};"
                f" give more data or a larger share of the split, or ask for no {group.name} samples"
            )
        key = reading.task.key(data, group.name, wanted, units)
        members.append(PlannedMember(part.prefix, key, reading.folder_for(part.prefix)))
    blend = None
    if len(members) > 1:
        blend = BlendKey(group.name, samples, tuple(weights))
    return PlannedSource(
        group.name,
        samples,
        reading.task,
        implementation=reading.implementation,
        members=tuple(members),
        blend=blend,
        vocabulary_size=reading.vocabulary_size,
    )


def _build(
    plans: Iterable[PlannedSource],
    opened: Mapping[str, IndexedDataset],
    vocabulary_size: int | None,
) -> None:
    if vocabulary_size is not None:
        for data in opened.values():
            check_token_numbers(data, vocabulary_size)
    for plan in plans:
        for member in plan.members:
            try:
                build = partial(member.key.build, opened[member.prefix])
                ensure_arrays(member.folder, member.key, build)
            except DataError as error:
                raise DataError(f"{plan.name} data of {member.prefix}: {error}") from error
        if plan.blend is not None:
            ensure_arrays(plan.members[0].folder, plan.blend, plan.blend.build)


def check_token_numbers(data: IndexedDataset, vocabulary_size: int) -> None:
    """Raise DataError when a token is not below `vocabulary_size`: the data was made with another
    tokenizer.

    All tokens are read when the file is small, else evenly spread parts of it: what they miss,
    reading refuses.
    """
    data.check_type()
    if data.bytes <= FULL_TOKEN_CHECK_BYTES:
        starts = range(0, data.token_count, 1 << 22)
        length = 1 << 22
    else:
        starts = range(0, data.token_count, max(1, data.token_count // TOKEN_CHECK_PARTS))
        length = TOKEN_CHECK_PART
    for start in starts:
        data.check_vocabulary(start, start + length, vocabulary_size)
