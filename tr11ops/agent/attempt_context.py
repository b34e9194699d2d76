"""Where an attempt runs: its allocation and schedulers, and what can be used of them at this
moment.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import field

from tr11ops.agent.allocation import Allocation
from tr11ops.agent.peers import Peers
from tr11ops.agent.relaunch import AllocationState
from tr11ops.agent.step import LineTee
from tr11ops.base.errors import SchedulerError
from tr11ops.base.now import now
from tr11ops.base.observed import Unknown, observed
from tr11ops.cluster.base import (
    Job,
    JobScheduler,
    JobState,
    Scheduler,
    StateAnswer,
    is_gone,
    is_silent,
    may_start,
)
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.exit_duration import JobTime, exit_time, too_short
from tr11ops.runcard.rules import SIGNAL_SLACK_SECONDS
from tr11ops.runcard.speed import RunHistory
from tr11ops.rundir.exclusion import Exclusion, NodeStanding
from tr11ops.rundir.exclusions import SharedWord, read_shared, read_version
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import ExitTime
from trainer.contract.paths import read_attempt_label
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.agent.restarts import EarlierStart

# ---------------------------------------------------------------------------- the attempt's own job
# What the scheduler says of it now: whether it lives, until when, on which nodes.
#
# It is asked again and again beside the launches, so that a limit that someone changes is followed,
# and a node that leaves the allocation is noticed, also one that trains nothing. No answer changes
# nothing: the last one counts.

LOOK_SECONDS = 30.0  # one small call: who shortens a limit to a minute must be heard in time
# from so long before the trainer leaves on, a longer limit may come at any moment
NEAR_SECONDS = 120.0
NEAR_LOOK_SECONDS = 10.0


def seconds_to_next_look(leaves: float | None, now: float) -> float:
    """How long to wait before the scheduler is asked again. `leaves`: when the trainer does, None:
    never.
    """
    if leaves is not None and 0 <= leaves - now < NEAR_SECONDS:
        return NEAR_LOOK_SECONDS
    return LOOK_SECONDS


class JobWatch:
    """Asks for one job. `leaves` is set by who follows it: when the trainer leaves, in seconds
    since the epoch.
    """

    def __init__(self, scheduler: Scheduler, job_id: str) -> None:
        self._scheduler = scheduler
        self._job_id = job_id
        self._over = threading.Event()
        self.job: Job | None = None  # as it was last told, None before the first answer
        self.leaves: float | None = None

    def look(self) -> Job | None:
        """Ask now, and keep the answer; None where there is none at this moment."""
        try:
            found = self._scheduler.job(self._job_id)
        except SchedulerError:
            return None
        # a job that the scheduler does not know any more has not become another one
        if found is not None:
            self.job = found
        return found

    def start(self) -> None:
        """Ask regularly from now on, in a thread of its own: an answer may take long, and no launch
        waits for it.
        """
        threading.Thread(target=self._follow, name="job-watch", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _follow(self) -> None:
        while not self._over.wait(seconds_to_next_look(self.leaves, now())):
            self.look()


STATES_SECONDS = 5.0  # how long a relaunch waits for the scheduler's word on its nodes


class AttemptContext(Record):
    """Where an attempt runs. Both schedulers are None in the foreground, where nothing waits
    anywhere.

    `states` is asked for the nodes' flags and the steps' exit codes between two launches, so it has
    to give up within seconds. `ordering` is there where the job lives on without a dead node, so that the scheduler
    may take it for ended. `peers`: the other machines of a training in the foreground.
    `written`: the card without what was derived, None where
    nothing was. `history`: the run's times before this attempt. `watch`: what the scheduler says of
    the attempt's own job, None where no one can change its limit. `start_before`: that of its job
    which Slurm ended to start it again. `waits_for_changes`: a change to queued jobs and
    exclusions is done before anything else goes on, as where time is simulated. `free_bytes` where
    checkpoints lie; None: the file system is asked.
    """

    config: RunCard
    allocation: Allocation
    environment: Mapping[str, str]
    submission: str
    scheduler: Scheduler | None = None
    states: JobScheduler | None = None
    ordering: JobScheduler | None = None
    peers: Peers | None = None
    written: RunCard | None = None
    history: RunHistory = field(default_factory=RunHistory)
    watch: JobWatch | None = None
    start_before: EarlierStart | None = None
    waits_for_changes: bool = False
    free_bytes: int | None = None

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.config.paths, self.config.kill_switch)

    @property
    def job_id(self) -> str:
        return self.allocation.job_id

    @property
    def folder(self) -> Path:
        """Of the attempt's records."""
        return self.config.paths.attempt(self.job_id)

    @property
    def partition(self) -> str:
        """The scheduler's name of where it runs, "" where it does not say."""
        return self.environment.get("SLURM_JOB_PARTITION", "")

    def label_of(self, job_id: str) -> str:
        """The number of an attempt of this run, as people see and type it."""
        return read_attempt_label(self.config.paths, job_id)

    @property
    def swaps_nodes(self) -> bool:
        """Are the nodes machines of their own, so that another one helps where one is bad?"""
        return self.allocation.kind == "slurm"


