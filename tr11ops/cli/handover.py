"""`tr11 handover`: what happened since the last shift, what is open, what comes next; `tr11 report`: the
whole run as one page, for people who were not there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import typer
from msgspec.structs import asdict, replace

from tr11ops.alerts.store import incidents
from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.invocation import command_for
from tr11ops.base.observed import Observed, Unknown, cause, known, observed
from tr11ops.base.units import duration, since as since_when, size, span_seconds
from tr11ops.cli.common import (
    draws_unicode,
    in_time,
    in_time_for_all,
    require_file,
    say,
    write_output,
)
from tr11ops.cli.compare import FromOption, ToOption, range_of_options
from tr11ops.cli.runner import JSON, SCHEDULER, Outcome, RunContext
from tr11ops.cluster.base import Scheduler
from tr11ops.goodput.account import account
from tr11ops.goodput.history import read_history
from tr11ops.handover.coming import coming_events
from tr11ops.handover.shift import KIND, Handover, HandoverMaterial, hand_over, last_handover
from tr11ops.handover.start import (
    COMMANDS,
    ShiftCommand,
    StartOfShift,
    group_of_folder,
    read_group_jobs,
)
from tr11ops.handover.text import chronicle, document, markdown
from tr11ops.observe.files import PastProgress, progress_at
from tr11ops.observe.look import facts_of
from tr11ops.observe.readers import open_reader
from tr11ops.observe.snapshot import RunFacts, Snapshot
from tr11ops.report.build import page_of
from tr11ops.report.material import gather
from tr11ops.report.page import render
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.journal import Journal, JournalEntry, Ledger, read_journal
from tr11ops.rundir.paths import RunDirectory, Submission
from tr11ops.status.assessment import assess
from tr11ops.status.extra_observations import observe_extra
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.state_file import read_json

DEFAULT_SINCE = "12h"
# the coming shift is as long as the one before, but not shorter than this
LEAST_AHEAD_SECONDS = 12 * 3600.0
MOST_AHEAD_SECONDS = 7 * 86400.0
JUST_NOW_SECONDS = 900.0


def handover(
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME|last",
            help="Where the shift began: 12h, 3d, 08:00, 2022-05-01; last: the hand-over before [12h].",
        ),
    ] = None,
    start: Annotated[
        bool,
        typer.Option(
            "--start",
            help="To begin a shift: since the last hand-over, with the group's jobs and what to type. Not recorded.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.md", help="Write it there.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do not record that the shift was handed over.")
    ] = False,
    as_chronicle: Annotated[
        bool,
        typer.Option(
            "--chronicle",
            help="The days as an entry of a chronicle, to edit: faults, evidence, cost.",
        ),
    ] = False,
) -> Outcome:
    """What happened since the last shift, what is open, and what comes next.

    Records in the journal that it was made, for `--since last` of the next one. DATE is 2022-05-01,
    2022-05-01T08:00, or 08:00 for the last time that the clock showed it. With --chronicle and
    --start nothing is recorded.

    Examples:
      tr11 handover --start
      tr11 handover
      tr11 handover --since last -o handover.md
      tr11 handover --since 3d --dry-run
      tr11 handover --chronicle --since 1d >> CHRONICLES.md
    """
    if as_chronicle and context.as_json:
        raise WrongUsage("--chronicle is Markdown to edit; --json has the same without it")
    card, directory = context.seen(missing=3)
    if as_chronicle and start:
        raise WrongUsage("--chronicle is of what is over, --start of what begins: give one")
    if output is not None:
        require_file(output, "--output")
    now = time.time()
    ledger = in_time(lambda: read_journal(directory.journal))
    if since is None:
        since = DEFAULT_SINCE
        if start and last_handover(ledger.entries) is not None:
            since = "last"
    begun, basis = begin_of(since, now, ledger.entries)
    reader = in_time(lambda: open_reader(directory, context.scheduler))
    facts = facts_of(card, context.run or "")
    material = in_time(
        lambda: _gather(
            card, directory, facts=facts, scheduler=reader, ledger=ledger, begun=begun, now=now
        )
    )
    ahead = min(MOST_AHEAD_SECONDS, max(LEAST_AHEAD_SECONDS, now - begun))
    coming = coming_events(material.snapshot, material.extra, card, ahead)
    made = hand_over(material, begun, until=now, basis=basis, coming=coming)
    if start:
        made = replace(
            made,
            start=in_time(
                lambda: _start(
                    card, directory, scheduler=reader, snapshot=material.snapshot, now=now
                )
            ),
        )
    if context.as_json:
        text = json.dumps(document(made), indent=1, allow_nan=False) + "\n"
    else:
        text = _markdown(made, as_chronicle)
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_output(output, text)
        say(f"written: {output}")
    if not dry_run and not as_chronicle and not start:
        _record(directory, begun, now)
    return Outcome(exit_code=3 if material.verdict.word is VerdictWord.UNKNOWN else 0)


def _start(
    card: RunCard,
    directory: RunDirectory,
    scheduler: Scheduler | Unknown,
    snapshot: Snapshot,
    now: float,
) -> StartOfShift:
    commands = tuple(
        ShiftCommand(command_for(snapshot.run.card, words), purpose) for words, purpose in COMMANDS
    )
    named = card.perms.group
    group: Observed[str]
    if named:
        group = named
    else:
        group = observed(group_of_folder, directory.root)
    if isinstance(group, Unknown):
        return StartOfShift(commands, "", None, group.why)
    found = read_group_jobs(scheduler, group, known(snapshot.jobs, ()), now)
    if isinstance(found, Unknown):
        return StartOfShift(commands, group, None, found.why)
    return StartOfShift(commands, group, found)


def _markdown(made: Handover, as_chronicle: bool) -> str:
    if as_chronicle:
        return chronicle(made, None)
    return markdown(made, None, draws_unicode())


def _record(directory: RunDirectory, since: float, until: float) -> None:
    """At last, so that a hand-over that no one saw is not on record. A journal that cannot be
    written is said.
    """
    try:
        Journal(directory.journal).write(KIND, "", {"since": since, "until": until}, when=until)
    except OSError as error:
        say(f"tr11: not recorded, `--since last` will not find it: {cause(error)}")


# ----------------------------------------------------------------------------- where the shift
# began
def begin_of(text: str, now: float, entries: tuple[JournalEntry, ...]) -> tuple[float, str]:
    """When the shift began, and why then. Raises Refusal for what is no time, or lies ahead."""
    if text == "last":
        before = last_handover(entries)
        if before is None:
            raise Refusal(
                "--since last: no hand-over is on record yet; say since when, e.g. --since 12h"
            )
        if before.time > now:
            raise Refusal(
                "--since last: the last hand-over's time lies ahead; the clock was set back, give a DATE"
            )
        if now - before.time < JUST_NOW_SECONDS:
            say(
                f"the last hand-over was made {duration(now - before.time)} ago; --since 12h shows more"
            )
        return before.time, f"since the hand-over by {before.who or 'someone'}"
    with suppress(ValueError):
        return now - span_seconds(text, None), f"the last {text.strip()}"
    try:
        moment = since_when(text, now)
    except ValueError as error:
        raise WrongUsage(f"--since {text!r}: {error}, or last") from None
    if moment >= now:
        raise WrongUsage(f"--since {text}: that is in the future")
    return moment, f"since {text.strip()}"


# ----------------------------------------------------------------------------- reading
def _gather(
    card: RunCard,
    directory: RunDirectory,
    facts: RunFacts,
    scheduler: Scheduler | Unknown,
    ledger: Ledger,
    begun: float,
    now: float,
) -> HandoverMaterial:

    assessed = assess(directory, facts, scheduler, partial(observe_extra, directory, card))
    snapshot, extra = assessed.snapshot, assessed.extra
    history = read_history(directory, snapshot.jobs, ledger, snapshot.scheduler)
    seen = incidents(directory)
    standings = observed(lambda: (_standing(directory, begun), _standing(directory, now)))
    hidden = [
        f"{name}: {value.why}"
        for name, value in (("incidents", seen), ("steps", standings))
        if isinstance(value, Unknown)
    ]
    faults = [str(fault) for fault in ledger.faults if fault.kind != "torn"]
    first, last = known(standings, (None, None))
    return HandoverMaterial(
        **asdict(assessed),
        history=history,
        goodput=account(history, now),
        incidents=seen,
        journal=ledger.entries,
        begun=first,
        ended=last,
        cards=_cards(directory, history.submissions),
        read_errors=(*snapshot.unknowns(), *extra.unknowns(), *hidden, *faults[:3]),
    )


def _standing(directory: RunDirectory, moment: float) -> PastProgress | None:
    return progress_at(directory.paths.metrics, moment)


def _cards(
    directory: RunDirectory, submissions: Observed[tuple[Submission, ...]]
) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for entry in known(submissions, ()):
        value = observed(lambda tag=entry.tag: read_json(directory.submission(tag).card))  # type: ignore[misc]
        if isinstance(value, dict):
            found[entry.tag] = value
    return found


def report(
    context: Annotated[RunContext, SCHEDULER],
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where the page goes; - is standard output."
        ),
    ] = Path("report.html"),
    charts: Annotated[
        bool, typer.Option("--charts/--no-charts", help="Without: text and tables, small.")
    ] = True,
    first: FromOption = None,
    last: ToOption = None,
    zone: Annotated[
        str | None,
        typer.Option(
            "--zone", metavar="NAME", help="Time zone, e.g. Europe/Paris. Else alerts.time_zone."
        ),
    ] = None,
) -> Outcome | None:
    """Write the whole run as one page of HTML that needs no network: to mail, to keep, to put
    beside the logs.

    Loss, validation, learning rate, batch and throughput with the incidents marked, where the
    node-hours went, faults with the time to detect and to recover, alerts, attempts, nodes,
    checkpoints, and what was done by whom.

    Examples:
      tr11 report
      tr11 report -o tr11-176B.html --zone Europe/Paris
      tr11 report --from 31000 --to 31500 -o spike.html
      tr11 report --no-charts -o - > report.html
    """
    to_stdout = str(output) == "-"
    if not to_stdout:
        require_file(output, "--output")
    within = range_of_options(first, last)
    card, directory = context.seen()
    times = _zone(zone or card.alerts.time_zone)
    material = in_time_for_all(
        lambda: gather(
            directory,
            facts_of(card, context.run or ""),
            scheduler=open_reader(directory, context.scheduler),
            now=time.time(),
            within=within,
        )
    )
    page = page_of(material, times, charts)
    text = render(page)
    if to_stdout:
        typer.echo(text, nl=False)
        return None
    write_output(output, text)
    unknown = (f"unknown: {line}" for line in material.read_errors)
    written = f"{output}: {size(len(text))}, {len(page.sections)} parts"
    return Outcome(notes=(*unknown, written))


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise WrongUsage(f"--zone {name!r}: is not a time zone; e.g. UTC, Europe/Paris") from None
