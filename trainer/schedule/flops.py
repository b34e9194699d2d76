"""Sizes and costs of a model, from its card alone: parameters, FLOPs, bytes, files. Free of torch.

Formulas: Megatron-DeepSpeed's, as the BLOOM training used them. V padded vocabulary, h hidden, f feed-forward,
s sequence, L layers, B batch. Of a T5 every multiplication is counted, on the side where it is made.

At its ends a family has, beside the tied table and the last LayerNorm, of BERT: 2 h of token types;
heads with a dense layer h^2 + h and a LayerNorm 2 h, a bias of each word V, a pooler h^2 + h and an
order of sentences 2 h + 2. Of T5: the encoder's LayerNorm 2 h, a bias of each word V.
"""

from __future__ import annotations

from itertools import pairwise

from trainer.config.card import ModelSection, OptimizerSection, TrainerConfig
from trainer.config.kernel_choice import recomputed_between, recomputed_blocks
from trainer.config.model import units_of
from trainer.contract.record import Record

# Logits (in the model's dtype), and of these in fp32 for the soft-max. Sized for caches on the CPU.
# On a GPU for as few sums of the weight's gradient as possible: each reads and writes all of it,
# which is as much as 5 GB of logits.
PIECE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 31}
SOFTMAX_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
WIDENED_ELEMENTS = 1 << 17  # widened at a time on a CPU: 512 KiB, which stay in a processor's cache


TOKEN_TYPES = 2
# the places of a micro batch's masked tokens are filled up to a multiple of this: few shapes come
# up
PLACES = 64


class ModelEnds(Record):
    """Parameters: `token_types` at the first stage; at the last one `head`, and `cut_head`, which
    tensor parallelism divides. `dense`: of `head`, the elements of the matrices that every token
    passes.
    """

    token_types: int = 0
    head: int = 0
    cut_head: int = 0
    dense: int = 0


def ends_of(card: TrainerConfig) -> ModelEnds:
    """The ends of this model."""
    model, vocabulary = card.model, card.tokenizer.padded_vocabulary_size
    hidden = model.hidden_size
    if model.has_decoder:
        return ModelEnds(head=2 * hidden, cut_head=vocabulary)
    if model.family != "bert":
        return ModelEnds()
    return ModelEnds(
        token_types=TOKEN_TYPES * hidden,
        head=2 * (hidden**2 + hidden) + 2 * hidden + 2 * hidden + 2,
        cut_head=vocabulary,
        dense=hidden**2,
    )


def tokens_between_layers(model: ModelSection, length: int) -> int:
    """Tokens of a sample that go from layer to layer: of both sides, where there is a decoder."""
    if model.has_decoder:
        return length + model.decoder_sequence_length
    return length


def tokens_at_the_end(model: ModelSection, length: int) -> int:
    """Tokens of a sample that reach the model's end: the decoder's, where there is one."""
    if model.has_decoder:
        return model.decoder_sequence_length
    return length


def predicted_tokens(card: TrainerConfig, tokens: int) -> int:
    """Of so many tokens those that have logits: of a BERT's those that are masked."""
    if card.model.family == "bert":
        return max(1, round(tokens * card.data.mask_probability))
    return tokens


