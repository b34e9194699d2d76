"""Change which nodes a run may use: on its list, then in its queued jobs, which keep their place in
the queue.

One way for the command, the watchdog and the running attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import ExclusionError, HostlistError, NodeNameError, SchedulerError
from tr11ops.base.observed import cause
from tr11ops.cluster.arrays import covered, expand, names_of
from tr11ops.cluster.base import Job, JobState, Scheduler, StateAnswer, may_start
from tr11ops.rundir.exclusion import Exclusion, ExclusionLimit, NodeStanding
from tr11ops.rundir.exclusions import check_node_name, exclude, include, read_version
from tr11ops.rundir.paths import RunDirectory
from trainer.config.card import nearest
from trainer.contract.record import Record

# ------------------------------------------------------------------------ what a scheduler is given
# Of the excluded nodes those that it knows.
#
# A site removes and renames nodes. Slurm refuses a whole list for one name that it does not know, a
# new submission's as well as a change of queued work, and keeps such names in the list of work that
# was queued before. So what the scheduler does not know is left out of what it is given, and stays on
# the run's list: under its name it may come back.


def given_to_scheduler(
    names: Iterable[str], known: Collection[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The nodes that the scheduler is given, and those that it does not know and that are left out;
    each once, in the order asked.

    `known` are the names of all nodes of the cluster; None or empty where they could not be read:
    all are given.
    """
    every = tuple(dict.fromkeys(names))
    if not known:
        return every, ()
    there = frozenset(known)
    return tuple(n for n in every if n in there), tuple(n for n in every if n not in there)


def known_names(scheduler: Scheduler) -> frozenset[str] | None:
    """The names of the cluster's nodes; None where the scheduler does not tell them."""
    try:
        return frozenset(node.name for node in scheduler.nodes())
    except SchedulerError:
        return None


class QueueChange(Record):
    """A queued job whose exclude list changes in place. `user` owns it: Slurm lets no one else
    change it.

    `job_id` is how the scheduler shows it, `name` how it is named to the scheduler: all tasks,
    without a throttle.
    """

    job_id: str
    name: str
    user: str
    before: tuple[str, ...]
    after: tuple[str, ...]


def queue_changes(
    jobs: Iterable[Job],
    known: Collection[str] | None,
    add: Iterable[str] = (),
    remove: Iterable[str] = (),
    keep: Iterable[str] = (),
) -> tuple[QueueChange, ...]:
    """What becomes of the exclude lists of the pending jobs. `keep` are names that are not taken
    off in any case.

    `known` are the cluster's nodes: no list is given any other name, also where the job had it so
    far.
    """
    added = set(add)
    removed = set(remove) - set(keep)
    found = []
    for job in jobs:
        if job.state is JobState.PENDING:
            after, _ = given_to_scheduler(sorted((set(job.excluded) | added) - removed), known)
            before, _ = given_to_scheduler(job.excluded, known)
            if set(after) != set(before):
                [name] = names_of([job], [job])
                found.append(
                    QueueChange(job.job_id, name, user=job.user, before=job.excluded, after=after)
                )
    return tuple(found)


# ------------------------------------------------------------------------ may suspects be left out?
# Only while enough others are free, within the cap.


def why_not_leave_out(
    out: Iterable[str],
    listed: Collection[str],
    limit: ExclusionLimit,
    states: Mapping[str, frozenset[str]] | None,
    own: Collection[str],
) -> str:
    """Why these nodes cannot be left out now, in words; "" where they can.

    `listed` are not used as it is; `states`: of all nodes, None where the scheduler did not say;
    `own`: the attempt's nodes, which are free when it ends. What others' jobs hold is not free: the
    run would wait for it.
    """
    leaving = set(out)
    if states is None or limit.names is None:
        return "which other nodes are free is not known"
    if limit.forbids(leaving, listed):
        return str(limit)
    free = {
        node
        for node in limit.names - leaving - set(listed)
        if may_start(states.get(node, frozenset({"unknown"}))) is StateAnswer.YES
        and (node in own or "idle" in states[node])
    }
    if len(free) < limit.needed:
        return f"only {len(free)} others are free, an attempt needs {limit.needed}"
    return ""


MOST_ROUNDS = 10


def _once(request: Callable[[], Any]) -> Any:
    return request()


class RunQueue(Record):
    """One run's jobs at the scheduler, for who changes which nodes they exclude.

    `look` finds the run's jobs as they are now. `known`: the cluster's nodes (see
    `tr11ops.queue.queued_jobs`). `kept` are nodes that no job gets back, whatever the run's list
    says: the card's. `user` is who asks. `retry` does one request to the scheduler, and decides
    whether one that fails is tried again.
    """

    scheduler: Scheduler
    look: Callable[[], Iterable[Job]]
    known: Callable[[], Collection[str] | None]
    kept: Collection[str]
    user: str = ""
    retry: Callable[[Callable[[], Any]], Any] = _once


class ExclusionResult(Record):
    """What became of the run's list and of its queued jobs.

    `nodes` are so on the list now, `refused` are not, with why. `changes` were made to jobs;
    `failed`: which jobs keep their old list and why, a line each; `unread`: why the queue was not
    looked through. `left_out` are nodes on the list that the cluster does not know (any more).
    """

    nodes: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    changes: tuple[QueueChange, ...] = ()
    failed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unread: Exception | None = None

    @property
    def failures(self) -> tuple[str, ...]:
        """What could not be done, a line each. Raises `unread`: SchedulerError, OSError or
        ValueError.
        """
        if self.unread is not None:
            raise self.unread
        return (*(f"{node}: {why}" for node, why in self.refused), *self.failed)


