"""A fault that the training itself carries: one rank dies at the same iteration of every launch, wherever it runs."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from tr11ops.base.observed import known, observed
from tr11ops.base.tail import tail_lines
from tr11ops.twin.node_processes import scan
from tr11ops.twin.plan import TwinFolders
from tr11ops.twin.processes import ProcessRecord
from trainer.contract.metrics_record import MetricsRecord, parse_record

SIGNAL = signal.SIGSEGV
RANK = 1
FIRST_ITERATION = 7
AHEAD = 5  # iterations, of a run that trains already
LOOK_SECONDS = 0.02
TAIL_BYTES = 4096


class BadSample:
    """The workers that reach the iteration: `look` finds those that have to die now, each once."""

    def __init__(self, folders: TwinFolders, nodes: Iterable[str], run: Path, iteration: int) -> None:
        self._folders = folders
        self._nodes = tuple(nodes)
        self._run = run
        self._iteration = iteration
        self._seen = last_step(run)

    def look(self) -> list[ProcessRecord]:
        step = last_step(self._run)
        if step is None or step == self._seen or step.iteration != self._iteration:
            return []
        self._seen = step
        workers = [worker for node in scan(self._folders, self._nodes).values() for worker in node.workers]
        rank = min(RANK, max((worker.rank or 0 for worker in workers), default=0))
        return [worker.record for worker in workers if worker.rank == rank]


def fatal_iteration(run: Path) -> int:
    """The iteration after which the rank will die: one that is still to come."""
    step = last_step(run)
    return max(FIRST_ITERATION, ((step and step.iteration) or 0) + AHEAD)


def last_step(run: Path) -> MetricsRecord | None:
    """The last step that a run below this folder has logged; None when there is none."""
    for path in run.glob("*-logs/logs/*/metrics.jsonl"):
        lines, _ = known(observed(lambda path=path: tail_lines(path, TAIL_BYTES)), ([], True))  # type: ignore[misc]
        found = (record for line in reversed(lines) if (record := parse_record(line)) is not None and record.is_step)
        if step := next(found, None):
            return step
    return None
