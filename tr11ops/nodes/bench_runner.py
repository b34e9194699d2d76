"""Runs `tr11 nodes bench`: one job of submitit's on all nodes at once; or processes here, one after
the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Scheduler
from tr11ops.nodes.bench_job import BenchRequest, measure, read_answers, run_bench
from tr11ops.nodes.bench_outliers import NodeAnswer
from tr11ops.nodes.check import POLL_SECONDS, EndedJobs, JobSettings, submit_to
from tr11ops.nodes.group_runner import START_SECONDS
from trainer.contract.documents import document
from trainer.contract.record import Record

END_SECONDS = 30.0  # for late steps to be ended, and for the job to leave
Progress = Callable[[NodeAnswer], None]


class SlurmBench(Record):
    """The measurements as one job that has its nodes to itself. It is cancelled when its time is
    over.
    """

    scheduler: Scheduler
    settings: JobSettings
    request: BenchRequest

    @property
    def minutes(self) -> int:
        """The job's time limit."""
        return math.ceil((self.request.seconds + END_SECONDS) / 60)

    @property
    def deadline(self) -> float:
        """Seconds after which the job is given up, in the queue or not."""
        return START_SECONDS + self.request.seconds + END_SECONDS

    def __call__(self, progress: Progress) -> tuple[NodeAnswer, ...]:
        """Every node's answer, in the order of the request; `progress` gets each as it comes."""
        nodes = self.request.nodes
        found = dict[str, NodeAnswer]()
        try:
            job = submit_to(
                self.settings, nodes, self.minutes, run_bench, document(self.request), is_alone=True
            )
        except Exception as error:  # a refusal of sbatch comes as submitit's own kind of error
            why = f"no job could be started: {' '.join(str(error).split())}"
            return tuple(NodeAnswer(node, why=why) for node in nodes)
        try:
            why = self._wait(job.job_id, found, progress)
        finally:
            with suppress(SchedulerError):  # it has a short time limit of its own
                self.scheduler.cancel(job.job_id)
        return tuple(found.get(node) or NodeAnswer(node, why=why) for node in nodes)

    def _wait(self, job_id: str, found: dict[str, NodeAnswer], progress: Progress) -> str:
        """Wait for the answers; why those that are missing are."""
        ends = EndedJobs(self.scheduler)
        deadline = time.monotonic() + self.deadline
        while time.monotonic() < deadline:
            for answer in read_answers(Path(self.request.folder)):
                if answer.node not in found:
                    found[answer.node] = answer
                    progress(answer)
            if len(found) == len(self.request.nodes):
                return ""
            if (ended := ends.of(job_id)) is not None:
                return f"the job ended without its answer: {ended}"
            time.sleep(POLL_SECONDS)
        return f"no answer: the job did not start, or not end, within {self.deadline:g} s"


class LocalBench(Record):
    """The measurements as processes of this machine, which plays every node: one at a time, or each
    would slow the other down.
    """

    request: BenchRequest

    def __call__(self, progress: Progress) -> tuple[NodeAnswer, ...]:
        asked = replace(self.request, on_slurm=False)
        answers = []
        for rank in range(len(asked.nodes)):
            answers.append(measure(asked, rank))
            progress(answers[-1])
        return tuple(answers)
