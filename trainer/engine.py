"""The training engine: the one file that imports DeepSpeed.

It turns the model's layers into a pipeline, trains with ZeRO-1, fp32 gradient accumulation and clipping, and shows
the sharded state to the checkpoint. Each setting that matters says why beside it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, ReduceGrads, ReduceTiedGrads
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from trainer.checkpoint.state import Fragment, LocalTensor, ShardedState
from trainer.config import CardError, Problem, TrainerConfig
from trainer.corruption_check import Stage
from trainer.groups import START_TIMEOUT
from trainer.guard import disagreements, not_finite, square_sum
from trainer.mesh import Mesh
from trainer.model.block import TransformerBlock
from trainer.model.documents import DocumentRules, labels_without_ends
from trainer.model.gpt import (
    TIED_KEY,
    TIED_NAME,
    Layer,
    gpt_layers,
    initialise_stage,
    logical_parameters,
    replicated_parameters,
)
from trainer.model.loss import LanguageModelHead
from trainer.model.random import seed_step
from trainer.model.recompute import recompute_function
from trainer.model.recompute_choice import recomputed_part
from trainer.optim.build import build_optimizer
from trainer.optim.groups import parameter_groups
from trainer.optim.interface import MOMENTS, TrainingOptimizer, shares_of
from trainer.optim.watch import UpdateWatch
from trainer.profile import ComputeClock
from trainer.shard import sharding_of


def _of_rank_0(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A computation of the clip norm, whose result on rank 0 counts everywhere. Collective.

    Each replica adds the squares over a group of its own, and NCCL may add in another order for each group. Gradients
    that were clipped by norms one unit in the last place apart would pull the copies of a weight apart.
    """

    @wraps(norm)
    def agreed(*arguments: Any, **options: Any) -> Tensor:
        found = norm(*arguments, **options)
        dist.broadcast(found, 0)
        return found

    return agreed


# The two places where the library takes the norm that it clips with: for bf16, and for fp16 and fp32.
bf16_optimizer.get_global_norm_of_tensors = _of_rank_0(bf16_optimizer.get_global_norm_of_tensors)
DeepSpeedZeroOptimizer.scaled_global_norm = _of_rank_0(DeepSpeedZeroOptimizer.scaled_global_norm)

Batch = tuple[Tensor, Tensor]
BUCKET_ELEMENTS = 1 << 26
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class StepResult:
    """One training step, in rank 0's numbers on every rank. `loss`: mean over the global batch.

    `grad_norm`: of all gradients before clipping; infinite when the step was skipped because a gradient was not finite.
    `zeros`: zero elements among the clipped gradients, None unless they are counted. `loss_scale`: that of this step,
    None unless the dtype is fp16. `update_seconds`: this rank's time in the optimizer.
    """

    loss: float
    grad_norm: float | None
    skipped: bool
    zeros: int | None = None
    loss_scale: float | None = None
    update_seconds: float = 0.0


def init_distributed(device: torch.device, timeout: timedelta = START_TIMEOUT) -> None:
    """Join the default process group (gloo on the CPU, nccl on CUDA), as RANK, WORLD_SIZE, MASTER_* and LOCAL_RANK say.

    DeepSpeed's shared-memory collective is switched off first: on CPUs it would compile C++ at start, and its buffers
    stay in /dev/shm after every run. Raises ValueError for a GPU without an index: NCCL would take whichever is
    current.
    """
    if device.type == "cuda" and device.index is None:
        raise ValueError(f"a worker's GPU must be named by its number, not as {device}: see worker_device()")
    vars(deepspeed.ops)["__compatible_ops__"] = {}  # else it asks every op for compilers, and builds one of them
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=timeout)


