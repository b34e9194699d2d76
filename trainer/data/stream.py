"""Micro-batches for one data-parallel replica, in an order that depends on consumed samples alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.data.dataset import MicroBatch, RowFormat, SampleSource, read_rows

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


@runtime_checkable
class SampleReader(Protocol):
    """Reads samples of one source, perhaps ahead of their use."""

    row: RowFormat
    depth: int  # requests worth having under way beyond the one that is waited for

    def __len__(self) -> int:
        """Number of samples of the source."""

    def ask(self, numbers: npt.NDArray[np.int64]) -> int:
        """Ask for samples; returns a ticket for them."""

    def take(self, ticket: int) -> npt.NDArray[np.int64]:
        """The samples asked for [numbers, row.length]; waits for them. Each ticket is taken or
        dropped.
        """

    def has(self, ticket: int, seconds: float) -> bool:
        """Whether the samples of this ticket can be taken without waiting; waits for that at most
        so long.
        """

    def drop(self, ticket: int) -> None:
        """The samples of this ticket are not wanted any more."""


class DirectReader:
    """Reads in this process, when the samples are taken."""

    depth = 0

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self.row = source.row
        self._asked: dict[int, npt.NDArray[np.int64]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._source)

    def ask(self, numbers: npt.NDArray[np.int64]) -> int:
        """Remember what was asked."""
        self._tickets += 1
        self._asked[self._tickets] = numbers
        return self._tickets

    def take(self, ticket: int) -> npt.NDArray[np.int64]:
        """Read it."""
        return read_rows(self._source, self._asked.pop(ticket))

    def has(self, ticket: int, seconds: float) -> bool:
        """Always: they are read when they are taken."""
        return True

    def drop(self, ticket: int) -> None:
        """Forget it."""
        del self._asked[ticket]


class MicroBatchStream(Iterator[MicroBatch], Protocol):
    """What the loop draws from. One stream is drawn from by one thread."""

    def state(self) -> int:
        """Samples consumed by all replicas."""

    def wait(self, count: int, seconds: float) -> bool:
        """Whether the next `count` micro-batches are here, as far as there are so many; waits at
        most so long.
        """

    def skip_to(self, consumed_samples: int) -> None:
        """Go on as if so many samples were consumed."""

    def resize(self, micro_batch_size: int) -> None:
        """Go on in micro-batches of another size; nothing happens where it is the same."""

    def close(self) -> None:
        """Give up what is being read ahead."""


class SampleStream:
    """Micro-batches of `micro_batch_size` samples: of a GPT (tokens, labels), of other kinds fields
    by name.

    All replicas together take `micro_batch_size * dp_size` samples at a time, from
    `consumed_samples` on; in the order `single` replica r takes the r-th part of each such chunk.
    So a global batch holds the same samples whatever the number of replicas, and a step may take as
    many micro-batches as its global batch needs: ramp-up, skipped ranges and resume need nothing
    else. `cyclic` goes through the samples again and again, see `trainer.data.stream`.

    Raises DataError at once when no micro-batch is left at `consumed_samples`.
    Iteration ends (StopIteration) when the samples are used up.
    """

    def __init__(
        self,
        reader: SampleReader | SampleSource,
        micro_batch_size: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        order: OrderName = "single",
    ) -> None:
        self._reader: SampleReader
        if isinstance(reader, SampleReader):
            self._reader = reader
        else:
            self._reader = DirectReader(reader)
        share = ReplicaShare(len(reader), micro_batch_size, dp_rank, dp_size)
        self._order: Order = make_order(order, share)
        self._order_name: OrderName = order
        self._ahead: deque[int] = deque()  # tickets, the next micro-batch first
        if consumed_samples < 0:
            raise ValueError(f"consumed samples {consumed_samples} must not be negative")
        self._order.check(consumed_samples, more=True)
        self._consumed = self._asked = consumed_samples

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch of this replica. Raises DataError when it cannot be read."""
        self._ask(self._reader.depth + 1)
        if not self._ahead:
            raise StopIteration
        rows = self._reader.take(self._ahead.popleft())
        self._consumed += self._order.share.chunk
        return self._reader.row.micro_batch(torch.from_numpy(rows))

    def wait(self, count: int, seconds: float) -> bool:
        """Whether the next `count` micro-batches are here (fewer where the samples end); waits at
        most so long.

        A step that begins with all its data cannot hang for want of them, where no stop would be heard.
        Raises DataError when the reader has given up.
        """
        self._ask(count)
        until = time.monotonic() + seconds
        tickets = islice(self._ahead, count)
        return all(
            self._reader.has(ticket, max(0.0, until - time.monotonic())) for ticket in tickets
        )

    def _ask(self, count: int) -> None:
        """Have so many micro-batches read, as far as there are so many."""
        while len(self._ahead) < count:
            numbers = self._order.numbers(self._asked)
            if numbers is None:
                break
            self._ahead.append(self._reader.ask(numbers))
            self._asked += self._order.share.chunk

    def state(self) -> int:
        """Samples consumed by all replicas: start a new stream with it to go on where this one is."""
        return self._consumed

    def skip_to(self, consumed_samples: int) -> None:
        """Go on as if so many samples were consumed, forwards or backwards; nothing between is
        read.

        At the very end there is nothing more, and the iteration ends. Raises DataError beyond it;
        the stream then stays where it is.
        """
        if consumed_samples == self._consumed:
            return
        if consumed_samples < 0:
            raise ValueError(f"consumed samples {consumed_samples} must not be negative")
        self._order.check(consumed_samples, more=False)
        self.close()
        self._consumed = self._asked = consumed_samples

    def resize(self, micro_batch_size: int) -> None:
        """Go on in micro-batches of another size, from the same sample; what was read ahead is read
        again.
        """
        share = self._order.share
        if micro_batch_size != share.micro_batch_size:
            self.close()
            self._order = make_order(
                self._order_name, replace(share, micro_batch_size=micro_batch_size)
            )

    def close(self) -> None:
        """Give up what is being read ahead. Idempotent; the stream can be used on, and asked for
        its state.
        """
        while self._ahead:
            self._reader.drop(self._ahead.popleft())
        self._asked = self._consumed


@dataclass
class EmptyStream:
    """The stream of a rank that reads no data: it keeps count, and yields nothing."""

    consumed_samples: int = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        """There is none."""
        raise StopIteration

    def wait(self, count: int, seconds: float) -> bool:
        """Always: nothing is read."""
        return True

    def state(self) -> int:
        """Samples of the last `skip_to`."""
        return self.consumed_samples

    def skip_to(self, consumed_samples: int) -> None:
        """Remember the samples."""
        self.consumed_samples = consumed_samples

    def resize(self, micro_batch_size: int) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing is held."""
