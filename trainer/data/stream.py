"""Micro-batches for one data-parallel replica, in an order that depends on consumed samples alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch

from trainer.data.dataset import BlendedDataset, GPTDataset, SampleSource, open_groups, open_splits
from trainer.data.errors import DataError

__all__ = ["BlendedDataset", "DataError", "GPTDataset", "SampleSource", "SampleStream", "open_groups", "open_splits"]

MicroBatch = tuple[torch.Tensor, torch.Tensor]


class SampleStream(Iterator[MicroBatch]):
    """Micro-batches (tokens, labels), each int64 [micro_batch_size, sequence_length]; labels are tokens one further.

    All replicas together take `micro_batch_size * dp_size` samples at a time, in order, from `consumed_samples` on;
    replica r takes the r-th part. So a global batch holds the same samples whatever the number of replicas, and a step
    may take as many micro-batches as its global batch needs: ramp-up and resume need nothing else. An incomplete chunk
    at the end is not used. `prefetch` > 0 lets one thread (never a process) read so many micro-batches ahead.

    Raises DataError at once when less than one chunk is left at `consumed_samples`.
    Iteration ends (StopIteration) when the samples are used up. Call `close` to end the thread early.
    """

    def __init__(
        self,
        dataset: SampleSource,
        micro_batch_size: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        prefetch: int = 0,
    ) -> None:
        if micro_batch_size < 1 or not 0 <= dp_rank < dp_size or consumed_samples < 0 or prefetch < 0:
            raise ValueError(
                f"micro batch size {micro_batch_size} must be positive, replica {dp_rank} one of {dp_size},"
                f" consumed samples {consumed_samples} and prefetch {prefetch} not negative"
            )
        self.dataset = dataset
        self.sequence_length = dataset.sequence_length
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.chunk = micro_batch_size * dp_size
        if consumed_samples + self.chunk > len(dataset):
            raise DataError(
                f"the data has {len(dataset)} samples and {consumed_samples} are consumed: fewer are left than one"
                f" micro-batch of every replica ({self.chunk}); ask for more samples or finish the run"
            )
        self._consumed = consumed_samples
        self._prefetcher = _Prefetcher(self, prefetch) if prefetch > 0 else None

    def __next__(self) -> MicroBatch:
        """The next micro-batch of this replica."""
        if self._consumed + self.chunk > len(self.dataset):
            self.close()
            raise StopIteration
        batch = self._prefetcher.get() if self._prefetcher is not None else self._read(self._consumed)
        self._consumed += self.chunk
        return batch

    def state(self) -> int:
        """Samples consumed by all replicas: start a new stream with it to go on where this one is."""
        return self._consumed

    def close(self) -> None:
        """End the reading thread, if there is one. Idempotent; the stream can still be asked for its state."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _read(self, consumed: int) -> MicroBatch:
        rows = np.empty((self.micro_batch_size, self.sequence_length + 1), dtype=np.int64)
        first = consumed + self.dp_rank * self.micro_batch_size
        for row in range(self.micro_batch_size):
            self.dataset.read(first + row, rows[row])
        window = torch.from_numpy(rows)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class _Prefetcher:
    """A daemon thread that reads micro-batches ahead into a bounded queue; an error in it is raised by `get`."""

    def __init__(self, stream: SampleStream, depth: int) -> None:
        self._queue: queue.Queue[MicroBatch | Exception] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(stream._read, range(stream._consumed, len(stream.dataset) - stream.chunk + 1, stream.chunk)),
            name="data-prefetch",
            daemon=True,
        )
        self._thread.start()

    def _run(self, read: Callable[[int], MicroBatch], positions: range) -> None:
        for consumed in positions:
            try:
                item: MicroBatch | Exception = read(consumed)
            except Exception as error:  # handed to the caller's thread, which raises it
                item = error
            while not self._stopped.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if self._stopped.is_set() or isinstance(item, Exception):
                return

    def get(self) -> MicroBatch:
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
