"""Bytes of device memory that a worker needs at its peak, part by part, from the card alone. Free
of torch.

Counted is what the trainer's own code and DeepSpeed's keep and make; tests compare it with real
allocations. What no count can know, the driver's context and the communicators' buffers, is
`RESERVED`.
"""

from __future__ import annotations

from typing import Literal

from trainer.config.card import TrainerConfig
from trainer.config.kernel_choice import (
    SMALLEST_FLEX_HEAD,
    KernelName,
    recomputed_between,
    recomputed_part,
)
from trainer.config.model import sends_shares
from trainer.contract.record import Record
from trainer.schedule import flops
from trainer.schedule.flops import (
    PIECE_ELEMENTS,
    SOFTMAX_ELEMENTS,
    WIDENED_ELEMENTS,
    places_with_logits,
    tokens_at_the_end,
    tokens_between_layers,
)
from trainer.schedule.interleaving import held_counts, rounds

RESERVED = 2 << 30  # CUDA context, NCCL's buffers, the allocator's rounding: assumed
REDUCE_BUCKET = 1 << 26  # elements that DeepSpeed sums fp16 and fp32 gradients in


class MemoryPart(Record):
    """Bytes held at the peak, under a name for people."""

    name: str
    bytes: int


class WorkerMemory(Record):
    """The worker that needs most: one of stage `stage`, with micro batches of `micro_batch`
    samples.

    Parts that are made and freed within a step count where they stand beside the activations at
    their largest.
    """

    stage: int
    micro_batch: int
    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def largest(self) -> MemoryPart:
        return max(self.parts, key=lambda part: part.bytes)


class MemoryShape(Record):
    """What the memory of a training depends on. `attention`: the kernel in use."""

    card: TrainerConfig
    data_parallel: int
    attention: KernelName
    kind: Literal["cpu", "cuda"] = "cuda"

    @property
    def width(self) -> int:
        """Bytes of a number in the card's dtype."""
        if self.card.precision.dtype == "fp32":
            return 4
        return 2

    @property
    def table(self) -> int:
        """Elements of a worker's part of the word embedding."""
        card = self.card
        rows = card.tokenizer.padded_vocabulary_size
        return rows * card.model.hidden_size // card.parallel.tensor

    @property
    def stream(self) -> int:
        """Columns of the residual stream that a worker holds of each token: with sequence
        parallelism a share.
        """
        if self.card.parallel.sequence_parallel:
            return self.card.model.hidden_size // self.card.parallel.tensor
        return self.card.model.hidden_size

    @property
    def message(self) -> int:
        """The same of what it sends to another stage."""
        parallel, hidden = self.card.parallel, self.card.model.hidden_size
        cuts = sends_shares(
            parallel.pipeline, parallel.tensor, bool(parallel.sequence_parallel), hidden
        )
        if cuts:
            return hidden // parallel.tensor
        return self.stream


def worker_memory(shape: MemoryShape) -> WorkerMemory | None:
    """The peak over all stages and micro batches of the ramp; None where the stages are known to
    the engine alone.
    """
    stages = flops.stage_layout(shape.card)
    if stages is None:
        return None
    batch = shape.card.batch
    first = batch.ramp.start if batch.ramp else batch.global_batch_size
    levels = {
        first,
        batch.global_batch_size,
        *(entry.from_batch for entry in batch.micro_batch_ramp),
    }
    if batch.ramp and shape.card.parallel.virtual_stages > 1:
        levels |= _largest_rounds(
            shape, range(first, batch.global_batch_size, batch.ramp.increment)
        )
    every = [stage_memory(shape, stage, level) for stage in stages for level in levels]
    return max(every, key=lambda memory: memory.total)


def _largest_rounds(shape: MemoryShape, levels: range) -> set[int]:
    """For each size of micro batches the level of the batch ramp whose rounds are largest."""
    found: dict[int, tuple[int, int]] = {}
    for level in levels:
        size, count = (
            shape.card.batch.micro_batch_at(level),
            shape.card.batch.micro_batches(level, shape.data_parallel),
        )
        largest = rounds(max(1, count), shape.card.parallel.pipeline)[0]
        found[size] = max(found.get(size, (0, 0)), (largest, level))
    return {level for _, level in found.values()}


