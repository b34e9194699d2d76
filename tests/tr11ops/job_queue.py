"""A scheduler that knows some jobs and nothing else: for what only asks whose they are."""

from __future__ import annotations

from tr11ops.cluster.base import Job, Node


class Queue:
    """What looks ask a scheduler, answered from the jobs that it was made of."""

    name = "slurm"

    def __init__(self, *jobs: Job) -> None:
        self._jobs = jobs

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        return self._jobs

    def nodes(self) -> tuple[Node, ...]:
        return ()

    def partitions(self) -> tuple[object, ...]:
        return ()
