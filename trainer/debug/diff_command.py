"""`diff A B`: two states of a training, number by number: checkpoints, or dumps of all ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from trainer.checkpoint.reader import open_checkpoint
from trainer.contract.errors import CheckpointError, CheckpointUsageError
from trainer.data.progress import progress_bar
from trainer.debug import report
from trainer.debug.findings import judge, pair_up
from trainer.debug.record import MOMENTS, Moment, companions
from trainer.debug.snapshot import StateSnapshot, checkpoint_snapshot, dump_snapshots

HELP = "compare two states: checkpoints of any layout and shape, or debug dumps"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    place = "a checkpoint's folder, or dumps: FOLDER[:ITERATION[:MOMENT]]"
    parser.add_argument("a", metavar="A", help=place)
    parser.add_argument("b", metavar="B", help=place)
    parser.add_argument(
        "--tolerance", type=_tolerance, default=0.0, metavar="X",
        help="allowed |a - b|, relative to the tensor's largest value; default 0: the same numbers",
    )  # fmt: skip


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number from 0 on")
    return value


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compare; the result's "equal" is True when nothing differs and nothing is corrupt inside A or B."""
    a, b = open_states(options.a, "A"), open_states(options.b, "B")
    pairs = pair_up(a, b)
    if not pairs:
        raise CheckpointError(
            f"A and B have no moment in common: A holds {_held(a)}, B holds {_held(b)}; name one state of each "
            "(FOLDER:ITERATION:MOMENT) to compare them all the same"
        )
    total = sum(math.prod(copy.shape) for pair in pairs for copy in pair[-1].copies)
    with progress_bar("{task.completed:,.0f} numbers") as bar:
        task = bar.add_task("comparing", total=total)
        verdict = judge(pairs, [*a, *b], options.tolerance, partial(bar.advance, task))
        bar.update(task, completed=total)
    return {"a": options.a, "b": options.b, "tolerance": options.tolerance, **report.document(verdict)}


def describe(result: dict[str, Any]) -> str:
    """The verdict as text."""
    return report.describe(result)


def exit_code(result: dict[str, Any]) -> int:
    """0 equal, 1 different."""
    return 0 if result["equal"] else 1


def open_states(text: str, label: str) -> list[StateSnapshot]:
    """The states that an operand names, by time. Raises CheckpointUsageError, CheckpointError, OSError."""
    folder, iteration, moment = _parsed(text)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a checkpoint's folder, or one with debug dumps")
    if iteration is None and not companions(folder):
        return [checkpoint_snapshot(open_checkpoint(folder), folder, label)]
    states = dump_snapshots(folder, label)
    found = [state for state in states if iteration in {None, state.iteration} and moment in {None, state.moment}]
    if not found:
        held = f"it holds {_held(states)}" if states else "it holds no dump (debug-*.json)"
        raise CheckpointError(f"{folder} has no dump of {text.removeprefix(f'{folder}:')}; {held}")
    return found


def _parsed(text: str) -> tuple[Path, int | None, Moment | None]:
    """FOLDER, FOLDER:ITERATION or FOLDER:ITERATION:MOMENT; a folder that exists under the whole name is that folder."""
    if ":" not in text or Path(text).is_dir():
        return Path(text), None, None
    folder, *rest = text.split(":")
    number, moment = rest[0], rest[1] if len(rest) > 1 else None
    if len(rest) > 2 or not number.isdecimal() or moment not in {None, *get_args(Moment)}:
        raise CheckpointUsageError(
            f"{text}: must be FOLDER:ITERATION:MOMENT, where MOMENT is one of {', '.join(MOMENTS)}"
        )
    return Path(folder), int(number), cast("Moment | None", moment)


def _held(states: Sequence[StateSnapshot]) -> str:
    shown = [f"{state.moment} {state.iteration}" for state in states]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:2], "...", *shown[-2:]])
