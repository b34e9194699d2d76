"""Looks into a log of any length at a few places: the best throughput that a run ever kept up, for little reading."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from tr11ops.base.observed import Observed, observed
from tr11ops.dialects.reading import step_record
from trainer.contract.metrics_record import parse_record
from trainer.contract.paths import RunPaths
from trainer.contract.state_file import descriptor_of

PLACES = 24
PLACE_BYTES = 12 << 10  # some 20 records of metrics.jsonl, some 30 lines of main_log.txt
LEAST_RECORDS = 5
RECORDS = 10  # a speed that the run kept up; longer, and what has been slow for as long as it was quick hides the best

Rates = tuple[float, float]  # TFLOPs of a worker, samples a second


def best_rates(paths: RunPaths) -> Observed[Rates | None]:
    """The highest medians of a few consecutive steps, at places spread over the whole log; None where there is no step.

    0 stands for a rate that was not logged. Reads at most `PLACES * PLACE_BYTES` bytes, whatever the log's size.
    """

    def read() -> Rates | None:
        for path, parse in ((paths.metrics, _of_metrics), (paths.main_log, _of_log)):
            found = list(_medians(path, parse))
            if found:
                return max(tflops for tflops, _ in found), max(samples for _, samples in found)
        return None

    return observed(read)


def _medians(path: Path, parse: Callable[[str], Rates | None]) -> Iterator[Rates]:
    try:
        descriptor = descriptor_of(path)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(descriptor).st_size
        places = 1 if size <= PLACE_BYTES else min(PLACES, -(-size // PLACE_BYTES))
        for place in range(places):
            start = 0 if places == 1 else (size - PLACE_BYTES) * place // (places - 1)
            text = os.pread(descriptor, PLACE_BYTES, start).decode("utf-8", errors="replace")
            lines = text.split("\n")[0 if start == 0 else 1 : -1]
            rates = [found for line in lines if (found := parse(line)) is not None]
            for first in range(0, len(rates), RECORDS):
                kept = rates[first : first + RECORDS]
                if len(kept) >= LEAST_RECORDS:
                    yield median(tflops for tflops, _ in kept), median(samples for _, samples in kept)
    finally:
        os.close(descriptor)


def _of_metrics(line: str) -> Rates | None:
    record = parse_record(line)
    if record is None or not record.is_step:
        return None
    return _positive(record.number("tflops")), _positive(record.number("samples_per_second"))


def _of_log(line: str) -> Rates | None:
    record = step_record(line) if "iteration" in line else None
    return None if record is None else (_positive(record.tflops), _positive(record.samples_per_second))


def _positive(value: float) -> float:
    return max(0.0, value) if math.isfinite(value) else 0.0
