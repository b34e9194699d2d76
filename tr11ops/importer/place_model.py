"""Megatron's options that several of them say together of a block, its norms and its heads, into [model]."""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.builder import Builder
from tr11ops.importer.options import OptionUse, integer, number
from tr11ops.importer.results import LeftReason

_POSITIONS = "model.position_embedding"
_LLAMA_31_FACTOR, _LLAMA_31_LENGTH = 8.0, 8192  # of stretched positions, where no option says another
_GATED_MULTIPLE = 64  # of the feed-forward width that the original gives a gated block
_SAME_TWICE = "--encoder-num-layers", "--decoder-num-layers"


def place_model(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """Positions, norms, gates and heads: options that mean something only beside others."""
    _positions(builder, uses)
    _heads(builder, uses)
    _gate(builder, uses)
    _query_key_norm(builder, uses)
    _layers_of_both(builder, uses)


def _positions(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--use-rotary-position-embeddings` is the older name of type `rope`; other options count with it alone."""
    switch = uses.get("--use-rotary-position-embeddings")
    if switch is not None:
        builder.put(_POSITIONS, "rotary", switch.option, switch.line)
    is_rotary = builder.value(_POSITIONS) == "rotary"
    base, share = uses.get("--rotary-base"), uses.get("--rotary-percent")
    if base is not None and is_rotary:
        builder.take_use("model.rotary_base", base, number)
    elif base is not None:
        builder.leave_use(base, LeftReason.NO_EFFECT, "counts only with rotary positions")
    if share is not None:
        _whole_heads(builder, share, is_rotary)
    _stretch(builder, uses, is_rotary)
    none = uses.get("--no-position-embedding")
    if none is not None and is_rotary:
        builder.leave_use(none, LeftReason.ELSEWHERE, "rotary positions have no table here")
    elif none is not None:
        builder.leave_use(
            none, LeftReason.DECISION, f"there is no model without positions: give --set {_POSITIONS}=..."
        )
    if is_rotary and "model.max_position_embeddings" in builder.placed:
        builder.drop("model.max_position_embeddings", "rotary positions have no table here")


def _stretch(builder: Builder, uses: Mapping[str, OptionUse], is_rotary: bool) -> None:
    """`--rope-scaling-factor` counts with its switch alone; the other numbers are Llama 3.1's there."""
    switch, factor = uses.get("--use-rope-scaling"), uses.get("--rope-scaling-factor")
    if switch is None or not is_rotary:
        for use in (switch, factor):
            if use is not None:
                builder.leave_use(use, LeftReason.NO_EFFECT, "counts only with --use-rope-scaling of rotary positions")
        return
    note = "the original's own, as Llama 3.1's"
    builder.put("model.rotary_original_length", _LLAMA_31_LENGTH, switch.option, switch.line, note=note)
    if factor is not None:
        builder.take_use("model.rotary_factor", factor, number)
    else:
        builder.put("model.rotary_factor", _LLAMA_31_FACTOR, switch.option, switch.line, note=note)


def _whole_heads(builder: Builder, share: OptionUse, is_rotary: bool) -> None:
    """The share of each head that is rotated: all of it here."""
    try:
        is_whole = number(share.values) == 1
    except ConversionProblem as problem:
        builder.leave_use(share, LeftReason.DECISION, str(problem))
        return
    if not is_rotary:
        builder.leave_use(share, LeftReason.NO_EFFECT, "counts only with rotary positions")
    elif is_whole:
        builder.leave_use(share, LeftReason.ELSEWHERE, "whole heads are rotated")
    else:
        builder.leave_use(share, LeftReason.DECISION, "whole heads are rotated here, so that this is another model")


def _heads(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--num-query-groups` counts with its switch alone, and is 1 there; a fork has one option for both."""
    switch, groups = uses.get("--group-query-attention"), uses.get("--num-query-groups")
    if switch is not None and groups is not None:
        builder.take_use("model.key_value_heads", groups, integer)
    elif switch is not None:
        note = "the original's default: no --num-query-groups is given"
        builder.put("model.key_value_heads", 1, switch.option, switch.line, note=note)
    elif groups is not None:
        builder.leave_use(groups, LeftReason.NO_EFFECT, "counts only with --group-query-attention")


def _gate(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--swiglu`: its linear layers have no biases here, and its width is rounded to other multiples there."""
    switch = uses.get("--swiglu")
    if switch is None:
        return
    builder.put("model.activation", "swiglu", switch.option, switch.line)
    if "--disable-bias-linear" not in uses:
        why = "the original's linear layers have biases, and with swiglu there are none here"
        why += ": give --set model.linear_biases=false for such a model"
        builder.leave_use(switch, LeftReason.DECISION, why, "model.linear_biases")
    hidden = builder.integer("model.hidden_size")
    if hidden and "model.ffn_hidden_size" not in builder.placed:
        width = int(4 * hidden * 2 / 3 / _GATED_MULTIPLE) * _GATED_MULTIPLE
        note = "the original's default: no --ffn-hidden-size is given"
        builder.put("model.ffn_hidden_size", width, switch.option, switch.line, note=note)


def _query_key_norm(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--qk-layernorm` is a norm of the kind that the blocks have; here it is RMSNorm."""
    switch = uses.get("--qk-layernorm")
    if switch is None:
        return
    if builder.value("model.norm") == "rmsnorm":
        builder.put("model.qk_norm", True, switch.option, switch.line)
        return
    why = "the original's is a LayerNorm without --normalization RMSNorm, and always RMSNorm here"
    builder.leave_use(switch, LeftReason.DECISION, f"{why}: give --set model.qk_norm=...", "model.qk_norm")


def _layers_of_both(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """A T5's encoder and decoder, which have as many blocks as each other here."""
    given = [uses[option] for option in _SAME_TWICE if option in uses]
    for use in given:
        before = builder.value("model.layers")
        builder.take_use("model.layers", use, integer)
        after = builder.value("model.layers")
        if before is not None and after != before:
            why = f"encoder and decoder have as many blocks here, not {before} and {after}: give --set model.layers=..."
            builder.leave_use(use, LeftReason.DECISION, why, "model.layers")
