"""The simulated cluster's scheduler, as far as production asks it: nodes as the world has them, and one
array of batch jobs whose tasks run one after another.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.arrays import covers
from tr11ops.cluster.base import (
    BatchRequest,
    Job,
    JobState,
    Node,
    Partition,
    TestResult,
)
from tr11ops.replay.world import World

PARTITION = "replay"
ENDED = 143  # by SIGTERM
USER = "operator"
FIRST_ARRAY = 1000
ENDED_KEPT = 4  # jobs that are over and still known, as MinJobAge leaves them
GPUS = 8
# reasons for which a job waits, in Slurm's words
WAITS = "Resources"
NEXT_IN_ARRAY = "JobArrayTaskLimit"
HELD = "JobHeldUser"


class SimulatedScheduler:
    """Slurm without a queue of others: what may start does so when nodes are free. Implements
    `tr11ops.cluster.base.JobScheduler`.
    """

    name = "slurm"

    def __init__(self, world: World, run: str, limit: float) -> None:
        self._world = world
        self._run = run
        self._limit = limit
        self._arrays = 0
        self._ended: deque[Job] = deque(maxlen=ENDED_KEPT)
        self._queued: list[Job] = []
        self.running: Job | None = None

    # ------------------------------------------------------------------ what the world does
    def queue(self, tasks: int, nodes: int, comment: str, excluded: tuple[str, ...] = ()) -> str:
        """Queue an array of so many tasks, on so many nodes each; its number."""
        self._arrays += 1
        number = str(FIRST_ARRAY * self._arrays)
        job = Job(
            f"{number}_[1-{tasks}%1]",
            raw_id=number,
            array_id=number,
            task_id=None,
            name=self._run,
            user=USER,
            state=JobState.PENDING,
            reason=WAITS,
            partition=PARTITION,
            node_count=nodes,
            submit_time=self._world.now,
            eligible_time=self._world.now,
            time_limit_seconds=int(self._limit),
            comment=comment,
            excluded=excluded,
            pending_tasks=tuple(range(1, tasks + 1)),
        )
        self._queued.append(job)
        return number

    def begin(self, nodes: tuple[str, ...]) -> Job:
        """Start the next task on these nodes."""
        queued = self.next_job
        if queued is None or queued.array_id is None:
            raise SchedulerError("nothing is queued that may start")
        task, *rest = queued.pending_tasks
        now = self._world.now
        self.running = replace(
            queued,
            job_id=f"{queued.array_id}_{task}",
            raw_id=str(int(queued.array_id) + task),
            task_id=task,
            state=JobState.RUNNING,
            reason="",
            nodes=nodes,
            start_time=now,
            end_time=now + self._limit,
            pending_tasks=(),
        )
        place = self._queued.index(queued)
        if rest:
            shown = f"{queued.array_id}_{rest[0]}"
            if rest[1:]:
                shown = f"{queued.array_id}_[{rest[0]}-{rest[-1]}%1]"
            self._queued[place] = replace(
                queued, job_id=shown, pending_tasks=tuple(rest), reason=NEXT_IN_ARRAY
            )
        else:
            del self._queued[place]
        return self.running

    def finish(self, state: JobState, code: int) -> None:
        """The task that runs is over."""
        if self.running is not None:
            worst = None
            if state is JobState.FAILED:
                worst = ENDED  # the step of its workers
            done = replace(
                self.running,
                state=state,
                end_time=self._world.now,
                exit_code=code,
                derived_exit_code=worst,
            )
            self._ended.append(done)
        self.running = None
        self._queued = [
            replace(job, reason=WAITS, eligible_time=self._world.now)
            if job.reason == NEXT_IN_ARRAY
            else job
            for job in self._queued
        ]

    def lose(self, node: str) -> None:
        """The job goes on without a node."""
        if self.running is not None:
            left = tuple(name for name in self.running.nodes if name != node)
            self.running = replace(self.running, nodes=left)

    @property
    def held_jobs(self) -> tuple[Job, ...]:
        """What waits for someone to release it."""
        return tuple(job for job in self._queued if job.reason == HELD)

    @property
    def is_held(self) -> bool:
        """Whether anything does."""
        return bool(self.held_jobs)

    @property
    def next_job(self) -> Job | None:
        """What may start next, once nodes are free."""
        return next((job for job in self._queued if job.reason != HELD), None)

    # ------------------------------------------------------------------ the protocol: looks
    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        """What runs, what is queued, and what ended lately."""
        running = () if self.running is None else (self.running,)
        every = (*running, *self._queued, *self._ended)
        return tuple(job for job in every if name in (None, job.name))

    def job(self, job_id: str) -> Job | None:
        """By either of its numbers."""
        return next((job for job in self.jobs() if job_id in (job.raw_id, job.job_id)), None)

    def nodes(self) -> tuple[Node, ...]:
        """As their faults have made them."""
        world = self._world
        held = frozenset(self.running.nodes if self.running is not None else ())
        found = []
        for name in world.window.nodes:
            states = {"allocated" if name in held else "idle"}
            if world.is_down(name):
                states = {"down"}
            elif not world.is_offered(name):
                states.add("drain")
            found.append(Node(name, frozenset(states), gpus=GPUS, partitions=(PARTITION,)))
        return tuple(found)

    def known(self) -> frozenset[str]:
        """The names of the nodes."""
        return frozenset(self._world.window.nodes)

    def partitions(self) -> tuple[Partition, ...]:
        """One, of all nodes."""
        return (Partition(PARTITION, int(self._limit), self._world.window.nodes, is_default=True),)

    def step_code(self, job_id: str) -> int | None:
        """Nothing is recorded of steps."""
        return None

    # ------------------------------------------------------------------ the protocol: changes
    def exclude(self, job_id: str, nodes: tuple[str, ...]) -> None:
        self._change(job_id, excluded=nodes)

    def hold(self, job_id: str) -> None:
        self._change(job_id, reason=HELD, priority=0)

    def release(self, job_id: str) -> None:
        waits = WAITS if self.running is None else NEXT_IN_ARRAY
        self._change(job_id, reason=waits, priority=None, eligible_time=self._world.now)

    def set_comment(self, job_id: str, comment: str) -> None:
        self._change(job_id, comment=comment)

    def run_after(self, job_id: str, after: str) -> None:
        """Tasks run one after another in any case."""

    def cancel(self, job_id: str) -> None:
        """What is queued, or what runs: its launch ends."""
        if self.running is not None and job_id in {self.running.job_id, self.running.raw_id}:
            self._world.end_launch()
        self._queued = [job for job in self._queued if not covers(job_id, job)]

    def submit(self, request: BatchRequest) -> str:
        raise SchedulerError("a replay queues arrays by itself")

    def test(self, request: BatchRequest) -> TestResult:
        return TestResult(True, "")

    def signal(self, job_id: str, signal_name: str) -> None:
        raise SchedulerError("a replay signals nothing")

    def requeue(self, job_id: str, *, as_submitted: bool = False) -> None:
        raise SchedulerError("a replay requeues nothing")

    def _change(self, job_id: str, **changes: object) -> None:
        self._queued = [
            replace(job, **changes) if covers(job_id, job) else job for job in self._queued
        ]