class Engine:
    """A model, its optimizer and its pipeline on this worker. Make it with `build`; every method is collective."""

    def __init__(
        self,
        config: TrainerConfig,
        mesh: Mesh,
        pipeline: Any,
        stage: list[tuple[str, nn.Module]],
        optimizer: TrainingOptimizer | None,
        watch: UpdateWatch | None,
        compute: ComputeClock,
    ):
        self.config = config
        self.mesh = mesh
        self.steps = 0
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._parameters = list(logical_parameters(stage))
        self._shares = {share.name: share for share in shares_of(self._parameters)}
        self._watch = watch
        self.compute = compute
        self._shape: tuple[int, int] | None = None  # of one micro batch: samples, tokens
        self._modules = [module for _, module in stage]
        self._last_batch: Batch | None = None
        if optimizer is not None:
            optimizer.materialise(self._shares.values())
        if watch is not None and optimizer is not None:
            watch.locate(optimizer, self._parameters, None if mesh.is_first_stage else TIED_NAME)

    @classmethod
    def build(cls, config: TrainerConfig, mesh: Mesh, for_training: bool = True) -> Engine:
        """Build the stage of this worker with initial weights. The process group must be up (`init_distributed`).

        Not `for_training`: weights alone, without gradients, masters and moments; such an engine only evaluates.
        Raises ValueError when the layers cannot be dealt to the stages, CardError for what this device lacks.
        """
        if config.precision.dtype == "fp16" and not get_accelerator().is_fp16_supported():
            rule = f"this device ({mesh.device.type}) does not compute in fp16"
            raise CardError("run card", [Problem("precision.dtype", "fp16", rule, "use bf16 or fp32, or a GPU")])
        head = LanguageModelHead(mesh)
        vocabulary, documents = config.tokenizer.padded_vocabulary_size, DocumentRules.of(config.data)
        layers = gpt_layers(config.model, vocabulary, mesh, head, documents, config.precision.dtype)
        optimizer, watch = None, None
        with _quiet(), mesh.groups.shared_with(TorchBackend):
            module = _pipeline_module(config, mesh, layers)
            owned = layers[module._local_start : module._local_stop]
            stage = [
                (layer.prefix, _module_of(module, function))
                for layer, function in zip(owned, module.forward_funcs, strict=True)
            ]
            initialise_stage(stage, config.run.seed, mesh)
            if mesh.is_last_stage:
                module.loss_fn = head.loss
            if for_training:
                groups = parameter_groups(logical_parameters(stage), config.optimizer.weight_decay)
                optimizer = build_optimizer(groups, config.optimizer, config.schedule.learning_rate, {TIED_NAME})
                watch = UpdateWatch(optimizer, mesh, config.logging.zeros_in_gradient)
            local_elements = sum(parameter.numel() for parameter in module.parameters())
            pipeline, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                config=_deepspeed_config(config, mesh, local_elements, for_training),
                dist_init_required=False,
            )
            compute = ComputeClock(mesh.device)
            own = pipeline._INSTRUCTION_MAP
            pipeline._INSTRUCTION_MAP = own | {
                ReduceTiedGrads: _sum_copies,
                ReduceGrads: _sum_replicas if pipeline.using_bf16_optimizer else own[ReduceGrads],
            }
            if optimizer is not None:  # nothing takes the times of an engine that only evaluates
                pipeline._INSTRUCTION_MAP |= {
                    ForwardPass: compute.timed("forward", own[ForwardPass]),
                    BackwardPass: compute.timed("backward", own[BackwardPass]),
                }
                optimizer.register_step_pre_hook(lambda *_: compute.begin("optimizer"))
                optimizer.register_step_post_hook(lambda *_: compute.end("optimizer"))
        return cls(config, mesh, pipeline, stage, optimizer, watch, compute)

    @property
    def needs_data(self) -> bool:
        """True where batches are read: on the first and the last stage."""
        return self.mesh.is_first_stage or self.mesh.is_last_stage

    def train_step(
        self,
        batches: Iterator[Batch],
        global_batch_size: int,
        step: int | None = None,
        sequence_length: int | None = None,
    ) -> StepResult:
        """Train on the next `global_batch_size` samples; `batches` yields this replica's (tokens, labels) micro
        batches.

        `step` numbers the step for the dropout masks; by default this engine's own count. Pass the iteration, so that
        a resumed run draws what the uninterrupted one would. `batches` is not read where `needs_data` is False.
        `sequence_length` cuts every sample to its beginning (curriculum); all ranks must say the same.
        """
        engine = self._pipeline
        length = sequence_length or self.config.model.sequence_length
        micro_batch = self.config.batch.micro_batch_at(global_batch_size)
        self._expect(micro_batch, length)
        if engine.train_micro_batch_size_per_gpu() != micro_batch:
            engine.set_train_micro_batch_size(micro_batch)  # it keeps the number of micro batches, set right below
            engine.micro_batch_size = micro_batch
        if engine.train_batch_size() != global_batch_size:
            engine.set_train_batch_size(global_batch_size)
        if length != self.config.model.sequence_length:
            batches = _cut(batches, length)
        batches = self._kept(self._counted(batches))
        seed_step(self.config.run.seed, self.steps if step is None else step, self.mesh)
        skipped_before, scale = engine.skipped_steps, self.loss_scale
        watch = self._trained[1]
        watch.begin()
        self.compute.take()  # an evaluation's is not of this step
        loss = engine.train_batch(data_iter=batches)
        self.steps += 1
        norm = engine.get_global_grad_norm()
        loss, norm, skipped = self._of_first_rank(float(loss), norm, engine.skipped_steps > skipped_before)
        return StepResult(loss, norm, skipped, watch.zeros(), scale, watch.seconds)

    def _of_first_rank(self, loss: float, norm: float | None, skipped: bool) -> tuple[float, float | None, bool]:
        """Rank 0's numbers of a step, on every rank. Collective.

        Each group of ranks may add the same terms in another order, and whoever decides by a number of its own could
        wait in a collective that the others never enter.
        """
        told = torch.tensor(
            [loss, math.nan if norm is None else float(norm), norm is None, skipped], dtype=torch.float64
        )
        dist.broadcast(told, 0, group=self.mesh.cpu_group)
        agreed_loss, agreed_norm, has_none, was_skipped = told.tolist()
        return agreed_loss, None if has_none else agreed_norm, bool(was_skipped)

    def evaluate(self, batches: Iterator[Batch], micro_batches: int) -> float:
        """Mean loss over `micro_batches` micro batches of each replica, without training; the same on every rank.

        Always at the full sequence length, and in micro batches of the full batch's size.
        """
        self._expect_evaluation()
        return float(self._pipeline.eval_batch(self._counted(batches), num_micro_batches=micro_batches))

    def evaluate_each(self, batches: Iterator[Batch], micro_batches: int) -> list[float]:
        """The loss of each of this replica's `micro_batches` micro batches, without training; on every rank of it."""
        self._expect_evaluation()
        found = self._pipeline.eval_batch(
            self._counted(batches), num_micro_batches=micro_batches, reduce_output=None, bcast_loss=False
        )
        losses = torch.zeros(micro_batches, dtype=torch.float64, device=self.mesh.device)
        if self.mesh.is_last_stage:
            losses += torch.stack([loss.detach().double().reshape(()) for loss in found])
        if self.mesh.pipeline_group is not None:
            dist.broadcast(losses, self.mesh.pipeline_ranks[-1], group=self.mesh.pipeline_group)
        return [float(loss) for loss in losses]

    @property
    def _trained(self) -> tuple[TrainingOptimizer, UpdateWatch]:
        """Optimizer and watch. Raises RuntimeError when this engine was built to evaluate."""
        if self._optimizer is None or self._watch is None:
            raise RuntimeError("this engine was built for evaluation only")
        return self._optimizer, self._watch

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, with the labels that the card leaves out of the loss marked so."""
        end = self.config.data.end_of_document_id
        if end is None or not self.config.data.mask_end_of_document_loss:
            return batches
        return ((tokens, labels_without_ends(tokens, labels, end)) for tokens, labels in batches)

    def _kept(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, the last of which `stage` can show."""
        for batch in batches:
            self._last_batch = batch
            yield batch

    def stage(self) -> Stage:
        """What this worker computes of a micro batch, as in the last step. Raises RuntimeError before the first."""
        if self._shape is None:
            raise RuntimeError("no step was trained yet: the shape of a micro batch is not known")
        pipeline, rules = self._pipeline.module, DocumentRules.of(self.config.data)
        return Stage(
            pipeline,
            pipeline.forward_funcs,
            [list(module.parameters()) for module in self._modules],
            pipeline.loss_fn if self.mesh.is_last_stage else None,
            self._last_batch,
            self._shape,
            self.config.model.hidden_size,
            None if rules is None else rules.end_id,
        )

    def _expect(self, micro_batch: int, length: int) -> None:
        """Let the stages agree again on the shape of what they send, when it is about to change."""
        if (micro_batch, length) != self._shape:
            self._pipeline.reset_activation_shape()
            self._shape = (micro_batch, length)

    def _expect_evaluation(self) -> None:
        batch = self.config.batch
        self._expect(batch.micro_batch_at(batch.global_batch_size), self.config.model.sequence_length)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step; None unless the dtype is fp16."""
        return float(self._pipeline.optimizer.loss_scale) if self.config.precision.dtype == "fp16" else None

    def scaler_state(self) -> dict[str, float]:
        """What a resumed run must know of the dynamic loss scale; empty when there is none."""
        scaler = getattr(self._pipeline.optimizer, "loss_scaler", None)
        if self.config.precision.dtype != "fp16" or scaler is None or not scaler.dynamic:
            return {}
        return {name: getattr(scaler, name) for name in SCALER_FIELDS}

    def restore_scaler(self, state: Mapping[str, float]) -> None:
        """Go on with a dynamic loss scale as `scaler_state` gave it."""
        for name in SCALER_FIELDS if self.scaler_state() else ():
            if name in state:
                setattr(self._pipeline.optimizer.loss_scaler, name, state[name])

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This stage's parameters under their logical names, in the order of the model."""
        return list(self._parameters)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all parameters for the next step."""
        for group in self._trained[0].param_groups:
            group["lr"] = learning_rate

    def params_norm(self) -> float:
        """Euclidean norm of all weights, each counted once over tensor ranks, stages and the tied copy."""
        squares = [
            square_sum(parameter)
            for name, parameter in self._parameters
            if not self._is_tied_copy(name) and (sharding_of(parameter).dim is not None or self.mesh.tensor_rank == 0)
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.model_group is not None:
            dist.all_reduce(total, group=self.mesh.model_group)
        return math.sqrt(float(total))

    def sharded_state(self) -> ShardedState:
        """The weights and the optimizer's share of this rank, for the checkpoint to read or fill.

        Weights and masters are live views; moments may be copies, which count when `finish_load` is given them.
        """
        weights, fragments = [], []
        for name, parameter in self._parameters:
            sharding, local = sharding_of(parameter), tuple(parameter.shape)
            whole, offsets = sharding.global_shape(local), sharding.offsets(local, self.mesh.tensor_rank)
            is_owner = not self._is_tied_copy(name)
            weights.append(LocalTensor(name, whole, offsets, parameter.data, is_owner))
            share = self._shares.get(name)
            if share is None or self._optimizer is None:  # no element of it lies in this rank's partition
                continue
            masters = self._optimizer.partition(share.group).data.narrow(0, share.start, share.numel)
            held = {"fp32": masters, **self._optimizer.moments(share)}
            fragments.append(Fragment(name, whole, local, offsets, share.first, share.numel, held, is_owner))
        return ShardedState(weights, fragments, self.optimizer_step())

    def finish_load(self, state: ShardedState) -> None:
        """Make a state that was filled current: moments, counters, then model weights from the fp32 masters."""
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
        return 0 if self._optimizer is None else self._optimizer.steps_done()

    def masters_from_weights(self, state: ShardedState) -> None:
        """Fill the optimizer's part of `state` from the weights alone: masters are their values, moments are zero.

        It counts after `finish_load`.
        """
        local = {name: parameter.data for name, parameter in self._parameters}
        with torch.no_grad():
            for fragment in state.fragments:
                run = local[fragment.name].flatten().narrow(0, fragment.start, fragment.numel)
                fragment.tensors["fp32"].copy_(run)
                for moment in MOMENTS:
                    fragment.tensors[moment].zero_()

    def disagreeing_parameters(self) -> list[str]:
        """Names of parameters whose copies differ: over data ranks, over tensor ranks where replicated, or tied."""
        return disagreements(self._parameters, self.mesh, TIED_NAME)

    def not_finite(self, state: ShardedState) -> list[str]:
        """Names of parameters that hold NaN or infinity, in weights, masters or moments; on any rank. Collective.

        `state`: this rank's, as `sharded_state` gave it; to gather it again could copy all moments a second time.
        """
        weights = ((weight.name, weight.tensor) for weight in state.weights)
        fragments = ((part.name, tensor) for part in state.fragments for tensor in part.tensors.values())
        return not_finite(chain(weights, fragments), self.mesh)

    def close(self) -> None:
        """Destroy the pipeline and all process groups. The engine is unusable afterwards."""
        self._pipeline.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _is_tied_copy(self, name: str) -> bool:
        return name == TIED_NAME and not self.mesh.is_first_stage


class _Pipeline(PipelineModule):
    """A pipeline that also sums, once per step, the tensor ranks' shares of replicated parameters' gradients."""

    def __init__(self, mesh: Mesh, **settings: Any):
        super().__init__(**settings)
        self._mesh = mesh

    def _is_checkpointable(self, funcs: list[Any]) -> bool:
        """Whether the library, which asks layer by layer, recomputes these."""
        return all(isinstance(item, TransformerBlock) and item.recomputed == "block" for item in funcs)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, ProcessGroup]]:
        """Whose gradients are summed over whom: tied weights over stages, replicated ones over tensor ranks."""
        tied: list[tuple[nn.Parameter, ProcessGroup]] = super().get_tied_weights_and_groups()
        group = self._mesh.tensor_group
        return tied if group is None else tied + [(item, group) for item in replicated_parameters([self])]

    def sum_copies(self, accumulated: bool) -> None:
        """Sum the gradients of copies, so that no bit of them differs. `accumulated`: they are in fp32 of their own.

        Replicas first, into the first of them; then the copies; the other replicas hold zeros, so that DeepSpeed's
        reduction over replicas changes nothing. In its own order, copies first, the terms of an element are added in
        an order that hangs on its place in a buffer: with three replicas or more the copies drift apart.
        """
        mesh = self._mesh
        first = mesh.rank_at(mesh.pipeline_rank, 0, mesh.tensor_rank)
        for weight, group in self.get_tied_weights_and_groups():
            gradient = weight._hp_grad if accumulated else weight.grad  # type: ignore[attr-defined]
            if gradient is None:
                continue
            if mesh.data_group is not None:
                dist.reduce(gradient, first, group=mesh.data_group)
            if mesh.data_rank == 0:
                dist.all_reduce(gradient, group=group)
            else:
                gradient.zero_()


def _sum_copies(engine: Any) -> None:
    """Takes the place of DeepSpeed's instruction to reduce tied gradients."""
    engine.module.sum_copies(engine.using_bf16_optimizer)


