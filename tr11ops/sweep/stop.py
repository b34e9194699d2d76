"""Stopping a study: queued jobs are cancelled, what runs saves and leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import cause
from tr11ops.cluster.base import Scheduler
from tr11ops.queue.held_jobs import can_modify
from tr11ops.queue.stop import Signalled, stop_by_scheduler
from tr11ops.sweep.look import CellProgress


def stop_cells(
    cells: Iterable[CellProgress], scheduler: Scheduler, user: str, now: bool
) -> Signalled:
    """Cancel queued jobs first, for they would start in place of what leaves. `now`: also end what
    runs, unsaved.
    """
    listed = tuple(cells)
    asked: list[str] = []
    refused: list[tuple[str, str]] = []
    for job in (job for cell in listed for job in cell.view.queued):
        if not can_modify(job, user):
            refused.append((job.job_id, f"{job.user} owns it"))
            continue
        try:
            scheduler.cancel(job.job_id)
        except SchedulerError as error:
            refused.append((job.job_id, cause(error)))
        else:
            asked.append(job.job_id)
    for cell in listed:
        found = stop_by_scheduler(cell.view, scheduler, user, now)
        asked, refused = [*asked, *found.asked], [*refused, *found.refused]
    return Signalled(tuple(asked), tuple(refused))


def out_of_reach(cells: Iterable[CellProgress]) -> Iterator[tuple[CellProgress, str, str]]:
    """Cells that train where the scheduler cannot stop them: (cell, number of the attempt, why)."""
    for cell in cells:
        if cell.stranger is not None:
            yield cell, cell.stranger.job_id, cell.why
        elif cell.view.foreground and not cell.view.running:
            holder = cell.view.holder
            yield (
                cell,
                holder.job_id if holder is not None else "foreground",
                cell.view.foreground[0],
            )
