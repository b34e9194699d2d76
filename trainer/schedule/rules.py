"""Rules between the keys of [schedule], [batch], [curriculum], [recovery], [data], [tokenizer],
[checkpoint], [precision] and [debug]. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

from trainer.config.card import MOST_RAMP_LEVELS, CurriculumSection, Problem, TrainerConfig
from trainer.config.data import data_set_name
from trainer.config.kernel_choice import MULTIPLE, odd_sizes
from trainer.config.rules import (
    OF_BATCH_AND_OPTIMIZER,
    OF_THE_MODEL,
    OF_THE_WORKERS,
    Rule,
    ramp_problems,
)
from trainer.contract.errors import RangeError
from trainer.schedule.path import (
    count_lengths,
    decay_samples_of,
    parse_range,
    path_of,
    warmup_samples_of,
)


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
        tokens = path_of(config).tokens_at(warmup)
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
    from trainer.schedule.learning_rate import plan_of

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
    if curriculum.kind == "discrete":
        kind = _discrete_problems
    else:
        kind = _growing_problems
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


# ----------------------------------------------------------------------------- data, tokenizer, checkpoint
# Of an index with one byte more for each sequence, its mode: whole, but of data that no one here
# trains on.
MULTIMODAL = (
    "is of multimodal data (it ends with a mode of each sequence), which is not trained on here; make the pair again"
    " from text alone"
)

# Of a group of data: it becomes part of file names, of log lines and of chart names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

# Families that are trained on masked words, and the special tokens for which a sample has room.
MASKING_TOKENS = {"bert": 3, "t5": 2}


def data_problems(config: TrainerConfig) -> list[Problem]:
    """What [data] says twice, or not at all, or against another section."""
    return [
        *_source_problems(config),
        *_share_problems(config),
        *_document_problems(config),
        *_masking_problems(config),
    ]


def _source_problems(config: TrainerConfig) -> Iterator[Problem]:
    data = config.data
    groups = {
        "train": (data.train_group, data.train_groups_file),
        "valid": (data.valid_groups, data.valid_groups_file),
        "test": (data.test_groups, data.test_groups_file),
    }
    for name, (written, file) in groups.items():
        if name == "train":
            key = "data.train_group"
        else:
            key = f"data.{name}_groups"
        if written and file:
            yield Problem(
                key, None, f"and data.{name}_groups_file both say the same", "keep one of the two"
            )
        if name != "train" and (written or file) and not data.uses_groups:
            yield Problem(
                key,
                None,
                "needs a training group too",
                "add data.train_group or data.train_groups_file",
            )
    if data.uses_groups and data.prefixes:
        yield Problem(
            "data.prefixes", data.prefixes, "excludes named groups", "keep prefixes or the groups"
        )
    if not data.uses_groups and not data.prefixes:
        yield Problem(
            "data.prefixes", None, "is empty, and there are no groups", "name what is trained on"
        )
    if data.uses_groups and data.weights is not None:
        yield Problem(
            "data.weights",
            data.weights,
            "belongs to data.prefixes",
            "remove it; groups have weights",
        )
    if data.validate_each:
        yield from _each_problems(config)
    if (
        data.uses_groups
        and config.evaluation.iterations
        and not (data.valid_groups or data.valid_groups_file)
    ):
        yield Problem(
            "data.valid_groups",
            None,
            "is needed by evaluation.iterations",
            "add data.valid_groups, or set evaluation.iterations = 0",
        )


def _each_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Each data set has a name of its own, and something to be validated on."""
    data = config.data
    if data.uses_groups:
        yield Problem(
            "data.validate_each", True, "belongs to data.prefixes", "remove it; groups are named"
        )
        return
    names = [data_set_name(prefix) for prefix in data.prefixes]
    double = next((name for name in names if names.count(name) > 1), None)
    if not all(NAME.fullmatch(name) for name in names):
        rule = "names each validation set after its data set's folder, and one of them has no such name"
        yield Problem(
            "data.validate_each",
            True,
            rule,
            "use letters, digits, '.', '_' and '-' in names of folders",
        )
    elif double is not None:
        rule = f"names each validation set after its data set's folder, and two are in folders called {double!r}"
        yield Problem("data.validate_each", True, rule, "keep each data set in a folder of its own")


def _share_problems(config: TrainerConfig) -> Iterator[Problem]:
    data = config.data
    if data.uses_groups or not data.prefixes:
        return
    if data.weights is not None and len(data.weights) != len(data.prefixes):
        rule = f"needs one entry per data.prefixes ({len(data.prefixes)})"
        yield Problem("data.weights", data.weights, rule, "add or remove weights")
    if data.weights is not None and (
        min(data.weights, default=0) < 0 or not 0 < sum(data.weights) < float("inf")
    ):
        rule = "must not be negative, nor all zero, nor sum to infinity"
        yield Problem("data.weights", data.weights, rule, "give shares such as 0.7 and 0.3")
    rule = "must be three shares such as 949,50,1 (train, validation, test), the first above zero"
    try:
        shares = [float(part) for part in data.split.split(",")]
    except ValueError:
        shares = []
    if (
        len(shares) != 3
        or min(shares) < 0
        or not 0 < shares[0] < float("inf")
        or sum(shares) == float("inf")
    ):
        yield Problem("data.split", data.split, rule, "write three numbers with commas")
    elif config.evaluation.iterations and shares[1] == 0:
        rule = "leaves no validation data for [evaluation]"
        fix = "give the second share a value or set evaluation.iterations = 0"
        yield Problem("data.split", data.split, rule, fix)


