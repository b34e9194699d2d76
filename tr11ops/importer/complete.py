"""Keys that follow from others: what the old trainer assumed when nothing was said, and what need
not be said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.options import (
    Builder,
    LeftReason,
    OptionUse,
    card_text,
    number,
    text,
    unquoted,
    words_of,
)
from tr11ops.importer.sbatch import RUN_NAME
from tr11ops.runcard.rules import advised_exit_minutes
from tr11ops.runcard.sections import parse_time_limit
from trainer.config.model import gated_width

# Lists of their own for each part, each with all of its data sets.
_PARTS = (
    ("--train-data-path", "train", "data.train_group"),
    ("--valid-data-path", "valid", "data.valid_groups"),
    ("--test-data-path", "test", "data.test_groups"),
)


def place_data(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--data-path`, or a list for each part; and the tokenizer's folder."""
    _data_path(builder, uses.get("--data-path"))
    for option, name, key in _PARTS:
        if option in uses:
            _part(builder, uses[option], name, key)
    _tokenizer_model(builder, uses.get("--tokenizer-model"))


def _mixture(use: OptionUse) -> list[tuple[float | None, str, int]]:
    """`PREFIX`, or `WEIGHT PREFIX WEIGHT PREFIX ...`: weight, prefix and line. Raises
    ConversionProblem.
    """
    words = [piece for value in use.values for piece in words_of(unquoted(value))]
    if len(words) == 1:
        return [(None, card_text(words[0]), words[0].line)]
    if not words or len(words) % 2:
        raise ConversionProblem("it is neither one prefix nor pairs of a weight and a prefix")
    pairs = zip(words[::2], words[1::2], strict=True)
    return [(number([weight]), card_text(prefix), prefix.line) for weight, prefix in pairs]


def _data_path(builder: Builder, use: OptionUse | None) -> None:
    if use is None:
        return
    try:
        mixture = _mixture(use)
    except ConversionProblem as problem:
        builder.leave_use(use, LeftReason.DECISION, f"{problem}: fill in [data]", "data.prefixes")
        return
    line = mixture[0][2]
    builder.put("data.prefixes", [prefix for _, prefix, _ in mixture], use.option, use.line, line)
    weights = [weight for weight, _, _ in mixture if weight is not None]
    if weights:
        builder.put("data.weights", weights, use.option, use.line, line)


def _part(builder: Builder, use: OptionUse, name: str, key: str) -> None:
    """One part's list as a group of that name; the whole of each data set is meant."""
    try:
        members = [
            f"{1 if weight is None else weight:g} 0:1 {prefix}"
            for weight, prefix, _ in _mixture(use)
        ]
    except ConversionProblem as problem:
        builder.ask_use(use, str(problem), key)
        return
    group = f"{name}: {', '.join(members)}"
    builder.put(key, group if name == "train" else [group], use.option, use.line, use.value_line)


def _tokenizer_model(builder: Builder, use: OptionUse | None) -> None:
    """A folder or a name on the hub for Hugging Face's tokenizers; a file of another kind for all
    others.
    """
    if use is None:
        return
    if builder.value("tokenizer.type") == "huggingface":
        builder.take_use("tokenizer.path", use, text)
        return
    why = "belongs to a tokenizer that tr11 does not have: give --set tokenizer.path=FOLDER of tokenizer.json"
    builder.ask_use(use, why, "tokenizer.path")


_GPT2_ENTRIES = 50_257

