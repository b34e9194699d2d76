"""What a family of models has at its ends beside the tied table and the last LayerNorm, and how
much of its logits is held at once. Free of torch.

h hidden, V padded vocabulary. BERT: 2 h of token types; heads with a dense layer h^2 + h and a
LayerNorm 2 h, a bias of each word V, a pooler h^2 + h and an order of sentences 2 h + 2. T5: the
encoder's LayerNorm 2 h, a bias of each word V.
"""

from __future__ import annotations

from trainer.config.card import ModelSection, TrainerConfig
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
