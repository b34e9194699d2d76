"""Fixtures of the command-line tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.supervisor_server import fork_supervisor
from tests.tr11ops.cli.local_bench import NODES, LocalBench


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[LocalBench]:
    """A folder with a sound card, an embedded scheduler with two nodes, and no job left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    monkeypatch.setenv("TR11_LOCAL_NODES", str(NODES))
    for name in ("TR11_RUN", "TR11_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tr11ops.cluster.local.launch_supervisor", fork_supervisor)
    under_test = LocalBench(tmp_path, capsys)
    try:
        yield under_test
    finally:
        under_test.clear()


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a child of `tr11 checkpoints` in this process, which has torch already; one test
    has a real child.
    """
    from trainer.checkpoint.__main__ import main  # with torch, which most tests do not need

    def run(module: str, request: str) -> int:
        assert module == "trainer.checkpoint"
        return main([request])

    monkeypatch.setattr("tr11ops.cli.checkpoints.run_trainer_module", run)
