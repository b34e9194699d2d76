"""`tr11 backup`: copies of checkpoints and logs on other file systems, proven by reading them back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from tr11ops.cli.backup_owner import adopt
from tr11ops.cli.backup_restore import drill, restore
from tr11ops.cli.backup_run import (
    ArchiveOption,
    KindOption,
    StepsArgument,
    asked_of,
    read_back,
    require_archives,
    run_copies,
)
from tr11ops.cli.backup_status import status
from tr11ops.cli.common import JsonOption, Refusal, RunOption, SetOption, directory_of, read_card

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tr11ops.backup.due import Plan
    from tr11ops.checkpoints.scan import CheckpointRow
    from tr11ops.runcard import RunCard

SCHEMA = 1

app = typer.Typer(
    name="backup",
    help="Copies of checkpoints: plan, run, verify, restore, drill, status. Nothing at the far side is ever removed.",
    no_args_is_help=True,
)


@app.command("plan")
def plan(
    steps: StepsArgument = None,
    run: RunOption = None,
    to: ArchiveOption = None,
    kind: KindOption = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """What the next round copies where and why, how long that takes, what is copied already, and what is not copied.

    Goes by what is on record; no bucket is asked. Exit code 1: a folder that copies should go to cannot be used.

    [bold]Examples[/bold]

      tr11 backup plan

      tr11 backup plan 12300 --to store
    """
    card = read_card(run, overrides)
    show_plan(card, asked_of(steps, kind), require_archives(card, to, steps), as_json)


app.command("run")(run_copies)
app.command("verify")(read_back)
app.command("restore")(restore)
app.command("drill")(drill)
app.command("status")(status)
app.command("adopt")(adopt)


def show_plan(card: RunCard, asked: Any, archives: Sequence[str], as_json: bool) -> None:
    """Print the plan of a round. Raises Refusal where the records or the checkpoints cannot be read."""
    from tr11ops.backup.archive_round import plan_of, rows_of
    from tr11ops.backup.archives import archive_key, folder_fault
    from tr11ops.backup.data_sets import data_states
    from tr11ops.backup.ledger import read_archive_state
    from tr11ops.backup.records import read_copies
    from tr11ops.backup.round_values import CARDS_ARCHIVES, Request
    from tr11ops.report.backup_data import data_lines, data_value
    from tr11ops.report.backup_plan import lines, value, weigh

    directory = directory_of(card)
    names = tuple(name if name in CARDS_ARCHIVES else archive_key(name, card) for name in archives)
    try:
        rows = rows_of(directory)
        copies = read_copies(directory)
        made = plan_of(card, rows, copies, Request(names, asked))
        states = {name: read_archive_state(directory, name) for name in names}
    except (OSError, ValueError) as error:
        raise Refusal(f"what is copied is not known: {error}", exit_code=3) from None
    weighed = weigh(made, directory.paths.checkpoints)
    rates = {name: state.rate for name, state in states.items() if state is not None and state.rate}
    if asked.steps:
        _require_here(asked.steps, rows, made)
    looks = {key: folder_fault(name, card) for key, name in zip(names, archives, strict=True)}
    faults = {key: fault for key, fault in looks.items() if fault}
    data = {} if asked.steps else {name: data_states(card, copies, name) for name in names}
    if as_json:
        shown = value(card.run.name, card.run.variant, weighed, rates, faults)
        typer.echo(json.dumps({**shown, "data": data_value(data)}, indent=1))
    else:
        for line in (*lines(card.run.name, card.run.variant, weighed, rates, faults), *data_lines(data)):
            typer.echo(line)
    raise typer.Exit(1 if faults else 0)


def _require_here(steps: Sequence[int], rows: Sequence[CheckpointRow], made: Plan) -> None:
    known = {copy.step for copy in made.due} | {copy.step for copy in made.copied}
    missing = sorted(set(steps) - known)
    if missing:
        faults = {row.step: row.faults[0] for row in rows if row.faults}
        why = faults.get(missing[0], "there is no such checkpoint here")
        raise Refusal(f"step {missing[0]} cannot be copied: {why}; see tr11 checkpoints list")
