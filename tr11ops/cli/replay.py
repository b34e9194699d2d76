"""`tr11 replay`: months of a training on real failure records, with the decisions of production."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.base.errors import WrongUsage
from tr11ops.base.units import counted
from tr11ops.cli.common import is_terminal
from tr11ops.cli.progress import bar_of
from tr11ops.cli.runner import JSON, NO_RUN, Outcome, RunContext
from tr11ops.replay.parameters import Layout
from tr11ops.replay.traces import DAY, Window, read_trace, window
from trainer.contract.documents import document

if TYPE_CHECKING:
    from tr11ops.replay.world import Score

SCHEMA = 1
MOST_NODES = 1000
MOST_DAYS = 3650.0
# what is printed of a result: heading, and how a figure is written
COLUMNS = (
    ("effective", "{0.percent:.2f} %"),
    ("wasted", "{0.wasted:,.0f}"),
    ("acts", "{0.acts}"),
    ("mails", "{0.mails:.1f}"),
    ("innocent", "{0.innocent} of {0.excluded}"),
    ("burned", "{0.burned} of {0.tasks}"),
    ("waited", "{0.waited_hours:,.0f} h"),
)
# where the time went, in percent of all: heading, and which of the fields of `LostTime` it adds up
LOST_COLUMNS = (
    ("redone", ("redone",)),
    ("planned", ("saves", "evaluations")),
    ("starts", ("starts",)),
    ("unseen", ("unseen",)),
    ("broken", ("broken",)),
    ("barred", ("kept_out",)),
    ("held", ("held",)),
)


def replay(
    context: Annotated[RunContext, NO_RUN, JSON],
    trace: Annotated[
        Path, typer.Option("--trace", metavar="FILE", help="A record of real node failures.")
    ],
    nodes: Annotated[int, typer.Option("--nodes", help="That train.")] = 48,
    spares: Annotated[int, typer.Option("--spares", help="More that the partition has.")] = 4,
    held: Annotated[
        int, typer.Option("--held", help="Of the spares, those that an attempt holds.")
    ] = 2,
    days: Annotated[float, typer.Option("--days", help="How long.")] = 117.0,
    seed: Annotated[int, typer.Option("--seed", help="Which nodes and days of the trace.")] = 0,
    system: Annotated[
        str, typer.Option("--system", metavar="N", help="Which of LANL's clusters.")
    ] = "",
    against: Annotated[
        bool, typer.Option("--against", help="Other ways to run it, and an oracle, too.")
    ] = False,
) -> Outcome:
    """Four months of a training in a minute: real failures, and what tr11 decides about each.

    A simulated cluster fails as the trace says; the controller, the exclusions, the watchdog and
    the alerts are those of production. docs/how-to/replay.md says which traces are read, where they are,
    and what is assumed. Nothing of a run is touched.

    effective: the share of the time that trained what was kept; wasted: node-hours beyond that;
    acts: of people; mails: to them, a week, without the daily digest; innocent: nodes excluded
    without a fault; burned: tasks without a checkpoint; waited: for nodes, or for a person.

    Lost: redone steps; planned saves and evaluations; starts; unseen, from a fault to its launch's
    end; broken, too few nodes were well; barred, enough were, but excluded, or more were asked for;
    held, nothing was queued that might start.

    Examples:
      tr11 replay --trace fault_trace.json --nodes 48 --spares 4 --days 117
      tr11 replay --trace lanl.csv.xz --system 20 --seed 3 --against
      tr11 replay --trace fault_trace.json --json | jq .operations[0].effective
    """
    _check(nodes, spares, held, days)
    layout = Layout(nodes, spares, held)
    part = window(read_trace(trace, system), layout.all, days * DAY, seed)
    scores = tuple(_scores(part, layout, against))
    value = {
        "schema": SCHEMA,
        "window": part.label,
        "days": days,
        "faults": len(part.faults),
        "layout": document(layout),
        "operations": [document(score) for score in scores],
    }
    return Outcome(value, _lines(part, layout, scores))


def _check(nodes: int, spares: int, held: int, days: float) -> None:
    if not 1 <= nodes <= MOST_NODES:
        raise WrongUsage(f"--nodes {nodes}: must be 1 to {MOST_NODES}")
    if not 0 <= spares <= MOST_NODES:
        raise WrongUsage(f"--spares {spares}: must be 0 to {MOST_NODES}")
    if not 0 <= held <= spares:
        raise WrongUsage(f"--held {held}: must be 0 to the {spares} of --spares")
    if not 0 < days <= MOST_DAYS:
        raise WrongUsage(f"--days {days:g}: must be above 0, and at most {MOST_DAYS:g}")


def _scores(part: Window, layout: Layout, against: bool) -> Iterator[Score]:
    from tr11ops.replay.production import production_score
    from tr11ops.replay.rivals import rival_scores

    with _progress(part.seconds) as passed:
        yield production_score(part, layout, passed)
    if against:
        yield from rival_scores(part, layout)


@contextmanager
def _progress(seconds: float) -> Iterator[Callable[[float], None] | None]:
    """A bar of the days on a terminal; nothing elsewhere."""
    if not is_terminal():
        yield None
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("day {task.fields[day]:.0f}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with bar_of(*columns) as bar:
        task = bar.add_task("", total=seconds, day=0.0)

        def passed(done: float) -> None:
            bar.update(task, completed=done, day=done / 86_400.0)

        yield passed


def _lines(part: Window, layout: Layout, scores: tuple[Score, ...]) -> Iterator[str]:
    yield f"{part.label}: {counted(len(part.faults), 'fault')}"
    yield (
        f"{layout.nodes} of {counted(layout.all, 'node')} train; an attempt holds "
        f"{counted(layout.held, 'spare')}"
    )
    yield ""
    rows = [("", *(name for name, _ in COLUMNS))]
    rows += [(score.operation, *(form.format(score) for _, form in COLUMNS)) for score in scores]
    yield from _table(rows)
    yield ""
    rows = [("lost, % of the time", *(name for name, _ in LOST_COLUMNS))]
    rows += [(score.operation, *_lost(score)) for score in scores]
    yield from _table(rows)


def _lost(score: Score) -> Iterator[str]:
    for _, fields in LOST_COLUMNS:
        yield f"{sum(score.lost_percent[field] for field in fields):.2f}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        right = (text.rjust(width) for text, width in zip(figures, widths[1:], strict=True))
        yield f"{name:{widths[0]}}  {'  '.join(right)}".rstrip()
