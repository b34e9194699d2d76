"""What the last steps of a launch say by themselves: no finite loss, a spike, a lasting loss of speed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tr11ops.diagnose.sighting import LogLaunch, TrainingStep
from tr11ops.diagnose.signature import FaultClass, NextStep

WITHOUT_LOSS = 2  # steps in a row
SPIKE = 1.35  # times the median of the losses before: with a norm that rose too
HIGH_SPIKE = 2.0  # by itself
SPIKE_NORM = 4.0
BASE = 100
FEWEST = 3
NEAR = 3  # lines between a spike and the first loss that is not finite: one event
SLOW = 0.97  # times the median of TFLOPs before, for three steps and to the end
SLOW_STEPS = 3
SLOW_BASE = 8


@dataclass(frozen=True)
class Unhealthy:
    """What is wrong with the steps, from which line on. `is_grave`: a later failure follows from it."""

    fault: FaultClass
    step: NextStep
    confidence: float
    why: str
    text: str
    line_number: int
    is_grave: bool = False


def judge_steps(launch: LogLaunch) -> Unhealthy | None:
    """None where the steps are fine, or too few."""
    steps = [step for step in launch.steps if step.is_whole]
    spike, broken = _spike(steps), _without_loss(steps)
    if spike is not None and broken is not None and broken.line_number - spike.line_number <= NEAR:
        return broken
    return spike or broken or _slower(steps)


def _is_finite(step: TrainingStep) -> bool:
    """A loss can be 0 or 40 where the gradients are NaN; an infinite norm is a step that was skipped."""
    has_norm = step.grad_norm is None or not math.isnan(step.grad_norm)
    return step.loss is not None and math.isfinite(step.loss) and has_norm


def _without_loss(steps: Sequence[TrainingStep]) -> Unhealthy | None:
    """Steps at the end that have no finite loss or gradients, where others had them."""
    count = 0
    while count < len(steps) and not _is_finite(steps[-1 - count]):
        count += 1
    if count < WITHOUT_LOSS or (count == len(steps) and not any(_is_nan(step) for step in steps)):
        return None
    first = steps[-count]
    why = f"The last {count} steps have no finite loss or gradients: the numbers broke at iteration {first.iteration}."
    return Unhealthy(
        FaultClass.NUMERICS, NextStep.ROLLBACK_AND_SKIP, 0.88, why, first.text, first.line_number, is_grave=True
    )


def _is_nan(step: TrainingStep) -> bool:
    return step.loss is not None and not _is_finite(step)


def _spike(steps: Sequence[TrainingStep]) -> Unhealthy | None:
    """The first step whose loss is far above those before it, and whether it came back."""
    for number, step in enumerate(steps):
        before = [other for other in steps[max(0, number - BASE) : number] if _is_finite(other)]
        if len(before) < FEWEST or not _is_finite(step):
            continue
        usual = median(other.loss or 0.0 for other in before)
        ratio = (step.loss or 0.0) / usual if usual > 0 else 0.0
        norms = [other.grad_norm for other in before if other.grad_norm is not None and other.grad_norm > 0]
        usual_norm = median(norms) if norms else 0.0
        norm = max((other.grad_norm or 0.0 for other in steps[max(0, number - FEWEST) : number + 1]), default=0.0)
        if not (ratio > HIGH_SPIKE or (ratio > SPIKE and usual_norm > 0 and norm > SPIKE_NORM * usual_norm)):
            continue
        last = next((other.loss for other in reversed(steps) if _is_finite(other)), None) or 0.0
        is_back = _is_finite(steps[-1]) and last < SPIKE * usual
        why = f"The loss rose from {usual:.3g} to {step.loss:.3g} at iteration {step.iteration}"
        why += f", and came back to {last:.3g}." if is_back else " and did not come back."
        next_step = NextStep.NONE if is_back else NextStep.ROLLBACK_AND_SKIP
        confidence = 0.75 if is_back else 0.85
        return Unhealthy(
            FaultClass.NUMERICS, next_step, confidence, why, step.text, step.line_number, is_grave=not is_back
        )
    return None


def _slower(steps: Sequence[TrainingStep]) -> Unhealthy | None:
    """A loss of speed in the middle of a launch that lasts to its end: mostly one slow GPU."""
    speeds = [(step, step.tflops) for step in steps if step.tflops]
    for number in range(SLOW_BASE, len(speeds) - SLOW_STEPS + 1):
        usual = median(speed for _, speed in speeds[max(0, number - BASE) : number])
        after = [speed for _, speed in speeds[number:]]
        if median(after) < SLOW * usual and max(after) < 0.985 * usual:
            step = speeds[number][0]
            why = f"From iteration {step.iteration} on it ran at {median(after):.4g} TFLOPs in place of {usual:.4g}: "
            why += "mostly one slow GPU. tr11 profile --phases shows who waits for whom."
            return Unhealthy(FaultClass.GPU_HARDWARE, NextStep.PAGE, 0.5, why, step.text, step.line_number)
    return None
