"""The probe of `tr11 nodes search`: two ranks that talk, a wrong number, a rank that is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tr11ops.twin.machine import claimed_ports
from trainer.debug import group_probe


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
