"""The run's data as the loop wants it: a stream of training micro-batches, and one of every
validation set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from msgspec.structs import replace

from trainer.config.card import TrainerConfig
from trainer.config.data import DataSection, data_set_name
from trainer.config.data_match import (
    DataRecord,
    DataSetIdentity,
    compare,
    data_facts,
    decide,
    probe_numbers,
)
from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.data.dataset import BlendedDataset, DocumentSource, SampleSource, read_rows
from trainer.data.groups import (
    SPLITS,
    DataGroup,
    Member,
    parse_groups,
    read_groups_file,
    split_groups,
)
from trainer.data.index_cache import digest_sizes
from trainer.data.indexed import IndexedDataset
from trainer.data.masked.of_card import masked_task
from trainer.data.sources import PlannedSource, ReadOptions, plan_groups, weights_by_size
from trainer.data.stream import EmptyStream, MicroBatchStream, OrderName, SampleReader, SampleStream
from trainer.data.workers import WorkerPool
from trainer.parallel.mesh import Mesh


class WantedData(Record):
    """What a run reads: named groups, and how many samples of each."""

    groups: Mapping[DataGroup, int]
    roles: Mapping[str, tuple[str, ...]]  # names of the sources to train, validate and test on

    @property
    def all_prefixes(self) -> tuple[str, ...]:
        """Every pair that is read, once."""
        named = [member.prefix for group in self.groups for member in group.members]
        return tuple(dict.fromkeys(named))


def wanted_data(config: TrainerConfig, test: bool = False) -> WantedData:
    """What a card asks for; the test data too when `test`.

    Samples: those that the order of the training is made for; of every validation and test set
    `evaluation.iterations` global batches, the same ones at each evaluation, so that its losses can
    be compared. Raises DataError: groups that cannot be parsed, data without weights that cannot be
    opened.
    """
    data = config.data
    evaluated = config.evaluation.iterations * config.batch.global_batch_size
    samples = {
        "train": config.ordered_samples,
        "valid": evaluated,
        "test": evaluated if test else 0,
    }
    if data.uses_groups or data.validate_each:
        read = _groups_of if data.uses_groups else _groups_of_split
        groups = {role: read(data, role) if samples[role] else () for role in SPLITS}
        roles = {role: tuple(group.name for group in groups[role]) for role in SPLITS}
        names = [name for role in SPLITS for name in roles[role]]
        for name in names:
            if names.count(name) > 1:
                raise DataError(
                    f"data group {name} is used for two purposes; give each group a name of its own"
                )
        return WantedData(
            {group: samples[role] for role in SPLITS for group in groups[role]}, roles
        )
    roles = {role: (role,) if samples[role] else () for role in SPLITS}
    return WantedData(split_groups(_weighted(data), data.split, samples), roles)


def _groups_of(data: DataSection, role: str) -> tuple[DataGroup, ...]:
    """The groups of one purpose, from the card or from the file that it names."""
    file = {
        "train": data.train_groups_file,
        "valid": data.valid_groups_file,
        "test": data.test_groups_file,
    }[role]
    written = {
        "train": [data.train_group or ""],
        "valid": data.valid_groups,
        "test": data.test_groups,
    }[role]
    if file is not None:
        groups = read_groups_file(file)
    else:
        groups = parse_groups(written)
    if role == "train" and len(groups) != 1:
        raise DataError(
            f"{file} holds {len(groups)} groups, and the training reads exactly one: leave one in it"
        )
    return groups


def _weighted(data: DataSection) -> tuple[tuple[float, str], ...]:
    """Weight and prefix of each data set; by their sizes where the card gives no weights."""
    if data.weights is not None:
        weights = data.weights
    else:
        weights = weights_by_size(data.prefixes, data.implementation)
    return tuple(zip(weights, data.prefixes, strict=True))


def _groups_of_split(data: DataSection, role: str) -> tuple[DataGroup, ...]:
    """The share of one purpose as the mixture of all prefixes; to validate, each of them by itself
    as well.
    """
    shares = [float(share) for share in data.split.split(",")]
    before = sum(shares[: SPLITS.index(role)])
    start = before / sum(shares)
    end = (before + shares[SPLITS.index(role)]) / sum(shares)
    if start == end:
        return ()
    mixture = [
        Member(weight, prefix, start, end) for weight, prefix in _weighted(data) if weight > 0
    ]
    groups = [DataGroup(role, tuple(mixture))]
    if role == "valid":
        groups += [
            DataGroup(f"valid_{data_set_name(part.prefix)}", (replace(part, weight=1.0),))
            for part in mixture
        ]
    return tuple(groups)


def plan_data(
    config: TrainerConfig,
    wanted: WantedData,
    *,
    is_builder: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> dict[str, PlannedSource]:
    """Plan every source, and as the builder build its index maps. Raises DataError: missing,
    damaged, too short.
    """
    reading = ReadOptions(
        config.model.sequence_length,
        config.run.seed,
        config.tokenizer.padded_vocabulary_size,
        cache_folder=config.data.cache,
        implementation=config.data.implementation,
        other_task=masked_task(config),
    )
    return plan_groups(wanted.groups, reading, is_builder=is_builder, barrier=barrier)


def missing_test_share(config: TrainerConfig) -> str:
    """Why the test share of `data.split` cannot be evaluated; empty when it can, or when the card
    names test groups.

    In small data that share is often empty, which must not refuse a training. Builds its index
    maps: rank 0 asks.
    """
    if config.data.uses_groups:
        return ""
    wanted = wanted_data(config, test=True)
    groups = {
        group: count for group, count in wanted.groups.items() if group.name in wanted.roles["test"]
    }
    try:
        plan_data(config, replace(wanted, groups=groups))
    except DataError as error:
        return str(error)
    return ""


@dataclass
class Samples:
    """Sources of this rank's replica. A rank of an inner stage reads nothing, and gets empty
    streams.

    `micro_batch_size`: of validation and test; that of the training is given to `train`, and grows
    with the batch. Worker processes start with the first stream that needs them, and end with
    `close` or with this process.
    """

    plans: Mapping[str, PlannedSource]
    roles: Mapping[str, tuple[str, ...]]
    micro_batch_size: int
    replica: int
    replicas: int
    order: OrderName = "single"
    workers: int = 0
    valid_workers: int = 0
    _pools: dict[str, WorkerPool] = field(default_factory=dict, init=False)
    _opened: dict[str, SampleSource] = field(default_factory=dict, init=False)
    _identities: tuple[DataSetIdentity, ...] | None = field(default=None, init=False)

    def train(self, consumed_samples: int, micro_batch_size: int | None = None) -> MicroBatchStream:
        """Micro-batches from `consumed_samples` on. Raises DataError when none is left."""
        name = self.roles["train"][0]
        return self._stream(
            name,
            consumed_samples,
            self.order,
            pool="train",
            workers=self.workers,
            size=micro_batch_size,
        )

    def valid_groups(self) -> tuple[str, ...]:
        """Names of the validation sets, in the order of the card, the same on every rank; `valid`
        without groups.
        """
        return self.roles["valid"]

    def valid(self, name: str = "valid") -> MicroBatchStream:
        """The micro-batches of one validation set, from the first one: each evaluation sees the
        same samples.
        """
        return self._stream(name, 0, "single", pool="valid", workers=self.valid_workers)

    def test_groups(self) -> tuple[str, ...]:
        """Names of the test sets; none unless the samples were opened for tests."""
        return self.roles["test"]

    def test(self, name: str = "test") -> MicroBatchStream:
        """The micro-batches of one test set, from the first one."""
        return self._stream(name, 0, "single", pool="valid", workers=self.valid_workers)

    def source(self, name: str) -> SampleSource:
        """One source by name, read by this process: samples by number. Raises DataError for an
        unknown name.
        """
        if name not in self.plans:
            known = ", ".join(name for names in self.roles.values() for name in names)
            raise DataError(f"there is no data named {name!r}; there are {known or 'none'}")
        if name not in self._opened:
            self._opened[name] = self.plans[name].open()
        return self._opened[name]

    def digest(self, number: int) -> str | None:
        """A digest of one training sample's tokens; None when there are not so many, or none are
        read here.
        """
        name = self.roles["train"][0]
        if name in self.plans:
            return sample_digest(self.source(name), number)
        return None

    def data_sets(self) -> tuple[DataSetIdentity, ...]:
        """What the data sets of the training hold, looked at once; none when none are read here."""
        name = self.roles["train"][0]
        if self._identities is None and name in self.plans:
            self._identities = tuple(identities(self.source(name)))
        return self._identities or ()

    def close(self) -> None:
        """End the worker processes. Idempotent."""
        while self._pools:
            self._pools.popitem()[1].close()

    def _stream(
        self,
        name: str,
        consumed_samples: int,
        order: OrderName,
        pool: str,
        workers: int,
        size: int | None = None,
    ) -> MicroBatchStream:
        if name not in self.plans:
            if not any(name in names for names in self.roles.values()):
                raise DataError(f"there is no data named {name!r}")
            return EmptyStream(consumed_samples)
        reader: SampleReader | SampleSource
        if workers:
            reader = self._pool(pool, workers).reader(name)
        else:
            reader = self.source(name)
        return SampleStream(
            reader,
            size or self.micro_batch_size,
            dp_rank=self.replica,
            dp_size=self.replicas,
            consumed_samples=consumed_samples,
            order=order,
        )

    def _pool(self, purpose: str, workers: int) -> WorkerPool:
        if purpose not in self._pools:
            self._pools[purpose] = WorkerPool(self.plans, workers)
        return self._pools[purpose]


def record_of(config: TrainerConfig, samples: Samples) -> DataRecord:
    """What a checkpoint keeps of this training's data; called where training data is read."""
    probes = (
        (number, samples.digest(number)) for number in probe_numbers(config.batch.train_samples)
    )
    kept = tuple((number, digest) for number, digest in probes if digest is not None)
    return DataRecord(data_facts(config), kept, samples.data_sets())


