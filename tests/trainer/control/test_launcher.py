"""torchrun as the node agent starts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server import api

from trainer.control import launcher


def test_a_store_that_left_first_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent of node 0 has the store, and may be gone when another agent asks whether all have ended."""

    def barrier(**_: Any) -> None:
        raise DistNetworkError("failed to recv, got 0 bytes")

    agent: Any = SimpleNamespace(
        _worker_group=SimpleNamespace(state="SUCCEEDED", group_world_size=2), _exit_barrier_timeout=300, _store=None
    )
    monkeypatch.setattr(api.store_util, "barrier", barrier)
    monkeypatch.setattr(launcher, "main", lambda _: api.SimpleElasticAgent._exit_barrier(agent))
    for kept in (launcher.PContext, "close"), (launcher.DefaultLogsSpecs, "reify"):
        monkeypatch.setattr(*kept, getattr(*kept))
    caplog.set_level("INFO", api.logger.name)
    monkeypatch.setattr(api.logger, "propagate", True)
    assert launcher.run([]) == 0
    assert [record.levelname for record in caplog.records] == ["INFO"]
