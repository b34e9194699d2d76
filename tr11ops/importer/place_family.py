"""Which family of models the training's program makes, and the options that only such a program reads."""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.importer.builder import Builder
from tr11ops.importer.launch import ParsedLaunch
from tr11ops.importer.options import Converter, OptionUse, integer, number, off
from tr11ops.importer.results import LeftReason

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
        builder.leave(program, "", launch.line, LeftReason.DECISION, why)
    if family != "gpt":
        builder.put("model.family", family, program, launch.line)
    for option, (key, convert, families) in _OWN_OPTIONS.items():
        use = uses.get(option)
        if use is None:
            continue
        if family in families:
            builder.take_use(key, use, convert)
        else:
            builder.leave_use(use, LeftReason.NO_EFFECT, f"belongs to other models than {family.upper()}")
