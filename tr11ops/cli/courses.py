"""Where the course of a run lies that a command line names: a log, a card, or a run directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.base.errors import Refusal
from tr11ops.cli.common import directory_of, read_card
from tr11ops.curves.ranges import CurvePlace, CurveRange, range_of
from tr11ops.curves.steps import LoggedStep, logged_steps
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard


FromOption = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="PLACE", show_default=False, help="From there on: an iteration, or 3Msamples, 50Btokens."
    ),
]
ToOption = Annotated[
    str | None,
    typer.Option("--to", metavar="PLACE", show_default=False, help="Up to there; in the same words as --from."),
]


def range_of_options(first: str | None, last: str | None) -> CurveRange:
    """The part of a course that --from and --to mean. Raises Refusal with exit code 2."""
    places: list[CurvePlace | None] = []
    for option, text in (("--from", first), ("--to", last)):
        try:
            places.append(None if text is None else CurvePlace.of(text))
        except ValueError as error:
            raise Refusal(f"{option}: {error}", exit_code=2) from None
    try:
        return range_of(*places)
    except ValueError as error:
        raise Refusal(f"--to: {error}; give a place behind --from", exit_code=2) from None


class NamedCourse(Record):
    """A log of steps, and what to call it."""

    name: str
    path: Path

    def steps(self) -> Iterator[LoggedStep]:
        """Every step of it, one at a time. Raises Refusal, with exit code 3, where it cannot be read or holds none."""
        is_empty = True
        try:
            for step in logged_steps(self.path):
                is_empty = False
                yield step
        except OSError as error:
            raise Refusal(f"{self.path}: cannot be read: {error.strerror or error}", exit_code=3) from None
        except ValueError as error:
            raise Refusal(str(error), exit_code=3) from None
        if is_empty:
            raise Refusal(f"{self.path}: holds no line of a training step", exit_code=3)


def course_named(text: str) -> NamedCourse:
    """The course that `text` means: a log file, a folder with a card or a run in it, a card's path or shipped name.

    Raises CardError for a card that cannot be read; Refusal where nothing has been logged.
    """
    path = Path(text)
    if path.is_dir():
        if (path / "tr11.toml").is_file():
            return course_of(read_card(str(path / "tr11.toml")))
        found = sorted(path.glob("*-logs/logs/*/metrics.jsonl")) or sorted(path.glob("metrics.jsonl"))
        if not found:
            raise Refusal(f"{text}: holds neither a tr11.toml nor the logs of a run", exit_code=2)
        if len(found) > 1:
            names = ", ".join(str(one) for one in found[:3])
            raise Refusal(f"{text}: holds {len(found)} courses; name one of them, e.g. {names}", exit_code=2)
        return NamedCourse(path.resolve().name, found[0])
    if path.exists() and path.suffix != ".toml":
        return NamedCourse(path.name, path)
    if os.sep in text and path.suffix != ".toml":
        raise Refusal(f"{text}: does not exist", exit_code=2)
    return course_of(read_card(text))


def course_of(card: RunCard) -> NamedCourse:
    """The course that a card's run has logged. Raises Refusal, with exit code 3, where it has not trained yet."""
    paths = directory_of(card).paths
    log = next((path for path in (paths.metrics, paths.main_log) if path.exists()), None)
    if log is None:
        raise Refusal(f"{paths.metrics}: does not exist: this run has not trained yet", exit_code=3)
    return NamedCourse(f"{card.run.name}/{card.run.variant}", log)
