"""`tr11 goodput`: where every node-second of a run went, since its first submission."""

from __future__ import annotations

import time
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.base.errors import Refusal, SchedulerError
from tr11ops.base.moments import since as since_when
from tr11ops.base.observed import Unknown, cause
from tr11ops.cli import completion
from tr11ops.cli.common import (
    SinceOption,
    directory_of,
    in_time_for_all,
    kind_to_watch,
    open_scheduler,
)
from tr11ops.cli.context import JSON, SCHEDULER, RunContext
from tr11ops.cli.terminal import draws_unicode
from tr11ops.goodput.account import account
from tr11ops.goodput.history import read_history
from tr11ops.goodput.screen import Paper, document, screen
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.base.observed import Observed
    from tr11ops.cluster.base import Job
    from tr11ops.goodput.account import Goodput
    from tr11ops.goodput.history_values import History
    from tr11ops.runcard.card import RunCard

BY = ("attempt", "cause", "day", "week")
NARROWEST, WIDEST = 60, 132


def goodput(
    context: Annotated[RunContext, SCHEDULER, JSON],
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="|".join(BY),
            help="A table beside the sums: what went where.",
            autocompletion=completion.words(*BY),
        ),
    ] = None,
    since: SinceOption = None,
    price: Annotated[
        float | None,
        typer.Option("--price", metavar="PER_NODE_HOUR", help="Show what it cost, too."),
    ] = None,
) -> None:
    """Where every node-second went: useful, redone, saves, start-up, queue, ...; sums are exact.

    A node-second counts from the first submission on, in exactly one line. While nothing is held,
    as many nodes count as were asked for, in queue, operator pause or restart gap. Exit code 3: the
    run's past could not be read.

    Examples:
      tr11 goodput
      tr11 goodput --by cause --since 7d
      tr11 goodput --price 12.50 --json | jq .buckets.redone
    """
    if by is not None and by not in BY:
        raise Refusal(f"--by {by!r}: must be one of {', '.join(BY)}", exit_code=2)
    if price is not None and not 0 <= price < 1e9:
        raise Refusal(f"--price {price:g}: must be 0 or more, in any currency", exit_code=2)
    if since is None:
        begin = None
    else:
        begin = moment_of(since, time.time())

    look = look_back(context)
    if begin is None:
        shown = look.goodput
    else:
        shown = look.goodput.since(begin)
    paper = Paper(terminal_width(), draws_unicode(), None, price)
    context.emit(document(shown, look.history, None, price), screen(shown, look.history, by, paper))
    if isinstance(look.history.attempts, Unknown):
        raise Refusal(f"the run's past could not be read: {look.history.attempts.why}", exit_code=3)


class LookBack(Record):
    """A run's past, and the account of it until now."""

    card: RunCard
    history: History
    goodput: Goodput


def look_back(context: RunContext) -> LookBack:
    """Read a run's past, with one call to the scheduler. Raises CardError, or Refusal where nothing
    was launched.
    """
    card, directory = context.seen(missing=3)

    def look() -> LookBack:
        now, (jobs, scheduler) = time.time(), _jobs(card, context.scheduler)
        history = read_history(directory, jobs, scheduler=scheduler)
        return LookBack(card, history, account(history, now))

    return in_time_for_all(look)


def _jobs(card: RunCard, kind: str) -> tuple[Observed[tuple[Job, ...]], str]:
    """This run's jobs, or why they are unknown, and their scheduler's name: what ran long ago is in
    the files alone.
    """
    try:
        edge = open_scheduler(kind_to_watch(directory_of(card), kind))
        return edge.jobs(name=card.run.name), edge.name
    except (SchedulerError, OSError) as error:
        return Unknown(cause(error)), ""


def moment_of(text: str, now: float) -> float:
    """The point of time that a person means. Raises Refusal for what is none."""
    try:
        return since_when(text, now)
    except ValueError as error:
        raise Refusal(f"--since {text!r}: {error}", exit_code=2) from None


def terminal_width() -> int:
    """Characters in a line: the terminal's, within reason; 80 where there is none."""
    return min(WIDEST, max(NARROWEST, get_terminal_size((80, 24)).columns))
