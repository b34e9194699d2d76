"""An attempt follows its own job: the limit that it has now, and the nodes that are left of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

from tr11ops.agent.attempt_context import AttemptContext, AttemptObservations, JobEnd
from tr11ops.agent.breaker import fault_of_end
from tr11ops.agent.mitigation import Mitigation
from tr11ops.agent.step import LineTee
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Job, JobState, lost_words
from tr11ops.diagnose.attribution.evidence import Attribution, Kind
from trainer.contract.attempt import ExitTime, request_stop

CONFIDENCE = 0.9  # two facts: the scheduler has lost the node, and has taken it from the job


class JobFollower:
    """Acts on what the scheduler said last of the attempt's job. `follow` is called many times,
    from one thread.
    """

    def __init__(
        self,
        context: AttemptContext,
        observations: AttemptObservations,
        mitigation: Mitigation,
        tee: LineTee,
    ) -> None:
        self._context = context
        self._observations = observations
        self._mitigation = mitigation
        self._say = tee.say
        self._leaves: ExitTime | None = None  # what the trainer was told last
        self._job: Job | None = None  # as it was when its nodes were looked at last
        self._lost: set[str] = set()  # nodes that have left it

    def follow(self, launch_nodes: Sequence[str]) -> None:
        """See to the limit and the nodes of the job as they are now. `launch_nodes`: on which
        workers run.
        """
        self._follow_limit()
        job = self._observations.job
        if job is not None and job is not self._job:
            self._job = job
            self._follow_nodes(launch_nodes)

    def end_own_job(self) -> None:
        """End the job where its batch host is lost to the scheduler: the end of this process does
        not end it.
        """
        scheduler = self._context.states
        host = self._observations.batch_host
        if scheduler is None or host not in self._observations.lost_nodes():
            return
        label = self._context.allocation.label  # its number may be the whole array's
        self._say(f"ending job {label}: the scheduler has lost {host}, which runs its batch script")
        with suppress(SchedulerError):  # the next task, or the watchdog, sees to it
            scheduler.cancel(label)

    def _follow_limit(self) -> None:
        """Have the trainer leave by the limit of the job as it is now."""
        watch = self._context.watch
        leaves = self._observations.exit_time()
        if watch is None or leaves is None or leaves == self._leaves:
            return
        before, self._leaves = self._leaves, leaves
        watch.leaves = leaves.time
        try:
            leaves.write(self._context.config.paths.exit_time(self._context.job_id))
        except OSError as error:
            self._say(f"the trainer cannot be told when to leave: {error}")
        if before is not None:
            at = "by no clock"
            if leaves.time is not None:
                at = f"at {datetime.fromtimestamp(leaves.time):%H:%M:%S}"
            words = f"the trainer leaves {at} now"
            if leaves.why:
                words += f": {leaves.why}"
            self._say(words)
            self._mitigation.note("limit-changed", words, {"exit_time": leaves.time})

    def _follow_nodes(self, launch_nodes: Sequence[str]) -> None:
        """A node has left the job, be it one that trains or a spare.

        The scheduler may take the job for ended and start the next task beside it: the queue waits
        for its end, also what comes back into it later. A spare is excluded here; for the others,
        the end of the launch tells more.
        """
        lost = self._observations.lost_nodes()
        for node in lost:
            if node not in self._lost:
                self._lost.add(node)
                self._see_to_loss(node, is_spare=node not in launch_nodes)
        if lost:
            self._mitigation.queue_behind(self._context.job_id)

    def _see_to_loss(self, node: str, is_spare: bool) -> None:
        words = f"{node} has left the job ({'it is idle' if is_spare else 'it trains'}): the scheduler has lost it"
        self._say(words)
        self._mitigation.note("node-lost", words, {"node": node})
        if node == self._observations.batch_host:
            self._say(f"{node} runs the batch script: the trainer shall save and leave")
            request = self._context.config.paths.stop_request(self._context.job_id)
            with suppress(OSError):  # the launch's end is looked at again
                request_stop(request, f"the scheduler has lost {node}, the batch host")
        elif is_spare:
            self._exclude_spare(node)

    def _exclude_spare(self, node: str) -> None:
        self._observations.look()
        if self._observations.is_down(node):
            why = f"{node} is down and has left the job"
            self._mitigation.exclusions.exclude_nodes(
                Attribution(
                    Kind.NODE, why, CONFIDENCE, (node,), evidence=(why,), fault=f"node {node}"
                )
            )


def of_ended_job(over: JobEnd, nodes: Sequence[str]) -> Attribution:
    """Whose fault it is that a launch ended with its job, which had these nodes: none's, but a lost
    batch host's.
    """
    fault = fault_of_end(over.state, nodes)
    if over.state is JobState.RUNNING:
        return Attribution(
            Kind.NODE, over.why, CONFIDENCE, (nodes[0],), fault=fault, rule="job-over"
        )
    return Attribution(Kind.UNKNOWN, over.why, CONFIDENCE, fault=fault, rule="job-over")


def of_dead_host(host: str, job: str) -> Attribution:
    """That a job's batch host is gone, and its controller with it, which would have said so itself."""
    return _of_lost_node(host, f"{host} is down, and ran the batch script of job {job}")


def of_node_before(node: str, job: str) -> Attribution:
    """That a node is gone on which a job ran until Slurm ended it to start it again."""
    why = f"{node} is down, and Slurm starts job {job} again, which ran on it"
    return _of_lost_node(node, why)


def _of_lost_node(host: str, why: str) -> Attribution:
    return Attribution(
        Kind.NODE, lost_words([host]), CONFIDENCE, (host,), evidence=(why,), fault=f"node {host}"
    )
