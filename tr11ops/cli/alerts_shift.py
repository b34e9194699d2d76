"""`tr11 alerts rota`, `take-shift`, `end-shift`: who is on call, and what a person does about that; and
what the other commands about alerts share.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer
from msgspec.structs import replace

from tr11ops.alerts.changes import LONGEST_WHO, change_shift, seconds_of
from tr11ops.alerts.incidents import SHIFT_ENDED, SHIFT_TAKEN
from tr11ops.alerts.mail_route import mailed
from tr11ops.alerts.mail_text.shared import clean, moment as said
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.state import OnCall
from tr11ops.alerts.store import current_alert_state
from tr11ops.base.errors import Refusal
from tr11ops.base.observed import Unknown, observed
from tr11ops.cli.common import in_time, named_card, plain_text, show, table
from tr11ops.cli.runner import DRY_RUN, JSON, REASON, Change, Outcome, RunContext, carry_out
from trainer.contract.documents import document

SCHEMA = 1
WhoOption = Annotated[
    str,
    typer.Option(
        "--as", metavar="NAME", help="For someone else; who typed it is recorded too. Default: you."
    ),
]


def sender_of(context: RunContext) -> Sender:
    """What tells people of the run that a command line means."""
    return Sender.of(context.directory, context.card, time.time(), named_card(context.run))


def seconds_of_option(length: str) -> float:
    """The seconds of --for. Raises Refusal."""
    try:
        return seconds_of(length)
    except ValueError as error:
        raise Refusal(f"--for {error}", exit_code=2) from None


def take_shift(
    context: Annotated[RunContext, JSON, DRY_RUN, REASON],
    who: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="ADDRESS",
            help="The mail address, or what stands before its @ in the card. Default: your user name.",
        ),
    ] = "",
    length: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TIME",
            help="How long, also past a change of the rota: 30m, 8h, 2d.",
        ),
    ] = None,
) -> Outcome:
    """Be on call for this run in place of the rota: messages and reminders go to you first.

    A shift is one run's: take it for each run. It holds until the rota changes, a day at most, or as
    long as --for says; whoever takes it last has it. Those who were on call and those who are now get
    a mail.

    Examples:
      tr11 alerts take-shift --as ana@example.org --reason "ben is ill"
      tr11 alerts take-shift --as ben --for 8h
    """
    context.seen()
    sender = sender_of(context)
    policy, now = sender.policy, sender.now
    name = clean(who, LONGEST_WHO) or context.who
    address = mailed(policy, name)
    if not address:
        raise Refusal(
            f"no mail reaches {name!r}: type `tr11 alerts take-shift --as ADDRESS`; the card has "
            f"{', '.join(policy.everyone)}",
            exit_code=2,
        )
    seconds, long = None, "until the rota changes, a day at most"
    if length is not None:
        seconds, long = seconds_of_option(length), f"for {length}"
    taken = policy.taken_by(address, now, seconds)
    before = policy.on_call(_shift(context), now)
    is_their_turn = bool(policy.rota) and before.taken is None and before.who == (address,)
    if length is None and is_their_turn:
        return _on_call_outcome("none", "nothing to do, on call already", before, sender)
    line = f"{address} takes the shift of {policy.run} from {before.names}, {long}"
    return _shift_changed(context, sender, line, taken)


def end_shift(context: Annotated[RunContext, JSON, DRY_RUN, REASON]) -> Outcome:
    """Give back a shift that was taken, yours or another's: the rota counts again. Both get a mail.

    Examples:
      tr11 alerts end-shift
    """
    context.seen()
    sender = sender_of(context)
    before = sender.policy.on_call(_shift(context), sender.now)
    after = sender.policy.on_call(None, sender.now)
    if before.taken is None:
        return _on_call_outcome("none", "no shift is taken; on call", after, sender)
    line = f"the shift of {before.names} ends; then on call: {after.names}"
    return _shift_changed(context, sender, line, None)


def _shift(context: RunContext) -> OnCall | None:
    """The shift that was taken last. Raises Refusal where that cannot be read."""
    state = in_time(partial(observed, current_alert_state, context.directory))
    if isinstance(state, Unknown):
        raise Refusal(f"who took the shift cannot be read: {state.why}", exit_code=3)
    return state.shift


def _shift_changed(context: RunContext, sender: Sender, line: str, taken: OnCall | None) -> Outcome:
    """Put this shift in place of the one on record, None for the rota, or show that."""

    def apply() -> Outcome:
        on_call, faults = change_shift(sender, taken, context.who, context.reason)
        done = SHIFT_ENDED if taken is None else SHIFT_TAKEN
        outcome = _on_call_outcome(done, "on call", on_call, sender)
        troubles = (f"tr11: {plain_text(fault)}" for fault in faults)
        return replace(outcome, notes=(*outcome.notes, *troubles))

    after = sender.policy.on_call(taken, sender.now)
    preview = _on_call_outcome("would-be-changed", "then on call", after, sender)
    try:
        return carry_out(context, Change((plain_text(line),), "", apply, preview))
    except ValueError as error:
        raise Refusal(f"the alerts cannot be read: {error}", exit_code=3) from None


def _on_call_outcome(action: str, words: str, on_call: OnCall, sender: Sender) -> Outcome:
    """Who is on call, and until when."""
    told = {"schema": SCHEMA, "action": action, "on_call": document(on_call)}
    line = f"{words}: {plain_text(sender.policy.span(on_call))}"
    return Outcome(told, notes=(line,), indent=None)


def rota(
    context: Annotated[RunContext, JSON],
    turns: Annotated[int, typer.Option("--turns", min=1, max=100, help="How many to show.")] = 4,
) -> Outcome:
    """Who is on call now, by the rota or by a shift that was taken, until when, and who follows.

    Examples:
      tr11 alerts rota --turns 8
    """
    context.seen(missing=None)
    sender = sender_of(context)
    policy = sender.policy
    found = list(policy.turns(_shift(context), sender.now, turns))
    values = [{**document(one), "who": one.names, "from": since} for one, since, _ in found]
    recipients = list(policy.recipients)
    value = {"schema": SCHEMA, "turns": values, "recipients": recipients}
    remarks = []
    if not policy.rota:
        told = "no one is told"
        if recipients:
            told = f"all goes to {', '.join(recipients)}"
        remarks = [f"the card has no rota: {'after that ' if found else ''}{told}"]
    made = table("ON CALL", "UNTIL")
    for one, since, until in found:
        words = ""
        if one.taken is not None:
            words = " (now, took the shift)"
        elif since == sender.now:
            words = " (now)"
        made.add_row(plain_text(one.names + words), said(until, policy))
    if not found:
        return Outcome(value, remarks=remarks)
    return Outcome(value, remarks=remarks, screen=partial(show, made))
