"""The plan of a round of backup, as `tr11 backup plan` and `run` show it."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import typer

from tr11ops.backup.archive_round import plan_of, rows_of
from tr11ops.backup.archives import archive_key, folder_fault
from tr11ops.backup.data_sets import data_states
from tr11ops.backup.ledger import read_archive_state
from tr11ops.backup.round_values import CARDS_ARCHIVES, RoundRequest
from tr11ops.backup.screen_data import data_lines, data_value
from tr11ops.backup.screen_plan import lines, value, weigh
from tr11ops.base.errors import Refusal
from tr11ops.cli.common import directory_of, in_time
from tr11ops.cli.context import answer
from tr11ops.rundir.copies import read_copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tr11ops.backup.due import Asked, CopyPlan
    from tr11ops.backup.ledger import ArchiveState
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.checkpoint_scan import CheckpointRow
    from tr11ops.rundir.copies import CopyRecord


def show_plan(card: RunCard, asked: Asked, archives: Sequence[str], as_json: bool) -> None:
    """Print the plan of a round. Raises Refusal where the records or the checkpoints cannot be read."""
    directory = directory_of(card)
    names = tuple(name if name in CARDS_ARCHIVES else archive_key(name, card) for name in archives)

    def look() -> tuple[list[CheckpointRow], tuple[CopyRecord, ...], CopyPlan, dict[str, ArchiveState | None]]:
        rows = rows_of(directory)
        copies = read_copies(directory)
        made = plan_of(card, rows, copies, RoundRequest(names, asked))
        return rows, copies, made, {name: read_archive_state(directory, name) for name in names}

    try:
        rows, copies, made, states = in_time(look)
    except (OSError, ValueError) as error:
        raise Refusal(f"what is copied is not known: {error}", exit_code=3) from None
    weighed = weigh(made, directory.paths.checkpoints)
    rates = {name: state.rate for name, state in states.items() if state is not None and state.rate}
    if asked.steps:
        _require_here(asked.steps, rows, made)
    looks = {key: folder_fault(name, card) for key, name in zip(names, archives, strict=True)}
    faults = {key: fault for key, fault in looks.items() if fault}
    data = {} if asked.steps else {name: data_states(card, copies, name) for name in names}
    shown = (card.run.name, card.run.variant, weighed, rates, faults)
    answer(as_json, {**value(*shown), "data": data_value(data)}, chain(lines(*shown), data_lines(data)))
    raise typer.Exit(1 if faults else 0)


def _require_here(steps: Sequence[int], rows: Sequence[CheckpointRow], made: CopyPlan) -> None:
    known = {copy.step for copy in made.due} | {copy.step for copy in made.copied}
    missing = sorted(set(steps) - known)
    if missing:
        faults = {row.step: row.faults[0] for row in rows if row.faults}
        why = faults.get(missing[0], "there is no such checkpoint here")
        raise Refusal(f"step {missing[0]} cannot be copied: {why}; see tr11 checkpoints list")
