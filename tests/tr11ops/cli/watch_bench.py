"""A foreign script on the embedded scheduler, its log, and `tr11 watch` typed beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.cli.local_bench import Answer
from tests.waiting import until
from tr11ops.cli.main import execute
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.local import LocalScheduler
from trainer.contract.attempt import EndMarker
from trainer.contract.metrics_record import records

STEP = "[titan] 2026-11-28 11:20:06,001 - root - INFO - step: {0:2}  loss: {1:.4f}  grad_norm: 1.2  memory: 1.00GiB(1.00%)  tps: 100"
BASH_STEP = STEP.replace("{0:2}", "$i").replace("{1:.4f}", "$((12 - i % 10)).5000")


class WatchBench:
    """A foreign script, its log, and `tr11` typed beside it."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capture = folder, capture
        self.scheduler = LocalScheduler()
        self.log = folder / "theirs.log"
        self.job = ""

    def submit(self, *lines: str) -> str:
        script = "\n".join(("#!/bin/bash", *lines)) + "\n"
        request = BatchRequest(
            script=script, name="their job", nodes=1, time_limit_seconds=600,
            output=str(self.log), working_directory=self.folder,
        )  # fmt: skip
        self.job = self.scheduler.submit(request)
        return self.job

    def tr11(self, *words: str) -> Answer:
        self.capture.readouterr()
        code = execute([*words])
        out, err = self.capture.readouterr()
        assert "Traceback" not in err
        return Answer(code, out, err)

    def watch(self, *words: str) -> Answer:
        return self.tr11(
            "watch", self.job, "--log", str(self.log), "--scheduler", "local", "--once", *words
        )

    @property
    def root(self) -> Path:
        return self.folder / f"tr11-watch-{self.job}"

    @property
    def card(self) -> str:
        return str(self.root / "tr11.toml")

    def ended(self) -> None:
        def is_over() -> bool:
            job = self.scheduler.job(self.job)
            return job is not None and job.state.is_final

        until(is_over, "the job ends")

    def marker(self) -> EndMarker | None:
        return EndMarker.read(self.root / "state/attempts" / self.job / "end.json")

    def steps(self) -> list[Any]:
        path = next(self.root.glob("*-logs/logs/main"), None)
        if path is None:
            return []
        return [record.iteration for record in records(path / "metrics.jsonl")]


@contextmanager
def watching(
    folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
) -> Iterator[WatchBench]:
    """In a folder of its own; what still runs at the end is cancelled."""
    patch.chdir(folder)
    patch.setenv("TR11_LOCAL_SCHEDULER", str(folder / "scheduler"))
    one = WatchBench(folder, capture)
    try:
        yield one
    finally:
        for job in one.scheduler.jobs():
            if not job.state.is_final:
                one.scheduler.cancel(job.job_id)
