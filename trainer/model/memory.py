"""Bytes of device memory that a worker needs at its peak, part by part, from the card alone. Free of torch.

Counted is what the trainer's own code and DeepSpeed's keep and make; tests compare it with real allocations. What no
count can know, the driver's context and the communicators' buffers, is `RESERVED`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config_data import BatchSection
from trainer.config_model import ModelSection, OptimizerSection, ParallelSection, PrecisionSection
from trainer.model import flops
from trainer.model.kernel_choice import KernelName
from trainer.model.pieces import PIECE_ELEMENTS, SOFTMAX_ELEMENTS
from trainer.model.recompute_choice import recomputed_between, recomputed_part

RESERVED = 2 << 30  # CUDA context, NCCL's buffers, the allocator's rounding: assumed
REDUCE_BUCKET = 1 << 26  # elements that DeepSpeed sums fp16 and fp32 gradients in


@dataclass(frozen=True)
class Part:
    """Bytes held at the peak, under a name for people."""

    name: str
    bytes: int


@dataclass(frozen=True)
class WorkerMemory:
    """The worker that needs most: one of stage `stage`, with micro batches of `micro_batch` samples.

    Parts that are made and freed within a step count where they stand beside the activations at their largest.
    """

    stage: int
    micro_batch: int
    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: part.bytes)


@dataclass(frozen=True)
class Shape:
    """What the memory of a training depends on. `vocabulary`: padded. `attention`: the kernel in use."""

    model: ModelSection
    parallel: ParallelSection
    batch: BatchSection
    precision: PrecisionSection
    optimizer: OptimizerSection
    vocabulary: int
    data_parallel: int
    attention: KernelName
    kind: Literal["cpu", "cuda"] = "cuda"

    @property
    def width(self) -> int:
        """Bytes of a number in the card's dtype."""
        return 4 if self.precision.dtype == "fp32" else 2

    @property
    def mask(self) -> int:
        """Bytes of an element of a dropout mask."""
        return 1 if self.kind == "cuda" else self.width

    @property
    def table(self) -> int:
        """Elements of a worker's part of the word embedding."""
        return self.vocabulary * self.model.hidden_size // self.parallel.tensor

    @property
    def stream(self) -> int:
        """Columns of the residual stream that a worker holds of each token: with sequence parallelism a share."""
        return self.model.hidden_size // (self.parallel.tensor if self.parallel.sequence_parallel else 1)


def worker_memory(shape: Shape) -> WorkerMemory | None:
    """The peak over all stages and micro batches of the ramp; None where the stages are known to the engine alone."""
    stages = flops.stage_layout(shape.model, shape.parallel, shape.vocabulary)
    if stages is None:
        return None
    batch = shape.batch
    first = batch.ramp.start if batch.ramp else batch.global_batch_size
    levels = [first, batch.global_batch_size, *(entry.from_batch for entry in batch.micro_batch_ramp)]
    every = [stage_memory(shape, stage, level) for stage in stages for level in levels]
    return max(every, key=lambda memory: memory.total)


def stage_memory(shape: Shape, stage: flops.Stage, global_batch: int) -> WorkerMemory:
    """The peak of one stage's workers, where the global batch is `global_batch`."""
    size = shape.batch.micro_batch_at(global_batch)
    micro_batches = max(1, shape.batch.micro_batches(global_batch, shape.data_parallel))
    in_flight = min(micro_batches, shape.parallel.pipeline - stage.index)
    activations, working = _activations(shape, stage, size, in_flight), _working(shape, stage, size)
    transient = (Part("activations", activations), *working)
    step = _step(shape, stage)
    if sum(part.bytes for part in transient) < sum(part.bytes for part in step):
        transient = step
    parts = (*_state(shape, stage), *transient, *_fixed(shape, size))
    return WorkerMemory(stage.index, size, tuple(part for part in parts if part.bytes))


