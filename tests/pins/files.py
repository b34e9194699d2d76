"""The formats of a run directory: for each kind of file, the shape of its records."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.pins.shapes import Shape, merged, shape

VARIABLE = re.compile(r"[0-9a-f]{8,}|[0-9]+")  # in a file's name: ids, steps, ranks, times
HOST = re.compile(r"^journal/.*-\*-\*(?=\.)")
# Written by libraries in formats of their own, or by the user.
FOREIGN = ("torchrun", "tensorboard")


def formats_of(run: Path) -> dict[str, Shape]:
    """Path below the run directory, numbers as `*` -> the shape of all records in such files."""
    found: dict[str, list[Shape]] = defaultdict(list)
    for path in sorted((*run.rglob("*.json"), *run.rglob("*.jsonl"), *run.glob("kill-switch"))):
        name = path.relative_to(run)
        if not set(FOREIGN) & set(name.parts):
            kind = HOST.sub("journal/*", VARIABLE.sub("*", str(name)))
            found[kind] += [shape(record) for record in records(path)]
    return {kind: merged(shapes) for kind, shapes in sorted(found.items())}


def records(path: Path) -> list[Any]:
    """The objects of a JSON file, or of a file with one on each line."""
    text = path.read_text()
    return (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else [json.loads(text)]
    )
