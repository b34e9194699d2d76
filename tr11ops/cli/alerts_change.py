"""`tr11 alerts ack`, `snooze`, `assign` and `resolve`: what a person does about an alert, by name and with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.alerts.changes import acknowledge, resolve_prefix, seconds_of
from tr11ops.alerts.changes import assign as give
from tr11ops.alerts.changes import resolve as close
from tr11ops.alerts.changes import snooze as put_off
from tr11ops.alerts.people import PersonalChange, change_alerts
from tr11ops.alerts.reading import current_alert_state, open_alerts
from tr11ops.base.errors import NoSuchAlert, Refusal
from tr11ops.base.observed import Unknown
from tr11ops.cli.alerts_view import SCHEMA, alert_values, kept_elsewhere
from tr11ops.cli.common import DryRunOption, named_card, say
from tr11ops.cli.context import JSON, RunContext, emit
from tr11ops.cli.terminal import plain_text
from tr11ops.rundir.journal import user_name

if TYPE_CHECKING:
    from tr11ops.alerts.changes import Change
    from tr11ops.alerts.state import Alert

Fingerprints = Annotated[
    list[str] | None, typer.Argument(metavar="FP...", help="Fingerprints; the beginning is enough where it is unique.")
]
Fingerprint = Annotated[str, typer.Argument(metavar="FP", help="Fingerprint; the beginning is enough.")]
AllOption = Annotated[bool, typer.Option("--all", help="Every open alert.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept with the alert and in the journal.")]
WhoOption = Annotated[
    str, typer.Option("--as", metavar="NAME", help="For someone else; who typed it is recorded too. Default: you.")
]


def ack(
    context: Annotated[RunContext, JSON],
    fingerprints: Fingerprints = None,
    everything: AllOption = False,
    why: ReasonOption = "",
    who: WhoOption = "",
    dry_run: DryRunOption = False,
) -> None:
    """Say that someone works on it: no escalation and no repeats for 24 hours, unless it becomes worse.

    Examples:
      tr11 alerts ack 3f2a --reason "node is out, relaunching"
      tr11 alerts ack --all
    """
    context.seen()
    name = _name(who)
    _do(
        context,
        _chosen(context, fingerprints, everything),
        lambda: acknowledge(name, why),
        why,
        context.run,
        dry_run,
        context.as_json,
    )


def snooze(
    context: Annotated[RunContext, JSON],
    fingerprints: Fingerprints = None,
    length: Annotated[str, typer.Option("--for", metavar="TIME", help="How long: 30m, 2h, 1d.")] = "2h",
    everything: AllOption = False,
    why: ReasonOption = "",
    dry_run: DryRunOption = False,
) -> None:
    """No message about it for so long, unless it becomes worse. Then it is said once again.

    Examples:
      tr11 alerts snooze 3f2a --for 2h --reason "the site repairs the switch"
    """
    context.seen()
    try:
        seconds = seconds_of(length)
    except ValueError as error:
        raise Refusal(f"--for {error}", exit_code=2) from None
    name = _name("")
    _do(
        context,
        _chosen(context, fingerprints, everything),
        lambda: put_off(name, seconds),
        why,
        context.run,
        dry_run,
        context.as_json,
    )


def assign(
    context: Annotated[RunContext, JSON],
    fingerprint: Fingerprint,
    to: Annotated[str, typer.Argument(metavar="WHO", help="A name, or a mail address, which is told.")],
    why: ReasonOption = "",
    dry_run: DryRunOption = False,
) -> None:
    """Give it to someone. A mail address hears of it at once, and of all that follows.

    Examples:
      tr11 alerts assign 3f2a ana@example.org
    """
    if not to.strip():
        raise Refusal("WHO: is empty; give a name or a mail address", exit_code=2)
    context.seen()
    _do(context, (fingerprint,), lambda: give(to), why, context.run, dry_run, context.as_json)


def resolve(
    context: Annotated[RunContext, JSON],
    fingerprints: Fingerprints = None,
    everything: AllOption = False,
    why: ReasonOption = "",
    dry_run: DryRunOption = False,
) -> None:
    """Say that it is over. Those who were told hear it; if the next look sees the fault, it is open again.

    Examples:
      tr11 alerts resolve 3f2a --reason "false alarm: maintenance"
    """
    if not why.strip():
        raise Refusal("--reason is needed: those who were told of it will ask", exit_code=2)
    context.seen()
    name = _name("")
    _do(
        context,
        _chosen(context, fingerprints, everything),
        lambda: close(name, why),
        why,
        context.run,
        dry_run,
        context.as_json,
    )


# ----------------------------------------------------------------------------- how
def _name(other: str) -> str:
    mine = user_name()
    return f"{other} (typed by {mine})" if other.strip() and other != mine else mine


def _chosen(context: RunContext, fingerprints: Sequence[str] | None, everything: bool) -> tuple[str, ...]:
    if bool(fingerprints) == everything:
        raise Refusal("FP...: name alerts, or give --all, not both; see: tr11 alerts list", exit_code=2)
    if not everything:
        return tuple(fingerprints or ())
    found = open_alerts(context.directory)
    if isinstance(found, Unknown):
        raise Refusal(f"the alerts cannot be read: {found.why}", exit_code=3)
    return tuple(alert.fingerprint for alert in found)


def _do(
    context: RunContext,
    typed: Sequence[str],
    make: Callable[[], tuple[Change, str]],
    why: str,
    run: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    change, kind = make()
    try:
        if dry_run:
            alert_state = current_alert_state(context.directory)
            alerts = tuple(dict.fromkeys(resolve_prefix(alert_state, name) for name in typed))
            notes: tuple[str, ...] = ("nothing was changed (--dry-run)",)
        else:
            wanted = [PersonalChange(name, change, kind, user_name(), why) for name in typed]
            alerts, notes = change_alerts(context.directory, context.card, wanted, time.time(), named_card(run))
    except NoSuchAlert as error:
        elsewhere = kept_elsewhere(context.directory)
        more = f"\n{elsewhere}" if elsewhere else ""
        raise Refusal(f"FP: {error}; nothing was changed{more}", exit_code=2) from None
    except ValueError as error:
        raise Refusal(f"the alerts cannot be read: {error}", exit_code=3) from None
    _report(alerts, kind, notes, dry_run, as_json)


def _report(alerts: Sequence[Alert], kind: str, notes: Sequence[str], dry_run: bool, as_json: bool) -> None:
    action = kind.removeprefix("alert-")
    if as_json:
        found = [alert_values(alert) for alert in alerts]
        emit({"schema": SCHEMA, "action": f"would-be-{action}" if dry_run else action, "alerts": found}, indent=None)
    else:
        for alert in alerts:
            say(f"{'would be ' if dry_run else ''}{action}: {alert.fingerprint} {plain_text(alert.title)}")
        if not alerts:
            say("no alert is open")
    for line in notes:
        say(f"tr11: {plain_text(line)}" if not dry_run else line)
