"""A queue with links of a chain, for tests."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.base import BatchRequest, Job, JobState, Node, Partition


@dataclass
class Queue:
    """A scheduler of a test. `answers` are what the next submissions meet: "", "refuse", "lost" or
    "nothing came".
    """

    known: dict[str, Job] = field(default_factory=dict)
    requests: list[BatchRequest] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    silent: int = 0  # so many questions are not answered
    name: str = "slurm"
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, request: BatchRequest) -> str:
        with self.lock:
            answer = self.answers.pop(0) if self.answers else ""
            if answer == "refuse":
                raise SchedulerError("sbatch: Invalid account")
            if answer != "nothing came":
                number = str(next(self.numbers))
                self.requests.append(request)
                self.known[number] = Job(
                    number,
                    number,
                    None,
                    None,
                    request.name,
                    "ana",
                    JobState.PENDING,
                    comment=request.comment,
                )
            if answer:
                raise SchedulerUnreachable("sbatch: Socket timed out")
            return number

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        if self.silent:
            self.silent -= 1
            raise SchedulerUnreachable("squeue: no answer")
        return tuple(self.known.values())

    def partitions(self) -> tuple[Partition, ...]:
        return Partition("gpu_p5", None, ("n1",), is_default=True), Partition(
            "prepost", 20 * 3600, ("n2",)
        )

    def nodes(self) -> tuple[Node, ...]:
        return Node("n1", frozenset({"idle"}), gpus=8), Node(
            "n2", frozenset({"idle"}), memory_megabytes=190_000
        )

    def cancel(self, job_id: str) -> None:
        self.known[job_id] = replace(self.known[job_id], state=JobState.CANCELLED)

    def waiting(self) -> list[str]:
        return [number for number, job in self.known.items() if job.state is JobState.PENDING]

    def run(self, number: str) -> None:
        self.known[number] = replace(self.known[number], state=JobState.RUNNING)

    def finish(self, number: str) -> None:
        self.known[number] = replace(self.known[number], state=JobState.COMPLETED)
