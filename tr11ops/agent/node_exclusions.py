"""The nodes that a failing attempt keeps out of the run, and those that it lets in again: on the
run's list, and in its queued jobs.

Each change is begun and done beside the launches, one after another, so that no launch waits for
the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from tr11ops.agent.attempt_context import AttemptContext
from tr11ops.agent.recurrence import FailingCheck, NodeFault, acquitted, innocent
from tr11ops.agent.step import LineTee
from tr11ops.base.errors import SchedulerError
from tr11ops.base.now import now
from tr11ops.base.observed import cause
from tr11ops.base.units import counted
from tr11ops.cluster.arrays import compress
from tr11ops.diagnose.attribution.evidence import Attribution, Kind
from tr11ops.nodes.queue_exclusions import (
    ExclusionResult,
    RunQueue,
    exclude_nodes,
    include_nodes,
    known_names,
    sync_queue_exclusions,
    why_not_leave_out,
)
from tr11ops.queue.queued_jobs import PendingJobs
from tr11ops.rundir.exclusion import (
    NOT_EXCLUDABLE,
    Exclusion,
    ExclusionLimit,
    NodeStanding,
    after_good_use,
    family,
    is_left_out_once,
    is_trial,
    way_past,
)
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, Version, read_version, revise

B = TypeVar("B", bound="Background")
P = ParamSpec("P")
T = TypeVar("T")


class Background:
    """Has an attempt's things done one after another, in a thread of its own; with
    `waits_for_changes` nothing else goes on meanwhile. `waiting` is None in the foreground.
    """

    def __init__(self, context: AttemptContext, waiting: PendingJobs | None, tee: LineTee) -> None:
        self._context = context
        self._waiting = waiting
        self._say = tee.say
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=type(self).__name__)
        self._begun: list[Future[Any]] = []

    def begin(self, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> Future[T]:
        """Have it done after all that was begun before."""
        future = self._thread.submit(work, *given, **named)
        self._begun.append(future)
        if self._context.waits_for_changes:
            future.exception()
        return future

    def wait(self) -> None:
        """Wait for everything that was begun. A bug in it must not hide how the attempt ended."""
        for future in self._begun:
            error = future.exception()
            if error is not None:
                self._say(f"{type(error).__name__} while the fault was dealt with: {error}")
        self._begun.clear()

    def close(self) -> None:
        self._thread.shutdown()


def in_background(work: Callable[Concatenate[B, P], None]) -> Callable[Concatenate[B, P], None]:
    """A method that is begun, and not waited for."""

    @wraps(work)
    def begin(self: B, /, *given: P.args, **named: P.kwargs) -> None:
        self.begin(work, self, *given, **named)

    return begin


class NodeExclusions(Background):
    """Which nodes this run may use, as far as one attempt changes that. `waiting` is None in the
    foreground.
    """

    def __init__(self, context: AttemptContext, waiting: PendingJobs | None, tee: LineTee) -> None:
        super().__init__(context, waiting, tee)
        # how many nodes may be excluded; one where it is not known how many there are
        self._limit = ExclusionLimit(1)
        self._limit_words: set[str] = set()  # of every limit that has refused one
        self.refused: list[tuple[str, str]] = []  # bad nodes that are not excluded, and why not

    def exclude_nodes(self, found: Attribution, job_id: str = "") -> None:
        """Begin to exclude the blamed nodes from this run: on its list, and in its queued jobs;
        what is only suspected goes on record, and is left out too where it is to be avoided.

        `job_id`: of the job that was lost by them, "" for this one. Where the watchdog has excluded
        them for it already, that is no second exclusion.
        """
        if found.blamed:
            self._exclude(found, job_id)
        elif found.avoided:
            self._avoid(found)
        elif found.kind is Kind.NODE:
            self.suspect(found)

    @in_background
    def suspect(self, found: Attribution) -> None:
        """Begin to put suspects on record: they are used on, after the others. The newest suspicion
        of a node counts; an exclusion stays.
        """
        entry = self._entry(NodeStanding.SUSPECT, found.summary, found.fault, found.evidence)
        entry = replace(entry, since=now())

        def change(version: Version) -> Version:
            for node in found.suspects:
                if version.find(node) is None:
                    others = version.without(node)
                    fresh = replace(entry, node=node)
                    version = replace(others, suspects=(*others.suspects, fresh))
            return version

        if found.suspects:
            self._revise(change)

    @in_background
    def _avoid(self, found: Attribution) -> None:
        self._ask_limit()
        entry = self._entry(NodeStanding.AVOID, found.summary, found.fault, found.evidence)
        done = self._leave_out(found.avoided, entry)
        for node in done.nodes:
            self._say(f"{node} is avoided while enough others are free: {found.summary}")
        for node, fault in done.refused:
            self._say(f"{node} is not avoided: {fault}")

    @in_background
    def _exclude(self, found: Attribution, job_id: str) -> None:
        days = counted(self._context.config.resilience.exclusion_days, "day")
        self._ask_limit()
        self._make_room(found.blamed, self._limit)
        entry = self._entry(NodeStanding.EXCLUDE, found.summary, evidence=found.evidence)
        done = self._leave_out(found.blamed, replace(entry, job_id=job_id or entry.job_id))
        for node in done.nodes:
            self._say(f"{node} is excluded for {days}: {found.summary}")
        for node, fault in done.refused:
            self.refused.append((node, fault))
            past = ""
            if fault in self._limit_words:
                past = f"; to exclude {node} all the same: `{way_past(node)}`"
            self._say(f"{node} is not excluded: {fault}{past}")

    def _make_room(self, nodes: Sequence[str], limit: ExclusionLimit) -> None:
        """Use nodes again that are only avoided, where the cap has no room for these, which are
        surely bad.
        """
        listed = self._listed("room on the list cannot be made")
        avoided = [
            entry
            for entry in listed
            if entry.state == NodeStanding.AVOID and entry.node not in nodes
        ]
        avoided.sort(key=lambda entry: entry.since or 0.0)
        left = {entry.node for entry in listed}
        back: list[str] = []
        while avoided and limit.forbids(nodes, left):
            back.append(avoided.pop(0).node)
            left.discard(back[-1])
        if back and not limit.forbids(nodes, left):
            why = f"the cap has room for one that is surely bad alone: {', '.join(nodes)}"
            for node in self._give_back(back, why, then=NodeStanding.SUSPECT).nodes:
                self._say(f"{node} is not avoided any more: {why}")

    def _entry(
        self, state: NodeStanding, why: str, fault: str = "", evidence: Iterable[str] = ()
    ) -> Exclusion:
        """What goes on record of a node, whose name is to be filled in."""
        return Exclusion(
            "",
            why,
            owner=AUTOMATIC_OWNER,
            evidence=tuple(evidence),
            job_id=self._context.job_id,
            state=state.value,
            fault=family(fault),
        )

    def _leave_out(self, nodes: Iterable[str], entry: Exclusion) -> ExclusionResult:
        self._limit_words.add(str(self._limit))
        done = exclude_nodes(
            self._context.directory,
            [replace(entry, node=node) for node in nodes],
            self._queue(),
            days=self._context.config.resilience.exclusion_days,
            limit=self._limit,
        )
        self._tell(done)
        return done

    def _revise(self, change: Callable[[Version], Version]) -> None:
        try:
            revise(self._context.directory, change)
        except (OSError, ValueError) as error:
            self._say(f"what is suspected of nodes cannot be put on record: {cause(error)}")

    @in_background
    def note_good_use(self, nodes: Sequence[str], seconds: float) -> None:
        """Begin to put on record that nodes have trained well: it clears suspects, and takes the
        others a step back.
        """
        listed = self._listed("good use of nodes cannot be put on record")
        back = [entry.node for entry in listed if _is_trusted_again(entry, nodes, seconds)]
        if back:
            self._give_back(back, "it has trained well: a suspect again", then=NodeStanding.SUSPECT)
        self._revise(
            lambda version: _after_use(
                version, [node for node in nodes if node not in back], seconds
            )
        )

    def why_not_leave_out(
        self, nodes: Sequence[str], states: Mapping[str, frozenset[str]] | None
    ) -> str:
        """Why nodes that are only suspected cannot be left out now; "" where they can. `states`: of
        all nodes.
        """
        self.begin(self._ask_limit).exception()
        listed = [entry.node for entry in self._listed("nodes cannot be left out")]
        return why_not_leave_out(
            nodes, listed, limit=self._limit, states=states, own=self._context.allocation.nodes
        )

    def try_without(self, nodes: Sequence[str], fault: str, why: str) -> bool:
        """Leave suspects out of the next task, which tells whether they are at fault; whether it
        runs without them.
        """
        done = self._leave_out(nodes, self._entry(NodeStanding.SUSPECT, why, fault, (why,)))
        if not done.refused and not done.failed and done.unread is None:
            self._say(
                f"the next task runs without {compress(nodes)}, to tell whether it is the nodes: {why}"
            )
            return True
        self.end_trial("the next task could not be kept off them", done.nodes)
        return False

    def end_trial(self, why: str, nodes: Sequence[str]) -> None:
        """Use nodes again that were left out for one try, with nothing on record against them."""
        if nodes:
            back = [entry for entry in self._listed() if entry.node in nodes and is_trial(entry)]
            self._include(back, why)

    @in_background
    def take_back_left_out(self) -> None:
        """Begin to let what starts later use a node again, after the others, that this start alone was
        to be kept off: it held a hang up.
        """
        nodes = [entry.node for entry in self._listed() if is_left_out_once(entry)]
        if nodes:
            self._give_back(nodes, "one start was kept off it", then=NodeStanding.SUSPECT)

    @in_background
    def step_up(self, tried: Sequence[Exclusion]) -> None:
        """Begin to avoid the nodes without which the training went on."""
        if not tried:
            return
        names = compress(entry.node for entry in tried)
        why = f"without {names} the training went on, which had not before"
        self._ask_limit()
        for entry in tried:
            self._leave_out((entry.node,), self._entry(NodeStanding.AVOID, why, entry.fault))
            self._say(f"{entry.node} is avoided while enough others are free: {why}")

    def trial(self) -> tuple[Exclusion, ...]:
        """The nodes that this task runs without, to tell whether they are at fault."""
        return tuple(
            entry
            for entry in self._listed("whether suspects are left out is not known")
            if is_trial(entry)
        )

    def why_left_in_use(self) -> str:
        """Which bad nodes could not be excluded and are not on the run's list now, and why; ""
        where none is.

        A person may have excluded one since. Where the list cannot be read, all of them are named.
        """
        if not self.refused:
            return ""
        listed = {
            entry.node
            for entry in self._listed("whether a bad node was excluded since is not known")
        }
        left = {node: fault for node, fault in self.refused if node not in listed}
        if not left:
            return ""
        return f"{compress(left)}{NOT_EXCLUDABLE}{next(iter(left.values()))}"

    def refresh(self) -> None:
        """Put the run's list, and nothing else, on the exclude lists of the queued jobs."""
        queue = self._queue()
        if queue is not None:
            self._tell(sync_queue_exclusions(self._context.directory, queue))

    @in_background
    def take_back(self, others: Sequence[NodeFault], why: str) -> None:
        """Begin to end the automatic exclusions that rest on these faults: on the run's list, in
        the queued jobs; and the suspicions.
        """
        self._include(innocent(self._listed(), AUTOMATIC_OWNER, others), why)
        cleared = {
            (node, family(one.fault)) for one in others for node in (*one.nodes, *one.may_be)
        }

        def change(version: Version) -> Version:
            left = tuple(
                entry for entry in version.suspects if (entry.node, entry.fault) not in cleared
            )
            return replace(version, suspects=left)

        self._revise(change)

    @in_background
    def clear_suspects(self, fault: str) -> None:
        """Begin to end the suspicions that rest on a fault which proved to be no node's."""
        kind = family(fault)

        def change(version: Version) -> Version:
            return replace(
                version, suspects=tuple(entry for entry in version.suspects if entry.fault != kind)
            )

        self._revise(change)

    @in_background
    def take_back_of_checks(self, checks: Sequence[FailingCheck], why: str) -> None:
        """Begin to end the automatic exclusions that rest on health checks which fail everywhere."""
        self._include(acquitted(self._listed(), AUTOMATIC_OWNER, checks), why)

    def _listed(self, without: str = "exclusions cannot be taken back") -> tuple[Exclusion, ...]:
        """The run's list; empty where it cannot be read, and the log says what is not done
        `without` it.
        """
        try:
            return read_version(self._context.directory.exclusions).exclusions
        except (OSError, ValueError) as error:
            self._say(f"{without}, the run's list cannot be read: {cause(error)}")
            return ()

    def _give_back(
        self, nodes: Sequence[str], why: str, *, then: NodeStanding | None = None
    ) -> ExclusionResult:
        """Take nodes off the list; as what they stay on record: `then`."""
        done = include_nodes(
            self._context.directory, nodes, self._queue(), why=why, owner=AUTOMATIC_OWNER, then=then
        )
        self._tell(done)
        return done

    def _include(self, entries: Sequence[Exclusion], why: str) -> None:
        done = self._give_back([entry.node for entry in entries], why)
        for node in done.nodes:
            self._say(f"{node} is not excluded any more: {why}")
        for node, fault in done.refused:
            self._say(f"{node} stays excluded: {fault}")

    def _queue(self) -> RunQueue | None:
        """The run's queued jobs, asked for as long as a silent scheduler may come back."""
        waiting = self._waiting
        if waiting is None:
            return None
        return RunQueue(
            waiting.scheduler,
            waiting.look,
            lambda: known_names(waiting.scheduler),
            kept=self._context.config.slurm.excluded_nodes,
            retry=waiting.retry,
        )

    def _tell(self, done: ExclusionResult) -> None:
        if done.left_out:
            gone = (
                f"{compress(done.left_out)}: unknown to the scheduler, left out of what it is given"
            )
            self._say(f"{gone}; on the run's list it stays")
        for change in done.changes:
            added = set(change.after) - set(change.before)
            removed = set(change.before) - set(change.after)
            words = []
            if added:
                words.append(f"will not use {compress(added)}")
            if removed:
                words.append(f"may use {compress(removed)} again")
            self._say(f"queued job {change.job_id} {' and '.join(words)}")
        for line in done.failed:
            self._say(line)
        if done.unread is not None:
            self._say(f"the queued jobs keep their exclude lists: {cause(done.unread)}")

    @in_background
    def prepare(self) -> None:
        """Ask now what the scheduler may be too dead to say later: how many nodes there are."""
        self._ask_limit()

    def _ask_limit(self) -> None:
        """How many nodes may be excluded as things are now; as they were before, where the
        scheduler does not say.
        """
        if self._context.scheduler is None:
            return
        try:
            nodes = self._context.scheduler.nodes()
            if self._waiting is not None:
                queued = self._waiting.look()
            else:
                queued = ()
        except SchedulerError as error:
            self._say(f"the scheduler does not tell how many nodes may be excluded: {error}")
            return
        card = self._context.config
        limit = ExclusionLimit.of_run(
            nodes,
            queued,
            partitions=(card.slurm.partition, self._context.partition),
            excluded=card.slurm.excluded_nodes,
            allocated=card.slurm.least_nodes,
            percent=card.resilience.exclusion_cap_percent,
        )
        if limit.names:
            self._limit = limit
        else:
            self._limit = ExclusionLimit(1)


def _is_trusted_again(entry: Exclusion, nodes: Sequence[str], seconds: float) -> bool:
    """Whether a node on the list is off it after so much more good training."""
    if entry.node in nodes:
        better = after_good_use(entry, seconds)
    else:
        better = entry
    return better is None or better.state != entry.state


def _after_use(version: Version, nodes: Sequence[str], seconds: float) -> Version:
    """What is on record after these nodes have trained well for so long; none leaves the list here."""

    def after(entries: Iterable[Exclusion]) -> tuple[Exclusion, ...]:
        used = (
            after_good_use(entry, seconds) if entry.node in nodes else entry for entry in entries
        )
        return tuple(entry for entry in used if entry is not None)

    return replace(version, exclusions=after(version.exclusions), suspects=after(version.suspects))
