"""`tr11 alerts ack`, `snooze`, `assign` and `resolve`: what a person does about an alert, by name and with a reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.cli.alerts_view import SCHEMA, Room, alert_values, open_room
from tr11ops.cli.common import JsonOption, Refusal, RunOption, SetOption, named_card, say
from tr11ops.cli.nodes_view import plain_text

if TYPE_CHECKING:
    from tr11ops.alerts.book import Alert
    from tr11ops.alerts.changes import Change

Fingerprints = Annotated[
    list[str] | None, typer.Argument(metavar="FP...", help="Fingerprints; the beginning is enough where it is unique.")
]
Fingerprint = Annotated[str, typer.Argument(metavar="FP", help="Fingerprint; the beginning is enough.")]
AllOption = Annotated[bool, typer.Option("--all", help="Every open alert.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept with the alert and in the journal.")]
WhoOption = Annotated[
    str, typer.Option("--as", metavar="NAME", help="For somebody else; who typed it is recorded too. Default: you.")
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]


def ack(
    fingerprints: Fingerprints = None,
    run: RunOption = None,
    everything: AllOption = False,
    why: ReasonOption = "",
    who: WhoOption = "",
    dry_run: DryOption = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Say that somebody works on it: no escalation and no repeats for 24 hours, unless it becomes worse.

    [bold]Examples[/bold]

      tr11 alerts ack 3f2a --reason "node is out, relaunching"

      tr11 alerts ack --all
    """
    from tr11ops.alerts.changes import acknowledge

    room = open_room(run, overrides)
    name = _name(who)
    _do(room, _chosen(room, fingerprints, everything), lambda: acknowledge(name, why), why, run, dry_run, as_json)


def snooze(
    fingerprints: Fingerprints = None,
    length: Annotated[str, typer.Option("--for", metavar="TIME", help="30m, 2h, 1d.")] = "2h",
    run: RunOption = None,
    everything: AllOption = False,
    why: ReasonOption = "",
    dry_run: DryOption = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """No message about it for so long, unless it becomes worse. Then it is said once again.

    [bold]Examples[/bold]

      tr11 alerts snooze 3f2a --for 2h --reason "the site repairs the switch"
    """
    from tr11ops.alerts.changes import seconds_of
    from tr11ops.alerts.changes import snooze as put_off

    room = open_room(run, overrides)
    try:
        seconds = seconds_of(length)
    except ValueError as error:
        raise Refusal(f"--for {error}", exit_code=2) from None
    name = _name("")
    _do(room, _chosen(room, fingerprints, everything), lambda: put_off(name, seconds), why, run, dry_run, as_json)


def assign(
    fingerprint: Fingerprint,
    to: Annotated[str, typer.Argument(metavar="WHO", help="A name, or a mail address, which is told.")],
    run: RunOption = None,
    why: ReasonOption = "",
    dry_run: DryOption = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Give it to somebody. A mail address hears of it at once, and of all that follows.

    [bold]Examples[/bold]

      tr11 alerts assign 3f2a ana@example.org
    """
    from tr11ops.alerts.changes import assign as give

    if not to.strip():
        raise Refusal("WHO: is empty; give a name or a mail address", exit_code=2)
    room = open_room(run, overrides)
    _do(room, (fingerprint,), lambda: give(to), why, run, dry_run, as_json)


def resolve(
    fingerprints: Fingerprints = None,
    run: RunOption = None,
    everything: AllOption = False,
    why: ReasonOption = "",
    dry_run: DryOption = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Say that it is over. Those who were told hear it; if the next look sees the fault, it is open again.

    [bold]Examples[/bold]

      tr11 alerts resolve 3f2a --reason "false alarm: maintenance"
    """
    from tr11ops.alerts.changes import resolve as close

    if not why.strip():
        raise Refusal("--reason is needed: those who were told of it will ask", exit_code=2)
    room = open_room(run, overrides)
    name = _name("")
    _do(room, _chosen(room, fingerprints, everything), lambda: close(name, why), why, run, dry_run, as_json)


# ----------------------------------------------------------------------------- how
def _name(other: str) -> str:
    from tr11ops.journal import user_name

    mine = user_name()
    return f"{other} (typed by {mine})" if other.strip() and other != mine else mine


def _chosen(room: Room, fingerprints: Sequence[str] | None, everything: bool) -> tuple[str, ...]:
    from tr11ops.alerts.reading import open_alerts
    from tr11ops.snapshot import Unknown

    if bool(fingerprints) == everything:
        raise Refusal("FP...: name alerts, or give --all, not both; see: tr11 alerts list", exit_code=2)
    if not everything:
        return tuple(fingerprints or ())
    found = open_alerts(room.directory)
    if isinstance(found, Unknown):
        raise Refusal(f"the alerts cannot be read: {found.why}", exit_code=3)
    return tuple(alert.fingerprint for alert in found)


def _do(
    room: Room,
    typed: Sequence[str],
    make: Callable[[], tuple[Change, str]],
    why: str,
    run: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    from tr11ops.alerts.changes import NoSuchAlert, resolve_prefix
    from tr11ops.alerts.people import PersonalChange, change_alerts
    from tr11ops.alerts.store import read_book
    from tr11ops.journal import user_name

    change, kind = make()
    try:
        if dry_run:
            book = read_book(room.directory).book
            alerts = tuple(dict.fromkeys(resolve_prefix(book, name) for name in typed))
            notes: tuple[str, ...] = ("nothing was changed (--dry-run)",)
        else:
            wanted = [PersonalChange(name, change, kind, user_name(), why) for name in typed]
            alerts, notes = change_alerts(room.directory, room.card, wanted, time.time(), named_card(run))
    except NoSuchAlert as error:
        raise Refusal(f"FP: {error}; nothing was changed", exit_code=2) from None
    except ValueError as error:
        raise Refusal(f"the alerts cannot be read: {error}", exit_code=3) from None
    _report(alerts, kind, notes, dry_run, as_json)


def _report(alerts: Sequence[Alert], kind: str, notes: Sequence[str], dry_run: bool, as_json: bool) -> None:
    action = kind.removeprefix("alert-")
    if as_json:
        found = [alert_values(alert) for alert in alerts]
        print(json.dumps({"schema": SCHEMA, "action": f"would-be-{action}" if dry_run else action, "alerts": found}))
    else:
        for alert in alerts:
            say(f"{'would be ' if dry_run else ''}{action}: {alert.fingerprint} {plain_text(alert.title)}")
        if not alerts:
            say("no alert is open")
    for line in notes:
        say(f"tr11: {plain_text(line)}" if not dry_run else line)
