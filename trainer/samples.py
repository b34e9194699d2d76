"""The run's data as the loop wants it: one endless-enough stream of training micro-batches, and the validation ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from trainer.config import TrainerConfig
from trainer.data.dataset import SampleSource, open_splits
from trainer.data.indexed import IndexedDataset
from trainer.data.stream import MicroBatch, SampleStream
from trainer.mesh import Mesh


@dataclass(frozen=True)
class Samples:
    """Training and validation samples of this rank's replica. Ranks of inner stages hold none and get empty streams."""

    sources: dict[str, SampleSource]
    micro_batch_size: int
    replica: int
    replicas: int

    def train(self, consumed_samples: int) -> Iterator[MicroBatch]:
        """Micro-batches from `consumed_samples` on. Raises DataError when none is left."""
        return self._stream("train", consumed_samples)

    def valid(self) -> Iterator[MicroBatch]:
        """The validation micro-batches, from the first one: each evaluation sees the same samples."""
        return self._stream("valid", 0)

    def _stream(self, split: str, consumed_samples: int) -> Iterator[MicroBatch]:
        if split not in self.sources:
            return iter(())
        return SampleStream(
            self.sources[split],
            self.micro_batch_size,
            dp_rank=self.replica,
            dp_size=self.replicas,
            consumed_samples=consumed_samples,
        )


def open_samples(config: TrainerConfig, mesh: Mesh, needs_data: bool) -> Samples:
    """Open the data sets; rank 0 builds their index maps. Collective. Raises DataError: missing, damaged, too short."""
    weighted = _weighted(config)  # on every rank, so that missing data is refused by all and nobody waits
    sources: dict[str, SampleSource] = {}
    if needs_data or dist.get_rank() == 0:
        sources = open_splits(
            weighted,
            split=config.data.split,
            sequence_length=config.model.sequence_length,
            seed=config.run.seed,
            train_samples=config.batch.train_samples,
            valid_samples=config.evaluation.iterations * config.batch.global_batch_size,
            vocabulary_size=config.tokenizer.padded_vocabulary_size,
            cache_folder=config.data.cache,
            is_builder=dist.get_rank() == 0,
            barrier=dist.barrier,
        )
    else:
        dist.barrier()
    return Samples(sources, config.batch.micro_batch_size, mesh.data_rank, mesh.data)


def _weighted(config: TrainerConfig) -> list[tuple[float, str]]:
    prefixes, weights = config.data.prefixes, config.data.weights
    if weights is None:
        weights = [float(IndexedDataset(prefix).token_count) for prefix in prefixes] if len(prefixes) > 1 else [1.0]
    return list(zip(weights, prefixes, strict=True))
