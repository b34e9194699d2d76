"""The last logged loss is not a number: every step from here on is wasted.

What to do: end it at once, go back to a checkpoint from before, and pass over the data since.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted
from tr11ops.detect import series
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.pass_over import after_passing, is_rollback, iterations, pass_over
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot, Step
from trainer.contract.metrics_record import StepRecord

BOUND = "one line"
SEVERITIES = "CRITICAL, INFO once it went back and has still to pass it"
NAME = "loss-not-finite"
NEEDS = ("steps", "training.events")
LOOK = "checkpoints list"  # where it began is not known: which checkpoint is from before?


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Looks at the last step only: a training that recovered by itself has skipped the bad batch.

    A remark once the run has gone back, by a roll-back or another launch, until an iteration after
    the last bad one is a number: what it trains before that was never bad.
    """
    steps = known(snapshot.steps, ())
    if not steps:
        return
    if math.isfinite(steps[-1].record.lm_loss) or derived.is_rolled_back(snapshot):
        yield from _to_be_passed(snapshot, steps)
        return
    began = _first_of_row(steps)
    first, last = steps[began].record, steps[-1].record
    at_least = "" if began else " at least"
    evidence = [
        f"iteration {last.iteration}: lm loss {last.lm_loss}, {_norm_of(last)}",
        *_dropped(steps[began:]),
    ]
    stop = ""
    if _may_train(snapshot):
        stop = derived.command(snapshot, "kill --now --wait")
    fix, then = derived.command(snapshot, LOOK), tuple[str, ...]()
    if not at_least:  # else it is not known where it began
        fix = pass_over(snapshot, first.iteration, last.iteration, lasts=True)
        passed = iterations(first.iteration, last.iteration)
        is_open = bool(stop) and is_rollback(fix)
        more = ", and of those that follow until it stops" if is_open else ""
        evidence.append(f"`{fix}` passes over the data of {passed}{more}")
        then = after_passing(snapshot, fix)
    if stop:
        fix, then = stop, _after_stop(snapshot, fix)
    yield Finding(
        NAME,
        Severity.CRITICAL,
        f"the loss is not a number since{at_least} iteration {first.iteration}",
        evidence=tuple(evidence),
        fix=fix,
        then=then,
    )


def _after_stop(snapshot: Snapshot, command: str) -> tuple[str, ...]:
    """What is typed behind a kill: the command that helps, and what lifts the stop."""
    if is_rollback(command):
        return command, *derived.go_on(snapshot)
    if command == derived.command(snapshot, LOOK):
        return (command,)
    # a launch, which a kill switch would refuse
    return derived.command(snapshot, "kill --release"), command


def _norm_of(record: StepRecord) -> str:
    """The gradient norm in words; the record of a step keeps no norm that is infinite or no number."""
    if record.grad_norm is None:
        return "grad norm not finite"
    return f"grad norm {record.grad_norm:.4g}"


def _dropped(row: tuple[Step, ...]) -> Iterator[str]:
    """How many updates the optimizer dropped since the row began: those did not change the weights."""
    dropped = sum(step.record.skipped_iterations for step in row)
    if dropped:
        updates = counted(dropped, "update was", "updates were")
        yield f"{updates} dropped since then (skipped iterations): those left the weights as they were"


def _to_be_passed(snapshot: Snapshot, steps: tuple[Step, ...]) -> Iterator[Finding]:
    """The newest row of losses that were no numbers from which the run has gone back, and which it
    has not passed.
    """
    ends = [*_turns_back(steps), *([len(steps)] if derived.is_rolled_back(snapshot) else [])]
    for end in reversed(ends):
        last = _last_bad(steps[:end])
        if last is None:
            continue
        first_iteration, last_iteration = (
            steps[_first_of_row(steps[: last + 1])].record.iteration,
            steps[last].record.iteration,
        )
        reached = max((step.record.iteration for step in steps[end:]), default=0)
        if reached > last_iteration:
            continue
        yield Finding(
            NAME,
            Severity.INFO,
            f"the loss was not a number in {iterations(first_iteration, last_iteration)}",
            evidence=(
                f"the run has gone back since: this is over when an iteration after {last_iteration} is a number",
            ),
            is_to_be_passed=True,
        )
        return


def _last_bad(steps: tuple[Step, ...]) -> int | None:
    """The index of the last line that is no number, where the training had not recovered from it."""
    recent = range(len(steps) - 1, max(-1, len(steps) - 1 - series.LEARNING_LINES), -1)
    return next((index for index in recent if not math.isfinite(steps[index].record.lm_loss)), None)


def _first_of_row(steps: tuple[Step, ...]) -> int:
    """The index of the first line of the row of losses that are no numbers, at whose end the last
    line is.

    A few numbers among them do not end the row: the training has not recovered, and the row would
    begin elsewhere at each look. What came before a roll-back, or before a launch that began
    further back, is another row.
    """
    earliest = next(reversed(_turns_back(steps)), 0)
    first, finite = len(steps) - 1, 0
    for index in range(len(steps) - 1, earliest - 1, -1):
        if math.isfinite(steps[index].record.lm_loss):
            finite += 1
        else:
            first, finite = index, 0
        if finite >= series.LEARNING_LINES:
            break
    return first


def _turns_back(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """Indices of the first lines after the training went back to an iteration that it had done
    before.
    """
    return tuple(
        index
        for index in series.restarts(steps)
        if steps[index].record.iteration <= steps[index - 1].record.iteration
    )


def _may_train(snapshot: Snapshot) -> bool:
    """Whether something trains that can be stopped, or may do so unseen."""
    if isinstance(snapshot.jobs, Unknown) or derived.may_live_outside(snapshot):
        return True
    return bool(snapshot.active_jobs) or derived.liveness_outside(snapshot) is not None
