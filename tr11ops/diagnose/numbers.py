"""What the last steps of a launch say by themselves: no finite loss, a spike, a lasting loss of
speed. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from tr11ops.diagnose.sighting import LogLaunch, TrainingStep
from tr11ops.diagnose.signature import FaultClass, NextStep
from tr11ops.dialects.reading import StepNumbers
from trainer.contract.record import Record

WITHOUT_LOSS = 2  # steps in a row
SPIKE = 1.35  # times the median of the losses before: with a norm that rose too
HIGH_SPIKE = 2.0  # by itself
SPIKE_NORM = 4.0
# times the same, of steps right before a spike, with a norm that rose too: it began with them
RISE = 1.15
BASE = 100
FEWEST = 3
SETTLED = 20  # finite losses after a spike, as low as before it
NEAR = 3  # lines between a spike and the first loss that is not finite: one event
# times the median of Megatron's TFLOPs before, which vary little, for three steps and to the end
SLOW = 0.97
SLOW_STEPS = 3
SLOW_BASE = 8
SLOWER = 0.8  # the same of a speed that varies: every step below all before, for more of them
SLOWER_STEPS = {"bar": 20}  # its speed is a mean that lags behind
SLOWER_STEPS_USUAL = 5
HALF = 0.5  # times the speed before: more than one slow GPU makes of it
ZERO_STEPS = 3  # in a row whose loss is exactly 0
SMALL = 0.05  # a loss that may have come to 0 by itself
DATA_LATE = 10  # times what a step waited for its data before
DATA_SECONDS = 0.5
DATA_STEPS = 3
_UNITS = {
    "tflops": "TFLOPs",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "iterations_per_second": "steps/s",
}


class Unhealthy(Record):
    """What is wrong with the steps, from which one on. `is_grave`: a later failure follows from
    it.
    """

    fault: FaultClass
    step: NextStep
    confidence: float
    why: str
    at: TrainingStep
    is_grave: bool = False


def judge_steps(launch: LogLaunch) -> Unhealthy | None:
    """None where the steps are fine, or too few."""
    whole = [step for step in launch.steps if step.numbers.is_whole]
    steps = [step for step in whole if _tells_health(step.numbers)]
    spike = _spike(steps)
    broken = _without_loss(steps)
    if spike is not None and broken is not None:
        is_one = not spike.is_grave or broken.at.line_number - spike.at.line_number <= NEAR
        # a spike that had come back is another event
        if is_one:
            return broken
        return spike
    return spike or broken or _zero(steps) or judge_data(launch) or _slower(whole)


def judge_data(launch: LogLaunch) -> Unhealthy | None:
    """Steps up to the end that wait for their data many times longer than those before; None where
    none do.
    """
    waits = [
        (step, seconds)
        for step in launch.steps
        if (seconds := step.numbers.values.get("data_seconds")) is not None
    ]
    for number in range(DATA_STEPS, len(waits) - DATA_STEPS + 1):
        usual = median(seconds for _, seconds in waits[max(0, number - BASE) : number])
        after = [seconds for _, seconds in waits[number:]]
        if min(after) > max(DATA_SECONDS, DATA_LATE * usual):
            first = waits[number][0]
            why = f"From iteration {first.iteration} on each step waited {median(after):.3g} s for its data in place of"
            why += f" {usual:.3g} s: storage or the data loader is late."
            return Unhealthy(
                FaultClass.DATALOADER,
                NextStep.PAGE,
                confidence=0.75,
                why=why,
                at=first,
            )
    return None


def _tells_health(numbers: StepNumbers) -> bool:
    """Whether a line says how the numbers do: a bar that only counts says nothing of them."""
    return numbers.loss is not None or numbers.grad_norm is not None or numbers.lacks_loss


def _is_finite(step: TrainingStep) -> bool:
    """A loss can be 0 or 40 where the gradients are NaN; an infinite norm is a step that was
    skipped.
    """
    numbers = step.numbers
    if numbers.grad_norm is not None and math.isnan(numbers.grad_norm):
        return False
    if numbers.loss is None:
        return not numbers.lacks_loss
    return math.isfinite(numbers.loss)


def _at(step: TrainingStep) -> str:
    """Where a step is; nothing of one without a number."""
    if step.iteration is None:
        return ""
    return f" at iteration {step.iteration}"


def _from(step: TrainingStep) -> str:
    if step.iteration is None:
        return "From some iteration on"
    return f"From iteration {step.iteration} on"


def _loss(step: TrainingStep) -> float:
    return step.numbers.loss or 0.0


def _norm(step: TrainingStep) -> float:
    return step.numbers.grad_norm or 0.0


def _without_loss(steps: Sequence[TrainingStep]) -> Unhealthy | None:
    """Steps at the end that have no finite loss or gradients, where others had them."""
    count = 0
    while count < len(steps) and not _is_finite(steps[-1 - count]):
        count += 1
    if count < WITHOUT_LOSS or (count == len(steps) and not any(_is_nan(step) for step in steps)):
        return None
    first = steps[-count]
    why = f"The last {count} steps have no finite loss or gradients: the numbers broke{_at(first)}."
    return Unhealthy(
        FaultClass.NUMERICS,
        NextStep.ROLLBACK_AND_SKIP,
        confidence=0.88,
        why=why,
        at=first,
        is_grave=True,
    )


def _is_nan(step: TrainingStep) -> bool:
    return not step.numbers.lacks_loss and not _is_finite(step)


def _spike(steps: Sequence[TrainingStep]) -> Unhealthy | None:
    """The first step whose loss is far above those before it, and whether it came back."""
    # read once: each is looked at often
    losses = [step.numbers.loss if _is_finite(step) else None for step in steps]
    norms = [_norm(step) for step in steps]
    for number, (step, loss) in enumerate(zip(steps, losses, strict=True)):
        first = max(0, number - BASE)
        before = [other for other in losses[first:number] if other is not None]
        if loss is None or len(before) < FEWEST or step.numbers.may_be_zero:
            continue
        usual = median(before)
        ratio = 0.0
        if usual > 0:
            ratio = loss / usual
        if ratio <= SPIKE:
            continue
        near = zip(norms[first:number], losses[first:number], strict=True)
        known = [norm for norm, other in near if other is not None and norm > 0]
        usual_norm = 0.0
        if known:
            usual_norm = median(known)
        norm = max(norms[max(0, number - FEWEST) : number + 1])
        if not (ratio > HIGH_SPIKE or (usual_norm > 0 and norm > SPIKE_NORM * usual_norm)):
            continue
        last = next((other for other in reversed(losses) if other is not None), 0.0)
        quiet = [other for other in losses[number + 1 :] if other is not None][-SETTLED:]
        is_settled = len(quiet) == SETTLED and max(quiet) < SPIKE * usual  # whatever broke later
        is_back = is_settled or (losses[-1] is not None and last < SPIKE * usual)
        # a batch that is harder than others, in a log of one's own
        if is_back and step.numbers.dialect.guess:
            continue
        begun = _onset(steps[:number], step, usual, usual_norm)
        why = f"The loss rose from {usual:.3g} to {_loss(begun):.3g}{_at(begun)}"
        why += f", and came back to {last:.3g}." if is_back else " and did not come back."
        next_step = NextStep.NONE if is_back else NextStep.ROLLBACK_AND_SKIP
        confidence = 0.75 if is_back else 0.85
        return Unhealthy(
            FaultClass.NUMERICS,
            next_step,
            confidence=confidence,
            why=why,
            at=begun,
            is_grave=not is_back,
        )
    return None


def _onset(
    before: Sequence[TrainingStep], spike: TrainingStep, usual: float, usual_norm: float
) -> TrainingStep:
    """The first of the steps right before a spike that had left what was usual: their loss and
    their norm rise.
    """
    for step in reversed(before):
        if (
            not _is_finite(step)
            or _loss(step) < RISE * usual
            or _norm(step) < SPIKE_NORM * usual_norm
            or not usual_norm
        ):
            break
        spike = step
    return spike


def _zero(steps: Sequence[TrainingStep]) -> Unhealthy | None:
    """Steps at the end whose loss is exactly 0, which no mean over words is: masked labels, or
    numbers that broke.
    """
    count = 0
    while (
        count < len(steps)
        and steps[-1 - count].numbers.loss == 0.0
        and not steps[-1 - count].numbers.may_be_zero
    ):
        count += 1
    if count < ZERO_STEPS:
        return None
    first = steps[-count]
    before = [_loss(step) for step in steps[:-count]]
    if before and before[-1] < SMALL:
        return None
    if before:
        why = f"The last {count} steps have a loss of exactly 0; before it was {before[-1]:.3g}: the numbers broke"
        why += f"{_at(first)}."
        step = NextStep.ROLLBACK_AND_SKIP
        confidence = 0.8
    else:
        why = f"All {count} steps have a loss of exactly 0: every label is masked, or the numbers broke at once."
        step = NextStep.FIX_CONFIG
        confidence = 0.65
    return Unhealthy(
        FaultClass.NUMERICS,
        step,
        confidence=confidence,
        why=why,
        at=first,
        is_grave=True,
    )


def _slower(steps: Sequence[TrainingStep]) -> Unhealthy | None:
    """A loss of speed in the middle of a launch that lasts to its end: mostly one slow GPU."""
    speeds, unit, is_even, steps_after = _speeds(steps)
    bound = SLOW if is_even else SLOWER
    for number in range(SLOW_BASE, len(speeds) - steps_after + 1):
        before = [speed for _, speed in speeds[max(0, number - BASE) : number]]
        after = [speed for _, speed in speeds[number:]]
        usual = median(before)
        if is_even:
            highest = 0.985 * usual
        else:
            highest = min(before)
        if median(after) < bound * usual and max(after) < highest:
            step = speeds[number][0]
            why = f"{_from(step)} it ran at {median(after):.4g} {unit} in place of {usual:.4g}: "
            if median(after) < HALF * usual:
                why += "data or storage that come late, a network, or a GPU."
                return Unhealthy(
                    FaultClass.UNKNOWN,
                    NextStep.PAGE,
                    confidence=0.5,
                    why=why,
                    at=step,
                )
            why += "mostly one slow GPU. tr11 profile --phases shows who waits for whom."
            return Unhealthy(
                FaultClass.GPU_HARDWARE,
                NextStep.PAGE,
                confidence=0.5,
                why=why,
                at=step,
            )
    return None


def _speeds(
    steps: Sequence[TrainingStep],
) -> tuple[list[tuple[TrainingStep, float]], str, bool, int]:
    """The speeds that most of the steps tell in one unit, whether they vary little, and how many
    slow ones count.
    """
    told = [
        (step, step.numbers.dialect.name, *speed)
        for step in steps
        if (speed := step.numbers.speed()) is not None
    ]
    if not told:
        return [], "", False, 1
    [((dialect, name), _)] = Counter((dialect, name) for _, dialect, name, _ in told).most_common(1)
    speeds = [(step, value) for step, *kind, value in told if kind == [dialect, name]]
    is_even = (dialect, name) == ("megatron", "tflops")
    if is_even:
        fewest = SLOW_STEPS
    else:
        fewest = SLOWER_STEPS.get(dialect, SLOWER_STEPS_USUAL)
    return speeds, _UNITS[name], is_even, fewest
