"""The spares of running jobs as nodes to be searched: which they are, and short steps on them
beside the training.

A spare is a node of a running attempt's allocation that the attempt's newest launch does not train
on. That is looked up again right before each step and all the time while it runs: the agent may
take a spare at any moment, and the step then leaves at once. What cannot be read keeps every node
from being taken for a spare.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from msgspec.structs import replace

from tr11ops.base.observed import known
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.slurm_command import client_environment
from tr11ops.nodes.group_job import GroupRequest, group_test, outcome_of, unknown, words_of
from tr11ops.nodes.search import GroupOutcome, GroupTest
from tr11ops.observe.training_files import read_launch_nodes
from trainer.contract.paths import RunPaths, read_attempt_label
from trainer.contract.record import Record

LOOK_SECONDS = 0.5  # between two looks at the launch, while a step runs
LEAVE_SECONDS = 5.0  # for srun to end what it started
Group = tuple[str, ...]


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


class PooledGroups(Record):
    """Groups over free nodes and spares. A group is run apart for the free ones and for each job
    that holds others.
    """

    holders: Mapping[str, str]
    free: Callable[[Sequence[Group]], Sequence[GroupTest]]
    spare: Callable[[Sequence[Group]], Sequence[GroupTest]]

    def __call__(self, groups: Sequence[Group]) -> list[GroupTest]:
        parts: dict[bool, list[Group]] = {True: [], False: []}
        for group in groups:
            by_holder: dict[str, list[str]] = {}
            for node in group:
                by_holder.setdefault(self.holders.get(node, ""), []).append(node)
            for holder, nodes in by_holder.items():
                parts[not holder].append(tuple(nodes))
        with ThreadPoolExecutor(max_workers=2) as pool:
            under_way = [
                pool.submit(run, parts[is_free])
                for is_free, run in ((True, self.free), (False, self.spare))
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
