"""`tr11 goodput`: where every node-second of a run went; `tr11 advise`: the settings to use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError, Unobserved, WrongUsage
from tr11ops.base.invocation import for_this_card
from tr11ops.base.observed import Observed, Unknown, cause, known, observed
from tr11ops.base.units import counted, since as since_when
from tr11ops.cli import completion
from tr11ops.cli.common import SinceOption, directory_of, draws_unicode, in_time_for_all
from tr11ops.cli.progress import node_progress
from tr11ops.cli.runner import JSON, SCHEDULER, Outcome, RunContext
from tr11ops.cluster.base import Job
from tr11ops.goodput.account import Goodput, account
from tr11ops.goodput.advise import Advice, CardSettings, advise as conclude, measure
from tr11ops.goodput.history import read_history
from tr11ops.goodput.history_values import History
from tr11ops.goodput.screen import Paper, document as goodput_document, screen
from tr11ops.launch.margins import read_history as read_speed, room_before_limit
from tr11ops.observe.operation_files import read_save_room
from tr11ops.observe.readers import kind_to_watch, open_scheduler
from tr11ops.observe.snapshot import course_of, steps_left
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.runcard.exit_duration import exit_plan
from tr11ops.runcard.save_interval import adapts, checkpoint_size, gpus_of_node
from tr11ops.runcard.speed import RunHistory
from trainer.contract.documents import document
from trainer.contract.errors import UNOBSERVED
from trainer.contract.record import JsonObject, Record

if TYPE_CHECKING:
    from tr11ops.replay.advice import ReplayCheck

BY = ("attempt", "cause", "day", "week")
NARROWEST, WIDEST = 60, 132


def goodput(
    context: Annotated[RunContext, SCHEDULER, JSON],
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="|".join(BY),
            help="A table beside the sums: what went where.",
            autocompletion=completion.words(*BY),
        ),
    ] = None,
    since: SinceOption = None,
    price: Annotated[
        float | None,
        typer.Option("--price", metavar="PER_NODE_HOUR", help="Show what it cost, too."),
    ] = None,
) -> Outcome:
    """Where every node-second went: useful, redone, saves, start-up, queue, ...; sums are exact.

    A node-second counts from the first submission on, in exactly one line. While nothing is held,
    as many nodes count as were asked for, in queue, operator pause or restart gap. Exit code 3: the
    run's past could not be read.

    Examples:
      tr11 goodput
      tr11 goodput --by cause --since 7d
      tr11 goodput --price 12.50 --json | jq .buckets.redone
    """
    if by is not None and by not in BY:
        raise WrongUsage(f"--by {by!r}: must be one of {', '.join(BY)}")
    if price is not None and not 0 <= price < 1e9:
        raise WrongUsage(f"--price {price:g}: must be 0 or more, in any currency")
    begin = None
    if since is not None:
        begin = moment_of(since, time.time())
    look = look_back(context)
    shown = look.goodput
    if begin is not None:
        shown = shown.since(begin)
    paper = Paper(terminal_width(), draws_unicode(), None, price)
    outcome = Outcome(
        goodput_document(shown, look.history, None, price), screen(shown, look.history, by, paper)
    )
    if not isinstance(look.history.attempts, Unknown):
        return outcome
    why = f"the run's past could not be read: {look.history.attempts.why}"
    return replace(outcome, fault=why, exit_code=UNOBSERVED)


class LookBack(Record):
    """A run's past, and the account of it until now."""

    card: RunCard
    history: History
    goodput: Goodput


def look_back(context: RunContext) -> LookBack:
    """Read a run's past, with one call to the scheduler. Raises CardError, or Refusal where nothing
    was launched.
    """
    card, directory = context.seen(missing=3)

    def look() -> LookBack:
        now, (jobs, scheduler) = time.time(), _jobs(card, context.scheduler)
        history = read_history(directory, jobs, scheduler=scheduler)
        return LookBack(card, history, account(history, now))

    return in_time_for_all(look)


def _jobs(card: RunCard, kind: str) -> tuple[Observed[tuple[Job, ...]], str]:
    """This run's jobs, or why they are unknown, and their scheduler's name: what ran long ago is in
    the files alone.
    """
    try:
        edge = open_scheduler(kind_to_watch(directory_of(card), kind))
        return edge.jobs(name=card.run.name), edge.name
    except (SchedulerError, OSError) as error:
        return Unknown(cause(error)), ""


def moment_of(text: str, now: float) -> float:
    """The point of time that a person means. Raises Refusal for what is none."""
    try:
        return since_when(text, now)
    except ValueError as error:
        raise WrongUsage(f"--since {text!r}: {error}") from None


def terminal_width() -> int:
    """Characters in a line: the terminal's, within reason; 80 where there is none."""
    return min(WIDEST, max(NARROWEST, get_terminal_size((80, 24)).columns))


# ----------------------------------------------------------------------------- advise
SCHEMA = 1
LABEL = 15
# keys of [resilience] that decide in a replay
DECISIVE = (
    "launches_per_attempt",
    "launches_without_progress",
    "most_tasks_per_fault",
    "exclusion_cap_percent",
)


