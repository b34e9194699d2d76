"""Courses of numbers for the tests: a quiet training of one line a step, in which a test puts what
went wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from tr11ops.curves.steps import LoggedStep
from trainer.contract.metrics_record import StepRecord

BATCH = 2048


def quiet(first: int, last: int, start: str = "1", loss: float = 2.2) -> Iterator[LoggedStep]:
    """Steps as the 176B training logged them: a loss that falls slowly, with the noise of every
    training.
    """
    for iteration in range(first, last + 1):
        chance = random.Random(iteration)
        record = StepRecord(
            iteration=iteration,
            total_iterations=115_000,
            consumed_samples=iteration * BATCH,
            consumed_tokens=iteration * BATCH * 2048,
            seconds_per_iteration=105.2,
            learning_rate=6e-5 * (1 - iteration / 200_000),
            global_batch_size=BATCH,
            lm_loss=loss - 1e-6 * iteration + chance.gauss(0, 0.03),
            grad_norm=round(0.24 + chance.gauss(0, 0.02), 3),
            samples_per_second=19.5,
            tflops=149.0 + chance.gauss(0, 0.4),
        )
        yield LoggedStep(record, iteration, start, 3)


def changed(
    steps: Iterable[LoggedStep], first: int, last: int, **values: object
) -> list[LoggedStep]:
    """The steps with other values in the iterations from `first` to `last`."""
    return [
        replace(step, record=replace(step.record, **values))  # type: ignore[arg-type]
        if first <= step.record.iteration <= last
        else step
        for step in steps
    ]
