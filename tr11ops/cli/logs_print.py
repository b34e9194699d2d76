"""What `tr11 logs` prints: a log's lines as the output can carry them, a log's summary, the copy on the hub."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from tr11ops.base.errors import HubPermanentError, HubUnavailable, NoSuchAttempt, Refusal
from tr11ops.cli.common import is_terminal, say
from tr11ops.cli.context import emit
from tr11ops.hub.address import repo_of
from tr11ops.hub.asking import TRIES, remote_retries
from tr11ops.hub.credentials import find_credentials
from tr11ops.hub.remote_log import RemoteFollower, RemoteLog
from tr11ops.logs.lines import as_typed, coloured, folded, plain
from tr11ops.logs.reader import FileReader
from tr11ops.logs.summary import summarise
from tr11ops.logs.summary_text import lines, value
from tr11ops.status.remote import Outside
from trainer.contract.state_file import descriptor_of

if TYPE_CHECKING:
    from tr11ops.hub.address import HubRepo
    from tr11ops.logs.reader import LogReader
    from tr11ops.logs.show import Query

REMOTE_PATH = "logs/{variant}/main_log.txt"
MISSING = 404
SHOWN_FILES = 8
UNOBSERVED = 3
LARGE_BYTES = 64 << 20


def print_line(line: str, flush: bool) -> None:
    """One line of a log; on a terminal folded between words, elsewhere as it is."""
    is_terminal = sys.stdout.isatty()
    encoding = sys.stdout.encoding or "utf-8"
    line = as_typed(line)
    shown = coloured(line) if is_terminal and "NO_COLOR" not in os.environ else plain(line)
    if is_terminal:
        shown = folded(shown, get_terminal_size().columns)
    sys.stdout.write(shown.encode(encoding, "replace").decode(encoding) + "\n")
    if flush:
        sys.stdout.flush()


def no_attempt(attempt: str | None, launches: int) -> Refusal:
    if not launches:
        return Refusal(f"--attempt {attempt}: this log does not say where an attempt begins", exit_code=2)
    return Refusal(f"--attempt {attempt}: the log has {launches} launches, but none of this attempt", exit_code=2)


def show_summary(path: Path, as_json: bool) -> None:
    descriptor = descriptor_of(path)
    try:
        print_summary(FileReader(descriptor), os.fstat(descriptor).st_size, str(path), as_json)
    finally:
        os.close(descriptor)


def print_summary(reader: LogReader, size: int, name: str, as_json: bool) -> None:
    with byte_progress(size) as advance:
        found = summarise(reader, size, advance)
    if as_json:
        emit(value(found, name))
        return
    for line in lines(found, name):
        print_line(line, flush=False)


@contextmanager
def byte_progress(size: int) -> Iterator[Callable[[int], None]]:
    """A bar of the bytes read, where a person looks and it takes a while."""
    if not is_terminal() or size < LARGE_BYTES:
        yield lambda position: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=size)
        yield lambda position: bar.update(task, completed=position)


# ----------------------------------------------------------------------------- the copy on the hub
def show_remote(
    repository: str,
    query: Query,
    every: float | None,
    summary: bool,
    as_json: bool,
    endpoint: str | None = None,
    variant: str | None = None,
) -> None:
    """The log of a hub repository; with `every` (seconds) on and on. Raises Refusal."""
    repo, token = _repo(repository, endpoint)
    if repo.path and variant is not None:
        raise Refusal("--variant names a main log: give it, or a PATH in the repository", exit_code=2)
    path = repo.path or REMOTE_PATH.format(variant=variant or "main")
    tries, longest = (TRIES, 300.0) if every is None else (None, every)
    log = RemoteLog(repo.file(path), token, remote_retries(time.sleep, say, tries, longest, spread=0.2, most=300.0))
    try:
        if summary:
            print_summary(log, log.size(), repository, as_json)
            return
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
        there = _what_is_there(repo, token, path) if error.status == MISSING else ""
        raise Refusal(f"--remote {repository}: {there or error}") from None
    except HubUnavailable as error:
        raise Refusal(f"--remote {repository}: {error}: nothing may be concluded", exit_code=UNOBSERVED) from None
    except NoSuchAttempt as error:
        raise no_attempt(query.wanted.attempt, error.launches) from None


def _repo(repository: str, endpoint: str | None) -> tuple[HubRepo, str | None]:
    """Where the log lies, and the token to show there. Raises Refusal."""
    from huggingface_hub import constants

    try:
        repo = repo_of(repository, endpoint)
        token = find_credentials(None, os.environ).token
    except ValueError as error:
        raise Refusal(f"--remote: {error}", exit_code=2) from None
    if constants.HF_HUB_OFFLINE:
        raise Refusal("--remote: HF_HUB_OFFLINE is set, so nothing is asked", exit_code=UNOBSERVED)
    return repo, None if token is None else token.reveal()


def _what_is_there(repo: HubRepo, token: str | None, path: str) -> str:
    """The logs that the repository has instead of `path`, or that there is none; "" where that cannot be told."""
    try:
        facts = Outside(repo, token, remote_retries(time.sleep, say, tries=1)).facts()
    except HubPermanentError as error:
        return str(error)
    except HubUnavailable:
        return ""
    if facts is None:
        return ""
    texts = [name for name in facts.files if name.endswith((".txt", ".log", ".out"))]
    shown = ", ".join(texts[:SHOWN_FILES]) + (
        f" and {len(texts) - SHOWN_FILES} more" if len(texts) > SHOWN_FILES else ""
    )
    return f"there is no {path} in it; it has {shown or 'no logs'} (OWNER/NAME/PATH shows one)"