def match_data(
    config: TrainerConfig, samples: Samples, cursor: Mapping[str, Any], place: str, is_own: bool
) -> list[str]:
    """Compare the data with what the checkpoint `place` was trained on; returns the lines to say.

    `is_own`: of this run; another run's data may differ, and is only told. Raises DataMismatch.
    """
    record = DataRecord.of(cursor)
    if record is None:
        return [
            f"{place} does not say what data it was trained on: whether it is the card's was not compared"
        ]
    differences = compare(record, data_facts(config), samples.digest, samples.data_sets())
    policy = config.data.on_resume
    if not is_own:
        policy = "switch"
    return decide(differences, policy, place)


def open_samples(
    config: TrainerConfig, mesh: Mesh, needs_data: bool, *, test: bool = False
) -> Samples:
    """Open the data sets; rank 0 builds their index maps. Collective. Raises DataError: missing,
    damaged, too short.
    """
    # on every rank, so that bad data is refused by all and no one waits
    wanted = wanted_data(config, test)
    plans: dict[str, PlannedSource] = {}
    is_builder = dist.get_rank() == 0

    def barrier() -> None:
        """On the processors: the builder may take longer than a GPU's operation may."""
        dist.barrier(group=mesh.cpu_group)

    if needs_data or is_builder:
        plans = plan_data(config, wanted, is_builder=is_builder, barrier=barrier)
    else:
        for prefix in wanted.all_prefixes:
            IndexedDataset(prefix, config.data.implementation)
        barrier()
    return Samples(
        plans=plans if needs_data else {},
        roles=wanted.roles,
        micro_batch_size=config.batch.micro_batch_at(config.batch.global_batch_size),
        replica=mesh.data_rank,
        replicas=mesh.data,
        order=config.data.order,
        workers=config.data.workers,
        valid_workers=config.data.valid_workers,
    )


# Up to so many bytes all tokens of a data set are read, beyond it evenly spread parts: at a start,
# by one rank.
WHOLE_BYTES = 16 << 20
PARTS = 64
PART_BYTES = 16 << 10


def identities(source: SampleSource) -> Iterator[DataSetIdentity]:
    """Each data set of an opened source, in the order of its mixture. Raises DataError."""
    members: Sequence[SampleSource] = (source,)
    if isinstance(source, BlendedDataset):
        members = source.members
    for member in members:
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
