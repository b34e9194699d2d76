"""Passing over whole blocks of a log that hold no wanted line: asked of a block before it is cut into lines."""

from __future__ import annotations

import re
from collections.abc import Callable

from tr11ops.logs.line_filter import LineQuery
from tr11ops.logs.lines import INFO

# Every line that `lines.severity` finds worse than INFO holds one of these words, or is a step without a loss.
SEVERE_WORDS = (
    b"WARN", b"ERROR", b"CRITICAL", b"FATAL", b"Error", b"Exception", b"Interrupt", b"Warning: ", b"error:", b"failed",
    b"CUDA error", b"Segmentation", b"terminate called", b"Bus error", b"***ALERT", b"Unable to find latest",
    b"could not find the metadata", b"OVERFLOW!", b"Connection refused", b"No space left", b"quota exceeded",
    b"compute capability", b"is not equal to", b"is not divisible", b"uncorrectable ECC", b"Traceback",
    b"unhandled system error",
)  # fmt: skip
# Each begins with a plain word, which is sought first. What is no finite loss, in any dialect of `dialects/steps.toml`.
_NO_NUMBER = rb"[^\s\d,|]{0,24}\s{0,8}['\"]?(?:np\.float\d+\(|tensor\()?[-+]?(?:[nN][aA][nN]|[iI][nN][fF])"
_WITHOUT_LOSS = (
    re.compile(rb"consumed samples(?![^\n]*\blm loss: *[-+]?\d)"),
    re.compile(rb"elapsed time per iteration(?![^\n]*\blm loss: *[-+]?\d)"),
    re.compile(rb"loss" + _NO_NUMBER),
    re.compile(rb"Loss" + _NO_NUMBER),
    re.compile(rb"LOSS" + _NO_NUMBER),
)
# What looks around itself, or does not go back, may fail in a block where it matches in a line of it.
_LOOKS_AROUND = re.compile(r"\\[AZBb]|\(\?(?:[!>=(]|<[!=])|[*+?}]\+")


def may_hold(wanted: LineQuery) -> Callable[[bytes], bool] | None:
    """Whether a block of whole lines may hold a wanted line; None where every block has to be looked at."""
    if wanted.iterations is not None or wanted.attempt is not None:
        return None
    is_severe = _may_be_severe if wanted.level is not None and wanted.level > INFO else None
    matches = None if wanted.pattern is None else _may_match(wanted.pattern)
    if is_severe is None or matches is None:
        return is_severe or matches
    severe, match = is_severe, matches
    return lambda block: match(block) and severe(block)


def _may_be_severe(block: bytes) -> bool:
    return any(word in block for word in SEVERE_WORDS) or any(pattern.search(block) for pattern in _WITHOUT_LOSS)


def _may_match(pattern: re.Pattern[str]) -> Callable[[bytes], bool] | None:
    if _LOOKS_AROUND.search(pattern.pattern):
        return None
    several = re.compile(pattern.pattern, pattern.flags | re.MULTILINE)

    def match(block: bytes) -> bool:
        if b"\x1b" in block or b"\r" in block or b"\x00" in block:
            return True  # what is searched is the line without its escapes
        return several.search(block.decode("utf-8", "replace")) is not None

    return match
