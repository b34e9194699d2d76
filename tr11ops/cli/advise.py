"""`tr11 advise`: the save interval, spares, array length and margin that the run's own past calls
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base.errors import Refusal
from tr11ops.base.invocation import for_this_card
from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted
from tr11ops.cli.context import JSON, SCHEDULER, RunContext
from tr11ops.cli.goodput import LookBack, look_back, terminal_width
from tr11ops.cli.terminal import draws_unicode
from tr11ops.goodput.advise import CardSettings, is_worth_it
from tr11ops.goodput.advise import advise as conclude
from tr11ops.goodput.screen import Paper
from tr11ops.launch.margins import room_before_limit
from tr11ops.observe.course import course_of, steps_left
from tr11ops.runcard.exit_duration import exit_plan
from trainer.contract.documents import document

if TYPE_CHECKING:
    from tr11ops.goodput.account import Goodput
    from tr11ops.goodput.advise import Advice

SCHEMA = 1
LABEL = 15


def advise(
    context: Annotated[RunContext, SCHEDULER, JSON],
    mtbf: Annotated[
        float | None,
        typer.Option(
            "--mtbf", metavar="HOURS", help="Mean time between faults of the run to plan with."
        ),
    ] = None,
) -> None:
    """What the run's own past calls for, and the node-hours that it would have saved.

    Save interval (Young and Daly, from measured saves and faults), spares, tasks to the end, margin
    before the time limit. Below 24 hours with nodes and five faults only the margin is judged. With
    fewer than five faults BLOOM's 64,500 GPU-hours per failure are taken, unless the run's own few
    rule them out, or what --mtbf says. Nothing is changed: what stands behind "type" goes with
    `tr11 launch`, or into the card.

    Examples:
      tr11 advise
      tr11 advise --mtbf 168
      tr11 advise --json | jq '.advice[] | {topic, change, saved_node_hours}'
    """
    if mtbf is not None and not 0 < mtbf <= 1e7:
        raise Refusal(f"--mtbf {mtbf:g}: must be above 0 hours", exit_code=2)

    look = look_back(context)
    if isinstance(look.history.attempts, Unknown):
        raise Refusal(f"the run's past could not be read: {look.history.attempts.why}", exit_code=3)
    found = conclude(look.history, look.goodput, situation_of(look, mtbf))
    context.emit(_document(look, found), _lines(look, found))


def situation_of(look: LookBack, mtbf_hours: float | None) -> CardSettings:
    """What the card says today, and how much of the training remains."""
    card = exit_plan(look.card).applied(look.card)
    room = room_before_limit(card)
    minutes = card.run.exit_duration_minutes
    done = max((step.iteration for step in known(look.history.steps, ())[-1000:]), default=0)
    return CardSettings(
        nodes=card.slurm.nodes,
        spares=card.slurm.spare_nodes,
        gpus_per_node=card.slurm.gpus_per_node or card.slurm.workers,
        task_seconds=60.0 * minutes if minutes is not None else float(card.time_limit_seconds),
        time_limit=float(card.time_limit_seconds),
        save_every=card.checkpoint.interval,
        room=room.sure if room is not None else None,
        evaluates=card.evaluation.iterations > 0,
        remaining=max(0, card.total_iterations - done),
        recent_steps_left=steps_left(course_of(card), done, max(done, card.total_iterations)),
        given_mtbf=None if mtbf_hours is None else 3600.0 * mtbf_hours,
    )


def _lines(look: LookBack, found: tuple[Advice, ...]) -> Iterator[str]:
    paper = Paper(terminal_width(), draws_unicode())
    yield paper.fit(f"{look.history.name} / {look.history.variant}   {_past(look.goodput)}")
    for advice in found:
        yield ""
        worth = bool(advice.change) and is_worth_it(advice, look.goodput)
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
        is_other = advice.saved_node_hours is not None and advice.now != advice.better
        for reason in (*advice.why, *((_saved(advice, look.goodput),) if is_other else ())):
            for line in wrap(reason, paper.width - LABEL, subsequent_indent="  "):
                yield paper.fit(f"{'':{LABEL}}{line}")
        if worth:
            yield paper.fit(f"{'  type':{LABEL}}{for_this_card(advice.option)}")


def _past(goodput: Goodput) -> str:
    count = len(goodput.faults)
    hours = goodput.total.held_hours
    return f"{hours:,.1f} node-hours, {counted(count, 'fault')}"


def _saved(advice: Advice, goodput: Goodput) -> str:
    saved = advice.saved_node_hours or 0.0
    share = 0.0
    if goodput.total.node_hours:
        share = 100 * saved / goodput.total.node_hours
    if saved <= 0:
        return f"{advice.better} would have saved nothing over this past"
    return (
        f"{advice.better} would have saved {saved:,.2f} node-hours over this past ({share:.1f} %)"
    )


def _document(look: LookBack, found: tuple[Advice, ...]) -> dict[str, Any]:
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
                "worth_it": is_worth_it(advice, look.goodput),
            }
            for advice in found
        ],
        "unknown": list(look.goodput.read_errors),
    }
