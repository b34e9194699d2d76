"""Sections of the run card that say what is trained, and how its numbers are kept: model,
precision, optimizer.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from trainer.config.base import (
    LARGEST_WIDTH,
    AboveOne,
    Iterations,
    Layers,
    NotNegative,
    Positive,
    Section,
    Share,
    Ways,
    Width,
)
from trainer.contract.record import Record

# what the optimizers were called in the large-batch trainer, and the card's keys that mean the same
OLD_NAMES: Mapping[str, Mapping[str, str]] = {
    "ptadamw": {"type": "adamw"},
    "mylamb": {"type": "lamb", "lamb_variant": "floored"},
    "mylamb2": {"type": "lamb", "lamb_variant": "layer-noise"},
    "mylamb3": {"type": "lamb", "lamb_variant": "embedding-lr"},
    "lambtp": {"type": "lamb", "lamb_variant": "paper", "lamb_norms": "local"},
}
_FREE = "lamb_norms"  # `lambtp` had four ways of taking norms, of which `local` was the default


def with_new_names(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of [optimizer] with an old name of its type replaced; all others as they are.

    Raises PydanticCustomError where a key beside it says otherwise.
    """
    old = section.get("type")
    keys = None
    if isinstance(old, str):
        keys = OLD_NAMES.get(old)
    if keys is None:
        return section
    for key, value in keys.items():
        if key not in {"type", _FREE} and section.get(key, value) != value:
            fix = {"fix": f'leave {key} out, or write type = "{keys["type"]}"'}
            raise PydanticCustomError(
                "old_name", f'type = "{old}" means {key} = "{value}", not "{section[key]}"', fix
            )
    return {**keys, **section, "type": keys["type"]}


LARGEST_RATIO = 2.5  # of the wide bound; 0.02 on 11,600 columns was 3.4 and diverged
WHAT_IT_COST = (
    "a 104B training diverged right after its warm-up, twice, and again with another seed"
)


def std_advice(std: float, hidden_size: int) -> str:
    """What to use where a deviation is far above what the width bears; "" where it is not.

    That is sqrt(1/(3h)), which trained the 176B model, and at most about sqrt(2/(5h)).
    """
    wide = math.sqrt(2 / (5 * hidden_size))
    if std <= LARGEST_RATIO * wide:
        return ""
    narrow = math.sqrt(1 / (3 * hidden_size))
    return f"{narrow:.2g} (sqrt(1/3h)) or {wide:.2g} (sqrt(2/5h))"


DEFAULT_VOCABULARY_MULTIPLE = 128
GATED_MULTIPLE = 256