def _sum_replicas(engine: Any) -> None:
    """Takes the place of DeepSpeed's instruction to reduce gradients, for bf16: each flat buffer is summed in place.

    The library joins buffers of less than 500 million elements first: a copy of all gradients, 4 bytes a parameter.
    """
    engine.buffered_allreduce_fallback(grads=None, elements_per_buffer=0)


def _pipeline_module(config: TrainerConfig, mesh: Mesh, layers: list[Layer]) -> PipelineModule:
    """Deal the layers to stages and build this worker's."""
    model = config.model
    is_any_recomputed = any(recomputed_part(model, block) == "block" for block in range(model.layers))
    return _Pipeline(
        mesh=mesh,
        layers=[_spec(layer) for layer in layers],
        topology=PipeModelDataParallelTopology(num_pp=mesh.pipeline, num_mp=mesh.tensor, num_dp=mesh.data),
        partition_method=config.parallel.partition,
        activation_checkpoint_interval=int(is_any_recomputed),
        activation_checkpoint_func=recompute_function(model, mesh),
    )


def _spec(layer: Layer) -> LayerSpec:
    if layer.tied_key is None:
        return LayerSpec(layer.kind, *layer.arguments)
    return TiedLayerSpec(layer.tied_key, layer.kind, *layer.arguments, forward_fn=layer.forward)


