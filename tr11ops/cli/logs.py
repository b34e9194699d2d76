"""`tr11 logs`: the run's log or one worker's, from its end, and on as it grows."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.cli.common import Refusal, RunOption, SetOption, directory_of, read_card, say

if TYPE_CHECKING:
    from tr11ops.logtail import Source
    from tr11ops.rundir import RunDirectory

FOLLOW_SECONDS = 0.5


def logs(
    *,
    run: RunOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as the log grows, into later attempts too.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, metavar="R", help="One worker's own log (global rank).")
    ] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="N", help="The workers of one node.")] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, metavar="N", help="Lines from the end to begin with.")
    ] = 40,
    job: Annotated[
        str | None, typer.Option("--job", metavar="ID", help="Attempt for --rank and --node; default: the newest.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Show the end of the run's log, or of one worker's, and follow it with -f.

    [bold]Examples[/bold]

      tr11 logs -f

      tr11 logs --rank 0 -n 200

      tr11 logs --node jean-zay-iam03
    """
    from tr11ops.logtail import follow as follow_sources

    directory = directory_of(read_card(run, overrides))
    if job is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", job):
        raise Refusal(f"--job = {job!r}: is not a job id", exit_code=2)
    if job is not None:
        job = _attempt_named(directory, job)
    find = _finder(directory, rank, node, job)
    if not follow:
        _require_some(directory, find(), rank, node, job)
    elif not any(source.path.exists() for source in find()):
        say("nothing is written yet: waiting for it; Ctrl-C ends")
    several = rank is None and node is not None
    for label, line in follow_sources(find, lines, _pause if follow else lambda: False):
        sys.stdout.write(f"{label} {_shown(line)}\n" if several else f"{_shown(line)}\n")
        if follow:
            sys.stdout.flush()


def _finder(
    directory: RunDirectory, rank: int | None, node: str | None, job: str | None
) -> Callable[[], Sequence[Source]]:
    """What to read, found anew each time it is asked: later attempts bring new files."""
    from tr11ops.logtail import Source

    if rank is None and node is None:
        main_log = Source("", directory.paths.main_log)
        return lambda: [main_log]

    def find() -> list[Source]:
        attempts = [job] if job is not None else directory.attempt_ids()
        for attempt in reversed(attempts):  # the newest attempt that has such a worker
            found = [
                Source(f"[rank {number}]" if attempt == job or job is None else "", path)
                for name, number, path in directory.worker_logs(attempt)
                if rank in {None, number} and node in {None, name}
            ]
            if found:
                return found
        return []

    return find


def _attempt_named(directory: RunDirectory, job: str) -> str:
    """The attempt's folder for an id as people type it: `tr11 status` shows 1000_7, the folder has the raw number."""
    for attempt in reversed(directory.attempt_ids()):
        if job in {attempt, _label(directory, attempt)}:
            return attempt
    return job


def _label(directory: RunDirectory, attempt: str) -> str:
    from trainer.contract import read_json

    try:
        record = read_json(directory.paths.attempt(attempt) / "attempt.json")
    except (OSError, ValueError):
        return attempt
    array, task = (record.get(key) for key in ("array_id", "task_id")) if isinstance(record, dict) else (None, None)
    return f"{array}_{task}" if array is not None and task is not None else attempt


def _require_some(
    directory: RunDirectory, found: Sequence[Source], rank: int | None, node: str | None, job: str | None
) -> None:
    """Say clearly when there is nothing to read. Raises Refusal."""
    if rank is None and node is None:
        if not directory.paths.main_log.exists():
            raise Refusal(f"{directory.paths.main_log} does not exist yet: this run has not started")
        return
    if found:
        return
    attempts = [job] if job is not None else reversed(directory.attempt_ids())
    newest = next((attempt for attempt in attempts if any(directory.worker_logs(attempt))), None)
    known = [] if newest is None else list(directory.worker_logs(newest))
    if newest is None:
        raise Refusal(f"no worker has written a log{f' in attempt {job}' if job else ''} yet")
    last = max(number for _, number, _ in known)
    ranks = f"ranks 0 to {last}" if last else "rank 0 alone"
    nodes = ", ".join(sorted({name for name, _, _ in known})[:8])
    what = " ".join(([f"--rank {rank}"] if rank is not None else []) + ([f"--node {node}"] if node is not None else []))
    raise Refusal(
        f"{what}: there is no such worker in attempt {_label(directory, newest)}; it has {ranks}, nodes {nodes}",
        exit_code=2,
    )


def _pause() -> bool:
    sys.stdout.flush()
    try:
        time.sleep(FOLLOW_SECONDS)
    except KeyboardInterrupt:
        return False
    return True


def _shown(line: str) -> str:
    """The line as the output can carry it."""
    encoding = sys.stdout.encoding or "utf-8"
    return line.encode(encoding, "replace").decode(encoding)
