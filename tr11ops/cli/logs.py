"""`tr11 logs`: the run's log, one worker's, or a copy on the hub: its end, a part of it, and on as it grows."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from msgspec.structs import replace

from tr11ops.base.errors import NoSuchAttempt, Refusal
from tr11ops.base.moments import since as moment_of
from tr11ops.cli import completion
from tr11ops.cli.common import EndpointOption, SinceOption, VariantOption, say
from tr11ops.cli.context import JSON, RunContext
from tr11ops.cli.logs_print import no_attempt, print_line, show_remote, show_summary
from tr11ops.cli.logs_sources import attempt_named, existing, one_log, only, ranks_of, require_workers, workers
from tr11ops.logs import moments
from tr11ops.logs.line_filter import LineQuery
from tr11ops.logs.lines import LEVELS
from tr11ops.logs.moments import steps_since
from tr11ops.logs.show import Query
from tr11ops.logs.tail import follow as follow_sources

if TYPE_CHECKING:
    from tr11ops.logs.tail import LogSource
    from tr11ops.rundir.paths import RunDirectory

T = TypeVar("T")

FOLLOW_SECONDS = 0.5
LINES = 40


def logs(
    context: Annotated[RunContext, JSON],
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as the log grows, into later attempts too.")
    ] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=0, metavar="N", show_default=False, help="Lines from the end [40]."),
    ] = None,
    rank: Annotated[
        str | None, typer.Option("--rank", metavar="R", help="Workers' own logs, by global rank: 0, 0,8 or 0-7.")
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option("--node", metavar="N", help="The workers of this node; may be repeated.")
    ] = None,
    attempt: Annotated[
        str | None, typer.Option("--attempt", "--job", metavar="ID", help="This attempt alone, e.g. 1234_7.")
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            "--level",
            metavar="LEVEL",
            help="warning: such lines and worse, and tracebacks.",
            autocompletion=completion.words(*LEVELS),
        ),
    ] = None,
    iterations: Annotated[
        str | None, typer.Option("--iterations", metavar="FIRST-LAST", help="What was logged during these steps.")
    ] = None,
    since: SinceOption = None,
    grep: Annotated[str | None, typer.Option("--grep", "-g", metavar="REGEX", help="Lines that match.")] = None,
    around: Annotated[
        int, typer.Option("--context", "-C", min=0, max=1000, metavar="N", help="Lines around each of them.")
    ] = 0,
    no_pulse: Annotated[bool, typer.Option("--no-pulse", help="Without the watchdog's own lines.")] = False,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="PATH", help="Another log: an old training's, a job's output.")
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option("--remote", metavar="REPO", help="The copy on the hub: OWNER/NAME or OWNER/NAME/PATH."),
    ] = None,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", help="With --remote -f: between two looks.")
    ] = 300.0,
    endpoint: EndpointOption = None,
    variant: VariantOption = None,
    summary: Annotated[bool, typer.Option("--summary", help="The whole log in one table.")] = False,
) -> None:
    """Show the end of the run's log, or the part that you ask for, and follow it with -f.

    Examples:
      tr11 logs -f --level warning
      tr11 logs --iterations 31200-31260 --no-pulse
      tr11 logs --rank 0,8 --since 2h
      tr11 logs --remote bigscience/tr11-176B-ml-logs -f
    """
    places = (file is not None, remote is not None, rank is not None or bool(node))
    _check(places, context.as_json and not summary, every, attempt)
    if remote is None and (endpoint is not None or variant is not None):
        raise Refusal("--endpoint and --variant go with --remote OWNER/NAME", exit_code=2)
    query = _query(follow, lines, level, iterations, since, grep, around, no_pulse)
    try:
        if remote is not None:
            pause = every if follow else None
            show_remote(remote, _of_attempt(query, attempt), pause, summary, context.as_json, endpoint, variant)
            return
        directory = None if file is not None else context.directory
        if directory is not None and attempt is not None:
            attempt = attempt_named(directory, attempt)
        if summary:
            show_summary(one_log(file, directory, has_workers=places[2]), context.as_json)
        elif places[2] and directory is not None:
            find = workers(directory, ranks_of(rank), frozenset(node or ()), attempt)
            if not follow:
                require_workers(directory, find(), rank, node, attempt)
            _show(find, query, follow)
        else:
            _show_main_log(file, directory, _of_attempt(query, attempt), follow)
    except KeyboardInterrupt:
        if not follow:
            raise


def _check(places: Sequence[bool], needs_summary: bool, every: float, attempt: str | None) -> None:
    """Raises Refusal for options that do not go together."""
    if sum(places) > 1:
        raise Refusal("--file, --remote and --rank/--node exclude each other", exit_code=2)
    if needs_summary:
        raise Refusal("--json goes with --summary: the lines themselves are text", exit_code=2)
    if not 1 <= every <= 86400:
        raise Refusal(f"--every {every:g}: must be between 1 and 86400 seconds", exit_code=2)
    if attempt is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", attempt):
        raise Refusal(f"--attempt = {attempt!r}: is not a job id", exit_code=2)


def _query(
    follow: bool, lines: int | None, level: str | None, iterations: str | None, since: str | None,
    grep: str | None, context: int, no_pulse: bool,
) -> Query:  # fmt: skip
    """What the options ask for. Raises Refusal for a word that is none."""
    if level is not None and level.lower() not in LEVELS:
        raise Refusal(f"--level {level!r}: must be one of {', '.join(LEVELS)}", exit_code=2)
    try:
        pattern = re.compile(grep) if grep is not None else None
    except (re.error, RecursionError, OverflowError) as error:
        raise Refusal(f"--grep {grep!r}: is not a regular expression: {error}", exit_code=2) from None
    option = "--iterations"
    try:
        steps = moments.iterations(iterations) if iterations is not None else None
        option = "--since"
        moment = moment_of(since, time.time()) if since is not None else None
    except ValueError as error:
        raise Refusal(
            f"{option} {(iterations if option == '--iterations' else since)!r}: {error}", exit_code=2
        ) from None
    wanted = LineQuery(LEVELS[level.lower()] if level else None, pattern, context, not no_pulse, steps)
    query = Query(wanted, lines, moment)
    if lines is None and not query.has_place and (follow or not wanted.searches):
        return Query(wanted, LINES, moment)
    return query


def _parsed(option: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise Refusal(f"{option} {text!r}: {error}", exit_code=2) from None


def _of_attempt(query: Query, attempt: str | None) -> Query:
    """The query for one attempt's part of a main log."""
    if attempt is None:
        return query
    return replace(query, wanted=replace(query.wanted, attempt=attempt))


