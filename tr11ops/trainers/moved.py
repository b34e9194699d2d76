"""What was moved out of a foreign trainer's way, as `FOLDER.set-aside/moves.jsonl` has it."""

from __future__ import annotations

import json
from pathlib import Path

from tr11ops.trainers.start_names import base_of
from trainer.contract.record import Finite, Record

SUFFIX = ".set-aside"
MOVES = "moves.jsonl"
MOST_TOLD = 3


class MovedAside(Record):
    """A checkpoint that was moved out of its trainer's way: `name` in the folder before, when, and why."""

    name: str
    time: Finite
    why: str


def read_moves(folder: Path) -> tuple[MovedAside, ...]:
    """The last ones that were moved out of a folder, the newest first; none where that cannot be read."""
    try:
        lines = (aside_place(folder) / MOVES).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ()
    found: dict[str, MovedAside] = {}
    for line in reversed(lines):
        try:
            value = json.loads(line)
            moved = MovedAside(str(value["name"]), float(value["time"]), str(value["why"]))
        except (ValueError, TypeError, KeyError):
            continue
        found.setdefault(moved.name, moved)
        if len(found) == MOST_TOLD:
            break
    return tuple(found.values())


def aside_place(folder: Path) -> Path:
    """Where what is moved out of a folder of checkpoints lies: one place for all starts."""
    folder = base_of(folder)
    return folder.with_name(f"{folder.name}{SUFFIX}")
