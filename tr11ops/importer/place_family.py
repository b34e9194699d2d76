"""Which family of models the training's program makes, and the options that only such a program reads."""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.importer.builder import Builder
from tr11ops.importer.launch import ParsedLaunch
from tr11ops.importer.options import Converter, OptionUse, number, off
from tr11ops.importer.results import LeftReason

_FAMILIES = {"pretrain_gpt.py": "gpt", "pretrain_bert.py": "bert"}
_OF_BERT: Mapping[str, tuple[str, Converter]] = {
    "--mask-prob": ("data.mask_probability", number),
    "--short-seq-prob": ("data.short_sequence_probability", number),
    "--bert-no-binary-head": ("data.binary_head", off),
}


def place_family(builder: Builder, launch: ParsedLaunch, uses: Mapping[str, OptionUse]) -> None:
    """`model.family` where it is not a GPT, and how its samples are masked."""
    program = launch.program.rpartition("/")[2]
    family = _FAMILIES.get(program, "gpt")
    if program and program not in _FAMILIES:
        why = f"is none of {', '.join(_FAMILIES)}: tr11 trains GPT and BERT models with them"
        builder.leave(program, "", launch.line, LeftReason.DECISION, why)
    if family != "gpt":
        builder.put("model.family", family, program, launch.line)
    for option, (key, convert) in _OF_BERT.items():
        use = uses.get(option)
        if use is None:
            continue
        if family == "bert":
            builder.take(key, use.values, convert, use.option, use.line)
        else:
            why = "belongs to other models than GPT"
            builder.leave(use.option, use.text, use.line, LeftReason.NO_EFFECT, why)
