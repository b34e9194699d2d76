"""Sequence-length curriculum: how long the samples of a step are. Pure, free of torch.

Formulas: DeepSpeed's `fixed_linear`, `fixed_root` and `fixed_discrete` schedules, with its
rounding. A step of length d trains on the first d tokens of each sample. Evaluation is not touched
by it: it always takes whole samples.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from trainer.config.card import CurriculumSection


def sequence_length_at(
    iteration: int, curriculum: CurriculumSection | None, full_length: int
) -> int:
    """Tokens of each sample in step `iteration`, which counts from 1 as the log does.

    Never less than in an earlier step; `full_length` from the curriculum's end on, or always
    without a curriculum.
    """
    if curriculum is None:
        return full_length
    if curriculum.kind == "discrete":
        return curriculum.lengths[bisect_left(curriculum.until_steps, iteration)]
    start, total = curriculum.start_length, curriculum.total_steps
    if start is None or total is None:
        raise ValueError(f"a {curriculum.kind} curriculum needs start_length and total_steps")
    if iteration >= total:
        return full_length
    share = iteration / total
    if curriculum.kind == "root":
        share = share ** (1.0 / curriculum.root_degree)
    length = math.floor(share * (full_length - start) + start)
    return min(length - length % curriculum.step, full_length)


def last_step_of_length(
    iteration: int, curriculum: CurriculumSection | None, full_length: int
) -> int | None:
    """The last step with the length of step `iteration`; None when the length never changes again."""
    if curriculum is None:
        return None
    if curriculum.kind == "discrete":
        level = bisect_left(curriculum.until_steps, iteration)
        if level < len(curriculum.until_steps):
            return curriculum.until_steps[level]
        return None
    length = sequence_length_at(iteration, curriculum, full_length)
    if length == full_length:
        return None
    later = range(iteration, (curriculum.total_steps or iteration) + 1)
    count = bisect_right(
        later, length, key=lambda step: sequence_length_at(step, curriculum, full_length)
    )
    return later[count - 1]


def count_lengths(curriculum: CurriculumSection, full_length: int) -> int:
    """At most so many different lengths occur."""
    if curriculum.kind == "discrete":
        return len(curriculum.lengths)
    return max(0, full_length - (curriculum.start_length or full_length)) // curriculum.step + 1
