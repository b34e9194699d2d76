"""Why a job waits, as Slurm says it, and what that means: a table of all reasons that its source
has for waiting; and whether any node, as it is built, could ever take it. Pure.

The names are those of Slurm 22.05 to 25.11 (`enum job_state_reason`), and the sentences that its
controller puts in their place. A reason that is not in the table is taken for one that needs a
person.

A scheduler that is asked whether it would take a request answers for this moment: Slurm refuses
what needs a drained node, and queues the same request. So what the nodes could give is judged here,
whatever their state is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

from tr11ops.base.units import counted
from tr11ops.cluster.base import Job, JobState, Node
from trainer.contract.record import Record


class Wait(StrEnum):
    """What ends the wait: `PASSES` time or other jobs; `NEVER` nothing, the request itself must be
    another one.

    No reason of the scheduler's means `NODES`: what the nodes are now does (see
    observe/jobs.py).
    """

    PASSES = "passes by itself"
    NODES = "needs nodes that can be used"
    SITE = "needs the site"
    PERSON = "needs a person"
    NEVER = "never runs as asked"


class Cause(StrEnum):
    """What stands in the way: each has its own cure. `LIMIT` with `Wait.PASSES`: of what is used at
    one time.
    """

    NONE = ""
    HOLD = "hold"
    LIMIT = "limit"
    RESERVATION = "reservation"
    REQUEST = "request"
    SITE = "site"
    UNKNOWN = "unknown"


class HeldBy(StrEnum):
    """Who put a pending job on hold, by what the scheduler says; UNKNOWN: only its priority of 0
    shows the hold.
    """

    USER = "its user"
    ADMINISTRATOR = "an administrator"
    SCHEDULER = "the scheduler"
    UNKNOWN = "someone"


class JobReason(Record):
    """One row: `pattern` is matched with the whole name (or sentence) in which blanks stand for
    underscores.
    """

    pattern: str
    wait: Wait
    cause: Cause
    meaning: str
    held_by: HeldBy | None = None  # None: nothing holds it, it waits for something else


_RESOURCE = r"(BB|Billing|CPU|Cpu|Energy|GRES|License|Mem|Memory|Node|Unknown)"
_GROUP = r"(AssocGrp|QOSGrp)"

# The first row that matches counts.
TABLE: tuple[JobReason, ...] = (
    # ---- passes by itself
    JobReason(
        r"|None|Priority|Resources|SchedDefer|Prolog|Cleaning",
        Wait.PASSES,
        Cause.NONE,
        "it waits for its turn",
    ),
    JobReason(
        r"Dependency|JobArrayTaskLimit|FedJobLock",
        Wait.PASSES,
        Cause.NONE,
        "it waits for another job",
    ),
    JobReason(r"BeginTime", Wait.PASSES, Cause.NONE, "it waits for its time"),
    JobReason(
        r"Reservation",
        Wait.PASSES,
        Cause.NONE,
        "it waits for its reservation to begin, or to have room",
    ),
    JobReason(
        r"Licenses|MpiPortsBusy|NvidiaImexChannels|MaxPoweredUpNodes|BurstBuffer(Resources|StageIn)|BlockFreeAction",
        Wait.PASSES,
        Cause.NONE,
        "it waits for what other jobs use",
    ),
    JobReason(
        r"(QOS)?JobLimit|AssociationJobLimit|AssocMaxJobsLimit|AssocMaxSubmitJobLimit|QOSJobLimit|"
        r"QOSMax(Jobs|SubmitJob)PerUserLimit|Max(Jobs|SubmitJobs)PerAccount",
        Wait.PASSES,
        Cause.NONE,
        "it waits for other jobs of its user or account to end",
    ),
    # Slurm has one name for both; where the job alone asks for more it never starts. A launch
    # tells, and its age does.
    JobReason(
        rf"{_GROUP}({_RESOURCE}|Jobs|SubmitJobs)(Limit)?|{_GROUP}({_RESOURCE}RunMinutes|CPURunMinutesLimit)|"
        rf"QOSMax{_RESOURCE}PerUser(Limit)?|Max{_RESOURCE}PerAccount|Max{_RESOURCE}RunMinsPer(Account|User)",
        Wait.PASSES,
        Cause.LIMIT,
        "its account, QoS or user may not have so much at one time: others use it, or it alone asks for more",
    ),
    JobReason(
        r"ReqNodeNotAvail(, May be reserved for other job)?",
        Wait.PASSES,
        Cause.NONE,
        "its nodes are kept for other jobs",
    ),
    JobReason(
        r"Nodes required for job are DOWN.*|ReqNodeNotAvail, UnavailableNodes.*",
        Wait.PASSES,
        Cause.NONE,
        "its nodes are in use, or cannot be used",
    ),
    JobReason(
        r"OutOfMemory|TimeLimit|InactiveLimit|NonZeroExitCode|RaisedSignal.*",
        Wait.PASSES,
        Cause.NONE,
        "it ran before, and waits for its turn",
    ),
    # ---- needs the site
    JobReason(
        r"PartitionDown|PartitionInactive",
        Wait.SITE,
        Cause.SITE,
        "the site has closed its partition",
    ),
    JobReason(
        r"ReqNodeNotAvail, Reserved for maintenance",
        Wait.SITE,
        Cause.SITE,
        "the site keeps its nodes for maintenance",
    ),
    JobReason(
        r"NodeDown|FrontEndDown|PowerNotAvail|PowerReserved",
        Wait.SITE,
        Cause.SITE,
        "its nodes cannot be used",
    ),
    JobReason(
        r"SystemFailure|BlockMaxError", Wait.SITE, Cause.SITE, "the site's system has failed"
    ),
    # ---- needs a person
    JobReason(
        r"JobHeldUser", Wait.PERSON, cause=Cause.HOLD, meaning="it is held", held_by=HeldBy.USER
    ),
    JobReason(
        r"JobHeldAdmin",
        Wait.PERSON,
        cause=Cause.HOLD,
        meaning="it is held",
        held_by=HeldBy.ADMINISTRATOR,
    ),
    JobReason(
        r"JobHoldMaxRequeue|.* requeued (held|in (held|special exit) state)|JobLaunchFailure",
        Wait.PERSON,
        cause=Cause.HOLD,
        meaning="it failed to start and is held",
        held_by=HeldBy.SCHEDULER,
    ),
    JobReason(
        r"ReservationDeleted|ReservationInvalid|Reservation \S.* (was deleted|is invalid)",
        Wait.PERSON,
        Cause.RESERVATION,
        "its reservation has ended or was taken away",
    ),
    JobReason(
        rf"{_GROUP}({_RESOURCE}Minutes|CPUMinutesLimit|WallLimit)(Limit)?",
        Wait.PERSON,
        Cause.LIMIT,
        "the granted time is used up, or less is left than it asks for",
    ),
    JobReason(rf"{_GROUP}.*", Wait.PERSON, Cause.LIMIT, "a limit of its account or QoS is reached"),
    JobReason(
        r"QOSUsageThreshold|QOSResourceLimit|AssociationResourceLimit|AccountingPolicy",
        Wait.PERSON,
        Cause.LIMIT,
        "a limit of its account or QoS is reached",
    ),
    JobReason(
        r"PartitionTimeLimit",
        Wait.PERSON,
        Cause.LIMIT,
        "it asks for more time than its partition allows",
    ),
    JobReason(
        r"PartitionNodeLimit",
        Wait.PERSON,
        Cause.LIMIT,
        "it asks for more or fewer nodes than its partition allows, or has",
    ),
    JobReason(
        r"BurstBufferOperation",
        Wait.PERSON,
        cause=Cause.HOLD,
        meaning="its burst buffer has failed",
        held_by=HeldBy.SCHEDULER,
    ),
    # ---- never runs as asked
    JobReason(
        r"DependencyNeverSatisfied",
        Wait.NEVER,
        Cause.REQUEST,
        "it waits for the success of a job that failed",
    ),
    JobReason(
        r"BadConstraints|Constraints|PartitionConfig|ReqNodeNotAvail\(Never\)|JobArrayTaskLimit\(0\)|DeadLine",
        Wait.NEVER,
        Cause.REQUEST,
        "it asks for what there is not",
    ),
    JobReason(
        r"InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed",
        Wait.NEVER,
        Cause.REQUEST,
        "its account or QoS may not be used so",
    ),
    JobReason(
        rf"(Assoc|QOS)Max({_RESOURCE}(Minutes)?PerJob|WallDurationPerJob)(Limit)?|AssociationTimeLimit|QOSTimeLimit|"
        rf"(Assoc|QOS)Max{_RESOURCE}PerNode|MaxMemPerLimit|QOSMin{_RESOURCE}(NotSatisfied)?",
        Wait.NEVER,
        Cause.LIMIT,
        "one job may not ask for as much, or as little",
    ),
)
UNKNOWN = JobReason("", Wait.PERSON, Cause.UNKNOWN, "tr11 does not know this reason")
ZERO_PRIORITY = JobReason(
    "",
    Wait.PERSON,
    cause=Cause.HOLD,
    meaning="its priority is 0: it never starts",
    held_by=HeldBy.UNKNOWN,
)


@lru_cache(maxsize=1024)
def reason_of(text: str) -> JobReason:
    """The row of a reason as the scheduler words it."""
    plain = " ".join(text.replace("_", " ").split())
    return next((row for row in TABLE if re.fullmatch(row.pattern, plain)), UNKNOWN)


PARTITION_CLOSED = reason_of("PartitionDown")


def reason_of_job(job: Job) -> JobReason:
    """The row of a pending job: a priority of 0 holds it, whatever else the scheduler says."""
    row = reason_of(job.reason)
    if job.priority == 0 and row.wait in {Wait.PASSES, Wait.SITE}:
        return ZERO_PRIORITY
    return row


def is_held(job: Job) -> bool:
    """True when someone, or the scheduler, holds a pending job: it starts when it is released."""
    return reason_of_job(job).held_by is not None


def held_words(job: Job) -> str:
    """Of a job that is held, in plain words: `2 tasks of job 11 are held`."""
    tasks = len(job.pending_tasks)
    if tasks > 1:
        return f"{counted(tasks, 'task')} of job {job.array_id} are held"
    return f"job {job.job_id} is held"


_FEATURES = re.compile(r"[\w.:-]+(&[\w.:-]+)*|[\w.:-]+(\|[\w.:-]+)*")


class NodeNeed(Record):
    """What a request asks of each of its nodes. `memory_megabytes` 0: no more than the site gives
    by itself.
    """

    gpus: int = 0
    cpus: int = 1
    memory_megabytes: int = 0
    constraint: str | None = None


class Lack(StrEnum):
    """What a node has too little of."""

    GPUS = "GPUs"
    CORES = "cores"
    MEMORY = "MB of memory"
    FEATURES = "features"


def lacking(need: NodeNeed, nodes: Iterable[Node]) -> dict[str, Lack]:
    """The nodes that could not serve the request even when all is well with them, each with what it
    lacks.

    What a node does not tell (0 cores, 0 memory, GPUs that do not answer, no feature on any node)
    is not held against it, nor a constraint with counts or brackets: the scheduler itself has the
    last word.
    """
    listed = tuple(nodes)
    wanted = _features(need.constraint, listed)
    found = {}
    for node in listed:
        if node.gpus < need.gpus and not node.gpu_fault:
            found[node.name] = Lack.GPUS
        elif 0 < node.cpus < need.cpus:
            found[node.name] = Lack.CORES
        elif 0 < node.memory_megabytes < need.memory_megabytes:
            found[node.name] = Lack.MEMORY
        elif wanted and not any(one <= node.features for one in wanted):
            found[node.name] = Lack.FEATURES
    return found


def why_no_room(job: Job, nodes: Iterable[Node]) -> str:
    """Why no partition that a job is queued in could ever start it, in words; "" where one could,
    or is not known.

    Nodes count as they are built, whatever their state is now.
    """
    listed = tuple(nodes)
    found = []
    for name in filter(None, job.partition.split(",")):
        there = [node for node in listed if name in node.partitions]
        fits = len(there) - len(lacking(NodeNeed(gpus=job.gpus_per_node), there))
        if not there or job.node_count <= fits:
            return ""
        with_gpus = ""
        if job.gpus_per_node:
            with_gpus = f" with {counted(job.gpus_per_node, 'GPU')}"
        found.append(
            f"it asks for {counted(job.node_count, 'node')}{with_gpus}, partition {name} has {fits}"
        )
    return "; ".join(found)


def with_room(jobs: Iterable[Job], nodes: Iterable[Node]) -> tuple[Job, ...]:
    """The queued jobs that ask for a number of nodes which they can get one day, also those that
    are held.
    """
    listed = tuple(nodes)
    kinds: dict[tuple[object, ...], bool] = {}  # thousands may ask for the same
    found = []
    for job in jobs:
        kind = (
            job.state,
            job.reason,
            job.priority == 0,
            job.partition,
            job.node_count,
            job.gpus_per_node,
        )
        if kind not in kinds:
            can_start = job.state is JobState.PENDING and reason_of_job(job).wait is not Wait.NEVER
            is_too_large = bool(listed) and job.node_count > len(listed)  # whatever its partition
            kinds[kind] = (
                can_start
                and job.node_count > 0
                and not is_too_large
                and not why_no_room(job, listed)
            )
        if kinds[kind]:
            found.append(job)
    return tuple(found)


def _features(constraint: str | None, nodes: tuple[Node, ...]) -> tuple[frozenset[str], ...]:
    """The sets of features of which a node must have one whole; none where the constraint is not
    judged here.
    """
    if (
        not constraint
        or not any(node.features for node in nodes)
        or not _FEATURES.fullmatch(constraint)
    ):
        return ()
    if "|" in constraint:
        return tuple(frozenset({name}) for name in constraint.split("|"))
    return (frozenset(constraint.split("&")),)
