"""Reads how far a launch came, and which nodes the faults of earlier ones showed themselves on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tr11ops.agent.recurrence import NodeFault
from tr11ops.base.observed import known, observed
from tr11ops.diagnose.attribution.evidence import Awaited, Kind
from tr11ops.diagnose.attribution.records import read_objects
from tr11ops.diagnose.stacks.records import look_at_records
from tr11ops.observe.files import read_steps
from tr11ops.runcard.save_interval import FaultRecord
from tr11ops.rundir.attempts import LaunchRecord, read_kept_stacks
from trainer.contract.paths import RunPaths, label_in


def logged_iteration(paths: RunPaths) -> int | None:
    """The highest iteration in the training's log; None where none can be read."""
    steps = known(read_steps(paths), ())
    return max((step.record.iteration for step in steps), default=None)


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


def read_awaited(
    paths: RunPaths, job_id: str, launch: LaunchRecord, ranks: Mapping[int, str]
) -> tuple[Awaited, ...]:
    """Whom the ranks of a launch waited for when it hung: by their stacks, where someone looked, and
    by the flight recorder. What was seen before the last iteration is of no hang that ended it.
    `ranks`: node by global rank.
    """
    found = []
    kept = known(observed(read_kept_stacks, paths, job_id), None)
    if kept is not None and kept.nodes and kept.time >= launch.start:
        found.append((kept.time, Awaited(kept.nodes, kept.sentence)))
    look = look_at_records(paths.flight_records(job_id), launch.launch)
    finding = look.finding
    if finding is not None and finding.waiting and look.time is not None:
        nodes = {ranks.get(rank, f"rank {rank}") for rank in finding.ranks}
        said = Awaited(tuple(sorted(nodes)), finding.sentence)
        found += [(look.time, said)] if nodes else []
    return tuple(
        word for moment, word in found if last_iteration_since(paths, job_id, moment) is None
    )


def read_launches(folders: Iterable[Path]) -> tuple[LaunchRecord, ...]:
    """The launches in these attempts' folders, the last one of a folder first; what is no record is
    left out.
    """
    return tuple(launch for folder in folders for launch in _launches(folder))


def _launches(folder: Path) -> list[LaunchRecord]:
    found = []
    for value in read_objects(folder / "launches"):
        with suppress(ValueError):
            found.append(LaunchRecord.of(value))
    return sorted(found, key=lambda launch: -launch.launch)


def met_faults(launches: Iterable[LaunchRecord], now: float) -> FaultRecord:
    """What launches have met that are over: a fault counts where the launch had trained, and so lost
    work. One that no one saw end died with its batch script's node.
    """
    seconds, faults = 0.0, []
    for launch in launches:
        end = launch.end or launch.start
        seconds += end - launch.start
        is_fault = launch.end is None or launch.cause not in {"", Kind.OPERATOR}
        if is_fault and (launch.end is None or launch.reached is not None):
            faults.append(end)
    return FaultRecord(seconds, tuple(moment for moment in faults if moment <= now))


def read_faults(folders: Iterable[Path]) -> tuple[NodeFault, ...]:
    """The launches in these attempts' folders that a fault ended, of whatever kind, in the order of
    the folders.
    """
    return tuple(
        NodeFault.of(folder.name, launch, label_in(folder))
        for folder in folders
        for launch in _launches(folder)
        if launch.cause not in {"", Kind.OPERATOR}
    )
