"""`tr11 rollback`: the next launch resumes from an older checkpoint, and skips data if asked;
and its undo.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tr11ops.base.errors import NotPossible, Refusal, TrainerAlive, Unobserved, WrongUsage
from tr11ops.base.observed import known
from tr11ops.base.units import counted
from tr11ops.checkpoints.catalogue import Catalogue
from tr11ops.checkpoints.rollback import (
    RollbackPlan,
    Skip,
    SkipFrom,
    carry_out as move_checkpoints,
    claimed,
    finish_pending,
    look_for_trainer,
    needs_reading,
    not_finite_left,
    plan_rollback,
    plan_undo,
)
from tr11ops.cli import completion
from tr11ops.cli.checkpoints import read_them
from tr11ops.cli.checkpoints_keep import open_catalogue
from tr11ops.cli.common import say
from tr11ops.cli.runner import (
    DRY_RUN,
    JSON,
    REASON,
    SCHEDULER,
    YES,
    Change,
    Outcome,
    RunContext,
    carry_out,
)
from tr11ops.cli.stopping import StopContext, run_to_stop
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.observe.files import read_steps
from tr11ops.queue.stop import StopView
from tr11ops.runcard.card import own_card
from tr11ops.rundir.claims import ClaimTaken
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.errors import RangeError
from trainer.contract.record import IterationRange
from trainer.contract.recovery import RecoveryRecord, read_recovery
from trainer.schedule.path import parse_range

SCHEMA = 1
FILES_AT_ONCE = 8


def rollback(
    context: Annotated[RunContext, SCHEDULER, JSON, YES, DRY_RUN, REASON],
    step: Annotated[
        int | None,
        typer.Argument(
            metavar="[STEP]",
            min=0,
            help="The checkpoint to go back to.",
            autocompletion=completion.steps,
        ),
    ] = None,
    *,
    skip: Annotated[
        str | None,
        typer.Option(
            "--skip",
            metavar="N|FIRST-LAST|FIRST-",
            help="Skip N iterations after STEP; these; or all from FIRST to the last one trained.",
        ),
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Put back what the last roll-back changed.")
    ] = False,
) -> Change | Outcome:
    """Go back to an older checkpoint: newer ones are set aside, and the next launch resumes from
    STEP.

    Nothing is removed: newer checkpoints become global_stepN.discarded. Every byte of STEP is read
    first, if no one did before. With --skip, the data of those iterations is skipped, whatever
    card is launched. One that was cut off is finished by the next launch, or by `tr11 rollback`
    without a STEP.

    Examples:
      tr11 rollback 31200 --dry-run
      tr11 rollback 31200 --skip 31216-31227 --reason "the April spike"
      tr11 rollback 31200 --skip 31216- --reason "the loss is NaN since then"
      tr11 rollback --undo
    """
    if step is not None and undo:
        raise WrongUsage("give a STEP, or --undo, not both")
    if skip is not None and step is None:
        raise WrongUsage("--skip needs a STEP: tr11 rollback STEP --skip N")
    wanted = None
    if skip is not None:
        wanted = _parse_skip(skip)
    run = run_to_stop(context)
    view = run.look()
    record = _read_record(run)
    if step is None and not undo and record.pending is None:
        raise WrongUsage("go back to which step? Give one (tr11 checkpoints list), or --undo")
    if record.pending is not None:
        _refuse_a_living_trainer(run, view)
        finished = carry_out(context, _end_of(run, view, record, context))
        if step is None and not undo:
            return finished
        record = _read_record(run)
    plan = _plan(
        run, view, record=record, step=step, skip=wanted, catalogue=open_catalogue(run.card)
    )
    # after the plan: no training is to be stopped for what cannot be done
    _refuse_a_living_trainer(run, view)
    wider = _wider_skip(run, plan)
    lines = [*_lines(plan), *_queue_lines(view, plan)]
    if wider is not None:
        lines.append(_not_finite_line(plan, wider))
    is_back = plan.action == "roll-back"

    def apply() -> Outcome:
        if is_back:
            _verify(run, plan.to_step)
        _apply(run, view, record=record, step=step, skip=wanted, shown=plan, why=context.reason)
        document = _document(run, view, plan, "rolled-back" if is_back else "undone", wider=wider)
        return Outcome(document, notes=_done(run, view, plan.to_step))

    nothing = None
    if plan.changes_nothing:
        nothing = Outcome(
            _document(run, view, plan, "nothing", wider=wider),
            notes=(f"step {plan.to_step} is what a launch resumes from",),
        )
    preview = Outcome(_document(run, view, plan, "planned", wider=wider))
    question = "Go back?" if is_back else "Put it back?"
    return Change(lines, question, apply, preview, nothing=nothing)


def _end_of(
    run: StopContext, view: StopView, record: RecoveryRecord, context: RunContext
) -> Change:
    """The end of a roll-back that was cut off."""

    def apply() -> Outcome:
        _finish(run, context.reason)
        step = read_latest(run.directory.paths.checkpoints)
        document = {"schema": SCHEMA, "action": "finished", "to_step": step}
        return Outcome(document, notes=_done(run, view, step))

    refusal = None
    if context.dry_run:
        refusal = Refusal(
            "`tr11 rollback` finishes it; then plan again. Nothing was changed (--dry-run)"
        )
    lines = [f"an earlier roll-back was cut off: {_unfinished(record)}"]
    return Change(lines, "Finish it?", apply, refusal=refusal)


def _parse_skip(text: str) -> Skip:
    number = text.removesuffix("-")
    if number.isascii() and number.isdecimal() and 0 < int(number) < 10**12:
        if number == text:
            return int(number)
        return SkipFrom(int(number))
    try:
        return parse_range(text)
    except RangeError as error:
        raise WrongUsage(f"--skip: {error}; or give a number of iterations, such as 12") from None


# ----------------------------------------------------------------------------- looking
def _refuse_a_living_trainer(run: StopContext, view: StopView) -> str:
    """The job of a trainer that is known to have ended, if its claim is still young; "" for none.

    Raises Refusal while a trainer lives (1), or may live (3).
    """
    found = look_for_trainer(run.directory, view, run.edge)
    if found.words:
        raise Refusal(
            f"{'; '.join(found.words)}: stop it first (tr11 kill --wait). Nothing was changed"
        )
    if found.unknown:
        raise Unobserved(
            f"a trainer may be alive ({'; '.join(found.unknown)}). Nothing was changed"
        )
    return found.ended


def _read_record(run: StopContext) -> RecoveryRecord:
    try:
        return read_recovery(run.directory.paths)
    except (OSError, ValueError) as error:
        raise Unobserved(f"{error}. Nothing was changed") from None


def _plan(
    run: StopContext,
    view: StopView,
    record: RecoveryRecord,
    step: int | None,
    skip: Skip | None,
    catalogue: Catalogue,
) -> RollbackPlan:
    """Raises Refusal where it cannot be."""
    last = max([view.iteration or 0, *(entry.step for entry in catalogue.checkpoints)])
    try:
        if step is None:
            return plan_undo(catalogue, record, run.who)
        return plan_rollback(
            catalogue,
            record,
            config=own_card(run.card, "a roll-back"),
            step=step,
            skip=skip,
            who=run.who,
            last=last,
        )
    except NotPossible as error:
        raise Refusal(f"{error}. Nothing was changed") from None
    except OSError as error:
        raise Unobserved(
            f"{catalogue.folder} cannot be read: {error.strerror or error}. Nothing was changed"
        ) from None


def _wider_skip(run: StopContext, plan: RollbackPlan) -> IterationRange | None:
    """What has to be passed over so that no iteration is trained again that was not finite; None
    where all are.
    """
    if plan.action != "roll-back":
        return None
    records = [step.record for step in known(read_steps(run.directory.paths), ())]
    return not_finite_left(records, plan.to_step, None if plan.skip is None else plan.skip.range)


# ----------------------------------------------------------------------------- doing
def _verify(run: StopContext, step: int) -> None:
    """Read every byte of the step, unless that is on record. Raises Refusal where it is not as it
    was written.
    """
    entry = open_catalogue(run.card).at(step)
    if entry is None or not needs_reading(entry):
        return
    try:
        reading = read_them(run.directory, [entry], FILES_AT_ONCE, quiet=True)[0]
    except KeyboardInterrupt:
        raise Refusal("interrupted. Nothing was changed") from None
    if reading.bad:
        raise Refusal(
            f"step {step} is damaged: {reading.bad[0]}; restore it (tr11 backup restore {step}). "
            "Nothing was changed"
        )
    if reading.result != "fine":
        raise Unobserved(f"step {step} was not verified: {reading.why}. Nothing was changed")
    say(f"verified:   every byte of step {step}")


def _apply(
    run: StopContext,
    view: StopView,
    record: RecoveryRecord,
    step: int | None,
    skip: Skip | None,
    shown: RollbackPlan,
    why: str,
) -> None:
    """Look once more, and do what was shown. Raises Refusal: what stands then is in its text."""
    directory = run.directory
    try:
        with claimed(directory):
            ended = _refuse_a_living_trainer(run, run.look())
            again = _read_record(run)
            plan = _plan(
                run, view, record=again, step=step, skip=skip, catalogue=open_catalogue(run.card)
            )
            if (plan.moves, plan.to_step) != (shown.moves, shown.to_step) or len(
                again.events
            ) != len(record.events):
                raise Refusal(
                    "the checkpoints have changed since they were shown. Nothing was changed: type it again"
                )
            move_checkpoints(directory, plan, why=why, who=run.who, ended=ended)
    except ClaimTaken as taken:
        raise Refusal(
            f"a prune or another roll-back is at it: {taken}. Nothing was changed"
        ) from None
    except TrainerAlive as alive:
        raise Refusal(str(alive)) from None
    except OSError as error:
        raise _cut_off(error) from None


def _finish(run: StopContext, why: str) -> None:
    try:
        with claimed(run.directory):
            ended = _refuse_a_living_trainer(run, run.look())
            finish_pending(
                run.directory,
                _read_record(run),
                who=run.who,
                why=why or "it was cut off",
                ended=ended,
            )
    except ClaimTaken as taken:
        raise Refusal(f"a prune or another roll-back is at it: {taken}") from None
    except TrainerAlive as alive:
        raise Refusal(str(alive)) from None
    except OSError as error:
        raise _cut_off(error) from None


def _cut_off(error: OSError) -> Refusal:
    where = ""
    if error.filename:
        where = f"{error.filename}: "
    return Refusal(
        f"{where}{error.strerror or error}; the next launch, or `tr11 rollback`, finishes what was begun"
    )


# ----------------------------------------------------------------------------- showing
def _lines(plan: RollbackPlan) -> list[str]:
    event = None
    if plan.action == "roll-back":
        event = plan.record.events[-1]
    lines = []
    if event is not None and event.iteration > plan.to_step:
        lines.append(f"going back: from iteration {event.iteration} to step {plan.to_step}")
    lines += [f"rename:     {source} -> {target}" for source, target in plan.moves]
    lines += [f"gone:       {name} was removed since, and cannot be put back" for name in plan.gone]
    if plan.latest_before != plan.to_step:
        before = "nothing"
        if plan.latest_before is not None:
            before = f"step {plan.latest_before}"
        lines.append(f"latest:     names step {plan.to_step}; it named {before}")
    if plan.skip is not None:
        data = plan.skip
        lines.append(
            f"skip:       iterations {data.range}, {counted(data.samples, 'sample')}, {counted(data.tokens, 'token')}"
        )
    elif plan.action == "undo":
        lines.append("skip:       what that roll-back skipped is trained on again")
    return lines


def _not_finite_line(plan: RollbackPlan, wider: IterationRange) -> str:
    left = "iterations after it were"
    if plan.skip is not None:
        left = "other iterations were"
    return f"warning:    {left} not finite: --skip {wider} skips them all"


def _queue_lines(view: StopView, plan: RollbackPlan) -> list[str]:
    lines = []
    for job in view.queued:
        held = "held; released, it " if is_held(job) else ""
        tasks = counted(max(1, len(job.pending_tasks)), "task")
        lines.append(f"queued:     {tasks} of {job.job_id}: {held}resumes from step {plan.to_step}")
    return lines or ["queued:     nothing"]


def _next(run: StopContext, view: StopView) -> str:
    directory = run.directory
    if (
        directory.kill_switch_is_set()
        or directory.paths.pause.exists()
        or any(map(is_held, view.queued))
    ):
        return "let it go on with `tr11 resume`" + (
            "" if view.queued else f", then `{run.launch()}`"
        )
    if view.queued:
        return f"{view.queued[0].job_id}, as soon as nodes are free"
    return run.launch()


def _unfinished(record: RecoveryRecord) -> str:
    assert record.pending is not None
    return f"{len(record.pending.moves)} to rename, {record.pending.latest or 'nothing'} to resume from"


def _done(run: StopContext, view: StopView, step: int | None) -> tuple[str, str]:
    return f"done: the next launch resumes from step {step}", f"next:       {_next(run, view)}"


def _document(
    run: StopContext,
    view: StopView,
    plan: RollbackPlan,
    action: str,
    *,
    wider: IterationRange | None,
) -> dict[str, Any]:
    skip = plan.skip
    return {
        "schema": SCHEMA,
        "run": run.card.run.name,
        "action": action,
        "to_step": plan.to_step,
        "latest_before": plan.latest_before,
        "moves": [{"from": source, "to": target} for source, target in plan.moves],
        "gone": list(plan.gone),
        "skip": None
        if skip is None
        else {
            "first": skip.range.first,
            "last": skip.range.last,
            "samples": skip.samples,
            "tokens": skip.tokens,
        },
        "skip_needed": None if wider is None else str(wider),
        "queued": [job.job_id for job in view.queued],
    }
