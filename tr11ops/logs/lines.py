"""What one line of a training's log is: its severity, its step, its time. Pure; reads old
trainings' lines too.
"""

from __future__ import annotations

import datetime
import math
import re
import textwrap
from collections.abc import Mapping

from tr11ops.diagnose.lines import CONTROL, ESCAPE, plain as without_escapes
from tr11ops.dialects.reading import StepNumbers, step_of

LEVELS: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
INFO = 20
WARNING = 30
ERROR = 40
CRITICAL = 50
INDENT = "    "  # of the lines that a long one is folded into
NARROWEST = 20  # characters; less is not folded for

PREFIX = re.compile(r"^(?:\[default\d+\]:|\s*\d+: )")  # torchrun's, or srun's --label
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m\Z")

# It begins with a plain word, which makes it ninety times as fast.
STAMP_BYTES = re.compile(rb"20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
ATTEMPT = re.compile(r"^tr11: attempt (\S+) launch (\d+) on ")
_OF_ARRAY = re.compile(r"^(tr11: attempt )\S+( launch \d+ on .*) \((\d+_\d+)\)$")
ATTEMPT_WORDS = b"tr11: attempt "
ATTEMPT_BYTES = re.compile(rb"tr11: attempt (\S{1,200}) launch \d+ on ")
START = re.compile(r"^using world size: \d+|^tr11: attempt \S+ launch \d+ on ")
PULSE = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] (?:PULSE: |\*\*\*ALERT)")
TRACEBACK = "Traceback (most recent call last):"

_LOSS = frozenset({"lm_loss"})
_LABEL = re.compile(r"(?:^|[\[\s|:(])(CRITICAL|FATAL|ERROR|WARNING|WARN|INFO|DEBUG)(?=[\]\s|:)]|$)")
_LABEL_LEVEL = {
    "CRITICAL": CRITICAL,
    "FATAL": CRITICAL,
    "ERROR": ERROR,
    "WARNING": WARNING,
    "WARN": WARNING,
    "INFO": INFO,
    "DEBUG": 10,
}
_CRITICAL = re.compile(
    r"CUDA error|cudaError|uncorrectable ECC|ncclSystemError|Segmentation fault|terminate called after|"
    r"\bBus error\b|\*\*\*ALERT|^tr11: launch \d+ failed|Unable to find latest file|could not find the metadata file"
)
_ERROR = re.compile(
    r"^(?:srun|slurmstepd|slurmd)[^:]*: error:|^[\w.]*(?:Error|Exception|Interrupt)(?::|$)|^tr11: worker \d+ .*failed|"
    r"unhandled system error|No space left on device|[Dd]isk quota exceeded|"
    r"value from checkpoint .* is not equal to the input argument|is not divisible by micro-batch-size"
)
_WARNING = re.compile(
    r"\w*Warning: |OVERFLOW! Rank \d+ Skipping step|Connection refused|compute capability mismatch"
)


def plain(line: str) -> str:
    """The line without escapes and other characters that a terminal obeys; tabs stay."""
    return without_escapes(_last_overprint(line))


def task_of(line: str) -> str:
    """The task of an array that a launch's first line tells of, as people type it ("70_3"); "" for
    any other line.
    """
    match = _OF_ARRAY.match(line)
    if match is None:
        return ""
    return match[3]


def as_typed(line: str) -> str:
    """A launch's first line with its task in place of the scheduler's own number; any other line as
    it is.
    """
    match = _OF_ARRAY.match(line)
    if match is None:
        return line
    return f"{match[1]}{match[3]}{match[2]}"


def folded(line: str, width: int) -> str:
    """The line in as many as it takes, broken between words, each but the first indented; one with
    colours as it is.
    """
    if len(line) <= width or width < NARROWEST or "\x1b" in line:
        return line
    parts = textwrap.wrap(
        line,
        width,
        subsequent_indent=INDENT,
        replace_whitespace=False,
        break_on_hyphens=False,
        tabsize=4,
    )
    return "\n".join(parts) or line


def coloured(line: str) -> str:
    """As `plain`, but colours stay, and are ended."""
    kept = ESCAPE.sub(
        lambda escape: escape[0] if _COLOUR.match(escape[0]) else "", _last_overprint(line)
    )
    if "\x1b" not in kept:
        return CONTROL.sub("", kept)
    parts = re.split(r"(\x1b\[[0-9;:]*m)", kept)
    return (
        "".join(part if index % 2 else CONTROL.sub("", part) for index, part in enumerate(parts))
        + "\x1b[0m"
    )


def _last_overprint(line: str) -> str:
    """What a terminal shows of a line that was overprinted by carriage returns, as progress bars
    do.
    """
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


def body(line: str) -> str:
    """The line without its launcher's prefix."""
    match = PREFIX.match(line)
    if match:
        return line[match.end() :]
    return line


def _level_of_step(step: StepNumbers) -> int:
    """A step whose loss is no finite number is a warning."""
    if step.loss is None:
        is_sound = not step.lacks_loss
    else:
        is_sound = math.isfinite(step.loss)
    if is_sound:
        return INFO
    return WARNING


def severity(line: str) -> int:
    """The level of one plain line: its own label, or what it is known to mean; INFO for all else."""
    text = body(line)
    step = step_of(text, None, _LOSS)
    if step is not None and step.is_whole and not step.dialect.guess:
        return _level_of_step(step)
    if _CRITICAL.search(text):
        return CRITICAL
    label = _LABEL.search(text)
    if label:
        found = _LABEL_LEVEL[label[1]]
    else:
        found = INFO
    if step is not None and step.is_whole:
        found = max(found, _level_of_step(step))
    if _ERROR.search(text):
        return max(found, ERROR)
    if found < WARNING and _WARNING.search(text):
        return max(found, WARNING)
    return found


def moment(stamp: bytes) -> float | None:
    """Seconds since the epoch of a stamp in local time; None for one that no calendar has."""
    try:
        return datetime.datetime.fromisoformat(stamp.decode()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
