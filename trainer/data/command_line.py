"""What the commands of `python -m trainer.data` share."""

from __future__ import annotations

import argparse
import re
from typing import Any

from trainer.contract.errors import DataUsageError

Commands = Any  # argparse's sub-parsers, whose type is private


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def count(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} must not be negative")
    return value


def inclusive_range(text: str) -> tuple[int, int]:
    """FIRST-LAST, both ends included. Raises UsageError."""
    match = re.fullmatch(r"(\d+)-(\d+)", text, re.ASCII)
    if match is None or int(match.group(1)) > int(match.group(2)):
        raise DataUsageError(f"{text!r} is not a range: write FIRST-LAST, both ends included, such as 0-15")
    return int(match.group(1)), int(match.group(2))
