"""The pure part of the twin: shapes, names, folders, configuration texts, ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tr11ops.base.errors import TwinError
from tr11ops.cluster.arrays import expand
from tr11ops.twin.machine import BLOCK, claimed_ports, default_directory, is_free
from tr11ops.twin.plan import (
    TwinFolders,
    TwinPlan,
    TwinPorts,
    TwinSite,
    cgroup_conf,
    gres_conf,
    slurm_conf,
)

FOLDERS = TwinFolders(Path("/var/lib/tr11/twin/default"))


def site_of(plan: TwinPlan) -> TwinSite:
    return TwinSite(plan, FOLDERS, TwinPorts(plan, 21_000), "m")


def conf(plan: TwinPlan, version: tuple[int, int] = (22, 5)) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for line in slurm_conf(site_of(plan), "alice", version).splitlines():
        key, _, value = line.partition("=")
        values.setdefault(key, []).append(value)
    return values


def test_the_full_size_has_the_original_names_and_limits() -> None:
    plan = TwinPlan()
    assert (plan.node_names[0], plan.node_names[51], plan.node_names[52]) == (
        "jean-zay-iam01",
        "jean-zay-iam52",
        "jean-zay-pp01",
    )
    values = conf(plan)
    gpu, cpu = values["NodeName"]
    assert expand(gpu.split()[0]) == plan.gpu_node_names
    assert "Port=[21001-21052]" in gpu
    assert "Gres=gpu:8" in gpu
    assert cpu.split()[:2] == ["jean-zay-pp01", "Port=21053"]
    assert "Gres" not in cpu
    assert "Default=YES" in values["PartitionName"][0]
    assert "MaxTime=6000" in values["PartitionName"][0]  # 100 hours
    assert values["AccountingStorageType"] == ["accounting_storage/none"]


def test_each_setting_is_given_once() -> None:
    for plan in (
        TwinPlan(),
        TwinPlan(accounting=True, hub=True, store=True, cpu_nodes=0, gpus=0, nodes=1),
    ):
        repeated = {key for key, values in conf(plan).items() if len(values) > 1}
        assert repeated <= {"NodeName", "PartitionName"}


def test_newer_versions_get_what_they_need() -> None:
    assert cgroup_conf((24, 11)) == "CgroupPlugin=disabled\n"
    assert "SwitchType" in conf(TwinPlan(), (22, 5))
    assert "SwitchType" not in conf(TwinPlan(), (24, 11))


def test_gpus_are_files_since_slurm_refuses_a_bare_count() -> None:
    assert "File=/var/lib/tr11/twin/default/gpus/gpu[0-7]" in gres_conf(site_of(TwinPlan()))
    assert "File=/var/lib/tr11/twin/default/gpus/gpu0\n" in gres_conf(site_of(TwinPlan(gpus=1)))
    assert "gpu" not in gres_conf(site_of(TwinPlan(gpus=0)))


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": 0},
        {"gpus": -1},
        {"name": "../x"},
        {"name": ""},
        {"node_prefix": "n1"},
        {"node_prefix": "a b"},
        {"cpu_node_prefix": "jean-zay-iam"},
        {"partition": "compil"},
        {"partition": "a,b"},
        {"slurmd_timeout_seconds": 0},
    ],
)
def test_impossible_shapes_get_one_line_that_names_the_key(values: dict[str, object]) -> None:
    with pytest.raises(TwinError) as caught:
        TwinPlan(**values)  # type: ignore[arg-type]
    key = next(iter(values))
    assert key.replace("name", "twin name" if key == "name" else "name") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_too_long_for_socket_paths_is_refused() -> None:
    FOLDERS.check(TwinPlan())
    with pytest.raises(TwinError, match=r"characters too long .* --dir"):
        TwinFolders(Path("/scratch/" + "x" * 80)).check(TwinPlan())
    with pytest.raises(TwinError, match="--dir"):
        TwinFolders(Path("/scratch/a b")).check(TwinPlan())


def test_a_sites_own_settings_stand_in_place_of_the_twins() -> None:
    plan = TwinPlan(slurm_settings=("maxarraysize=1", "PrivateData=jobs,nodes"))
    lines = slurm_conf(site_of(plan), "root", (22, 5)).splitlines()
    assert "PrivateData=jobs,nodes" in lines and "maxarraysize=1" in lines
    assert not any(line.startswith("MaxArraySize") for line in lines)
    for setting in ("PrivateData", "=x", "A B=1", "PrivateData=jobs\nNodeName=x", "Key=#"):
        with pytest.raises(TwinError, match=r"write it as in slurm\.conf"):
            TwinPlan(slurm_settings=(setting,))
    with pytest.raises(TwinError, match="a twin has its own slurmctldport"):
        TwinPlan(slurm_settings=("slurmctldport=7",))


def test_a_plan_survives_its_record() -> None:
    plan = TwinPlan(name="other", nodes=3, accounting=True, slurm_settings=("MaxArraySize=1",))
    assert TwinPlan.from_json(plan.to_json()) == plan
    assert TwinPlan.from_json({"nodes": 3}) == TwinPlan(nodes=3)  # of a version without some keys
    with pytest.raises(TwinError, match="does not know"):
        TwinPlan.from_json({"nodes": 3, "moons": 1})


def test_where_twins_live() -> None:
    assert default_directory({"XDG_STATE_HOME": "/s"}, 1000) == Path("/s/tr11/twin")
    assert default_directory({"HOME": "/home/alice"}, 1000) == Path(
        "/home/alice/.local/state/tr11/twin"
    )
    assert default_directory({"HOME": "/root"}, 0) == Path("/var/lib/tr11/twin")


def test_ports_that_are_claimed_or_in_use_are_not_given_twice() -> None:
    with claimed_ports(10) as first, claimed_ports(BLOCK + 1) as second:
        assert second >= first + BLOCK or second + BLOCK + 1 <= first
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", second + 3))
            listener.listen()
            assert not is_free(second + 3)
            with claimed_ports(10) as third:
                assert third // BLOCK not in {first // BLOCK, second // BLOCK, second // BLOCK + 1}


def test_other_ports_are_far_from_those_of_twins() -> None:
    """A controller that is being restarted has no listener for a moment; who asks then must not get
    its port.
    """
    with claimed_ports(BLOCK) as twins, claimed_ports(1, beside_twins=True) as other:
        assert other - twins > 50 * BLOCK