def _module_of(module: PipelineModule, function: Any) -> nn.Module:
    """The module behind one of the stage's forward functions (a tied layer's may be a partial application)."""
    return function if isinstance(function, nn.Module) else module.tied_modules[TIED_KEY]


def _deepspeed_config(config: TrainerConfig, mesh: Mesh, local_elements: int, for_training: bool) -> dict[str, Any]:
    """ZeRO-1 always: without it fp32 pipelines count the tied weight twice when clipping."""
    batch = config.batch
    first = batch.ramp.start if batch.ramp else batch.global_batch_size
    settings: dict[str, Any] = {
        "train_batch_size": first,
        "train_micro_batch_size_per_gpu": batch.micro_batch_at(first),
        "gradient_clipping": config.optimizer.clip_grad,
        "steps_per_print": 2**31,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": min(local_elements, BUCKET_ELEMENTS),
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "communication_data_type": "fp32",  # by default the sums over replicas are rounded to the weights' dtype
    }
    precision = config.precision
    if precision.dtype == "bf16":
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True}  # else a second copy in bf16 stays alive
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if not for_training:
        settings["zero_optimization"] = {"stage": 0}  # there is nothing to shard
        settings.pop("data_types", None)
    if precision.dtype == "fp16":
        settings["fp16"] = {
            "enabled": True,
            "loss_scale": precision.loss_scale or 0,  # 0 is the library's word for dynamic
            "initial_scale_power": precision.initial_scale_power,
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": precision.hysteresis,
            "min_loss_scale": precision.min_loss_scale,
        }
    return settings


def _cut(batches: Iterator[Batch], length: int) -> Iterator[Batch]:
    """The beginnings of all samples: tokens and labels [micro_batch_size, length]."""
    for tokens, labels in batches:
        yield tokens[:, :length].contiguous(), labels[:, :length].contiguous()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Build without the library's start-up prints, and without autograd: it broadcasts tied weights as it builds."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
