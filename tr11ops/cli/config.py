"""`tr11 config`: what a run card says, as it is written or with all that follows from it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tr11ops.cli.context import JSON, RunContext
from tr11ops.runcard.card import SECRET_FILE_KEYS, RunCard, resolved
from tr11ops.runcard.load import apply_overrides, read_tables, secret_values
from tr11ops.runcard.toml_writer import write_card
from trainer.config.card import CardError

SCHEMA = 1

app = typer.Typer(
    name="config",
    help="""What a run card says, and what follows from it.

    Examples:
      tr11 config show
      tr11 config show --resolved --run tr11-176B-ml
    """,
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Keeps `show` a command of its own, though it is the only one."""


@app.command()
def show(
    context: Annotated[RunContext, JSON],
    is_resolved: Annotated[
        bool, typer.Option("--resolved", help="With every default, variables put in, paths made absolute.")
    ] = False,
) -> None:
    """Print the run card as TOML, with what --set changes.

    With --resolved, a variable that is not defined here stays as written. Every key: docs/run-card.md.

    Examples:
      tr11 config show --run demo
      tr11 config show --resolved --set slurm.nodes=24
      tr11 config show --resolved --json | jq .card.parallel
    """
    path = context.card_path
    if is_resolved:
        tables: dict[str, Any] = resolved(context.card_with_undefined())
        derived = tables.pop("derived")
    else:
        tables, problems = apply_overrides(read_tables(path), context.overrides, RunCard)
        problems += secret_values(tables, SECRET_FILE_KEYS)
        if problems:
            raise CardError("command line", problems)
        derived = None
    document = {"schema": SCHEMA, "path": str(path), "resolved": is_resolved, "card": tables, "derived": derived}
    context.emit(document, [write_card(_without_none(tables), {}, [str(path)]).rstrip("\n")])


def _without_none(tables: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: a key that is not set is left out."""
    return {
        name: _without_none(value)
        if isinstance(value, dict)
        else [_without_none(item) if isinstance(item, dict) else item for item in value]
        if isinstance(value, list)
        else value
        for name, value in tables.items()
        if value is not None
    }
