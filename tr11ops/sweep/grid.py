"""The grid of a study: keys of the run card with the values to try, and one cell for each
combination. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from tr11ops.base.errors import SweepError
from trainer.contract.record import Record

BATCH_KEY = "batch.global_batch_size"
MOST_CELLS = 24  # so many marks fit in the one comment that an array has
OWN_KEYS = ("run.name", "run.variant", "run.directory", "run.kill_switch")
_VALUE = re.compile(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,\[{"'])+""")
_SHORT = {
    BATCH_KEY: "batch",
    "optimizer.type": "",
    "optimizer.lamb_variant": "",
    "schedule.learning_rate": "rate",
    "schedule.warmup_samples": "warmup",
    "model.embedding_layernorm": "embnorm",
}


class GridAxis(Record):
    """A dotted key of the card, and the values to try as they were typed."""

    key: str
    values: tuple[str, ...]


class GridCell(Record):
    """One combination. `number` counts from 1 and is the cell's task of the array; `settings` are
    (key, value).
    """

    number: int
    name: str
    settings: tuple[tuple[str, str], ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        """The same as `--set` takes it."""
        return tuple(f"{key}={value}" for key, value in self.settings)


def parse_axis(text: str) -> GridAxis:
    """Read `section.key=v1,v2`. Raises SweepError where that is not what it says, or a value stands
    twice.
    """
    key, equals, rest = text.partition("=")
    key, values = key.strip(), tuple(value.strip() for value in _VALUE.findall(rest))
    if not equals or "." not in key or not all(values) or not values:
        raise SweepError(
            f"--grid {text!r}: must be SECTION.KEY=VALUE,VALUE; e.g. --grid {BATCH_KEY}=512,1024"
        )
    if ",".join(values).replace(" ", "") != rest.replace(" ", ""):
        raise SweepError(
            f"--grid {text!r}: a value is empty, or a bracket or quote has no end; write V1,V2,V3"
        )
    twice = _twice(values)
    if twice is not None:
        raise SweepError(f"--grid {key}: the value {twice} stands twice; give each once")
    if key in OWN_KEYS:
        raise SweepError(
            f"--grid {key}: each cell has its own from the sweep; leave it out (--name names the sweep)"
        )
    if key.startswith("slurm."):
        raise SweepError(
            f"--grid {key}: the cells are one array, whose tasks have the same options; use --set {key}="
        )
    return GridAxis(key, values)


def _twice(words: Sequence[str]) -> str | None:
    return next((word for word in words if words.count(word) > 1), None)


def cells_of(axes: Sequence[GridAxis]) -> tuple[GridCell, ...]:
    """Every combination of the axes' values, the last axis fastest.

    Raises SweepError: no axis, one key on two, too many cells, two of one name.
    """
    if not axes:
        raise SweepError(f"give what to vary: --grid {BATCH_KEY}=512,1024,2048")
    keys = [axis.key for axis in axes]
    twice = _twice(keys)
    if twice is not None:
        raise SweepError(f"--grid {twice}: stands twice; give all its values in one --grid")
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_CELLS:
        least = -(-count // MOST_CELLS)
        raise SweepError(
            f"the grid has {count} cells; a sweep takes at most {MOST_CELLS}: make it {least} sweeps"
        )
    found = tuple(
        GridCell(
            number, cell_name(zip(keys, values, strict=True)), tuple(zip(keys, values, strict=True))
        )
        for number, values in enumerate(itertools.product(*(axis.values for axis in axes)), start=1)
    )
    _require_own_names(found)
    return found


def cell_name(settings: Iterable[tuple[str, str]]) -> str:
    """A name for files and logs: `batch512-lamb`. Signs that no name may have are left out."""
    words = (f"{_SHORT.get(key, key.rpartition('.')[2])}{_plain(value)}" for key, value in settings)
    name = "-".join(word for word in words if word)[:80]
    if name[:1].isalnum():
        return name
    return f"cell{name}"


def _plain(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "", value)


def _require_own_names(cells: Sequence[GridCell]) -> None:
    seen: dict[str, GridCell] = {}
    for cell in cells:
        other = seen.setdefault(cell.name, cell)
        if other is not cell:
            raise SweepError(
                f"two cells would be called {cell.name}: {' '.join(other.overrides)} and {' '.join(cell.overrides)};"
                " make it two sweeps"
            )
