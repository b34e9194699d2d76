"""Megatron's options of activation recomputation, which say one thing together, into [model]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.builder import Builder
from tr11ops.importer.options import OptionUse, integer, one_of
from tr11ops.importer.results import LeftReason

_GRANULARITIES = one_of(full="full", selective="selective")
_METHODS = one_of(uniform="uniform", block="block")


def place_recompute(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--recompute-activations` is short for selective; method and number of layers count with `full` alone."""
    short, granularity = uses.get("--recompute-activations"), uses.get("--recompute-granularity")
    if granularity is not None:
        builder.take_use("model.recompute_granularity", granularity, _GRANULARITIES)
    elif short is not None:
        builder.put("model.recompute_granularity", "selective", short.option, short.line)
    found = builder.value("model.recompute_granularity", None)
    switch = granularity or short
    if found is not None and switch is not None:
        builder.put("model.activation_checkpointing", True, switch.option, switch.line)
    _layers(builder, uses.get("--recompute-method"), uses.get("--recompute-num-layers"), found == "full")


def _layers(builder: Builder, method: OptionUse | None, count: OptionUse | None, is_full: bool) -> None:
    """`block`: the first layers of each stage, here as many of the whole model. `uniform`: all, in groups."""
    if not is_full or method is None:
        _leave(builder, (method, count), LeftReason.NO_EFFECT, "counts only with granularity full and a method")
        return
    try:
        chosen = _METHODS(method.values)
        each = integer(count.values) if count is not None else 1
    except ConversionProblem as problem:
        _leave(builder, (method, count), LeftReason.DECISION, f"{problem}: give --set model.recompute_blocks=...")
        return
    if chosen == "uniform":
        why = "every block is recomputed, one at a time: other memory, the same numbers"
        _leave(builder, (method, count), LeftReason.ELSEWHERE, why)
        return
    blocks = each * builder.integer("parallel.pipeline", 1)
    blocks = min(blocks, builder.integer("model.layers", blocks))
    note = "the first of each stage there, as many here, dealt evenly over the model"
    use = count or method
    builder.put("model.recompute_blocks", blocks, use.option, use.line, note=note)


def _leave(builder: Builder, uses: Iterable[OptionUse | None], reason: LeftReason, why: str) -> None:
    for use in uses:
        if use is not None:
            builder.leave_use(use, reason, why)