# ----------------------------------------------------------------------------- what stays
def _state(shape: Shape, stage: flops.Stage) -> tuple[Part, ...]:
    count, replicas = stage.parameters_per_worker, shape.data_parallel
    table = shape.table if stage.embedding or stage.head else 0
    moments = flops.moment_bytes(count, shape.optimizer, table)
    gradients = 2 if shape.precision.dtype == "fp16" else flops.GRADIENT_BYTES
    return (
        Part("weights", count * shape.width),
        Part("gradients", count * gradients),
        Part("fp32 master weights", -(-count * flops.MASTER_BYTES // replicas)),
        Part("moments", -(-moments // replicas)),
        Part("gradient bucket", _bucket(shape, stage)),
    )


def _fixed(shape: Shape, size: int) -> tuple[Part, ...]:
    model, length = shape.model, shape.model.sequence_length
    messages = 3 * size * length * shape.stream * shape.width if shape.parallel.pipeline > 1 else 0
    bias = 0
    if shape.attention in ("dense", "efficient", "math") and model.position_embedding == "alibi":
        bias = model.attention_heads // shape.parallel.tensor * length * length * shape.width
    reserved = RESERVED if shape.kind == "cuda" else 0
    return Part("attention bias", bias), Part("messages", messages), Part("context, NCCL (assumed)", reserved)


# ----------------------------------------------------------------------------- activations
def _activations(shape: Shape, stage: flops.Stage, size: int, in_flight: int) -> int:
    """What waits for the backward pass, of all micro batches that a 1F1B pipeline has on the way."""
    model, tokens = shape.model, size * shape.model.sequence_length
    unit = tokens * shape.stream * shape.width  # the residual stream of one micro batch
    kept = tokens * model.hidden_size * shape.width
    if shape.parallel.sequence_parallel or model.partition_activations:
        kept //= shape.parallel.tensor
    ends = unit  # the stage's own output
    if stage.embedding:
        ends += unit if model.embedding_layernorm else 0
        ends += tokens * shape.stream * shape.mask if model.hidden_dropout > 0.0 else 0
    if stage.head:
        ends += tokens * model.hidden_size * shape.width  # the final LayerNorm's output
    held = {"nothing": _block(shape, size), "attention": _outside_attention(shape, size), "block": kept}
    recomputed = recomputed_between(model, stage.first_block, stage.blocks)
    part = "attention" if model.recompute_granularity == "selective" else "block"
    return in_flight * (recomputed * held[part] + (stage.blocks - recomputed) * held["nothing"] + ends)


def _block(shape: Shape, size: int) -> int:
    """What one block keeps of one micro batch without recomputation."""
    return _outside_attention(shape, size) + _inside_attention(shape, size)


def _outside_attention(shape: Shape, size: int) -> int:
    """Of it, what does not lie between attention's two projections, with the results of both."""
    model, parts = shape.model, shape.parallel.tensor
    tokens = size * model.sequence_length
    heads = flops.attention_width(model)
    columns = 4 * shape.stream + (3 * heads + heads + 2 * model.ffn) // parts
    kept = tokens * columns * shape.width
    if model.hidden_dropout > 0.0:
        kept += 2 * tokens * shape.stream * shape.mask
    return kept + 4 * tokens * 4  # statistics of LayerNorms, fp32


def _inside_attention(shape: Shape, size: int) -> int:
    """What one block keeps between attention's projections, of one micro batch without recomputation."""
    model, parts = shape.model, shape.parallel.tensor
    tokens = size * model.sequence_length
    heads = flops.attention_width(model)
    columns = 2 * heads // parts if model.position_embedding == "rotary" else 0
    if shape.kind == "cpu":
        columns += heads // parts  # strips are joined to a second copy of the mixed values
    kept = tokens * columns * shape.width
    kept += 4 * tokens * (model.attention_heads // parts)  # statistics of the soft-max, fp32
    if shape.attention == "math":
        scores = tokens * model.sequence_length * model.attention_heads // parts
        kept += scores * (shape.width if model.attention_dropout == 0.0 else 2 * shape.width + 1)
    return kept


# ----------------------------------------------------------------------------- what comes and goes
def _working(shape: Shape, stage: flops.Stage, size: int) -> tuple[Part, ...]:
    """The largest of what stands beside all activations, and what the tied head holds meanwhile."""
    model, tokens = shape.model, size * shape.model.sequence_length
    matrix = model.hidden_size * max(model.ffn, 3 * flops.attention_width(model)) // shape.parallel.tensor
    block = _handed_over(shape, matrix)
    block += tokens * shape.width * (3 * shape.stream + 2 * model.ffn // shape.parallel.tensor)
    # A recomputed block before the last one takes the place of one whose backward pass is over.
    last = recomputed_part(model, stage.first_block + stage.blocks - 1)
    block += {"nothing": 0, "attention": _inside_attention(shape, size), "block": _block(shape, size)}[last]
    if shape.parallel.sequence_parallel:
        # Whole sequences: what is gathered, its gradient, copies of both for the collectives, of which the last may not
        # be freed yet, and the head's.
        block += 7 * tokens * model.hidden_size * shape.width
    found = [Part("one block's backward pass", block)]
    waiting = 0
    if stage.head:
        found.append(Part("logits and their gradients", _head(shape, tokens)))
        waiting = shape.table * shape.width if stage.embedding else 0  # until the embedding's own gradient comes
    if stage.embedding:
        found.append(Part("the embedding's gradient", _handed_over(shape, shape.table)))
    largest = max(found, key=lambda part: part.bytes)
    return largest, Part("the head's share of the embedding's gradient", waiting)


def _handed_over(shape: Shape, elements: int) -> int:
    """A gradient as autograd makes it; in bf16 beside its fp32 form, which is added to the accumulated ones."""
    return elements * (2 + 4 if shape.precision.dtype == "bf16" else 0 if shape.width == 4 else 2)


def _head(shape: Shape, tokens: int) -> int:
    rows = shape.vocabulary // shape.parallel.tensor
    height = min(tokens, max(1, PIECE_ELEMENTS[shape.kind] // rows))
    soft = min(height, max(1, SOFTMAX_ELEMENTS[shape.kind] // rows)) * rows * 4
    pieces = height * rows * shape.width + (2 * soft if shape.width < 4 else soft)
    pieces += height * shape.model.hidden_size * shape.width  # hidden states, those that do not count zero
    made = shape.table * (4 if shape.precision.dtype == "fp16" else shape.width)  # the weight's gradient
    if height < tokens and shape.width < 4:
        pieces += shape.table * (4 + shape.width)  # summed over pieces in fp32; each piece's own
    hidden = tokens * shape.model.hidden_size * shape.width
    return hidden + max(made + pieces, _handed_over(shape, shape.table))


def _step(shape: Shape, stage: flops.Stage) -> tuple[Part, ...]:
    """What the update makes when no activation is left. bf16's is in place."""
    if shape.precision.dtype == "bf16":
        return ()
    share = -(-stage.parameters_per_worker // shape.data_parallel)
    return (Part("copies of gradients for the update", share * (shape.width + 4)),)


def _bucket(shape: Shape, stage: flops.Stage) -> int:
    """What fp16 and fp32 gradients are summed in, fp16 widened; bf16's are summed where they are."""
    if shape.precision.dtype == "bf16":
        return 0
    return min(stage.parameters_per_worker, REDUCE_BUCKET) * (shape.width if shape.width == 4 else 2 + 4)