def advise(
    context: Annotated[RunContext, SCHEDULER, JSON],
    mtbf: Annotated[
        float | None,
        typer.Option(
            "--mtbf", metavar="HOURS", help="Let its faults come this often, in the mean."
        ),
    ] = None,
) -> Outcome:
    """What other settings would have given the run over its own past.

    Its faults are replayed (`tr11 replay`) with other save intervals, spares and days of exclusion;
    first with today's, which must come within 3 points of what happened. Five faults are needed;
    with --mtbf, one. A change is proposed where it saves node-hours for the same training, resampled
    faults included. Also: tasks to the end (after 24 hours with nodes, or five faults), margin before
    the time limit. Nothing is changed: what stands behind "type" goes with `tr11 launch`, or into the
    card. With four months it takes a minute.

    Examples:
      tr11 advise
      tr11 advise --mtbf 168
      tr11 advise --json | jq '.advice[] | {topic, change, saved_node_hours}'
    """
    if mtbf is not None and not 0 < mtbf <= 1e7:
        raise WrongUsage(f"--mtbf {mtbf:g}: must be above 0 hours")

    look = look_back(context)
    if isinstance(look.history.attempts, Unknown):
        raise Unobserved(f"the run's past could not be read: {look.history.attempts.why}")
    from tr11ops.replay.advice import MOST_REPLAYS, replay_advice
    from tr11ops.replay.own_record import recorded_run

    situation = situation_of(look, mtbf)
    costs = measure(look.history, look.goodput)
    record = recorded_run(look.history, look.goodput, situation, costs)
    with node_progress("replays", MOST_REPLAYS) as done:
        check, replayed = replay_advice(record, situation, done)
    found = (*replayed, *conclude(costs, look.goodput, situation))
    return Outcome(_document(look, found, check), _lines(look, found, check))


def situation_of(look: LookBack, mtbf_hours: float | None) -> CardSettings:
    """What the card says today, and how much of the training remains."""
    card = exit_plan(look.card).applied(look.card)
    room = room_before_limit(card)
    minutes = card.run.exit_duration_minutes
    done = max((step.iteration for step in known(look.history.steps, ())[-1000:]), default=0)
    last = card.total_iterations
    if last is not None:
        last = max(done, last)
    settings = CardSettings(
        nodes=card.slurm.nodes,
        spares=card.slurm.spare_nodes,
        task_seconds=60.0 * minutes if minutes is not None else float(card.time_limit_seconds),
        time_limit=float(card.time_limit_seconds),
        save_every=card.saves_every.steps,
        room=None if room is None else room[0],
        evaluates=isinstance(card, OwnCard) and card.evaluation.iterations > 0,
        remaining=None if last is None else last - done,
        recent_steps_left=None if last is None else steps_left(course_of(card), done, last),
        given_mtbf=None if mtbf_hours is None else 3600.0 * mtbf_hours,
        exclusion_days=card.resilience.exclusion_days,
        least_spares=card.slurm.least_spare_nodes,
        resilience=tuple(_resilience(card)),
    )
    return adapting(settings, card)


def adapting(settings: CardSettings, card: RunCard) -> CardSettings:
    """The same with what launches choose their save interval by, where the card has them do so. They
    keep the card's own where the free room is not known, and so does a replay.
    """
    room = known(read_save_room(card.paths), None)
    if not adapts(card) or room is None:
        return settings
    gpus = gpus_of_node(card)
    chosen_by = (
        f"slurm.gpus_per_node={gpus}",
        f"slurm.workers_per_node={min(gpus, 8)}",
        "parallel.tensor=1",
        f"backup.interval_hours={card.backup.interval_hours}",
    )
    return replace(
        settings,
        resilience=(*settings.resilience, *chosen_by),
        adapts=True,
        written=known(observed(read_speed, card.paths), RunHistory()).usual_save,
        free_checkpoints=room.free_bytes / checkpoint_size(card),
    )


def _resilience(card: RunCard) -> Iterator[str]:
    """What the card says otherwise than by default of what follows a fault, as `--set` takes it."""
    for name in DECISIVE:
        value = getattr(card.resilience, name)
        if value is not None:
            yield f"resilience.{name}={value}"


def _lines(look: LookBack, found: tuple[Advice, ...], check: ReplayCheck | None) -> Iterator[str]:
    paper = Paper(terminal_width(), draws_unicode())
    yield paper.fit(f"{look.history.name} / {look.history.variant}   {_past(look.goodput)}")
    if check is not None:
        for line in wrap(f"replayed: {check}", paper.width, subsequent_indent="  "):
            yield paper.fit(line)
    for advice in found:
        yield ""
        worth = bool(advice.change)
        if advice.now:
            arrow = f"{advice.now} -> {advice.better}"
        else:
            arrow = advice.better
        kept = advice.better if advice.better == "cannot tell" else "leave it"
        if worth:
            head = arrow
        elif advice.now:
            head = f"{advice.now}: {kept}"
        else:
            head = advice.better
        yield paper.fit(f"{advice.topic:{LABEL}}{head}")
        for reason in advice.why:
            for line in wrap(reason, paper.width - LABEL, subsequent_indent="  "):
                yield paper.fit(f"{'':{LABEL}}{line}")
        if worth:
            yield paper.fit(f"{'  type':{LABEL}}{for_this_card(advice.option)}")


def _past(goodput: Goodput) -> str:
    count = len(goodput.faults)
    hours = goodput.total.held_hours
    return f"{hours:,.1f} node-hours, {counted(count, 'fault')}"


def _document(look: LookBack, found: tuple[Advice, ...], check: ReplayCheck | None) -> JsonObject:
    return {
        "schema": SCHEMA,
        "run": look.history.name,
        "variant": look.history.variant,
        "node_hours": look.goodput.total.node_hours,
        "faults": len(look.goodput.faults),
        "advice": [
            {
                **document(advice),
                "option": advice.option or None,
                "worth_it": bool(advice.change),
            }
            for advice in found
        ],
        "replay": None if check is None else {**document(check), "difference": check.difference},
        "unknown": list(look.goodput.read_errors),
    }