def places_with_logits(card: TrainerConfig, tokens: int) -> int:
    """Of a micro batch of so many tokens the places that logits are made of."""
    predicted = predicted_tokens(card, tokens)
    if predicted < tokens:
        return min(tokens, -(-predicted // PLACES) * PLACES)
    return tokens


ADAM_BYTES = 8  # two fp32 moments of each parameter
BLOCK_OF_CODES = 256  # moments in 8 bits: parameters that share an fp32 scale
MASTER_BYTES = 4  # fp32 copy of each parameter
GRADIENT_BYTES = 4  # gradients are accumulated in fp32


class ParameterCount(Record):
    """Parameters by their place; tied embeddings counted once."""

    block: int  # one transformer block
    blocks: int
    word_embedding: int
    position_embedding: int
    embedding_layernorm: int
    final_layernorm: int
    token_types: int = 0
    heads: int = 0  # beside the projection to words
    decoder_block: int = 0  # one of the decoder's
    output_embedding: int = 0  # the projection to words, where it is not the word embedding again

    @property
    def total(self) -> int:
        return self.blocks + self.without_blocks

    @property
    def without_blocks(self) -> int:
        tables = (
            self.word_embedding + self.position_embedding + self.token_types + self.output_embedding
        )
        return tables + self.embedding_layernorm + self.final_layernorm + self.heads

    @property
    def without_embeddings(self) -> int:
        """What the original's FLOP counter multiplies: all but the embedding tables and their
        LayerNorm.
        """
        return self.blocks + self.final_layernorm + self.heads


def count_parameters(card: TrainerConfig) -> ParameterCount:
    """Parameters of the whole model; BLOOM's block of f = 4h has 12h^2 + 13h."""
    model, hidden = card.model, card.model.hidden_size
    table = card.tokenizer.padded_vocabulary_size * hidden
    block = _sharded_block(model) + _replicated_block(model)
    decoder = 0
    if model.has_decoder:
        decoder = block + _sharded_cross(model) + _replicated_cross(model)
    ends = ends_of(card)
    return ParameterCount(
        block=block,
        blocks=model.layers * (block + decoder),
        word_embedding=table,
        position_embedding=model.positions * hidden
        if model.position_embedding == "absolute"
        else 0,
        embedding_layernorm=_norm(model) if model.embedding_layernorm else 0,
        final_layernorm=_norm(model),
        token_types=ends.token_types,
        heads=ends.head + ends.cut_head,
        decoder_block=decoder,
        output_embedding=0 if model.tied_embeddings else table,
    )


def _norm(model: ModelSection) -> int:
    """A norm on the residual stream: a weight, and LayerNorm's bias."""
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def _sharded_block(model: ModelSection) -> int:
    """What tensor parallelism divides in a block: its matrices, and the biases of the
    column-parallel ones.
    """
    biases = 0
    if model.linear_biases:
        biases = model.fused_width + model.ffn
    return _matrices(model) + biases


def _matrices(model: ModelSection) -> int:
    """Elements of a block's matrices: attention's two, and two of the feed-forward part, with a
    gate three.
    """
    hidden = model.hidden_size
    return hidden * (model.fused_width + model.attention_width + model.up_width + model.ffn)


def _replicated_block(model: ModelSection) -> int:
    """What every tensor rank holds of a block: its norms and the biases of the row-parallel
    matrices.
    """
    count = 2 * _norm(model)
    if model.linear_biases:
        count += 2 * model.hidden_size
    if model.qk_norm:
        count += 2 * model.head_size
    return count


def _sharded_cross(model: ModelSection) -> int:
    """What a decoder's block has more, and tensor parallelism divides: four matrices, the biases of
    three.
    """
    return (4 * model.hidden_size + 3) * model.attention_width


def _replicated_cross(model: ModelSection) -> int:
    """The same of what every tensor rank holds: a LayerNorm and a row-parallel bias."""
    return 3 * model.hidden_size


def _decoder_per_worker(model: ModelSection, tensor: int) -> int:
    """Parameters of the decoder's blocks on one worker."""
    if not model.has_decoder:
        return 0
    cut = _sharded_block(model) + _sharded_cross(model)
    return model.layers * (cut // tensor + _replicated_block(model) + _replicated_cross(model))


# ----------------------------------------------------------------------------- pipeline stages
class StageBlocks(Record):
    """What one pipeline stage owns: so many `blocks`, in parts that are adjacent each, the first at
    `first_block`.
    """

    index: int
    first_block: int
    blocks: int
    embedding: bool
    head: bool
    parameters_per_worker: int  # on one tensor rank, the tied copy of the embedding included
    parts: tuple[tuple[int, int], ...]  # first block, from 0, and blocks of each

    def recomputed(self, model: ModelSection) -> int:
        """How many of its blocks are recomputed."""
        return sum(recomputed_between(model, first, count) for first, count in self.parts)


def stage_layout(card: TrainerConfig) -> tuple[StageBlocks, ...] | None:
    """How a `type:REGEX` partition deals the layers; None for partitions that only the engine can
    compute.

    The classes are an embedding, the transformer blocks and the head, which is an embedding too;
    those that the expression matches weigh 1, the others go with their neighbours.
    """
    model, parallel = card.model, card.parallel
    stages, layers = parallel.pipeline, model.layers
    every = stages * parallel.virtual_stages
    units = units_of(parallel.partition)
    if every > 1 and (units is None or not units.blocks or units.total(layers) % every):
        return None
    ends = 0
    if every > 1:
        ends = int(units is not None and units.ends)
    each = (layers + 2 * ends) // every
    bounds = [0, *(number * each - ends for number in range(1, every)), layers]
    parts = [(begin, end - begin) for begin, end in pairwise(bounds)]
    result = []
    for index in range(stages):
        is_first, is_last = index == 0, index == stages - 1
        own = tuple(parts[index::stages])
        blocks = sum(count for _, count in own)
        per_worker = blocks * (_sharded_block(model) // parallel.tensor + _replicated_block(model))
        per_worker += _ends_parameters(card, embedding=is_first, head=is_last)
        per_worker += _decoder_per_worker(model, parallel.tensor)  # which has no pipeline
        result.append(
            StageBlocks(
                index,
                own[0][0],
                blocks,
                embedding=is_first,
                head=is_last,
                parameters_per_worker=per_worker,
                parts=own,
            )
        )
    return tuple(result)


def _ends_parameters(card: TrainerConfig, embedding: bool, head: bool) -> int:
    """Parameters of one worker of a stage beside its blocks."""
    model, tensor, ends = card.model, card.parallel.tensor, ends_of(card)
    table = card.tokenizer.padded_vocabulary_size * model.hidden_size // tensor
    # tied: a stage that has both ends holds it once
    count = 0
    if embedding or head:
        count = table
    if embedding and head and not model.tied_embeddings:
        count += table
    if embedding:
        if model.position_embedding == "absolute":
            count += model.positions * model.hidden_size
        if model.embedding_layernorm:
            count += _norm(model)
        count += ends.token_types
    if head:
        count += _norm(model) + ends.head + ends.cut_head // tensor
    return count


def busiest_stage(card: TrainerConfig, stages: tuple[StageBlocks, ...]) -> tuple[float, bool]:
    """Of the stage with most operations its share over the mean of all (so much longer is a step
    than with even stages), and whether it has more blocks than another stage; else only the logits
    make it the busiest.

    Counted are forward and backward passes of blocks, their recomputation, and the logits.
    """
    model, length = card.model, card.model.sequence_length
    whole = _recomputed_forward(model, length) / max(1, recomputed_blocks(model))
    work = [
        3 * stage.blocks * _block_forward(model, length)
        + stage.recomputed(model) * whole
        + 3 * stage.head * _logits_forward(card, length)
        for stage in stages
    ]
    busiest = stages[work.index(max(work))]
    excess = max(work) * len(work) / sum(work) - 1
    return excess, busiest.blocks > min(stage.blocks for stage in stages)


# ----------------------------------------------------------------------------- floating-point
# operations
def tflops_per_gpu(
    card: TrainerConfig,
    global_batch_size: float,
    seconds: float,
    world_size: int,
    sequence_length: int | None = None,
) -> float:
    """TFLOPs of each worker in a step of `seconds`, by the original's formula, so that logs can be
    compared.

    Recomputed activations count as work. The formula takes f = 4h for granted. There is none for a
    T5, nor for a gate or for shared keys and values: what is carried out is counted.
    """
    model, vocabulary = card.model, card.tokenizer.padded_vocabulary_size
    length = sequence_length or model.sequence_length
    if model.has_decoder or model.is_gated or model.groups != model.attention_heads:
        operations = hardware_flops(card, 1, length) * global_batch_size
        return operations / (seconds * world_size * 1e12)
    hidden, layers = model.hidden_size, model.layers
    relative = 1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    operations = 24 * passes(model) * global_batch_size * length * layers * hidden**2 * relative
    return operations / (seconds * world_size * 1e12)


def tokens_of_a_parameter(model: ModelSection, length: int) -> float:
    """Tokens of a sample that a parameter meets: all of them, or the mean of what the two sides of
    a T5 have.
    """
    if model.has_decoder:
        return (length + model.decoder_sequence_length) / 2
    return length


def passes(model: ModelSection) -> float:
    """What a step costs, in forward passes: one, a backward pass worth two, and what of the blocks
    is recomputed.
    """
    whole = _blocks_forward(model, model.sequence_length)
    return 3 + _recomputed_forward(model, model.sequence_length) / whole


def counted_gigaflops(card: TrainerConfig, samples: int) -> float:
    """What the original's FLOP counter grows by with `samples` samples: 6 per token and parameter,
    no embeddings.

    Always at the full sequence length, also under a curriculum, so that the TensorBoard axis can be
    compared.
    """
    parameters = count_parameters(card).without_embeddings
    tokens = tokens_of_a_parameter(card.model, card.model.sequence_length)
    return 6 * samples * tokens * parameters / 1e9


def model_flops(card: TrainerConfig, samples: int, sequence_length: int | None = None) -> int:
    """Operations that `samples` samples need: a forward pass and twice that backward, nothing
    recomputed.

    2 for each multiply-add; attention scores over the full window, as the usual formula has it.
    `sequence_length`: of these samples, where a curriculum makes them shorter than the card's.
    """
    length = sequence_length or card.model.sequence_length
    return 3 * samples * (_blocks_forward(card.model, length) + _logits_forward(card, length))


def hardware_flops(card: TrainerConfig, samples: int, sequence_length: int | None = None) -> int:
    """Operations carried out: `model_flops`, and what of the blocks' forward passes is recomputed."""
    length = sequence_length or card.model.sequence_length
    return model_flops(card, samples, length) + samples * _recomputed_forward(card.model, length)


def _recomputed_forward(model: ModelSection, length: int) -> int:
    """Operations that the backward pass of one sample does over again."""
    selective = model.recompute_granularity == "selective"
    if selective:
        whole = _scores_forward(model, length)
    else:
        whole = _blocks_forward(model, length)
    return recomputed_blocks(model) * whole // model.layers


def _blocks_forward(model: ModelSection, length: int) -> int:
    """Operations of all blocks for one sample, the decoder's too."""
    each, answer = _block_forward(model, length), model.decoder_sequence_length
    if model.has_decoder:
        cross = 4 * (answer + length) * model.hidden_size * model.attention_width
        each += _block_forward(model, answer) + cross + _cross_scores_forward(model, length)
    return model.layers * each


def _scores_forward(model: ModelSection, length: int) -> int:
    """Of these, attention's scores and their use."""
    each = _attention_forward(model, length)
    if model.has_decoder:
        each += _attention_forward(model, model.decoder_sequence_length) + _cross_scores_forward(
            model, length
        )
    return model.layers * each


def _cross_scores_forward(model: ModelSection, length: int) -> int:
    """Operations of one decoder block's scores over the encoder's tokens and their use, for one
    sample.
    """
    return 4 * model.decoder_sequence_length * length * model.attention_width


def _block_forward(model: ModelSection, length: int) -> int:
    """Operations of one block for one sample: its matrices, attention's scores and their use."""
    return 2 * length * _matrices(model) + _attention_forward(model, length)


def _attention_forward(model: ModelSection, length: int) -> int:
    """Operations of one block's attention scores and their use, for one sample."""
    return 4 * length * length * model.attention_width


def _logits_forward(card: TrainerConfig, length: int) -> int:
    """Operations of the model's end for one sample: logits of what is predicted, and what each
    token passes before.
    """
    predicted = predicted_tokens(card, tokens_at_the_end(card.model, length))
    logits = 2 * predicted * card.model.hidden_size * card.tokenizer.padded_vocabulary_size
    return logits + 2 * length * ends_of(card).dense


def mixed_peak(card: TrainerConfig, wide: float | None, float8: float | None) -> float | None:
    """Peak in TFLOPs where the linear layers of the blocks run at the rate `float8` and all else at
    `wide`.

    It is reached when every operation runs at its own peak. None where either is not known.
    """
    if wide is None or float8 is None:
        return None
    model, length = card.model, card.model.sequence_length
    scores = _scores_forward(model, length)
    linear = _blocks_forward(model, length) - scores
    rest = scores + _logits_forward(card, length)
    return (linear + rest) / (linear / float8 + rest / wide)


# ----------------------------------------------------------------------------- bytes and files
def weight_bytes(card: TrainerConfig, parameters: int) -> int:
    """Bytes of the weights alone."""
    return parameters * (4 if card.precision.dtype == "fp32" else 2)


def checkpoint_bytes(card: TrainerConfig, parameters: int) -> int:
    """Bytes of a whole checkpoint: weights, fp32 master copy, fp32 moments (14 a parameter in bf16
    with AdamW).
    """
    held = MASTER_BYTES + _full_moment_bytes(card.optimizer)
    return weight_bytes(card, parameters) + parameters * held


def _full_moment_bytes(optimizer: OptimizerSection) -> int:
    """Bytes of the fp32 moments of one parameter, as a checkpoint holds them whatever the optimizer
    does in memory.
    """
    third = optimizer.type == "lamb" and optimizer.lamb_variant == "layer-noise"
    if third:
        return ADAM_BYTES * 3 // 2
    return ADAM_BYTES


def moment_bytes(card: TrainerConfig, parameters: int, word_embedding: int) -> int:
    """Bytes of the moments. In 8 bits: a byte and a share of a scale each, but for the word
    embedding's.

    Layer-noise LAMB has a third one.
    Small tensors, which keep fp32 moments too, are not told apart: they are less than a thousandth of any model for
    which 8 bits matter.
    """
    if card.optimizer.type != "adam8bit":
        return parameters * _full_moment_bytes(card.optimizer)
    coded = parameters - word_embedding
    return 2 * (coded + -(-coded // BLOCK_OF_CODES) * 4) + word_embedding * ADAM_BYTES


def training_bytes(card: TrainerConfig, parameters: int, word_embedding: int) -> int:
    """Bytes of training state over all workers of one replica, nothing sharded (18 a parameter in
    bf16 with AdamW).

    `word_embedding`: how many of the parameters are its.
    """
    held = weight_bytes(card, parameters) + parameters * (GRADIENT_BYTES + MASTER_BYTES)
    return held + moment_bytes(card, parameters, word_embedding)


def worker_state_bytes(
    card: TrainerConfig, parameters_per_worker: int, data_parallel: int, word_embedding: int
) -> int:
    """Bytes of training state on one worker: weights and gradients whole, optimizer state divided
    by ZeRO stage 1.

    `word_embedding`: how many of the worker's parameters are its.
    """
    whole = weight_bytes(card, parameters_per_worker) + parameters_per_worker * GRADIENT_BYTES
    moments = moment_bytes(card, parameters_per_worker, word_embedding)
    return whole + -(-(parameters_per_worker * MASTER_BYTES + moments) // data_parallel)


class CheckpointFiles(Record):
    """Files of one checkpoint in the original's DeepSpeed layout."""

    layer: int
    model: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.layer + self.model + self.optimizer


def deepspeed_checkpoint_files(
    layers: int, tensor: int, pipeline: int, data_parallel: int
) -> CheckpointFiles:
    """A file for each layer (embedding and final LayerNorm too) and tensor rank, each model rank,
    each worker.
    """
    return CheckpointFiles(
        (layers + 2) * tensor, tensor * pipeline, tensor * pipeline * data_parallel
    )


def most_checkpoint_files(workers: int) -> int:
    """Files of one checkpoint in the layout that any topology reads: three of each worker at most,
    and four of all.

    A worker writes its share of the weights and of the optimizer, where it has one, and its random
    state; beside them are two indexes, the cursor and the manifest.
    """
    return 3 * workers + 4


def idle_passes(micro_batches: int, stages: int, parts: int) -> int:
    """For how many passes of a step (forward and backward through one part) a stage waits."""
    return stages - 1 + (parts - 1) * max(0, stages - micro_batches)


def bubble_share(micro_batches: int, stages: int, parts: int = 1) -> float:
    """Share of a step that a 1F1B pipeline idles: (stages - 1) / (parts x micro_batches + stages -
    1).

    `parts`: of each stage. With fewer micro batches than stages, parts wait for one another too.
    """
    idle = idle_passes(micro_batches, stages, parts)
    return idle / (parts * micro_batches + idle)
