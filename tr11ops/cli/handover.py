"""`tr11 handover`: what happened since the last shift, what is open, what comes next."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SchedulerOption,
    SetOption,
    directory_of,
    in_time,
    open_eye,
    read_card,
    require_file,
    say,
)

if TYPE_CHECKING:
    from tr11ops.cluster.base import Scheduler
    from tr11ops.journal import Entry, Ledger
    from tr11ops.report.handover import Handover, Material, Standing
    from tr11ops.runcard import RunCard
    from tr11ops.rundir import RunDirectory, Submission
    from tr11ops.snapshot import Observed, RunFacts, Unknown

DEFAULT_SINCE = "12h"
LEAST_AHEAD_SECONDS = 12 * 3600.0  # the coming shift is as long as the one before, but not shorter than this
MOST_AHEAD_SECONDS = 7 * 86400.0
JUST_NOW_SECONDS = 900.0
_SPAN = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?(min|h|d|w)")
_UNITS = {"min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def handover(
    *,
    run: RunOption = None,
    since: Annotated[
        str,
        typer.Option("--since", metavar="12h|DATE|last", help="Where the shift began; last: the hand-over before."),
    ] = DEFAULT_SINCE,
    as_json: JsonOption = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE.md", help="Write it there.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do not record that the shift was handed over.")] = False,
    overrides: SetOption = None,
    scheduler: SchedulerOption = "auto",
) -> None:
    """What happened since the last shift, what is open, and what comes next.

    Records in the journal that it was made, for `--since last` of the next one. DATE is 2022-05-01, 2022-05-01T08:00,
    or 08:00 for the last time that the clock showed it.

    [bold]Examples[/bold]

      tr11 handover

      tr11 handover --since last -o handover.md

      tr11 handover --since 3d --dry-run
    """
    from tr11ops.journal import read_journal
    from tr11ops.observe import facts_of
    from tr11ops.report.handover import hand_over
    from tr11ops.report.handover_coming import coming_events
    from tr11ops.report.handover_text import document
    from tr11ops.verdict import Word

    card = read_card(run, overrides)
    directory = directory_of(card)
    if not directory.exists:
        raise Refusal(f"{directory.root} does not exist: nothing was launched from this card here; check --run", 3)
    if output is not None:
        require_file(output, "--output")
    now = time.time()
    ledger = read_journal(directory.journal)
    begun, basis = begin_of(since, now, ledger.entries)
    eye = open_eye(directory, scheduler)
    facts = facts_of(card, run or "")
    material = in_time(lambda: _gather(card, directory, facts, eye, ledger, begun, now))
    ahead = min(MOST_AHEAD_SECONDS, max(LEAST_AHEAD_SECONDS, now - begun))
    coming = coming_events(material.snapshot, material.surroundings, card, ahead)
    made = hand_over(material, begun, now, basis, coming)
    text = json.dumps(document(made), indent=1, allow_nan=False) + "\n" if as_json else _markdown(made)
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        from trainer.contract import write_atomically

        try:
            write_atomically(output, text)
        except OSError as error:
            raise Refusal(f"-o {output}: could not be written: {error.strerror or error}") from None
        say(f"written: {output}")
    if not dry_run:
        _record(directory, begun, now)
    if material.verdict.word is Word.UNKNOWN:
        raise typer.Exit(3)


def _markdown(made: Handover) -> str:
    from tr11ops.report.glyphs import shows_unicode
    from tr11ops.report.handover_text import markdown

    return markdown(made, None, shows_unicode(os.environ, getattr(sys.__stdout__, "encoding", None) or "ascii"))


def _record(directory: RunDirectory, since: float, until: float) -> None:
    """At last, so that a hand-over that nobody saw is not on record. A journal that cannot be written is said."""
    from tr11ops.evidence import cause
    from tr11ops.journal import Journal
    from tr11ops.report.handover import KIND

    try:
        Journal(directory.journal).write(KIND, "", {"since": since, "until": until}, when=until)
    except OSError as error:
        say(f"tr11: not recorded, `--since last` will not find it: {cause(error)}")


# ----------------------------------------------------------------------------- where the shift began
def begin_of(text: str, now: float, entries: tuple[Entry, ...]) -> tuple[float, str]:
    """When the shift began, and why then. Raises Refusal for what is no time, or lies ahead."""
    from tr11ops.report.handover import last_handover

    if text == "last":
        before = last_handover(entries)
        if before is None:
            raise Refusal("--since last: no hand-over is on record yet; say since when, e.g. --since 12h")
        if before.time > now:
            raise Refusal("--since last: the last hand-over's time lies ahead; the clock was set back, give a DATE")
        if now - before.time < JUST_NOW_SECONDS:
            say(f"the last hand-over was made {now - before.time:.0f} s ago; --since 12h shows more")
        return before.time, f"since the hand-over by {before.who or 'somebody'}"
    span = _SPAN.fullmatch(text.strip())
    if span is not None:
        return now - float(span[1]) * _UNITS[span[2]], f"the last {text.strip()}"
    moment = _moment(text.strip(), now)
    if moment is None:
        raise Refusal(f"--since {text!r}: write 12h, 90min, 3d, 2022-05-01, 2022-05-01T08:00, 08:00 or last", 2)
    if moment >= now:
        raise Refusal(f"--since {text}: that is in the future", exit_code=2)
    return moment, f"since {text.strip()}"


def _moment(text: str, now: float) -> float | None:
    """A date, with or without a time, or a time of day that is over; in this machine's zone where none is given."""
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            hour, minute = map(int, text.split(":"))
            today = datetime.fromtimestamp(now).replace(hour=hour, minute=minute, second=0, microsecond=0)
            return (today if today.timestamp() < now else today - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


# ----------------------------------------------------------------------------- reading
def _gather(
    card: RunCard,
    directory: RunDirectory,
    facts: RunFacts,
    scheduler: Scheduler | Unknown,
    ledger: Ledger,
    begun: float,
    now: float,
) -> Material:
    from tr11ops.alerts.reading import incidents
    from tr11ops.detect.registry import detect_all
    from tr11ops.evidence import observed
    from tr11ops.observe import look_now, observe
    from tr11ops.report.goodput import account
    from tr11ops.report.handover import Material
    from tr11ops.report.history import read_history
    from tr11ops.report.status_surroundings import see_surroundings
    from tr11ops.snapshot import Unknown, known
    from tr11ops.verdict import judge

    snapshot = observe(directory, facts, scheduler, look_now(directory, facts, scheduler))
    findings = detect_all(snapshot)
    history = read_history(directory, snapshot.jobs, ledger)
    seen = incidents(directory)
    standings = observed(lambda: (_standing(directory, begun), _standing(directory, now)))
    surroundings = see_surroundings(directory, card, snapshot)
    hidden = [
        f"{name}: {value.why}"
        for name, value in (("incidents", seen), ("steps", standings))
        if isinstance(value, Unknown)
    ]
    faults = [str(fault) for fault in ledger.faults if fault.kind != "torn"]
    first, last = known(standings, (None, None))
    return Material(
        snapshot=snapshot,
        findings=findings,
        verdict=judge(snapshot, findings),
        surroundings=surroundings,
        history=history,
        goodput=account(history, now),
        incidents=seen,
        journal=ledger.entries,
        begun=first,
        ended=last,
        cards=_cards(directory, history.submissions),
        doubts=(*snapshot.unknowns(), *surroundings.unknowns(), *hidden, *faults[:3]),
    )


def _standing(directory: RunDirectory, moment: float) -> Standing | None:
    from tr11ops.report.handover_steps import standing_at

    return standing_at(directory.paths.metrics, moment)


def _cards(directory: RunDirectory, submissions: Observed[tuple[Submission, ...]]) -> dict[str, Mapping[str, Any]]:
    from tr11ops.evidence import observed
    from tr11ops.snapshot import known
    from trainer.contract import read_json

    found: dict[str, Mapping[str, Any]] = {}
    for entry in known(submissions, ()):
        value = observed(lambda tag=entry.tag: read_json(directory.submission(tag).card))  # type: ignore[misc]
        if isinstance(value, dict):
            found[entry.tag] = value
    return found
