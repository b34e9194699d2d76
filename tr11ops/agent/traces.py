"""Reads how far a launch came, and which nodes the faults of earlier ones showed themselves on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tr11ops.agent.recurrence import NodeFault
from tr11ops.base.observed import known, observed
from tr11ops.diagnose.attribution.evidence import Awaited, Kind
from tr11ops.diagnose.stacks.records import look_at_records
from tr11ops.launch.margins import launches_in
from tr11ops.observe.files import read_steps
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


def read_faults(folders: Iterable[Path]) -> tuple[NodeFault, ...]:
    """The launches in these attempts' folders that a fault ended, of whatever kind, in the order of
    the folders.
    """
    return tuple(
        NodeFault.of(folder.name, launch, label_in(folder))
        for folder in folders
        for launch in launches_in(folder)
        if launch.cause not in {"", Kind.OPERATOR}
    )
