"""The training engine: a stage of the model, its optimizer and DeepSpeed's pipeline behind one
interface.

It trains with ZeRO-1, fp32 gradient accumulation and clipping, and shows the sharded state to the
checkpoint. What is DeepSpeed's, and what of it is changed, is in `pipeline/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from trainer.config.card import CardError, Problem, TrainerConfig
from trainer.config.deepspeed_settings import deepspeed_settings
from trainer.config.kernel_choice import OTHER_GPUS, float8_obstacle
from trainer.contract.metrics_record import LayerMeasure
from trainer.contract.record import Record
from trainer.data.prefetch import BatchesAhead
from trainer.metrics.compute_clock import ComputeClock
from trainer.model.between_stages import MessageShape
from trainer.model.compiled import Compiler, compiler_for
from trainer.model.families import family_of
from trainer.model.family import initialise_stage, logical_parameters
from trainer.model.kernels import device_facts
from trainer.optim.build import build_optimizer, parameter_groups
from trainer.optim.interface import TrainingOptimizer, shares_of
from trainer.optim.layer_norms import LayerNorms
from trainer.optim.watch import UpdateWatch, counted_runs
from trainer.parallel.mesh import Mesh
from trainer.parallel.micro_batch import Batch
from trainer.parallel.replica_check import disagreements, not_finite, square_sum
from trainer.parallel.shard import sharding_of
from trainer.parallel.state import FRAGMENT_KINDS, MASTERS, Fragment, LocalTensor, ShardedState
from trainer.pipeline.interleaved import InterleavedEngine, Links
from trainer.pipeline.library import (
    PipelineEngine,
    TorchBackend,
    deepspeed,
    get_accelerator,
    instructions,
    quiet,
)
from trainer.pipeline.partial_losses import EarlyLoss, Measured, PartialLosses
from trainer.pipeline.stages import Stage, average_over_replicas, stage_module, sum_copied_gradients

SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class StepResult(Record):
    """One training step, in rank 0's numbers on every rank. `loss`: mean over the global batch.

    `grad_norm`: of all gradients before clipping; infinite when the step was skipped because a
    gradient was not finite. `loss_scale`: that of this step, None unless the dtype is fp16.
    `update_seconds`: this rank's time in the optimizer. `parts`: the losses of which it is the sum,
    by the family's names; none where it is one. `layers`: norms of each layer, where they were
    asked for and an update was made.
    """

    loss: float
    grad_norm: float | None
    skipped: bool
    loss_scale: float | None = None
    update_seconds: float = 0.0
    parts: Mapping[str, float] = {}
    layers: LayerMeasure | None = None


class Engine:
    """A model, its optimizer and its pipeline on this worker. Make it with `build`; every method is
    collective.
    """

    def __init__(
        self,
        config: TrainerConfig,
        mesh: Mesh,
        pipeline: Any,
        stage: list[tuple[str, nn.Module]],
        optimizer: TrainingOptimizer | None,
        watch: UpdateWatch | None,
        compute: ComputeClock,
        ahead: BatchesAhead,
        early_loss: EarlyLoss,
        compiler: Compiler | None = None,
        layer_norms: LayerNorms | None = None,
    ):
        self.config = config
        self.mesh = mesh
        self.family = family_of(config.model)
        self.steps = 0
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._parameters = list(logical_parameters(stage))
        self._shares = {share.name: share for share in shares_of(self._parameters)}
        self._watch = watch
        self.compute = compute
        self._ahead = ahead
        self._early_loss = early_loss
        self.compiler = compiler
        self._layer_norms = layer_norms
        self._shape: tuple[int, int] | None = None  # of one micro batch: samples, tokens
        self._parts: PartialLosses | None = pipeline.module.partial_losses
        self._modules = [module for _, module in stage]
        self._last_batch: Batch | None = None
        if optimizer is not None:
            optimizer.materialise(self._shares.values())
        if watch is not None and optimizer is not None:
            tied_copy = None if mesh.is_first_stage else self._tied_name
            runs = counted_runs(optimizer, self._shares.values(), mesh, tied_copy)
            watch.locate(runs)
            if layer_norms is not None:
                layer_norms.locate(runs, [name for name, _ in self._parameters])

    @classmethod
    def build(cls, config: TrainerConfig, mesh: Mesh, for_training: bool = True) -> Engine:
        """Build the stage of this worker with initial weights. The process group must be up
        (`init_distributed`).

        Not `for_training`: weights alone, without gradients, masters and moments; such an engine
        only evaluates. Raises ValueError when the layers cannot be dealt to the stages, CardError
        for what this device lacks.
        """
        if config.precision.dtype == "fp16" and not get_accelerator().is_fp16_supported():
            rule = f"this device ({mesh.device.type}) does not compute in fp16"
            raise CardError(
                "run card", [Problem("precision.dtype", "fp16", rule, "use bf16 or fp32, or a GPU")]
            )
        obstacle = None
        if config.precision.float8:
            obstacle = float8_obstacle(device_facts(mesh.device))
        if obstacle is not None:
            raise CardError("run card", [Problem("precision.float8", True, obstacle, OTHER_GPUS)])
        family = family_of(config.model)
        head, compiler = family.head(config, mesh), compiler_for(config, mesh.device)
        layers = family.layers(config, mesh, head, compiler)
        optimizer, watch, layer_norms = None, None, None
        with quiet(), mesh.groups.shared_with(TorchBackend):
            module = stage_module(config, mesh, layers)
            stage = module.owned(layers)
            initialise_stage(
                stage, config.run.seed, mesh, lambda name: family.begins_xavier(name, config)
            )
            module.places.locate(stage)
            module.partial_losses = parts = PartialLosses.of(family.parts(config), head, mesh)
            if mesh.is_last_stage:
                module.loss_fn = head.loss if parts is None else parts.loss
            if for_training:
                groups = parameter_groups(logical_parameters(stage), config.optimizer.weight_decay)
                rate, embeddings = config.schedule.learning_rate, {family.tied_name}
                optimizer = build_optimizer(
                    groups, config.optimizer, rate, embeddings=embeddings, mesh=mesh
                )
                watch = UpdateWatch(optimizer, mesh, config.logging.zeros_in_gradient)
                if config.logging.layer_norms_interval is not None:
                    layer_norms = LayerNorms(optimizer, mesh, stage)
            local_elements = sum(parameter.numel() for parameter in module.parameters())
            interleaves = config.parallel.virtual_stages > 1
            with mock.patch.object(
                deepspeed, "PipelineEngine", InterleavedEngine if interleaves else PipelineEngine
            ):
                pipeline, *_ = deepspeed.initialize(
                    model=module,
                    optimizer=optimizer,
                    config=deepspeed_settings(config, local_elements, for_training),
                    dist_init_required=False,
                )
            if interleaves:
                pipeline.links = Links.of(mesh)
            compute = ComputeClock(mesh.device)
            early_loss = EarlyLoss(pipeline)
            ahead = BatchesAhead(mesh.device, mesh.is_first_stage, mesh.is_last_stage)
            own = pipeline._INSTRUCTION_MAP
            pipeline._INSTRUCTION_MAP = own | {
                instructions.ReduceTiedGrads: sum_copied_gradients,
                instructions.ReduceGrads: (
                    average_over_replicas
                    if pipeline.using_bf16_optimizer
                    else own[instructions.ReduceGrads]
                ),
            }
            if optimizer is not None:  # nothing takes the times of an engine that only evaluates
                pipeline._INSTRUCTION_MAP |= {
                    instructions.ForwardPass: ahead.following(
                        compute.timed("forward", own[instructions.ForwardPass])
                    ),
                    instructions.BackwardPass: compute.timed(
                        "backward", own[instructions.BackwardPass]
                    ),
                    instructions.OptimizerStep: early_loss.before(own[instructions.OptimizerStep]),
                }
                optimizer.register_step_pre_hook(lambda *_: compute.begin("optimizer"))
                optimizer.register_step_post_hook(lambda *_: compute.end("optimizer"))
        return cls(
            config,
            mesh,
            pipeline,
            stage=stage,
            optimizer=optimizer,
            watch=watch,
            compute=compute,
            ahead=ahead,
            early_loss=early_loss,
            compiler=compiler,
            layer_norms=layer_norms,
        )

    @property
    def needs_data(self) -> bool:
        """True where batches are read: on the first and the last stage."""
        return self.mesh.is_first_stage or self.mesh.is_last_stage

    def train_step(
        self,
        batches: Iterator[Any],
        global_batch_size: int,
        step: int | None = None,
        sequence_length: int | None = None,
    ) -> StepResult:
        """Train on the next `global_batch_size` samples; `batches` yields this replica's micro batches, of
        the family's fields (a GPT's: tokens and labels).

        `step` numbers the step for the dropout masks; by default this engine's own count. Pass the
        iteration, so that a resumed run draws what the uninterrupted one would. `batches` is not
        read where `needs_data` is False. `sequence_length` cuts every sample to its beginning
        (curriculum); all ranks must say the same. Layers are measured at multiples of
        `logging.layer_norms_interval`, the first step being 1.
        """
        engine = self._pipeline
        length = sequence_length or self.config.model.sequence_length
        micro_batch = self.config.batch.micro_batch_at(global_batch_size)
        self._expect(micro_batch, length)
        if engine.train_micro_batch_size_per_gpu() != micro_batch:
            # it keeps the number of micro batches, set right below
            engine.set_train_micro_batch_size(micro_batch)
            engine.micro_batch_size = micro_batch
        if engine.train_batch_size() != global_batch_size:
            engine.set_train_batch_size(global_batch_size)
        prepared = self._kept(self._prepared(batches, length))
        number = self.steps if step is None else step
        # all replicas take their parts of one chunk of the global batch after another
        chunks = torch.arange(global_batch_size).view(-1, self.mesh.data, micro_batch)
        key = f"{self.config.run.seed}/dropout/{number}"
        engine.module.places.begin(key, chunks[:, self.mesh.data_rank])
        measured = self._begin_layers(number + 1)
        skipped_before, scale = engine.skipped_steps, self.loss_scale
        watch = self._trained[1]
        watch.begin()
        self.compute.begin_step()
        engine.train_batch(data_iter=self._ahead.of(prepared, engine.micro_batches))
        self.compute.end_step()
        self.steps += 1
        norm = engine.get_global_grad_norm()
        skipped = engine.skipped_steps > skipped_before
        losses, norm, skipped = self._of_first_rank(self._early_loss.values(), norm, skipped)
        if self._parts is None:
            parts = {}
        else:
            parts = dict(zip(self._parts.names.losses, losses[1:], strict=True))
        layers = None
        if measured is not None:
            layers = measured.take(norm)
        return StepResult(
            losses[0],
            norm,
            skipped,
            loss_scale=scale,
            update_seconds=watch.seconds,
            parts=parts,
            layers=layers,
        )

    def _begin_layers(self, iteration: int) -> LayerNorms | None:
        """What measures the layers in this step, if anything does."""
        every = self.config.logging.layer_norms_interval
        if self._layer_norms is None or every is None or iteration % every:
            return None
        self._layer_norms.begin()
        return self._layer_norms

    def before_update(self, call: Callable[[], None]) -> None:
        """Have `call` called in each step before weights, masters and moments change."""
        self._trained[0].register_step_pre_hook(lambda *_: call())

    def take_zeros(self) -> int:
        """Zero elements among the clipped gradients of all steps since the last call; 0 where they
        are not counted. Collective. The host waits for the last of these steps.
        """
        return self._trained[1].take_zeros()

    def _of_first_rank(
        self, losses: list[float], norm: float | None, skipped: bool
    ) -> tuple[list[float], float | None, bool]:
        """Rank 0's numbers of a step, on every rank. Collective.

        Each group of ranks may add the same terms in another order, and anyone who decides by a
        number of its own could wait in a collective that the others never enter.
        """
        told = torch.tensor(
            [math.nan if norm is None else float(norm), norm is None, skipped, *losses],
            dtype=torch.float64,
        )
        dist.broadcast(told, 0, group=self.mesh.cpu_group)
        agreed_norm, has_none, was_skipped, *agreed = told.tolist()
        return agreed, None if has_none else agreed_norm, bool(was_skipped)

    def measure(self, batches: Iterator[Any], micro_batches: int) -> Measured:
        """Means over `micro_batches` micro batches of each replica, without training; the same on
        every rank.

        Always at the full sequence length, and in micro batches of the full batch's size.
        """
        ahead = self._evaluating(batches, micro_batches)
        loss = float(self._pipeline.eval_batch(ahead, num_micro_batches=micro_batches))
        if self._parts is None:
            return Measured(loss, {})
        return Measured(loss, self._parts.mean())

    def measure_each(self, batches: Iterator[Any], micro_batches: int) -> list[Measured]:
        """Each of this replica's `micro_batches` micro batches, without training; on every rank of
        it.
        """
        ahead = self._evaluating(batches, micro_batches)
        found = self._pipeline.eval_batch(
            ahead, num_micro_batches=micro_batches, reduce_output=None, bcast_loss=False
        )
        losses = torch.zeros(micro_batches, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.is_last_stage:
            losses += torch.stack([loss.detach().double().reshape(()) for loss in found])
        if self.mesh.pipeline_group is not None:
            dist.broadcast(losses, self.mesh.pipeline_ranks[-1], group=self.mesh.pipeline_group)
        if self._parts is not None:
            parts = self._parts.each()
        else:
            parts = [{} for _ in losses]
        return [Measured(float(loss), own) for loss, own in zip(losses, parts, strict=True)]

    def _evaluating(self, batches: Iterator[Any], micro_batches: int) -> Iterator[Batch]:
        """Micro batches to evaluate, on their way to the device."""
        self._expect_evaluation()
        if self._parts is not None:
            self._parts.begin(micro_batches)
        return self._ahead.of(
            self._prepared(batches, self.config.model.sequence_length), micro_batches
        )

    @property
    def _trained(self) -> tuple[TrainingOptimizer, UpdateWatch]:
        """Optimizer and watch. Raises RuntimeError when this engine was built to evaluate."""
        if self._optimizer is None or self._watch is None:
            raise RuntimeError("this engine was built for evaluation only")
        return self._optimizer, self._watch

    def _prepared(self, batches: Iterator[Any], length: int) -> Iterator[Batch]:
        """The micro batches as the stages take them, each sample cut to `length` tokens."""
        return (self.family.prepared(batch, length, self.config) for batch in batches)

    def _kept(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, the last of which `stage` can show."""
        for batch in batches:
            self._last_batch = batch
            yield batch

    def stage(self) -> Stage:
        """What this worker computes of a micro batch, as in the last step. Raises RuntimeError
        before the first.
        """
        if self._shape is None:
            raise RuntimeError("no step was trained yet: the shape of a micro batch is not known")
        pipeline = self._pipeline.module
        return Stage(
            pipeline,
            pipeline.places,
            pipeline.functions,
            [list(module.parameters()) for module in self._modules],
            loss=pipeline.loss_fn if self.mesh.is_last_stage else None,
            batch=self._last_batch,
            shape=self._shape,
            hidden_size=self.config.model.hidden_size,
            plain_mark=self.family.plain_mark(self.config.data),
        )

    def _expect(self, micro_batch: int, length: int) -> None:
        """Let the stages agree again on the shape of what they send, when it is about to change."""
        if (micro_batch, length) != self._shape:
            self._pipeline.reset_activation_shape()
            self._shape = (micro_batch, length)
            if isinstance(self._pipeline, InterleavedEngine):
                self._pipeline.message = MessageShape.of(
                    self._pipeline.module.borders, self._shape, self.config
                )

    def _expect_evaluation(self) -> None:
        batch = self.config.batch
        self._expect(
            batch.micro_batch_at(batch.global_batch_size), self.config.model.sequence_length
        )

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None unless the dtype is fp16."""
        if self.config.precision.dtype == "fp16":
            return float(self._pipeline.optimizer.loss_scale)
        return None

    def scaler_state(self) -> dict[str, float]:
        """What a resumed run must know of the dynamic loss scale; empty when there is none."""
        scaler = getattr(self._pipeline.optimizer, "loss_scaler", None)
        if self.config.precision.dtype != "fp16" or scaler is None or not scaler.dynamic:
            return {}
        return {name: getattr(scaler, name) for name in SCALER_FIELDS}

    def restore_scaler(self, state: Mapping[str, float]) -> None:
        """Go on with a dynamic loss scale as `scaler_state` gave it."""
        if not self.scaler_state():
            return
        for name in SCALER_FIELDS:
            if name in state:
                setattr(self._pipeline.optimizer.loss_scaler, name, state[name])

    def optimizer_sums(self) -> dict[str, list[float]]:
        """What a resumed run must know of the optimizer beside `sharded_state`; empty for most."""
        if self._optimizer is None:
            return {}
        return self._optimizer.tensor_sums()

    def restore_optimizer_sums(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Go on with what `optimizer_sums` gave, after `finish_load`; empty where nothing was kept.
        Collective.
        """
        if self._optimizer is not None:
            self._optimizer.set_tensor_sums(sums)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This stage's parameters under their logical names, in the order of the model."""
        return list(self._parameters)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all parameters for the next step."""
        for group in self._trained[0].param_groups:
            group["lr"] = learning_rate

    def params_norm(self) -> float:
        """Euclidean norm of all weights, each counted once over tensor ranks, stages and the tied
        copy.
        """
        squares = [
            square_sum(parameter)
            for name, parameter in self._parameters
            if not self._is_tied_copy(name)
            and (sharding_of(parameter).dim is not None or self.mesh.tensor_rank == 0)
        ]
        if squares:
            total = torch.stack(squares).sum()
        else:
            total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.model_group is not None:
            dist.all_reduce(total, group=self.mesh.model_group)
        return math.sqrt(float(total))

    def sharded_state(self) -> ShardedState:
        """The weights and the optimizer's share of this rank, for the checkpoint to read or fill.

        Weights and masters are live views; moments may be copies, which count when `finish_load` is
        given them.
        """
        weights, fragments = [], []
        for name, parameter in self._parameters:
            sharding, local = sharding_of(parameter), tuple(parameter.shape)
            whole, offsets = (
                sharding.global_shape(local),
                sharding.offsets(local, self.mesh.tensor_rank),
            )
            is_owner = not self._is_tied_copy(name)
            weights.append(
                LocalTensor(name, whole, offsets, tensor=parameter.data, is_owner=is_owner)
            )
            share = self._shares.get(name)
            # no element of it lies in this rank's partition
            if share is None or self._optimizer is None:
                continue
            masters = self._optimizer.partition(share.group).data.narrow(
                0, share.start, share.numel
            )
            held = {MASTERS: masters, **self._optimizer.moments(share)}
            fragments.append(
                Fragment(
                    name,
                    whole,
                    local,
                    offsets=offsets,
                    start=share.first,
                    numel=share.numel,
                    tensors=held,
                    is_owner=is_owner,
                )
            )
        kinds: tuple[str, ...] = FRAGMENT_KINDS
        if self._optimizer is not None:
            kinds = (MASTERS, *self._optimizer.state_names)
        return ShardedState(weights, fragments, self.optimizer_step(), kinds)

    def finish_load(self, state: ShardedState) -> None:
        """Make a state that was filled current: moments, counters, then model weights from the fp32
        masters.
        """
        self.steps = state.optimizer_step
        with torch.no_grad():
            if self._optimizer is not None:
                for fragment in state.fragments:
                    self._optimizer.set_moments(self._shares[fragment.name], fragment.tensors)
                self._optimizer.set_steps_done(state.optimizer_step)
                self._pipeline.optimizer.update_lp_params()
            self._pipeline.module._synchronize_tied_weights()

    def optimizer_step(self) -> int:
        """Updates made so far."""
        if self._optimizer is None:
            return 0
        return self._optimizer.steps_done()

    def masters_from_weights(self, state: ShardedState) -> None:
        """Fill the optimizer's part of `state` from the weights alone: masters are their values,
        moments are zero.

        It counts after `finish_load`.
        """
        local = {name: parameter.data for name, parameter in self._parameters}
        with torch.no_grad():
            for fragment in state.fragments:
                run = local[fragment.name].flatten().narrow(0, fragment.start, fragment.numel)
                fragment.tensors[MASTERS].copy_(run)
                for kind, tensor in fragment.tensors.items():
                    if kind != MASTERS:
                        tensor.zero_()

    def disagreeing_parameters(self) -> list[str]:
        """Names of parameters whose copies differ: over data ranks, over tensor ranks where
        replicated, or tied.
        """
        return disagreements(self._parameters, self.mesh, self._tied_name)

    def not_finite(self, state: ShardedState) -> list[str]:
        """Names of parameters that hold NaN or infinity, in weights, masters or moments; on any
        rank. Collective.

        `state`: this rank's, as `sharded_state` gave it; to gather it again could copy all moments
        a second time.
        """
        weights = ((weight.name, weight.tensor) for weight in state.weights)
        fragments = (
            (part.name, tensor) for part in state.fragments for tensor in part.tensors.values()
        )
        return not_finite(chain(weights, fragments), self.mesh)

    def close(self) -> None:
        """Destroy the pipeline and all process groups. The engine is unusable afterwards."""
        self._pipeline.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _is_tied_copy(self, name: str) -> bool:
        return name == self._tied_name and not self.mesh.is_first_stage

    @property
    def _tied_name(self) -> str | None:
        """The weight of which the last stage has a copy; None where it has none."""
        if self.config.model.tied_embeddings:
            return self.family.tied_name
        return None
