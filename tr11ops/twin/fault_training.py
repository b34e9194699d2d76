"""Faults that the training itself carries: the stand-in's workers read them from the twin's records
(`stand_in.ailments`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import TwinError
from tr11ops.base.observed import known, observed
from tr11ops.base.tail import tail_lines
from tr11ops.twin.fault_store import FaultStore, InjectedFault
from tr11ops.twin.node_processes import scan
from tr11ops.twin.twin import Twin
from trainer.contract.metrics_record import MetricsRecord, parse_record

FIRST_ITERATION = 7
AHEAD = 5  # iterations, of a run that trains already
TAIL_BYTES = 4096
SLOW_FACTOR = 8.0  # of the seconds of a step
CLOCK_AHEAD_SECONDS = 300.0

Break = Callable[[Twin, FaultStore, InjectedFault], InjectedFault]


def fatal_iteration(run: Path) -> int:
    """An iteration that is still to come: the last one that is well."""
    step = last_step(run)
    return max(FIRST_ITERATION, ((step and step.iteration) or 0) + AHEAD)


def last_step(run: Path) -> MetricsRecord | None:
    """The last step that a run below this folder has logged; None when there is none."""
    for path in run.glob("*-logs/logs/*/metrics.jsonl"):
        lines, _ = known(observed(lambda path=path: tail_lines(path, TAIL_BYTES)), ([], True))  # type: ignore[misc]
        found = (
            record
            for line in reversed(lines)
            if (record := parse_record(line)) is not None and record.is_step
        )
        if step := next(found, None):
            return step
    return None


# ----------------------------------------------------------------------------- what stand-ins do by
# themselves
def keep(**details: float) -> Break:
    """A fault that is all in its record."""

    def record(_twin: Twin, store: FaultStore, fault: InjectedFault) -> InjectedFault:
        return store.write(
            replace(fault, details={name: f"{value:g}" for name, value in details.items()})
        )

    return record


def befall_job(twin: Twin, store: FaultStore, fault: InjectedFault) -> InjectedFault:
    """A fault of the job that runs on the node now: another one there is well. Raises TwinError
    when none trains.
    """
    daemons = scan(twin.folders, [fault.target])[fault.target].daemons
    steps = {
        daemon.title[0]
        for daemon in daemons
        if daemon.title is not None and daemon.title[1].isdecimal()
    }
    if not steps:
        raise TwinError(f"{fault.kind}: no job trains on {fault.target}")
    return store.write(replace(fault, details={"job": max(steps, key=int)}))


def spoil_data(_twin: Twin, store: FaultStore, fault: InjectedFault) -> InjectedFault:
    """From an iteration on that is still to come, whichever launch does it."""
    return store.write(
        replace(fault, details={"iteration": str(fatal_iteration(Path(fault.target)))})
    )


def leave_well(_twin: Twin, _store: FaultStore, fault: InjectedFault) -> str:
    return f"the training on {fault.target} is well again"
