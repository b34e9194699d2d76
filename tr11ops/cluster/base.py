"""What tr11 needs of a scheduler, and nothing more: the protocol and its frozen values."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import field

from trainer.contract.record import Record
from trainer.contract.units import end_of_process, signal_name

ENDED = 128 + signal.SIGTERM  # the exit code of a step that its script, or a person, told to end


class StateAnswer(StrEnum):
    """The answer to one question about a node."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class NodeState(Record):
    """One row. `name` is tr11's word for the state, `spellings` are Slurm's other ones, `suffix` is
    its character.

    `starts`: may Slurm start new work there, now or when what holds the node has ended? `runs_on`:
    does what runs there go on? NO means that nothing can run there: such a node is gone for the job
    that had it.
    """

    name: str
    starts: StateAnswer
    runs_on: StateAnswer
    spellings: tuple[str, ...] = ()
    suffix: str = ""


_YES = StateAnswer.YES
_NO = StateAnswer.NO
_UNKNOWN = StateAnswer.UNKNOWN

NODE_STATES = (
    #         name                starts    runs_on   other spellings
    # what holds the node: nothing, or jobs
    NodeState("idle", _YES, _YES),
    NodeState("allocated", _YES, _YES, ("alloc",)),
    NodeState("mixed", _YES, _YES, ("mix",)),
    NodeState("completing", _YES, _YES, ("comp",)),
    # of the backfill scheduler, for another job
    NodeState("planned", _YES, runs_on=_YES, spellings=("plnd",), suffix="-"),
    NodeState("reserved", _YES, _YES, ("resv",)),  # for whom, the reservation says
    # by a job that has its part of the network alone
    NodeState("blocked", _YES, _YES, ("block",)),
    NodeState("perfctrs", _NO, _YES, ("npc", "net")),  # its counters are in use
    # what kind of node it is
    NodeState("cloud", _YES, _YES),
    NodeState("dynamic_norm", _YES, _YES),
    NodeState("dynamic_future", _YES, _YES),
    # without slurmd, so that no batch script starts there
    NodeState("external", _NO, _UNKNOWN),
    # taken out of service by a person, or by the site's own checks: what runs there runs on
    NodeState("drain", _NO, _YES, ("draining", "drained", "drng")),
    # "expected to fail soon"
    NodeState("fail", _NO, _YES, ("failing", "failg")),
    NodeState("maintenance", _NO, runs_on=_YES, spellings=("maint",), suffix="$"),
    NodeState("power_drain", _NO, _YES),  # drained, to be powered down
    # on its way to a reboot or to sleep; a node that sleeps is woken for the next job
    NodeState(
        "reboot_requested", _YES, runs_on=_YES, spellings=("reboot", "boot"), suffix="@"
    ),  # once it is idle
    NodeState("reboot_issued", _NO, runs_on=_UNKNOWN, spellings=(), suffix="^"),
    NodeState("reboot_canceled", _YES, _YES, ("reboot_cancel", "cancel_reboot", "canc_r")),
    NodeState(
        "power_down", _YES, runs_on=_YES, spellings=("pow_dn",), suffix="!"
    ),  # once it is idle
    NodeState("powering_down", _YES, runs_on=_NO, spellings=(), suffix="%"),
    NodeState("powered_down", _YES, runs_on=_NO, spellings=("power",), suffix="~"),
    NodeState("power_up", _YES, _UNKNOWN, ("pow_up",)),
    NodeState("powering_up", _YES, runs_on=_UNKNOWN, spellings=(), suffix="#"),
    NodeState("resume", _YES, _YES, ("resm",)),
    NodeState("undrain", _YES, _YES),
    # what is wrong with it
    NodeState("down", _NO, _NO),
    NodeState("future", _NO, _NO, ("futr",)),  # it does not exist yet
    # only its slurmd may be gone
    NodeState(
        "not_responding", _NO, runs_on=_UNKNOWN, spellings=("no_respond", "noresp"), suffix="*"
    ),
    # fewer resources than configured
    NodeState("inval", _NO, _UNKNOWN, ("invalid_reg", "invalid")),
    NodeState("error", _NO, _UNKNOWN),
    # of every node, when the controller has just begun
    NodeState("unknown", _UNKNOWN, _UNKNOWN, ("unk",)),
)

