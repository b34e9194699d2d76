"""`values PLACE...`: every number of checkpoints is looked at; which tensors hold NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.rewrite import CHUNK_BYTES, row_blocks, source_bytes, tensor_bytes
from trainer.checkpoint.source import PARTS, TensorSource
from trainer.contract.errors import CheckpointError
from trainer.contract.record import JsonObject
from trainer.data.progress import progress_bar
from trainer.parallel.replica_check import is_finite


def run(options: SimpleNamespace) -> JsonObject:
    """Look at each; one that cannot be read has a `fault`, and the others are looked at all the
    same.
    """
    with progress_bar() as bar:
        task = bar.add_task("values", total=None)
        found = [_look(Path(place), partial(bar.advance, task)) for place in options.places]
    return {"checkpoints": found}


def exit_code(result: JsonObject) -> int:
    """0 all finite, 1 a tensor is not, or could not be read."""
    return int(any(one["not_finite"] or one["fault"] for one in result["checkpoints"]))


def describe(result: JsonObject) -> str:
    lines = []
    for one in result["checkpoints"]:
        bad = [f"{tensor} ({part})" for part, tensor in one["not_finite"]]
        words = one["fault"] or (
            f"NaN or infinity in {', '.join(bad)}" if bad else f"{one['tensors']} tensors, finite"
        )
        lines.append(f"{one['place']}: {words}")
    return "\n".join(lines)


def _look(place: Path, on_bytes: Callable[[int], None]) -> JsonObject:
    """What one checkpoint holds. Reads CHUNK_BYTES, or one row of a tensor, at a time."""
    result: JsonObject = {
        "place": str(place),
        "tensors": 0,
        "bytes": 0,
        "not_finite": [],
        "fault": "",
    }
    try:
        source = open_checkpoint(place)
        result["bytes"] = source_bytes(source)
        for part in PARTS:
            for key, facts in source.tensors(part).items():
                if not _is_finite(source, part, key):
                    result["not_finite"].append([part, key])
                result["tensors"] += 1
                on_bytes(tensor_bytes(facts))
    except CheckpointError as error:
        result["fault"] = " ".join(str(error).split())
    return result


def _is_finite(source: TensorSource, part: Any, key: str) -> bool:
    blocks = row_blocks(source.tensors(part)[key], CHUNK_BYTES)
    return all(is_finite(source.read(part, key, offsets, sizes)) for offsets, sizes in blocks)