class JobEnd(Record):
    """That a job is over for its own agent, in words; `state` is RUNNING where it has lost its
    batch host alone.
    """

    state: JobState
    why: str


class AttemptObservations:
    """What an attempt sees of its nodes and its time. `started`: of the attempt, seconds since the
    epoch.
    """

    def __init__(self, context: AttemptContext, tee: LineTee) -> None:
        self._context = context
        self._say = tee.say
        self.started = now()
        self._step_code: int | None = None
        self._told: set[str] = set()
        # the nodes' flags at the last look, None: unknown
        self.states: Mapping[str, frozenset[str]] | None = None

    def look(self) -> None:
        """Ask for the nodes' flags; unknown where the scheduler does not answer at once."""
        self.states = None
        if self._context.states is None:
            return
        try:
            self.states = {node.name: node.states for node in self._context.states.nodes()}
        except SchedulerError as error:
            self._say(f"the scheduler does not tell the nodes' states: {error}")

    def step_code(self) -> int | None:
        """The highest exit status of the job's steps, where it is another one than at the last
        look; else None.

        A later launch that ended no worse than an earlier one, or than a probe of tr11's, is not
        seen.
        """
        if self._context.states is None:
            return None
        try:
            found = self._context.states.step_code(self._context.job_id)
        except SchedulerError as error:
            self._say(f"the scheduler does not tell how the steps ended: {error}")
            return None
        before, self._step_code = self._step_code, found
        if found != before:
            return found
        return None

    def situation(self) -> AllocationState:
        """The allocation as it is now."""
        context = self._context
        nodes = context.allocation.nodes
        words = {node: (self.states or {}).get(node, frozenset()) for node in nodes}
        if context.swaps_nodes:
            barred, entries = self._on_record()
        else:
            barred = frozenset()
            entries = ()
        watched = {entry.node for entry in entries}
        if context.peers is not None:
            barred |= frozenset(context.peers.lost())
        barred |= frozenset(self.lost_nodes())
        lost = frozenset(node for node in nodes if is_gone(words[node]) or is_silent(words[node]))
        usable = tuple(node for node in nodes if node not in barred | lost)
        needed = context.config.slurm.nodes
        if not context.swaps_nodes:
            needed = min(needed, len(nodes))
        return AllocationState(
            usable=usable,
            needed=needed,
            seconds_left=self._seconds_left(),
            reluctant=frozenset(
                node
                for node in usable
                if node in watched or may_start(words[node]) is StateAnswer.NO
            ),
            suspected=tuple(
                entry.node for entry in entries if entry.state != NodeStanding.RETURNED
            ),
            may_reuse=not context.swaps_nodes,
        )

    def _on_record(self) -> tuple[frozenset[str], tuple[Exclusion, ...]]:
        """The nodes on the run's list, and what is on record of those to be used after the others:
        suspects, what came back, and what other runs have; the newest word last. A list that cannot
        be read keeps no one from training: it is said.
        """
        directory = self._context.directory
        version = observed(read_version, directory.exclusions)
        if isinstance(version, Unknown):
            self._say(f"the list of excluded nodes cannot be read: {version.why}")
            return frozenset(), ()
        watched = (*version.suspects, *self.shared().entries)
        return frozenset(entry.node for entry in version.exclusions), tuple(
            sorted(watched, key=lambda entry: entry.since or 0.0)
        )

    def shared(self) -> SharedWord:
        """What other runs of the site have on record of nodes now; what cannot be read is said
        once.
        """
        found = read_shared(
            self._context.config.resilience.shared_exclusions, self._context.directory
        )
        for line in found.faults:
            if line not in self._told:
                self._told.add(line)
                self._say(line)
        return found

    def _seconds_left(self) -> float | None:
        """Seconds until the trainer of a new launch would be told to leave; None without any limit."""
        config = self._context.config
        job = self.job_time()
        times = []
        if job is not None and job.end is not None:
            early = config.slurm.signal_seconds_before_limit or 0
            if early:
                early += SIGNAL_SLACK_SECONDS
            times.append(job.end - early)
        leaves = self.exit_time()
        if leaves is not None and leaves.time is not None:
            times.append(leaves.time)
        elif leaves is None and config.run.exit_duration_minutes is not None:
            times.append(self.started + 60 * config.run.exit_duration_minutes)
        if times:
            return min(times) - now()
        return None

    @property
    def job(self) -> Job | None:
        """The attempt's job as the scheduler said it last; None where no one asks, or it has not
        answered yet.
        """
        if self._context.watch is not None:
            return self._context.watch.job
        return None

    @property
    def batch_host(self) -> str:
        """The node of the batch script, and of this process: the first of the allocation."""
        return self._context.allocation.nodes[0]

    def lost_nodes(self) -> tuple[str, ...]:
        """Nodes that were given to the attempt and are no part of its job any more, as that was
        seen last.
        """
        job = self.job
        if job is None or job.state is not JobState.RUNNING or not job.nodes:
            return ()
        return tuple(node for node in self._context.allocation.nodes if node not in job.nodes)

    def is_down(self, node: str) -> bool:
        """Whether the scheduler said at the last look that this node is gone."""
        return self.states is not None and is_gone(self.states.get(node, frozenset()))

    def why_over(self) -> JobEnd | None:
        """Whether the scheduler says now that the job is over for what runs here; None where it
        does not say so.

        A job also is when its batch host is lost to the scheduler: nothing there ends with the job
        any more.
        """
        watch = self._context.watch
        job = None
        if watch is not None:
            job = watch.look()
        if job is None:
            return None
        if job.state.is_final or job.state in {JobState.COMPLETING, JobState.PENDING}:
            return JobEnd(
                job.state, f"the scheduler has ended job {job.raw_id} ({job.state.value})"
            )
        if self.batch_host in self.lost_nodes():
            return JobEnd(
                job.state, f"the scheduler has lost {self.batch_host}, which runs the batch script"
            )
        return None

    def job_time(self) -> JobTime | None:
        """From when to when the job has its nodes: as the scheduler said last, else as it was said
        at the start.

        None in the foreground, where no limit ends it.
        """
        context = self._context
        if context.allocation.kind == "foreground":
            return None
        job = self.job
        if job is not None and job.start_time is not None:
            return JobTime(job.start_time, job.end_time)
        end = context.environment.get("SLURM_JOB_END_TIME", "")
        if end.isdigit():
            limit = float(end)
        else:
            limit = self.started + context.config.time_limit_seconds
        return JobTime(self.started, limit)

    def seconds_to_limit(self) -> float | None:
        """Seconds until the scheduler ends the job; None without a limit."""
        job = self.job_time()
        if job is None or job.end is None:
            return None
        return job.end - now()

    def too_short(self) -> str:
        """Why the job's limit leaves no time to train and save, "" where it does or no one watches
        it.
        """
        job = self.job_time()
        if job is None or self._context.watch is None:
            return ""
        return too_short(self._as_written(), self._context.history, job, now())

    def exit_time(self) -> ExitTime | None:
        """When the trainer leaves, by the limit of the job as it is now; None where no one watches
        that.
        """
        job = self.job_time()
        if job is None or self._context.watch is None:
            return None
        return exit_time(self._as_written(), self._context.history, job, self.started)

    def _as_written(self) -> RunCard:
        return self._context.written or self._context.config
