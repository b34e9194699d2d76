"""A queue that an agent's task sees, for tests."""

from __future__ import annotations

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.arrays import covers
from tr11ops.cluster.base import Job, JobState, Node


class Queue:
    """A scheduler as far as queued jobs needs one: jobs that wait, and answers that fail a given
    number of times.
    """

    name = "queue"

    def __init__(self, *jobs: Job) -> None:
        self.waiting = {job.raw_id: job for job in jobs}
        self.silent = 0
        self.known: tuple[Node, ...] = ()
        self.refuses: dict[str, bool] = {}  # job -> is it done all the same?

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        self._answer()
        return tuple(self.waiting.values())

    def exclude(self, job_id: str, nodes: tuple[str, ...]) -> None:
        self._change(job_id, excluded=nodes)

    def hold(self, job_id: str) -> None:
        self._change(job_id, reason="JobHeldUser")

    def release(self, job_id: str) -> None:
        self._change(job_id, reason="Resources")

    def set_comment(self, job_id: str, comment: str) -> None:
        self._change(job_id, comment=comment)

    def run_after(self, job_id: str, after: str) -> None:
        self._change(job_id, dependency=f"afterany:{after}(unfulfilled)")

    def _answer(self) -> None:
        if self.silent:
            self.silent -= 1
            raise SchedulerUnreachable("no answer")

    def nodes(self) -> tuple[Node, ...]:
        return self.known

    def _change(self, job_id: str, **changes: object) -> None:
        self._answer()
        for raw, job in list(self.waiting.items()):
            waits = job.state is JobState.PENDING and covers(job_id, job)
            if waits and self.refuses.get(job_id, True):
                self.waiting[raw] = replace(job, **changes)  # type: ignore[arg-type]
        if job_id in self.refuses:
            raise SchedulerError("refused")


def job(raw: str, array: str | None, **changes: object) -> Job:
    plain = Job(raw, raw, array, None, "small", "me", JobState.PENDING)
    return replace(plain, **changes)  # type: ignore[arg-type]
