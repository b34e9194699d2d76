"""`tr11 alerts`: what is open and who has it; what a person does about an alert, by name and with a
reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from tr11ops.alerts.changes import (
    AlertChange,
    change_alerts,
    is_same_person,
    read_digest,
    resolve_prefix,
    send_digest,
    send_test,
    send_what_waits,
)
from tr11ops.alerts.incidents import ACKNOWLEDGED, ASSIGNED, RESOLVED, SNOOZED
from tr11ops.alerts.mail_route import is_address
from tr11ops.alerts.situation import RunSituation
from tr11ops.alerts.state import Alert, Incident
from tr11ops.alerts.store import current_alert_state, incidents, kept_here, open_alerts
from tr11ops.base.errors import NoSuchAlert, Refusal
from tr11ops.base.observed import Unknown, known, observed
from tr11ops.base.units import counted, duration
from tr11ops.cli.alerts_shift import (
    WhoOption,
    end_shift,
    rota,
    seconds_of_option,
    sender_of,
    take_shift,
)
from tr11ops.cli.common import USUAL, in_time, local_time, named_card, plain_text, say, show, table
from tr11ops.cli.runner import (
    DRY_RUN,
    JSON,
    REASON,
    SCHEDULER,
    UNCHANGED,
    Outcome,
    RunContext,
    carry_out,
    unasked,
)
from tr11ops.cli.status import view_of
from tr11ops.observe.look import facts_of, observe
from tr11ops.observe.operation_files import read_unwritable_directories
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.watchdog.situation import situation_of
from trainer.contract.documents import document

SCHEMA = 1
# of an alert, what is for the messages alone
HIDDEN = frozenset(
    [
        "alarmed",
        "escalated",
        "remind",
        "thread",
        "clear_looks",
        "heard",
        "mails",
        "headline",
        "told_as",
    ]
)


# ----------------------------------------------------------------------------- shown
def kept_elsewhere(directory: RunDirectory) -> str:
    """Where else alerts may be that are not seen here; "" where the run directory takes them, or
    this machine does.
    """
    shut = known(read_unwritable_directories(directory.paths), ())
    if not shut or known(observed(kept_here, directory), None) is not None:
        return ""
    return (
        f"{shut[0].path} cannot be written to ({shut[0].why}): the watchdog keeps what it has opened since on its own "
        "machine; type this on the machine that its mails name"
    )


def rows(
    extra: ExtraObservations, over: Sequence[Incident], now: float
) -> Iterator[tuple[str, ...]]:
    """Cells of the list: what no one was told of yet, open alerts, then incidents that are over, the
    newest first.
    """
    for care in extra.untold:
        yield "", "", "", care.words(extra.on_call, now), care.subject
    for alert in known(extra.alerts, ()):
        yield (
            alert.severity.name,
            alert.fingerprint,
            duration(now - alert.start),
            alert.care.words(extra.on_call, now),
            alert.title,
        )
        for one in alert.consequences:
            yield "", "", "", "", f"from it follows: {one.title}"
    for incident in reversed(over):
        began = incident.lasted_from
        ended = f"over, {duration((incident.lasted_to or began) - began)}"
        since = f"{duration(now - began)} ago"
        yield ended, incident.fingerprint, since, incident.acknowledged_by or "-", incident.title


def alert_values(alert: Alert) -> dict[str, Any]:
    """One alert for --json. Times are seconds since the epoch."""
    shown = {key: value for key, value in document(alert).items() if key not in HIDDEN}
    return {**shown, "incident": alert.incident}


# ----------------------------------------------------------------------------- change
Fingerprints = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FP...",
        help="Fingerprints; the beginning is enough where it is unique. As a mail names it (FP-WHEN): "
        "that incident alone, not a later one.",
    ),
]
Fingerprint = Annotated[
    str, typer.Argument(metavar="FP", help="Fingerprint; the beginning is enough.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Every open alert.")]


def ack(
    context: Annotated[RunContext, JSON, DRY_RUN, REASON],
    fingerprints: Fingerprints = None,
    everything: AllOption = False,
    who: WhoOption = "",
) -> Outcome:
    """Say that someone works on it: no escalation and no repeats for 24 hours, unless it becomes
    worse.

    Examples:
      tr11 alerts ack 3f2a --reason "node is out, relaunching"
      tr11 alerts ack --all
    """
    context.seen()
    change = AlertChange(ACKNOWLEDGED, _name(who, context.who), context.reason)
    return _do(context, _chosen(context, fingerprints, everything), change)


def snooze(
    context: Annotated[RunContext, JSON, DRY_RUN, REASON],
    fingerprints: Fingerprints = None,
    length: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long: 30m, 2h, 1d.")
    ] = "2h",
    everything: AllOption = False,
) -> Outcome:
    """No message about it for so long, unless it becomes worse. Then it is said once again.

    Examples:
      tr11 alerts snooze 3f2a --for 2h --reason "the site repairs the switch"
    """
    context.seen()
    change = AlertChange(SNOOZED, context.who, seconds=seconds_of_option(length))
    return _do(context, _chosen(context, fingerprints, everything), change)


def assign(
    context: Annotated[RunContext, JSON, DRY_RUN, REASON],
    fingerprint: Fingerprint,
    to: Annotated[
        str, typer.Argument(metavar="WHO", help="A name, or a mail address, which is told.")
    ],
) -> Outcome:
    """Give it to someone. A mail address hears of it at once, and of all that follows.

    Examples:
      tr11 alerts assign 3f2a ana@example.org
    """
    if not to.strip():
        raise Refusal("WHO: is empty; give a name or a mail address", exit_code=2)
    context.seen()
    return _do(context, (fingerprint,), AlertChange(ASSIGNED, owner=to))


def resolve(
    context: Annotated[RunContext, JSON, DRY_RUN, REASON],
    fingerprints: Fingerprints = None,
    everything: AllOption = False,
) -> Outcome:
    """Say that it is over. Those who were told hear it; if the next look sees the fault, it is open
    again.

    Examples:
      tr11 alerts resolve 3f2a --reason "false alarm: maintenance"
    """
    if not context.reason.strip():
        raise Refusal("--reason is needed: those who were told of it will ask", exit_code=2)
    context.seen()
    change = AlertChange(RESOLVED, context.who, context.reason)
    return _do(context, _chosen(context, fingerprints, everything), change)


# ----------------------------------------------------------------------------- how
def _name(other: str, mine: str) -> str:
    if other.strip() and other != mine:
        return f"{other} (typed by {mine})"
    return mine


def _chosen(
    context: RunContext, fingerprints: Sequence[str] | None, everything: bool
) -> tuple[str, ...]:
    if bool(fingerprints) == everything:
        raise Refusal(
            "FP...: name alerts, or give --all, not both; see: tr11 alerts list", exit_code=2
        )
    if not everything:
        return tuple(fingerprints or ())
    found = open_alerts(context.directory)
    if isinstance(found, Unknown):
        raise Refusal(f"the alerts cannot be read: {found.why}", exit_code=3)
    return tuple(alert.incident for alert in found)


def _do(context: RunContext, typed: Sequence[str], change: AlertChange) -> Outcome:
    """Change the alerts that were typed, or show which they are."""
    directory, action = context.directory, change.kind.removeprefix("alert-")

    def preview() -> Outcome:
        alert_state = current_alert_state(directory)
        alerts = tuple(dict.fromkeys(resolve_prefix(alert_state, name) for name in typed))
        taken = _taken(alerts, change, "{} has it now: {}")
        return _changed(alerts, f"would-be-{action}", f"would be {action}", *taken, UNCHANGED)

    def apply() -> Outcome:
        sender, before = sender_of(context), current_alert_state(directory)
        alerts, faults = change_alerts(sender, typed, change, who=context.who, why=context.reason)
        notes = [f"tr11: {plain_text(fault)}" for fault in faults]
        policy = sender.policy
        if change.kind == ACKNOWLEDGED and policy.everyone:
            for person in dict.fromkeys(alert.care.person for alert in alerts):
                if not is_address(policy.address_of(person)):
                    notes.append(
                        f"tr11: no mail reaches {plain_text(person)}: --as ADDRESS says whom it reaches"
                    )
        found = (before.find(alert.fingerprint) for alert in alerts)
        held = [alert for alert in found if alert is not None]
        taken = _taken(held, change, "taken over from {}: {}")
        return _changed(alerts, action, action, *taken, *notes)

    try:
        change_of_all = replace(unasked(apply, preview), is_empty=not typed)
        return carry_out(context, change_of_all)
    except NoSuchAlert as error:
        elsewhere = kept_elsewhere(directory)
        more = ""
        if elsewhere:
            more = f"\n{elsewhere}"
        raise Refusal(f"FP: {error}; nothing was changed{more}", exit_code=2) from None
    except ValueError as error:
        raise Refusal(f"the alerts cannot be read: {error}", exit_code=3) from None


def _taken(alerts: Sequence[Alert], change: AlertChange, form: str) -> list[str]:
    """Who loses which alert by a change, a line each."""
    taker = {ACKNOWLEDGED: change.who, ASSIGNED: change.owner}.get(change.kind)
    return [
        f"tr11: {plain_text(form.format(alert.holder, alert.title))}"
        for alert in alerts
        if taker is not None and alert.holder and not is_same_person(taker, alert.holder)
    ]


def _changed(alerts: Sequence[Alert], action: str, done: str, *notes: str) -> Outcome:
    """The answer; for a person all of it is on stderr."""
    document = {
        "schema": SCHEMA,
        "action": action,
        "alerts": [alert_values(alert) for alert in alerts],
    }
    # by the incident's own name: who agrees to a plan does so for these, and for none that follows
    lines = [f"{done}: {alert.incident} {plain_text(alert.title)}" for alert in alerts]
    return Outcome(document, notes=notes, remarks=lines or ["no alert is open"], indent=None)


# ----------------------------------------------------------------------------- the commands
app = typer.Typer(
    name="alerts",
    help="""What is open, and who has it: list, ack, snooze, assign, resolve; who is on call: rota,
    take-shift, end-shift; test, digest.

    Examples:
      tr11 alerts list
      tr11 alerts ack 5f3a
      tr11 alerts test
    """,
    no_args_is_help=True,
)


@app.command("list")
def list_alerts(
    context: Annotated[RunContext, SCHEDULER, JSON],
    everything: Annotated[
        bool, typer.Option("--all", help="Also incidents that are over.")
    ] = False,
) -> Outcome:
    """Open alerts as `tr11 status` sees them now, the most severe first, with who looks after them, and
    what no one was told of yet. In a folder that holds runs, without --run: what `tr11 list` shows of them.

    Examples:
      tr11 alerts list
      tr11 alerts list --all --json
    """
    if not context.has_card:
        from tr11ops.cli.list_runs import runs_here

        all_runs = runs_here(context, "alerts list")
        if all_runs is not None:
            return all_runs
    context.seen()
    look = in_time(lambda: view_of(context).look().seen)
    extra = look.extra
    if isinstance(extra.alerts, Unknown):
        raise Refusal(f"the alerts cannot be read: {extra.alerts.why}", exit_code=3)
    past: Sequence[Incident] = ()
    if everything:
        past = known(incidents(context.directory), ())
    over = tuple(incident for incident in past if incident.resolved is not None)
    left = known(extra.waiting, None)
    values = {
        "schema": SCHEMA,
        "alerts": [alert_values(alert) for alert in extra.alerts],
        "untold": look.document()["untold"],
        "over": [document(incident) for incident in over],
        "waiting": left and {"count": left.count, "since": left.since},
    }
    return Outcome(values, screen=partial(_show, context.directory, extra, over))


def _show(directory: RunDirectory, extra: ExtraObservations, over: Sequence[Incident]) -> None:
    """The table, and what else a person has to know of the alerts."""
    made = table("SEVERITY", "ALERT", "SINCE", "WHO", "WHAT")
    now = time.time()
    on_call = extra.on_call
    left = extra.waiting
    for row in rows(extra, over, now):
        made.add_row(*map(plain_text, row))
    made.columns[3].no_wrap = False  # who looks after it may be several people
    if made.row_count:
        show(made, USUAL)
    if isinstance(left, Unknown):
        say(f"tr11: the messages still to be sent are unknown: {left.why}")
    elif left and left.since is not None:
        what = counted(left.count, "message waits", "messages wait")
        trouble = ""
        if left.trouble:
            trouble = f" ({plain_text(left.trouble)})"
        say(f"{what} to be sent since {local_time(left.since)}{trouble}")
    if not (extra.alerts or extra.untold):
        say("no alert is open")
    if on_call and on_call.who:
        say(f"on call: {on_call.words(now)}")
    elsewhere = in_time(partial(kept_elsewhere, directory))
    if elsewhere:
        say(f"tr11: {elsewhere}")


app.command()(ack)
app.command()(snooze)
app.command()(assign)
app.command()(resolve)
app.command("take-shift")(take_shift)
app.command("end-shift")(end_shift)
app.command()(rota)


@app.command()
def test(
    context: Annotated[RunContext, JSON],
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--address",
            "--to",
            metavar="ADDRESS",
            help="Mail to this address alone; may be repeated.",
        ),
    ] = None,
) -> Outcome:
    """Send a real test message to everyone whom the card names, and say of each whether a server
    took it. What waits to be sent on a route that takes the test goes out with it.

    Exit code 1 when one was not taken.

    Examples:
      tr11 alerts test
      tr11 alerts test --address ana@example.org
    """
    context.seen(missing=None)
    results = send_test(sender_of(context), tuple(to or ()))
    if not results:
        raise Refusal(
            "no one would be told: set alerts.recipients, alerts.rota or alerts.urls_file in the card"
        )
    values = [
        {"route": route, "to": who, "taken": not trouble, "trouble": trouble}
        for route, who, trouble in results
    ]
    made = table("ROUTE", "TO", "RESULT")
    for route, who, trouble in results:
        made.add_row(*map(plain_text, (route, who, trouble or "taken")))
    taken = frozenset(route for route, _, trouble in results if not trouble)
    sent, troubles = send_what_waits(sender_of(context), taken)
    notes = list(troubles)
    if sent:
        waited = counted(sent, "message that had waited was", "messages that had waited were")
        notes.insert(0, f"{waited} sent as well")
    routes = {route for route, _, trouble in results if trouble}
    if "mail" in routes:
        notes.append(
            "mail goes to alerts.smtp_host and alerts.smtp_port of the card: name a server that takes mail from here"
        )
    if routes - {"mail"}:
        notes.append("delivery URLs are the lines of alerts.urls_file")
    return Outcome(
        {"schema": SCHEMA, "results": values},
        notes=notes,
        exit_code=1 if routes else 0,
        screen=partial(show, made),
    )


@app.command()
def digest(
    context: Annotated[RunContext, JSON],
    send: Annotated[
        bool, typer.Option("--send", help="Send it, unless today's was sent already.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="With --send: whatever was sent already.")
    ] = False,
) -> Outcome:
    """Show the daily summary, or send it. The watchdog sends it by itself, once a day, at
    alerts.digest_time.

    Examples:
      tr11 alerts digest
      tr11 alerts digest --send
    """
    context.seen()
    if again and not send:
        raise Refusal("--again goes with --send", exit_code=2)
    sender = sender_of(context)
    unasked = Unknown("the scheduler was not asked")

    def look() -> RunSituation:
        facts = facts_of(context.card, named_card(context.run))
        snapshot = observe(context.directory, facts, unasked, sender.now)
        return situation_of(context.directory, context.card, snapshot)

    situation = in_time(look)
    try:
        if not send:
            subject, lines = read_digest(sender, situation)
            value = {"schema": SCHEMA, "subject": subject, "lines": list(lines)}
            return Outcome(value, map(plain_text, (subject, "", *lines)))
        message, notes = send_digest(sender, situation, again)
    except ValueError as error:
        raise Refusal(f"the alerts cannot be read: {error}", exit_code=3) from None
    sent = None
    if not sender.policy.is_reachable:
        text = "no one is told: set alerts.recipients, alerts.rota or alerts.urls_file in the card"
    elif message is None:
        why = "today's was sent, the first one's time is still to come, or the card wants none"
        text = f"no digest is due: {why} (--again sends one)"
    else:
        sent = {"subject": message.subject, "to": list(message.to)}
        fate = "sent"
        if notes:
            fate = "queued, and sent later"
        text = f"{message.subject}: {fate} to {', '.join(message.to) or 'the URLs'}"
    return Outcome(
        {"schema": SCHEMA, "sent": sent, "notes": list(notes)},
        notes=[f"tr11: {plain_text(line)}" for line in notes],
        remarks=(text,),
    )
