"""All rules of a run card that span several keys, one by one or together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trainer.config.card import Problem, TrainerConfig
from trainer.config.data_rules import (
    checkpoint_problems,
    data_problems,
    debug_problems,
    precision_problems,
    tokenizer_problems,
)
from trainer.config.rules import Rule, shape_rules
from trainer.schedule.rules import curriculum_problems, recovery_problems, schedule_problems, skip_problems


def cross_problems(config: TrainerConfig, world_size: int) -> list[Problem]:
    """Rules that span several keys, for `world_size` workers. Empty when all hold."""
    return [problem for rule in cross_rules(config, lambda: world_size) for problem in rule()]


def cross_rules(config: TrainerConfig, world_size: Callable[[], int]) -> tuple[Rule, ...]:
    """The same one by one, so that those can be asked that need nothing of what a faulty card lacks."""
    return (
        *shape_rules(config, world_size),
        partial(schedule_problems, config),
        partial(curriculum_problems, config),
        partial(skip_problems, config),
        partial(recovery_problems, config),
        partial(data_problems, config),
        partial(tokenizer_problems, config),
        partial(checkpoint_problems, config),
        partial(precision_problems, config),
        partial(debug_problems, config),
    )
