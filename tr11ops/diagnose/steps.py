"""Lines that show that a training goes on: its steps, of any trainer's form. Pure."""

from __future__ import annotations

import math
import re

from tr11ops.diagnose.sighting import TrainingStep

# Words that lines of steps hold, the surest first; and how such a line is told from others with the same word.
PROGRESS_WORDS = (b"consumed samples", b"loss", b"it/s", b"s/it", b", skipped=")
_MEGATRON = re.compile(r"\biteration\s+(\d{1,15})/\s*(\d{1,15}) \|")
_OTHER = re.compile(
    r"(?:\b(?:iter(?:ation)?|step|global_step|Step|Iter)s?['\"]?\s*[:=#/ ]\s*(\d{1,12})\b.*\bloss)"
    r"|\bstep=(?P<deepspeed>\d{1,12}), skipped=|\{'loss': "
    r"|\|\s*train(?:_inner)?\s*\|.*\bloss[ =].*\bnum_updates[ =](\d{1,12})\b"
    r"|\b(\d{1,12})/\d{1,12} \[[\d:]+<[^\]]*(?:it/s|s/it)",
    re.IGNORECASE,
)
_NO_STEP = re.compile(r"loss scale|valid(?:ation)? loss|test loss|\bError\b|Exception|OVERFLOW", re.IGNORECASE)
_LOSS = re.compile(r"\b(?:lm )?loss['\"]?(?:\s*[:=]\s*|\s+)([-+]?(?:\d[.\d]*(?:[Ee][-+]?\d+)?|nan|inf))", re.IGNORECASE)
_LM_LOSS = re.compile(r"\blm loss: *([-+]?(?:\d[.\d]*(?:[Ee][-+]?\d+)?|nan|inf))", re.IGNORECASE)
_NORM = re.compile(r"\bgrad[_ ]norm['\"]?\s*[:=]\s*([-+]?(?:\d[.\d]*(?:[Ee][-+]?\d+)?|nan|inf))", re.IGNORECASE)
_TFLOPS = re.compile(r"\bTFLOPs: ([\d.]+)")


def step_of(text: str) -> TrainingStep | None:
    """The step that a line tells of; None for any other line, or one that was cut."""
    megatron = _MEGATRON.search(text)
    if megatron:
        if "consumed samples" not in text:
            return None
        loss = _LM_LOSS.search(text)
        return TrainingStep(
            int(megatron[1]),
            _number(loss),
            grad_norm=_number(_NORM.search(text)),
            tflops=_number(_TFLOPS.search(text)),
            is_whole=text.rstrip().endswith("|"),
        )
    other = _OTHER.search(text)
    if other is None or _NO_STEP.search(text):
        return None
    number = next((group for group in other.groups() if group), None)
    return TrainingStep(
        int(number) if number else None, _number(_LOSS.search(text)), grad_norm=_number(_NORM.search(text))
    )


def _number(match: re.Match[str] | None) -> float | None:
    if match is None:
        return None
    try:
        return float(match[1])
    except ValueError:
        return math.nan
