"""`tr11 pulse`: one look by the watchdog, which tells, and acts where the run card or `--act`
allows it.
"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from tr11ops.base import deadline
from tr11ops.base.deadline import late_words
from tr11ops.base.errors import Refusal, SchedulerError
from tr11ops.base.observed import Unknown
from tr11ops.cli.common import directory_of, in_time, named_card, say
from tr11ops.cli.launch import prepare
from tr11ops.cli.runner import DRY_RUN, JSON, SCHEDULER, Outcome, RunContext
from tr11ops.cluster.base import Scheduler
from tr11ops.cron.runner import KEPT_CARD
from tr11ops.launch.session import LaunchJob
from tr11ops.observe.readers import kind_to_watch, looking, open_if_there
from tr11ops.runcard.card import CardError, RunCard, card_from_resolved
from tr11ops.rundir.journal import user_name
from tr11ops.status.assessment import status_of
from tr11ops.watchdog.pulse import Actuator, Pulse, WatchedRun, take_pulse, tell_of_silence

PULSE_SCHEMA = 1


def pulse(
    context: Annotated[RunContext, SCHEDULER, JSON, DRY_RUN],
    *,
    act: Annotated[
        bool | None,
        typer.Option(
            "--act/--no-act",
            help="Act within the card's budgets, or only tell. Default: watch.act.",
        ),
    ] = None,
    no_email: Annotated[
        bool, typer.Option("--no-email", help="Alert no one; the log is written all the same.")
    ] = False,
) -> Outcome:
    """One look by the watchdog: a line in the run's log, alerts, and, with --act, what repairs the
    run.

    It resubmits what is gone, cancels what holds nodes for nothing, excludes lost nodes, and
    repairs a dead queue. It does nothing on what it could not see, against a kill switch or a
    pause, or beyond a day's budget.

    Exit code 0: no one needs to get up; 1: a person is needed; 2: wrong usage; 3: it could not be
    observed.

    Examples:
      tr11 pulse
      tr11 pulse --act --no-email
      tr11 pulse --dry-run --act --json
    """
    card = _card(context)
    directory = directory_of(card)
    silence, kind = "", context.scheduler
    if deadline.is_silent(directory.root, deadline.LOOK_SECONDS):
        silence = late_words(directory.root, deadline.LOOK_SECONDS)
    else:
        kind = in_time(lambda: kind_to_watch(directory, kind))
    reader, hand = in_time(lambda: _edges(kind))
    dry_run = context.dry_run
    allowed = card.watch.act if act is None else act
    actuator = None
    if allowed and hand is not None:
        actuator = _actuator(context, hand)
    watched = WatchedRun(
        card, directory, reader=reader, user=user_name(), typed=named_card(context.run)
    )

    def look() -> Pulse:
        if silence:
            return tell_of_silence(watched, silence, email=not no_email, dry_run=dry_run)
        return take_pulse(watched, actuator, email=not no_email, dry_run=dry_run)

    result = in_time(look, deadline.PASS_SECONDS)
    # before the answer: a last line that names a fault of a file is a command that broke
    for note in result.notes:
        say(f"tr11: {note}")
    return Outcome(
        document(result, dry_run),
        result.lines,
        ("nothing was written, sent or changed (--dry-run)",) if dry_run else (),
        exit_code=result.verdict.exit_code,
    )


def _card(context: RunContext) -> RunCard:
    """The card; where its file system does not answer, as it was when the rounds of the periodic
    jobs began. Raises CardError, Refusal.
    """
    try:
        return context.card
    except Refusal as error:
        kept = os.environ.get(KEPT_CARD)
        if kept is None or error.exit_code != 3:
            raise
        return card_from_resolved(json.loads(kept), KEPT_CARD)


def _edges(kind: str) -> tuple[Scheduler | Unknown, Scheduler | None]:
    """The edge that looks, which gives up soon, and the one that acts; None where there is no
    scheduler.
    """
    found = open_if_there(kind)
    if isinstance(found, Unknown):
        return (found, None)
    return (looking(found), found)


def _actuator(context: RunContext, hand: Scheduler) -> Actuator:
    def launch(array: str, after: str | None) -> LaunchJob:
        # a person has launched this run already: a job of the same name elsewhere must not keep it
        # down
        try:
            return prepare(
                context.run,
                context.overrides,
                hand.name,
                array=array,
                after=after,
                allow_namesake=True,
            )
        except (
            CardError,
            Refusal,
        ) as error:  # the card has changed since the look, or its array is none
            raise SchedulerError(" ".join(str(error).split())) from None

    return Actuator(hand, launch)


def document(result: Pulse, dry_run: bool) -> dict[str, Any]:
    """The JSON document; its keys are described in docs/reference/pulse.md."""
    status = status_of(result.snapshot, result.findings, result.verdict).document()
    begun = {id(one.action): one for one in result.done}
    return {
        "schema": PULSE_SCHEMA,
        "time": status["time"],
        "run": status["run"],
        "verdict": result.verdict.word.value,
        "why": result.verdict.why,
        "state": result.state.value,
        "exit_code": result.verdict.exit_code,
        "observed": result.observed,
        "lines": list(result.lines),
        "remarks": [
            {"state": remark.state.value, "text": remark.text} for remark in result.reported
        ],
        "findings": status["findings"],
        "unknown": status["unknown"],
        "acts": result.acts,
        "dry_run": dry_run,
        "actions": [
            {
                "action": action.name,
                "subject": action.subject,
                "why": action.why,
                "evidence": list(action.evidence),
                "undo": action.undo,
                "result": begun[id(action)].result.value if id(action) in begun else None,
                "message": begun[id(action)].message if id(action) in begun else None,
            }
            for action in result.plan.actions
        ],
        "withheld": list(result.plan.withheld),
        "settled": [
            {
                "action": record.action,
                "subject": record.subject,
                "result": record.result.value,
                "message": record.message,
            }
            for record in result.settled
        ],
        "alerts": None
        if result.alerts is None
        else {
            "open": len(result.alerts.open),
            "messages": len(result.alerts.messages),
            "suppressed": result.alerts.suppressed,
            "sent": result.alerts.sent,
        },
        "notes": list(result.notes),
        "seconds": round(result.seconds, 3),
    }
