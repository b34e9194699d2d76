"""Names of the original (Megatron-DeepSpeed) layout: files, positions of layers, parameters; and
our names for them.

The model is a list of layers: 0 cast, 1 embedding, 2 transpose, 3 .. L+2 the L blocks, L+3
transpose, L+4 final LayerNorm, L+5 the embedding again (tied), L+6 cast. A file of weights belongs
to one position and one tensor rank.
"""

from __future__ import annotations

import re

from trainer.contract.record import Record

EMBEDDING_POSITION = 1
FIRST_BLOCK = 3
TIED_PREFIX = "tied_modules.embed."

_EMBEDDING = {  # this and the next in the order in which the original registers them
    "embedding.word.weight": "word_embeddings.weight",
    "embedding.norm.weight": "word_embeddings.norm.weight",
    "embedding.norm.bias": "word_embeddings.norm.bias",
    "embedding.position.weight": "position_embeddings.weight",
}
_BLOCK = {
    "input_norm": "input_layernorm",
    "attention.query_key_value": "self_attention.query_key_value",
    "attention.dense": "self_attention.dense",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_FINAL = {"final_norm.weight": "weight", "final_norm.bias": "bias"}
_CUT = {  # dimension cut over tensor ranks; everything else is replicated
    "embedding.word.weight": 0,
    "attention.query_key_value.weight": 0,
    "attention.query_key_value.bias": 0,
    "attention.dense.weight": 1,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
}
# Which of these a model has depends on its positions and on whether its embedding is normed.
OPTIONAL_IN_EMBEDDING = set(_EMBEDDING.values()) - {"word_embeddings.weight"}
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def cut_dimension(name: str) -> int | None:
    """The dimension along which tensor parallelism cuts the parameter of our `name`; None where it
    is replicated.
    """
    match = _BLOCK_NAME.fullmatch(name)
    return _CUT.get(name if match is None else f"{match[2]}.{match[3]}")


class LayerPosition(Record):
    """Where a parameter is in the original's list of layers: position, and its name inside that
    layer.
    """

    position: int
    inner: str


def place_of(name: str, layers: int) -> LayerPosition:
    """The original's place for the parameter of our `name`, in a model of `layers` blocks.

    Raises KeyError for a parameter that the original's GPT does not have.
    """
    match = _BLOCK_NAME.fullmatch(name)
    if match is not None:
        return LayerPosition(FIRST_BLOCK + int(match[1]), f"{_BLOCK[match[2]]}.{match[3]}")
    if name in _FINAL:
        return LayerPosition(layers + FIRST_BLOCK + 1, _FINAL[name])
    return LayerPosition(EMBEDDING_POSITION, _EMBEDDING[name])


def module_name(place: LayerPosition) -> str:
    """The parameter's name in the original's pipeline module: by position, or below the tied
    modules.
    """
    if place.position == EMBEDDING_POSITION:
        return TIED_PREFIX + place.inner
    return f"{place.position}.{place.inner}"


def block_suffixes() -> list[str]:
    """Our names of a block's parameters after `blocks.N.`, in the order in which the original
    registers them.
    """
    return [f"{ours}.{kind}" for ours in _BLOCK for kind in ("weight", "bias")]


def embedding_names() -> dict[str, str]:
    """The original's names inside the embedding layer -> ours."""
    return {theirs: ours for ours, theirs in _EMBEDDING.items()}


def block_names(block: int) -> dict[str, str]:
    """The original's names inside a block -> ours, for block number `block`."""
    kinds = ("weight", "bias")
    return {
        f"{theirs}.{kind}": f"blocks.{block}.{ours}.{kind}"
        for ours, theirs in _BLOCK.items()
        for kind in kinds
    }


def final_names() -> dict[str, str]:
    """The original's names inside the last LayerNorm -> ours."""
    return {theirs: ours for ours, theirs in _FINAL.items()}


def layer_file(position: int, tensor_rank: int) -> str:
    return f"layer_{position:02d}-model_{tensor_rank:02d}-model_states.pt"


def rank_file(model_rank: int) -> str:
    """`model_rank` is stage x tensor degree + tensor rank."""
    return f"mp_rank_{model_rank:02d}_model_states.pt"


def optimizer_file(data_rank: int, model_rank: int, bf16: bool) -> str:
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_optim_states.pt"


class Names(Record):
    """The files of a folder by class. Keys: (position, tensor rank), model rank, (data rank, model
    rank).
    """

    layers: dict[tuple[int, int], str]
    ranks: dict[int, str]
    optimizers: dict[tuple[int, int], str]
    bf16: bool

    @property
    def all(self) -> set[str]:
        return {*self.layers.values(), *self.ranks.values(), *self.optimizers.values()}


def sort_names(names: list[str]) -> Names:
    """Sort file names into the layout's classes; others are passed over.

    Raises ValueError when the optimizer's files are of both precisions: two checkpoints were mixed.
    """
    layers: dict[tuple[int, int], str] = {}
    ranks: dict[int, str] = {}
    optimizers: dict[tuple[int, int], str] = {}
    precisions: dict[bool, str] = {}
    for name in sorted(names):
        if match := _LAYER_FILE.fullmatch(name):
            layers[int(match[1]), int(match[2])] = name
        elif match := _RANK_FILE.fullmatch(name):
            ranks[int(match[1])] = name
        elif match := _OPTIMIZER_FILE.fullmatch(name):
            optimizers[int(match[2]), int(match[3])] = name
            precisions.setdefault(bool(match[1]), name)
    if len(precisions) > 1:
        raise ValueError(f"{precisions[True]} and {precisions[False]} are of different precisions")
    return Names(layers, ranks, optimizers, bf16=True in precisions)
