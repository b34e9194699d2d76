"""Micro batches on the GPU before they are needed: the next one is read and copied while the
present one computes.

From memory of its own a processor's copy to a GPU waits for all that the GPU was given before. From
pinned memory, on a stream beside that of the training, it does not. Reading needs no thread of its
own: the processor is free once the present forward pass is launched, and the data's own workers
have read by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from trainer.parallel.micro_batch import Batch, each_tensor, tensors_of

Staged = tuple[Batch, Any]  # on the device once the event has come


class BatchesAhead:
    """The micro batches of one step at a time, at most one of them ahead. Where none is copied they
    pass as they are.

    `needs_read`, `needs_compared`: which part of each goes to the device; the rest stays where it
    is.
    """

    def __init__(self, device: torch.device, needs_read: bool, needs_compared: bool):
        self._device = device
        self._needs = (needs_read, needs_compared)
        reads = needs_read or needs_compared  # a stage between the first and the last reads nothing
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and reads else None
        self._source: Iterator[Batch] = iter(())
        self._left = 0
        self._ahead: Staged | Exception | None = None

    def of(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """The next `count` of `batches`. None is read beyond them: what follows may be another
        size, or skipped.
        """
        if self._stream is None:
            return batches
        self._source, self._left, self._ahead = batches, count, None
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next one, on the device. What went wrong in reading it, its end too, is raised here,
        not when it was.
        """
        self._look()
        found, self._ahead = self._ahead, None
        if found is None:
            raise StopIteration
        if isinstance(found, Exception):
            raise found
        batch, copied = found
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        for part, needed in zip(batch, self._needs, strict=True):
            if needed:
                for tensor in tensors_of(part):
                    # its memory is of the other stream, and must outlive its use on this one
                    tensor.record_stream(stream)
        return batch

    def following(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which launches the present one's work; behind it the next one is read and
        its copy begun.
        """
        if self._stream is None:
            return function

        def launched(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self._look()
            return result

        return launched

    def _look(self) -> None:
        if self._ahead is not None or not self._left:
            return
        self._left -= 1
        try:
            self._ahead = self._staged(next(self._source))
        except Exception as error:
            self._ahead = error

    def _staged(self, batch: Batch) -> Staged:
        with torch.cuda.stream(self._stream):
            read, compared = (
                each_tensor(lambda tensor: _copied(tensor, self._device), part) if needed else part
                for part, needed in zip(batch, self._needs, strict=True)
            )
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return (read, compared), copied


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Begin to copy; torch keeps the pinned memory until the copy is done."""
    return tensor.pin_memory().to(device, non_blocking=True)
