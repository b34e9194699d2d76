"""The list of checkpoints as a table for people: at most 80 columns for the numbers of a 176B run."""

from __future__ import annotations

from collections.abc import Sequence

from tr11ops.checkpoint_list import CheckpointRow
from tr11ops.units import duration, quantity, size

_HEAD = ("step", "size", "shape", "samples", "tokens", "age", "state")
_LEFT = {"shape", "state"}
_SHOWN_FAULTS = 3


def table(rows: Sequence[CheckpointRow], now: float) -> str:
    """One line a checkpoint, oldest first, then what is wrong with any; `now`: seconds since the epoch."""
    lines = [_HEAD, *(_cells(row, now) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    shown = [
        "  ".join(
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(_HEAD, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    for row in rows:
        shown += [f"step {row.step}: {fault}" for fault in row.faults[:_SHOWN_FAULTS]]
        if len(row.faults) > _SHOWN_FAULTS:
            shown.append(f"step {row.step}: and {len(row.faults) - _SHOWN_FAULTS} more")
    return "\n".join([*shown, "shape: tensor x pipeline x data"])


def _cells(row: CheckpointRow, now: float) -> tuple[str, ...]:
    return (
        str(row.step),
        size(row.bytes),
        row.shape,
        "?" if row.consumed_samples is None else f"{row.consumed_samples:,}",
        "?" if row.consumed_tokens is None else quantity(row.consumed_tokens),
        duration(max(0.0, now - row.created)),
        row.state + (", latest" if row.is_latest else ""),
    )