# The old trainer's default where tr11's is another: key, value, option, and the key without which
# it says nothing.
_DEFAULTS: tuple[tuple[str, Any, str, str], ...] = (
    ("model.position_embedding", "absolute", "--position-embedding-type", ""),
    ("parallel.partition", "type:transformer", "--pp-partition-method", ""),
    ("schedule.decay_style", "linear", "--lr-decay-style", ""),
    ("evaluation.interval", 1000, "--eval-interval", ""),
    ("evaluation.iterations", 100, "--eval-iters", ""),
    ("logging.interval", 100, "--log-interval", ""),
    ("logging.tensorboard", False, "--tensorboard-dir", ""),
    ("precision.dtype", "fp32", "--bf16 or --fp16", ""),
    ("data.split", "969,30,1", "--split", "data.prefixes"),
)
_WITH_TENSORBOARD: tuple[tuple[str, Any, str], ...] = (
    ("logging.tensorboard_queue", 1000, "--tensorboard-queue-size"),
    ("logging.tensorboard_batch_size", False, "--log-batch-size-to-tensorboard"),
    ("logging.tensorboard_validation_perplexity", False, "--log-validation-ppl-to-tensorboard"),
)


def complete(builder: Builder) -> None:
    """Fill in and take out. Run once, after everything was placed."""
    for key, value, option, needed in _DEFAULTS:
        if key not in builder.placed and (not needed or needed in builder.placed):
            _default(builder, key, value, option)
    if (
        builder.integer("parallel.tensor", 1) > 1
        and "parallel.sequence_parallel" not in builder.placed
    ):
        _default(builder, "parallel.sequence_parallel", False, "--sequence-parallel")
    if builder.value("logging.tensorboard") is True:
        for key, value, option in _WITH_TENSORBOARD:
            if key not in builder.placed:
                _default(builder, key, value, option)
    _cooldown(builder)
    _redundant(builder)
    _run_name(builder)
    _batch(builder)
    _vocabulary(builder)


def data_parallel(builder: Builder) -> int:
    """The data-parallel degree that the placed keys give; 0 where they give none."""
    workers = builder.integer("slurm.workers_per_node") or builder.integer("slurm.gpus_per_node")
    shape = builder.integer("parallel.tensor", 1) * builder.integer("parallel.pipeline", 1)
    world = builder.integer("slurm.nodes") * workers
    if shape > 0 and world % shape == 0:
        return world // shape
    return 0


def correct(builder: Builder) -> None:
    """Change values that would be refused, or would lose work, where there is one plain right
    value.
    """
    minutes = builder.number("run.exit_duration_minutes")
    limit = time_limit(builder)
    if minutes is not None and limit and minutes * 60 >= limit:
        advised = advised_exit_minutes(limit)
        value = int(advised) if advised.is_integer() else advised
        builder.change(
            "run.exit_duration_minutes",
            value,
            f"is not below the time limit of {limit / 60:g} minutes",
        )
    ramp = builder.value("batch.ramp")
    if isinstance(ramp, dict) and ramp["start"] == builder.integer("batch.global_batch_size"):
        builder.drop(
            "batch.ramp",
            "it starts at the full batch, by which the original divides by zero",
            LeftReason.NO_EFFECT,
        )
    if builder.integer("data.valid_workers") > 0:
        builder.change("data.valid_workers", 0, "could hang at an evaluation")


def time_limit(builder: Builder) -> int:
    """The time limit in seconds; 0 where there is none."""
    value = builder.value("slurm.time_limit")
    if isinstance(value, str):
        return parse_time_limit(value)
    return 0


def _default(builder: Builder, key: str, value: Any, option: str) -> None:
    builder.put(key, value, option, 0, note=f"the original's default: no {option} is given")


def _cooldown(builder: Builder) -> None:
    """How the rate falls at the end of `WSD`; with any other style these options say nothing."""
    style = "schedule.cooldown_style"
    if builder.value("schedule.decay_style") == "wsd":
        if style not in builder.placed:
            _default(builder, style, "exponential", "--lr-wsd-decay-style")
        return
    for key in (style, "schedule.cooldown_samples", "schedule.cooldown_iterations"):
        if key in builder.placed:
            builder.drop(key, "counts only with --lr-decay-style WSD", LeftReason.NO_EFFECT)


