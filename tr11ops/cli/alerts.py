"""`tr11 alerts`: what is open and who has it; who is on duty; does a message arrive."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from tr11ops.cli.alerts_change import ack, assign, resolve, snooze
from tr11ops.cli.alerts_view import SCHEMA, alert_values, open_room, rows
from tr11ops.cli.common import JsonOption, Refusal, RunOption, SetOption, named_card, say
from tr11ops.cli.nodes_view import moment, plain_text, show, table

app = typer.Typer(
    name="alerts",
    help="What is open, and who has it: list, ack, snooze, assign, resolve; test, digest, rota.",
    no_args_is_help=True,
)


@app.command("list")
def list_alerts(
    run: RunOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Also incidents that are over.")] = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Open alerts, the most severe first, with who looks after them. Asks no scheduler.

    [bold]Examples[/bold]

      tr11 alerts list

      tr11 alerts list --all --json
    """
    from tr11ops.alerts.reading import incidents, open_alerts, waiting
    from tr11ops.snapshot import Unknown

    room = open_room(run, overrides)
    now = time.time()
    found = open_alerts(room.directory)
    past = incidents(room.directory) if everything else ()
    left = waiting(room.directory)
    if isinstance(found, Unknown):
        raise Refusal(f"the alerts cannot be read: {found.why}", exit_code=3)
    if isinstance(past, Unknown):
        raise Refusal(f"the alerts cannot be read: {past.why}", exit_code=3)
    over = tuple(incident for incident in past if incident.resolved is not None)
    if as_json:
        queue = None if isinstance(left, Unknown) else {"count": left.count, "since": left.since}
        ended = [{**asdict(incident), "severity": incident.severity.name} for incident in over]
        values = {"schema": SCHEMA, "alerts": [alert_values(alert) for alert in found], "over": ended}
        print(json.dumps({**values, "waiting": queue}, indent=1))
        return
    made = table("SEVERITY", "ALERT", "SINCE", "WHO", "WHAT")
    for row in rows(found, over, now):
        made.add_row(*map(plain_text, row))
    if found or over:
        show(made)
    if isinstance(left, Unknown):
        say(f"tr11: what waits to be sent is unknown: {left.why}")
    elif left.count and left.since is not None:
        what = "1 message waits" if left.count == 1 else f"{left.count} messages wait"
        trouble = f" ({plain_text(left.trouble)})" if left.trouble else ""
        say(f"{what} to be sent since {moment(left.since)}{trouble}")
    if not found:
        say("no alert is open")


app.command()(ack)
app.command()(snooze)
app.command()(assign)
app.command()(resolve)


@app.command()
def test(
    run: RunOption = None,
    to: Annotated[
        list[str] | None, typer.Option("--to", metavar="ADDRESS", help="Mail to this address alone; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Send a real test message to everybody whom the card names, and say of each whether a server took it.

    Exit code 1 when one was not taken.

    [bold]Examples[/bold]

      tr11 alerts test

      tr11 alerts test --to ana@example.org
    """
    from tr11ops.alerts.people import send_test

    room = open_room(run, overrides, must_exist=False)
    results = send_test(room.directory, room.card, tuple(to or ()), time.time(), named_card(run))
    if not results:
        raise Refusal("nobody would be told: set alerts.recipients, alerts.rota or alerts.urls_file in the card")
    if as_json:
        values = [
            {"route": route, "to": who, "taken": not trouble, "trouble": trouble} for route, who, trouble in results
        ]
        print(json.dumps({"schema": SCHEMA, "results": values}, indent=1))
    else:
        made = table("ROUTE", "TO", "RESULT")
        for route, who, trouble in results:
            made.add_row(*map(plain_text, (route, who, trouble or "taken")))
        show(made)
    raise typer.Exit(1 if any(trouble for _, _, trouble in results) else 0)


@app.command()
def digest(
    run: RunOption = None,
    send: Annotated[bool, typer.Option("--send", help="Send it, unless today's was sent already.")] = False,
    again: Annotated[bool, typer.Option("--again", help="With --send: whatever was sent already.")] = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Show the daily summary, or send it. The watchdog sends it by itself, once a day, at alerts.digest_time.

    [bold]Examples[/bold]

      tr11 alerts digest

      tr11 alerts digest --send
    """
    from tr11ops.alerts.people import read_digest, send_digest
    from tr11ops.alerts.sending import policy_for
    from tr11ops.observe import facts_of, observe
    from tr11ops.report.situation import situation_of
    from tr11ops.snapshot import Unknown

    room = open_room(run, overrides)
    if again and not send:
        raise Refusal("--again goes with --send", exit_code=2)
    now = time.time()
    unasked = Unknown("the scheduler was not asked")
    snapshot = observe(room.directory, facts_of(room.card, named_card(run)), unasked, now)
    situation = situation_of(room.directory, room.card, snapshot)
    try:
        if not send:
            _show_digest(*read_digest(room.directory, room.card, now, named_card(run), situation), as_json)
            return
        message, notes = send_digest(room.directory, room.card, now, again, named_card(run), situation)
    except ValueError as error:
        raise Refusal(f"the alerts cannot be read: {error}", exit_code=3) from None
    for line in notes:
        say(f"tr11: {plain_text(line)}")
    reachable = policy_for(room.directory, room.card).is_reachable
    if as_json:
        sent = None if message is None or not reachable else {"subject": message.subject, "to": list(message.to)}
        print(json.dumps({"schema": SCHEMA, "sent": sent, "notes": list(notes)}, indent=1))
    elif not reachable:
        say("nobody is told: set alerts.recipients, alerts.rota or alerts.urls_file in the card")
    elif message is None:
        say("no digest is due: today's was sent, or the card wants none (--again sends one)")
    else:
        fate = "queued, and sent later" if notes else "sent"
        say(f"{message.subject}: {fate} to {', '.join(message.to) or 'the URLs'}")


def _show_digest(subject: str, lines: Sequence[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"schema": SCHEMA, "subject": subject, "lines": list(lines)}, indent=1))
    else:
        print("\n".join(map(plain_text, (subject, "", *lines))))


@app.command()
def rota(
    run: RunOption = None,
    turns: Annotated[int, typer.Option("--turns", min=1, max=100, help="How many to show.")] = 4,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Who is on duty now, and who follows.

    [bold]Examples[/bold]

      tr11 alerts rota --turns 8
    """
    from tr11ops.alerts.sending import policy_for
    from tr11ops.alerts.wording import moment as said

    room = open_room(run, overrides, must_exist=False)
    policy = policy_for(room.directory, room.card, named_card(run))
    found, begin = [], time.time()
    for _ in range(turns if policy.rota else 0):
        end = policy.turn_ends(begin)
        found.append((policy.on_duty(begin)[0], begin, end))
        begin = end
    if as_json:
        values = [{"who": who, "from": since, "until": until} for who, since, until in found]
        recipients = list(policy.recipients)
        print(json.dumps({"schema": SCHEMA, "turns": values, "recipients": recipients}, indent=1))
        return
    if not found:
        say(
            "the card has no rota: "
            + (f"all goes to {', '.join(policy.recipients)}" if policy.recipients else "nobody is told")
        )
        return
    made = table("ON DUTY", "UNTIL")
    for place, (who, _, until) in enumerate(found):
        made.add_row(plain_text(who + (" (now)" if place == 0 else "")), said(until, policy))
    show(made)
