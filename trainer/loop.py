"""The training loop: the way to the first step, the step on one screen, and the one way out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from trainer.config.card import CardError, TrainerConfig
from trainer.config.first_loss import first_loss
from trainer.contract.attempt import AttemptIdentity, read_card_hash, tell
from trainer.contract.checkpoints import take_run
from trainer.contract.end_marker import exit_code
from trainer.contract.errors import CheckpointError, lost_a_rank
from trainer.contract.lease import Lease
from trainer.contract.paths import newest_step
from trainer.contract.record import JsonObject
from trainer.contract.recovery import RollBack
from trainer.control.control_signals import Agreed, ControlSignals
from trainer.control.exits import end_if_asked, record_end
from trainer.control.failure import end_by_itself, end_with_another
from trainer.control.lifecycle import (
    HeartbeatWriter,
    SignalFlag,
    StopConditions,
    StopDecision,
    Stopped,
    exit_process,
    steady_clock,
)
from trainer.control.resume import ResumePosition, load_newest, load_step
from trainer.control.saving import Saver
from trainer.data.samples import Samples, match_data, missing_test_share, open_samples, record_of
from trainer.data.stream import EmptyStream, MicroBatchStream
from trainer.debug.dump import DebugDumps
from trainer.debug.flight_recorder import record_path, write_record
from trainer.debug.record import StepFacts
from trainer.engine import Engine, StepResult, init_distributed
from trainer.instruments import Instruments
from trainer.model.compiled import compile_caches, makes_code
from trainer.model.documents import DocumentRules
from trainer.model.kernels import kernel_for
from trainer.parallel.agreement import RankGroup, is_of_others
from trainer.parallel.mesh import Mesh, worker_device
from trainer.pipeline.partial_losses import Measured
from trainer.schedule.learning_rate import LearningRatePlan
from trainer.schedule.path import Skipped, batch_size_at, path_of, sequence_length_at
from trainer.schedule.progress import Progress
from trainer.schedule.rules import cross_problems
from trainer.spikes.corruption_watch import choose_kernels
from trainer.spikes.recovery import SpikeWatch

# how long a rank waits for its data before all ranks look for a reason to stop
DATA_LOOK_SECONDS = 1.0


@dataclass
class Trainer:
    """One attempt's training on this rank. `train` is called once; `close` releases what it opened.

    `start_time`: of the monotonic clock, when this process began. `lease`: of rank 0, where it was
    begun.
    """

    config: TrainerConfig
    card: Path
    attempt: AttemptIdentity
    heartbeat: HeartbeatWriter
    flag: SignalFlag
    start_time: float
    lease: Lease | None = None

    # Where the training stands.
    progress: Progress = field(default_factory=Progress, init=False)
    learning_rate: LearningRatePlan = field(init=False)
    total: int = field(init=False)  # iterations of the whole training
    steps_done: int = field(default=0, init=False)  # by this attempt
    # kinds of steps, see _kind_of_step
    compiled_for: set[tuple[int, int]] = field(default_factory=set, init=False)
    is_loaded: bool = field(default=False, init=False)  # all parts exist

    # Its parts, in the order in which `train` makes them.
    clock: Callable[[], float] = field(default_factory=steady_clock, init=False)
    card_hash: str = field(init=False)
    mesh: Mesh = field(init=False)
    ranks: RankGroup = field(init=False)
    control_signals: ControlSignals = field(init=False)
    engine: Engine = field(init=False)
    # some code of a step is made when its kind comes for the first time
    compiles: bool = field(init=False)
    samples: Samples = field(init=False)
    dumps: DebugDumps = field(init=False)
    spikes: SpikeWatch = field(init=False)
    instruments: Instruments = field(init=False)
    saver: Saver = field(init=False)
    stream: MicroBatchStream = field(init=False)
    opened: ExitStack = field(default_factory=ExitStack, init=False)

    def close(self) -> None:
        self.opened.close()

    def train(self) -> str:
        """The whole attempt; returns the end reason."""
        config = self.config
        try:
            self._join_ranks()
            for make in (self._build_engine, self._take_lease, self._open_data, self._load):
                self._stop_if_asked()
                make()
            while self.progress.iteration < self.total:
                skipped = self.spikes.skips.advance(self.progress.position, config)
                self._await_batch(skipped)
                if skipped is not None:
                    self._pass_over(skipped)
                    continue
                result = self._step()
                self._hear_of_saves()
                self._write_down(result)
                if self._rolls_back(result):
                    continue
                iteration = self.progress.iteration
                self.spikes.count_dropped(iteration, result, self.saver.saved_step)
                # The save comes first: a hang or fault in the evaluation must not cost a finished
                # interval.
                if (
                    config.checkpoint.interval is not None
                    and iteration % config.checkpoint.interval == 0
                ):
                    self.instruments.interval.time("save-checkpoint", self._save())
                self._leave_failing_node()
                if config.evaluation.iterations and iteration % config.evaluation.interval == 0:
                    decision = self._evaluate(self.samples.valid_groups(), self.samples.valid)
                    if decision is not None:
                        raise Stopped(decision)
            self._evaluate_at_end()
            decision = StopDecision(
                "finished", False, f"after training is done: {self.total} iterations"
            )
        except Stopped as stopped:
            decision = stopped.decision
        if self.is_loaded:
            self.instruments.give_up()
        return self._end(decision)

    # ------------------------------------------------------------------ start
    def _join_ranks(self) -> None:
        """Meet the other ranks, check the card for so many, and look for reasons to stop from now
        on.
        """
        config, attempt = self.config, self.attempt
        self.heartbeat.beat("starting", 0)
        choose_kernels(config.run)
        device = worker_device()
        init_distributed(device, timedelta(minutes=config.parallel.start_timeout_minutes))
        self.opened.callback(_leave_group)
        self.card_hash = read_card_hash(self.card)
        problems = cross_problems(config, dist.get_world_size())
        if problems:
            raise CardError(str(self.card), problems)
        self.mesh = Mesh.create(config.parallel, device)
        self.ranks = RankGroup(self.mesh.cpu_group)
        limits = StopConditions(
            config.kill_switch,
            config.run.exit_duration_minutes,
            config.run.exit_interval,
            self._earliest_start(),
        )
        if self.mesh.rank == 0:
            self.lease = self.lease or Lease.begin(config.paths, attempt.job_id, attempt.launch)
            self.opened.callback(self.lease.release)
        self.control_signals = ControlSignals(
            paths=config.paths,
            limits=limits,
            attempt=attempt,
            flag=self.flag,
            heartbeat=self.heartbeat,
            lease=self.lease,
            largest=self._largest,
            is_first=self.mesh.rank == 0,
            clock=self.clock,
        )
        self.control_signals.enter("starting", 0)

    def _earliest_start(self) -> float:
        """Start of the earliest rank, so that every rank counts the exit duration from the same
        moment.

        Ages are compared, not times of day: one node with a wrong clock must not end, or prolong,
        the attempt.
        """
        age = torch.tensor([time.monotonic() - self.start_time], dtype=torch.float64)
        dist.all_reduce(age, dist.ReduceOp.MAX, group=self.mesh.cpu_group)
        return self.clock() - float(age.item())

    def _build_engine(self) -> None:
        config, mesh = self.config, self.mesh
        self._say(
            f"using world size: {mesh.world_size}, data-parallel-size: {mesh.data}, "
            f"tensor-model-parallel size: {config.parallel.tensor}, "
            f"pipeline-model-parallel size: {config.parallel.pipeline} "
        )
        self._say(f"setting training iterations to {path_of(config).total_iterations}")
        kernel = kernel_for(
            config.model, mesh, DocumentRules.of(config.data), config.precision.dtype
        )
        self._say(f"attention kernel: {kernel}")
        expected = first_loss(config)
        if expected is not None:
            self._say(f"first loss from random weights: {expected}")
        self.engine = Engine.build(config, mesh)
        self.compiles = makes_code(self.engine.compiler, kernel, mesh.device)
        self.opened.callback(self.engine.close)

    def _take_lease(self) -> None:
        """Make sure that no other trainer works on this run, and that one that is frozen publishes
        no more. Collective.

        Raises Stopped when a living trainer keeps this one out.
        """
        fault = self.ranks.on_first("the run's lease", take_run, self.lease, self.config.paths)
        if fault:
            raise Stopped(StopDecision("refused", False, f"tr11: refused: {fault}"))

    def _open_data(self) -> None:
        self.samples = open_samples(
            self.config, self.mesh, self.engine.needs_data, test=self._tests_at_end()
        )
        self.opened.callback(self.samples.close)

    def _tests_at_end(self) -> bool:
        """Whether there is test data to evaluate once the training has ended. Collective."""
        if not self.config.tests_at_end:
            return False
        fault = self.ranks.on_first("test data", missing_test_share, self.config)
        if fault:
            self._say(f"the test share of data.split will not be evaluated: {fault}")
        return not fault

    def _load(self) -> None:
        """Go on from the newest checkpoint, or begin; then every part exists. Collective."""
        config, mesh, attempt = self.config, self.mesh, self.attempt
        folder = config.paths.attempt(attempt.job_id) / "debug" / f"launch-{attempt.launch}"
        self.dumps = DebugDumps(config.debug, mesh, folder, self.engine.family)
        self.heartbeat.beat("loading", 0)
        self.spikes = SpikeWatch(config, mesh.cpu_group)
        self.spikes.settle()
        resumed = load_newest(config, mesh, self.engine, say=self._say, job_id=attempt.job_id)
        self.progress, self.learning_rate = resumed.progress, resumed.plan
        self.total = path_of(config, self.progress.position).total_iterations
        data = self._match_data(resumed)
        if resumed.was_loaded:
            self.dumps.on_load(
                self.progress.iteration, self.engine.named_parameters(), self._facts()
            )
        self.instruments = Instruments(config, mesh, self.engine, attempt=attempt, say=self._say)
        self.saver = Saver(
            config,
            mesh,
            self.engine,
            say=self._say,
            saved_step=resumed.own_step,
            card_hash=self.card_hash,
            job_id=attempt.job_id,
            now=self.clock(),
            fence=self._fence,
            data=data,
            note=self.instruments.metrics.event,
            origin=resumed.origin,
        )
        self.opened.callback(self.saver.close)
        self.saver.reserve()
        self.instruments.open(self.progress.iteration)
        self.opened.callback(self.instruments.metrics.close)
        self._say("training ...")
        self.stream = self._train_stream()
        self.is_loaded = True

    def _match_data(self, resumed: ResumePosition) -> JsonObject:
        """Make sure that a resume goes on with the checkpoint's data; returns what the next ones
        keep. Collective.
        """

        def match() -> tuple[JsonObject, list[str]]:
            lines = []
            if resumed.place is not None:
                is_own = resumed.own_step is not None
                lines = match_data(
                    self.config,
                    self.samples,
                    resumed.cursor,
                    place=str(resumed.place),
                    is_own=is_own,
                )
            return record_of(self.config, self.samples).document(), lines

        kept, lines = self.ranks.on_first("the data", match)
        for line in lines:
            self._say(line)
        return kept

    def _train_stream(self) -> MicroBatchStream:
        """The training's samples from where it stands; nothing is read when all that is left is
        passed over.
        """
        consumed, batch = self.progress.consumed_samples, self.config.batch
        skipped = self.spikes.skips.advance(self.progress.position, self.config)
        if self.progress.iteration >= self.total or (
            skipped is not None and skipped.last >= self.total
        ):
            return EmptyStream(consumed)
        return self.samples.train(consumed, batch.micro_batch_at(batch_size_at(consumed, batch)))

    # ------------------------------------------------------------------ a step
    def _await_batch(self, skipped: Skipped | None) -> None:
        """Wait for the data of the next step, and for none before a skipped range. Raises Stopped.
        Collective.
        """
        samples, phase = 0, "training"
        if skipped is None:
            samples = batch_size_at(self.progress.consumed_samples, self.config.batch)
            self.stream.resize(self.config.batch.micro_batch_at(samples))
            if self.compiles and self._kind_of_step(samples) not in self.compiled_for:
                phase = "compiling"
        decision = self._ready(phase, self.stream, samples)
        if decision is not None:
            raise Stopped(decision)
        self.heartbeat.beat(phase, self.progress.iteration)

    def _kind_of_step(self, samples: int) -> tuple[int, int]:
        """What another code is made for: samples of a micro batch, and tokens of a sample."""
        length = sequence_length_at(
            self.progress.iteration + 1, self.config.curriculum, self.config.model.sequence_length
        )
        return self.config.batch.micro_batch_at(samples), length

    def _pass_over(self, skipped: Skipped) -> None:
        """Move every counter over a skipped range that starts here."""
        self.progress = self.progress.moved_to(skipped.position)
        if self.progress.iteration < self.total:
            self.stream.skip_to(self.progress.consumed_samples)
        for line in skipped.lines:
            self._say(line)
        values = {"first": skipped.first, "last": skipped.last, "samples": skipped.samples}
        self.instruments.metrics.event("skipped", values)

    def _step(self) -> StepResult:
        """One step of the training, and the counters after it."""
        began = time.perf_counter()
        samples = batch_size_at(self.progress.consumed_samples, self.config.batch)
        step = self.progress.iteration + 1
        kind = self._kind_of_step(samples)
        length = kind[1]
        compiles_first = self.compiles and not self.compiled_for
        if compiles_first:
            self._say(
                f"compiling in step {step}, the first of this launch; {compile_caches(os.environ)}"
            )
        self.engine.set_learning_rate(self._learning_rate())
        self.dumps.before_step(step, self.engine.named_parameters(), self._facts())
        batches = self.dumps.watch(self.stream)
        with self._first_time("step", *kind):
            result = self.engine.train_step(batches, samples, self.progress.iteration, length)
        self.compiled_for.add(kind)
        if compiles_first:
            self._say(f"step {step} took {time.perf_counter() - began:.1f} s, compiling included")
        self.progress = self.progress.after_step(samples, length, result.loss, result.skipped)
        self.steps_done += 1
        is_traced = self.instruments.profiler.is_tracing
        news = None
        if self.engine.compiler is not None:
            news = self.engine.compiler.news()
        if news is not None:
            self._say(news)
        self.instruments.profiler.after_step(step)
        self.dumps.after_step(step, self.engine.named_parameters(), self._facts())
        self.instruments.count(
            step,
            result,
            seconds=time.perf_counter() - began,
            samples=samples,
            length=length,
            is_traced=is_traced,
        )
        return result

    def _learning_rate(self) -> float:
        return self.learning_rate.at(
            self.progress.scheduled_samples, self.progress.scheduled_tokens
        )

    def _facts(self) -> StepFacts:
        return StepFacts(
            self.engine.optimizer_step() if self.dumps.enabled else 0,
            self._learning_rate(),
            self.progress.consumed_samples,
            self.progress.consumed_tokens,
        )

    def _first_time(self, *what: object) -> AbstractContextManager[None]:
        """Patience with ranks that compute something for the first time, and so compile; else the
        step's timeout.
        """
        return self.mesh.groups.first_time(
            timedelta(minutes=self.config.parallel.step_timeout_minutes), *what
        )

    def _write_down(self, result: StepResult) -> None:
        """Check the arithmetic where that is due, and log the step. Collective."""
        progress = self.progress
        self.instruments.corruption.after_step(progress.iteration, self.engine)
        if result.layers is not None:
            self.instruments.metrics.layers(
                progress.iteration, progress.consumed_samples, result.layers
            )
        if progress.iteration % self.config.logging.interval == 0:
            self.instruments.log(
                progress, result, total=self.total, learning_rate=self._learning_rate()
            )

    def _rolls_back(self, result: StepResult) -> bool:
        """Say that there is a spike; go back to before it, and return True, when that was decided.
        Collective.
        """
        action = self.spikes.observe(
            self.progress.iteration,
            result.loss,
            result.grad_norm,
            skipped=result.skipped,
            finish_saves=self._await_save,
        )
        if action is None:
            return False
        self._say(action.line)
        spike, event = action.spike, self.instruments.metrics.event
        event(
            "spike",
            {
                "iteration": spike.iteration,
                "what": spike.kind,
                "value": spike.value,
                "median": spike.median,
            },
        )
        if not isinstance(action, RollBack):
            return False
        self.heartbeat.beat("loading", self.progress.iteration)
        self.spikes.roll_back(action, self._fence)
        resumed = load_step(self.config, self.mesh, self.engine, step=action.to_step, say=self._say)
        self.progress, self.learning_rate = resumed.progress, resumed.plan
        self.saver.went_back_to(action.to_step)
        self.stream.skip_to(self.progress.consumed_samples)
        event("roll-back", {"to": action.to_step, "skip": str(action.skip)})
        self.instruments.begin_interval()
        return True

    # ------------------------------------------------------------------ evaluating
    def _evaluate(
        self,
        groups: Sequence[str],
        open_stream: Callable[[str], MicroBatchStream],
        prefix: str = "",
    ) -> StopDecision | None:
        """Mean loss of each group over the same samples every time, so that the values can be
        compared.

        Between its batches a stop is honoured: an evaluation of many sets took longer than the
        margin before the time limit.
        """
        count, batch = self.config.evaluation.iterations, self.config.batch
        micro_batches = batch.micro_batches(batch.global_batch_size, self.mesh.data)
        for group in groups:
            stream, measured = open_stream(group), []
            try:
                for _ in range(count):
                    decision = self._ready("evaluating", stream, batch.global_batch_size)
                    if decision is not None and decision.reason != "exit-interval":
                        return decision
                    with self._first_time("evaluation"):
                        measured.append(self.engine.measure(stream, micro_batches))
            finally:
                stream.close()
            if prefix and len(groups) > 1:
                name = f"{prefix} {group}"
            else:
                name = prefix
            mean = Measured.mean(measured)
            self.instruments.metrics.validation(
                group,
                self.progress,
                mean.loss,
                gigaflops=self.instruments.throughput.gigaflops(self.progress.consumed_samples),
                prefix=name,
                parts=mean.parts,
            )
        return None

    def _evaluate_at_end(self) -> None:
        if self.steps_done and self.config.evaluation.iterations:
            self._await_save()
            self._evaluate(
                self.samples.valid_groups(), self.samples.valid, "the end of training for val data"
            )
            self._evaluate(
                self.samples.test_groups(), self.samples.test, "the end of training for test data"
            )

    # ------------------------------------------------------------------ agreeing
    def _largest(self, values: list[int]) -> list[int]:
        """For each place the largest value of all ranks. Collective."""
        seen = torch.tensor(values, dtype=torch.int32)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.mesh.cpu_group)
        return [int(value) for value in seen.tolist()]

    def _agree(self, waits: bool = False) -> Agreed:
        """What all ranks do next. Collective."""
        due = self.is_loaded and self.saver.minutes_are_over(self.clock())
        return self.control_signals.agree(self.progress.iteration, self.steps_done > 0, due, waits)

    def _stop_if_asked(self) -> None:
        """Raises Stopped where all ranks agree to leave. Collective."""
        decision = self._agree().decision
        if decision is not None:
            raise Stopped(decision)

    def _ready(self, phase: str, stream: MicroBatchStream, samples: int) -> StopDecision | None:
        """Wait until every rank has the data of its next `samples` (of all replicas), or something
        says stop.

        A step that began without its data could hang in the middle, where no rank hears of a stop.
        What is to be saved is saved here, whatever the training waits for. Collective.
        """
        count = self.config.batch.micro_batches(samples, self.mesh.data)
        while True:
            self.control_signals.enter(phase, self.progress.iteration)
            agreed = self._agree(waits=not stream.wait(count, DATA_LOOK_SECONDS))
            if agreed.profile is not None:
                self.instruments.profiler.start(agreed.profile, self.progress.iteration)
            if agreed.check:
                self.instruments.corruption.ask(agreed.check)
            if agreed.save and self.steps_done and agreed.decision is None:
                self._save()
            if agreed.decision is not None or not agreed.waits:
                return agreed.decision
            self._hear_of_saves()
            phase = "data-wait"

    # ------------------------------------------------------------------ saving and leaving
    @property
    def _fence(self) -> Callable[[], None] | None:
        """Asked before anything is published or renamed: whether this trainer still holds the
        lease.
        """
        if self.lease is not None:
            return self.lease.check
        return None

    def _save(self) -> float:
        """Save this iteration, or begin to; returns the seconds that the training stood still.
        Collective.
        """
        self.control_signals.enter("saving", self.progress.iteration)
        self.dumps.on_save(self.progress.iteration, self.engine.named_parameters(), self._facts())
        return self.saver.save(self.progress, self.learning_rate, self.clock())

    def _hear_of_saves(self) -> None:
        """Tell how a save in the background has ended, also to anyone who asked for it. Collective
        while there is one.
        """
        self.saver.poll()
        self.control_signals.settle(self.saver.was_saved)

    def _await_save(self) -> CheckpointError | None:
        """Stand still until the save in the background has ended; its fault, if it failed.
        Collective.
        """
        if self.saver.in_flight is not None:
            self.heartbeat.beat("saving", self.progress.iteration)
        fault = self.saver.wait()
        self.control_signals.settle(self.saver.was_saved)  # a roll-back may follow
        return fault

    def _leave_failing_node(self) -> None:
        """Raises Stopped where one node keeps every save from coming about: what is lost only
        grows.
        """
        failed = self.saver.failed_saves
        if failed.unable:
            line = failed.line(self.saver.saved_step)
            raise Stopped(StopDecision("error", True, line, save=False, node=failed.node))

    def _end(self, decision: StopDecision) -> str:
        """Save what is not saved, then leave the end marker: nothing that follows it may matter."""
        if self.is_loaded and self.steps_done and decision.save:
            fault = self._await_save()
            if self.progress.iteration != self.saver.saved_step:
                self._save()
                fault = self._await_save()
            if fault is not None and self.progress.iteration != self.saver.saved_step:
                decision = self._after_failed_save(fault, decision)
            self.control_signals.settle(self.saver.was_saved, is_last=True)
        self._say(decision.line)
        self.heartbeat.beat("ending", self.progress.iteration)
        dist.barrier(group=self.mesh.cpu_group)
        reason = decision.reason
        if self.mesh.rank == 0 and not (self.lease and self.lease.lost_to_own_job()):
            iteration, step = self._standing()
            reason = record_end(
                self.config.paths, self.attempt, decision, iteration=iteration, checkpoint_step=step
            )
        if self.lease is not None:
            self.lease.release()
        return reason

    def _after_failed_save(self, fault: CheckpointError, decision: StopDecision) -> StopDecision:
        """The end of a training whose last save failed: because another trainer took over, or for
        any other reason.
        """
        agreed = self._agree().decision
        if agreed is not None and agreed.reason == "superseded":
            return agreed
        lost = (
            f"the last save failed, all steps after {self.saver.saved_step or 0} are lost: {fault}"
        )
        return StopDecision("error", True, f"{lost} (leaving: {decision.reason})")

    def _standing(self) -> tuple[int, int | None]:
        """Iteration and newest saved step; before anything was loaded, as `latest` says."""
        if self.progress.iteration and self.is_loaded:
            return self.progress.iteration, self.saver.saved_step
        step = newest_step(self.config.paths)
        return step or 0, step

    def _say(self, line: str) -> None:
        if self.mesh.rank == 0:
            tell(line)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def run(
    config: TrainerConfig,
    card: Path,
    attempt: AttemptIdentity,
    heartbeat: HeartbeatWriter,
    flag: SignalFlag,
    start_time: float,
    lease: Lease | None,
) -> NoReturn:
    """Train until something says stop, leave an end marker, and end this process with its exit
    status.

    `start_time`: of the monotonic clock, when this process began. `lease`: of rank 0, where it was
    begun.
    """
    rank = int(os.environ.get("RANK", "0"))
    trainer = Trainer(
        config, card, attempt, heartbeat, flag=flag, start_time=start_time, lease=lease
    )
    try:
        reason = trainer.train()
    except Exception as error:  # whatever it is, it is recorded before the process goes
        end_if_asked(config.kill_switch, config.paths, attempt, heartbeat, rank=rank)
        reason = _fail(trainer, rank, error)
    heartbeat.beat("ended", trainer.progress.iteration)
    exit_process(exit_code(reason), trainer.close)


def _fail(trainer: Trainer, rank: int, error: Exception) -> str:
    """Say and record why this rank ends; returns the end reason. Who only lost one that refused
    says just that.
    """
    paths, attempt, iteration = trainer.config.paths, trainer.attempt, trainer.progress.iteration
    if is_of_others(error):
        reason = end_with_another(paths, attempt, rank, error=error, iteration=iteration)
        if reason is not None:
            return reason
    reason = end_by_itself(
        paths,
        attempt,
        rank,
        error=error,
        steps_done=trainer.steps_done,
        iteration=iteration,
    )
    if isinstance(error, RuntimeError) or lost_a_rank(error):
        _keep_operations(record_path(paths, attempt.job_id, attempt.launch, rank))
    return reason


def _keep_operations(path: Path) -> None:
    """What this rank waited for, beside its failure: that is in place first."""
    try:
        write_record(path)
    except OSError as problem:
        tell(f"tr11: the operations between the ranks could not be kept: {problem}", sys.stderr)
