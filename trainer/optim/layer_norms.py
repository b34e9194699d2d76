"""Norms of each layer at a step: of its gradients, its update, its weights, and what it hands on.

They cost a step nothing unless `begin` was called before it. Then: a copy of this rank's partition,
4 bytes an element of it, made when no activation is left, three passes over the partition, one over
each block's output, and one sum over all ranks, which the host waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.contract.metrics_record import LayerMeasure
from trainer.optim.interface import PartitionShare
from trainer.optim.watch import RunsOf, partitions_of
from trainer.parallel.mesh import Mesh
from trainer.parallel.replica_check import square_sum

BLOCKS = "blocks"
_GRADIENT, _UPDATE, _WEIGHT, _OUTPUT, _OUTPUT_COUNT = range(5)  # rows of the sums


class LayerNorms:
    """Measures one step after `begin`; `take` gives what was seen. Every rank does the same.

    `stage`: (prefix, module) of what this worker has.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, mesh: Mesh, stage: Sequence[tuple[str, nn.Module]]
    ):
        self._mesh = mesh
        # else all tensor ranks hold the same
        self._counts_outputs = mesh.sequence_parallel or mesh.tensor_rank == 0
        self._is_on = False
        self._runs: RunsOf = {}
        self._layers: tuple[str, ...] = ()
        self._before: dict[int, Tensor] = {}
        self._sums = torch.zeros(0)
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)
        for prefix, module in stage:
            if prefix.startswith(f"{BLOCKS}."):
                module.register_forward_hook(_OutputHook(self, layer_of(prefix)))

    def locate(self, runs: RunsOf, names: Sequence[str]) -> None:
        """Note what counts of the partitions, and agree on the layers of the whole model.
        Collective.

        `names`: of all of this worker's parameters.
        """
        found: list[list[str]] = [[] for _ in range(self._mesh.world_size)]
        own = sorted({layer_of(name) for name in names})
        if self._mesh.world_size > 1:
            dist.all_gather_object(found, own, group=self._mesh.cpu_group)
        else:
            found = [own]
        self._layers = tuple(sorted({layer for layers in found for layer in layers}, key=_place))
        self._runs = runs

    def begin(self) -> None:
        """Measure the step that follows."""
        self._is_on = True
        self._sums = torch.zeros(
            5, len(self._layers), dtype=torch.float64, device=self._mesh.device
        )

    def take(self, gradient_norm: float | None) -> LayerMeasure | None:
        """What was measured since `begin`; None where no update was made. Collective.

        `gradient_norm`: of all gradients before they were clipped, by which the layers' are scaled
        back.
        """
        self._is_on = False
        if self._mesh.world_size > 1:
            dist.all_reduce(self._sums)
        sums = self._sums.tolist()
        if not any(sums[_WEIGHT]):
            return None
        clipped = math.sqrt(sum(sums[_GRADIENT]))
        if gradient_norm is not None and clipped > 0.0:
            scale = gradient_norm / clipped
        else:
            scale = 1.0
        return LayerMeasure(
            self._layers,
            tuple(scale * math.sqrt(value) for value in sums[_GRADIENT]),
            tuple(math.sqrt(value) for value in sums[_UPDATE]),
            weight=tuple(math.sqrt(value) for value in sums[_WEIGHT]),
            output=tuple(map(_root_mean, sums[_OUTPUT], sums[_OUTPUT_COUNT])),
        )

    def add_output(self, layer: str, hidden: Tensor) -> None:
        """Count what a block hands on, while a step is measured.

        A block that is recomputed may be seen twice, with the same numbers: the mean stays.
        """
        if not self._is_on or not self._counts_outputs:
            return
        place, hidden = self._layers.index(layer), hidden.detach()
        self._sums[_OUTPUT, place] += (
            torch.linalg.vector_norm(hidden, dtype=torch.float32).double().square()
        )
        self._sums[_OUTPUT_COUNT, place] += hidden.numel()

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_on:
            return
        for partition in partitions_of(optimizer):
            for run in self._runs.get(id(partition), ()):
                if partition.grad is not None:
                    self._add(_GRADIENT, run, partition.grad)
            self._before[id(partition)] = partition.detach().clone()

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_on:
            return
        for partition in partitions_of(optimizer):
            change = self._before.pop(id(partition)).sub_(partition.detach())
            for run in self._runs.get(id(partition), ()):
                self._add(_WEIGHT, run, partition.detach())
                self._add(_UPDATE, run, change)

    def _add(self, row: int, run: PartitionShare, partition: Tensor) -> None:
        self._sums[row, self._layers.index(layer_of(run.name))] += square_sum(
            partition.narrow(0, run.start, run.numel)
        )


@dataclass
class _OutputHook:
    """Called by torch after a block's forward pass."""

    norms: LayerNorms
    layer: str

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        # beside it go numbers of documents, or marks
        if isinstance(output, tuple):
            hidden = output[0]
        else:
            hidden = output
        self.norms.add_output(self.layer, hidden)


def layer_of(name: str) -> str:
    """The layer that a parameter or a prefix belongs to: `blocks.3`, or the first part of any other
    name.
    """
    parts = name.split(".")
    if parts[0] == BLOCKS:
        return ".".join(parts[:2])
    return parts[0]


def _place(layer: str) -> tuple[int, int, str]:
    """The order of the model: the embedding, the blocks by number, what stands behind them."""
    if layer == "embedding":
        return 0, 0, layer
    if layer.startswith(f"{BLOCKS}."):
        return 1, int(layer.split(".")[1]), layer
    return 2, 0, layer


def _root_mean(total: float, count: float) -> float:
    if count:
        return math.sqrt(total / count)
    return math.nan
