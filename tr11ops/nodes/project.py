"""The ledger of excluded nodes, put onto queued work in place: it keeps its place in the queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from tr11ops.cluster.base import Job, Scheduler, SchedulerError
from tr11ops.exclusions import read_version
from tr11ops.nodes.view import QueueChange, queue_changes
from tr11ops.rundir import RunDirectory

MOST_ROUNDS = 10


def project(
    directory: RunDirectory,
    scheduler: Scheduler,
    look: Callable[[], Iterable[Job]],
    known: Collection[str],
    user: str,
    remove: Iterable[str] = (),
    keep: Iterable[str] = (),
) -> tuple[str, ...]:
    """Make the pending jobs that `look` finds avoid every node on the ledger; returns what could not be done.

    `remove` are nodes just taken off the ledger, `keep` those that stay excluded for another reason, `known` the
    cluster's nodes (see `tr11ops.nodes.given`). The ledger is read again after the change: when two
    hosts do this at once, the last one to write has seen both changes. Raises OSError, ValueError and
    SchedulerUnreachable when the ledger or the queue cannot be read.
    """
    failed: dict[str, str] = {}
    for _ in range(MOST_ROUNDS):
        version = read_version(directory.exclusions)
        listed = {entry.node for entry in version.exclusions}
        for change in queue_changes(look(), known, listed, set(remove) - listed, keep):
            fault = _apply(scheduler, change, user)
            if fault:
                failed[change.job_id] = fault
            else:
                failed.pop(change.job_id, None)
        if read_version(directory.exclusions).number == version.number:
            break
    return tuple(failed.values())


def _apply(scheduler: Scheduler, change: QueueChange, user: str) -> str:
    try:
        scheduler.exclude(change.job_id, change.after)
    except SchedulerError as error:
        ask = "" if change.user in {"", user} else f" (it belongs to {change.user}, who can)"
        return f"queued job {change.job_id} keeps its old list{ask}: {error}"
    return ""
