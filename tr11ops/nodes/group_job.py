"""What a job on a group of nodes runs: one command on each of them at once, and how it ended."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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
from tr11ops.nodes.search import GroupOutcome, GroupTest
from trainer.contract.documents import document, record_of
from trainer.contract.record import JsonObject, Record
from trainer.contract.units import shortened

PROBE = "{python} -m trainer.debug.group_probe"
LONGEST_WHY = 200


class GroupRequest(Record):
    """A command (of the shell) for every node of a group, and for how long it may run. Plain
    values, for JSON.
    """

    nodes: tuple[str, ...]
    command: str
    seconds: float
    on_slurm: bool = True


def run_group(request: Mapping[str, Any]) -> dict[str, str]:
    """Run a GroupRequest (as a mapping) inside the allocation; outcome and reason as plain values.

    A command that ends with another status than 0, or not at all, has failed. One that srun could
    not start at all (status 1 without a word of the command's, but srun's own) is unknown.
    """
    asked = record_of(GroupRequest, request)
    words = words_of(asked)
    if asked.on_slurm:
        environment = dict(os.environ)
    else:
        environment = {**os.environ, "SLURMD_NODENAME": asked.nodes[0]}
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=asked.seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _values(GroupOutcome.FAILED, f"did not end within {asked.seconds:g} s")
    except OSError as error:
        return _values(GroupOutcome.UNKNOWN, f"{words[0]}: {error.strerror}")
    return outcome_of(done.returncode, done.stdout)


def words_of(asked: GroupRequest, inside: str = "") -> list[str]:
    """The command line: on Slurm a step of the allocation around it, or of the running job
    `inside`, beside others.
    """
    words = ["sh", "-c", asked.command.replace("{python}", sys.executable)]
    if not asked.on_slurm:
        return words
    if inside:
        there = [f"--jobid={inside}", "--overlap", f"--nodelist={','.join(asked.nodes)}"]
    else:
        there = []
    count = len(asked.nodes)
    return [
        "srun",
        *there,
        f"--nodes={count}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--wait=30",
        *words,
    ]


def outcome_of(status: int, said: str) -> dict[str, str]:
    """What a step's exit status and all that it printed mean, as plain values."""
    if status == 0:
        return _values(GroupOutcome.PASSED, "")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith("srun: ")]
    refused = [
        line
        for line in lines
        if "Unable to create step" in line or "Unable to confirm allocation" in line
    ]
    if refused and not own:
        return _values(GroupOutcome.UNKNOWN, refused[0])
    last = [line for line in own if not line.endswith(": fine")][-1:]
    last = (
        last
        or [
            line.removeprefix("srun: error: ") for line in lines if line.startswith("srun: error: ")
        ][:1]
    )
    return _values(GroupOutcome.FAILED, ": ".join([f"exit status {status}", *last]))


def group_test(nodes: Sequence[str], values: JsonObject) -> GroupTest:
    """The outcome from `run_group`'s values. Raises ValueError, KeyError where they are something
    else.
    """
    return GroupTest(frozenset(nodes), GroupOutcome(values["outcome"]), str(values["why"]))


def unknown(nodes: Sequence[str], why: str) -> GroupTest:
    """A test that could not be made, and says nothing of its nodes."""
    return GroupTest(frozenset(nodes), GroupOutcome.UNKNOWN, why)


def _values(outcome: GroupOutcome, why: str) -> dict[str, str]:
    return {"outcome": str(outcome), "why": shortened(why, LONGEST_WHY)}


# ---------------------------------------------------------------------------
# Runs the groups of a search round: a job of submitit's for each, all at once; or processes here,
# without Slurm.

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