def _since_by_steps(query: Query, directory: RunDirectory) -> Query:
    """A step's line has no time: `metrics.jsonl` says how many of them came since then."""
    if query.since is None:
        return query
    return replace(query, steps_since=steps_since(directory.paths.metrics, query.since))


# ----------------------------------------------------------------------------- showing
def _show_main_log(file: Path | None, directory: RunDirectory | None, query: Query, follow: bool) -> None:
    if directory is None:
        _show(only(existing(file)), query, follow)
        return
    main_log = directory.paths.main_log
    if not follow and not main_log.exists():
        raise Refusal(f"{main_log} does not exist yet: this run has not started")
    _show(only(main_log), _since_by_steps(query, directory), follow)


def _show(find: Callable[[], Sequence[LogSource]], query: Query, follow: bool) -> None:
    if follow and not any(source.path.exists() for source in find()):
        say("nothing is written yet: waiting for it; Ctrl-C ends")
    try:
        for label, line in follow_sources(find, query, _pause if follow else lambda: False):
            print_line(f"{label} {line}" if label else line, follow)
    except NoSuchAttempt as error:
        raise no_attempt(query.wanted.attempt, error.launches) from None


def _pause() -> bool:
    sys.stdout.flush()
    time.sleep(FOLLOW_SECONDS)
    return True
