"""The last logged loss is not a number: every step from here on is wasted.

What to do: end it at once, go back to a checkpoint from before, and pass over the data since.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.detect import series
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.pass_over import after_passing, is_rollback, iterations, pass_over
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot, Step

BOUND = "one line"
SEVERITIES = "CRITICAL"
NAME = "loss-not-finite"
NEEDS = ("steps",)
LOOK = "checkpoints list"  # where it began is not known: which checkpoint is from before?


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Looks at the last step only: a training that recovered by itself has skipped the bad batch.

    Silent once the run was rolled back: what the next launch trains has no loss yet.
    """
    steps = known(snapshot.steps, ())
    if not steps or math.isfinite(steps[-1].record.lm_loss) or derived.is_rolled_back(snapshot):
        return
    began = _first_of_row(steps)
    first, last = steps[began].record, steps[-1].record
    at_least = "" if began else " at least"
    evidence = [f"iteration {last.iteration}: lm loss {last.lm_loss}, grad norm {last.grad_norm}"]
    stop = derived.command(snapshot, "kill --now --wait") if _may_train(snapshot) else ""
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
    return derived.command(snapshot, "kill --release"), command  # a launch, which a kill switch would refuse


def _first_of_row(steps: tuple[Step, ...]) -> int:
    """The index of the first line of the row of losses that are no numbers, at whose end the last line is.

    A few numbers among them do not end the row: the training has not recovered, and the row would begin elsewhere at
    each look. What came before a roll-back, or before a launch that began further back, is another row.
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
    """Indices of the first lines after the training went back to an iteration that it had done before."""
    return tuple(
        index for index in series.restarts(steps) if steps[index].record.iteration <= steps[index - 1].record.iteration
    )


def _may_train(snapshot: Snapshot) -> bool:
    """Whether something trains that can be stopped, or may do so unseen."""
    if isinstance(snapshot.jobs, Unknown) or derived.may_live_outside(snapshot):
        return True
    return bool(snapshot.active_jobs) or derived.liveness_outside(snapshot) is not None