def _document_problems(config: TrainerConfig) -> Iterator[Problem]:
    data, token = config.data, config.data.end_of_document_id
    if data.marks_documents and token is None:
        rule = "is needed by reset_position_ids, reset_attention_mask and mask_end_of_document_loss"
        yield Problem(
            "data.end_of_document_id", None, rule, "give the id of the token that ends a document"
        )
    if token is not None and token >= config.tokenizer.padded_vocabulary_size:
        rule = f"must be below tokenizer.padded_vocabulary_size ({config.tokenizer.padded_vocabulary_size})"
        yield Problem("data.end_of_document_id", token, rule, "give the id that the tokenizer uses")


def _masking_problems(config: TrainerConfig) -> Iterator[Problem]:
    """What samples with masked words need."""
    family, length, named = str(config.model.family), config.model.sequence_length, config.tokenizer
    special = MASKING_TOKENS.get(family)
    if special is None:
        return
    if length < special + 2:
        rule = f"leaves no room for words beside the {special} special tokens of {family}"
        yield Problem("model.sequence_length", length, rule, f"use {special + 2} or more")
    if named.type == "gpt2_bpe" or (named.path is None and named.vocabulary_file is None):
        rule = f"must be a WordPiece vocabulary for model.family = {family}"
        fix = 'set tokenizer.type = "bert_wordpiece_lower" and tokenizer.vocabulary_file'
        yield Problem("tokenizer.type", named.type, rule, fix)
    if config.data.marks_documents:
        rule = f"has no meaning for model.family = {family}: a sample is of one document"
        keys = ("reset_position_ids", "reset_attention_mask", "mask_end_of_document_loss")
        key = next(key for key in keys if getattr(config.data, key))
        yield Problem(f"data.{key}", True, rule, "leave it out")


def tokenizer_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Sizes of the vocabulary that do not fit together, and files that the tokenizer's type needs."""
    tokenizer = config.tokenizer
    size, rows, multiple = (
        tokenizer.vocabulary_size,
        tokenizer.padded_vocabulary_size,
        tokenizer.divisible_by,
    )
    if size is not None and rows < size:
        rule = f"must be at least tokenizer.vocabulary_size ({size})"
        yield Problem("tokenizer.padded_vocabulary_size", rows, rule, "raise it or leave it out")
    if multiple is not None and rows % multiple:
        rule = f"must be a multiple of tokenizer.divisible_by ({multiple})"
        fix = f"use {-(-rows // multiple) * multiple}"
        yield Problem("tokenizer.padded_vocabulary_size", rows, rule, fix)
    if tokenizer.type == "gpt2_bpe" and (tokenizer.vocabulary_file is None) != (
        tokenizer.merges_file is None
    ):
        rule = "gpt2_bpe needs both vocab.json and merges.txt"
        yield Problem("tokenizer.merges_file", tokenizer.merges_file, rule, "name both files")
    if tokenizer.type != "huggingface" and tokenizer.path is not None:
        rule = f"is for huggingface tokenizers, not for {tokenizer.type}"
        yield Problem("tokenizer.path", tokenizer.path, rule, "use tokenizer.vocabulary_file")


def checkpoint_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Keys without the one that they belong to."""
    if config.checkpoint.finetune and config.checkpoint.load is None:
        rule = "needs checkpoint.load: what it starts from"
        yield Problem("checkpoint.finetune", True, rule, "name the folder of checkpoints")


def precision_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Loss scales where nothing is scaled; 8-bit floats where the other numbers or the sizes forbid
    them.
    """
    precision, odd = config.precision, None
    if precision.float8 and precision.dtype != "bf16":
        rule = f"is for bf16, not {precision.dtype}"
        yield Problem("precision.float8", True, rule, "leave it out, or use bf16")
        return
    if precision.float8:
        odd = next(odd_sizes(config.model, config.parallel.tensor), None)
    if odd is not None:
        rule = f"needs multiples of {MULTIPLE}: {odd[0]} is {odd[1]}"
        yield Problem("precision.float8", True, rule, "change that, or leave this out")
    elif precision.loss_scale is not None and precision.dtype != "fp16":
        rule = f"is for fp16; {precision.dtype} needs no loss scale"
        yield Problem("precision.loss_scale", precision.loss_scale, rule, "remove it")


def debug_problems(config: TrainerConfig) -> list[Problem]:
    """Ranges of iterations that are empty."""
    return [
        Problem("debug.iterations", text, "ends before it starts", "write FIRST-LAST")
        for text in config.debug.iterations
        if int(text.split("-")[0]) > int(text.split("-")[1])
    ]


# ----------------------------------------------------------------------------- all of them
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
