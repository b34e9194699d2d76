"""torchrun as the node agent starts it."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server import api

from trainer.control import launcher


def test_a_store_that_left_first_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent of node 0 has the store, and may be gone when another agent asks whether all have
    ended.
    """

    def barrier(**_: Any) -> None:
        raise DistNetworkError("failed to recv, got 0 bytes")

    agent: Any = SimpleNamespace(
        _worker_group=SimpleNamespace(state="SUCCEEDED", group_world_size=2),
        _exit_barrier_timeout=300,
        _store=None,
    )
    monkeypatch.setattr(api.store_util, "barrier", barrier)
    monkeypatch.setattr(launcher, "main", lambda _: api.SimpleElasticAgent._exit_barrier(agent))
    for kept in (launcher.PContext, "close"), (launcher.DefaultLogsSpecs, "reify"):
        monkeypatch.setattr(*kept, getattr(*kept))
    caplog.set_level("INFO", api.logger.name)
    monkeypatch.setattr(api.logger, "propagate", True)
    assert launcher.run([]) == 0
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_taken_port_is_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torchrun of node 0 listens itself, before there is any worker: no worker can tell of it."""
    for kept in (launcher.PContext, "close"), (launcher.DefaultLogsSpecs, "reify"):
        monkeypatch.setattr(*kept, getattr(*kept))
    monkeypatch.setenv("TR11_NODE_NAME", "iam01")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = ["--nnodes=2", "--node-rank=0", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        port = f"--master-port={taken.getsockname()[1]}"
        assert launcher.run([*places, port, "--max-restarts=0", "-m", "trainer"]) == 1
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if line.startswith("tr11: ")]
    assert (
        line.startswith("tr11: the launcher on iam01 failed: DistNetworkError: ")
        and "EADDRINUSE" in line
    )
    assert "Traceback" not in said