_BY_NAME = {name: state for state in NODE_STATES for name in (state.name, *state.spellings)}
_BY_SUFFIX = {state.suffix: state for state in NODE_STATES if state.suffix}


def state_words(text: str) -> frozenset[str]:
    """tr11's words for a state as Slurm prints it: "IDLE+DRAIN", "down*", "drng", "ALLOCATED+"."""
    words = set()
    for part in text.split("+"):
        name = part.strip()
        while name and name[-1] in _BY_SUFFIX:
            words.add(_BY_SUFFIX[name[-1]].name)
            name = name[:-1]
        if name:
            state = _BY_NAME.get(name.lower())
            words.add(name.lower() if state is None else state.name)
    return frozenset(words)


def may_start(words: Iterable[str]) -> StateAnswer:
    """May the scheduler start new work on a node with these words, now or when what holds it has
    ended?
    """
    return _answers(frozenset(words))[0]


def runs_on(words: Iterable[str]) -> StateAnswer:
    """Does work go on that runs on a node with these words? NO: the node is gone."""
    return _answers(frozenset(words))[1]


def is_gone(words: Iterable[str]) -> bool:
    """Can nothing run there? Not where the scheduler cannot say: silence is not absence."""
    return runs_on(words) is StateAnswer.NO


def is_silent(words: Iterable[str]) -> bool:
    """Does the node not answer the scheduler? No further step of a job can be started there; what
    runs may run on.
    """
    return "not_responding" in set(words)


@lru_cache  # thousands of nodes have a few sets of words, and are asked of again and again
def _answers(words: frozenset[str]) -> tuple[StateAnswer, StateAnswer]:
    """Whether new work may start on a node with these words, and whether work that is there runs on."""
    rows = [_BY_NAME[word] for word in words if word in _BY_NAME] or [_BY_NAME["unknown"]]
    return _worst(row.starts for row in rows), _worst(row.runs_on for row in rows)


def _worst(answers: Iterable[StateAnswer]) -> StateAnswer:
    found = set(answers)
    for answer in (StateAnswer.NO, StateAnswer.UNKNOWN):
        if answer in found:
            return answer
    return StateAnswer.YES


LOST = "lost to the scheduler"


def lost_words(nodes: Iterable[str]) -> str:
    """What records say of nodes that were gone, or silent, when a launch ended."""
    return f"{', '.join(nodes)}: {LOST}"


def is_loss_alone(words: str) -> bool:
    """Whether a record has nothing against a node but that it was lost once; a fault that came back
    says more.
    """
    return words.partition(": ")[2] == LOST


