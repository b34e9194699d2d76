"""`tr11 goodput`: where every node-second of a run went, since its first submission."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SchedulerOption,
    SetOption,
    directory_of,
    kind_to_watch,
    open_scheduler,
    read_card,
)

if TYPE_CHECKING:
    from tr11ops.cluster.base import Job
    from tr11ops.report.goodput import Goodput
    from tr11ops.report.history import History
    from tr11ops.runcard import RunCard
    from tr11ops.snapshot import Observed

BY = ("attempt", "cause", "day", "week")
NARROWEST, WIDEST = 60, 132
_UNITS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_SPAN = re.compile(r"(\d{1,6}(?:\.\d+)?)([hdw])")

SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="WHEN", help="Only what came after: 7d, 12h, 2w, 2026-03-11 or 2026-03-11T08:00, local time."
    ),
]


def goodput(
    run: RunOption = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="|".join(BY), help="A table beside the sums: what went where.")
    ] = None,
    since: SinceOption = None,
    price: Annotated[
        float | None, typer.Option("--price", metavar="PER_NODE_HOUR", help="Show what it cost, too.")
    ] = None,
    scheduler: SchedulerOption = "auto",
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where every node-second went: useful, redone, saves, start-up, queue, ...; sums are exact.

    A node-second counts from the first submission on, in exactly one line. While nothing is held, as many nodes count
    as were asked for, in queue, operator pause or restart gap. Exit code 3: the run's past could not be read.

    [bold]Examples[/bold]

      tr11 goodput

      tr11 goodput --by cause --since 7d

      tr11 goodput --price 12.50 --json | jq .buckets.redone
    """
    if by is not None and by not in BY:
        raise Refusal(f"--by {by!r}: must be one of {', '.join(BY)}", exit_code=2)
    if price is not None and not 0 <= price < 1e9:
        raise Refusal(f"--price {price:g}: must be 0 or more, in any currency", exit_code=2)
    begin = None if since is None else moment_of(since, time.time())

    from tr11ops.report.goodput_screen import Paper, document, screen
    from tr11ops.snapshot import Unknown

    look = look_back(run, overrides, scheduler)
    shown = look.goodput if begin is None else look.goodput.since(begin)
    if as_json:
        print(json.dumps(document(shown, look.history, None, price), indent=1, allow_nan=False))
    else:
        paper = Paper(terminal_width(), shows_drawings(), None, price)
        for line in screen(shown, look.history, by, paper):
            print(line)
    if isinstance(look.history.attempts, Unknown):
        raise Refusal(f"the run's past could not be read: {look.history.attempts.why}", exit_code=3)


@dataclass(frozen=True)
class LookBack:
    """A run's past, and the account of it until now."""

    card: RunCard
    history: History
    goodput: Goodput


def look_back(run: str | None, overrides: list[str] | None, kind: str) -> LookBack:
    """Read a run's past, with one call to the scheduler. Raises CardError, or Refusal where nothing was launched."""
    from tr11ops.report.goodput import account
    from tr11ops.report.history import read_history

    card = read_card(run, overrides)
    directory = directory_of(card)
    if not directory.exists:
        raise Refusal(
            f"{directory.root} does not exist: nothing was launched from this card here; check --run and the folder",
            exit_code=3,
        )
    now = time.time()
    history = read_history(directory, _jobs(card, kind))
    return LookBack(card, history, account(history, now))


def _jobs(card: RunCard, kind: str) -> Observed[tuple[Job, ...]]:
    """This run's jobs, or why they are unknown: what ran long ago is told by the files alone."""
    from tr11ops.cluster.base import SchedulerError
    from tr11ops.evidence import cause
    from tr11ops.snapshot import Unknown

    try:
        edge = open_scheduler(kind_to_watch(directory_of(card), kind))
        return edge.jobs(name=card.run.name)
    except (SchedulerError, OSError) as error:
        return Unknown(cause(error))


def moment_of(text: str, now: float) -> float:
    """The point of time that a person means. Raises Refusal for what is none."""
    match = _SPAN.fullmatch(text.strip())
    if match:
        return now - float(match.group(1)) * _UNITS[match.group(2)]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise Refusal(
            f"--since {text!r}: is no point of time; write 7d, 12h, 2w, 2026-03-11 or 2026-03-11T08:00", exit_code=2
        ) from None


def terminal_width() -> int:
    """Characters in a line: the terminal's, within reason; 80 where there is none."""
    from shutil import get_terminal_size

    return min(WIDEST, max(NARROWEST, get_terminal_size((80, 24)).columns))


def shows_drawings() -> bool:
    """Whether more than ASCII can be shown."""
    from tr11ops.report.glyphs import shows_unicode

    return shows_unicode(os.environ, getattr(sys.__stdout__, "encoding", None))
