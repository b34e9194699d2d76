"""`tr11 launch --rehearse`: the options that make a rehearsal of a card, and what it differs in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from tr11ops.cli.common import card_path, say
from tr11ops.launch.rehearse import as_options, card_text, differences, rehearsal_overrides
from tr11ops.runcard.card import load_card
from trainer.contract.files import write_atomically

if TYPE_CHECKING:
    from tr11ops.launch.session import LaunchJob
    from tr11ops.runcard.card import RunCard

CARD_FILE = "rehearsal.toml"
_WIDEST = 48


def rehearsal_options(run: str | None, overrides: Sequence[str]) -> tuple[RunCard, list[str]]:
    """The main card, and the `--set` options that make its rehearsal: those of the person come first and count too."""
    main = load_card(card_path(run), overrides, os.environ)
    return main, [*overrides, *as_options(rehearsal_overrides(main))]


def differences_value(main: RunCard, other: RunCard) -> list[dict[str, Any]]:
    """What the rehearsal differs in, for a machine."""
    return [{"key": key, "main": first, "rehearsal": second} for key, first, second in differences(main, other)]


def show_differences(main: RunCard, other: RunCard) -> None:
    """What the rehearsal differs in, a line each; all else is the main card's."""
    typer.echo(f"The rehearsal is {main.run.name} but for:")
    for entry in differences_value(main, other):
        typer.echo(f"  {entry['key']}: {_shown(entry['main'])} -> {_shown(entry['rehearsal'])}")
    typer.echo("")


def keep_card(job: LaunchJob, main: RunCard) -> None:
    """Write the rehearsal's own card beside its run, for `tr11 status` and all other commands."""
    path = job.directory.root / CARD_FILE
    head = f"The rehearsal of {main.run.name}, written by `tr11 launch --rehearse`; it is written again each time."
    write_atomically(path, card_text(job.card, head))
    say(f"its card, for status, logs and kill: --run {path}")


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _WIDEST else f"...{text[3 - _WIDEST :]}"
