"""What is read and with which tokenizer: options that say it together, into [data] and [tokenizer]."""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.options import Builder, OptionUse, card_text, number, text, unquoted, words_of
from tr11ops.importer.results import LeftReason

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
        builder.leave_use(use, LeftReason.DECISION, f"{problem}: give --set {key}=...", key)
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
    builder.leave_use(use, LeftReason.DECISION, why, "tokenizer.path")