class JobState(StrEnum):
    """States of a job, as Slurm names them; UNKNOWN is tr11's own and never means "gone"."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    UNKNOWN = "UNKNOWN"

    @property
    def is_active(self) -> bool:
        """True while the job holds, or is just giving back, an allocation."""
        return self in ACTIVE_STATES

    @property
    def is_final(self) -> bool:
        """True when the scheduler will do nothing more with the job. UNKNOWN is not final."""
        return self not in _NOT_FINAL

    @property
    def may_run(self) -> bool:
        """False once the job has given its nodes back: at its end, or put back into the queue."""
        return self.is_active or self is JobState.UNKNOWN


ACTIVE_STATES = frozenset(
    {JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}
)
_NOT_FINAL = ACTIVE_STATES | {JobState.PENDING, JobState.UNKNOWN}


class Job(Record):
    """One job, or one task of an array; the waiting tasks of an array are one Job with
    `pending_tasks` set.

    Times are seconds since the epoch; None where the scheduler does not say.
    """

    job_id: str  # as people type it: "1234", "1234_7", "1234_[4-10%1]"
    raw_id: str  # the number the scheduler works with, without array decoration
    array_id: str | None
    task_id: int | None
    name: str
    user: str
    state: JobState
    reason: str = ""
    partition: str = ""
    nodes: tuple[str, ...] = ()
    node_count: int = 0
    submit_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    time_limit_seconds: int | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    derived_exit_code: int | None = None
    comment: str = ""
    dependency: str = ""
    excluded: tuple[str, ...] = ()
    pending_tasks: tuple[int, ...] = ()
    working_directory: str = ""
    output: str = ""
    eligible_time: float | None = None  # since when it may start; a release begins it again
    priority: int | None = None  # 0: the scheduler never starts it
    gpus_per_node: int = 0  # that it asks for; 0 also where the scheduler does not say it
    # whether `scontrol requeue` takes it: a batch job that is not against it
    may_requeue: bool = False
    is_expedited: bool = False  # put back, it starts at once, before all others
    preempt_time: float | None = None  # since when another job has its nodes

    @property
    def end_words(self) -> str:
        """Its state, the exit code (of its worst step where that is known), and the signal. A step that
        was told to end says nothing where the script does.
        """
        said = str(self.state)
        if self.derived_exit_code and (self.derived_exit_code != ENDED or not self.exit_code):
            said += f", a step of it {end_of_process(self.derived_exit_code)}"
        elif self.exit_code:
            said += f", its script {end_of_process(self.exit_code)}"
        if self.exit_signal:
            said += f", it was ended by {signal_name(self.exit_signal)}"
        return said


class Node(Record):
    """One node: `states` are words as above: {"idle"}, {"mixed", "drain"}, {"down",
    "not_responding"}.
    """

    name: str
    states: frozenset[str]
    reason: str = ""
    cpus: int = 0
    gpus: int = 0
    memory_megabytes: int = 0
    partitions: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()  # that it can have; a constraint names them
    # of these, those that start nothing now; told by a Scheduler's nodes()
    shut_partitions: tuple[str, ...] = ()
    gpu_kind: str = ""  # where all of its GPUs are of one: the site's word for it, or the driver's
    gpu_memory_megabytes: int = 0  # MiB of the smallest GPU; 0 where it is not told
    gpu_fault: str = ""  # why it is not known which GPUs it has
    # when the reason was given (seconds since the epoch), and by whom
    reason_time: float | None = None
    reason_user: str = ""

    @property
    def words(self) -> str:
        """As the scheduler sees it now: `n07: down+not_responding (Not responding)`."""
        reason = ""
        if self.reason:
            reason = f" ({self.reason})"
        return f"{self.name}: {'+'.join(sorted(self.states))}{reason}"

    @property
    def is_usable(self) -> bool:
        """True when the scheduler may place work there, now or when its present work ends."""
        return may_start(self.states) is StateAnswer.YES

    @property
    def is_unknown(self) -> bool:
        """True when the scheduler cannot say whether it may place work there."""
        return may_start(self.states) is StateAnswer.UNKNOWN

    @property
    def is_gone(self) -> bool:
        """True when nothing can run there any more; a drained or failing node goes on with its
        work.
        """
        return is_gone(self.states)

    @property
    def is_silent(self) -> bool:
        """True when the node does not answer the scheduler: what runs there may run on."""
        return is_silent(self.states)


class Partition(Record):
    """A partition's limits; None means: no limit. One that is not up starts nothing, a closed one
    takes no job.
    """

    name: str
    max_time_seconds: int | None
    node_names: tuple[str, ...]
    is_up: bool = True
    is_default: bool = False
    is_closed: bool = False


class BatchRequest(Record):
    """A batch script and how it should run. `script` is the whole text, `#SBATCH` lines included.

    Every limit is a field too, so that each scheduler can enforce it without reading comments.
    """

    script: str
    name: str
    nodes: int
    time_limit_seconds: int
    output: str  # Slurm's patterns: %x name, %j job, %A array, %a task
    working_directory: Path
    array: str | None = None  # "1-10%1"
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    quality_of_service: str | None = None
    dependency: str | None = None  # "afterany:123"
    exclude: tuple[str, ...] = ()
    comment: str = ""
    # USR1 to the batch script, as `--signal=B:USR1@N`
    signal_seconds_before_limit: int | None = None
    hold: bool = False
    begin: float | None = None  # not to start before this time (seconds since the epoch)
    hint: str | None = None  # "nomultithread"
    memory_megabytes: int | None = None  # of each node
    requeue: bool = False  # whether Slurm itself may queue it again when its node dies
    # put back when a node dies, and started again at once, before all others (SiteRules.expedites)
    expedites: bool = False
    # it has spare nodes, and lives on when one dies (its step never does)
    survives_nodes: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    # further ones of sbatch: name, and value or "" (see sbatch_options)
    options: tuple[tuple[str, str], ...] = ()
    least_nodes: int | None = None  # it may start with so few of `nodes`, where no more are free

    @property
    def least(self) -> int:
        """The nodes without which it does not start."""
        if self.least_nodes is None:
            return self.nodes
        return self.least_nodes


class TestResult(Record):
    """Whether the scheduler would take a request, and its words.

    `is_of_the_moment`: a refusal that may be about nodes which cannot be used now, or are kept for
    others. Submitted, such a request may be queued all the same, and start when they come back.
    """

    accepted: bool
    message: str
    is_of_the_moment: bool = False


class Overview(Protocol):
    """The part of a Scheduler that a look at a run needs."""

    name: str

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        """All jobs the scheduler still knows (also recently ended ones), in one call."""

    def job(self, job_id: str) -> Job | None:
        """One job or array task by id; None if the scheduler no longer knows it, which is not
        "failed".
        """

    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in one call."""


