"""What the shell offers for the value of an option or an argument. What cannot be read is not
offered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tr11ops.base.deadline import within

if TYPE_CHECKING:
    from tr11ops.rundir.paths import RunDirectory

SECONDS = 2.0  # a person waits for the next key


def _offered(find: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    try:
        return sorted(
            word for word in within(SECONDS, lambda: list(find())) if word.startswith(incomplete)
        )
    except (
        Exception
    ):  # a card that is wrong, a scheduler that is silent: the command itself will say so
        return []


def _directory(ctx: typer.Context) -> RunDirectory:
    """That of the run which the line names so far. Raises CardError."""
    from tr11ops.runcard.card import find_card, load_card
    from tr11ops.rundir.paths import RunDirectory

    path = find_card(ctx.params.get("run"), os.environ, Path.cwd())
    card = load_card(path, ctx.params.get("overrides") or (), os.environ)
    return RunDirectory(card.paths, card.kill_switch)


def cards(incomplete: str) -> list[str]:
    """Shipped cards, and TOML files and folders where the person is."""
    from tr11ops.runcard.find import shipped_cards

    folder, _, begun = incomplete.rpartition("/")
    if folder or incomplete.startswith("/"):
        here = Path(folder)
    else:
        here = Path()

    def files() -> Iterable[str]:
        prefix = incomplete[: len(incomplete) - len(begun)]
        for path in here.glob(f"{begun}*"):
            if path.is_dir() and not path.name.startswith("."):
                yield f"{prefix}{path.name}/"
            elif path.suffix == ".toml":
                yield f"{prefix}{path.name}"

    return _offered(lambda: [*shipped_cards(), *files()], incomplete)


def words(*known: str) -> Callable[[str], list[str]]:
    """One of these."""
    return lambda incomplete: [word for word in known if word.startswith(incomplete)]


def steps(ctx: typer.Context, incomplete: str) -> list[str]:
    """The steps that the run has saved, and `latest`."""

    def find() -> Iterable[str]:
        from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_steps

        return [LATEST_FILE, *map(str, checkpoint_steps(_directory(ctx).paths.checkpoints))]

    return _offered(find, incomplete)


def nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """The nodes of the scheduler."""

    def find() -> Iterable[str]:
        from tr11ops.cluster.select import choose_scheduler

        return [
            node.name for node in choose_scheduler(ctx.params.get("scheduler") or "auto").nodes()
        ]

    return _offered(find, incomplete)


def excluded_nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """The nodes that the run may not use."""

    def find() -> Iterable[str]:
        from tr11ops.rundir.exclusions import read_version

        return [entry.node for entry in read_version(_directory(ctx).exclusions).exclusions]

    return _offered(find, incomplete)


def fault_kinds(incomplete: str) -> list[str]:
    """The kinds of fault of a twin."""

    def find() -> Iterable[str]:
        from tr11ops.twin.fault_kinds import KINDS

        return KINDS

    return _offered(find, incomplete)


def card_keys(incomplete: str) -> list[str]:
    """The sections and keys of a run card."""

    def find() -> Iterable[str]:
        from tr11ops.runcard.docs import card_sections

        for section in card_sections():
            yield section.name
            yield from (key.dotted for key in section.keys)

    return _offered(find, incomplete)
