"""Runs the groups of a search round: a job of submitit's for each, all at once; or processes here,
without Slurm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Scheduler
from tr11ops.nodes.check import (
    POLL_SECONDS,
    PROCESSES_AT_ONCE,
    EndedJobs,
    JobSettings,
    last_line,
    submit_to,
)
from tr11ops.nodes.group_job import GroupRequest, group_test, run_group, unknown
from tr11ops.nodes.search import GroupOutcome, GroupTest
from trainer.contract.documents import document
from trainer.contract.record import Record
from trainer.contract.units import shortened

START_SECONDS = 120.0  # for a job to start on nodes that were free a moment ago


class SlurmGroups(Record):
    """Groups as jobs. Jobs that have not ended when the round is given up are cancelled."""

    scheduler: Scheduler
    settings: JobSettings
    request: GroupRequest  # its nodes are those of each group in turn

    def __call__(self, groups: Sequence[tuple[str, ...]]) -> list[GroupTest]:
        minutes = math.ceil((self.request.seconds + START_SECONDS) / 60)
        found: dict[int, GroupTest] = {}
        jobs: dict[int, Any] = {}
        try:
            for index, group in enumerate(groups):
                try:
                    values = document(replace(self.request, nodes=group))
                    jobs[index] = submit_to(self.settings, group, minutes, run_group, values)
                except (
                    Exception
                ) as error:  # a refusal of sbatch comes as submitit's own kind of error
                    found[index] = unknown(
                        group,
                        f"no job could be started: {shortened(' '.join(str(error).split()), 160)}",
                    )
            self._wait(groups, jobs, found)
        finally:
            for job in jobs.values():
                with suppress(SchedulerError):  # it has a short time limit of its own
                    self.scheduler.cancel(job.job_id)
        return [
            found.get(index) or unknown(group, "did not start in time")
            for index, group in enumerate(groups)
        ]

    def _wait(
        self, groups: Sequence[tuple[str, ...]], jobs: dict[int, Any], found: dict[int, GroupTest]
    ) -> None:
        ends = EndedJobs(self.scheduler)
        deadline = time.monotonic() + self.request.seconds + START_SECONDS
        while jobs and time.monotonic() < deadline:
            for index, job in list(jobs.items()):
                if job.paths.result_pickle.exists():
                    found[index] = _read(groups[index], job)
                elif (ended := ends.of(job.job_id)) is not None:
                    # The job itself died, on nodes that were well a moment ago: that is what is
                    # searched for.
                    found[index] = GroupTest(
                        frozenset(groups[index]), GroupOutcome.FAILED, f"the job died: {ended}"
                    )
                else:
                    continue
                del jobs[index]
            time.sleep(POLL_SECONDS)


class LocalGroups(Record):
    """Groups as processes on this machine, which plays every node; the command runs once for each
    node.
    """

    request: GroupRequest

    def __call__(self, groups: Sequence[tuple[str, ...]]) -> list[GroupTest]:
        with ThreadPoolExecutor(PROCESSES_AT_ONCE) as pool:
            return list(pool.map(self._one, groups))

    def _one(self, group: tuple[str, ...]) -> GroupTest:
        tests = [
            group_test(
                group, run_group(document(replace(self.request, nodes=(node,), on_slurm=False)))
            )
            for node in group
        ]
        return next((test for test in tests if test.outcome is not GroupOutcome.PASSED), tests[0])


def _read(group: tuple[str, ...], job: Any) -> GroupTest:
    try:
        return group_test(group, job.task(0).result())  # the other nodes have no task of submitit's
    except Exception as error:  # whatever broke the job comes back as submitit's own kind of error
        return unknown(group, f"the job failed: {last_line(error)}")