def exclude_nodes(
    directory: RunDirectory,
    asked: Iterable[Exclusion],
    queue: RunQueue | None,
    *,
    days: float | None,
    limit: ExclusionLimit | None = None,
    forced: bool = False,
) -> ExclusionResult:
    """Exclude nodes from a run as far as `limit` allows, now and in what is queued. Never raises.

    What cannot be put on the list is not excluded at the scheduler either: no one could see it, or
    take it back. For the parameters see `tr11ops.rundir.exclusions.exclude`.
    """
    entries = {entry.node: entry for entry in asked}

    def put_on(node: str) -> str:
        if exclude(directory, entries[node], days=days, limit=limit, forced=forced):
            return ""
        return str(limit)

    return _change(directory, entries, put_on, queue)


def include_nodes(
    directory: RunDirectory,
    nodes: Iterable[str],
    queue: RunQueue | None,
    *,
    why: str,
    owner: str,
    then: NodeStanding | None = None,
) -> ExclusionResult:
    """Let a run use nodes again, now and in what is queued. `then`: see `exclusions.include`. Never
    raises.
    """

    def take_off(node: str) -> str:
        include(directory, node, why=why, owner=owner, then=then)
        return ""

    return _change(directory, nodes, take_off, queue, is_back=True)


def _change(
    directory: RunDirectory,
    nodes: Iterable[str],
    change: Callable[[str], str],
    queue: RunQueue | None,
    is_back: bool = False,
) -> ExclusionResult:
    done: list[str] = []
    refused: list[tuple[str, str]] = []
    for node in nodes:
        try:
            fault = change(node)
        except (OSError, ExclusionError) as error:
            fault = f"the run's list cannot be written: {cause(error)}"
        if fault:
            refused.append((node, fault))
        else:
            done.append(node)
    synced = ExclusionResult()
    if done and queue is not None:
        synced = sync_queue_exclusions(directory, queue, done if is_back else ())
    return replace(synced, nodes=tuple(done), refused=tuple(refused))


def sync_queue_exclusions(
    directory: RunDirectory, queue: RunQueue, remove: Iterable[str] = ()
) -> ExclusionResult:
    """Make the run's pending jobs avoid every node on its list. `remove` are nodes just taken off
    it. Never raises.

    The list is read again after the change: when two hosts do this at once, the last one to write
    has seen both changes. An answer is not believed where the job shows otherwise: Slurm may refuse
    for one task what it did for others.
    """
    removed = set(remove)
    changes: dict[str, QueueChange] = {}
    failed: dict[str, str] = {}
    left_out: tuple[str, ...] = ()
    unread: Exception | None = None
    try:
        for _ in range(MOST_ROUNDS):
            version = read_version(directory.exclusions)
            known = queue.known()
            listed = {entry.node for entry in version.exclusions}
            _, left_out = given_to_scheduler(sorted(listed), known)
            for change in queue_changes(
                queue.retry(queue.look), known, add=listed, remove=removed - listed, keep=queue.kept
            ):
                fault = _apply(queue, change)
                if fault:
                    failed[change.name] = fault
                else:
                    failed.pop(change.name, None)
                    changes[change.name] = change
            if read_version(directory.exclusions).number == version.number:
                break
    except (SchedulerError, OSError, ValueError) as error:
        unread = error
    return ExclusionResult(
        (),
        (),
        changes=tuple(changes.values()),
        failed=tuple(failed.values()),
        left_out=left_out,
        unread=unread,
    )


def _apply(queue: RunQueue, change: QueueChange) -> str:
    """Give a job its new list; why it keeps the old one, "" where it does not, or waits no more."""
    try:
        queue.retry(lambda: queue.scheduler.exclude(change.name, change.after))
    except SchedulerError as error:
        if _is_done(queue, change):
            return ""
        if change.user in {"", queue.user}:
            ask = ""
        else:
            ask = f" (it belongs to {change.user}, who can)"
        return f"queued job {change.job_id} keeps its old list{ask}: {error}"
    return ""


def _is_done(queue: RunQueue, change: QueueChange) -> bool:
    try:
        parts = covered(change.name, (job for job in queue.look() if job.state is JobState.PENDING))
    except SchedulerError:
        return False
    return all(set(part.excluded) == set(change.after) for part in parts)


# ---------------------------------------------------------------------------
# Node names as people type them, in a command or a card: plain, as host lists, checked against the
# cluster's nodes.


def resolve(typed: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """The names behind `typed` (`jean-zay-iam[01-03]` is three), each once, in that order.

    Raises NodeNameError for what is no host list or no node name, and for names that are not in
    `known`.
    """
    names: list[str] = []
    for text in typed:
        try:
            found = expand(text)
        except HostlistError as error:
            raise NodeNameError(str(error)) from None
        if not found:
            raise NodeNameError("a node name is empty: leave it out, or name a node")
        names += found
    for name in names:
        try:
            check_node_name(name)
        except ExclusionError as error:
            raise NodeNameError(str(error)) from None
    strangers = [name for name in dict.fromkeys(names) if name not in known]
    if strangers:
        near = nearest(strangers[0], sorted(known))
        more = ""
        if strangers[1:]:
            more = f" (nor are {len(strangers) - 1} more)"
        if near:
            fix = f"did you mean {near!r}?"
        else:
            fix = "`tr11 nodes list --all` shows them"
        raise NodeNameError(f"{strangers[0]!r} is not a node of this cluster{more}: {fix}")
    return tuple(dict.fromkeys(names))
