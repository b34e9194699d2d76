"""Which samples a replica takes, as a function of the samples that all replicas have consumed.

All replicas together take chunks of `micro_batch_size * replicas` samples; an incomplete chunk at
the end is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.contract.errors import DataError
from trainer.contract.record import Record

OrderName = Literal["single", "cyclic"]


class ReplicaShare(Record):
    """One replica's part of every chunk, out of a source of `samples`."""

    samples: int
    micro_batch_size: int
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1 or not 0 <= self.replica < self.replicas:
            raise ValueError(
                f"micro batch size {self.micro_batch_size} must be positive and replica {self.replica} one of"
                f" {self.replicas}"
            )

    @property
    def chunk(self) -> int:
        """Samples that all replicas take together."""
        return self.micro_batch_size * self.replicas


class Order(Protocol):
    """The samples of one replica's micro-batches."""

    @property
    def share(self) -> ReplicaShare:
        """The replica's part."""

    def check(self, consumed: int, more: bool) -> None:
        """Raise DataError when a stream cannot stand at `consumed` samples; when `more`, also when
        none is left.
        """

    def numbers(self, consumed: int) -> npt.NDArray[np.int64] | None:
        """Numbers of the samples of the micro-batch after `consumed` samples [micro_batch_size];
        None at the end.
        """


class SingleOrder(Record):
    """Every sample once, in order: replica r takes the r-th part of each chunk."""

    share: ReplicaShare

    def check(self, consumed: int, more: bool) -> None:
        """Raise DataError beyond the last sample; when `more`, already when less than one chunk is
        left.
        """
        share = self.share
        if consumed + (share.chunk if more else 0) > share.samples:
            raise DataError(
                f"the data has {share.samples} samples and {consumed} are consumed: fewer are left than one"
                f" micro-batch of every replica ({share.chunk}); ask for more samples or finish the run"
            )

    def numbers(self, consumed: int) -> npt.NDArray[np.int64] | None:
        """The r-th part of the chunk at `consumed`."""
        share = self.share
        if consumed + share.chunk > share.samples:
            return None
        first = consumed + share.replica * share.micro_batch_size
        return np.arange(first, first + share.micro_batch_size)


@dataclass
class CyclicOrder:
    """Endless epochs. Each replica has a fixed bucket of consecutive samples, permuted again for
    every epoch.

    The permutation is drawn by a generator seeded with the number of the epoch, as Megatron's does,
    so the order depends on the micro-batch size and on the number of replicas: neither may change
    in mid-epoch.
    """

    share: ReplicaShare
    _epoch: int = field(default=-1, init=False)
    _permutation: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64), init=False
    )

    @property
    def _active(self) -> int:
        return self.share.samples // self.share.chunk * self.share.chunk

    def check(self, consumed: int, more: bool) -> None:
        """Raise DataError when there is less than one chunk, or `consumed` is not at the beginning
        of one.
        """
        share = self.share
        if self._active == 0:
            raise DataError(
                f"the data has {share.samples} samples, fewer than one micro-batch of every replica ({share.chunk});"
                " give more data"
            )
        if consumed % self._active % share.chunk:
            raise DataError(
                f"{consumed} consumed samples do not end a chunk of {share.chunk} in the cyclic order: the micro-batch"
                " size or the number of replicas has changed since; set them back, or set data.order to single"
            )

    def numbers(self, consumed: int) -> npt.NDArray[np.int64]:
        """The next part of this replica's permuted bucket."""
        share = self.share
        epoch, within = divmod(consumed, self._active)
        bucket = self._active // share.replicas
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(epoch)
            self._permutation = torch.randperm(bucket, generator=generator).numpy()
            self._epoch = epoch
        first = within // share.replicas
        numbers: npt.NDArray[np.int64] = (
            share.replica * bucket + self._permutation[first : first + share.micro_batch_size]
        )
        return numbers


def make_order(name: OrderName, share: ReplicaShare) -> Order:
    """The order that a run card names."""
    if name == "single":
        return SingleOrder(share)
    return CyclicOrder(share)
