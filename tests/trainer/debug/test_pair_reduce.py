"""Who is paired with whom, nodes that meet, and what a node that does not come costs the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tr11ops.twin.machine import claimed_ports
from trainer.debug import group_probe, node_bench
from trainer.debug.node_bench import Meeting, all_reduces, partner

BENCH = (sys.executable, "-m", "trainer.debug.node_bench", "--repeats=2", "--seconds=0.001")
ENVIRONMENT = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16, 52])
def test_each_turn_pairs_everyone_with_another_one(size: int) -> None:
    turns = size - 1 + size % 2
    met: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for turn in range(turns):
        pairs = {rank: partner(rank, size, turn) for rank in range(size)}
        assert sum(other is None for other in pairs.values()) == size % 2
        for rank, other in pairs.items():
            if other is not None:
                assert other != rank and pairs[other] == rank and other not in met[rank]
                met[rank].add(other)
    assert all(len(others) == size - 1 for others in met.values()), (
        "in all turns everyone meets everyone"
    )


def test_three_nodes_measure_and_talk(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [*BENCH, f"--rank={rank}", "--size=3", f"--meet={tmp_path}"], env=ENVIRONMENT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    said = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    for rank, text in enumerate(said):
        names = [line.split()[0] for line in text.splitlines() if not line.startswith("[")]
        others = {f"all-reduce@{other}" for other in range(3) if other != rank}
        assert {name for name in names if name.startswith("all-reduce")} == others
        assert all(names.count(name) == 2 for name in ("cpu-fp32", "cpu-bf16", "cpu-copy", *others))


def test_who_does_not_come_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_bench, "MEET_SECONDS", 0.2)
    meeting = Meeting.open(0, 2, tmp_path)
    assert list(all_reduces(meeting, [torch.device("cpu")], 1, 0.001)) == []
    meeting.leave()
    with pytest.raises(RuntimeError, match="opened no store"):
        Meeting.open(1, 2, tmp_path / "elsewhere").gather()


# ----------------------------------------------------------------------------- one node
def test_samples_of_one_node(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert node_bench.main(["--repeats=3", "--seconds=0.001", f"--disk={tmp_path}"]) == 0
    finally:
        torch.set_num_threads(threads)
    hardware, *lines = capfd.readouterr().out.splitlines()
    assert hardware.startswith("hardware ")
    found = [tuple(line.split()) for line in lines]
    assert [name for name, _, _ in found] == 3 * [
        "cpu-fp32",
        "cpu-bf16",
        "cpu-copy",
        "disk-write",
    ], "in turns"
    assert len(found) == 12 and all(float(value) > 0 for _, value, _ in found)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_number_or_a_missing_folder_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    try:
        assert (
            node_bench.main(["--repeats=1", "--seconds=0.001", f"--disk={tmp_path / 'none'}"]) == 1
        )
        assert "No such file" in capfd.readouterr().out.splitlines()[-1]
        monkeypatch.setattr(torch, "equal", lambda *_: False)
        assert node_bench.main([]) == 1
    finally:
        torch.set_num_threads(threads)
    assert capfd.readouterr().out.splitlines()[-1] == "a matrix product came out wrong"


# ----------------------------------------------------------------------------- group probe
# The probe of `tr11 nodes search`: two ranks that talk, a wrong number, a rank that is not there.


def test_two_ranks_talk(capfd: pytest.CaptureFixture[str]) -> None:
    with claimed_ports(1, beside_twins=True) as port:
        shared = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PATH": "/usr/bin",
        }
        other = subprocess.Popen(
            [sys.executable, "-m", "trainer.debug.group_probe"],
            env={**shared, "RANK": "1"},
            stdout=subprocess.PIPE,
        )
        assert group_probe.main({**shared, "RANK": "0", "SLURMD_NODENAME": "n01"}) == 0
        assert other.wait(timeout=300) == 0
    assert "rank 0 on n01: fine" in capfd.readouterr().out


def test_a_wrong_number_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert group_probe.main({"SLURMD_NODENAME": "n07"}) == 1
    assert "rank 0 on n07: a matrix product came out wrong" in capfd.readouterr().out
