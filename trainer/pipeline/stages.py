"""The model's layers as DeepSpeed's pipeline has them: dealt to stages, a part or several of each
worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from trainer.config.card import ModelSection, TrainerConfig
from trainer.config.kernel_choice import recomputed_part
from trainer.contract.record import Record
from trainer.model.between_stages import StageBorders
from trainer.model.block import TransformerBlock
from trainer.model.documents import Stream, hidden_of, joined
from trainer.model.family import Layer, replicated_parameters
from trainer.model.random import DropoutPlaces
from trainer.optim.accumulate import clear_forgotten
from trainer.parallel.comm import share_of, whole_of
from trainer.parallel.mesh import Mesh
from trainer.parallel.micro_batch import Batch
from trainer.pipeline.library import (
    LayerSpec,
    PipelineModule,
    PipeModelDataParallelTopology,
    TiedLayerSpec,
)
from trainer.pipeline.partial_losses import PartialLosses


class Stage(Record):
    """What one worker computes of a micro batch, as a check of its arithmetic needs it: its layers in
    order, and on the last stage the loss.

    `batch`: the last that it read, None where it reads none. `shape`: samples and tokens of a micro
    batch. `plain_mark`: the number that goes with an ordinary token beside the hidden states, None
    where none do.
    """

    module: nn.Module
    places: DropoutPlaces
    layers: Sequence[Callable[[Any], Any]]
    parameters: Sequence[Sequence[nn.Parameter]]
    loss: Callable[[Tensor, Any], Tensor] | None
    batch: Batch | None
    shape: tuple[int, int]
    hidden_size: int
    plain_mark: int | None


def sum_copies(
    tied: Iterable[tuple[nn.Parameter, ProcessGroup]],
    replicated: Iterable[nn.Parameter],
    mesh: Mesh,
    accumulated: bool,
) -> None:
    """Sum the gradients of `tied` weights over their groups, and of `replicated` parameters over
    the tensor ranks.

    `accumulated`: they are in fp32 of their own. Replicated ones are small and many (LayerNorms,
    biases): they are summed in one buffer. Collective over replicas, tied stages and tensor ranks.
    """
    for weight, group in tied:
        gradient = _gradient(weight, accumulated)
        if gradient is not None:
            _sum(gradient, group, mesh)
    if mesh.tensor_group is not None:
        found = [
            gradient
            for item in replicated
            if (gradient := _gradient(item, accumulated)) is not None
        ]
        _sum_together(found, mesh.tensor_group, mesh)


def _gradient(parameter: nn.Parameter, accumulated: bool) -> Tensor | None:
    return parameter._hp_grad if accumulated else parameter.grad  # type: ignore[attr-defined]


def _sum_together(gradients: list[Tensor], group: ProcessGroup, mesh: Mesh) -> None:
    """The same of several, of one dtype, in one buffer for all."""
    if not gradients:
        return
    buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
    _sum(buffer, group, mesh)
    parts = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _sum(gradient: Tensor, group: ProcessGroup, mesh: Mesh) -> None:
    """Replicas first, into the first of them; then the copies; the other replicas hold zeros, so
    that DeepSpeed's reduction over replicas changes nothing. In its own order, copies first, the
    terms of an element are added in an order that hangs on its place in a buffer: with three
    replicas or more the copies drift apart.
    """
    if mesh.data_group is not None:
        dist.reduce(
            gradient, mesh.rank_at(mesh.pipeline_rank, 0, mesh.tensor_rank), group=mesh.data_group
        )
    if mesh.data_rank == 0:
        dist.all_reduce(gradient, group=group)
    else:
        gradient.zero_()


def recompute_function(
    model: ModelSection, mesh: Mesh, places: DropoutPlaces
) -> Callable[..., Stream]:
    """`function(run, *stream)`: calls `run(*stream)` and keeps only its input for the backward
    pass. `places`: where dropout is, whose masks are then those of this micro batch again.
    """
    if model.partition_activations and mesh.tensor_group is not None and not mesh.sequence_parallel:
        recomputed: Callable[..., Stream] = partial(_partitioned, mesh.tensor_group)
    else:
        recomputed = partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )

    def recomputing(run: Callable[..., Stream], *stream: Tensor) -> Stream:
        number = places.number

        def entered(*given: Tensor) -> Stream:
            places.enter(number)  # in the backward pass it is another one's turn
            return run(*given)

        return recomputed(entered, *stream)

    return recomputing


def _partitioned(
    group: ProcessGroup,
    run: Callable[..., Stream],
    hidden: Tensor,
    documents: Tensor | None = None,
) -> Stream:
    return joined(_Partitioned.apply(run, group, hidden, documents), documents)


class _Partitioned(torch.autograd.Function):
    """Parameters are not among the inputs: their gradients arise in the nested backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Stream],
        group: ProcessGroup,
        hidden: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        ctx.run, ctx.group, ctx.shape = run, group, hidden.shape
        ctx.save_for_backward(share_of(hidden, group), documents)
        return hidden_of(run(*_arguments(hidden, documents)))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        part, documents = ctx.saved_tensors
        hidden = whole_of(part, ctx.shape, ctx.group).requires_grad_()
        with torch.enable_grad():
            output, _ = hidden_of(ctx.run(*_arguments(hidden, documents)))
        torch.autograd.backward(output, gradient)
        return None, None, hidden.grad, None


