"""What a run's own records say of its speed: seconds of a step, its longest save and evaluation,
its shortest start.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from tr11ops.base.tail import tail_lines
from tr11ops.observe.files import read_details
from tr11ops.runcard.speed import RunHistory
from tr11ops.rundir.step_time import usual_step_seconds
from trainer.contract.metrics_record import STEP, VALIDATION, MetricsRecord, parse_record
from trainer.contract.paths import RunPaths

STARTS_LOOKED_AT = 10  # of attempts, the newest
TAIL_BYTES = 4 << 20  # some weeks of the largest run's log, whose steps take minutes
_SAVE = re.compile(r"time \(ms\) \| save-checkpoint: (?P<milliseconds>\d+(?:\.\d+)?)")


def read_history(paths: RunPaths) -> RunHistory:
    """Read the ends of both logs; what is not there was not measured. Raises OSError as the file
    system does.
    """
    saves = [
        float(match["milliseconds"]) / 1000
        for line in _tail(paths.main_log)
        if (match := _SAVE.search(line))
    ]
    records = [
        record for line in _tail(paths.metrics) if (record := parse_record(line)) is not None
    ]
    steps = [record for record in records if record.is_step]
    return RunHistory(
        step=usual_step_seconds(record.number("seconds_per_iteration") for record in steps),
        step_iteration=steps[-1].iteration if steps else None,
        save=max(saves, default=None),
        evaluation=_longest_evaluation(records),
        start=_shortest_start(paths, steps),
    )


def _shortest_start(paths: RunPaths, steps: list[MetricsRecord]) -> float | None:
    """From the begin of an attempt to the end of its first step, of the newest attempts whose first
    step is there.
    """
    firsts = [record for before, record in pairwise(steps) if record.job_id != before.job_id][
        -STARTS_LOOKED_AT:
    ]
    if not firsts and steps and steps[0].iteration == 1:
        firsts = steps[:1]
    taken = []
    for record in firsts:
        began = read_details(paths.attempt(record.job_id) / "attempt.json").get("start")
        if isinstance(began, float) and record.time is not None and record.time > began:
            taken.append(record.time - began)
    return min(taken, default=None)


def _longest_evaluation(records: list[MetricsRecord]) -> float | None:
    """From the record of a step to the last of the validation records that follow it at once, in
    the same job.

    A save comes before the evaluation; where it does not run beside the training, it is counted in.
    """
    longest: float | None = None
    began: float | None = None
    for before, record in pairwise(records):
        if record.kind != VALIDATION or record.job_id != before.job_id:
            continue
        if before.kind != VALIDATION:
            began = before.time if before.kind == STEP else None
        if began is not None and record.time is not None:
            longest = max(longest or 0.0, record.time - began)
    return longest


def _tail(path: Path) -> list[str]:
    try:
        return tail_lines(path, TAIL_BYTES)[0]
    except FileNotFoundError:
        return []
