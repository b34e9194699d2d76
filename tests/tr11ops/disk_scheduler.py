"""A scheduler whose queue is a folder, so that it outlives the process that talks to it: for tests
that kill processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import BatchRequest, Job, JobState, Node, Partition, TestResult
from trainer.contract.files import write_atomically

EFFECT = "tr11.tests.scheduler"  # an audit event before and after each change


class DiskScheduler:
    """Takes everything and runs nothing: a submitted job waits until a test changes its file."""

    name = "local"

    def __init__(self, folder: Path, nodes: int = 6):
        self.folder = folder
        self._nodes = nodes
        folder.mkdir(exist_ok=True)

    def put(self, job: Job) -> None:
        value = {**to_builtins(job), "state": job.state.value}
        write_atomically(self.folder / f"{job.raw_id}.json", json.dumps(value))

    def mark_down(self, node: str) -> None:
        (self.folder / f"{node}.down").touch()

    # ------------------------------------------------------------------ the protocol
    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        found = [
            self._read(path)
            for path in sorted(self.folder.glob("*.json"), key=lambda path: int(path.stem))
        ]
        return tuple(job for job in found if name in (None, job.name))

    def job(self, job_id: str) -> Job | None:
        path = self.folder / f"{job_id}.json"
        return self._read(path) if path.exists() else None

    def nodes(self) -> tuple[Node, ...]:
        names = [f"n{number}" for number in range(1, self._nodes + 1)]
        down = {path.stem for path in self.folder.glob("*.down")}
        return tuple(
            Node(name, frozenset({"down" if name in down else "idle"}), partitions=("p",))
            for name in names
        )

    def partitions(self) -> tuple[Partition, ...]:
        return (Partition("p", None, tuple(node.name for node in self.nodes()), is_default=True),)

    def test(self, request: BatchRequest) -> TestResult:
        return TestResult(True, "it would")

    def submit(self, request: BatchRequest) -> str:
        sys.audit(EFFECT, "before submit")
        number = str(1 + max((int(path.stem) for path in self.folder.glob("*.json")), default=100))
        self.put(
            Job(
                number, number, None, None, request.name, os.environ.get("USER", "root"), JobState.PENDING,
                reason="Resources", comment=request.comment, excluded=request.exclude,
                dependency=request.dependency or "",
            )
        )  # fmt: skip
        sys.audit(EFFECT, "after submit")
        return number

    def cancel(self, job_id: str) -> None:
        self._change(job_id, state=JobState.CANCELLED)

    def hold(self, job_id: str) -> None:
        self._change(job_id, reason="JobHeldUser")

    def release(self, job_id: str) -> None:
        self._change(job_id, reason="Priority")

    def exclude(self, job_id: str, nodes: tuple[str, ...]) -> None:
        self._change(job_id, excluded=nodes)

    def signal(self, job_id: str, signal_name: str) -> None:
        raise SchedulerError("nothing runs here")

    # ------------------------------------------------------------------ how
    def _change(self, job_id: str, **changes: Any) -> None:
        job = self.job(job_id)
        if job is None:
            raise SchedulerError(f"there is no job {job_id}")
        sys.audit(EFFECT, "before change")
        self.put(replace(job, **changes))
        sys.audit(EFFECT, "after change")

    def _read(self, path: Path) -> Job:
        value = json.loads(path.read_text())
        lists = {name: tuple(value[name]) for name in ("nodes", "excluded", "pending_tasks")}
        return Job(**{**value, **lists, "state": JobState(value["state"])})