@runtime_checkable
class SchedulerClock(Protocol):
    """A scheduler that tells its time."""

    def clock(self) -> float:
        """Its time, in seconds since the epoch. Raises SchedulerError."""


class Scheduler(Overview, Protocol):
    """The edge to a scheduler. Every call has a time-out and raises SchedulerUnreachable when it
    passes.
    """

    def submit(self, request: BatchRequest) -> str:
        """Submit, and return the job id. Raises SchedulerError with the scheduler's reason."""

    def test(self, request: BatchRequest) -> TestResult:
        """Would this request be accepted? Submits nothing."""

    def partitions(self) -> tuple[Partition, ...]:
        """All partitions, in one call."""

    def cancel(self, job_id: str) -> None:
        """Cancel a job, an array, or one task (`ID_k`)."""

    def hold(self, job_id: str) -> None:
        """Keep a pending job or the pending tasks of an array from starting."""

    def release(self, job_id: str) -> None:
        """Undo `hold`."""

    def signal(self, job_id: str, signal_name: str) -> None:
        """Send a signal (`USR1`, `TERM`, ...) to the job's batch script."""

    def exclude(self, job_id: str, nodes: tuple[str, ...]) -> None:
        """Set the excluded nodes of pending work in place, keeping its place in the queue."""

    def set_comment(self, job_id: str, comment: str) -> None:
        """Set the comment of pending work in place."""


class JobScheduler(Scheduler, Protocol):
    """A Scheduler as an attempt needs it of the one that gave it its nodes."""

    def step_code(self, job_id: str) -> int | None:
        """The highest exit status of a job's steps, 128 + n after signal n; None where it has none."""

    def run_after(self, job_id: str, after: str) -> None:
        """Keep what waits of a job from starting before another one has ended."""

    def requeue(self, job_id: str, *, as_submitted: bool = False) -> None:
        """Put a job back into the queue."""