def _redundant(builder: Builder) -> None:
    """Values that say what would be assumed anyway."""
    hidden = builder.integer("model.hidden_size")
    heads = builder.integer("model.attention_heads")
    is_gated = builder.value("model.activation") == "swiglu"
    expected = {
        "model.ffn_hidden_size": 4 * hidden if not is_gated else gated_width(hidden),
        "model.kv_channels": hidden // heads if heads > 0 and hidden % heads == 0 else 0,
        "model.max_position_embeddings": builder.integer("model.sequence_length"),
        "slurm.workers_per_node": builder.integer("slurm.gpus_per_node"),
    }
    for key, value in expected.items():
        if value and builder.value(key) == value:
            builder.drop(key, "it is what follows without it")
    for key in ("schedule.warmup_iterations", "schedule.warmup_fraction"):
        if key in builder.placed and not builder.number(key):
            builder.drop(key, "zero is no warm-up, as without it")
    if builder.number("run.exit_interval") == 0:
        builder.drop("run.exit_interval", "zero is no exit, as without it")
    scale = builder.number("precision.loss_scale")
    if scale == 0:
        builder.drop("precision.loss_scale", "zero is a dynamic scale, as without it")
    elif scale and builder.value("precision.dtype") != "fp16":
        why = "without fp16 it changes nothing but rounding"
        builder.drop("precision.loss_scale", why, LeftReason.DROPPED)
    if builder.value("schedule.decay_tokens") is not None:
        for key in ("schedule.decay_samples", "schedule.decay_iterations"):
            if key in builder.placed:
                builder.drop(key, "schedule.decay_tokens goes before it", LeftReason.NO_EFFECT)


def _run_name(builder: Builder) -> None:
    """Without a job name a run is called as its folder is, where that is a name."""
    directory = builder.value("run.directory")
    if "run.name" in builder.placed or not isinstance(directory, str):
        return
    name = directory.rpartition("/")[2]
    line = builder.line("run.directory")
    if RUN_NAME.fullmatch(name):
        builder.put("run.name", name, "--save", line, note="no job name is given")
        return
    why = "no job name is given, and the run's folder has none that would do"
    builder.ask("--save", directory, line=line, why=why, key="run.name")


def _batch(builder: Builder) -> None:
    micro = builder.integer("batch.micro_batch_size")
    degree = data_parallel(builder)
    if "batch.global_batch_size" not in builder.placed and micro and degree:
        note = f"the original's default: {micro} x {degree} data-parallel replicas"
        builder.put("batch.global_batch_size", micro * degree, "--global-batch-size", 0, note=note)


# what names a tokenizer, the best first
_TOKENIZER = ("tokenizer.path", "tokenizer.vocabulary_file", "tokenizer.type")


def _vocabulary(builder: Builder) -> None:
    """The tokenizer that each program assumed, and the size of its vocabulary where that is known."""
    is_masked = builder.value("model.family") in ("bert", "t5")
    if "tokenizer.type" not in builder.placed:
        _default(
            builder,
            "tokenizer.type",
            "bert_wordpiece_lower" if is_masked else "gpt2_bpe",
            "--tokenizer-type",
        )
    sizes = ("tokenizer.padded_vocabulary_size", "tokenizer.vocabulary_size")
    if any(key in builder.placed for key in sizes):
        return
    line = builder.line("tokenizer.type")
    if builder.value("tokenizer.type") == "gpt2_bpe":
        note = "entries of GPT-2's vocabulary; padded as the original pads it"
        if not line:
            note = f"the original's default: {note}"
        builder.put("tokenizer.vocabulary_size", _GPT2_ENTRIES, "--tokenizer-type", line, note=note)
        return
    why = "the size of the vocabulary is the tokenizer's"
    key = "tokenizer.vocabulary_size"
    named = next(key for key in _TOKENIZER if key in builder.placed)  # its type at least: see above
    said = builder.placed[named]
    option = said.source if said.line else "the tokenizer"  # where it was not said, but assumed
    builder.ask(option, said.value, line=said.line, why=why, key=key)
