"""Why a job waits, as Slurm says it, and what that means: a table of all reasons that its source has for waiting. Pure.

The names are those of Slurm 22.05 to 25.05 (`enum job_state_reason`), and the sentences that its controller puts in
their place. A reason that is not in the table is taken for one that needs a person.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from tr11ops.cluster.base import Job


class Wait(StrEnum):
    """What ends the wait: `PASSES` time or other jobs; `NEVER` nothing, the request itself must be another one."""

    PASSES = "passes by itself"
    SITE = "needs the site"
    PERSON = "needs a person"
    NEVER = "never runs as asked"


class Cause(StrEnum):
    """What stands in the way, for the kinds that do not pass by themselves: each has its own cure."""

    NONE = ""
    HOLD = "hold"
    LIMIT = "limit"
    RESERVATION = "reservation"
    REQUEST = "request"
    SITE = "site"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Reason:
    """One row: `pattern` is matched with the whole name (or sentence) in which blanks stand for underscores."""

    pattern: str
    wait: Wait
    cause: Cause
    meaning: str


_RESOURCE = r"(BB|Billing|CPU|Cpu|Energy|GRES|License|Mem|Memory|Node|Unknown)"
_GROUP = r"(AssocGrp|QOSGrp)"

# The first row that matches counts.
TABLE: tuple[Reason, ...] = (
    # ---- passes by itself
    Reason(r"|None|Priority|Resources|SchedDefer|Prolog|Cleaning", Wait.PASSES, Cause.NONE, "it waits for its turn"),
    Reason(r"Dependency|JobArrayTaskLimit|FedJobLock", Wait.PASSES, Cause.NONE, "it waits for another job"),
    Reason(r"BeginTime", Wait.PASSES, Cause.NONE, "it waits for its time"),
    Reason(r"Reservation", Wait.PASSES, Cause.NONE, "it waits for its reservation to begin, or to have room"),
    Reason(r"Licenses|MpiPortsBusy|MaxPoweredUpNodes|BurstBuffer(Resources|StageIn)|BlockFreeAction", Wait.PASSES,
           Cause.NONE, "it waits for what other jobs use"),
    Reason(r"(QOS)?JobLimit|AssociationJobLimit|AssocMaxJobsLimit|AssocMaxSubmitJobLimit|QOSJobLimit|"
           r"QOSMax(Jobs|SubmitJob)PerUserLimit|Max(Jobs|SubmitJobs)PerAccount", Wait.PASSES, Cause.NONE,
           "it waits for other jobs of its user or account to end"),
    Reason(r"ReqNodeNotAvail(, May be reserved for other job)?", Wait.PASSES, Cause.NONE,
           "its nodes are kept for other jobs"),
    Reason(r"Nodes required for job are DOWN.*|ReqNodeNotAvail, UnavailableNodes.*", Wait.PASSES,
           Cause.NONE, "its nodes are in use, or cannot be used"),
    Reason(r"OutOfMemory|TimeLimit|InactiveLimit|NonZeroExitCode|RaisedSignal.*", Wait.PASSES,
           Cause.NONE, "it ran before, and waits for its turn"),
    # ---- needs the site
    Reason(r"PartitionDown|PartitionInactive", Wait.SITE, Cause.SITE, "the site has closed its partition"),
    Reason(r"ReqNodeNotAvail, Reserved for maintenance", Wait.SITE, Cause.SITE,
           "the site keeps its nodes for maintenance"),
    Reason(r"NodeDown|FrontEndDown|PowerNotAvail|PowerReserved", Wait.SITE,
           Cause.SITE, "its nodes cannot be used"),
    Reason(r"SystemFailure|BlockMaxError", Wait.SITE, Cause.SITE, "the site's system has failed"),
    # ---- needs a person
    Reason(r"JobHeldUser|JobHeldAdmin", Wait.PERSON, Cause.HOLD, "it is held"),
    Reason(r"JobHoldMaxRequeue|launch failed requeued held|job requeued in held state|JobLaunchFailure", Wait.PERSON,
           Cause.HOLD, "it failed to start and is held"),
    Reason(r"ReservationDeleted|ReservationInvalid|Reservation \S.* (was deleted|is invalid)", Wait.PERSON,
           Cause.RESERVATION, "its reservation has ended or was taken away"),
    Reason(rf"{_GROUP}({_RESOURCE}(Run)?Minutes|CPURunMinutesLimit|CPUMinutesLimit|WallLimit)(Limit)?", Wait.PERSON,
           Cause.LIMIT, "the granted time is used up, or less is left than it asks for"),
    Reason(rf"{_GROUP}.*", Wait.PERSON, Cause.LIMIT, "its account or QoS may not have as much at one time"),
    Reason(r"QOSUsageThreshold|QOSResourceLimit|AssociationResourceLimit|AccountingPolicy", Wait.PERSON, Cause.LIMIT,
           "a limit of its account or QoS is reached"),
    Reason(rf"QOSMax{_RESOURCE}PerUser(Limit)?|Max{_RESOURCE}PerAccount|"
           rf"Max{_RESOURCE}RunMinsPer(Account|User)", Wait.PERSON, Cause.LIMIT,
           "its user or account may not have as much at one time"),
    Reason(r"PartitionTimeLimit", Wait.PERSON, Cause.LIMIT, "it asks for more time than its partition allows"),
    Reason(r"PartitionNodeLimit", Wait.PERSON, Cause.LIMIT,
           "it asks for more or fewer nodes than its partition allows, or has"),
    Reason(r"BurstBufferOperation", Wait.PERSON, Cause.HOLD, "its burst buffer has failed"),
    # ---- never runs as asked
    Reason(r"DependencyNeverSatisfied", Wait.NEVER, Cause.REQUEST, "it waits for the success of a job that failed"),
    Reason(r"BadConstraints|Constraints|PartitionConfig|ReqNodeNotAvail\(Never\)|JobArrayTaskLimit\(0\)|DeadLine",
           Wait.NEVER, Cause.REQUEST, "it asks for what there is not"),
    Reason(r"InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed", Wait.NEVER, Cause.REQUEST,
           "its account or QoS may not be used so"),
    Reason(rf"(Assoc|QOS)Max({_RESOURCE}(Minutes)?PerJob|WallDurationPerJob)(Limit)?|AssociationTimeLimit|QOSTimeLimit|"
           rf"(Assoc|QOS)Max{_RESOURCE}PerNode|MaxMemPerLimit|QOSMin{_RESOURCE}(NotSatisfied)?", Wait.NEVER,
           Cause.LIMIT, "one job may not ask for as much, or as little"),
)  # fmt: skip
UNKNOWN = Reason("", Wait.PERSON, Cause.UNKNOWN, "tr11 does not know this reason")
ZERO_PRIORITY = Reason("", Wait.PERSON, Cause.HOLD, "its priority is 0: it never starts")
_COMPILED = tuple((re.compile(row.pattern), row) for row in TABLE)


def reason_of(text: str) -> Reason:
    """The row of a reason as the scheduler words it."""
    plain = " ".join(text.replace("_", " ").split())
    return next((row for pattern, row in _COMPILED if pattern.fullmatch(plain)), UNKNOWN)


def reason_of_job(job: Job) -> Reason:
    """The row of a pending job: a priority of 0 holds it, whatever else the scheduler says."""
    row = reason_of(job.reason)
    return ZERO_PRIORITY if job.priority == 0 and row.wait in {Wait.PASSES, Wait.SITE} else row
