"""The steps that a log of any trainer holds: `metrics.jsonl`, `main_log.txt`, a log of any dialect,
a job's output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tr11ops.diagnose.reading import opened
from tr11ops.dialects.reading import StepReader, record_of
from tr11ops.logs.lines import ATTEMPT_BYTES, START, body
from trainer.contract.metrics_record import LONGEST_LINE, MeasuredStep, parse_record
from trainer.contract.record import Record

START_WORDS = (b"using world size: ", b"tr11: attempt ")  # in every line that START can match
WRITERS = 64  # steps back to which another output may be late
METRICS_DECIMALS, LOG_DECIMALS = 17, 3  # of a gradient norm


class LoggedStep(Record):
    """One step of a log: `line` counts from 1, `start` is the attempt or the count of starts that
    it belongs to.

    `decimals`: with how many the log writes a gradient norm.
    """

    record: MeasuredStep
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
        yield from _metrics(lines) if _is_metrics(first) else _log(lines)


def _is_metrics(line: bytes) -> bool:
    """Whether a file that begins with this line is a `metrics.jsonl`, and no other trainer's log of
    JSON lines.
    """
    record = None
    if line.lstrip().startswith(b"{"):
        record = parse_record(line)
    return record is not None and not record.values.keys().isdisjoint({"kind", "iteration"})


def _numbered(first: bytes, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; what is longer than the longest line comes in pieces of one number."""
    number, line = 1, first
    while line:
        yield number, line
        number += line.endswith(b"\n")
        line = stream.readline(LONGEST_LINE)


def _metrics(lines: Iterator[tuple[int, bytes]]) -> Iterator[LoggedStep]:
    for number, line in lines:
        record = None
        if line.endswith(b"\n"):
            record = parse_record(line)
        step = None
        if record is not None:
            step = record.step()
        if record is not None and step is not None:
            yield LoggedStep(step, number, record.job_id, METRICS_DECIMALS)


def _log(lines: Iterator[tuple[int, bytes]]) -> Iterator[LoggedStep]:
    """The last line of a step counts: a bar is drawn again. Later ones of other outputs or ranks
    are the same step.
    """
    waiting: LoggedStep | None = None
    before: deque[tuple[str, int, float | None]] = deque(maxlen=WRITERS)
    for step in _log_lines(lines):
        key = (step.start, step.record.iteration, step.record.lm_loss)
        if key in before:
            continue
        before.append(key)
        if waiting is not None and (waiting.start, waiting.record.iteration) != key[:2]:
            yield waiting
        waiting = step
    if waiting is not None:
        yield waiting


def _log_lines(lines: Iterator[tuple[int, bytes]]) -> Iterator[LoggedStep]:
    starts, attempt, reader = 0, "", StepReader()
    for number, line in lines:
        if any(words in line for words in START_WORDS):
            named = ATTEMPT_BYTES.search(line)
            if named is not None:
                attempt = named[1].decode("utf-8", "replace")
            starts += START.match(body(line.decode("utf-8", "replace"))) is not None
        elif reader.takes(line):
            text = line.decode("utf-8", "replace")
            for found in reader.feed(text):
                record = record_of(found, text)
                if record is not None and (found.loss is not None or found.lacks_loss):
                    yield LoggedStep(record, number, f"{attempt}/{starts}", LOG_DECIMALS)
