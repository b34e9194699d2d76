"""The steps that a log of any trainer holds: `metrics.jsonl`, `main_log.txt`, a Megatron log, a job's output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tr11ops.diagnose.reading import opened
from tr11ops.logs.lines import ATTEMPT_BYTES, START, STEP_BYTES, body
from trainer.contract.logline import StepRecord, parse_step
from trainer.contract.metrics_record import LONGEST_LINE, parse_record

START_WORDS = (b"using world size: ", b"tr11: attempt ")  # in every line that START can match
METRICS_DECIMALS, LOG_DECIMALS = 17, 3  # of a gradient norm


@dataclass(frozen=True)
class LoggedStep:
    """One step of a log: `line` counts from 1, `start` is the attempt or the count of starts that it belongs to.

    `decimals`: with how many the log writes a gradient norm.
    """

    record: StepRecord
    line: int
    start: str
    decimals: int


def logged_steps(path: Path) -> Iterator[LoggedStep]:
    """Every step in the order of the file, one line in memory at a time; a packed file is unpacked.

    Raises OSError; ValueError, one line, where a packed file is damaged.
    """
    with opened(path) as stream:
        first = stream.readline(LONGEST_LINE)
        lines = _numbered(first, stream)
        yield from _metrics(lines) if first.lstrip().startswith(b"{") else _log(lines)


def _numbered(first: bytes, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; what is longer than the longest line comes in pieces of one number."""
    number, line = 1, first
    while line:
        yield number, line
        number += line.endswith(b"\n")
        line = stream.readline(LONGEST_LINE)


def _metrics(lines: Iterator[tuple[int, bytes]]) -> Iterator[LoggedStep]:
    for number, line in lines:
        record = parse_record(line) if line.endswith(b"\n") else None
        step = record.step() if record is not None else None
        if record is not None and step is not None:
            yield LoggedStep(step, number, record.job_id, METRICS_DECIMALS)


def _log(lines: Iterator[tuple[int, bytes]]) -> Iterator[LoggedStep]:
    starts, attempt, before = 0, "", None
    for number, line in lines:
        if any(words in line for words in START_WORDS):
            named = ATTEMPT_BYTES.search(line)
            if named is not None:
                attempt = named[1].decode("utf-8", "replace")
            starts += START.match(body(line.decode("utf-8", "replace"))) is not None
        elif STEP_BYTES.search(line):
            record = parse_step(line.decode("utf-8", "replace"))
            if record is not None and record != before:  # a line that two outputs hold is one step
                yield LoggedStep(record, number, f"{attempt}/{starts}", LOG_DECIMALS)
                before = record