def gated_width(hidden_size: int) -> int:
    """The default width of a feed-forward part with a gate.

    A gate's third matrix would make the part half as large again, so its width is 8/3 in place of 4
    (Shazeer, arXiv 2002.05202), rounded up to whole tiles as in Llama: 11,008 for 4,096.
    """
    return -(-8 * hidden_size // (3 * GATED_MULTIPLE)) * GATED_MULTIPLE


class ParallelSection(Section):
    """[parallel]: degrees of parallelism. The data-parallel degree follows from the number of
    workers.
    """

    tensor: Ways = 1
    """tensor-parallel degree"""

    pipeline: Ways = 1
    """pipeline-parallel degree (stages)"""

    partition: str = "type:transformer|embedding"
    """how layers are dealt to stages: type:REGEX, uniform, parameters"""

    virtual_stages: Layers = 1
    """parts of each stage, dealt in turn (interleaved 1F1B): less idle time, more messages"""

    sequence_parallel: bool | None = None
    """cut the activations between tensor-parallel regions along the sequence; default: true if
    tensor > 1 divides every length, unless model.partition_activations cuts them
    """

    start_timeout_minutes: float = Field(default=30.0, gt=0, le=10_000)
    """a rank that another one waits for longer is lost, until the first step, and whenever a length
    or micro batch comes for the first time
    """

    step_timeout_minutes: float = Field(default=10.0, gt=0, le=10_000)
    """the same otherwise; saves and data keep the longer time"""


class ModelSection(Section):
    """[model]: a transformer that normalises before attention and before the feed-forward part."""

    family: Literal["gpt", "bert", "t5"] = "gpt"
    """predicts the next token; or masked tokens and the order of two sentences; or, with an encoder
    and a decoder, the spans that were cut out
    """

    layers: Layers
    """transformer blocks; t5: of the encoder, and of the decoder"""

    hidden_size: Width
    """width of the residual stream"""

    attention_heads: Width
    """must divide hidden_size, unless kv_channels is given"""

    key_value_heads: Width | None = None
    """heads of keys and values, each shared by as many queries' heads (grouped-query attention);
    must divide attention_heads; default: attention_heads
    """

    sequence_length: Width
    """tokens in one sample; t5: of the encoder"""

    decoder_sequence_length: int = Field(default=128, ge=3, le=LARGEST_WIDTH)
    """t5: tokens of the decoder; longer spans are shortened"""

    kv_channels: Width | None = None
    """width of one head; default: hidden_size / attention_heads"""

    ffn_hidden_size: Width | None = None
    """default: 4 x hidden_size; with swiglu 8/3 x hidden_size, rounded up to a multiple of 256"""

    activation: Literal["gelu_tanh", "gelu", "swiglu"] = "gelu_tanh"
    """GELU in the tanh approximation that BLOOM was trained with, or exact; or SiLU of a third
    matrix's result as a gate
    """

    linear_biases: bool = True
    """linear layers add a bias; must be false with swiglu"""

    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """of mean and variance, with a bias; or of the root mean square alone"""

    qk_norm: bool = False
    """RMSNorm over each head of queries and keys, before positions are rotated"""

    tied_embeddings: bool = True
    """the output projection is the word embedding again"""

    position_embedding: Literal["alibi", "absolute", "rotary"] = "alibi"
    """linear biases on the attention scores, a learned table, or rotated queries and keys"""

    max_position_embeddings: Width | None = None
    """default: sequence_length; not with rotary positions"""

    rotary_base: AboveOne = 10_000.0
    """base of the rotary wave lengths"""

    rotary_factor: float = Field(default=1.0, ge=1)
    """stretches the long rotary wave lengths by this, as Llama 3.1 does for longer texts; 1 is
    without
    """

    rotary_original_length: int | None = Field(default=None, gt=0)
    """with rotary_factor: length of the texts before the stretch (Llama 3.1: 8192)"""

    rotary_low_factor: Positive = 1.0
    """with rotary_factor: waves longer than the original length / this are stretched"""

    rotary_high_factor: Positive = 4.0
    """with rotary_factor: waves shorter than the original length / this are not"""

    embedding_layernorm: bool = False
    """model.norm after the word embedding"""

    layernorm_epsilon: Positive = 1e-5
    """added to the variance, or to the mean square"""

    attention_dropout: Share = 0.1
    """on the attention probabilities"""

    hidden_dropout: Share = 0.1
    """on what each half of a block adds"""

    z_loss: float = Field(default=0.0, ge=0, le=0.01)
    """factor of the squared log of each token's sum of exponentials, added to the loss: it keeps
    logits near zero; 1e-4 is usual, 0 is without
    """

    init_method: Literal["normal", "xavier"] = "normal"
    """how matrices begin: normal with init_std, or evenly within sqrt(6 / (rows + columns)) of zero"""

    init_std: Positive = 0.02
    """sigma of the normal initial weights"""

    activation_checkpointing: bool = False
    """recompute block activations in the backward pass"""

    recompute_granularity: Literal["full", "selective"] = "full"
    """of a recomputed block: all of it, or attention's inner part alone"""

    recompute_blocks: Layers | None = None
    """recompute only so many blocks, dealt evenly over the model; default: all"""

    partition_activations: bool = False
    """keep what is checkpointed cut over the tensor ranks"""

    compile_blocks: bool = False
    """compile the blocks with torch.compile, attention with them, which takes minutes at the first
    step
    """

    require_fused_attention: bool = False
    """refuse where attention would keep its scores in memory"""

    @property
    def looks_ahead(self) -> bool:
        """Whether a token's attention goes to those behind it too."""
        return self.family in ("bert", "t5")

    @property
    def has_decoder(self) -> bool:
        """Whether a decoder of as many blocks, which attend to the encoder's result too, stands
        behind the blocks.
        """
        return self.family == "t5"

    @property
    def ffn(self) -> int:
        """Width between the matrices of the feed-forward part."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if not self.is_gated:
            return 4 * self.hidden_size
        return gated_width(self.hidden_size)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward part has a third matrix, whose result is a gate."""
        return self.activation == "swiglu"

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.key_value_heads or self.attention_heads

    @property
    def positions(self) -> int:
        return self.max_position_embeddings or self.sequence_length

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.attention_heads

    @property
    def attention_width(self) -> int:
        """Width of all heads together; `hidden_size` unless `kv_channels` says otherwise."""
        return self.attention_heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads together: the queries', unless several heads of these
        share one.
        """
        return self.groups * self.head_size

    @property
    def fused_width(self) -> int:
        """Width of queries, keys and values together."""
        return self.attention_width + 2 * self.key_width

    @property
    def up_width(self) -> int:
        """Width of what the feed-forward part's first product gives: with a gate, of two matrices."""
        if self.is_gated:
            return 2 * self.ffn
        return self.ffn


class OptimizerSection(Section):
    """[optimizer]: AdamW with decoupled weight decay, in fp32 or with moments in 8 bits, or LAMB."""

    @model_validator(mode="before")
    @classmethod
    def _take_old_names(cls, value: Any) -> Any:
        """`type = "mylamb"` and the like, by the keys that they stand for."""
        if isinstance(value, Mapping):
            return with_new_names(value)
        return value

    type: Literal["adamw", "adam8bit", "lamb"] = "adamw"
    """fp32 moments; moments in 8 bits, but for the word embedding and small tensors; or LAMB, whose
    step of each tensor is as long as the tensor's norm says; also by old names: ptadamw, mylamb,
    mylamb2, mylamb3, lambtp
    """

    lamb_variant: Literal["paper", "apex", "floored", "embedding-lr", "layer-noise"] = "paper"
    """lamb: all tensors adapt; only those with weight decay
    (`apex`); all, weights' norms at least 1e-5 an element (`floored`); also large tensors step
    further (`embedding-lr`); also momentum and noise are normalised apart (`layer-noise`)
    """

    lamb_norms: Literal["exact", "local", "mean-weight", "stale"] = "exact"
    """lamb: norms are of whole tensors (`stale`: the direction's of the step before, so that no
    rank waits for another), of a tensor rank's slices, or the weight's a mean of the slices
    """

    embedding_alpha: float = Field(default=1.0, ge=0, le=1000)
    """embedding-lr: the largest tensor steps 1 + this times as far"""

    embedding_init: Literal["normal", "xavier"] | None = None
    """how the word embedding begins; default: as model.init_method says"""

    beta1: Share = 0.9
    """decay of the first moment"""

    beta2: Share = 0.999
    """decay of the second moment"""

    epsilon: Positive = 1e-8
    """added to the root of the second moment"""

    weight_decay: NotNegative = 0.01
    """not applied to biases and LayerNorms"""

    clip_grad: NotNegative = 1.0
    """largest global gradient norm; 0 = no clipping"""


class PrecisionSection(Section):
    """[precision]: dtype of weights and activations. Gradients are always accumulated in fp32, but
    for fp16.
    """

    dtype: Literal["bf16", "fp32", "fp16"] = "bf16"
    """of weights and activations"""

    float8: bool = False
    """bf16 only: the linear layers of the blocks multiply in 8-bit floats; weights, gradients and
    checkpoints stay as they are
    """

    loss_scale: Positive | None = None
    """fp16 only: a fixed scale; default: dynamic"""

    initial_scale_power: int = Field(default=12, ge=0, le=32)
    """fp16: the dynamic scale starts at 2^this"""

    loss_scale_window: Iterations = 500
    """fp16: good steps before the scale doubles"""

    hysteresis: int = Field(default=2, gt=0, le=1000)
    """fp16: overflows before the scale halves"""

    min_loss_scale: int = Field(default=1, gt=0, le=2**32)
    """fp16: the scale never falls below"""


class TokenizerSection(Section):
    """[tokenizer]: the tokenizer, and the padded size of its vocabulary."""

    type: Literal["huggingface", "gpt2_bpe", "bert_wordpiece", "bert_wordpiece_lower"] = (
        "huggingface"
    )
    """which files describe it"""

    path: str | None = None
    """huggingface: folder with tokenizer.json, or OWNER/NAME on the hub"""

    vocabulary_file: str | None = None
    """vocab.json (gpt2_bpe) or vocab.txt (bert_wordpiece)"""

    merges_file: str | None = None
    """merges.txt (gpt2_bpe)"""

    vocabulary_size: Width | None = None
    """entries; gives the padded size when that is left out"""

    divisible_by: int | None = Field(
        default=None,
        gt=0,
        le=LARGEST_WIDTH,
        description="the padded size is a multiple of this, and of this x tensor when derived from vocabulary_size; "
        f"default then: {DEFAULT_VOCABULARY_MULTIPLE}",
    )
    padded_vocabulary_size: Width
    """rows of the embedding; may be left out when vocabulary_size is given"""


# Names of the classes that the engine deals, by which DeepSpeed counts. The head is the embedding
# again.
# Which layers a `type:REGEX` partition counts when it deals them to pipeline stages.

EMBEDDING, BLOCK = "VocabularyParallelEmbedding", "TransformerBlock"
OTHERS = ("LearnedPositions", "LayerNorm", "RMSNorm", "Dropout", "TokenTypes", "PretrainingHeads")


class Units(Record):
    """`ends`: the embedding and the head weigh 1 each. `blocks`: each transformer block does."""

    ends: bool
    blocks: bool

    def total(self, layers: int) -> int:
        return layers * self.blocks + 2 * self.ends


def units_of(partition: str) -> Units | None:
    """What the partition counts; None for one that is no `type:REGEX`, or that counts other layers
    too.

    As DeepSpeed reads it: in lower case, what stands between the first colon and the next.
    """
    if not partition.lower().startswith("type:"):
        return None
    expression = partition.lower().split(":")[1]
    ends, blocks, *others = (
        re.search(expression, name, re.IGNORECASE) is not None
        for name in (EMBEDDING, BLOCK, *OTHERS)
    )
    if any(others):
        return None
    return Units(ends, blocks)


UNCUT_FAMILIES = ("t5",)
"""Of whose two sequences, side by side in one tensor, no rank could have an even stretch."""


def is_cut_by_default(
    parallel: Mapping[str, Any], model: Mapping[str, Any], curriculum: Mapping[str, Any]
) -> bool:
    """Sequence parallelism of a card without `parallel.sequence_parallel`, given its sections as
    plain keys.

    False too where a value is of a wrong kind, which the schema refuses.
    """
    tensor = parallel.get("tensor", 1)
    if type(tensor) is not int or tensor < 2 or model.get("partition_activations") is True:
        return False
    if model.get("family") in UNCUT_FAMILIES:
        return False
    return next(uneven_lengths(tensor, model, curriculum), None) is None


def uneven_lengths(
    tensor: int, model: Mapping[str, Any], curriculum: Mapping[str, Any]
) -> Iterator[tuple[str, str, object]]:
    """Section, key and value of the lengths that `tensor` ranks cannot cut evenly."""
    lengths: list[tuple[str, str, Any]] = [
        ("model", "sequence_length", model.get("sequence_length"))
    ]
    if curriculum.get("kind") == "discrete":
        given = curriculum.get("lengths")
        lengths += [
            ("curriculum", "lengths", item)
            for item in (given if isinstance(given, list) else [given])
        ]
    elif curriculum:
        lengths.append(("curriculum", "step", curriculum.get("step", 8)))
    return (entry for entry in lengths if type(entry[2]) is not int or entry[2] % tensor)


def sends_shares(pipeline: int, tensor: int, sequence_parallel: bool, hidden_size: int) -> bool:
    """Whether each tensor rank sends the next stage a share of the hidden states: all hold the
    same, in any length.
    """
    return pipeline > 1 and tensor > 1 and not sequence_parallel and hidden_size % tensor == 0


HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def is_hub_id(text: str, folder: Path) -> bool:
    """Whether a text names something on the hub, and not a path below `folder`.

    It has the form OWNER/NAME, and `folder` has no OWNER in it. `./OWNER/NAME` is always a path.
    """
    return (
        HUB_ID.fullmatch(text) is not None
        and not (folder / text.split("/", maxsplit=1)[0]).exists()
    )
