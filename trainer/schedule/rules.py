"""Rules between the keys of [schedule], [batch], [curriculum], [recovery], and of data.skip_ranges.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

from trainer.config.card import MOST_RAMP_LEVELS, CurriculumSection, Problem, TrainerConfig
from trainer.config.data_rules import (
    checkpoint_problems,
    data_problems,
    debug_problems,
    precision_problems,
    tokenizer_problems,
)
from trainer.config.rules import (
    OF_BATCH_AND_OPTIMIZER,
    OF_THE_MODEL,
    OF_THE_WORKERS,
    Rule,
    ramp_problems,
)
from trainer.contract.errors import RangeError
from trainer.schedule.learning_rate import decay_samples_of, plan_of, warmup_samples_of
from trainer.schedule.path import count_lengths, parse_range


def schedule_problems(config: TrainerConfig) -> list[Problem]:
    """A learning rate that is no schedule, lengths said twice, and lengths of the other style of
    counting.

    A training is counted in samples, or in iterations when `batch.train_iterations` is given: then
    no key may count in samples, because with a batch ramp the two do not agree.
    """
    return [
        *_style_problems(config),
        *_warmup_problems(config),
        *_cooldown_problems(config),
        *_rate_problems(config),
    ]


def _style_problems(config: TrainerConfig) -> Iterator[Problem]:
    schedule, batch = config.schedule, config.batch
    if batch.train_iterations is None:
        for name in ("decay", "warmup", "cooldown"):
            if (value := getattr(schedule, f"{name}_iterations")) is not None:
                rule = "is for trainings that are counted by batch.train_iterations"
                yield Problem(
                    f"schedule.{name}_iterations", value, rule, f"use schedule.{name}_samples"
                )
        return
    product = batch.train_iterations * batch.global_batch_size
    if batch.train_samples != product:
        rule = f"is not batch.train_iterations x batch.global_batch_size ({product}): both say how long the training is"
        yield Problem("batch.train_samples", batch.train_samples, rule, "keep one of the two")
    if batch.ramp is not None:
        rule = "counts samples, and batch.train_iterations counts steps"
        yield Problem("batch.ramp", None, rule, "use batch.train_samples, or remove the ramp")
    for name in ("decay", "cooldown", "warmup"):
        if value := getattr(schedule, f"{name}_samples"):
            rule = "is for trainings that are counted by batch.train_samples"
            fix = f"use schedule.{name}_iterations"
            yield Problem(f"schedule.{name}_samples", value, rule, fix)


def _warmup_problems(config: TrainerConfig) -> Iterator[Problem]:
    schedule = config.schedule
    fraction, warmup, decay = (
        schedule.warmup_fraction,
        warmup_samples_of(config),
        decay_samples_of(config),
    )
    if fraction is not None and (schedule.warmup_samples or schedule.warmup_iterations is not None):
        rule = "excludes schedule.warmup_samples and schedule.warmup_iterations"
        yield Problem("schedule.warmup_fraction", fraction, rule, "keep one of them")
        return
    if schedule.decay_style == "constant":
        return
    given: dict[str, float | None] = {
        "schedule.warmup_fraction": fraction,
        "schedule.warmup_iterations": schedule.warmup_iterations,
        "schedule.warmup_samples": schedule.warmup_samples,
    }
    key, value = next((key, value) for key, value in given.items() if value is not None)
    if schedule.decay_tokens is None and warmup >= decay:
        if config.batch.train_iterations is None:
            end = f"schedule.decay_samples ({decay})"
        else:
            end = f"schedule.decay_iterations ({decay // config.batch.global_batch_size})"
        yield Problem(key, value, f"must be below {end}", "shorten the warm-up")
    if schedule.decay_tokens is not None and _has_path(config):
        tokens = plan_of(config).warmup_tokens
        if tokens >= schedule.decay_tokens:
            rule = f"ends after {tokens:.0f} tokens, not before schedule.decay_tokens ({schedule.decay_tokens})"
            yield Problem(key, value, rule, "shorten the warm-up")


def _cooldown_problems(config: TrainerConfig) -> Iterator[Problem]:
    """A cooldown without its style, a style without its cooldown, one counted otherwise than the
    decay, or too long.
    """
    schedule = config.schedule
    lengths = {
        f"schedule.cooldown_{unit}": getattr(schedule, f"cooldown_{unit}")
        for unit in ("samples", "iterations", "tokens")
    }
    given = {key: value for key, value in lengths.items() if value is not None}
    unit = "tokens" if schedule.decay_tokens is not None else "samples"
    if unit == "samples" and config.batch.train_iterations is not None:
        unit = "iterations"
    if schedule.decay_style != "wsd":
        for key, value in given.items():
            yield Problem(
                key, value, 'needs schedule.decay_style = "wsd"', "set that, or leave this out"
            )
        return
    if not given:
        yield Problem(
            f"schedule.cooldown_{unit}",
            None,
            'is needed by schedule.decay_style = "wsd"',
            "give its length",
        )
        return
    key, value = next(iter(given.items()))
    if len(given) > 1:
        yield Problem(key, value, f"excludes {list(given)[1]}", "keep one of them")
        return
    if ("tokens" in key) != (unit == "tokens"):
        rule = f"is not counted as the decay is, in {unit}"
        yield Problem(key, value, rule, f"use schedule.cooldown_{unit}")
        return
    if not _has_path(config):
        return
    plan = plan_of(config)
    end, warm = plan.decay_samples, plan.warmup_samples
    if plan.decay_tokens is not None:
        end, warm = plan.decay_tokens, plan.warmup_tokens
    if plan.cooldown > end - warm:
        counted = "samples" if plan.decay_tokens is None else "tokens"
        rule = f"must be at most what the decay has behind the warm-up ({end - warm:.0f} {counted})"
        yield Problem(key, value, rule, "shorten it")


def _has_path(config: TrainerConfig) -> bool:
    """Whether batch and length of every step follow from the card; what is wrong otherwise is told
    elsewhere.
    """
    ramp = config.batch.ramp
    if ramp is not None and any(ramp_problems(config.batch, ramp)):
        return False
    return not curriculum_problems(config)


def _rate_problems(config: TrainerConfig) -> Iterator[Problem]:
    schedule = config.schedule
    if schedule.min_learning_rate > schedule.learning_rate:
        rule = f"must not exceed schedule.learning_rate ({schedule.learning_rate})"
        yield Problem("schedule.min_learning_rate", schedule.min_learning_rate, rule, "lower it")


def curriculum_problems(config: TrainerConfig) -> list[Problem]:
    """Keys of the other kind, keys that are missing, and lengths that shrink, pass the full one, or
    cannot be cut.
    """
    curriculum = config.curriculum
    if curriculum is None:
        return []
    kind = _discrete_problems if curriculum.kind == "discrete" else _growing_problems
    problems = list(kind(curriculum, config.model.sequence_length))
    if problems or not config.parallel.sequence_parallel:
        return problems
    tensor, key = config.parallel.tensor, "step"
    lengths = [curriculum.step]
    if curriculum.kind == "discrete":
        key, lengths = "lengths", curriculum.lengths
    if any(length % tensor for length in lengths):
        rule = f"must be divisible by parallel.tensor ({tensor}) with parallel.sequence_parallel"
        problems.append(
            Problem(f"curriculum.{key}", getattr(curriculum, key), rule, "use multiples of it")
        )
    return problems


def _growing_problems(curriculum: CurriculumSection, full_length: int) -> Iterator[Problem]:
    kind, step, start = curriculum.kind, curriculum.step, curriculum.start_length
    for name in ("lengths", "until_steps"):
        if getattr(curriculum, name):
            rule = f"is for discrete curricula, not for {kind} ones"
            yield Problem(f"curriculum.{name}", getattr(curriculum, name), rule, "remove it")
    for name in ("start_length", "total_steps"):
        if getattr(curriculum, name) is None:
            yield Problem(f"curriculum.{name}", None, f"is needed by a {kind} curriculum", "add it")
    if full_length % step:
        rule = f"must divide model.sequence_length ({full_length})"
        yield Problem("curriculum.step", step, rule, "choose a divisor of it")
    if start is None:
        return
    if start > full_length:
        rule = f"must not exceed model.sequence_length ({full_length})"
        yield Problem("curriculum.start_length", start, rule, "lower it")
    elif start % step:
        rule = f"must be a multiple of curriculum.step ({step})"
        yield Problem("curriculum.start_length", start, rule, f"use {max(1, start // step) * step}")
    elif count_lengths(curriculum, full_length) > MOST_RAMP_LEVELS:
        yield Problem(
            "curriculum.step", step, f"gives more than {MOST_RAMP_LEVELS} lengths", "raise it"
        )


def _discrete_problems(curriculum: CurriculumSection, full_length: int) -> Iterator[Problem]:
    for name in ("start_length", "total_steps"):
        if getattr(curriculum, name) is not None:
            rule = "is for linear and root curricula, not for discrete ones"
            yield Problem(f"curriculum.{name}", getattr(curriculum, name), rule, "remove it")
    lengths, until = curriculum.lengths, curriculum.until_steps
    if not lengths or len(until) != len(lengths) - 1:
        rule = f"needs one entry for each of curriculum.lengths but the last ({max(0, len(lengths) - 1)})"
        yield Problem("curriculum.until_steps", until, rule, "give the last step of each length")
        return
    if lengths[0] < 1 or not _rises(lengths):
        yield Problem("curriculum.lengths", lengths, "must be above zero and rise", "sort them")
    if lengths[-1] != full_length:
        rule = f"must end with model.sequence_length ({full_length})"
        yield Problem("curriculum.lengths", lengths, rule, "add it as the last one")
    if until and (until[0] < 1 or not _rises(until)):
        yield Problem("curriculum.until_steps", until, "must be above zero and rise", "sort them")
    if len(lengths) > MOST_RAMP_LEVELS:
        yield Problem(
            "curriculum.lengths", lengths, f"has more than {MOST_RAMP_LEVELS} entries", "use fewer"
        )


def _rises(values: list[int]) -> bool:
    return all(left < right for left, right in pairwise(values))


def skip_problems(config: TrainerConfig) -> list[Problem]:
    """Ranges in data.skip_ranges that are empty or start before the first iteration. Overlaps are
    allowed.
    """
    problems = []
    for text in config.data.skip_ranges:
        try:
            parse_range(text)
        except RangeError as error:
            problems.append(
                Problem("data.skip_ranges", None, str(error), "write FIRST-LAST, counted from 1")
            )
    return problems


def recovery_problems(config: TrainerConfig) -> list[Problem]:
    """Roll-backs that could never be made."""
    recovery = config.recovery
    if recovery.on_spike != "roll_back":
        return []
    problems = []
    if recovery.roll_backs == 0:
        rule = 'leaves nothing of recovery.on_spike = "roll_back"'
        problems.append(
            Problem("recovery.roll_backs", 0, rule, 'raise it, or use recovery.on_spike = "flag"')
        )
    if not config.checkpoint.save_optimizer:
        rule = 'saves nothing that recovery.on_spike = "roll_back" could go back to'
        problems.append(
            Problem("checkpoint.save_optimizer", False, rule, "switch it on, or only flag spikes")
        )
    return problems


def cross_problems(config: TrainerConfig, world_size: int) -> list[Problem]:
    """Rules that span several keys, for `world_size` workers. Empty when all hold."""
    return [problem for rule in cross_rules(config, lambda: world_size) for problem in rule()]


def cross_rules(config: TrainerConfig, world_size: Callable[[], int]) -> tuple[Rule, ...]:
    """The same one by one, so that those can be asked that need nothing of what a faulty card
    lacks.
    """
    return (
        *(partial(rule, config) for rule in OF_THE_MODEL),
        *(partial(rule, config, world_size) for rule in OF_THE_WORKERS),
        *(partial(rule, config) for rule in (*OF_BATCH_AND_OPTIMIZER, *OF_THE_COURSE)),
    )


OF_THE_COURSE = (
    schedule_problems,
    curriculum_problems,
    skip_problems,
    recovery_problems,
    data_problems,
    tokenizer_problems,
    checkpoint_problems,
    precision_problems,
    debug_problems,
)
