"""Everything that follows from a run card, without running anything: sizes, steps, rates, costs,
attempts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby

from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.runcard.check import Level
from tr11ops.runcard.exit_duration import exit_plan
from tr11ops.runcard.gpu_memory import (
    attention_of,
    gpu_is_unknown,
    least_recomputed,
    memory_checks,
    memory_of,
)
from tr11ops.runcard.rules import card_warnings
from tr11ops.runcard.speed import (
    NARROWEST,
    Speed,
    assumed_speed,
    measured_speed,
    path_seconds,
    seconds_at,
)
from trainer.config.first_loss import FirstLoss, first_loss
from trainer.config.kernel_choice import KernelChoice, recomputed_blocks
from trainer.contract.documents import document
from trainer.contract.record import JsonObject, Record
from trainer.schedule import flops
from trainer.schedule.learning_rate import plan_of
from trainer.schedule.memory import WorkerMemory
from trainer.schedule.path import BatchLevel, TrainingPath, path_of

SCHEMA = 1


class RatePoint(Record):
    """The learning rate after `iteration` steps, and why that moment is of interest."""

    moment: str
    iteration: int
    consumed_samples: int
    learning_rate: float


class StepShape(Record):
    """One step at a given batch: micro batches of each replica, and the share of it that the
    pipeline idles.
    """

    global_batch_size: int
    gradient_accumulation_steps: int
    bubble_share: float


class LevelTime(Record):
    """The steps of one level of the batch ramp: seconds of each, hours of all, TFLOPs of each
    worker meanwhile.
    """

    batch_size: int
    iterations: int
    seconds_per_iteration: float
    hours: float
    tflops_per_gpu: float
    measured: bool


class Duration(Record):
    """How long the training takes. `basis` says what that rests on.

    Steps of the ramp are scaled by micro batches, pipeline bubble, and what is done once a step;
    waits, faults, saves, evaluations are not in it. `rule_of_thumb_days`: 8 operations (6 without
    activation checkpointing) a token and parameter at the full step's rate, as if there were no
    ramp and neither attention scores nor logits.
    """

    basis: str
    seconds_per_iteration: float  # at the full batch
    tflops_per_gpu: float  # at the full batch, by the original's formula
    days: float
    node_hours: float
    attempt_hours: float  # training time of one attempt
    attempts: int  # needed for the whole training
    array: str
    asked_attempts: int
    asked_days: float  # that the asked attempts train
    asked_share: float  # of the whole training's time
    levels: tuple[LevelTime, ...]
    ramp_hours: float  # of levels below the full batch
    rule_of_thumb_days: float


class Estimate(Record):
    """All derived numbers of one card. FLOPs of a step are those of the full batch."""

    run: str
    variant: str
    card_hash: str
    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    parameters: flops.ParameterCount
    stages: tuple[flops.StageBlocks, ...] | None
    # of its operations over the mean stage's; None as for `stages`
    busiest_stage_excess: float | None
    iterations: int
    ramp_iterations: int
    train_samples: int
    trained_samples: int
    tokens: int
    levels: tuple[BatchLevel, ...]
    level_steps: tuple[StepShape, ...]  # of `levels`
    first_step: StepShape
    full_step: StepShape
    rates: tuple[RatePoint, ...]
    model_flops_per_iteration: int
    hardware_flops_per_iteration: int
    total_model_flops: int
    weight_bytes: int
    checkpoint_bytes: int
    # as Megatron-DeepSpeed lays them out, whatever is written
    checkpoint_files: flops.CheckpointFiles
    checkpoint_format: str  # what is written: "tr11" or "deepspeed"
    checkpoint_files_at_most: int  # of the format that is written
    checkpoints: int | None  # None when only minutes say when to save
    training_bytes: int
    worker_state_bytes: int | None
    # at the peak of a step; None where only the engine knows the stages
    worker_memory: WorkerMemory | None
    gpu_memory_gb: float | None
    recomputed_blocks: int  # of the model, wholly or in part
    # that fit `gpu_memory_gb`; None where that is not known or none do
    least_recomputed_blocks: int | None
    # host memory of each node, on average; None where saves are not asynchronous
    save_copy_bytes: int | None
    attention: KernelChoice  # where `gpu_is_unknown`, that of an A100
    gpus_per_node: int
    gpu_is_unknown: bool  # the card asks for GPUs and does not say which
    duration: Duration | None
    time_unknown: str  # why `duration` is None; "" where it is not
    warnings: tuple[str, ...]
    first_loss: FirstLoss | None = None  # where it begins far above an even guess

    def to_json(self) -> JsonObject:
        """A plain object; `schema` rises when a key changes its meaning or goes."""
        value = document(self)
        value["parameters"] |= {
            "total": self.parameters.total,
            "without_embeddings": self.parameters.without_embeddings,
        }
        value["checkpoint_files"]["total"] = self.checkpoint_files.total
        if self.worker_memory is not None:
            value["worker_memory"]["total"] = self.worker_memory.total
        return {"schema": SCHEMA, **value}


def estimate(
    card: OwnCard,
    seconds_per_iteration: float | None = None,
    assumed_tflops: float | None = None,
    asked_attempts: int = 10,
    steps: Iterable[tuple[int, float]] = (),
) -> Estimate:
    """Every derived number of `card`.

    `seconds_per_iteration` (at the full batch) or `assumed_tflops` (of each GPU, by the original's
    formula) give the times; with neither, the run's own `steps` as (iteration, seconds); with none
    of them, GPUs are assumed to reach what the 176B training reached. CPUs give no times then, nor
    do GPUs of an unknown kind, nor narrow models. `asked_attempts` is the length of an array whose
    share of the training is wanted.
    """
    model, count = card.model, flops.count_parameters(card)
    path = path_of(card)
    levels, iterations, trained = (
        path.batch_levels,
        path.total_iterations,
        path.end.consumed_samples,
    )
    stages = flops.stage_layout(card)
    files = flops.deepspeed_checkpoint_files(
        model.layers, card.parallel.tensor, card.parallel.pipeline, card.data_parallel_degree
    )
    most_files = flops.most_checkpoint_files(card.world_size)
    if card.checkpoint.format == "deepspeed":
        most_files = files.total
    full = card.batch.global_batch_size
    data_parallel = card.data_parallel_degree
    speed = _speed(
        card, path, given=seconds_per_iteration, given_tflops=assumed_tflops, steps=steps
    )
    return Estimate(
        run=card.run.name,
        variant=card.run.variant,
        card_hash=card.digest,
        world_size=card.world_size,
        tensor_parallel=card.parallel.tensor,
        pipeline_parallel=card.parallel.pipeline,
        data_parallel=data_parallel,
        parameters=count,
        stages=stages,
        busiest_stage_excess=flops.busiest_stage(card, stages)[0] if stages else None,
        iterations=iterations,
        ramp_iterations=sum(level.iterations for level in levels if level.batch_size < full),
        train_samples=card.batch.train_samples,
        trained_samples=trained,
        tokens=path.end.consumed_tokens,
        levels=levels,
        level_steps=tuple(_step_shape(card, level.batch_size) for level in levels),
        first_step=_step_shape(card, levels[0].batch_size),
        full_step=_step_shape(card, full),
        rates=_rate_points(card, path),
        model_flops_per_iteration=flops.model_flops(card, full),
        hardware_flops_per_iteration=flops.hardware_flops(card, full),
        total_model_flops=sum(
            flops.model_flops(
                card, segment.iterations * segment.batch_size, segment.sequence_length
            )
            for segment in path.segments
        ),
        weight_bytes=flops.weight_bytes(card, count.total),
        checkpoint_bytes=flops.checkpoint_bytes(card, count.total),
        checkpoint_files=files,
        checkpoint_format=card.checkpoint.format,
        checkpoint_files_at_most=most_files,
        checkpoints=iterations // card.checkpoint.interval if card.checkpoint.interval else None,
        training_bytes=flops.training_bytes(card, count.total, count.word_embedding),
        worker_state_bytes=_largest_worker(card, stages),
        worker_memory=memory_of(card),
        gpu_memory_gb=card.slurm.gpu_memory_gb,
        recomputed_blocks=recomputed_blocks(model),
        least_recomputed_blocks=least_recomputed(card),
        save_copy_bytes=_save_copy(card, count.total),
        attention=attention_of(card),
        gpus_per_node=card.slurm.gpus_per_node,
        gpu_is_unknown=gpu_is_unknown(card),
        duration=_duration(card, path, speed, asked_attempts),
        time_unknown="" if speed is not None else _why_no_speed(card),
        warnings=_warnings(card),
        first_loss=first_loss(card),
    )


def _warnings(card: OwnCard) -> tuple[str, ...]:
    """What a launch would warn of, or refuse for its memory."""
    memory = [str(check) for check in memory_checks(card) if check.level is not Level.OK]
    return (*map(str, card_warnings(exit_plan(card).applied(card))), *memory)


def _step_shape(card: OwnCard, batch: int) -> StepShape:
    micro_batches = card.batch.micro_batches(batch, card.data_parallel_degree)
    parallel = card.parallel
    bubble = flops.bubble_share(micro_batches, parallel.pipeline, parallel.virtual_stages)
    return StepShape(batch, micro_batches, bubble)


def _save_copy(card: OwnCard, parameters: int) -> int | None:
    """An asynchronous save copies the whole checkpoint first, each worker what it writes."""
    if not card.checkpoint.asynchronous or card.checkpoint.format == "deepspeed":
        return None
    return -(-flops.checkpoint_bytes(card, parameters) // card.slurm.nodes)


def _largest_worker(card: OwnCard, stages: tuple[flops.StageBlocks, ...] | None) -> int | None:
    if stages is None:
        return None
    table = card.tokenizer.padded_vocabulary_size * card.model.hidden_size // card.parallel.tensor
    return max(
        flops.worker_state_bytes(
            card,
            stage.parameters_per_worker,
            card.data_parallel_degree,
            word_embedding=table if stage.embedding or stage.head else 0,
        )
        for stage in stages
    )


def _rate_points(card: OwnCard, path: TrainingPath) -> tuple[RatePoint, ...]:
    """First step, end of warm-up and ramp, tenths of the training, end of the decay, end; in the
    order of the steps.
    """
    plan, end, levels = plan_of(card), path.end, path.batch_levels
    moments = {1: "first step", end.iteration: "end"}
    for tenth in range(2, 10, 2):
        step = path.after_samples(end.consumed_samples * tenth // 10).iteration
        moments.setdefault(max(1, step), f"{tenth}0 % of the samples")
    if levels[-1].first_iteration > 1:
        moments[levels[-1].first_iteration - 1] = "end of the batch ramp"
    if 0 < plan.warmup_samples < end.consumed_samples:
        moments[max(1, path.after_samples(plan.warmup_samples).iteration)] = "end of the warm-up"
    if plan.decay_style == "wsd":
        position = plan.decayed_at(path, plan.cooldown)
        if position.iteration < end.iteration:
            moments[max(1, position.iteration)] = "cooldown begins"
    if plan.decay_style != "constant":
        position = plan.decayed_at(path)
        if position.iteration < end.iteration:
            moments[max(1, position.iteration)] = "end of the decay"
    points = []
    for iteration in sorted(moments):
        position = path.after_iteration(iteration)
        rate = plan.at(position.consumed_samples, position.consumed_tokens)
        points.append(RatePoint(moments[iteration], iteration, position.consumed_samples, rate))
    return tuple(points)


def _speed(
    card: OwnCard,
    path: TrainingPath,
    given: float | None,
    given_tflops: float | None,
    steps: Iterable[tuple[int, float]],
) -> Speed | None:
    if given is not None:
        return Speed(given, f"{given:g} s per iteration, as given")
    if given_tflops is not None:
        return Speed(seconds_at(card, given_tflops), f"{given_tflops:g} TFLOPs per GPU, as given")
    return measured_speed(card, path, steps) or assumed_speed(card)


def _why_no_speed(card: OwnCard) -> str:
    if not card.slurm.gpus_per_node:
        return "the speed of CPUs is not known before the first steps"
    if gpu_is_unknown(card):
        return "the kind of GPU is unknown: set slurm.gpu_kind"
    return f"models of less than {NARROWEST:,} features were not measured"


def _duration(
    card: OwnCard, path: TrainingPath, speed: Speed | None, asked: int
) -> Duration | None:
    if speed is None:
        return None
    levels = _level_times(card, path, speed)
    total = sum(level.hours for level in levels) * 3600
    usable = attempt_seconds(card)
    attempts = max(1, math.ceil(total / usable))
    rate = seconds_at(card, 1.0) / speed.full
    count = flops.count_parameters(card).total
    thumb = (
        2
        * flops.passes(card.model)
        * count
        * path.end.consumed_tokens
        / (rate * 1e12 * card.world_size)
    )
    return Duration(
        basis=speed.basis,
        seconds_per_iteration=speed.full,
        tflops_per_gpu=rate,
        days=total / 86400,
        node_hours=total / 3600 * card.slurm.nodes,
        attempt_hours=usable / 3600,
        attempts=attempts,
        array=f"1-{attempts}%1",
        asked_attempts=asked,
        asked_days=min(asked * usable, total) / 86400,
        asked_share=min(1.0, asked * usable / total),
        levels=levels,
        ramp_hours=sum(
            level.hours for level in levels if level.batch_size < card.batch.global_batch_size
        ),
        rule_of_thumb_days=thumb / 86400,
    )


def _level_times(card: OwnCard, path: TrainingPath, speed: Speed) -> tuple[LevelTime, ...]:
    """One entry for each batch, whatever the lengths in it."""
    seconds = path_seconds(card, path, speed)
    found = []
    for batch, group in groupby(
        range(len(seconds)), key=lambda number: path.segments[number].batch_size
    ):
        numbers = list(group)
        steps = sum(path.segments[number].iterations for number in numbers)
        total = sum(path.segments[number].iterations * seconds[number] for number in numbers)
        work = sum(
            path.segments[number].iterations
            * flops.tflops_per_gpu(
                card,
                global_batch_size=batch,
                seconds=1.0,
                world_size=card.world_size,
                sequence_length=path.segments[number].sequence_length,
            )
            for number in numbers
        )
        is_measured = all(number in speed.measured for number in numbers)
        found.append(
            LevelTime(
                batch,
                steps,
                seconds_per_iteration=total / steps,
                hours=total / 3600,
                tflops_per_gpu=work / total,
                measured=is_measured,
            )
        )
    return tuple(found)


def attempt_seconds(card: RunCard) -> float:
    """Time of one attempt, at least a second: until its exit duration or its early signal,
    whichever comes first.
    """
    until_signal: float = card.time_limit_seconds - (card.slurm.signal_seconds_before_limit or 0)
    minutes = exit_plan(card).minutes
    return max(1.0, until_signal if minutes is None else min(until_signal, minutes * 60))
