"""A counter jumped at a restart: samples, learning rate, batch size, or an iteration from before
the last checkpoint.

Training that is resumed wrongly looks healthy for days. What to do: stop the run, compare the two
launches' cards (`state/attempts/JOB/`), resume from the checkpoint that is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from tr11ops.base.observed import Unknown, known
from tr11ops.detect import series
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot, Step
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.metrics_record import StepRecord

BOUND = "the same iteration before the restart; else 3 times the schedule's slope"
SEVERITIES = "WARNING, CRITICAL when the training began again"
NAME = "counters-jump"
NEEDS = ("jobs", "steps", "training.events", "checkpoints", "training.launch_ends")

SAME_RATE = 0.01  # relative: what the log rounds, and dropped updates, may change
SCHEDULE_RATE = (
    # relative: what a schedule may change beyond its slope, where it turns from one course to the
    # next
    0.05
)
SLOPE_LINES = 20  # on each side, from which the schedule's slope is taken
SLOPE_FACTOR = 3.0


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Compares the first line after each recent restart with the line of the same iteration, or the
    one before.
    """
    steps = known(snapshot.steps, ())
    if not snapshot.active_jobs:
        return
    for index in series.restarts(steps):
        if len(steps) - index > series.RECENT_LINES:
            continue
        jumps = [*_gone_back(snapshot, steps, index), *_jumps(steps, index)]
        if jumps:
            record = steps[index].record
            again = record.iteration <= snapshot.run.log_interval
            yield Finding(
                NAME,
                Severity.CRITICAL if again else Severity.WARNING,
                f"at the restart at iteration {record.iteration}: {jumps[0]}",
                subject=str(record.iteration),
                identity=(str(record.iteration),),
                evidence=(*jumps[1:], _line(steps[index - 1]), _line(steps[index])),
                fix=derived.command(snapshot, "kill --wait"),
            )


def _gone_back(snapshot: Snapshot, steps: tuple[Step, ...], index: int) -> Iterator[str]:
    """The launch began before a checkpoint that was there, and nothing that tr11 did on purpose
    says why.

    That is a roll-back of the trainer's own, or an older checkpoint that the agent tries.
    """
    before, after = steps[index - 1], steps[index]
    if after.time is None or before.time is None:
        return
    backs = [
        event.time for event in known(snapshot.training.events, ()) if event.kind == "roll-back"
    ]
    if isinstance(snapshot.training.launch_ends, Unknown):
        return
    backs += [end.time for end in snapshot.training.launch_ends if end.older_checkpoint is not None]
    if any(before.time <= time <= after.time for time in backs):
        return
    began = after.time - _finite(after.record.seconds_per_iteration)
    sound = [entry for entry in snapshot.examined if entry.is_sound]
    there = [entry for entry in sound if entry.created is not None and entry.created < began]
    newest = max(
        (entry.step for entry in there if entry.step <= before.record.iteration), default=None
    )
    if newest is not None and after.record.iteration <= newest:
        yield (
            f"the training went back to iteration {after.record.iteration}, though {checkpoint_name(newest)} was there"
        )


def _jumps(steps: tuple[Step, ...], index: int) -> Iterator[str]:
    after = steps[index].record
    base = next(
        (
            step.record
            for step in reversed(steps[:index])
            if step.record.iteration <= after.iteration
        ),
        None,
    )
    if base is None:
        return
    count = after.iteration - base.iteration
    yield from _samples(base, after, count)
    if count == 0 and base.global_batch_size != after.global_batch_size:
        yield f"global batch size {after.global_batch_size}; it was {base.global_batch_size}"
    yield from _rate(base, after, count, steps, index)


def _samples(base: StepRecord, after: StepRecord, count: int) -> Iterator[str]:
    low, high = sorted((base.global_batch_size, after.global_batch_size))
    moved = after.consumed_samples - base.consumed_samples
    if low > 0 and not count * low <= moved <= count * (high + 1):
        yield (
            f"consumed samples {after.consumed_samples}, {moved:+d} after {count} iterations"
            f" of {low if low == high else f'{low} to {high}'}"
        )


def _rate(
    base: StepRecord, after: StepRecord, count: int, steps: tuple[Step, ...], index: int
) -> Iterator[str]:
    change = abs(after.learning_rate - base.learning_rate)
    largest = max(abs(after.learning_rate), abs(base.learning_rate))
    if count == 0:
        allowed = SAME_RATE * largest
    else:
        slopes = [
            *_slopes(steps[max(0, index - SLOPE_LINES) : index]),
            *_slopes(steps[index : index + SLOPE_LINES]),
        ]
        if not slopes:
            return  # cannot be told
        allowed = SLOPE_FACTOR * max(slopes) * count + SCHEDULE_RATE * largest
    if change > allowed:
        yield f"learning rate {after.learning_rate:.3g}; it was {base.learning_rate:.3g} at iteration {base.iteration}"


def _slopes(steps: tuple[Step, ...]) -> Iterator[float]:
    """Change of the learning rate per iteration, between neighbouring lines of one launch."""
    for one, two in pairwise(steps):
        count = two.record.iteration - one.record.iteration
        if count > 0 and one.job_id == two.job_id:
            yield abs(two.record.learning_rate - one.record.learning_rate) / count


def _finite(value: float) -> float:
    if math.isfinite(value):
        return value
    return 0.0


def _line(step: Step) -> str:
    record, job = step.record, f"job {step.job_id}, " if step.job_id else ""
    return (
        f"{job}iteration {record.iteration}: consumed samples {record.consumed_samples},"
        f" learning rate {record.learning_rate:.3E}, global batch size {record.global_batch_size}"
    )
