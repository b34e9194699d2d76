"""The mean loss of a step, on its way to the host before the update begins.

The host has to read the norm before it gives a GPU the update. What it reads behind the update makes it wait for that
too, and the GPU then waits for the host: for all that the host does between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class EarlyLoss:
    """Takes the loss of a pipeline's step together before the update, and not behind it as the library does."""

    def __init__(self, pipeline: Any):
        self._pipeline = pipeline
        self._together: Callable[[], Tensor] = pipeline._aggregate_total_loss
        self._loss = torch.zeros(())
        self._copied: torch.cuda.Event | None = None
        pipeline._aggregate_total_loss = lambda: self._loss if self._loss.dim() == 0 else self._loss[0]

    def before(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """The update; before it the losses of all replicas are summed, and the copy of their mean is begun."""

        def updated(*arguments: Any, **options: Any) -> Any:
            with torch.no_grad():
                loss = self._together()
                parts = self._pipeline.agg_additional_losses
                if parts is not None:
                    loss = torch.stack([loss.float(), *parts.values()])
            self._loss = loss.to("cpu", non_blocking=True)  # from a GPU into pinned memory
            if loss.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record()
            return update(*arguments, **options)

        return updated

    def values(self) -> list[float]:
        """The last step's mean loss, then its parts. It waits for their copy alone, which came before the norm."""
        if self._copied is not None:
            self._copied.synchronize()
        return [float(value) for value in self._loss.reshape(-1)]
