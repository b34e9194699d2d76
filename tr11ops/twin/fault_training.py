"""Faults that the training itself carries: a rank that dies at one iteration of every launch, and what stand-ins do.

The latter are read from the twin's records by the stand-in's workers themselves (`stand_in.ailments`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from tr11ops.base.observed import known, observed
from tr11ops.base.tail import tail_lines
from tr11ops.twin.fault_store import FaultStore, InjectedFault
from tr11ops.twin.node_processes import scan
from tr11ops.twin.plan import TwinError, TwinFolders
from tr11ops.twin.processes import ProcessRecord
from tr11ops.twin.twin import Twin
from trainer.contract.metrics_record import MetricsRecord, parse_record

SIGNAL = signal.SIGSEGV
RANK = 1
FIRST_ITERATION = 7
AHEAD = 5  # iterations, of a run that trains already
LOOK_SECONDS = 0.02
TAIL_BYTES = 4096
SLOW_FACTOR = 8.0  # of the seconds of a step
CLOCK_AHEAD_SECONDS = 300.0

Break = Callable[[Twin, FaultStore, InjectedFault], InjectedFault]


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


# ----------------------------------------------------------------------------- what stand-ins do by themselves
def keep(**details: float) -> Break:
    """A fault that is all in its record."""

    def record(_twin: Twin, store: FaultStore, fault: InjectedFault) -> InjectedFault:
        return store.write(replace(fault, details={name: f"{value:g}" for name, value in details.items()}))

    return record


def befall_job(twin: Twin, store: FaultStore, fault: InjectedFault) -> InjectedFault:
    """A fault of the job that runs on the node now: another one there is well. Raises TwinError when none trains."""
    daemons = scan(twin.folders, [fault.target])[fault.target].daemons
    steps = {daemon.title[0] for daemon in daemons if daemon.title is not None and daemon.title[1].isdecimal()}
    if not steps:
        raise TwinError(f"{fault.kind}: no job trains on {fault.target}")
    return store.write(replace(fault, details={"job": max(steps, key=int)}))


def spoil_data(_twin: Twin, store: FaultStore, fault: InjectedFault) -> InjectedFault:
    """From an iteration on that is still to come, whichever launch does it."""
    return store.write(replace(fault, details={"iteration": str(fatal_iteration(Path(fault.target)))}))


def leave_well(_twin: Twin, _store: FaultStore, fault: InjectedFault) -> str:
    return f"the training on {fault.target} is well again"
