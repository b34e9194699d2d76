"""`tr11 pulse`: one look by the watchdog, which tells, and acts where the run card or `--act` allows it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SchedulerOption,
    SetOption,
    check_scheduler_word,
    directory_of,
    in_time,
    kind_to_watch,
    looking,
    named_card,
    read_card,
    say,
)
from tr11ops.cli.stopping import DryRunOption

if TYPE_CHECKING:
    from tr11ops.cluster.base import Scheduler
    from tr11ops.pulse import Hands, Pulse
    from tr11ops.rundir import RunDirectory
    from tr11ops.snapshot import Unknown

PULSE_SCHEMA = 1


def pulse(
    *,
    run: RunOption = None,
    act: Annotated[
        bool | None,
        typer.Option("--act/--no-act", help="Act within the card's budgets, or only tell. Default: watch.act."),
    ] = None,
    no_email: Annotated[
        bool, typer.Option("--no-email", help="Alert nobody; the log is written all the same.")
    ] = False,
    dry_run: DryRunOption = False,
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """One look by the watchdog: a line in the run's log, alerts, and, with --act, what mends the run.

    It resubmits what is gone, cancels what holds nodes for nothing, excludes lost nodes, and mends a dead queue. It
    does nothing on what it could not see, against a kill switch or a pause, or beyond a day's budget.

    Exit code 0: nobody needs to get up; 1: a person is needed; 2: wrong usage; 3: it could not be observed.

    [bold]Examples[/bold]

      tr11 pulse

      tr11 pulse --act --no-email

      tr11 pulse --dry-run --act --json
    """
    from tr11ops.deadline import PASS_SECONDS
    from tr11ops.evidence import observed
    from tr11ops.journal import user_name
    from tr11ops.pulse import Run, take_pulse

    check_scheduler_word(scheduler)
    card = in_time(lambda: read_card(run, overrides))
    directory = directory_of(card)
    in_time(lambda: observed(lambda: list(directory.root.iterdir())))  # where that does not end, nothing could be done
    eye, hand = in_time(lambda: _edges(directory, scheduler))
    allowed = card.watch.act if act is None else act
    hands = _hands(run, overrides, hand) if allowed and hand is not None else None
    watched = Run(card, directory, eye, user_name(), named_card(run))
    result = in_time(lambda: take_pulse(watched, hands, email=not no_email, dry_run=dry_run), PASS_SECONDS)
    for note in result.notes:  # before the answer: a last line that names a fault of a file is a command that broke
        say(f"tr11: {note}")
    if as_json:
        typer.echo(json.dumps(document(result, dry_run), indent=1, allow_nan=False))
    else:
        for line in result.lines:
            typer.echo(line)
    if dry_run:
        say("nothing was written, sent or changed (--dry-run)")
    raise typer.Exit(result.verdict.exit_code)


def _edges(directory: RunDirectory, kind: str) -> tuple[Scheduler | Unknown, Scheduler | None]:
    """The edge that looks, which gives up soon, and the one that acts; None where there is no scheduler."""
    from tr11ops.cluster.base import SchedulerError
    from tr11ops.cluster.select import choose_scheduler
    from tr11ops.snapshot import Unknown

    wanted = kind_to_watch(directory, kind)
    try:
        hand = choose_scheduler(wanted)  # type: ignore[arg-type]  # one of CLUSTERS
    except (SchedulerError, OSError) as error:
        return Unknown(f"no {wanted} scheduler here: {error}"), None
    return looking(hand), hand


def _hands(run: str | None, overrides: list[str] | None, hand: Scheduler) -> Hands:
    from tr11ops.cli.launch import prepare
    from tr11ops.cluster.base import SchedulerError
    from tr11ops.launch.session import LaunchJob
    from tr11ops.pulse import Hands
    from tr11ops.runcard import CardError

    def launch(array: str, after: str | None) -> LaunchJob:
        # a person has launched this run already: a job of the same name elsewhere must not keep it down
        try:
            return prepare(run, overrides or [], hand.name, array=array, after=after, allow_namesake=True)
        except (CardError, Refusal) as error:  # the card has changed since the look, or its array is none
            raise SchedulerError(" ".join(str(error).split())) from None

    return Hands(hand, launch)


def document(result: Pulse, dry_run: bool) -> dict[str, Any]:
    """The JSON document; its keys are described in docs/pulse.md."""
    from tr11ops.report.status_json import status_document

    status = status_document(result.snapshot, result.findings, result.verdict)
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
        "remarks": [{"state": remark.state.value, "text": remark.text} for remark in result.told],
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
            {"action": deed.action, "subject": deed.subject, "result": deed.result.value, "message": deed.message}
            for deed in result.settled
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
