"""`tr11 sync`: the run's logs and TensorBoard events on the hub, for who watches from outside."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tr11ops.base.deadline import keep_waiting
from tr11ops.base.errors import (
    HubPermanentError,
    HubUnavailable,
    PrivateFileError,
    PublicRepository,
    Unobserved,
    WrongUsage,
)
from tr11ops.base.observed import cause
from tr11ops.base.stop_signals import StopEvent, obeying
from tr11ops.base.units import counted, duration, size
from tr11ops.cli.common import agree, directory_of, is_terminal, say
from tr11ops.cli.progress import ByteProgress, by_file
from tr11ops.cli.runner import DRY_RUN, JSON, Change, Outcome, RunContext, answer, unasked
from tr11ops.hub.base import Progress, Repository, find_credentials, hub_retries
from tr11ops.hub.client import Hub
from tr11ops.hub.sync import preview, sync_once
from tr11ops.hub.sync_files import RunningDigests
from tr11ops.hub.sync_plan import Note, Send
from tr11ops.hub.sync_round import (
    LoopClock,
    SyncOutcome,
    SyncSettings,
    follow,
    is_confirmed,
    seconds_of,
    write_confirmed,
    write_revoked,
)
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.claims import ClaimTaken
from tr11ops.status.publish import document

SCHEMA = 1
SHOWN_FILES = 20
BAR_BYTES = 16 << 20  # less is sent before a bar could be read
PATIENCE_SECONDS = 300.0  # of one question to the hub; every next round asks again


def sync(
    context: Annotated[RunContext, JSON, DRY_RUN],
    *,
    once: Annotated[
        bool, typer.Option("--once", help="One synchronisation; the default. cron calls this.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(
            "--every", metavar="TIME", help="On and on, each 30m, 1h, ...; until Ctrl-C or TERM."
        ),
    ] = None,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild", help="Believe no record: compare every file with what the hub has."
        ),
    ] = False,
    public: Annotated[
        bool,
        typer.Option(
            "--public",
            help="Everyone may read the logs: mirror to a public repository from now on.",
        ),
    ] = False,
    revoked: Annotated[
        bool,
        typer.Option(
            "--revoked", help="The secrets found in the logs are invalid now: end their alerts."
        ),
    ] = False,
) -> Change | Outcome | None:
    """Mirror logs and TensorBoard events to the hub: what fits hub.patterns below NAME-logs, in one
    commit.

    Only whole lines and whole records go; secrets in them are masked. Nothing is ever deleted
    there. Two at once are safe. A repository that is public already is asked about once.

    Exit code 0: the hub has everything, or another tr11 sync is at it; 1: it refuses, or a file
    could not be read; 2: wrong usage; 3: it does not answer.

    Examples:
      tr11 sync
      tr11 sync --dry-run
      tr11 sync --every 1h
    """
    dry_run = context.dry_run
    if every is not None and (once or dry_run):
        raise WrongUsage(f"--every and {'--once' if once else '--dry-run'}: leave one out")
    if public and dry_run:
        raise WrongUsage("--public and --dry-run: leave one out")
    if revoked and (once or dry_run or public or rebuild or context.as_json or every is not None):
        raise WrongUsage("--revoked stands alone: leave the other options out")
    interval = None
    if every is not None:
        interval = _seconds(every)
    card = context.card
    if card.hub.repository is None:
        raise WrongUsage(
            'hub.repository: is not set, so nothing is mirrored; set it to "OWNER/NAME"',
        )
    if revoked:
        return _revoked(card)
    if interval is not None:
        keep_waiting()
        _follow(context, interval, rebuild, public)
        return None
    context.require_mounted()
    published = directory_of(card).paths.published
    value = {"schema": SCHEMA, "repository": card.hub.repository}

    def one_round(send: Callable[[SyncSettings, bool], SyncOutcome]) -> Outcome:
        with _one_line(), ExitStack() as shown:
            if not published.is_dir():
                text = f"{published} does not exist yet: nothing was logged, so nothing is mirrored"
                return Outcome({**value, "sent": [], "commits": []}, notes=(text,))
            setting = _setting(card, shown, context.as_json)
            try:
                if public:
                    _confirm_public(setting)
                return _outcome(send(setting, rebuild), dry_run)
            except ClaimTaken as owner:
                notes = (f"tr11 sync runs already: {owner}",)
                return Outcome({**value, "busy": str(owner)}, notes=notes, indent=None)

    return unasked(partial(one_round, _once), partial(one_round, preview))


def _revoked(card: RunCard) -> Outcome:
    """End the alerts of the secrets that were found. Nothing is sent."""
    with _one_line():
        ended = write_revoked(directory_of(card), time.time())
    return Outcome(lines=[f"{secret}: revoked" for secret in ended] or ["no secret is open"])


def _once(setting: SyncSettings, rebuild: bool) -> SyncOutcome:
    """One synchronisation; a person is asked before the first one to a repository that is public
    already.
    """
    try:
        return sync_once(setting, rebuild=rebuild)
    except PublicRepository:
        if not is_terminal():
            raise
    agree(
        f"{setting.repository.name} is public: everyone will read these logs. Mirror to it from now on?",
        yes=False,
    )
    _confirm_public(setting)
    return sync_once(setting, rebuild=rebuild)


def _confirm_public(setting: SyncSettings) -> None:
    """Put on record, once, that this repository may be public. Raises OSError."""
    where = setting.directory, setting.hub.endpoint, setting.repository.name
    if not is_confirmed(*where):
        write_confirmed(*where, setting.clock())


def _seconds(text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError as error:
        raise WrongUsage(f"--every {text!r}: {error}") from None


@contextmanager
def _one_line() -> Iterator[None]:
    """A file system that does not answer has been observed no more than a hub that does not."""
    try:
        yield
    except OSError as error:
        raise Unobserved(cause(error)) from None


class _Ended(Exception):
    """A signal came while the hub was waited for."""


def _setting(
    card: RunCard, shown: ExitStack, as_json: bool, sleep: Callable[[float], None] = time.sleep
) -> SyncSettings:
    """What the card says, with the credentials as they are now. Raises PrivateFileError."""
    directory = directory_of(card)
    credentials = find_credentials(_path(card.hub.credentials_file), os.environ)
    return SyncSettings(
        hub=Hub(card.hub.endpoint, credentials, hub_retries(PATIENCE_SECONDS, sleep, say=say)),
        repository=Repository(str(card.hub.repository)),
        directory=directory,
        patterns=tuple(card.hub.patterns),
        private=card.hub.private,
        status=lambda: document(card, directory),
        clock=time.time,
        say=say,
        progress=lambda sends: _bar(sends, shown, as_json),
    )


def _path(text: str | None) -> Path | None:
    if text is None:
        return None
    return Path(text)


def _bar(sends: tuple[Send, ...], shown: ExitStack, as_json: bool) -> Progress | None:
    total = sum(send.bytes for send in sends)
    if total < BAR_BYTES:
        return None

    return by_file(shown.enter_context(ByteProgress("sending", total, is_quiet=as_json)).advance)


# ----------------------------------------------------------------------------- on and on
def _follow(context: RunContext, interval: float, rebuild: bool, public: bool) -> None:
    (card, _), as_json = context.seen(missing=None), context.as_json
    stop, running = StopEvent(), RunningDigests()
    pending = [rebuild]

    def sleep(seconds: float) -> None:
        if stop.wait(seconds):
            raise _Ended

    def obey(number: int) -> None:
        """The first lets the round end, the second ends it; both are safe."""
        if stop.is_set():
            raise SystemExit(128 + number)
        stop.set()

    def one_round() -> SyncOutcome:
        why = context.why_unmounted()
        if why:
            raise HubUnavailable(why)  # the next round looks again
        with ExitStack() as shown:
            try:
                # a token that was replaced is found
                setting = _setting(card, shown, as_json, sleep)
            except PrivateFileError as error:
                raise HubPermanentError(str(error)) from None
            if public:
                _confirm_public(setting)
            outcome = sync_once(setting, running, rebuild=pending[0])
        pending[0] = False
        return outcome

    def show(outcome: SyncOutcome) -> None:
        answer(context, _outcome(outcome, is_preview=False))

    say(
        f"mirroring {card.run.name} to {card.hub.repository} every {duration(interval)}; Ctrl-C ends it"
    )
    with obeying(obey), suppress(_Ended):
        clock = LoopClock(time.monotonic, stop.wait, random.random)
        follow(one_round, interval, clock=clock, show=show, say=say)
    say("ended")


# ----------------------------------------------------------------------------- what is shown
def _outcome(outcome: SyncOutcome, is_preview: bool) -> Outcome:
    sends = outcome.sends[:SHOWN_FILES] if is_preview else ()
    return Outcome(
        _values(outcome, is_preview),
        (*map(_line, sends), _summary(outcome, is_preview)),
        remarks=[*map(str, (*outcome.notes, *outcome.faults))],
        exit_code=1 if outcome.faults else 0,
        indent=None,
    )


def _line(send: Send) -> str:
    kept = ""
    if send.superseded:
        kept = f"; the hub's goes to {send.superseded}"
    return f"{send.path}  {size(send.bytes)}  {send.reason}{kept}"


def _summary(outcome: SyncOutcome, is_preview: bool) -> str:

    has = f"{outcome.repository} has {counted(outcome.files, 'file')} of this run, {size(outcome.bytes)}"
    if is_preview:
        if not outcome.sends:
            return f"nothing to send; {has}"
        left = len(outcome.sends) - SHOWN_FILES
        more = ""
        if left > 0:
            more = f"... and {left} more\n"
        return f"{more}would send {counted(len(outcome.sends), 'file')}, {size(outcome.sent_bytes)}"
    kept = (
        f"{send.path}: is another file now; the hub's is {send.superseded}"
        for send in outcome.sends
        if send.superseded
    )
    if outcome.sends:
        files, commits = (
            counted(len(outcome.sends), "file"),
            counted(len(outcome.commits), "commit"),
        )
        return "\n".join([*kept, f"sent {files}, {size(outcome.sent_bytes)}, in {commits}; {has}"])
    if outcome.status_sent:
        return f"sent its status; {has}"
    return f"nothing new; {has}"


def _values(outcome: SyncOutcome, is_preview: bool) -> dict[str, Any]:
    def told(notes: tuple[Note, ...]) -> list[dict[str, str]]:
        return [{"path": note.path, "why": note.why} for note in notes]

    return {
        "schema": SCHEMA,
        "repository": outcome.repository,
        "dry_run": is_preview,
        "head": outcome.head,
        "commits": list(outcome.commits),
        "sent": [
            {
                "path": send.path,
                "bytes": send.bytes,
                "reason": send.reason,
                "superseded": send.superseded or None,
            }
            for send in outcome.sends
        ],
        "sent_bytes": outcome.sent_bytes,
        "status_published": outcome.status_sent,
        "masked": [
            {"path": secret.path, "kind": secret.kind, "line": secret.line or None}
            for secret in outcome.found
        ],
        "files": outcome.files,
        "bytes": outcome.bytes,
        "left_alone": told(outcome.notes),
        "faults": told(outcome.faults),
    }
