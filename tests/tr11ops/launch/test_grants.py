"""What a site grants, read from scontrol's answers, and whether it lasts for what is launched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Node
from tr11ops.cluster.site import (
    Grants,
    Reservation,
    ResourceBudget,
    ResourceLimit,
    SiteRules,
    read_grants,
)
from tr11ops.cluster.slurm_command import CommandResult
from tr11ops.launch.margins import grant_checks
from tr11ops.runcard.card import load_card

NOW, HOUR = 1_795_371_259.0, 3600.0
# As Slurm 22.05 writes it, shortened; times are seconds since the epoch, as tr11 asks for them.
RESERVATIONS = "ReservationName=r1 StartTime=1795370000 EndTime=1795380000 Duration=02:46:40 Nodes=n[1-2] Flags={flags}\n"
LIMITS = """Current Association Manager state
Association Records
ClusterName=c Account=root UserName= Partition= ID=1 ParentAccount= GrpTRESMins=cpu=N(7),node=N(0) MaxWallPJ=
ClusterName=c Account=lab UserName= Partition= ID=2 ParentAccount=root(1) GrpTRES=cpu=N(0),node=4(2),gres/gpu=16(8) GrpTRESMins=cpu=N(7),gres/gpu=6000(5400) MaxTRESPJ= MaxWallPJ=1200
ClusterName=c Account=proj UserName= Partition= ID=3 ParentAccount=lab(2) GrpTRESMins=cpu=600000(7),node=N(0) MaxWallPJ=
ClusterName=c Account=proj UserName=ana(7) Partition= ID=4 ParentAccount= DefAssoc=Yes GrpTRESMins=cpu=N(7) MaxWallPJ=600
ClusterName=c Account=proj UserName=ben(8) Partition= ID=5 ParentAccount= DefAssoc=Yes GrpTRESMins=cpu=1(1) MaxWallPJ=1
ClusterName=c Account=other UserName= Partition= ID=6 ParentAccount=root(1) GrpTRESMins=cpu=5(5) MaxWallPJ=2
QOS Records
QOS=normal(1) UsageRaw=0 GrpTRESMins=cpu=9(9) MaxWallPJ=3
QOS=long(2) UsageRaw=0 MaxTRESPJ=cpu=900,node=3 GrpTRESMins=node=100(40) MaxWallPJ=
"""
ENFORCED = SiteRules(enforces_limits=True, is_safe=True)


def runner(arguments: Sequence[str], **_: Any) -> CommandResult:
    return CommandResult(
        0, RESERVATIONS.format(flags="SPEC_NODES") if arguments[3] == "reservation" else LIMITS, ""
    )


@pytest.mark.parametrize("account", ["proj", None])
def test_the_limits_from_user_to_root_and_of_the_qos_alone(account: str | None) -> None:
    found = read_grants(ENFORCED, "ana", account, "long", "r1", ask=runner)
    assert found.reservation == Reservation("r1", 1795370000.0, 1795380000.0, ("n1", "n2"))
    assert found.budgets == (
        ResourceBudget("account proj", "cpu", 600_000, 7), ResourceBudget("account lab", "gres/gpu", 6000, 5400),
        ResourceBudget("QoS long", "node", 100, 40),
    )  # fmt: skip
    assert (found.longest_job, found.is_safe) == (600 * 60, True)
    assert found.limits == (
        ResourceLimit("account lab", "node", 4, False), ResourceLimit("account lab", "gres/gpu", 16, False),
        ResourceLimit("QoS long", "cpu", 900, True), ResourceLimit("QoS long", "node", 3, True),
    )  # fmt: skip


PARTITIONS = (
    "PartitionName=gpu Default=YES QoS={quality} State=UP\nPartitionName=cpu QoS=N/A State=UP\n"
)
QUALITIES = """QOS=small(3) UsageRaw=0 GrpTRES=node=2(0) GrpTRESMins=cpu=50(9) MaxTRESPJ=node=1 MaxWallPJ=30
QOS=part(4) UsageRaw=0 GrpTRES=node=8(0),cpu=64(0) MaxTRESPJ= MaxWallPJ=900
"""


@pytest.mark.parametrize(
    ("default", "of_partition", "longest", "limits"),
    [
        ("gpu|small,long|", "N/A", 600, []),  # several, none of them the default, and no `normal`
        ("|small,long|small", "N/A", 30, ["QoS small node=2", "QoS small node=1"]),
        ("|small|", "N/A", 30, ["QoS small node=2", "QoS small node=1"]),
        ("|normal,long|", "N/A", 3, []),
        (
            "|small|small", "part", 900,
            ["QoS part of the partition node=8", "QoS part of the partition cpu=64", "QoS small node=1"],
        ),
        (None, "part", 900, ["QoS part of the partition node=8", "QoS part of the partition cpu=64"]),
    ],
)  # fmt: skip
def test_the_default_qos_and_that_of_the_partition_count_as_slurm_has_them(
    default: str | None, of_partition: str, longest: int, limits: list[str]
) -> None:
    def told(arguments: Sequence[str], **_: Any) -> CommandResult:
        if arguments[0] == "sacctmgr":
            if default is None:
                raise SchedulerUnreachable("sacctmgr did not answer within 8 s")
            return CommandResult(0, f"{default}\n", "")
        if arguments[3] == "partition":
            return CommandResult(0, PARTITIONS.format(quality=of_partition), "")
        return CommandResult(0, LIMITS + QUALITIES, "")

    found = read_grants(ENFORCED, "ana", None, None, None, "gpu", told)
    assert found.longest_job == 60 * longest
    said = [
        f"{one.owner} {one.resource}={one.limit}"
        for one in found.limits
        if one.owner.startswith("QoS")
    ]
    assert said == limits
    shadowed = any(one.resource == "node" and one.owner == "account lab" for one in found.limits)
    assert shadowed is not any("node=2" in each or "node=8" in each for each in limits)
    # the site's default partition
    unnamed = read_grants(ENFORCED, "ana", None, None, None, ask=told)
    assert unnamed == found


TOLD = """part||node=5|||||
small|DenyOnLimit,OverPartQOS|node=1,gres/gpu=3|cpu=7|2||9|
long||node=1||||
"""


@pytest.mark.parametrize("is_told", [True, False])
def test_what_each_user_and_account_may_have_and_which_qos_comes_first(is_told: bool) -> None:
    def told(arguments: Sequence[str], **_: Any) -> CommandResult:
        if arguments[0] == "sacctmgr":
            return CommandResult(0, TOLD, "") if is_told else CommandResult(1, "", "refused")
        if arguments[3] == "partition":
            return CommandResult(0, PARTITIONS.format(quality="part"), "")
        counts = "UsageRaw=0 GrpJobs=4(1) GrpSubmitJobs=N(0)"
        return CommandResult(0, LIMITS + QUALITIES.replace("UsageRaw=0", counts), "")

    found = read_grants(ENFORCED, "ana", None, "small", None, "gpu", told)
    said = [f"{one.owner} {one.resource}={one.limit} {one.of_each}".strip() for one in found.limits]
    if not is_told:
        assert "QoS part of the partition node=8" in said and not any(
            one.of_each for one in found.limits
        )
        return
    assert (
        found.longest_job == 30 * 60
        and "QoS small node=2" in said
        and "QoS part of the partition cpu=64" in said
    )
    assert said[-6:] == [
        "QoS small node=1 user", "QoS small gres/gpu=3 user", "QoS small cpu=7 account",
        "QoS small job=4", "QoS small job=2 user", "QoS small queued job=9 user",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (
            ResourceLimit("QoS q", "node", 1, False, "user"),
            "QoS q gives all jobs of one user together 1 node at most",
        ),
        (ResourceLimit("QoS q", "node", 2, False, "user"), ""),
        (
            ResourceLimit("user ana", "job", 0, False, "user"),
            "together 0 running jobs at most, one task takes 1",
        ),
        (ResourceLimit("user ana", "job", 1, False, "user"), ""),
        (
            ResourceLimit("QoS q", "queued job", 9, False),
            "all jobs together 9 queued jobs at most, and these are 10",
        ),
        (ResourceLimit("QoS q", "queued job", 10, False), ""),
    ],
)
def test_limits_of_each_user_are_told_before_a_launch(
    tmp_path: Path, limit: ResourceLimit, words: str
) -> None:
    found = checks(tmp_path, Grants(limits=(limit,)))
    assert [words in check for check in found] == [True] * bool(words), found


def test_a_flexible_reservation_gives_other_nodes_too() -> None:
    def flexible(*_: Any, **__: Any) -> CommandResult:
        return CommandResult(0, RESERVATIONS.format(flags="FLEX,SPEC_NODES"), "")

    found = read_grants(SiteRules(), "ana", None, None, "r1", ask=flexible).reservation
    assert found is not None and found.nodes == ()


def test_what_is_not_enforced_is_not_asked_and_a_refusal_said() -> None:
    def refuse(arguments: Sequence[str], **_: Any) -> CommandResult:
        return CommandResult(1, "", "slurm_load_assoc_mgr_info: Access/permission denied\n")

    assert read_grants(SiteRules(), "ana", None, None, None, ask=refuse) == Grants()
    assert read_grants(SiteRules(), "ana", None, None, "r2", ask=runner).reservation is None
    with pytest.raises(SchedulerError, match="permission denied"):
        read_grants(ENFORCED, "ana", None, None, None, ask=refuse)


def checks(folder: Path, grants: Any, tasks: int = 10, reservation: bool = False) -> list[str]:
    """Two nodes of 4 GPUs and 64 CPUs for 2 hours a task: 240 node minutes, 960 GPU minutes, 15,360
    CPU minutes.
    """
    changes = ["slurm.nodes=2", "slurm.time_limit=02:00:00", "slurm.gpus_per_node=4"]
    card = load_card(
        write_card(folder), [*changes, *(["slurm.reservation=r1"] if reservation else [])], {}
    )
    nodes = tuple(Node(f"n{number}", frozenset({"idle"}), cpus=64) for number in range(4))
    return [
        f"{check.level.value}: {check}" for check in grant_checks(card, tasks, grants, nodes, NOW)
    ]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (None, "ok: reservation: r1, without an end"),
        (NOW + 21 * HOUR, "ok: reservation: r1 ends in 21 h 00 min"),
        (
            NOW + 5 * HOUR,
            "warning: slurm.reservation: r1 ends in 5 h 00 min: 2 tasks fit, the 8 others",
        ),
        (
            NOW + HOUR,
            "refused: slurm.reservation: r1 ends in 1 h 00 min, one task asks for 2 h 00 min: none would start",
        ),
        (NOW - HOUR, "refused: slurm.reservation: r1 ends in 0 s"),
    ],
)
def test_the_end_of_the_reservation(tmp_path: Path, end: float | None, words: str) -> None:
    [said] = checks(tmp_path, Grants(Reservation("r1", NOW - HOUR, end)), reservation=True)
    assert said.startswith(words), said


def test_a_reservation_that_is_not_there_any_more(tmp_path: Path) -> None:
    [said] = checks(tmp_path, Grants(), reservation=True)
    assert said.startswith(
        "refused: slurm.reservation: 'r1' is no reservation here (any more); name the new one"
    )


LEFT = {
    "enough": (ResourceBudget("account proj", "node", 6000, 3000), True, "ok: account: account proj has 50 of 100 node hours left"),
    "for three": (
        ResourceBudget("account proj", "gres/gpu", 96_000, 93_120), True,
        "warning: account: account proj has 48 of 1,600 gres/gpu hours left, enough for 3 of 10 tasks (16 each)",
    ),
    "used up": (
        ResourceBudget("account proj", "cpu", 600_000, 600_000), False,
        "refused: account: account proj has 0 of 10,000 cpu hours left: no task would start",
    ),
    "less than one task": (
        ResourceBudget("account proj", "cpu", 600_000, 599_940), True,
        "refused: account: account proj has 1 of 10,000 cpu hours left, one task takes 256: none would start",
    ),
    "less than one task, which starts": (
        ResourceBudget("account proj", "cpu", 600_000, 599_940), False,
        "warning: account: account proj has 1 of 10,000 cpu hours left, one task takes 256",
    ),
    "not counted here": (
        ResourceBudget("QoS long", "billing", 600, 540), True, "ok: account: QoS long has 1 of 10 billing hours left",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("budget", "is_safe", "words"), LEFT.values(), ids=LEFT)
def test_the_hours_that_are_left(
    tmp_path: Path, budget: ResourceBudget, is_safe: bool, words: str
) -> None:
    [said] = checks(tmp_path, Grants(budgets=(budget,), is_safe=is_safe))
    assert said.startswith(words), said


def test_a_job_longer_than_its_account_gives_and_the_unknown(tmp_path: Path) -> None:
    [said] = checks(tmp_path, Grants(longest_job=3600))
    assert said.startswith("refused: slurm.time_limit: 02:00:00 is above 1 h 00 min")
    [said] = checks(tmp_path, Unknown("permission denied"))
    assert (
        said
        == "warning: account: unknown: what the site grants could not be asked (permission denied)"
    )
    assert checks(tmp_path, None) == []


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (ResourceLimit("account lab", "node", 2, False), ""),
        (ResourceLimit("account lab", "node", 1, False),
         "refused: account: account lab gives all jobs together 1 node at most, one task takes 2: none would start"),
        (ResourceLimit("QoS long", "gres/gpu", 7, True),
         "refused: account: QoS long gives one job 7 GPUs at most, one task takes 8: none would start"),
        (ResourceLimit("account lab", "cpu", 1, False), "account lab gives all jobs together 1 core at most"),
        (ResourceLimit("account lab", "billing", 1, False), ""),
    ],
)  # fmt: skip
def test_a_limit_below_one_tasks_need_is_told_for_what_it_is(
    tmp_path: Path, limit: ResourceLimit, words: str
) -> None:
    said = checks(tmp_path, Grants(limits=(limit,)))
    assert [words in line for line in said] == ([True] if words else []), said
