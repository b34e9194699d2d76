"""The trainer's options into the training sections, with what several options say together."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.complete import place_data
from tr11ops.importer.launch import ParsedLaunch
from tr11ops.importer.options import (
    Builder,
    Converter,
    LeftReason,
    OptionUse,
    card_text,
    integer,
    known,
    number,
    off,
    one_of,
    text,
)
from tr11ops.importer.options_table import OPTIMIZERS, RULES, TOGETHER
from tr11ops.importer.traced import Traced

# Megatron's options that several of them say together of a block, its norms and its heads, into
# [model].

_POSITIONS = "model.position_embedding"
# of stretched positions, where no option says another
_LLAMA_31_FACTOR = 8.0
_LLAMA_31_LENGTH = 8192
_GATED_MULTIPLE = 64  # of the feed-forward width that the original gives a gated block
_SAME_TWICE = "--encoder-num-layers", "--decoder-num-layers"


def place_model(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """Positions, norms, gates and heads: options that mean something only beside others."""
    _positions(builder, uses)
    _heads(builder, uses)
    _gate(builder, uses)
    _query_key_norm(builder, uses)
    _layers_of_both(builder, uses)


def _positions(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--use-rotary-position-embeddings` is the older name of type `rope`; other options count with
    it alone.
    """
    switch = uses.get("--use-rotary-position-embeddings")
    if switch is not None:
        builder.put(_POSITIONS, "rotary", switch.option, switch.line)
    is_rotary = builder.value(_POSITIONS) == "rotary"
    base = uses.get("--rotary-base")
    share = uses.get("--rotary-percent")
    if base is not None and is_rotary:
        builder.take_use("model.rotary_base", base, number)
    elif base is not None:
        builder.leave_use(base, LeftReason.NO_EFFECT, "counts only with rotary positions")
    if share is not None:
        _whole_heads(builder, share, is_rotary)
    _stretch(builder, uses, is_rotary)
    none = uses.get("--no-position-embedding")
    if none is not None and is_rotary:
        builder.leave_use(none, LeftReason.ELSEWHERE, "rotary positions have no table here")
    elif none is not None:
        builder.ask_use(none, f"there is no model without positions: give --set {_POSITIONS}=...")
    if is_rotary and "model.max_position_embeddings" in builder.placed:
        builder.drop("model.max_position_embeddings", "rotary positions have no table here")


def _stretch(builder: Builder, uses: Mapping[str, OptionUse], is_rotary: bool) -> None:
    """`--rope-scaling-factor` counts with its switch alone; the other numbers are Llama 3.1's
    there.
    """
    switch = uses.get("--use-rope-scaling")
    factor = uses.get("--rope-scaling-factor")
    if switch is None or not is_rotary:
        for use in (switch, factor):
            if use is not None:
                builder.leave_use(
                    use,
                    LeftReason.NO_EFFECT,
                    "counts only with --use-rope-scaling of rotary positions",
                )
        return
    note = "the original's own, as Llama 3.1's"
    builder.put(
        "model.rotary_original_length", _LLAMA_31_LENGTH, switch.option, switch.line, note=note
    )
    if factor is not None:
        builder.take_use("model.rotary_factor", factor, number)
    else:
        builder.put("model.rotary_factor", _LLAMA_31_FACTOR, switch.option, switch.line, note=note)


def _whole_heads(builder: Builder, share: OptionUse, is_rotary: bool) -> None:
    """The share of each head that is rotated: all of it here."""
    try:
        is_whole = number(share.values) == 1
    except ConversionProblem as problem:
        builder.ask_use(share, str(problem))
        return
    if not is_rotary:
        builder.leave_use(share, LeftReason.NO_EFFECT, "counts only with rotary positions")
    elif is_whole:
        builder.leave_use(share, LeftReason.ELSEWHERE, "whole heads are rotated")
    else:
        builder.ask_use(share, "whole heads are rotated here, so that this is another model")