def stage_memory(shape: MemoryShape, stage: flops.StageBlocks, global_batch: int) -> WorkerMemory:
    """The peak of one stage's workers, where the global batch is `global_batch`."""
    size = shape.card.batch.micro_batch_at(global_batch)
    micro_batches = max(1, shape.card.batch.micro_batches(global_batch, shape.data_parallel))
    activations, working = (
        _activations(shape, stage, size, micro_batches),
        _working(shape, stage, size),
    )
    transient = (MemoryPart("activations", activations), *working)
    step = _step(shape, stage)
    if sum(part.bytes for part in transient) < sum(part.bytes for part in step):
        transient = step
    parts = (*_state(shape, stage), *transient, *_fixed(shape, size, micro_batches))
    return WorkerMemory(stage.index, size, tuple(part for part in parts if part.bytes))


# ----------------------------------------------------------------------------- what stays
def _state(shape: MemoryShape, stage: flops.StageBlocks) -> tuple[MemoryPart, ...]:
    count, replicas = stage.parameters_per_worker, shape.data_parallel
    table = 0
    if stage.embedding or (stage.head and shape.card.model.tied_embeddings):
        table = shape.table
    moments = flops.moment_bytes(shape.card, count, table)
    gradients = 2 if shape.card.precision.dtype == "fp16" else flops.GRADIENT_BYTES
    return (
        MemoryPart("weights", count * shape.width),
        MemoryPart("gradients", count * gradients),
        MemoryPart("fp32 master weights", -(-count * flops.MASTER_BYTES // replicas)),
        MemoryPart("moments", -(-moments // replicas)),
        MemoryPart("gradient bucket", _bucket(shape, stage)),
    )


def _fixed(shape: MemoryShape, size: int, micro_batches: int) -> tuple[MemoryPart, ...]:
    model, length, parallel = (
        shape.card.model,
        shape.card.model.sequence_length,
        shape.card.parallel,
    )
    count = 3 if parallel.pipeline > 1 else 0
    if parallel.virtual_stages > 1:  # asked for ahead, and sent but not yet taken
        count += (
            2 + rounds(micro_batches, parallel.pipeline)[0] - min(micro_batches, parallel.pipeline)
        )
    messages = count * size * length * shape.message * shape.width
    bias = 0
    if shape.attention in ("dense", "efficient", "math") and model.position_embedding == "alibi":
        bias = model.attention_heads // shape.card.parallel.tensor * length * length * shape.width
    reserved = RESERVED if shape.kind == "cuda" else 0
    return (
        MemoryPart("attention bias", bias),
        MemoryPart("messages", messages),
        MemoryPart("context, NCCL (assumed)", reserved),
    )


# ----------------------------------------------------------------------------- activations
def _activations(
    shape: MemoryShape, stage: flops.StageBlocks, size: int, micro_batches: int
) -> int:
    """What is kept for the backward pass, of all micro batches that a 1F1B pipeline has on the way."""
    parts = len(stage.parts)
    each = [_part_activations(shape, stage, size, part) for part in range(parts)]
    moments = held_counts(micro_batches, shape.card.parallel.pipeline, parts, stage.index)
    return max(sum(map(int.__mul__, counts, each)) for counts in moments)


def _part_activations(shape: MemoryShape, stage: flops.StageBlocks, size: int, part: int) -> int:
    """What one micro batch keeps in a part of a stage."""
    model, length = shape.card.model, shape.card.model.sequence_length
    tokens, last = (
        size * tokens_between_layers(model, length),
        size * tokens_at_the_end(model, length),
    )
    unit = tokens * shape.stream * shape.width  # the residual stream of one micro batch
    kept = tokens * model.hidden_size * shape.width
    if shape.card.parallel.sequence_parallel or model.partition_activations:
        kept //= shape.card.parallel.tensor
    head, embedding = stage.head and part == len(stage.parts) - 1, stage.embedding and part == 0
    own = tokens * shape.message  # the part's output
    if head:
        own = last * shape.stream
    ends = own * shape.width
    if embedding:
        if model.embedding_layernorm:
            ends += unit
        if model.hidden_dropout > 0.0:
            ends += tokens * shape.stream
    if head:
        ends += last * model.hidden_size * shape.width  # the final LayerNorm's output
        if model.family == "bert":  # of the words' head: dense layer, GELU, LayerNorm
            ends += 3 * unit
    tokens = size * length
    outside = _outside_attention(shape, tokens)
    held = {
        "nothing": outside + _inside_attention(shape, tokens, length),
        "attention": outside,
        "block": kept,
    }
    if model.has_decoder:
        decoder = zip(held.items(), _decoder(shape, size, kept), strict=True)
        held = {kind: bytes_ + more for (kind, bytes_), more in decoder}
    first, blocks = stage.parts[part]
    recomputed = recomputed_between(model, first, blocks)
    kind = "attention" if model.recompute_granularity == "selective" else "block"
    return recomputed * held[kind] + (blocks - recomputed) * held["nothing"] + ends


def _decoder(shape: MemoryShape, size: int, kept: int) -> tuple[int, int, int]:
    """What a decoder's block keeps, and an encoder's more: recomputed not at all, in attention's
    inner part, wholly.

    `kept`: both sides of the residual stream. Each block hands on a copy of the side that it leaves
    alone.
    """
    model, parts = shape.card.model, shape.card.parallel.tensor
    text, answer = size * model.sequence_length, size * model.decoder_sequence_length
    heads = model.attention_width
    cross = answer * (2 * shape.stream + 2 * heads // parts) + text * 2 * heads // parts
    cross = cross * shape.width + 2 * answer * 4
    if model.hidden_dropout > 0.0:
        cross += answer * shape.stream
    outside = _outside_attention(shape, answer) + cross + kept
    inside = _inside_attention(shape, answer, model.decoder_sequence_length)
    inside += _inside_attention(shape, answer, model.sequence_length)
    return outside + inside, outside, kept


def _outside_attention(shape: MemoryShape, tokens: int) -> int:
    """What one block keeps of so many tokens outside of what lies between attention's two
    projections, with the results of both.
    """
    model, parts = shape.card.model, shape.card.parallel.tensor
    cut = model.fused_width + model.attention_width + model.up_width + model.ffn
    columns = 4 * shape.stream + cut // parts
    kept = tokens * columns * shape.width
    if model.hidden_dropout > 0.0:
        kept += 2 * tokens * shape.stream
    statistics = 4 if model.norm == "layernorm" else 2
    return kept + statistics * tokens * 4  # of both norms, fp32


def _inside_attention(shape: MemoryShape, tokens: int, keys: int) -> int:
    """What one block keeps of so many tokens between attention's projections. `keys`: what each
    token attends to.
    """
    model, parts = shape.card.model, shape.card.parallel.tensor
    heads, keys_width = model.attention_width, model.key_width
    is_grouped = keys_width != heads
    columns = 0
    if model.position_embedding == "rotary" or model.qk_norm:
        columns = (heads + keys_width) // parts
    if is_grouped and (model.qk_norm or not columns):
        # queries, taken out of their groups: what the norm reads, or attention itself
        columns += heads // parts
    if is_grouped and shape.attention == "efficient":
        columns += 2 * heads // parts  # keys and values, repeated for each head
    passes = 1
    if shape.attention == "flex" and model.attention_dropout > 0.0:
        passes = 2
        # values as they were mixed, before they are scaled; and the few that the second pass mixes
        columns += (heads + SMALLEST_FLEX_HEAD * model.attention_heads) // parts
    if shape.kind == "cpu":
        columns += heads // parts  # strips are joined to a second copy of the mixed values
    kept = tokens * columns * shape.width
    # statistics of the soft-max, fp32
    kept += 4 * tokens * (model.attention_heads // parts) * passes
    if model.qk_norm:
        kept += 4 * tokens * ((model.attention_heads + model.groups) // parts)
    if shape.attention == "math":
        score = shape.width
        if model.attention_dropout != 0.0:
            score += shape.width + 1
        kept += score * (tokens * keys * model.attention_heads // parts)
    return kept


# ----------------------------------------------------------------------------- what comes and goes
def _working(shape: MemoryShape, stage: flops.StageBlocks, size: int) -> tuple[MemoryPart, ...]:
    """The largest of what stands beside all activations, and what the tied head holds meanwhile."""
    model, length = shape.card.model, shape.card.model.sequence_length
    tokens = size * length
    up = model.up_width
    matrix = model.hidden_size * max(up, model.fused_width) // shape.card.parallel.tensor
    block = _handed_over(shape, matrix)
    if shape.card.precision.float8:  # the weight, rounded
        block += matrix
    block += (
        tokens * shape.width * (3 * shape.stream + (model.ffn + up) // shape.card.parallel.tensor)
    )
    # A recomputed block before the last one takes the place of one whose backward pass is over.
    last = recomputed_part(model, sum(stage.parts[-1]) - 1)
    outside, inside = _outside_attention(shape, tokens), _inside_attention(shape, tokens, length)
    block += {"nothing": 0, "attention": inside, "block": outside + inside}[last]
    # gradients of both sides, and of the encoder's result, which all blocks of the decoder add to
    if model.has_decoder:
        block += (
            size * (2 * tokens_between_layers(model, length) + length) * shape.stream * shape.width
        )
    if shape.card.parallel.sequence_parallel:
        # Whole sequences: what is gathered, its gradient, copies of both for the collectives, of
        # which the last may not be freed yet, and the head's.
        block += 7 * tokens * model.hidden_size * shape.width
    found = [MemoryPart("one block's backward pass", block)]
    waiting = 0
    if stage.head:
        at_the_end = size * tokens_at_the_end(model, length)
        found.append(MemoryPart("logits and their gradients", _head(shape, at_the_end)))
        if stage.embedding and model.tied_embeddings:
            waiting = shape.table * shape.width  # until the embedding's own gradient comes
    if stage.embedding:
        found.append(MemoryPart("the embedding's gradient", _handed_over(shape, shape.table)))
    largest = max(found, key=lambda part: part.bytes)
    return largest, MemoryPart("the head's share of the embedding's gradient", waiting)


def _handed_over(shape: MemoryShape, elements: int) -> int:
    """A gradient as autograd makes it; on CPUs bf16's is widened in strips, to be added to the
    accumulated ones.
    """
    widened = 0
    if shape.card.precision.dtype == "bf16" and shape.kind == "cpu":
        widened = min(elements, WIDENED_ELEMENTS) * 4
    if shape.width == 4:
        return 0
    return elements * 2 + widened


def _head(shape: MemoryShape, tokens: int) -> int:
    rows = shape.card.tokenizer.padded_vocabulary_size // shape.card.parallel.tensor
    every, tokens = tokens, places_with_logits(shape.card, tokens)
    height = min(tokens, max(1, PIECE_ELEMENTS[shape.kind] // rows))
    strip = max(1, SOFTMAX_ELEMENTS[shape.kind] // rows)
    soft = min(height, strip) * rows * 4
    strips = soft
    if shape.width < 4:
        strips *= 2
    # what is compiled takes whole strips
    if shape.kind == "cpu":
        held = height
    else:
        held = -(-height // strip) * strip
    # Logits, and hidden states of which those not counted are zero.
    piece = (held * rows + height * shape.card.model.hidden_size) * shape.width
    # the weight's gradient
    made = shape.table * (4 if shape.card.precision.dtype == "fp16" else shape.width)
    # of one piece, or further ones are added as they are made
    if height >= tokens or shape.width == 4:
        pieces = piece + made + strips
    else:  # summed in fp32; beside it the first piece's, when the second one's comes
        pieces = piece + shape.table * 4 + max(strips, made + _handed_over(shape, shape.table))
    hidden = tokens * shape.card.model.hidden_size * shape.width
    if tokens < every:  # from which they were gathered
        hidden += every * shape.card.model.hidden_size * shape.width
    return hidden + max(pieces, _handed_over(shape, shape.table))


def _step(shape: MemoryShape, stage: flops.StageBlocks) -> tuple[MemoryPart, ...]:
    """What the update makes when no activation is left. bf16's is in place."""
    if shape.card.precision.dtype == "bf16":
        return ()
    share = -(-stage.parameters_per_worker // shape.data_parallel)
    return (MemoryPart("copies of gradients for the update", share * (shape.width + 4)),)


def _bucket(shape: MemoryShape, stage: flops.StageBlocks) -> int:
    """What fp16 and fp32 gradients are summed in, fp16 widened; bf16's are summed where they are."""
    if shape.card.precision.dtype == "bf16":
        return 0
    return min(stage.parameters_per_worker, REDUCE_BUCKET) * (
        shape.width if shape.width == 4 else 2 + 4
    )
