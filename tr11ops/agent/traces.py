"""Reads how far a launch came, and which nodes the faults of earlier ones showed themselves on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.agent.recurrence import GoodUse, LaunchChecks, NodeFault
from tr11ops.base.observed import Unknown, known
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.diagnose.attribution.records import read_objects
from tr11ops.observe.files import read_steps
from tr11ops.rundir.attempts import LaunchRecord
from trainer.contract.paths import RunPaths, label_in, newest_step
from trainer.contract.record import Record


class TrainingProgress(Record):
    """How far a training has come: the highest iteration in its log, and the step that `latest`
    names.
    """

    iteration: int | None
    checkpoint: int | None

    def is_beyond(self, other: TrainingProgress) -> bool:
        """Is there an iteration, or a checkpoint, that was not there at the time of `other`?"""
        return (self.iteration or 0) > (other.iteration or 0) or (self.checkpoint or 0) > (
            other.checkpoint or 0
        )


def read_progress(paths: RunPaths) -> TrainingProgress:
    """The standing now; None for what cannot be read."""
    steps = read_steps(paths)
    if isinstance(steps, Unknown) or not steps:
        logged = None
    else:
        logged = max(step.record.iteration for step in steps)
    return TrainingProgress(logged, newest_step(paths))


def last_iteration_since(paths: RunPaths, job_id: str, moment: float) -> int | None:
    """The last iteration that this attempt logged since `moment`, seconds since the epoch; None
    when it logged none.
    """
    logged = (
        step.record.iteration
        for step in reversed(known(read_steps(paths), ()))
        if step.job_id == job_id and step.time is not None and step.time >= moment
    )
    return next(logged, None)


def _launches(folder: Path) -> list[dict[str, Any]]:
    """The records of an attempt's launches, the last one first."""
    return sorted(
        read_objects(folder / "launches"), key=lambda value: -int(value.get("launch") or 0)
    )


def read_node_faults(folders: Iterable[Path]) -> tuple[NodeFault, ...]:
    """The launches of these attempts' folders whose faults showed themselves on nodes, in the order
    of the folders.
    """
    return tuple(fault for fault in read_faults(folders) if fault.nodes)


def read_launch_checks(folders: Iterable[Path]) -> tuple[LaunchChecks, ...]:
    """What the health checks of the launches in these attempts' folders said, the last launch of a
    folder first.
    """
    found = []
    for folder in folders:
        for value in _launches(folder):
            try:
                record = LaunchRecord.of(value)
            except ValueError:
                continue
            found.append(
                LaunchChecks(
                    record.start,
                    record.failed_checks,
                    passed=record.passed_checks,
                    left_out=record.left_out_checks,
                    is_known=record.checked,
                )
            )
    return tuple(found)


def read_good_use(folders: Iterable[Path]) -> tuple[GoodUse, ...]:
    """On which nodes the launches of these attempts' folders have trained, and for how long."""
    values = (value for folder in folders for value in read_objects(folder / "launches"))
    return tuple(use for value in values if (use := good_use(value)) is not None)


def good_use(record: Mapping[str, Any]) -> GoodUse | None:
    """A launch's record as the good use of its nodes that it is; None where it added no iteration."""
    start, end, reached = record.get("start"), record.get("end"), record.get("iteration_after")
    if (
        not isinstance(start, int | float)
        or not isinstance(end, int | float)
        or not isinstance(reached, int)
    ):
        return None
    if reached <= (record.get("iteration_before") or 0):
        return None
    accused = {*(record.get("blamed") or ()), *(record.get("suspects") or ())}
    nodes = tuple(node for node in map(str, record.get("nodes") or ()) if node not in accused)
    return GoodUse(nodes, start, end - start)


def read_faults(folders: Iterable[Path]) -> tuple[NodeFault, ...]:
    """The launches of these attempts' folders that a fault ended, of whatever kind, in the order of
    the folders.
    """
    return tuple(
        replace(fault, label=label_in(folder))
        for folder in folders
        for value in _launches(folder)
        if (fault := launch_fault(folder.name, value)) is not None
    )


def node_fault(job_id: str, record: Mapping[str, Any]) -> NodeFault | None:
    """A launch's record as the fault of nodes that it is; None where it is none."""
    found = launch_fault(job_id, record)
    if found is not None and found.nodes:
        return found
    return None


def launch_fault(job_id: str, record: Mapping[str, Any]) -> NodeFault | None:
    """A launch's record as a fault; None where it has not ended by one, or someone asked for its
    end.
    """
    blamed, suspects = (tuple(map(str, record.get(name) or ())) for name in ("blamed", "suspects"))
    cause = record.get("cause")
    # older records do not say how far it came
    if not cause or cause == Kind.OPERATOR.value or "reached" not in record:
        return None
    is_node = cause == Kind.NODE.value
    nodes: tuple[str, ...] = ()
    if is_node:
        nodes = blamed or suspects
    elif cause == Kind.SOFTWARE.value:
        nodes = suspects
    reached, began_at = record["reached"], record.get("checkpoint_before")
    return NodeFault(
        job_id,
        int(record.get("launch") or 0),
        fault=str(record.get("fault") or ""),
        reached=reached if isinstance(reached, int) else None,
        nodes=nodes,
        summary=str(record.get("summary") or ""),
        began_at=began_at if isinstance(began_at, int) else None,
        is_suspicion=is_node and not blamed,
        start=float(record.get("start") or 0.0),
        may_be=(blamed or suspects) if cause in {Kind.NODE.value, Kind.UNKNOWN.value} else (),
    )
