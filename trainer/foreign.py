"""A training from a checkpoint in the original layout: each rank reads what it holds, on any topology."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from trainer.checkpoint import sharded_files
from trainer.checkpoint.agreement import Crew
from trainer.checkpoint.catalogue import CheckpointError
from trainer.checkpoint.compatibility import check_model
from trainer.checkpoint.deepspeed_layout import open_deepspeed_layout
from trainer.checkpoint.sharded_files import Piece
from trainer.checkpoint.source import CheckpointFacts, Part, TensorSource
from trainer.checkpoint.state import ShardedState
from trainer.checkpoint.store import CheckpointInfo


def fill_from(
    place: Path,
    state: ShardedState,
    info: CheckpointInfo,
    crew: Crew,
    weights_only: bool,
    say: Callable[[str], None],
) -> CheckpointFacts:
    """Fill the tensors of `state` from a folder of the original layout. Collective.

    Rank 0 checks all files and tells the others where everything lies. Everything is compared with the model before
    the first tensor is touched. Raises CheckpointError on every rank.
    """
    what = f"{place} was not loaded"
    source = crew.on_first(what, lambda: open_deepspeed_layout(place))
    parts: dict[Part, list[Piece]] = {"weights": sharded_files.weight_pieces(state.weights)}
    if not weights_only:
        parts["optimizer"] = sharded_files.fragment_pieces(state.fragments)
    facts = {key: fact for key, fact in info.model.items() if key != "precision.dtype" or not weights_only}
    crew.each(what, lambda: _check(source, parts, facts))
    crew.each(what, lambda: _fill(source, parts))
    for remark in source.remarks:
        say(remark)
    return source.facts


def _check(source: TensorSource, parts: dict[Part, list[Piece]], model: dict[str, object]) -> None:
    check_model(source.facts.model, model)
    for part, pieces in parts.items():
        stored = source.tensors(part)
        if not stored and pieces:
            raise CheckpointError(
                f"it holds no {part}: it is a weights-only copy; set checkpoint.load to it and "
                "checkpoint.load_optimizer = false"
            )
        for piece in pieces:
            found = stored.get(piece.key)
            if found is None or tuple(found.shape) != tuple(piece.global_shape):
                shape = "nothing" if found is None else str(tuple(found.shape))
                raise CheckpointError(
                    f"it is of another model: {piece.key} is {shape} there and {tuple(piece.global_shape)} in this run"
                )


def _fill(source: TensorSource, parts: dict[Part, list[Piece]]) -> None:
    with torch.no_grad():
        for part, pieces in parts.items():
            for piece in pieces:
                piece.tensor.copy_(source.read(part, piece.key, piece.offsets, tuple(piece.tensor.shape)))
