"""A person with one machine and its GPUs, no Slurm: init, doctor, launch, estimate and health
checks know them.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from tests.fake_gpus import lose_driver, plant_gpus
from tests.tr11ops.cli.local_bench import LocalBench
from tr11ops.agent.allocation import claim_gpus, gpus_of_node
from tr11ops.cluster.local import LocalScheduler
from tr11ops.cluster.local_machine import claim, machine_name

CORES = len(os.sched_getaffinity(0))
GPU_CARD = ("--set", "slurm.nodes=1", "--set", "slurm.gpus_per_node=1")


@pytest.fixture
def machine(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> LocalBench:
    """Eight GPUs, and no simulated node."""
    monkeypatch.setenv("TR11_LOCAL_NODES", "machine")
    plant_gpus(bench.folder / "bin", monkeypatch, count=8)
    bench.scheduler = LocalScheduler()
    return bench


def test_init_proposes_the_gpus_with_kind_and_memory(machine: LocalBench) -> None:
    answer = machine.tr11(
        "init", "--preset", "1b", "--yes", "--scheduler", "local", "-o", "new.toml"
    )
    assert answer.code == 0, answer.err
    slurm = tomllib.loads(Path("new.toml").read_text())["slurm"]
    assert (slurm["nodes"], slurm["gpus_per_node"], slurm["workers_per_node"]) == (1, 8, 8)
    assert (slurm["gpu_kind"], slurm["gpu_memory_gb"]) == ("NVIDIA H100 80GB HBM3", 79.6)
    assert slurm["cpus_per_task"] == CORES


def test_a_card_that_asks_for_a_gpu_is_taken_and_its_memory_judged(machine: LocalBench) -> None:
    answer = machine.launch("--dry-run", *GPU_CARD)
    assert answer.code == 0, answer.out + answer.err
    assert "local would take it (can run on this machine)" in answer.out
    assert "of 79.6 GiB" in answer.out and "does not say which GPUs" not in answer.out
    answer = machine.launch("--dry-run", "--set", "slurm.nodes=1", "--set", "slurm.gpus_per_node=9")
    assert (
        answer.code == 2
        and f"9 GPUs a node are needed, {machine_name()} have fewer" in answer.out + answer.err
    )
    answer = machine.launch("--dry-run", "--set", "slurm.nodes=1")
    assert (
        "a node has 8, the card asks for none: it trains on the processor"
        in answer.out + answer.err
    )


def test_a_driver_that_does_not_answer_is_said_to(machine: LocalBench) -> None:
    lose_driver(machine.folder / "bin")
    answer = machine.launch("--dry-run", *GPU_CARD)
    said = " ".join((answer.out + answer.err).split())
    assert answer.code and "how many are there is not known" in said and "have fewer" not in said


def test_estimate_knows_the_machine_where_there_is_no_slurm(
    machine: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    wide = ("--set", "model.hidden_size=2048", "--set", "model.attention_heads=16")
    answer = machine.tr11("estimate", "--run", str(machine.card), *GPU_CARD, *wide)
    assert answer.code == 0, answer.err
    said = " ".join(answer.out.split())
    assert "assumed (H100 SXM)" in said and "of 79.6 GiB" in said
    assert "set slurm.gpu_kind" not in answer.out + answer.err


def test_nodes_check_makes_the_gpu_checks(machine: LocalBench) -> None:
    answer = machine.tr11(
        "nodes", "check", "--run", str(machine.card), "--scheduler", "local", "--json", *GPU_CARD
    )
    (node,) = answer.json["nodes"]
    found = {entry["name"]: entry["result"] for entry in node["checks"]}
    assert node["node"] == machine_name() and found["gpu-count"] == "fine"
    assert {"gpu-memory", "row-remap", "throttling", "pcie", "nvlink", "xid"} <= found.keys()
    assert (found["gpu-memory"], found["pcie"], found["throttling"]) == ("fine", "fine", "fine")


def test_simulated_nodes_without_gpus_are_not_fine_for_a_card_that_wants_some(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bench.folder / "bin"
    plant_gpus(folder, monkeypatch)
    (folder / "gpus.json").write_text("[]")
    answer = bench.tr11(
        "nodes", "check", "--run", str(bench.card), "--scheduler", "local", "--json", *GPU_CARD
    )
    assert answer.code and all(node["result"] != "fine" for node in answer.json["nodes"])


def test_foreground_trainings_take_gpus_that_no_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = plant_gpus(tmp_path / "bin", monkeypatch, count=3)
    other = claim(gpus[0])
    environment, claims = claim_gpus(2, {})
    assert environment == {"CUDA_VISIBLE_DEVICES": f"{gpus[1]},{gpus[2]}"} and other is not None
    with pytest.raises(
        RuntimeError, match=r"1 GPU is needed, free of 3: 0; other runs have the rest"
    ):
        claim_gpus(1, {})
    other.close()
    with pytest.raises(
        RuntimeError, match="1 GPU is needed, free of 1: 0"
    ):  # of those that the person has named
        claim_gpus(1, {"CUDA_VISIBLE_DEVICES": "2"})
    assert claim_gpus(0, {"PATH": "x"}) == ({"PATH": "x"}, [])
    for held in claims:
        held.close()


def test_each_node_that_the_machine_plays_has_its_share() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "a,b,c,d"}
    assert gpus_of_node(environment, ("n1", "n2"), "n2") == {"CUDA_VISIBLE_DEVICES": "c,d"}
    assert gpus_of_node(environment, ("n1",), "n1") == {}
    assert gpus_of_node({}, ("n1", "n2"), "n1") == {}
    assert gpus_of_node({"CUDA_VISIBLE_DEVICES": ""}, ("n1", "n2"), "n1") == {}
