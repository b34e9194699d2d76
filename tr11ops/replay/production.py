"""tr11 itself as the operation of a replay: the controller of production runs each attempt, and only
the workers, the scheduler, the clock and the people are simulated.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from tr11ops.agent.allocation import Allocation
from tr11ops.agent.attempt_context import AttemptContext, JobWatch
from tr11ops.agent.controller import Controller
from tr11ops.agent.step import LaunchWatch, LineTee, StopFlag
from tr11ops.agent.workers import PlannedLaunch
from tr11ops.base.now import another_clock
from tr11ops.cluster.base import Job, JobState
from tr11ops.launch.plan import resolved_card
from tr11ops.replay.evidence import leave_end, leave_fault, leave_progress, leave_stacks
from tr11ops.replay.parameters import IN_BACKGROUND, Layout, Parameters
from tr11ops.replay.run import SimulatedRun
from tr11ops.replay.traces import FaultSign, Window
from tr11ops.replay.watching import Watchdog
from tr11ops.replay.world import Score, World
from tr11ops.runcard.kinds import OwnCard
from tr11ops.runcard.save_interval import checkpoint_size
from tr11ops.runcard.speed import RunHistory
from trainer.contract.attempt import EXIT_FINE
from trainer.contract.documents import document
from trainer.contract.files import write_json
from trainer.contract.paths import newest_step

ARRAY = 10  # tasks of the first launch


class SilentTee(LineTee):
    """The main log of a run that no one reads: what a controller says is in its records too."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def write(self, data: bytes) -> None:
        self.said += data.decode().splitlines()


class SimulatedWatch(JobWatch):
    """Asks for the attempt's job when it is asked to, and not in a thread."""

    def start(self) -> None:
        self.look()

    def stop(self) -> None:
        """Nothing runs."""


class JobOver(Exception):
    """The job is over in this state with this code, and its controller with it: the node of its batch
    script is gone, or someone has ended it.
    """


class SimulatedWorkers:
    """The workers of one attempt. `stop` is its batch script's."""

    def __init__(
        self, run: SimulatedRun, watchdog: Watchdog, context: AttemptContext, stop: StopFlag
    ) -> None:
        self._run = run
        self._stop = stop
        self._watchdog = watchdog
        self._world = run.world
        self._context = context

    def run(self, launch: PlannedLaunch, watch: LaunchWatch, look: Callable[[], None]) -> None:
        """Let the launch go its way in the world, and leave behind what it would."""
        world = self._world
        folder = self._context.folder
        world.wait_until(world.now + world.parameters.relaunch)
        look()
        leaves = None
        if self._context.watch is not None:
            leaves = self._context.watch.leaves
        # production may have chosen an older one
        world.saved = newest_step(self._context.config.paths) or 0
        save_seconds = None if launch.save_minutes is None else 60 * launch.save_minutes
        end = world.launch(launch.nodes, leaves, save_seconds=save_seconds)
        watch.start = end.start
        watch.end = end.end
        watch.first_sign = end.sign
        self._run.last_trained = end.sign or end.end
        self._run.trained_in = self._context.job_id
        self._watchdog.hurry()
        leave_progress(self._context.config.paths, world, end, self._context.job_id)
        if end.is_ordered:
            self._stop.received.append(signal.SIGTERM)
            look()
            raise JobOver(JobState.CANCELLED, int(signal.SIGTERM))
        if end.fault is None:
            leave_end(folder, end, launch.number, self._context.job_id)
            return
        if end.fault.kind is FaultSign.LOSS:
            self._run.scheduler.lose(end.fault.node)
            if self._context.watch is not None:
                self._context.watch.look()
            look()
            if end.fault.node == self._context.allocation.nodes[0]:
                raise JobOver(JobState.NODE_FAIL, 1)
        if end.fault.kind is FaultSign.HANG:
            hanging = world.hanging(end.nodes, max(end.fault.start, end.start))
            leave_stacks(self._context.config.paths, end.nodes, hanging, self._context.job_id)
        leave_fault(folder, end, launch.number, watch)


class Production:
    """The operation that tr11 is. Its run directory lies below `folder`."""

    name = "tr11"

    def __init__(self, world: World, folder: Path, overrides: tuple[str, ...] = ()) -> None:
        self.world = world
        self.run = SimulatedRun(world, folder, overrides)
        self.needed = self.run.needed
        self.most = self.run.most
        self.watchdog = Watchdog(self.run)

    def replay(self) -> None:
        """Let the world's time be the time of production until the window is over."""
        with another_clock(self._clock):
            self.run.submit(ARRAY)
            self.world.run(self)

    def _clock(self) -> float:
        return self.world.now

    # ------------------------------------------------------------------ the operation
    def is_ready(self) -> bool:
        return self.run.scheduler.next_job is not None

    def excluded(self) -> frozenset[str]:
        queued = self.run.scheduler.next_job
        if queued is None:
            return frozenset()
        return frozenset(queued.excluded)

    @property
    def next_wake(self) -> float:
        return self.watchdog.next_wake

    def wake(self) -> None:
        self.watchdog.wake()

    def run_task(self, nodes: tuple[str, ...]) -> None:
        """One attempt, by the controller of production."""
        job = self.run.scheduler.begin(nodes)
        tag = f"20220311-000000-{self.run.submissions:08x}"
        context = self._context(job, tag)
        folder = context.folder
        write_json(folder / "attempt.json", self._attempt_record(context))
        write_json(folder / "card.json", resolved_card(self.run.card))
        stop = StopFlag()
        workers = SimulatedWorkers(self.run, self.watchdog, context, stop)
        controller = Controller(context, stop, SilentTee(), workers=workers)
        try:
            status = controller.run()
        except JobOver as over:
            self.run.scheduler.finish(*over.args)
        else:
            state = JobState.COMPLETED if status == EXIT_FINE else JobState.FAILED
            self.run.scheduler.finish(state, status)
        self.run.note_exclusions()

    def _context(self, job: Job, tag: str) -> AttemptContext:
        times = self.world.parameters
        card = self.run.card
        free = times.free_bytes
        if times.free_checkpoints is not None and isinstance(card, OwnCard):
            free = int(times.free_checkpoints * checkpoint_size(card))
        allocation = Allocation(
            "slurm", job.raw_id, array_id=job.array_id, task_id=job.task_id, nodes=job.nodes
        )
        return AttemptContext(
            card,
            allocation,
            {},
            tag,
            scheduler=self.run.scheduler,
            states=self.run.scheduler,
            ordering=self.run.scheduler if card.slurm.spare_nodes else None,
            watch=SimulatedWatch(self.run.scheduler, job.raw_id),
            history=RunHistory(
                step=times.step, save=times.last_save, usual_save=times.last_save, stall=times.save
            ),
            waits_for_changes=True,
            free_bytes=free,
        )

    def _attempt_record(self, context: AttemptContext) -> dict[str, object]:
        return {
            **document(context.allocation),
            "submission": context.submission,
            "start": self.world.now,
        }


def production_score(
    part: Window,
    layout: Layout,
    passed: Callable[[float], None] | None = None,
    *,
    parameters: Parameters = IN_BACKGROUND,
    overrides: tuple[str, ...] = (),
) -> Score:
    """What tr11 makes of a window, in a run directory that is removed again. `passed` hears how many
    seconds of it are over; `overrides` are of its card, as `--set` takes them. Raises CardError.
    """
    with tempfile.TemporaryDirectory(prefix="tr11-replay-") as folder:
        world = World(part, layout, parameters, passed)
        Production(world, Path(folder), overrides).replay()
        return Score.of(world, Production.name)
