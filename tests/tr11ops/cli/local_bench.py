"""A folder in which `tr11` is typed, with an embedded scheduler of its own whose nodes are taken:
nothing trains.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.launch.run_inputs import write_card
from tests.waiting import until
from tr11ops.cli.main import execute
from tr11ops.cluster.base import BatchRequest, Job
from tr11ops.cluster.local import LocalScheduler
from tr11ops.rundir.paths import parse_comment

NODES = 2


@dataclass
class Answer:
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class LocalBench:
    """Types commands in `folder` (in this process) and looks at what they did."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capture = capture
        self.scheduler = LocalScheduler()
        self.card = write_card(folder)

    def tr11(self, *words: str) -> Answer:
        self.capture.readouterr()
        code = execute([*words])
        out, err = self.capture.readouterr()
        assert "Traceback" not in out + err
        return Answer(code, out, err)

    def launch(self, *words: str) -> Answer:
        return self.tr11("launch", "--run", str(self.card), "--scheduler", "local", *words)

    def kill(self, *words: str) -> Answer:
        return self.tr11("kill", "--run", str(self.card), "--scheduler", "local", *words)

    def submit(
        self, script: str, nodes: int = NODES, name: str = "block", comment: str = ""
    ) -> str:
        """Submit a script past tr11; with a run's comment, as if `tr11 launch` had put its record
        there before.
        """
        mark = parse_comment(comment)
        if mark is not None:
            (self.folder / "run" / "state" / "submissions" / mark[0]).mkdir(
                parents=True, exist_ok=True
            )
        request = BatchRequest(
            script=f"#!/bin/bash\n{script}\n", name=name, nodes=nodes, time_limit_seconds=600,
            output=str(self.folder / "%j.out"), working_directory=self.folder, comment=comment,
        )  # fmt: skip
        return self.scheduler.submit(request)

    def block(self) -> str:
        """Take all nodes, so that what is submitted next waits."""
        job_id = self.submit("exec sleep 600")
        self.wait(lambda jobs: any(job_id == job.raw_id for job in jobs if job.state.is_active))
        return job_id

    def living(self) -> list[Job]:
        return [job for job in self.scheduler.jobs() if not job.state.is_final]

    def wait(self, condition: Any, seconds: float = 600.0) -> None:
        until(
            lambda: condition(self.scheduler.jobs()), seconds=seconds, context=self.scheduler.jobs
        )

    def clear(self) -> None:
        """End every job and wait until none is left."""
        for number in {job.array_id or job.raw_id for job in self.living()}:
            self.scheduler.cancel(number)
        self.wait(lambda jobs: all(job.state.is_final for job in jobs))
