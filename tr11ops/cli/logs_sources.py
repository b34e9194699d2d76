"""Which files `tr11 logs` reads: the run's log, another one, or workers' logs of an attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.base.errors import Refusal
from tr11ops.logs.moments import numbers
from tr11ops.logs.tail import LogSource
from tr11ops.rundir.attempts import read_attempt_label

if TYPE_CHECKING:
    from tr11ops.rundir.paths import RunDirectory


def only(path: Path) -> Callable[[], Sequence[LogSource]]:
    sources = [LogSource("", path)]
    return lambda: sources


def existing(path: Path | None) -> Path:
    """A file that can be read from any place. Raises Refusal."""
    if path is None or not path.is_file():
        what = "is not a regular file" if path is not None and path.exists() else "does not exist"
        raise Refusal(f"--file {path}: {what}", exit_code=2)
    return path


def one_log(file: Path | None, directory: RunDirectory | None, has_workers: bool) -> Path:
    """The log that a summary is of. Raises Refusal."""
    if has_workers:
        raise Refusal("--summary is of the main log or of --file: without --rank and --node", exit_code=2)
    if directory is None:
        return existing(file)
    if not directory.paths.main_log.exists():
        raise Refusal(f"{directory.paths.main_log} does not exist yet: this run has not started")
    return directory.paths.main_log


def ranks_of(text: str | None) -> frozenset[int] | None:
    try:
        return None if text is None else numbers(text)
    except ValueError as error:
        raise Refusal(f"--rank {text!r}: {error}", exit_code=2) from None


def workers(
    directory: RunDirectory, ranks: frozenset[int] | None, nodes: frozenset[str], attempt: str | None
) -> Callable[[], Sequence[LogSource]]:
    """What to read, found again each time it is asked: later attempts bring new files."""
    is_one = ranks is not None and len(ranks) == 1

    def find() -> list[LogSource]:
        attempts = [attempt] if attempt is not None else directory.attempt_ids()
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
    """The attempt's folder for an id as people type it: `tr11 status` shows 1000_7, the folder has the raw number."""
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
        raise Refusal(f"no worker has written a log{f' in attempt {attempt}' if attempt else ''} yet")
    known = list(directory.worker_logs(newest))
    ranks = _first_few([str(number) for _, number, _ in known])
    nodes = _first_few(sorted({name for name, _, _ in known}))
    words = [*([f"--rank {rank}"] if rank is not None else []), *(f"--node {name}" for name in node or ())]
    label = read_attempt_label(directory.paths, newest)
    raise Refusal(
        f"{' '.join(words)}: no such worker has written anything in attempt {label}; "
        f"there are logs of ranks {ranks} on nodes {nodes}",
        exit_code=2,
    )


def _first_few(words: Sequence[str]) -> str:
    return ", ".join([*words[:8], *(["..."] if len(words) > 8 else [])])
