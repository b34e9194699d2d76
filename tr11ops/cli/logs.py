"""`tr11 logs`: the log of a run, of one worker, or of a mirror on the hub."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, TypeVar

import typer
from msgspec.structs import replace

from tr11ops.base.deadline import keep_waiting
from tr11ops.base.errors import (
    HubPermanentError,
    HubUnavailable,
    NoSuchAttempt,
    Refusal,
    Unobserved,
    WrongUsage,
)
from tr11ops.base.units import first_few, since as moment_of
from tr11ops.cli import completion
from tr11ops.cli.common import EndpointOption, SinceOption, VariantOption, is_terminal, say
from tr11ops.cli.progress import bar_of
from tr11ops.cli.runner import JSON, Outcome, RunContext
from tr11ops.hub.base import HubRepo, find_credentials, repo_of
from tr11ops.hub.remote_log import TRIES, RemoteFollower, RemoteLog, remote_retries
from tr11ops.logs import show
from tr11ops.logs.line_filter import LineQuery
from tr11ops.logs.lines import LEVELS, as_typed, coloured, folded, plain
from tr11ops.logs.reader import FileReader, LogReader
from tr11ops.logs.show import LogSource, Query, follow as follow_sources, numbers, steps_since
from tr11ops.logs.summary import summarise
from tr11ops.logs.summary_text import lines, value
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.remote import Outside
from trainer.contract.paths import read_attempt_label
from trainer.contract.state_file import descriptor_of

REMOTE_PATH = "logs/{variant}/main_log.txt"
MISSING = 404
SHOWN_FILES = 8
LARGE_BYTES = 64 << 20
T = TypeVar("T")
FOLLOW_SECONDS = 0.5
LINES = 40


# ----------------------------------------------------------------------------- sources
def only(path: Path) -> Callable[[], Sequence[LogSource]]:
    sources = [LogSource("", path)]
    return lambda: sources


def existing(path: Path | None) -> Path:
    """A file that can be read from any place. Raises Refusal."""
    if path is None or not path.is_file():
        what = "does not exist"
        if path is not None and path.exists():
            what = "is not a regular file"
        raise WrongUsage(f"--file {path}: {what}")
    return path


def one_log(file: Path | None, directory: RunDirectory | None, has_workers: bool) -> Path:
    """The log that a summary is of. Raises Refusal."""
    if has_workers:
        raise WrongUsage("--summary is of the main log or of --file: without --rank and --node")
    if directory is None:
        return existing(file)
    if not directory.paths.main_log.exists():
        raise Refusal(f"{directory.paths.main_log} does not exist yet: this run has not started")
    return directory.paths.main_log


def ranks_of(text: str | None) -> frozenset[int] | None:
    try:
        if text is None:
            return None
        return numbers(text)
    except ValueError as error:
        raise WrongUsage(f"--rank {text!r}: {error}") from None


def workers(
    directory: RunDirectory,
    ranks: frozenset[int] | None,
    nodes: frozenset[str],
    attempt: str | None,
) -> Callable[[], Sequence[LogSource]]:
    """What to read, found again each time it is asked: later attempts bring new files."""
    is_one = ranks is not None and len(ranks) == 1

    def find() -> list[LogSource]:
        if attempt is not None:
            attempts = [attempt]
        else:
            attempts = directory.attempt_ids()
        for number in reversed(attempts):  # the newest attempt that has such a worker
            found = [
                LogSource("" if is_one else f"[rank {worker}]", path)
                for name, worker, path in directory.worker_logs(number)
                if (ranks is None or worker in ranks) and (not nodes or name in nodes)
            ]
            if found:
                return found
        return []

    return find


def attempt_named(directory: RunDirectory, attempt: str) -> str:
    """The attempt's folder for an id as people type it: `tr11 status` shows 1000_7, the folder has
    the raw number.
    """
    for number in reversed(directory.attempt_ids()):
        if attempt in {number, read_attempt_label(directory.paths, number)}:
            return number
    return attempt


def require_workers(
    directory: RunDirectory,
    found: Sequence[LogSource],
    rank: str | None,
    node: Sequence[str] | None,
    attempt: str | None,
) -> None:
    """Say clearly when there is nothing to read. Raises Refusal."""
    if found:
        return
    attempts = [attempt] if attempt is not None else reversed(directory.attempt_ids())
    newest = next((number for number in attempts if any(directory.worker_logs(number))), None)
    if newest is None:
        where = ""
        if attempt is not None:
            where = f" in attempt {read_attempt_label(directory.paths, attempt)}"
        raise Refusal(f"no worker has written a log{where} yet")
    known = list(directory.worker_logs(newest))
    ranks = _first_few([str(number) for _, number, _ in known])
    nodes = _first_few(sorted({name for name, _, _ in known}))
    words = [
        *([f"--rank {rank}"] if rank is not None else []),
        *(f"--node {name}" for name in node or ()),
    ]
    label = read_attempt_label(directory.paths, newest)
    raise WrongUsage(
        f"{' '.join(words)}: no such worker has written anything in attempt {label}; "
        f"there are logs of ranks {ranks} on nodes {nodes}",
    )


def _first_few(words: Sequence[str]) -> str:
    return ", ".join([*words[:8], *(["..."] if len(words) > 8 else [])])


# ----------------------------------------------------------------------------- print
def print_line(line: str, flush: bool) -> None:
    """One line of a log; on a terminal folded between words, elsewhere as it is."""
    is_terminal = sys.stdout.isatty()
    encoding = sys.stdout.encoding or "utf-8"
    line = as_typed(line)
    if is_terminal and "NO_COLOR" not in os.environ:
        shown = coloured(line)
    else:
        shown = plain(line)
    if is_terminal:
        shown = folded(shown, get_terminal_size().columns)
    sys.stdout.write(shown.encode(encoding, "replace").decode(encoding) + "\n")
    if flush:
        sys.stdout.flush()


def no_attempt(attempt: str | None, launches: int) -> Refusal:
    if not launches:
        return WrongUsage(f"--attempt {attempt}: this log does not say where an attempt begins")
    return WrongUsage(
        f"--attempt {attempt}: the log has {launches} launches, but none of this attempt",
    )


def summary_of_file(path: Path) -> Outcome:
    """The whole log in one table."""
    descriptor = descriptor_of(path)
    try:
        return summary_of(FileReader(descriptor), os.fstat(descriptor).st_size, str(path))
    finally:
        os.close(descriptor)


def summary_of(reader: LogReader, size: int, name: str) -> Outcome:
    """The same of any log."""
    with byte_progress(size) as advance:
        found = summarise(reader, size, advance)
    return Outcome(value(found, name), screen=partial(_print_lines, list(lines(found, name))))


def _print_lines(shown: list[str]) -> None:
    for line in shown:
        print_line(line, flush=False)


@contextmanager
def byte_progress(size: int) -> Iterator[Callable[[int], None]]:
    """A bar of the bytes read, where a person looks and it takes a while."""
    if not is_terminal() or size < LARGE_BYTES:
        yield lambda position: None
        return
    with bar_of() as bar:
        task = bar.add_task("reading", total=size)
        yield lambda position: bar.update(task, completed=position)


# ----------------------------------------------------------------------------- the copy on the hub
def show_remote(
    repository: str,
    query: Query,
    every: float | None,
    summary: bool,
    endpoint: str | None = None,
    variant: str | None = None,
) -> Outcome | None:
    """The log of a hub repository; with `every` (seconds) on and on. Raises Refusal."""
    repo, token = remote_repo(repository, endpoint)
    if repo.path and variant is not None:
        raise WrongUsage("--variant names a main log: give it, or a PATH in the repository")
    path = repo.path or REMOTE_PATH.format(variant=variant or "main")
    if every is None:
        tries, longest = (TRIES, 300.0)
    else:
        tries, longest = (None, every)
    log = RemoteLog(
        repo.file(path),
        token,
        remote_retries(time.sleep, say, tries, longest, spread=0.2, most=300.0),
    )
    try:
        if summary:
            return summary_of(log, log.size(), repository)
        follower = RemoteFollower(log, query, say)
        for line in follower.begin():
            print_line(line, flush=False)
        while every is not None:
            sys.stdout.flush()
            time.sleep(every)
            for line in follower.more():
                print_line(line, flush=False)
        for line in follower.unfinished():
            print_line(line, flush=False)
    except HubPermanentError as error:
        there = ""
        if error.status == MISSING:
            there = _what_is_there(repo, token, path)
        raise Refusal(f"--remote {repository}: {there or error}") from None
    except HubUnavailable as error:
        raise Unobserved(f"--remote {repository}: {error}: nothing may be concluded") from None
    except NoSuchAttempt as error:
        raise no_attempt(query.wanted.attempt, error.launches) from None
    return None


def remote_repo(repository: str, endpoint: str | None) -> tuple[HubRepo, str | None]:
    """Where the log lies, and the token to show there. Raises Refusal."""
    from huggingface_hub import constants

    try:
        repo = repo_of(repository, endpoint)
        token = find_credentials(None, os.environ).token
    except ValueError as error:
        raise WrongUsage(f"--remote: {error}") from None
    if constants.HF_HUB_OFFLINE:
        raise Unobserved("--remote: HF_HUB_OFFLINE is set, so nothing is asked")
    return repo, None if token is None else token.reveal()


def _what_is_there(repo: HubRepo, token: str | None, path: str) -> str:
    """The logs that the repository has instead of `path`, or that there is none; "" where that
    cannot be told.
    """
    try:
        facts = Outside(repo, token, remote_retries(time.sleep, say, tries=1)).facts()
    except HubPermanentError as error:
        return str(error)
    except HubUnavailable:
        return ""
    if facts is None:
        return ""
    texts = [name for name in facts.files if name.endswith((".txt", ".log", ".out"))]
    shown = first_few(texts, SHOWN_FILES) or "no logs"
    return f"there is no {path} in it; it has {shown} (OWNER/NAME/PATH shows one)"


# ----------------------------------------------------------------------------- the commands
def logs(
    context: Annotated[RunContext, JSON],
    *,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Go on as the log grows, into later attempts too."),
    ] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=0, metavar="N", help="Lines from the end [40]."),
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank", metavar="R", help="Workers' own logs, by global rank: 0, 0,8 or 0-7."
        ),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="N", help="The workers of this node; may be repeated."),
    ] = None,
    attempt: Annotated[
        str | None,
        typer.Option("--attempt", "--job", metavar="ID", help="This attempt alone, e.g. 1234_7."),
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
        str | None,
        typer.Option(
            "--iterations", metavar="FIRST-LAST", help="What was logged during these steps."
        ),
    ] = None,
    since: SinceOption = None,
    grep: Annotated[
        str | None, typer.Option("--grep", "-g", metavar="REGEX", help="Lines that match.")
    ] = None,
    around: Annotated[
        int,
        typer.Option(
            "--context", "-C", min=0, max=1000, metavar="N", help="Lines around each of them."
        ),
    ] = 0,
    no_pulse: Annotated[
        bool, typer.Option("--no-pulse", help="Without the watchdog's own lines.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", metavar="PATH", help="Another log: an old training's, a job's output."
        ),
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            "--remote", metavar="REPO", help="The copy on the hub: OWNER/NAME or OWNER/NAME/PATH."
        ),
    ] = None,
    every: Annotated[
        float,
        typer.Option("--every", metavar="SECONDS", help="With --remote -f: between two looks."),
    ] = 300.0,
    endpoint: EndpointOption = None,
    variant: VariantOption = None,
    summary: Annotated[bool, typer.Option("--summary", help="The whole log in one table.")] = False,
) -> Outcome | None:
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
        raise WrongUsage("--endpoint and --variant go with --remote OWNER/NAME")
    query = _query(
        follow,
        lines,
        level=level,
        iterations=iterations,
        since=since,
        grep=grep,
        context=around,
        no_pulse=no_pulse,
    )
    try:
        if remote is not None:
            pause = every if follow else None
            return show_remote(
                remote,
                _of_attempt(query, attempt),
                every=pause,
                summary=summary,
                endpoint=endpoint,
                variant=variant,
            )
        directory = None if file is not None else context.directory
        if directory is not None and attempt is not None:
            attempt = attempt_named(directory, attempt)
        if summary:
            return summary_of_file(one_log(file, directory, has_workers=places[2]))
        if places[2] and directory is not None:
            find = workers(directory, ranks_of(rank), frozenset(node or ()), attempt)
            if not follow:
                require_workers(directory, find(), rank=rank, node=node, attempt=attempt)
            _show(find, query, follow)
        else:
            _show_main_log(file, directory, _of_attempt(query, attempt), follow)
    except KeyboardInterrupt:
        if not follow:
            raise
    return None


def _check(places: Sequence[bool], needs_summary: bool, every: float, attempt: str | None) -> None:
    """Raises Refusal for options that do not go together."""
    if sum(places) > 1:
        raise WrongUsage("--file, --remote and --rank/--node exclude each other")
    if needs_summary:
        raise WrongUsage("--json goes with --summary: the lines themselves are text")
    if not 1 <= every <= 86400:
        raise WrongUsage(f"--every {every:g}: must be between 1 and 86400 seconds")
    if attempt is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", attempt):
        raise WrongUsage(f"--attempt = {attempt!r}: is not a job id")


def _query(
    follow: bool,
    lines: int | None,
    level: str | None,
    iterations: str | None,
    since: str | None,
    grep: str | None,
    context: int,
    no_pulse: bool,
) -> Query:
    """What the options ask for. Raises Refusal for a word that is none."""
    if level is not None and level.lower() not in LEVELS:
        raise WrongUsage(f"--level {level!r}: must be one of {', '.join(LEVELS)}")
    try:
        pattern = None
        if grep is not None:
            pattern = re.compile(grep)
    except (re.error, RecursionError, OverflowError) as error:
        raise WrongUsage(f"--grep {grep!r}: is not a regular expression: {error}") from None
    option = "--iterations"
    try:
        steps = None
        if iterations is not None:
            steps = show.iterations(iterations)
        option = "--since"
        moment = None
        if since is not None:
            moment = moment_of(since, time.time())
    except ValueError as error:
        raise WrongUsage(
            f"{option} {(iterations if option == '--iterations' else since)!r}: {error}",
        ) from None
    wanted = LineQuery(
        LEVELS[level.lower()] if level else None,
        pattern,
        context=context,
        pulse=not no_pulse,
        iterations=steps,
    )
    query = Query(wanted, lines, moment)
    if lines is None and not query.has_place and (follow or not wanted.searches):
        return Query(wanted, LINES, moment)
    return query


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
def _show_main_log(
    file: Path | None, directory: RunDirectory | None, query: Query, follow: bool
) -> None:
    if directory is None:
        _show(only(existing(file)), query, follow)
        return
    main_log = directory.paths.main_log
    if not follow and not main_log.exists():
        raise Refusal(f"{main_log} does not exist yet: this run has not started")
    _show(only(main_log), _since_by_steps(query, directory), follow)


def _show(find: Callable[[], Sequence[LogSource]], query: Query, follow: bool) -> None:
    if follow:
        keep_waiting()
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
