"""The table of reasons for waiting: every name that Slurm has is in it, and each is what it should
be.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tests.tr11ops.status_cases import pending
from tr11ops.cluster.pending_reasons import TABLE, UNKNOWN, Cause, Wait, reason_of, reason_of_job

# All names of `enum job_state_reason`: of Slurm 22.05, then those that came until 25.11.
RESOURCES = (
    "Unknown",
    "Mem",
    "Energy",
    "Node",
    "GRES",
    "License",
    "BB",
    "Billing",
    "Cpu",
    "Memory",
)
_PLAIN = """
None Priority Dependency Resources PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive JobHeldAdmin BeginTime
Licenses AssociationJobLimit AssociationResourceLimit AssociationTimeLimit Reservation ReqNodeNotAvail JobHeldUser FrontEndDown
SchedDefer NodeDown BadConstraints SystemFailure JobLaunchFailure InvalidAccount InvalidQOS QOSUsageThreshold QOSJobLimit
QOSResourceLimit QOSTimeLimit BlockMaxError BlockFreeAction Cleaning Prolog QOSNotAllowed AccountNotAllowed
DependencyNeverSatisfied QOSGrpCpuLimit QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpJobsLimit QOSGrpMemLimit
QOSGrpNodeLimit QOSGrpSubmitJobsLimit QOSGrpWallLimit QOSMaxCpuPerJobLimit QOSMaxCpuMinutesPerJobLimit QOSMaxNodePerJobLimit
QOSMaxWallDurationPerJobLimit QOSMaxCpuPerUserLimit QOSMaxJobsPerUserLimit QOSMaxNodePerUserLimit QOSMaxSubmitJobPerUserLimit
QOSMinCpuNotSatisfied AssocGrpCpuLimit AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpJobsLimit AssocGrpMemLimit
AssocGrpNodeLimit AssocGrpSubmitJobsLimit AssocGrpWallLimit AssocMaxJobsLimit AssocMaxCpuPerJobLimit
AssocMaxCpuMinutesPerJobLimit AssocMaxNodePerJobLimit AssocMaxWallDurationPerJobLimit AssocMaxSubmitJobLimit JobHoldMaxRequeue
JobArrayTaskLimit BurstBufferResources BurstBufferStageIn BurstBufferOperation PowerNotAvail PowerReserved AssocMaxCpuPerNode
QOSMaxCpuPerNode DeadLine PartitionConfig AccountingPolicy FedJobLock MaxMemPerLimit MaxJobsPerAccount MaxSubmitJobsPerAccount
MaxCpuPerAccount ReservationDeleted ReservationInvalid Constraints MaxPoweredUpNodes MpiPortsBusy
OutOfMemory TimeLimit InactiveLimit NonZeroExitCode RaisedSignal NvidiaImexChannels
""".split()
NAMES = [
    *_PLAIN,
    *(f"{who}Grp{what}{kind}" for who in ("Assoc", "QOS") for what in RESOURCES for kind in ("", "Minutes", "RunMinutes")),
    *(f"{who}Max{what}{kind}" for who in ("Assoc", "QOS") for what in RESOURCES for kind in ("PerJob", "PerNode", "MinutesPerJob")),
    *(f"QOSMax{what}PerUser" for what in RESOURCES), *(f"QOSMin{what}" for what in RESOURCES),
    *(f"Max{what}PerAccount" for what in RESOURCES),
    *(f"Max{what}RunMinsPer{whom}" for what in RESOURCES for whom in ("Account", "User")),
]  # fmt: skip


def test_every_reason_of_slurm_is_in_the_table() -> None:
    assert [name for name in NAMES if reason_of(name) is UNKNOWN] == []


@pytest.mark.parametrize(
    ("text", "wait", "cause"),
    [
        ("", Wait.PASSES, Cause.NONE),
        ("Priority", Wait.PASSES, Cause.NONE),
        ("Reservation", Wait.PASSES, Cause.NONE),
        ("QOSMaxJobsPerUserLimit", Wait.PASSES, Cause.NONE),
        ("ReqNodeNotAvail, May be reserved for other job", Wait.PASSES, Cause.NONE),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions", Wait.PASSES,
         Cause.NONE),
        ("PartitionDown", Wait.SITE, Cause.SITE),
        ("PartitionInactive", Wait.SITE, Cause.SITE),
        ("ReqNodeNotAvail, Reserved for maintenance", Wait.SITE, Cause.SITE),
        # the detectors of nodes count them
        ("ReqNodeNotAvail,_UnavailableNodes:n[1-4]", Wait.PASSES, Cause.NONE),
        ("NodeDown", Wait.SITE, Cause.SITE),
        ("JobHeldUser", Wait.PERSON, Cause.HOLD),
        ("launch failed requeued held", Wait.PERSON, Cause.HOLD),
        ("job requeued in held state", Wait.PERSON, Cause.HOLD),
        ("user env retrieval failed requeued held", Wait.PERSON, Cause.HOLD),
        ("job requeued in special exit state", Wait.PERSON, Cause.HOLD),
        ("NvidiaImexChannels", Wait.PASSES, Cause.NONE),
        ("Reservation r1 was deleted", Wait.PERSON, Cause.RESERVATION),
        ("ReservationDeleted", Wait.PERSON, Cause.RESERVATION),
        ("AssocGrpCPUMinutesLimit", Wait.PERSON, Cause.LIMIT),
        ("AssocGrpGRESMinutes", Wait.PERSON, Cause.LIMIT),
        ("QOSGrpWallLimit", Wait.PERSON, Cause.LIMIT),
        ("QOSGrpNodeLimit", Wait.PASSES, Cause.LIMIT),
        ("QOSGrpGRES", Wait.PASSES, Cause.LIMIT),
        ("QOSGrpJobsLimit", Wait.PASSES, Cause.LIMIT),
        ("AssocGrpCpuLimit", Wait.PASSES, Cause.LIMIT),
        ("AssocGrpCPURunMinutesLimit", Wait.PASSES, Cause.LIMIT),
        ("AssocGrpGRESRunMinutes", Wait.PASSES, Cause.LIMIT),
        ("QOSMaxNodePerUserLimit", Wait.PASSES, Cause.LIMIT),
        ("MaxMemPerAccount", Wait.PASSES, Cause.LIMIT),
        ("PartitionTimeLimit", Wait.PERSON, Cause.LIMIT),
        ("AssocMaxWallDurationPerJobLimit", Wait.NEVER, Cause.LIMIT),
        ("QOSMaxNodePerJobLimit", Wait.NEVER, Cause.LIMIT),
        ("BadConstraints", Wait.NEVER, Cause.REQUEST),
        ("DependencyNeverSatisfied", Wait.NEVER, Cause.REQUEST),
        ("PriorityOfTomorrow", Wait.PERSON, Cause.UNKNOWN),
    ],
)  # fmt: skip
def test_what_a_reason_means(text: str, wait: Wait, cause: Cause) -> None:
    found = reason_of(text)
    assert (found.wait, found.cause) == (wait, cause)


@pytest.mark.parametrize(
    "reason", ["Priority", "Dependency", "PartitionDown", "", "JobArrayTaskLimit"]
)
def test_a_priority_of_zero_needs_a_person_whatever_the_reason(reason: str) -> None:
    assert reason_of_job(pending(reason=reason, priority=0)).wait is Wait.PERSON
    assert reason_of_job(pending(reason=reason, priority=7)).wait is not Wait.PERSON


@given(st.text(max_size=80))
def test_any_other_text_needs_a_person(text: str) -> None:
    found = reason_of(text)
    assert found in TABLE or (found.wait, found.cause) == (Wait.PERSON, Cause.UNKNOWN)
