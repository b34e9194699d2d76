"""The parts of a loss, and scores: measured by the model's head on micro batches, and their means
on every rank.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.record import Record
from trainer.model.family import LossParts
from trainer.model.loss import LanguageModelHead
from trainer.parallel.mesh import Mesh


class Measured(Record):
    """What an evaluation found: the mean loss in nats per token, and its parts and scores by the
    family's names.
    """

    loss: float
    parts: Mapping[str, float] = {}

    @classmethod
    def mean(cls, found: Sequence[Measured]) -> Self:
        """Of evaluations of equally much; at least one."""
        names = found[0].parts
        parts = {name: math.fsum(each.parts[name] for each in found) / len(found) for name in names}
        return cls(math.fsum(each.loss for each in found) / len(found), parts)


@dataclass
class PartialLosses:
    """Of one engine. In a training step the library takes the means, together with the loss; see
    `of_micro_batch`.

    In an evaluation each micro batch is kept: `begin`, then the library's passes, then `mean` or
    `each`.
    """

    names: LossParts
    head: LanguageModelHead
    mesh: Mesh

    def __post_init__(self) -> None:
        self._kept: list[Tensor] = []
        self._expected = 0

    @classmethod
    def of(cls, names: LossParts, head: LanguageModelHead, mesh: Mesh) -> Self | None:
        """None for a family whose loss is one."""
        if names.losses or names.scores:
            return cls(names, head, mesh)
        return None

    def loss(self, hidden: Tensor, labels: Any) -> Tensor:
        """The head's; in an evaluation all that it measured is kept."""
        found = self.head.loss(hidden, labels)
        if not torch.is_grad_enabled() and len(self._kept) < self._expected:
            self._kept.append(torch.stack([self.head.measured[name].float() for name in self._all]))
        return found

    def of_micro_batch(self) -> OrderedDict[str, Tensor]:
        """The losses of the micro batch that was just computed; zeros on stages that compute none."""
        measured, none = self.head.measured, torch.zeros((), device=self.mesh.device)
        return OrderedDict((name, measured.get(name, none)) for name in self.names.losses)

    def begin(self, micro_batches: int) -> None:
        """So many micro batches are evaluated next."""
        self._kept, self._expected = [], micro_batches

    def mean(self) -> dict[str, float]:
        """Over all micro batches of all replicas, as the loss is. Collective."""
        mean = self._everywhere().mean(dim=0)
        if self.mesh.data_group is not None:
            dist.all_reduce(mean, group=self.mesh.data_group)
            mean /= self.mesh.data
        return self._named(mean)

    def each(self) -> list[dict[str, float]]:
        """Of each micro batch of this replica. Collective over its stages."""
        return [self._named(row) for row in self._everywhere()]

    def _everywhere(self) -> Tensor:
        """[micro batches, losses and scores] on every stage, fp64."""
        mesh = self.mesh
        rows = torch.zeros(self._expected, len(self._all), dtype=torch.float64, device=mesh.device)
        if mesh.is_last_stage:
            rows += torch.stack(self._kept)
        if mesh.pipeline_group is not None:
            dist.broadcast(rows, mesh.pipeline_ranks[-1], group=mesh.pipeline_group)
        self.begin(0)
        return rows

    @property
    def _all(self) -> tuple[str, ...]:
        return self.names.losses + self.names.scores

    def _named(self, values: Tensor) -> dict[str, float]:
        return dict(zip(self._all, values.tolist(), strict=True))


class EarlyLoss:
    """Takes the loss of a pipeline's step together before the update, and not behind it as the
    library does.
    """

    def __init__(self, pipeline: Any):
        self._pipeline = pipeline
        self._together: Callable[[], Tensor] = pipeline._aggregate_total_loss
        self._loss = torch.zeros(())
        self._copied: torch.cuda.Event | None = None
        pipeline._aggregate_total_loss = lambda: (
            self._loss if self._loss.dim() == 0 else self._loss[0]
        )

    def before(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """The update; before it the losses of all replicas are summed, and the copy of their mean
        is begun.
        """

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
        """The last step's mean loss, then its parts. It waits for their copy alone, which came
        before the norm.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return [float(value) for value in self._loss.reshape(-1)]
