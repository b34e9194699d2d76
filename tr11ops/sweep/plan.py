"""The plan of a study: the grid of its keys, the learning rate of each batch size, and each cell as
a whole run card, checked by the card's own rules before anything is made. Pure but for `load`,
which reads the card.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tr11ops.base.errors import SweepError
from tr11ops.launch.rehearse import as_options
from tr11ops.runcard.card import OwnCard
from trainer.config.card import CardError
from trainer.contract.record import Record
from trainer.schedule.learning_rate import cooldown_samples_of
from trainer.schedule.path import decay_samples_of, path_of, warmup_samples_of

# The grid of a study: keys of the run card with the values to try, and one cell for each
# combination. Pure.

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


# Learning rate and warm-up of another batch size, and what makes runs of different batches
# comparable. Pure.
#
# The rules are those of the published large-batch experiments (BERT and T5, batches 512 to 32,768 at
# equal samples): the rate grows with the square root of the batch, the share of the warm-up with the
# batch; beyond sixteen times the card's batch the rate stays (16,384 has the rate of 8,192), and no
# more than 64 % of the decay is warm-up.

BatchRule: TypeAlias = Literal["sqrt", "linear", "none"]
MOST_TIMES = 16.0  # of the card's batch: the rate grows no further
MOST_WARMUP = 0.64  # of the decay


def rule_overrides(card: OwnCard, batch: int, rule: BatchRule) -> dict[str, Any]:
    """What the rule sets in place of the card's own for a step of `batch` samples, by key; the
    card's batch gives none.

    lr = lr0 sqrt(B / B0), or lr0 B / B0 where it is linear; the warm-up takes B / B0 times the
    card's samples, which is as many steps.
    """
    ratio = batch / card.batch.global_batch_size
    if rule == "none" or ratio == 1:
        return {}
    schedule = card.schedule
    grown = min(ratio, MOST_TIMES)
    rate = _rounded(schedule.learning_rate * (math.sqrt(grown) if rule == "sqrt" else grown))
    found: dict[str, Any] = {"schedule.learning_rate": rate}
    if schedule.min_learning_rate > rate:
        found["schedule.min_learning_rate"] = rate
    warmup = warmup_samples_of(card)
    if warmup:
        most = max(MOST_WARMUP * decay_samples_of(card), warmup)
        found |= _warmup(card, round(min(warmup * ratio, most)))
    return found


def equal_overrides(card: OwnCard, batch: int, batches: Iterable[int]) -> dict[str, Any]:
    """What lets every cell see the same samples: the same end for all `batches`, and evaluations,
    of the same samples, and saves at the same places. What the card gives in steps is given in
    samples instead.
    """
    common = math.lcm(*batches)
    samples = card.batch.train_samples
    found: dict[str, Any] = {"batch.train_samples": samples // common * common or samples}
    if card.batch.train_iterations is not None:
        found["batch.train_iterations"] = None
    if card.schedule.decay_iterations is not None:
        found |= {
            "schedule.decay_samples": decay_samples_of(card),
            "schedule.decay_iterations": None,
        }
    if card.schedule.cooldown_iterations is not None:
        found |= {
            "schedule.cooldown_samples": cooldown_samples_of(card),
            "schedule.cooldown_iterations": None,
        }
    if card.schedule.warmup_iterations is not None:
        found |= _warmup(card, round(warmup_samples_of(card)))
    ratio = batch / card.batch.global_batch_size
    counts = {
        "checkpoint.interval": card.checkpoint.interval,
        "evaluation.interval": card.evaluation.interval,
        "evaluation.iterations": card.evaluation.iterations,
    }
    return found | {
        key: max(1, round(count / ratio)) for key, count in counts.items() if count and ratio != 1
    }


def _warmup(card: OwnCard, samples: int) -> dict[str, Any]:
    """The warm-up in samples, in place of a share or of steps."""
    others = {
        "warmup_fraction": card.schedule.warmup_fraction,
        "warmup_iterations": card.schedule.warmup_iterations,
    }
    gone = {f"schedule.{key}": None for key, value in others.items() if value is not None}
    return {"schedule.warmup_samples": samples, **gone}


def without_named(found: Mapping[str, Any], named: Sequence[str]) -> dict[str, Any]:
    """The overrides less what the grid or the command line names itself: that counts as it was
    typed.
    """
    return {key: value for key, value in found.items() if key not in named}


def _rounded(value: float) -> float:
    """Six digits: a card is read by people."""
    return float(f"{value:.6g}")


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
    card: OwnCard
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


def plan_sweep(load: Callable[[Sequence[str]], OwnCard], request: SweepRequest) -> SweepPlan:
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


def _batches(axes: Sequence[GridAxis], base: OwnCard) -> tuple[int, ...]:
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
    base: OwnCard, one: GridCell, request: SweepRequest, batches: Sequence[int]
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
