"""The plan of a study: each cell as a whole run card, checked by the card's own rules before
anything is made. Pure but for `load`, which reads the card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tr11ops.base.errors import SweepError
from tr11ops.launch.rehearse import as_options
from tr11ops.runcard.card import RunCard
from tr11ops.sweep.grid import BATCH_KEY, GridAxis, GridCell, cells_of
from tr11ops.sweep.rule import BatchRule, equal_overrides, rule_overrides, without_named
from trainer.config.card import CardError
from trainer.contract.record import Record
from trainer.schedule.path import path_of

# What belongs to the one run that the card was written for: a cell that kept it would write into
# that run's copies.
REMOVED = ("run.kill_switch", "hub.repository", "backup.store", "backup.url", "slurm.master_port")


class SweepRequest(Record):
    """What was asked for. `folder` holds the run directories of the cells; `named` are keys of
    --set, which no rule replaces.
    """

    axes: tuple[GridAxis, ...]
    name: str
    folder: Path
    rule: BatchRule = "sqrt"
    equal_samples: bool = False
    named: tuple[str, ...] = ()


class SweepCell(Record):
    """One run of the study, complete. `derived` is what the rule and equal samples set, by key."""

    grid: GridCell
    card: RunCard
    derived: tuple[tuple[str, Any], ...]

    @property
    def number(self) -> int:
        return self.grid.number

    @property
    def name(self) -> str:
        return self.grid.name


class SweepPlan(Record):
    """The whole study."""

    request: SweepRequest
    cells: tuple[SweepCell, ...]


def plan_sweep(load: Callable[[Sequence[str]], RunCard], request: SweepRequest) -> SweepPlan:
    """Plan every cell. `load` reads the card with these overrides, and raises CardError.

    Raises CardError for the card itself; SweepError with a line for each fault of a cell, for cells
    that say the same, and where equal samples cannot be.
    """
    base = load(())
    grid = cells_of(request.axes)
    batches = _batches(request.axes, base)
    is_by_batch = any(axis.key == BATCH_KEY for axis in request.axes)
    if is_by_batch and base.batch.train_iterations is not None and not request.equal_samples:
        raise SweepError(
            "batch.train_iterations: so many steps of another batch are other samples; add --equal-samples, or give the"
            " card batch.train_samples"
        )
    cells, faults = [], dict[str, list[str]]()
    for one in grid:
        derived = _derived(base, one, request, batches)
        try:
            cells.append(
                SweepCell(one, load(_overrides(one, request, derived)), tuple(derived.items()))
            )
        except CardError as error:
            for problem in error.problems:
                faults.setdefault(str(problem), []).append(one.name)
    if faults:
        raise SweepError(
            "\n".join(_fault(problem, names, len(grid)) for problem, names in faults.items())
        )
    _require_differences(cells)
    if request.equal_samples:
        _require_equal_ends(cells)
    return SweepPlan(request, tuple(cells))


def _batches(axes: Sequence[GridAxis], base: RunCard) -> tuple[int, ...]:
    """The batch sizes of the grid, as far as they are numbers: the card's rules refuse the others."""
    values = next((axis.values for axis in axes if axis.key == BATCH_KEY), ())
    if values:
        return tuple(map(_number, values))
    return (base.batch.global_batch_size,)


def _number(text: str) -> int:
    plain = text.replace("_", "")
    if not (plain.isascii() and plain.isdecimal()) or int(plain) < 1:
        raise SweepError(f"--grid {BATCH_KEY}: {text!r} is not a number of samples; write 512,1024")
    return int(plain)


def _derived(
    base: RunCard, one: GridCell, request: SweepRequest, batches: Sequence[int]
) -> dict[str, Any]:
    settings = dict(one.settings)
    if BATCH_KEY in settings:
        batch = _number(settings[BATCH_KEY])
    else:
        batch = base.batch.global_batch_size
    if request.equal_samples:
        equal = equal_overrides(base, batch, batches)
    else:
        equal = {}
    ruled = without_named(rule_overrides(base, batch, request.rule), request.named)
    return without_named({**equal, **ruled}, tuple(settings))


def _overrides(one: GridCell, request: SweepRequest, derived: dict[str, Any]) -> tuple[str, ...]:
    own = {
        **dict.fromkeys(REMOVED),
        "run.name": request.name,
        "run.variant": one.name,
        "run.directory": str(request.folder / one.name),
    }
    return (*as_options(own), *as_options(derived), *one.overrides)


def _fault(problem: str, names: Sequence[str], count: int) -> str:
    if len(names) == count:
        where = "every cell"
    else:
        where = f"cell {', '.join(names)}"
    return f"{where}: {problem}"


def _require_differences(cells: Sequence[SweepCell]) -> None:
    """Two values may be written differently and mean the same, and a rule may make two cells equal."""
    seen: dict[str, SweepCell] = {}
    for cell in cells:
        run = cell.card.run.model_copy(update={"variant": "main", "directory": "run"})
        said = cell.card.model_copy(update={"run": run}).digest
        other = seen.setdefault(said, cell)
        if other is not cell:
            raise SweepError(
                f"cells {other.name} and {cell.name} say the same; leave one of the two values out"
            )


def _require_equal_ends(cells: Sequence[SweepCell]) -> None:
    ends = {cell.name: path_of(cell.card).end.consumed_samples for cell in cells}
    if len(set(ends.values())) > 1:
        named = ", ".join(f"{name} {samples:,}" for name, samples in list(ends.items())[:4])
        raise SweepError(
            f"--equal-samples: the cells end at different samples ({named}); leave out batch.ramp and"
            " batch.train_tokens (--set batch.ramp=none)"
        )
