"""Whether a checkpoint fits the model of this run: pure checks, made before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainer.checkpoint.sharded_files import TensorPiece
from trainer.checkpoint.source import TensorFacts, precision_name
from trainer.contract.errors import CheckpointError
from trainer.contract.resumable import model_fault

_NARROW = {torch.bfloat16, torch.float16}  # every value of theirs is one of fp32


def check_model(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare the facts that both sides know. Raises CheckpointError with the first key that
    differs, and the fix.
    """
    fault = model_fault(saved, wanted)
    if fault is not None:
        raise CheckpointError(fault.text)


def check_pieces(
    part: str,
    stored: Mapping[str, TensorFacts],
    pieces: Iterable[TensorPiece],
    widening: bool,
) -> None:
    """Check that every piece of this rank can be filled: name, shape, dtype.

    `widening`: bf16 and fp16 may be read into fp32. Raises CheckpointError: the first fault, both
    values, the fix.
    """
    for piece in sorted(pieces, key=lambda piece: piece.key):
        found = stored.get(piece.key)
        if found is None:
            raise CheckpointError(
                f"its {part} lack {piece.key}, which this run's model has; use the run card that wrote it, "
                "or another run.variant"
            )
        if found.shape != piece.global_shape:
            raise CheckpointError(
                f"it is of another model: {piece.key} has shape {found.shape} in the checkpoint and "
                f"{piece.global_shape} in this run; use the run card that wrote it, or another run.variant"
            )
        _check_dtype(piece, found.dtype, widening)


def _check_dtype(piece: TensorPiece, saved: torch.dtype, widening: bool) -> None:
    wanted = piece.tensor.dtype
    if saved == wanted or (widening and saved in _NARROW and wanted == torch.float32):
        return
    names = [precision_name(dtype) for dtype in (saved, wanted)]
    raise CheckpointError(
        f"{piece.key} is {names[0]} in the checkpoint and {names[1]} in this run; a training resumes in the precision "
        f'it was saved in: set precision.dtype = "{names[0]}"'
    )


def check_complete(part: str, stored: Iterable[str], wanted: Iterable[str]) -> None:
    """Check that the run, all ranks together, wants all that the checkpoint holds. Raises
    CheckpointError.
    """
    extra = sorted(set(stored) - set(wanted))
    if extra:
        raise CheckpointError(
            f"it is of another model: its {part} hold {extra[0]} (and {len(extra) - 1} more), which this run's "
            "model lacks; use the run card that wrote it, or another run.variant"
        )
