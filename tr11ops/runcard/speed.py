"""How long a step takes: by the kind of GPU before anything was measured, and of one batch by that
of another; and a card as the GPUs that it will run on complete it. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from tr11ops.cluster.base import Node
from tr11ops.runcard.card import OwnCard
from trainer.contract.record import Record
from trainer.schedule import flops
from trainer.schedule.path import Segment, TrainingPath

if TYPE_CHECKING:
    from trainer.schedule.devices import DevicePeak


class RunHistory(Record):
    """Measured times, in seconds; None where the run has no record of it.

    `step`: the median of the recent ones, at `step_iteration` (the last that was logged). `save`
    and `evaluation`: the longest. A save that runs beside the training is timed from its begin to
    its end; `usual_save` is the median of these, `stall` of how long the steps stood still for one.
    `start`: the shortest time from a launch's begin to the end of its first step.
    """

    step: float | None = None
    step_iteration: int | None = None
    save: float | None = None
    usual_save: float | None = None
    stall: float | None = None
    evaluation: float | None = None
    start: float | None = None

    def or_else(self, before: RunHistory) -> RunHistory:
        """With what was measured `before` in the place of what this has no record of."""
        measured = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(before, **measured)


# What the 176B training reached on A100-80GB, by its own formula. Other kinds are taken to reach
# the same share.
A100_TFLOPS = 149.0
REACHED_SHARE = A100_TFLOPS / 312.0
# It was measured on models of 2,048 features and more; one of 1,024 features (24 layers) reached
# less on an H100: 363 to 396 TFLOPs of 989. Of narrower ones nothing is known: their products are
# too small for a GPU, and what is done beside them decides (4 layers of 128 features took 3 to 4
# hours on 4 T4, where 48 % of the peak would be 9 minutes).
WIDE, NARROWEST = 2048, 1024
NARROW_SHARE = 0.38
# The part of a step that no batch changes: gradients are reduced over the replicas' nodes, the
# optimizer steps. Measured there: 15.2 s at a batch of 16 (1 micro batch) and 105.2 s at 2048
# (128), on 12 stages, leave 6.7 s; with it the step at 192 in single samples comes out at its
# measured 73 TFLOPs.
REDUCTION_SECONDS_PER_PARAMETER = 2.09e-9
LARGEST_FIXED_SHARE = 0.5
LEAST_STEPS = 3  # of a level, before their median counts


class Speed(Record):
    """Seconds of a step of the full batch and length, and of those segments that were measured, by
    their number.

    `basis` says what it rests on.
    """

    full: float
    basis: str
    measured: Mapping[int, float] = {}


def gpu_of(card: OwnCard) -> DevicePeak | None:
    """The kind of GPU that the card names: `slurm.gpu_kind`, its `--gres`, else a word of
    constraint or partition.
    """
    from tr11ops.cluster.sbatch_options import gpu_kind_asked, options_of
    from trainer.schedule.devices import device_peak

    slurm = card.slurm
    asked = gpu_kind_asked(options_of(slurm.options))
    found = (
        device_peak(text)
        for text in (slurm.gpu_kind, asked, slurm.constraint, slurm.partition)
        if text
    )
    return next((peak for peak in found if peak is not None), None)


def assumed_rate(card: OwnCard) -> tuple[float, str] | None:
    """TFLOPs of each GPU before anything was measured, and what that rests on.

    None without GPUs of a known kind, and for a model that is narrower than any that was measured.
    """
    gpu = None
    if card.slurm.gpus_per_node:
        gpu = gpu_of(card)
    if gpu is None or card.model.hidden_size < NARROWEST:
        return None
    peak = gpu.fp32 if card.precision.dtype == "fp32" else gpu.fp16
    share = REACHED_SHARE if card.model.hidden_size >= WIDE else NARROW_SHARE
    rate = round(share * peak, 1)
    return rate, f"{rate:g} TFLOPs per GPU, assumed ({gpu.name})"


def seconds_at(card: OwnCard, rate: float) -> float:
    """Seconds of a step of the full batch when each worker does `rate` TFLOPs."""
    batch, workers = card.batch.global_batch_size, card.world_size
    return flops.tflops_per_gpu(card, batch, seconds=1.0, world_size=workers) / rate


def assumed_speed(card: OwnCard) -> Speed | None:
    """The speed of a card before anything was measured; None where no rate can be assumed."""
    found = assumed_rate(card)
    if found:
        return Speed(seconds_at(card, found[0]), found[1])
    return None


def fixed_share(card: OwnCard) -> float:
    """The part of a full step that does not shrink with the batch; 0 where no gradient crosses
    nodes.
    """
    replicas = card.data_parallel_degree
    if not card.slurm.gpus_per_node or card.slurm.nodes < 2 or replicas < 2:
        return 0.0
    stages = flops.stage_layout(card)
    if stages is not None:
        each = float(max(stage.parameters_per_worker for stage in stages))
    else:
        total = flops.count_parameters(card).total
        each = total / (card.parallel.tensor * card.parallel.pipeline)
    seconds = REDUCTION_SECONDS_PER_PARAMETER * each * (replicas - 1) / replicas
    return min(LARGEST_FIXED_SHARE, seconds / seconds_at(card, A100_TFLOPS))


def step_weights(card: OwnCard, segments: Iterable[Segment]) -> list[float]:
    """What a step of each segment takes, against one of the full batch and length.

    A 1F1B pipeline's slots are counted, micro batches and stages to fill; a slot of fewer or
    shorter samples takes their share of the operations. What is done once a step is added.
    """
    full = _slots(card, card.batch.global_batch_size)
    fixed, operations = fixed_share(card), flops.hardware_flops(card, 1)
    weights = []
    for segment in segments:
        work = flops.hardware_flops(card, 1, segment.sequence_length) / operations
        weights.append(fixed + (1 - fixed) * _slots(card, segment.batch_size) / full * work)
    return weights


def _slots(card: OwnCard, batch: int) -> int:
    """How long the pipeline takes for a step of `batch`, in passes of one sample through one part
    of a stage.
    """
    micro_batches, parts = (
        card.batch.micro_batches(batch, card.data_parallel_degree),
        card.parallel.virtual_stages,
    )
    idle = flops.idle_passes(micro_batches, card.parallel.pipeline, parts)
    return (parts * micro_batches + idle) * card.batch.micro_batch_at(batch)


def measured_speed(
    card: OwnCard, path: TrainingPath, steps: Iterable[tuple[int, float]]
) -> Speed | None:
    """What a run's own steps, as (iteration, seconds), say of the whole path; None where there are
    too few.

    Each segment with steps in it has their median. The rest follows from the last one that has.
    """
    ends = [segment.end.iteration for segment in path.segments]
    found: list[list[float]] = [[] for _ in ends]
    for iteration, seconds in steps:
        if path.start.iteration < iteration <= path.end.iteration and seconds > 0:
            found[bisect_left(ends, iteration)].append(seconds)
    measured = {
        number: median(values) for number, values in enumerate(found) if len(values) >= LEAST_STEPS
    }
    if not measured:
        return None
    last = max(measured)
    (weight,) = step_weights(card, [path.segments[last]])
    count = sum(len(found[number]) for number in measured)
    basis = f"{count:,} steps of this run, up to a batch of {path.segments[last].batch_size:,}"
    return Speed(measured[last] / weight, basis, measured)


def path_seconds(card: OwnCard, path: TrainingPath, speed: Speed) -> list[float]:
    """Seconds of one step of each segment of `path`: as measured, else from the full step."""
    weights = step_weights(card, path.segments)
    return [
        speed.measured.get(number, speed.full * weight) for number, weight in enumerate(weights)
    ]


def with_gpus_of(card: OwnCard, nodes: Iterable[Node]) -> OwnCard:
    """The card with kind and memory of these nodes' GPUs, where it does not name them and they are
    all alike.
    """
    there = [node for node in nodes if node.gpus >= max(1, card.slurm.gpus_per_node)]
    if not card.slurm.gpus_per_node or not there:
        return card
    from trainer.schedule.devices import device_peak

    found: dict[str, object] = {}
    kinds = {node.gpu_kind for node in there}
    kind = ""
    if len(kinds) == 1:
        kind = kinds.pop()
    if gpu_of(card) is None and device_peak(kind) is not None:
        found["gpu_kind"] = kind
    memory = min(node.gpu_memory_megabytes for node in there)
    if card.slurm.gpu_memory_gb is None and memory:
        found["gpu_memory_gb"] = memory_gb(memory)
    if found:
        return card.model_copy(update={"slurm": card.slurm.model_copy(update=found)})
    return card


def memory_gb(megabytes: int) -> float:
    """`slurm.gpu_memory_gb` of a GPU with so many MiB: rounded down."""
    return math.floor(megabytes / 1024 * 10) / 10
