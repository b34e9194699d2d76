"""Places the options of the optimizer: 8-bit Adam, and the variants of LAMB under their old names."""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.importer.builder import Builder
from tr11ops.importer.options import OptionUse, card_text, number
from tr11ops.importer.options_table import OPTIMIZERS
from tr11ops.importer.results import LeftReason


def place_optimizer(builder: Builder, uses: Mapping[str, OptionUse]) -> None:
    """What `--optimizer`, `--alpha` and `--use-bnb-optimizer` mean together. `optimizer.type` is placed already."""
    _eight_bits(builder, uses.get("--use-bnb-optimizer"))
    _lamb(builder, uses.get("--optimizer"), uses.get("--alpha"))


def _lamb(builder: Builder, use: OptionUse | None, alpha: OptionUse | None) -> None:
    """The variant that an old name stands for. One of them read `--alpha`."""
    keys: Mapping[str, str] = {}
    if use is not None and builder.value("optimizer.type", "") == "lamb":
        word = card_text(use.values[-1])
        keys = {key: value for key, value in OPTIMIZERS[word].items() if key != "type"}
        for key, value in keys.items():
            builder.put(f"optimizer.{key}", value, use.option, use.line, note=f"the original's {word}")
    if alpha is None:
        return
    if keys.get("lamb_variant") == "embedding-lr":
        builder.take_use("optimizer.embedding_alpha", alpha, number)
    else:
        builder.leave_use(alpha, LeftReason.NO_EFFECT, "only the optimizer mylamb3 reads it")


def _eight_bits(builder: Builder, use: OptionUse | None) -> None:
    """`--use-bnb-optimizer`, which replaced whatever Adam was asked for, and the embedding by a stable one."""
    if use is None:
        return
    builder.put("optimizer.type", "adam8bit", use.option, use.line)
    note = "the original's word embedding then began xavier-uniform"
    builder.put("optimizer.embedding_init", "xavier", use.option, use.line, note=note)
    if not builder.value("model.embedding_layernorm", False):
        note = "came with the original's 8-bit optimizer"
        builder.put("model.embedding_layernorm", True, use.option, use.line, note=note)
