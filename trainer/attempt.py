"""One attempt on this rank: it meets the others, makes the parts of the training one after another,
trains, and leaves by the one way out.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from trainer.config.card import CardError
from trainer.config.first_loss import first_loss
from trainer.config.kernel_choice import KernelChoice
from trainer.contract.attempt import exit_code, read_card_hash, tell
from trainer.contract.checkpoints import take_run
from trainer.contract.errors import lost_a_rank
from trainer.contract.lease import Lease
from trainer.contract.paths import newest_step
from trainer.contract.record import JsonObject
from trainer.control.control_signals import ControlSignals
from trainer.control.exits import end_by_itself, end_if_asked, end_with_another, record_end
from trainer.control.lifecycle import (
    StopConditions,
    StopDecision,
    Stopped,
    Worker,
    exit_process,
)
from trainer.control.resume import ResumePosition, load_newest
from trainer.control.saving import Saver
from trainer.data.samples import Samples, match_data, missing_test_share, open_samples, record_of
from trainer.debug.dump import DebugDumps
from trainer.debug.flight_recorder import record_path, write_record
from trainer.engine import Engine
from trainer.instruments import Instruments
from trainer.loop import Trainer
from trainer.model.compiled import makes_code
from trainer.model.documents import DocumentRules
from trainer.model.kernels import kernel_for
from trainer.parallel.agreement import RankGroup, is_of_others
from trainer.parallel.mesh import Mesh, worker_device
from trainer.pipeline.library import init_distributed
from trainer.schedule.path import path_of
from trainer.schedule.rules import cross_problems
from trainer.spikes.corruption_check import choose_kernels
from trainer.spikes.recovery import SpikeWatch


@dataclass
class TrainingAttempt:
    """`train` is called once; `close` releases what it opened.

    `kind`: what trains, once all parts exist; that is then the `trainer`.
    """

    worker: Worker
    card: Path
    kind: type[Trainer] = Trainer

    trainer: Trainer | None = field(default=None, init=False)
    opened: ExitStack = field(default_factory=ExitStack, init=False)
    _loaded: int = field(default=0, init=False)  # the iteration of the checkpoint

    @property
    def iteration(self) -> int:
        """Where the training stands."""
        if self.trainer is None:
            return self._loaded
        return self.trainer.progress.iteration

    @property
    def steps_done(self) -> int:
        """By this attempt."""
        if self.trainer is None:
            return 0
        return self.trainer.steps_done

    def close(self) -> None:
        self.opened.close()

    def train(self) -> str:
        """The whole attempt; returns the end reason."""
        mesh = self._join_ranks()
        card_hash = read_card_hash(self.card)
        signals = self._control_signals(mesh)
        try:
            stop_if_asked(signals)
            engine = self._build_engine(mesh)
            stop_if_asked(signals)
            self._take_lease(mesh)
            stop_if_asked(signals)
            samples = self._open_data(mesh, engine)
            stop_if_asked(signals)
            self.trainer = self._load(mesh, signals, engine, samples=samples, card_hash=card_hash)
        except Stopped as stopped:
            return self._end(mesh, stopped.decision)
        return self._end(mesh, self.trainer.leave(self.trainer.train()))

    # ------------------------------------------------------------------ the parts
    def _join_ranks(self) -> Mesh:
        """Meet the other ranks, and check the card for so many."""
        config = self.worker.config
        self.worker.heartbeat.beat("starting", 0)
        choose_kernels(config.run)
        device = worker_device()
        init_distributed(device, timedelta(minutes=config.parallel.start_timeout_minutes))
        self.opened.callback(_leave_group)
        problems = cross_problems(config, dist.get_world_size())
        if problems:
            raise CardError(str(self.card), problems)
        return Mesh.create(config.parallel, device)

    def _control_signals(self, mesh: Mesh) -> ControlSignals:
        """What all ranks look for from now on, to stop. Collective."""
        worker = self.worker
        limits = StopConditions.of(worker.config, earliest_start(worker, mesh))
        if worker.rank == 0:
            job_id, launch = worker.attempt.job_id, worker.attempt.launch
            worker.lease = worker.lease or Lease.begin(worker.paths, job_id, launch)
            self.opened.callback(worker.lease.release)

        def largest(values: list[int]) -> list[int]:
            seen = torch.tensor(values, dtype=torch.int32)
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=mesh.cpu_group)
            return [int(value) for value in seen.tolist()]

        signals = ControlSignals(worker, limits, largest)
        signals.enter("starting", 0)
        return signals

    def _build_engine(self, mesh: Mesh) -> Engine:
        config, say = self.worker.config, self.worker.say
        say(
            f"using world size: {mesh.world_size}, data-parallel-size: {mesh.data}, "
            f"tensor-model-parallel size: {config.parallel.tensor}, "
            f"pipeline-model-parallel size: {config.parallel.pipeline} "
        )
        say(f"setting training iterations to {path_of(config).total_iterations}")
        say(f"attention kernel: {self._kernel(mesh)}")
        expected = first_loss(config)
        if expected is not None:
            say(f"first loss from random weights: {expected}")
        engine = Engine.build(config, mesh)
        self.opened.callback(engine.close)
        return engine

    def _take_lease(self, mesh: Mesh) -> None:
        """Make sure that no other trainer works on this run, and that one that is frozen publishes
        no more. Collective.

        Raises Stopped when a living trainer keeps this one out.
        """
        worker, ranks = self.worker, RankGroup(mesh.cpu_group)
        fault = ranks.on_first("the run's lease", take_run, worker.lease, worker.paths)
        if fault:
            raise Stopped(StopDecision("refused", False, f"tr11: refused: {fault}"))

    def _open_data(self, mesh: Mesh, engine: Engine) -> Samples:
        config = self.worker.config
        tests = config.tests_at_end
        if tests:
            ranks = RankGroup(mesh.cpu_group)
            fault = ranks.on_first("test data", missing_test_share, config)
            if fault:
                self.worker.say(f"the test share of data.split will not be evaluated: {fault}")
            tests = not fault
        samples = open_samples(config, mesh, engine.needs_data, test=tests)
        self.opened.callback(samples.close)
        return samples

    def _load(
        self,
        mesh: Mesh,
        signals: ControlSignals,
        engine: Engine,
        samples: Samples,
        card_hash: str,
    ) -> Trainer:
        """Go on from the newest checkpoint, or begin; then every part exists. Collective."""
        worker = self.worker
        config, say, identity = worker.config, worker.say, worker.attempt
        folder = config.paths.attempt(identity.job_id) / "debug" / f"launch-{identity.launch}"
        dumps = DebugDumps(config.debug, mesh, folder, engine.family)
        worker.heartbeat.beat("loading", 0)
        spikes = SpikeWatch(config, mesh.cpu_group)
        spikes.settle()
        resumed = load_newest(engine, say, identity.job_id)
        self._loaded = resumed.progress.iteration
        data = self._match_data(mesh, samples, resumed)
        instruments = Instruments(worker, engine)
        saver = Saver(
            worker,
            engine,
            resumed.own_step,
            card_hash,
            data=data,
            note=instruments.metrics.event,
            origin=resumed.origin,
        )
        self.opened.callback(saver.close)
        saver.reserve()
        instruments.open(self._loaded)
        self.opened.callback(instruments.metrics.close)
        trainer = self.kind(
            worker,
            mesh,
            signals,
            engine,
            samples=samples,
            dumps=dumps,
            spikes=spikes,
            instruments=instruments,
            saver=saver,
            progress=resumed.progress,
            learning_rate=resumed.plan,
            compiles=makes_code(engine.compiler, self._kernel(mesh), mesh.device),
        )
        if resumed.was_loaded:
            dumps.on_load(self._loaded, engine.named_parameters(), trainer.facts())
        say("training ...")
        return trainer

    def _match_data(self, mesh: Mesh, samples: Samples, resumed: ResumePosition) -> JsonObject:
        """Make sure that a resume goes on with the checkpoint's data; returns what the next ones
        keep. Collective.
        """
        config = self.worker.config

        def match() -> tuple[JsonObject, list[str]]:
            lines = []
            if resumed.place is not None:
                lines = match_data(
                    config,
                    samples,
                    resumed.cursor,
                    place=str(resumed.place),
                    is_own=resumed.own_step is not None,
                )
            return record_of(config, samples).document(), lines

        kept, lines = RankGroup(mesh.cpu_group).on_first("the data", match)
        for line in lines:
            self.worker.say(line)
        return kept

    def _kernel(self, mesh: Mesh) -> KernelChoice:
        config = self.worker.config
        documents = DocumentRules.of(config.data)
        return kernel_for(config.model, mesh, documents, config.precision.dtype)

    # ------------------------------------------------------------------ the way out
    def _end(self, mesh: Mesh, decision: StopDecision) -> str:
        """Leave the end marker: nothing that follows it may matter."""
        worker = self.worker
        worker.say(decision.line)
        worker.heartbeat.beat("ending", self.iteration)
        dist.barrier(group=mesh.cpu_group)
        reason = decision.reason
        if worker.rank == 0 and not (worker.lease and worker.lease.lost_to_own_job()):
            iteration, step = self._standing()
            reason = record_end(
                worker,
                decision,
                iteration=iteration,
                checkpoint_step=step,
            )
        if worker.lease is not None:
            worker.lease.release()
        return reason

    def _standing(self) -> tuple[int, int | None]:
        """Iteration and newest saved step; before anything was loaded, as `latest` says."""
        if self.trainer is not None and self.iteration:
            return self.iteration, self.trainer.saver.saved_step
        step = newest_step(self.worker.paths)
        return step or 0, step


def earliest_start(worker: Worker, mesh: Mesh) -> float:
    """Start of the earliest rank, so that every rank counts the exit duration from the same moment.
    Collective.

    Ages are compared, not times of day: one node with a wrong clock must not end, or prolong, the
    attempt.
    """
    age = torch.tensor([time.monotonic() - worker.start_time], dtype=torch.float64)
    dist.all_reduce(age, dist.ReduceOp.MAX, group=mesh.cpu_group)
    return worker.clock() - float(age.item())


def stop_if_asked(signals: ControlSignals) -> None:
    """Raises Stopped where all ranks agree to leave before anything is trained. Collective."""
    decision = signals.agree(0, False).decision
    if decision is not None:
        raise Stopped(decision)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def run(worker: Worker, card: Path) -> NoReturn:
    """Train until something says stop, leave an end marker, and end this process with its exit
    status.
    """
    attempt = TrainingAttempt(worker, card)
    try:
        reason = attempt.train()
    except Exception as error:  # whatever it is, it is recorded before the process goes
        end_if_asked(worker)
        reason = _fail(attempt, error)
    worker.heartbeat.beat("ended", attempt.iteration)
    exit_process(exit_code(reason), attempt.close)


def _fail(attempt: TrainingAttempt, error: Exception) -> str:
    """Say and record why this rank ends; returns the end reason. Who only lost one that refused
    says just that.
    """
    worker, iteration = attempt.worker, attempt.iteration
    if is_of_others(error):
        reason = end_with_another(worker, error=error, iteration=iteration)
        if reason is not None:
            return reason
    reason = end_by_itself(worker, error=error, steps_done=attempt.steps_done, iteration=iteration)
    if isinstance(error, RuntimeError) or lost_a_rank(error):
        identity = worker.attempt
        _keep_operations(record_path(worker.paths, identity.job_id, identity.launch, worker.rank))
    return reason


def _keep_operations(path: Path) -> None:
    """What this rank waited for, beside its failure: that is in place first."""
    try:
        write_record(path)
    except OSError as problem:
        tell(f"tr11: the operations between the ranks could not be kept: {problem}", sys.stderr)
