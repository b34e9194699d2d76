"""What an architecture of the `transformers` library has of ours: its tensors, its config.json, and
how both follow from a model's facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.checkpoint.rewrite import row_blocks
from trainer.checkpoint.source import TensorFacts
from trainer.config.card import TrainerConfig
from trainer.contract.errors import CheckpointError
from trainer.contract.record import JsonObject, Record
from trainer.contract.resumable import model_facts
from trainer.schedule.flops import TOKEN_TYPES

ROWS_KEY = "tokenizer.padded_vocabulary_size"
WORDS = "embedding.word.weight"
"""Our name of the word embedding, whose rows are those of the vocabulary."""
HEAD = "head.weight"
WORD_BIAS = "heads.word_bias"
VOCABULARY = (WORDS, HEAD, WORD_BIAS)
"""Our tensors whose rows are those of the vocabulary."""
BLOCK_BYTES = 64 << 20


class MappedTensor(Record):
    """Where a tensor of theirs comes from: our name, and which of the `parts` that are one in ours.

    Rows of ours are [groups, `parts`, head size]: theirs has `count` parts of each group from
    `part` on, a query, key or value one, a group's queries several. `is_stacked`: the parts are
    matrices of their own in ours, [matrices, rows, columns]. `leading`: dimensions of size 1 that
    theirs has in front.
    """

    key: str
    part: int | None = None
    parts: int = 3
    leading: int = 0
    count: int = 1
    is_stacked: bool = False

    def blocks(
        self, facts: TensorFacts, groups: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes, in our tensor, of what makes up theirs of `facts`, in order. `groups`:
        heads of keys and values.
        """
        shape = facts.shape
        zeros = (0,) * len(facts.shape[1:])
        if self.part is None:
            yield from row_blocks(facts, BLOCK_BYTES)
        elif self.is_stacked:
            yield (self.part, 0, *zeros), (1, *shape)
        else:
            size = shape[0] // (groups * self.count)
            for group in range(groups):
                first = (self.parts * group + self.part) * size
                yield (first, *zeros), (self.count * size, *shape[1:])

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, but for `leading`, from that of ours."""
        if self.part is None:
            return ours
        if self.is_stacked:
            return ours[1:]
        return (ours[0] * self.count // self.parts, *ours[1:])


class Architecture(Record):
    """One of theirs that a model of ours can be written as and, where config.json gives `facts`,
    read from.

    `tensors`: every tensor of theirs, by its name there, but for `copies` of tied ones, which files
    may repeat. `root`: before all names, but in files of the bare model. `ignored`: how names end
    that are no weights. `std`, `length`: keys of config.json for the deviation of initial weights,
    and for the tokens of a sample where positions leave it open. `assumed`: facts that a checkpoint
    need not name. `cuts_padding`: empty rows behind the vocabulary are left out; where a bias of
    each word learns, none is empty.
    """

    kind: str
    model_types: tuple[str, ...]
    tensors: Callable[[Mapping[str, Any]], dict[str, MappedTensor]]
    config: Callable[[Mapping[str, Any], str], JsonObject]
    facts: Callable[[Mapping[str, Any], str], JsonObject] | None = None
    copies: Mapping[str, str] = {}
    root: str = ""
    ignored: tuple[str, ...] = ()
    std: str = "initializer_range"
    length: str | None = None
    assumed: Mapping[str, Any] = {}
    cuts_padding: bool = False
    remarks: tuple[str, ...] = ()


def facts_of_card(config: TrainerConfig) -> JsonObject:
    """What a run card says of the model, under the keys that a checkpoint's facts have too; not of
    its precision.
    """
    return {key: fact for key, fact in model_facts(config).items() if key != "precision.dtype"}


def shape_of(key: str, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The whole shape of our tensor in a model of these facts."""
    hidden, heads, rows = (
        facts["model.hidden_size"],
        facts["model.attention_heads"],
        facts[ROWS_KEY],
    )
    size = facts.get("model.kv_channels", hidden // heads)
    grouped = facts.get("model.key_value_heads", heads) * size
    ffn = facts.get("model.ffn_hidden_size", 4 * hidden)
    square = (hidden, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word": (rows, hidden),
        "embedding.position": (facts.get("model.max_position_embeddings", 0), hidden),
        "embedding.type": (TOKEN_TYPES, hidden),
        "attention.query_key_value": (heads * size + 2 * grouped, hidden),
        "attention.dense": (hidden, heads * size),
        "attention.query_norm": (size,),
        "attention.key_norm": (size,),
        "cross_attention.query": square,
        "cross_attention.key_value": (2 * hidden, hidden),
        "cross_attention.dense": square,
        "mlp.up": (2, ffn, hidden) if facts.get("model.activation") == "swiglu" else (ffn, hidden),
        "mlp.down": (hidden, ffn),
        "head": (rows, hidden),
        "heads.transform": square,
        "heads.pooler": square,
        "heads.order": (2, hidden),
    }
    part, _, kind = key.rpartition(".")
    if kind == "word_bias":
        return (rows,)
    if part.startswith("blocks."):
        part = part.split(".", 2)[2]
    whole = shapes.get(part, (hidden,))  # else a norm on the residual stream
    if kind == "bias":
        return whole[:1]
    return whole


def needed_fact(facts: Mapping[str, Any], key: str) -> Any:
    """What a model's facts say. Raises CheckpointError where they do not."""
    if key not in facts:
        raise CheckpointError(
            f"{key} is not known from the checkpoint: name its run card with --run"
        )
    return facts[key]


def only(facts: Mapping[str, Any], fixed: Mapping[str, Any], architecture: str) -> None:
    """Raises CheckpointError where the model has another value than the one that the architecture
    can have.
    """
    for key, value in fixed.items():
        if facts.get(key, value) != value:
            raise CheckpointError(
                f"{key} = {facts[key]!r}: the {architecture} architecture of Hugging Face has only {value!r}, so this"
                " model cannot be written or read as one"
            )


def count_of(config: Mapping[str, Any], path: str, *spellings: str) -> int:
    """A whole number above 0 of a config.json under any of its names. Raises CheckpointError."""
    value = next((config[name] for name in spellings if config.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"{path}: {spellings[0]} = {value!r}: must be a whole number above 0")
    return value


def epsilon_of(config: Mapping[str, Any], path: str, key: str, default: float) -> float:
    """What a config.json says is added to variances. Raises CheckpointError."""
    value = config.get(key, default)
    if not isinstance(value, float) or not 0.0 < value < 1.0:
        raise CheckpointError(f"{path}: {key} = {value!r}: must be a number between 0 and 1")
    return value