def _heads(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--num-query-groups` counts with its switch alone, and is 1 there; a fork has one option for
    both.
    """
    switch = uses.get("--group-query-attention")
    groups = uses.get("--num-query-groups")
    if switch is not None and groups is not None:
        builder.take_use("model.key_value_heads", groups, integer)
    elif switch is not None:
        note = "the original's default: no --num-query-groups is given"
        builder.put("model.key_value_heads", 1, switch.option, switch.line, note=note)
    elif groups is not None:
        builder.leave_use(groups, LeftReason.NO_EFFECT, "counts only with --group-query-attention")


def _gate(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--swiglu`: its linear layers have no biases here, and its width is rounded to other
    multiples there.
    """
    switch = uses.get("--swiglu")
    if switch is None:
        return
    builder.put("model.activation", "swiglu", switch.option, switch.line)
    if "--disable-bias-linear" not in uses:
        why = "the original's linear layers have biases, and with swiglu there are none here"
        why += ": give --set model.linear_biases=false for such a model"
        builder.ask_use(switch, why, "model.linear_biases")
    hidden = builder.integer("model.hidden_size")
    if hidden and "model.ffn_hidden_size" not in builder.placed:
        width = int(4 * hidden * 2 / 3 / _GATED_MULTIPLE) * _GATED_MULTIPLE
        note = "the original's default: no --ffn-hidden-size is given"
        builder.put("model.ffn_hidden_size", width, switch.option, switch.line, note=note)


def _query_key_norm(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--qk-layernorm` is a norm of the kind that the blocks have; here it is RMSNorm."""
    switch = uses.get("--qk-layernorm")
    if switch is None:
        return
    if builder.value("model.norm") == "rmsnorm":
        builder.put("model.qk_norm", True, switch.option, switch.line)
        return
    why = "the original's is a LayerNorm without --normalization RMSNorm, and always RMSNorm here"
    builder.ask_use(switch, why, "model.qk_norm")


def _layers_of_both(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """A T5's encoder and decoder, which have as many blocks as each other here."""
    given = [uses[option] for option in _SAME_TWICE if option in uses]
    for use in given:
        before = builder.value("model.layers")
        builder.take_use("model.layers", use, integer)
        after = builder.value("model.layers")
        if before is not None and after != before:
            why = f"encoder and decoder have as many blocks here, not {before} and {after}: give --set model.layers=..."
            builder.ask_use(use, why, "model.layers")


# Megatron's options of interleaved pipeline stages, which say one thing in several ways, into
# [parallel].

_LAYERS = "--num-layers-per-virtual-pipeline-stage"
_PARTS = ("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size")
_ROUND = "--microbatch-group-size-per-virtual-pipeline-stage"
_KEY = "parallel.virtual_stages"
_PARTITION = "parallel.partition"


def place_interleaving(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """Parts of each stage, or layers of each part, of which the parts follow; blocks alone are
    counted, as there.
    """
    given = [uses[option] for option in (_LAYERS, *_PARTS) if option in uses]
    for use in given:
        try:
            parts = _parts(builder, use)
        except ConversionProblem as problem:
            builder.ask_use(use, str(problem), _KEY)
            continue
        builder.put(_KEY, parts, use.option, use.line, use.value_line)
        if parts > 1 and builder.value(_PARTITION) is None:
            builder.put(
                _PARTITION,
                "type:transformer",
                use.option,
                use.line,
                note="every part has as many blocks there",
            )
    if _ROUND in uses:
        _round(builder, uses[_ROUND])


def _parts(builder: Builder, use: OptionUse) -> int:
    """Raises ConversionProblem where the layers cannot be dealt so."""
    count = integer(use.values)
    if count < 1:
        raise ConversionProblem("it must be at least 1")
    if use.option != _LAYERS:
        return count
    stages = builder.integer("parallel.pipeline", 1)
    layers = builder.integer("model.layers")
    if layers < 1 or layers % (stages * count):
        raise ConversionProblem(
            f"{layers} layers on {stages} stages cannot be cut in parts of {count} layers"
        )
    return layers // (stages * count)


def _round(builder: Builder, use: OptionUse) -> None:
    """Micro batches that go through a part before the next part's turn: here as many as there are
    stages.
    """
    stages = builder.integer("parallel.pipeline", 1)
    try:
        is_same = integer(use.values) == stages
    except ConversionProblem as problem:
        builder.ask_use(use, str(problem))
        return
    if builder.integer(_KEY, 1) == 1:
        builder.leave_use(use, LeftReason.NO_EFFECT, "counts only where stages are cut in parts")
        return
    why = (
        "another order of the same passes: rounds are of as many micro batches as there are stages"
    )
    builder.leave_use(use, LeftReason.ELSEWHERE if is_same else LeftReason.NO_COUNTERPART, why)


# Megatron's options of activation recomputation, which say one thing together, into [model].

_GRANULARITIES = one_of(full="full", selective="selective")
_METHODS = one_of(uniform="uniform", block="block")


def place_recompute(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """`--recompute-activations` is short for selective; method and number of layers count with
    `full` alone.
    """
    short = uses.get("--recompute-activations")
    granularity = uses.get("--recompute-granularity")
    if granularity is not None:
        builder.take_use("model.recompute_granularity", granularity, _GRANULARITIES)
    elif short is not None:
        builder.put("model.recompute_granularity", "selective", short.option, short.line)
    found = builder.value("model.recompute_granularity", None)
    switch = granularity or short
    if found is not None and switch is not None:
        builder.put("model.activation_checkpointing", True, switch.option, switch.line)
    _layers(
        builder, uses.get("--recompute-method"), uses.get("--recompute-num-layers"), found == "full"
    )


def _layers(
    builder: Builder, method: OptionUse | None, count: OptionUse | None, is_full: bool
) -> None:
    """`block`: the first layers of each stage, here as many of the whole model. `uniform`: all, in
    groups.
    """
    if not is_full or method is None:
        _leave(
            builder,
            (method, count),
            LeftReason.NO_EFFECT,
            "counts only with granularity full and a method",
        )
        return
    try:
        chosen = _METHODS(method.values)
        if count is not None:
            each = integer(count.values)
        else:
            each = 1
    except ConversionProblem as problem:
        _leave(
            builder,
            (method, count),
            LeftReason.DECISION,
            f"{problem}: give --set model.recompute_blocks=...",
        )
        return
    if chosen == "uniform":
        why = "every block is recomputed, one at a time: other memory, the same numbers"
        _leave(builder, (method, count), LeftReason.ELSEWHERE, why)
        return
    blocks = each * builder.integer("parallel.pipeline", 1)
    blocks = min(blocks, builder.integer("model.layers", blocks))
    note = "the first of each stage there, as many here, dealt evenly over the model"
    use = count or method
    builder.put("model.recompute_blocks", blocks, use.option, use.line, note=note)


def _leave(
    builder: Builder, uses: Iterable[OptionUse | None], reason: LeftReason, why: str
) -> None:
    for use in uses:
        if use is not None:
            builder.leave_use(use, reason, why)


# Places the options of the optimizer: 8-bit Adam, and the variants of LAMB under their old names.


def place_optimizer(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """What `--optimizer`, `--alpha` and `--use-bnb-optimizer` mean together. `optimizer.type` is
    placed already.
    """
    _eight_bits(builder, uses.get("--use-bnb-optimizer"))
    _lamb(builder, uses.get("--optimizer"), uses.get("--alpha"))


def _lamb(builder: Builder, use: OptionUse | None, alpha: OptionUse | None) -> None:
    """The variant that an old name stands for. One of them read `--alpha`."""
    keys: Mapping[str, str] = {}
    if use is not None and builder.value("optimizer.type", "") == "lamb":
        word = card_text(use.values[-1])
        keys = {key: value for key, value in OPTIMIZERS[word].items() if key != "type"}
        for key, value in keys.items():
            builder.put(
                f"optimizer.{key}", value, use.option, use.line, note=f"the original's {word}"
            )
    if alpha is None:
        return
    if keys.get("lamb_variant") == "embedding-lr":
        builder.take_use("optimizer.embedding_alpha", alpha, number)
    else:
        builder.leave_use(alpha, LeftReason.NO_EFFECT, "only the optimizer mylamb3 reads it")


def _eight_bits(builder: Builder, use: OptionUse | None) -> None:
    """`--use-bnb-optimizer`, which replaced whatever Adam was asked for, and the embedding by a
    stable one.
    """
    if use is None:
        return
    builder.put("optimizer.type", "adam8bit", use.option, use.line)
    note = "the original's word embedding then began xavier-uniform"
    builder.put("optimizer.embedding_init", "xavier", use.option, use.line, note=note)
    if not builder.value("model.embedding_layernorm", False):
        note = "came with the original's 8-bit optimizer"
        builder.put("model.embedding_layernorm", True, use.option, use.line, note=note)


# Which family of models the training's program makes, and the options that only such a program
# reads.

_FAMILIES = {"pretrain_gpt.py": "gpt", "pretrain_bert.py": "bert", "pretrain_t5.py": "t5"}
_MASKING = ("bert", "t5")
_OWN_OPTIONS: Mapping[str, tuple[str, Converter, tuple[str, ...]]] = {
    "--mask-prob": ("data.mask_probability", number, _MASKING),
    "--short-seq-prob": ("data.short_sequence_probability", number, _MASKING),
    "--bert-no-binary-head": ("data.binary_head", off, ("bert",)),
    "--decoder-seq-length": ("model.decoder_sequence_length", integer, ("t5",)),
    "--vocab-extra-ids": ("data.extra_ids", integer, ("t5",)),
}


def place_family(builder: Builder, launch: ParsedLaunch, uses: Mapping[str, OptionUse]) -> None:
    """`model.family` where it is not a GPT, and how its samples are masked."""
    program = launch.program.rpartition("/")[2]
    family = _FAMILIES.get(program, "gpt")
    if program and program not in _FAMILIES:
        why = f"is none of {', '.join(_FAMILIES)}: tr11 trains GPT, BERT and T5 models with them"
        builder.ask(program, "", launch.line, why)
    if family != "gpt":
        builder.put("model.family", family, program, launch.line)
    for option, (key, convert, families) in _OWN_OPTIONS.items():
        use = uses.get(option)
        if use is None:
            continue
        if family in families:
            builder.take_use(key, use, convert)
        else:
            builder.leave_use(
                use, LeftReason.NO_EFFECT, f"belongs to other models than {family.upper()}"
            )


_ARGUMENTS = ("${@}", "${*}")
_TOGETHER = frozenset(rule.option for rule in TOGETHER)


def place_training(builder: Builder, launch: ParsedLaunch) -> None:
    """Place every option of the training's command, or tell what becomes of it."""
    uses: dict[str, OptionUse] = {}
    for use in launch.options:
        uses[use.option] = use
        if use.option not in _TOGETHER:
            _place(builder, use)
    for stray in launch.strays:
        if stray.text in _ARGUMENTS:
            why = "stands for the options that are typed behind the script: --set what was meant"
            builder.ask(stray.for_shell(), "", stray.line, why)
        elif stray.text.strip("\\ \t\n"):
            why = "is a word that belongs to no option"
            builder.ask(stray.for_shell(), "", stray.line, why)
    _folders(builder, uses)
    place_data(builder, uses)
    _scale(builder, uses)
    _loss_of_each_token(builder, uses)
    _context_parallel(builder, uses.get("--context-parallel-size"))
    place_family(builder, launch, uses)
    place_model(builder, uses)
    place_optimizer(builder, uses)
    place_recompute(builder, uses)
    place_interleaving(builder, uses)


def _place(builder: Builder, use: OptionUse) -> None:
    rule = RULES.get(use.option)
    if rule is None:
        near = difflib.get_close_matches(use.option, RULES, n=1, cutoff=0.8)
        why = "is not known" + (f"; did it mean {near[0]}?" if near else "")
        builder.ask_use(use, why)
    elif rule.convert is None:
        assert rule.reason is not None, f"{rule.option} has neither a key nor a reason"
        builder.leave_use(use, rule.reason, rule.note)
    else:
        builder.take_use(rule.key, use, rule.convert, rule.note)


# ----------------------------------------------------------------------------- folders
def _folders(builder: Builder, uses: dict[str, OptionUse]) -> None:
    """`--save DIR/checkpoints/VARIANT` gives run.directory and run.variant; `--load` of another
    folder is kept.
    """
    save = uses.get("--save")
    load = uses.get("--load")
    events = uses.get("--tensorboard-dir")
    saved = _path(builder, save, "run.directory")
    loaded = _path(builder, load, "checkpoint.load")
    if saved is None and save is None:
        line = 0
        if load is not None and loaded is not None:
            line = load.line
        why = "is not given, and a run saves"
        builder.ask("--save", "", line=line, why=why, key="run.directory")
    elif saved is not None and save is not None:
        directory, variant = _directory_and_variant(saved)
        builder.put("run.directory", directory, "--save", save.line, save.value_line)
        if variant:
            builder.put("run.variant", variant, "--save", save.line, save.value_line)
        else:
            why = "checkpoints lay in that folder itself: give --set checkpoint.load=FOLDER to go on from them, or none"
            builder.ask("--save", saved, line=save.line, why=why, key="checkpoint.load")
    if load is not None and loaded is not None:
        if loaded == saved or saved is None:
            builder.leave(
                "--load",
                loaded,
                load.line,
                LeftReason.ELSEWHERE,
                "a run resumes from its own directory",
            )
        else:
            builder.put("checkpoint.load", loaded, "--load", load.line, load.value_line)
    if events is not None:
        builder.put("logging.tensorboard", True, "--tensorboard-dir", events.line)


def _path(builder: Builder, use: OptionUse | None, key: str) -> str | None:
    if use is None:
        return None
    try:
        return text(use.values).rstrip("/") or "/"
    except ConversionProblem as problem:
        builder.ask_use(use, str(problem), key)
        return None


def _directory_and_variant(path: str) -> tuple[str, str]:
    """`checkpoints` alone lies in the folder in which the script is started."""
    match = re.fullmatch(
        r"(?:(.*[^/])/+)?checkpoints(?:/+([A-Za-z0-9][A-Za-z0-9._-]{0,99}))?", path, re.ASCII
    )
    if match:
        return (match.group(1) or ".", match.group(2) or "")
    return (path, "")


# ----------------------------------------------------------------------------- loss scale
def _scale(builder: Builder, uses: dict[str, OptionUse]) -> None:
    """Options of the fp16 loss scale. DeepSpeed reads its own file instead, so that with it they
    did nothing.
    """
    deepspeed = "--deepspeed" in uses
    unread = "DeepSpeed reads its own file; the argument changed nothing"
    for option in ("--loss-scale", "--loss-scale-window", "--hysteresis"):
        if deepspeed and option in uses and (key := RULES[option].key) in builder.placed:
            builder.drop(key, unread, LeftReason.NO_EFFECT)
    for option, key, convert in (
        ("--initial-loss-scale", "precision.initial_scale_power", _power),
        ("--min-loss-scale", "precision.min_loss_scale", _least_scale),
    ):
        if option in uses and deepspeed:
            builder.leave_use(uses[option], LeftReason.NO_EFFECT, unread)
        elif option in uses:
            builder.take_use(key, uses[option], convert)


def _power(values: Sequence[Traced]) -> int:
    scale = number(values)
    if scale > 0:
        power = math.log2(scale)
    else:
        power = -1.0
    if power < 0 or not power.is_integer():
        raise ConversionProblem("the first loss scale must be a power of two")
    return int(power)


def _least_scale(values: Sequence[Traced]) -> int:
    text = ""
    if values:
        text = known(values[0])
    if values:
        return integer([Traced.of(text.removesuffix(".0"), values[0].line)])
    return 0


# ----------------------------------------------------------------------------- by their value, or
# beside another
def _loss_of_each_token(builder: Builder, uses: dict[str, OptionUse]) -> None:
    """`--calculate-per-token-loss`: each token weighs the same, not each micro batch, as here."""
    use = uses.get("--calculate-per-token-loss")
    if use is None:
        return
    if "--eod-mask-loss" in uses:
        why = "each micro batch weighs the same here; with masked tokens that is another mean"
        builder.ask_use(use, why)
    else:
        builder.leave_use(use, LeftReason.DROPPED, "with no token masked it is the same mean")


def _context_parallel(builder: Builder, use: OptionUse | None) -> None:
    if use is None:
        return
    try:
        is_one = integer(use.values) == 1
    except ConversionProblem as problem:
        builder.ask_use(use, str(problem))
        return
    if is_one:
        builder.leave_use(use, LeftReason.ELSEWHERE, "a sequence is not cut over ranks")
        return
    why = "a sequence is not cut over ranks here: these ranks become replicas, or parallel.tensor takes them"
    builder.ask_use(use, why)
