"""Megatron's options of interleaved pipeline stages, which say one thing in several ways, into [parallel]."""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.builder import Builder
from tr11ops.importer.options import OptionUse, integer
from tr11ops.importer.results import LeftReason

_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_PARTS = ("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size")
_ROUND = "--microbatch-group-size-per-virtual-pipeline-stage"
_KEY, _PARTITION = "parallel.virtual_stages", "parallel.partition"


def place_interleaving(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """Parts of each stage, or layers of each part, of which the parts follow; blocks alone are counted, as there."""
    given = [uses[option] for option in (_LAYERS, *_PARTS) if option in uses]
    for use in given:
        try:
            parts = _parts(builder, use)
        except ConversionProblem as problem:
            builder.leave_use(use, LeftReason.DECISION, f"{problem}: give --set {_KEY}=...", _KEY)
            continue
        builder.put(_KEY, parts, use.option, use.line, use.value_line)
        if parts > 1 and builder.value(_PARTITION) is None:
            builder.put(
                _PARTITION, "type:transformer", use.option, use.line, note="every part has as many blocks there"
            )
    if _ROUND in uses:
        _round(builder, uses[_ROUND])


def _parts(builder: Builder, use: OptionUse) -> int:
    """Raises ConversionProblem where the layers cannot be dealt so."""
    count = integer(use.values)
    if count < 1:
        raise ConversionProblem("it must be at least 1")
    if use.option != _LAYERS:
        return count
    stages, layers = builder.integer("parallel.pipeline", 1), builder.integer("model.layers")
    if layers < 1 or layers % (stages * count):
        raise ConversionProblem(f"{layers} layers on {stages} stages cannot be cut in parts of {count} layers")
    return layers // (stages * count)


def _round(builder: Builder, use: OptionUse) -> None:
    """Micro batches that go through a part before the next part's turn: here as many as there are stages."""
    stages = builder.integer("parallel.pipeline", 1)
    try:
        is_same = integer(use.values) == stages
    except ConversionProblem as problem:
        builder.leave_use(use, LeftReason.DECISION, str(problem))
        return
    if builder.integer(_KEY, 1) == 1:
        builder.leave_use(use, LeftReason.NO_EFFECT, "counts only where stages are cut in parts")
        return
    why = "another order of the same passes: rounds are of as many micro batches as there are stages"
    builder.leave_use(use, LeftReason.ELSEWHERE if is_same else LeftReason.NO_COUNTERPART, why)