def _arguments(hidden: Tensor, documents: Tensor | None) -> tuple[Tensor, ...]:
    if documents is None:
        return (hidden,)
    return (hidden, documents)


class StageModule(PipelineModule):
    """The layers of one worker: of its stage, or of each of the parts that the stage is cut in.

    One part at a time is active: what DeepSpeed knows of a module, `forward` above all, is of that
    part. Part c of stage s is number c x stages + s of the model. It also sums, once per step, the
    tensor ranks' shares of replicated parameters' gradients.
    """

    num_stages: int  # the library's own, as are these
    forward_funcs: list[Any]
    is_checkpointable_results: list[bool]
    is_checkpointable_results_interval: int | None

    def __init__(
        self, mesh: Mesh, borders: StageBorders, parts: int, places: DropoutPlaces, **settings: Any
    ):
        self._mesh = mesh
        self.places = places
        self.partial_losses: PartialLosses | None = None
        self.borders = borders
        self.parts_count = parts
        super().__init__(**settings)

    # ------------------------------------------------------------------ parts
    def _partition_layers(self, method: str = "uniform") -> None:
        stages = self.num_stages
        self.num_stages = stages * self.parts_count  # so the library deals to as many
        super()._partition_layers(method)
        places = range(self.stage_id, self.num_stages, stages)
        self._bounds = [(self.parts[place], self.parts[place + 1]) for place in places]

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer, in one of its parts."""
        return super().stage_owner(layer_idx) % (self.num_stages // self.parts_count)

    def _build(self) -> None:
        self._functions: list[list[Any]] = []
        self._recomputes: list[list[bool]] = [[] for _ in self._bounds]
        for bounds in self._bounds:
            self._set_bounds(*bounds)
            super()._build()
            self._functions.append(self.forward_funcs)
            self.forward_funcs = []
        self.activate(0)

    def activate(self, part: int) -> None:
        """From now on this module is that part."""
        self.active_part = part
        self.forward_funcs = self._functions[part]
        self.is_checkpointable_results = self._recomputes[part]
        self._set_bounds(*self._bounds[part])

    def _precompute_checkpointable_values(self) -> None:
        for part in reversed(range(self.parts_count)):
            self.activate(part)
            # else the library keeps those of another part
            self.is_checkpointable_results_interval = None
            super()._precompute_checkpointable_values()
            self._recomputes[part] = self.is_checkpointable_results

    @property
    def functions(self) -> list[Any]:
        """What this worker computes, all parts in order."""
        return [function for functions in self._functions for function in functions]

    def owned(self, layers: list[Layer]) -> list[tuple[str, nn.Module]]:
        """Prefix and module of each of `layers` that this worker has, in order."""
        mine = [layer for begin, end in self._bounds for layer in layers[begin:end]]
        pairs = zip(mine, self.functions, strict=True)
        return [(layer.prefix, self._module_of(layer, function)) for layer, function in pairs]

    def _module_of(self, layer: Layer, function: Any) -> nn.Module:
        """The module behind a forward function (a tied layer's may be a partial application)."""
        if isinstance(function, nn.Module):
            return function
        return self.tied_modules[layer.tied_key]

    # ------------------------------------------------------------------ a micro batch
    def forward(self, forward_input: Stream) -> Stream:
        """The active part's layers, from what the part before sent to what the next one is sent."""
        takes_tokens = self._mesh.is_first_stage and self.active_part == 0
        gives_loss = self._mesh.is_last_stage and self.active_part == self.parts_count - 1
        if self.training:
            self.places.next_of(self.active_part)
        result = super().forward(
            forward_input if takes_tokens else self.borders.enter(forward_input)
        )
        if gives_loss:
            return result
        return self.borders.leave(result)

    def get_additional_losses(self) -> OrderedDict[str, Tensor] | None:
        """Of what the library takes means beside the loss, on every rank."""
        if self.partial_losses is None:
            return None
        return self.partial_losses.of_micro_batch()

    def _is_checkpointable(self, funcs: list[Any]) -> bool:
        """Whether the library, which asks layer by layer, recomputes these."""
        return all(
            isinstance(item, TransformerBlock) and item.recomputed == "block" for item in funcs
        )

    def sum_copies(self, accumulated: bool) -> None:
        """Sum the gradients of parameters that several ranks hold. `accumulated`: they are in fp32
        of their own.
        """
        sum_copies(self.get_tied_weights_and_groups(), self.replicated(), self._mesh, accumulated)

    def replicated(self) -> list[nn.Parameter]:
        """The parameters whose gradients are summed over the tensor ranks."""
        return replicated_parameters([self])


def sum_copied_gradients(engine: Any) -> None:
    """Takes the place of DeepSpeed's instruction to reduce tied gradients."""
    if engine.using_bf16_optimizer:
        clear_forgotten(engine.optimizer)
    engine.module.sum_copies(engine.using_bf16_optimizer)


def average_over_replicas(engine: Any) -> None:
    """Takes the place of DeepSpeed's instruction to reduce gradients, for bf16: each flat buffer is
    averaged in place.

    The library joins buffers of less than 500 million elements first, a copy of all gradients, 4
    bytes a parameter; it divides the sums in a pass of their own, 8 bytes a parameter; and copies
    each buffer onto itself behind that. NCCL divides as it adds.
    """
    group, replicas = (
        engine.mpu.get_data_parallel_group(),
        engine.mpu.get_data_parallel_world_size(),
    )
    divides = dist.get_backend(group) != "gloo"
    for gradients in engine.optimizer.get_grads_for_reduction()[0]:
        if divides:
            dist.all_reduce(gradients, op=dist.ReduceOp.AVG, group=group)
        else:
            dist.all_reduce(gradients, group=group)
            gradients.mul_(1.0 / replicas)


def stage_module(config: TrainerConfig, mesh: Mesh, layers: list[Layer]) -> StageModule:
    """Deal the layers to stages and build this worker's."""
    model = config.model
    places = DropoutPlaces(mesh)
    is_any_recomputed = any(
        recomputed_part(model, block) == "block" for block in range(model.layers)
    )
    return StageModule(
        mesh=mesh,
        borders=StageBorders.of(mesh, model.hidden_size),
        parts=config.parallel.virtual_stages,
        places=places,
        layers=[layer_spec(layer) for layer in layers],
        topology=PipeModelDataParallelTopology(
            num_pp=mesh.pipeline, num_mp=mesh.tensor, num_dp=mesh.data
        ),
        partition_method=config.parallel.partition,
        activation_checkpoint_interval=int(is_any_recomputed),
        activation_checkpoint_func=recompute_function(model, mesh, places),
    )


def layer_spec(layer: Layer) -> LayerSpec:
    """A layer as DeepSpeed builds it on the stage that owns it."""
    if layer.tied_key is None:
        return LayerSpec(layer.kind, *layer.arguments)
    return TiedLayerSpec(layer.tied_key, layer.kind, *layer.arguments, forward_fn=layer.forward)
