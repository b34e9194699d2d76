"""The trainer's options into the training sections, with what several options say together."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.builder import Builder
from tr11ops.importer.launch import ParsedLaunch
from tr11ops.importer.options import OptionUse, integer, known, number, text
from tr11ops.importer.options_left import TOGETHER
from tr11ops.importer.options_table import RULES
from tr11ops.importer.place_data import place_data
from tr11ops.importer.place_family import place_family
from tr11ops.importer.place_interleaving import place_interleaving
from tr11ops.importer.place_model import place_model
from tr11ops.importer.place_optimizer import place_optimizer
from tr11ops.importer.place_recompute import place_recompute
from tr11ops.importer.results import LeftReason
from tr11ops.importer.traced import Traced

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
            builder.leave(stray.for_shell(), "", stray.line, LeftReason.DECISION, why)
        elif stray.text.strip("\\ \t\n"):
            builder.leave(stray.for_shell(), "", stray.line, LeftReason.DECISION, "is a word that belongs to no option")
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
        builder.leave_use(use, LeftReason.DECISION, why)
    elif rule.convert is None:
        assert rule.reason is not None, f"{rule.option} has neither a key nor a reason"
        builder.leave_use(use, rule.reason, rule.note)
    else:
        builder.take_use(rule.key, use, rule.convert, rule.note)


# ----------------------------------------------------------------------------- folders
def _folders(builder: Builder, uses: dict[str, OptionUse]) -> None:
    """`--save DIR/checkpoints/VARIANT` gives run.directory and run.variant; `--load` of another folder is kept."""
    save, load, events = uses.get("--save"), uses.get("--load"), uses.get("--tensorboard-dir")
    saved = _path(builder, save, "run.directory")
    loaded = _path(builder, load, "checkpoint.load")
    if saved is None and save is None:
        line = load.line if load is not None and loaded is not None else 0
        why = "is not given, and a run saves: give --set run.directory=..."
        builder.leave("--save", "", line, LeftReason.DECISION, why, "run.directory")
    elif saved is not None and save is not None:
        directory, variant = _directory_and_variant(saved)
        builder.put("run.directory", directory, "--save", save.line, save.value_line)
        if variant:
            builder.put("run.variant", variant, "--save", save.line, save.value_line)
        else:
            why = "checkpoints lay in that folder itself: give --set checkpoint.load=FOLDER to go on from them, or none"
            builder.leave("--save", saved, save.line, LeftReason.DECISION, why, "checkpoint.load")
    if load is not None and loaded is not None:
        if loaded == saved or saved is None:
            builder.leave("--load", loaded, load.line, LeftReason.ELSEWHERE, "a run resumes from its own directory")
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
        builder.leave_use(use, LeftReason.DECISION, f"{problem}: give --set {key}=...", key)
        return None


def _directory_and_variant(path: str) -> tuple[str, str]:
    """`checkpoints` alone lies in the folder in which the script is started."""
    match = re.fullmatch(r"(?:(.*[^/])/+)?checkpoints(?:/+([A-Za-z0-9][A-Za-z0-9._-]{0,99}))?", path, re.ASCII)
    return (match.group(1) or ".", match.group(2) or "") if match else (path, "")


# ----------------------------------------------------------------------------- loss scale
def _scale(builder: Builder, uses: dict[str, OptionUse]) -> None:
    """Options of the fp16 loss scale. DeepSpeed reads its own file instead, so that with it they did nothing."""
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
    power = math.log2(scale) if scale > 0 else -1.0
    if power < 0 or not power.is_integer():
        raise ConversionProblem("the first loss scale must be a power of two")
    return int(power)


def _least_scale(values: Sequence[Traced]) -> int:
    text = known(values[0]) if values else ""
    return integer([Traced.of(text.removesuffix(".0"), values[0].line)]) if values else 0


# ----------------------------------------------------------------------------- by their value, or beside another
def _loss_of_each_token(builder: Builder, uses: dict[str, OptionUse]) -> None:
    """`--calculate-per-token-loss`: each token weighs the same, not each micro batch, as here."""
    use = uses.get("--calculate-per-token-loss")
    if use is None:
        return
    if "--eod-mask-loss" in uses:
        why = "each micro batch weighs the same here; with masked tokens that is another mean"
        builder.leave_use(use, LeftReason.DECISION, why)
    else:
        builder.leave_use(use, LeftReason.DROPPED, "with no token masked it is the same mean")


def _context_parallel(builder: Builder, use: OptionUse | None) -> None:
    if use is None:
        return
    try:
        is_one = integer(use.values) == 1
    except ConversionProblem as problem:
        builder.leave_use(use, LeftReason.DECISION, str(problem))
        return
    if is_one:
        builder.leave_use(use, LeftReason.ELSEWHERE, "a sequence is not cut over ranks")
        return
    why = "a sequence is not cut over ranks here: these ranks become replicas, or parallel.tensor takes them"
    builder.leave_use(use, LeftReason.DECISION, why)
