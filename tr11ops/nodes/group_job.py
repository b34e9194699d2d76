"""Groups of nodes for a search: what a job on one runs (one command on each of its nodes at once), how it ended, and
who runs the groups: jobs, processes here, or steps on the spares of jobs that train.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import known
from tr11ops.cluster.base import Job, JobState, Scheduler
from tr11ops.cluster.slurm_command import client_environment
from tr11ops.nodes.check import (
    POLL_SECONDS,
    PROCESSES_AT_ONCE,
    EndedJobs,
    JobSettings,
    last_line,
    submit_to,
)
from tr11ops.nodes.search import GroupOutcome, GroupTest
from tr11ops.observe.training_files import read_launch_nodes
from trainer.contract.documents import document, record_of
from trainer.contract.paths import RunPaths, read_attempt_label
from trainer.contract.record import JsonObject, Record
from trainer.contract.units import shortened

PROBE = "{python} -m trainer.debug.group_probe"
LONGEST_WHY = 200
Group = tuple[str, ...]
GroupRunner = Callable[[Sequence[Group]], Sequence[GroupTest]]


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

    def __call__(self, groups: Sequence[Group]) -> list[GroupTest]:
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
        self, groups: Sequence[Group], jobs: dict[int, Any], found: dict[int, GroupTest]
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


def groups_here(groups: Sequence[Group], request: GroupRequest) -> list[GroupTest]:
    """Groups as processes on this machine, which plays every node; the command runs once for each
    node.
    """

    def one(group: Group) -> GroupTest:
        asked = [replace(request, nodes=(node,), on_slurm=False) for node in group]
        tests = [group_test(group, run_group(document(each))) for each in asked]
        return next((test for test in tests if test.outcome is not GroupOutcome.PASSED), tests[0])

    with ThreadPoolExecutor(PROCESSES_AT_ONCE) as pool:
        return list(pool.map(one, groups))


def _read(group: tuple[str, ...], job: Any) -> GroupTest:
    try:
        return group_test(group, job.task(0).result())  # the other nodes have no task of submitit's
    except Exception as error:  # whatever broke the job comes back as submitit's own kind of error
        return unknown(group, f"the job failed: {last_line(error)}")


# ---------------------------------------------------------------------------
# The spares of running jobs as nodes to be searched: which they are, and short steps on them
# beside the training.
#
# A spare is a node of a running attempt's allocation that the attempt's newest launch does not train
# on. That is looked up again right before each step and all the time while it runs: the agent may
# take a spare at any moment, and the step then leaves at once. What cannot be read keeps every node
# from being taken for a spare.

LOOK_SECONDS = 0.5  # between two looks at the launch, while a step runs
LEAVE_SECONDS = 5.0  # for srun to end what it started


def training_nodes(paths: RunPaths, job_id: str) -> frozenset[str] | None:
    """The nodes of the attempt's newest launch; None where that cannot be read, or none has begun."""
    nodes = known(read_launch_nodes(paths, job_id), None)
    return None if nodes is None else frozenset(nodes)


def spares_of(paths: RunPaths, jobs: Iterable[Job], user: str) -> dict[str, str]:
    """Spare node -> the number of the running job that holds it, of these jobs of the run that
    `user` may look into.
    """
    found: dict[str, str] = {}
    for job in jobs:
        if job.state is JobState.RUNNING and (job.user in {"", user} or os.geteuid() == 0):
            training = training_nodes(paths, job.raw_id)
            found.update(
                {name: job.raw_id for name in job.nodes if training and name not in training}
            )
    return found


class SpareGroups(Record):
    """Groups as steps in the allocations that hold them. `holders`: node -> job, as `spares_of`
    found it.

    `runs`: is this job known to run? What fails in a job that has ended says nothing of its nodes.
    """

    paths: RunPaths
    holders: Mapping[str, str]
    request: GroupRequest  # its nodes are those of each group in turn
    environment: Mapping[str, str]
    runs: Callable[[str], bool]
    look_seconds: float = LOOK_SECONDS

    def __call__(self, groups: Sequence[Group]) -> list[GroupTest]:
        """One test for each group. All nodes of a group are held by one job."""
        with ThreadPoolExecutor(max_workers=max(1, len(groups))) as pool:
            return list(pool.map(self._one, groups))

    def _taken(self, group: Group) -> str:
        """Why these nodes must not be touched now; "" where all of them stand idle."""
        job_id = self.holders[group[0]]
        label = read_attempt_label(self.paths, job_id)
        training = training_nodes(self.paths, job_id)
        if training is None:
            return f"which nodes job {label} trains on cannot be read"
        busy = sorted(training & set(group))
        if busy:
            return f"job {label} trains on {', '.join(busy)} now"
        return ""

    def _one(self, group: Group) -> GroupTest:
        taken = self._taken(group)
        if taken:
            return unknown(group, taken)
        asked = replace(self.request, nodes=group)
        try:
            step = subprocess.Popen(
                words_of(asked, inside=self.holders[group[0]]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=client_environment(self.environment),
                process_group=0,
            )
        except OSError as error:
            return unknown(group, f"srun: {error.strerror}")
        with step:
            return self._attend(step, asked)

    def _attend(self, step: subprocess.Popen[str], asked: GroupRequest) -> GroupTest:
        """Wait for a step, and end it when its time is over or a node of it is needed."""
        until = time.monotonic() + asked.seconds
        while True:
            try:
                said, _ = step.communicate(timeout=self.look_seconds)
                holder = self.holders[asked.nodes[0]]
                if step.returncode != 0 and not self.runs(holder):
                    label = read_attempt_label(self.paths, holder)
                    return unknown(
                        asked.nodes, f"job {label} ended meanwhile, or is not seen to run"
                    )
                return group_test(asked.nodes, outcome_of(step.returncode, said))
            except subprocess.TimeoutExpired:
                taken = self._taken(asked.nodes)
                if not taken and time.monotonic() < until:
                    continue
            _end(step)
            if taken:
                return unknown(asked.nodes, taken)
            return GroupTest(
                frozenset(asked.nodes),
                GroupOutcome.FAILED,
                f"did not end within {asked.seconds:g} s",
            )


def pooled_groups(
    groups: Sequence[Group], holders: Mapping[str, str], free: GroupRunner, spare: GroupRunner
) -> list[GroupTest]:
    """Groups over free nodes and spares. A group is run apart for the free ones and for each job
    that holds others.
    """
    parts: dict[bool, list[Group]] = {True: [], False: []}
    for group in groups:
        by_holder: dict[str, list[str]] = {}
        for node in group:
            by_holder.setdefault(holders.get(node, ""), []).append(node)
        for holder, nodes in by_holder.items():
            parts[not holder].append(tuple(nodes))
    with ThreadPoolExecutor(max_workers=2) as pool:
        under_way = [
            pool.submit(run, parts[is_free])
            for is_free, run in ((True, free), (False, spare))
            if parts[is_free]
        ]
        return [test for future in under_way for test in future.result()]


def _end(step: subprocess.Popen[str]) -> None:
    """End a step with what it started on the nodes: srun passes a TERM on."""
    step.terminate()
    with suppress(subprocess.TimeoutExpired):
        step.communicate(timeout=LEAVE_SECONDS)
        return
    step.kill()
    step.communicate()
