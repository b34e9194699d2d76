"""The training loop: the way to the first step, the step on one screen, and the one way out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from trainer.config.card import CardError, TrainerConfig
from trainer.config.first_loss import first_loss
from trainer.contract.attempt import AttemptIdentity, read_card_hash, tell
from trainer.contract.checkpoints import take_run
from trainer.contract.compute_record import ComputeRecord, RankPosition
from trainer.contract.end_marker import exit_code
from trainer.contract.errors import CheckpointError
from trainer.contract.lease import Lease
from trainer.contract.logline import StepRecord
from trainer.contract.paths import newest_step
from trainer.contract.recovery import RollBack
from trainer.control.control_signals import Agreed, ControlSignals
from trainer.control.exits import end_if_asked, record_failure
from trainer.control.failure import failure_text, is_refusal
from trainer.control.lifecycle import (
    HeartbeatWriter,
    SignalFlag,
    StopConditions,
    StopDecision,
    exit_process,
    steady_clock,
    write_end_marker,
)
from trainer.control.resume import ResumePosition, load_newest, load_step
from trainer.control.saving import Saver
from trainer.data.samples import match_data, missing_test_share, open_samples, record_of
from trainer.data.stream import EmptyStream, MicroBatchStream
from trainer.debug.dump import DebugDumps
from trainer.debug.flight_recorder import record_path, write_record
from trainer.debug.profile import StepProfiler
from trainer.debug.record import StepFacts
from trainer.engine import Engine, StepResult, init_distributed
from trainer.metrics.throughput import ThroughputMeter
from trainer.metrics.writer import Interval, MetricsWriter
from trainer.model.compiled import compile_caches, makes_code
from trainer.model.documents import DocumentRules
from trainer.model.kernels import kernel_for
from trainer.parallel.agreement import RankGroup, lost_a_rank
from trainer.parallel.mesh import Mesh, worker_device
from trainer.pipeline.partial_losses import Measured
from trainer.schedule.card_rules import cross_problems
from trainer.schedule.curriculum import sequence_length_at
from trainer.schedule.path import batch_size_at, path_of
from trainer.schedule.progress import Progress
from trainer.spikes.corruption_watch import CorruptionWatch, choose_kernels
from trainer.spikes.detect import DroppedSteps, Flag
from trainer.spikes.recovery import SpikeWatch

DATA_LOOK_SECONDS = 1.0  # how long a rank waits for its data before all ranks look for a reason to stop


@dataclass
class Trainer:
    """One attempt's training on this rank. `train` is called once; `close` releases what it opened."""

    config: TrainerConfig
    card: Path
    attempt: AttemptIdentity
    heartbeat: HeartbeatWriter
    flag: SignalFlag
    start_time: float
    lease: Lease | None = None

    def __post_init__(self) -> None:
        self.progress = Progress()
        self.saver: Saver | None = None
        self._compiled_for: set[tuple[int, int]] = set()  # micro batches, and tokens of a sample
        self.clock = steady_clock()
        self.steps_done = 0
        self._closers: list[Callable[[], object]] = []

    def close(self) -> None:
        for closer in reversed(self._closers):
            closer()

    # ------------------------------------------------------------------ start
    def train(self) -> str:
        """The whole attempt; returns the end reason."""
        config = self.config
        self.heartbeat.beat("starting", 0)
        choose_kernels(config.run)
        self.device = worker_device()
        init_distributed(self.device, timedelta(minutes=config.parallel.start_timeout_minutes))
        self._closers.append(_leave_group)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.card_hash = read_card_hash(self.card)
        problems = cross_problems(config, self.world_size)
        if problems:
            raise CardError(str(self.card), problems)
        self.mesh = Mesh.create(config.parallel, self.device)
        self.limits = StopConditions(
            config.kill_switch, config.run.exit_duration_minutes, config.run.exit_interval, self._earliest_start()
        )
        self.total = path_of(config).total_iterations
        self._open_control_signals()
        for prepare in (self._build, self._take_lease, self._open_data, self._load):
            decision = self._agree().decision or prepare()  # a stop is honoured between any two of them
            if decision is not None:
                return self._end(decision)
        decision = self._loop()
        self.corruption.give_up()
        self.profiler.give_up()
        return self._end(decision)

    def _open_control_signals(self) -> None:
        config, attempt = self.config, self.attempt
        if self.rank == 0:
            self.lease = self.lease or Lease.begin(config.paths, attempt.job_id, attempt.launch)
            self._closers.append(self.lease.release)
        self.fence = self.lease.check if self.lease is not None else None
        self.control_signals = ControlSignals(
            config.paths, self.limits, attempt, self.flag, self.heartbeat, self.lease, self._largest,
            self.rank == 0,
            self.clock,
        )  # fmt: skip
        self.control_signals.enter("starting", 0)

    def _take_lease(self) -> StopDecision | None:
        """Make sure that no other trainer works on this run, and that one that is frozen publishes no more. Collective.

        A decision when a living trainer keeps this one out.
        """
        fault = RankGroup(self.mesh.cpu_group).on_first(
            "the run's lease", lambda: take_run(self.lease, self.config.paths)
        )
        return StopDecision("refused", False, f"tr11: refused: {fault}") if fault else None

    def _build(self) -> None:
        config = self.config
        self._say(
            f"using world size: {self.world_size}, data-parallel-size: {self.mesh.data}, "
            f"tensor-model-parallel size: {config.parallel.tensor}, "
            f"pipeline-model-parallel size: {config.parallel.pipeline} "
        )
        self._say(f"setting training iterations to {self.total}")
        kernel = kernel_for(config.model, self.mesh, DocumentRules.of(config.data), config.precision.dtype)
        self._say(f"attention kernel: {kernel}")
        expected = first_loss(config)
        if expected is not None:
            self._say(f"first loss from random weights: {expected}")
        self.engine = Engine.build(config, self.mesh)
        self._compiles = makes_code(self.engine.compiler, kernel, self.device)
        self._closers.append(self.engine.close)

    def _open_data(self) -> None:
        self.samples = open_samples(self.config, self.mesh, self.engine.needs_data, test=self._tests_at_end())
        self._closers.append(self.samples.close)

    def _load(self) -> None:
        config, job_id = self.config, self.attempt.job_id
        dumps = config.paths.attempt(job_id) / "debug" / f"launch-{self.attempt.launch}"
        self.dumps = DebugDumps(config.debug, self.mesh, dumps, self.engine.family)
        self.heartbeat.beat("loading", 0)
        self.spikes = SpikeWatch(config, self.mesh.cpu_group)
        self.dropped = DroppedSteps(config.recovery.dropped_steps)
        self.spikes.settle()
        resumed = load_newest(config, self.mesh, self.engine, self._say, job_id)
        self.progress, self.learning_rate = resumed.progress, resumed.plan
        self.total = path_of(config, self.progress.position).total_iterations
        data = self._match_data(resumed)
        if resumed.was_loaded:
            self.dumps.on_load(self.progress.iteration, self.engine.named_parameters(), self._facts())
        self.saver = Saver(
            config,
            self.mesh,
            self.engine,
            self._say,
            resumed.own_step,
            self.card_hash,
            job_id,
            self.clock(),
            self.fence,
            data,
            self._note,
            resumed.origin,
        )
        self._closers.append(self.saver.close)
        self.saver.reserve()
        self._open_metrics()
        self._say("training ...")

    def _match_data(self, resumed: ResumePosition) -> dict[str, Any]:
        """Make sure that a resume goes on with the checkpoint's data; returns what the next ones keep. Collective."""

        def match() -> tuple[dict[str, Any], list[str]]:
            lines = []
            if resumed.place is not None:
                is_own = resumed.own_step is not None
                lines = match_data(self.config, self.samples, resumed.cursor, str(resumed.place), is_own)
            return record_of(self.config, self.samples).document(), lines

        found, lines = RankGroup(self.mesh.cpu_group).on_first("the data", match)
        for line in lines:
            self._say(line)
        return found

    def _note(self, kind: str, values: Mapping[str, Any]) -> None:
        """Keep what happened beside the steps; the metrics are open by the time of the first save."""
        self.metrics.event(kind, values)

    def _open_metrics(self) -> None:
        config = self.config
        self.throughput = ThroughputMeter(config, self.mesh)
        self.metrics = MetricsWriter(
            config.paths, self.attempt.job_id, self.rank == self.world_size - 1, config.logging, self.world_size
        )
        self.metrics.open()
        self.profiler = StepProfiler(config.paths, self.attempt, (self.rank, self.world_size), self.device)
        place = RankPosition(self.mesh.pipeline_rank, self.mesh.tensor_rank)
        self.compute = ComputeRecord(config.paths, self.attempt, self.rank, place)
        self.corruption = CorruptionWatch(config, self.mesh, self.attempt, self._say)
        self._closers.append(self.metrics.close)
        self.metrics.settings(config.model_dump(mode="json"), self.progress.iteration)

    def _tests_at_end(self) -> bool:
        """Whether there is test data to evaluate once the training has ended. Collective."""
        if not self.config.tests_at_end:
            return False
        fault = RankGroup(self.mesh.cpu_group).on_first("test data", lambda: missing_test_share(self.config))
        if fault:
            self._say(f"the test share of data.split will not be evaluated: {fault}")
        return not fault

    def _earliest_start(self) -> float:
        """Start of the earliest rank, so that every rank counts the exit duration from the same moment.

        Ages are compared, not times of day: one node with a wrong clock must not end, or prolong, the attempt.
        """
        age = torch.tensor([time.monotonic() - self.start_time], dtype=torch.float64)
        dist.all_reduce(age, dist.ReduceOp.MAX, group=self.mesh.cpu_group)
        return self.clock() - float(age.item())

    # ------------------------------------------------------------------ the loop
    def _loop(self) -> StopDecision:
        config = self.config
        self.skips = self.spikes.skips
        self.stream = self._train_stream() if self.progress.iteration < self.total else None
        interval = Interval()
        while self.progress.iteration < self.total:
            samples = self._next_batch()
            phase = self._phase(samples)
            agreed = self._ready(phase, self.stream, samples)
            if agreed.decision is not None:
                return agreed.decision
            self.heartbeat.beat(phase, self.progress.iteration)
            if self._pass_over():
                continue
            result = self._step(interval)
            self._hear_of_saves()
            iteration = self.progress.iteration
            self.corruption.after_step(iteration, self.engine)
            if result.layers is not None:
                self.metrics.layers(iteration, self.progress.consumed_samples, result.layers)
            if iteration % config.logging.interval == 0:
                self._log(interval, result)
                interval = Interval()
            action = self.spikes.observe(iteration, result.loss, result.grad_norm, result.skipped, self._await_save)
            if action is not None:
                self._answer(action)
            if isinstance(action, RollBack):
                self.engine.take_zeros()  # those of an interval that is not logged
                interval, self.dropped = Interval(), DroppedSteps(config.recovery.dropped_steps)
                continue
            self.dropped = self.dropped.after(result.loss, result.grad_norm, result.skipped)
            self.dropped.check(iteration, self._saver.saved_step)
            # The save comes first: a hang or fault in the evaluation must not cost a finished interval.
            if config.checkpoint.interval is not None and iteration % config.checkpoint.interval == 0:
                interval.time("save-checkpoint", self._save())
            if self._saver.failed_saves.unable:
                return self._leave_node()
            if config.evaluation.iterations and iteration % config.evaluation.interval == 0:
                decision = self._evaluate(self.samples.valid_groups(), self.samples.valid)
                if decision is not None:
                    return decision
        if self.steps_done and config.evaluation.iterations:
            self._await_save()
            self._evaluate(self.samples.valid_groups(), self.samples.valid, "the end of training for val data")
            self._evaluate(self.samples.test_groups(), self.samples.test, "the end of training for test data")
        return StopDecision("finished", False, f"after training is done: {self.total} iterations")

    def _phase(self, samples: int) -> str:
        """`compiling` where the step of so many samples is the first of its kind and some of its code is made in it."""
        if not self._compiles or not samples or self._kind_of_step(samples) in self._compiled_for:
            return "training"
        return "compiling"

    def _kind_of_step(self, samples: int) -> tuple[int, int]:
        """What another code is made for: samples of a micro batch, and tokens of a sample."""
        length = sequence_length_at(
            self.progress.iteration + 1, self.config.curriculum, self.config.model.sequence_length
        )
        return self.config.batch.micro_batch_at(samples), length

    def _step(self, interval: Interval) -> StepResult:
        """One step of the training, and the counters after it."""
        config, began = self.config, time.perf_counter()
        assert self.stream is not None
        global_batch = batch_size_at(self.progress.consumed_samples, config.batch)
        step = self.progress.iteration + 1
        kind = self._kind_of_step(global_batch)
        length = kind[1]
        compiles_first = self._compiles and not self._compiled_for
        if compiles_first:
            self._say(f"compiling in step {step}, the first of this launch; {compile_caches(os.environ)}")
        self.engine.set_learning_rate(self._learning_rate())
        self.dumps.before_step(step, self.engine.named_parameters(), self._facts())
        batches, iteration = self.dumps.watch(self.stream), self.progress.iteration
        with self._first_time("step", *kind):
            result = self.engine.train_step(batches, global_batch, iteration, length)
        self._compiled_for.add(kind)
        if compiles_first:
            self._say(f"step {step} took {time.perf_counter() - began:.1f} s, compiling included")
        self.progress = self.progress.after_step(global_batch, length, result.loss, result.skipped)
        self.steps_done += 1
        is_traced = self.profiler.is_tracing
        compiled = self.engine.compiler.news() if self.engine.compiler is not None else None
        if compiled is not None:
            self._say(compiled)
        self.profiler.after_step(self.progress.iteration)
        self.dumps.after_step(step, self.engine.named_parameters(), self._facts())
        tokens = global_batch * length
        interval.add(result.loss, time.perf_counter() - began, global_batch, tokens, result.skipped, result.parts)
        interval.time("optimizer", result.update_seconds)
        clock = self.engine.compute
        if is_traced:
            clock.take()
            clock.take_processor()
            self.compute.forget()
        elif self.compute.is_due(self.progress.iteration):  # a GPU is waited for where these are read
            self.compute.add(self.progress.iteration, *clock.take(), processor=clock.take_processor())
        return result

    def _first_time(self, *what: object) -> AbstractContextManager[None]:
        """Patience with ranks that compute something for the first time, and so compile; else the step's timeout."""
        return self.mesh.groups.first_time(timedelta(minutes=self.config.parallel.step_timeout_minutes), *what)

    def _largest(self, values: list[int]) -> list[int]:
        """For each place the largest value of all ranks. Collective."""
        seen = torch.tensor(values, dtype=torch.int32)
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.mesh.cpu_group)
        return [int(value) for value in seen.tolist()]

    def _agree(self, waits: bool = False) -> Agreed:
        """What all ranks do next. Collective."""
        due = self.saver is not None and self.saver.minutes_are_over(self.clock())
        return self.control_signals.agree(self.progress.iteration, self.steps_done > 0, due, waits)

    def _ready(self, phase: str, stream: MicroBatchStream | None, samples: int) -> Agreed:
        """Wait until every rank has the data of its next `samples` (of all replicas), or something says stop.

        A step that began without its data could hang in the middle, where no rank hears of a stop. What is to be saved
        is saved here, whatever the training waits for. Collective.
        """
        count = self.config.batch.micro_batches(samples, self.mesh.data)
        while True:
            self.control_signals.enter(phase, self.progress.iteration)
            agreed = self._agree(waits=stream is not None and not stream.wait(count, DATA_LOOK_SECONDS))
            if agreed.profile is not None:
                self.profiler.start(agreed.profile, self.progress.iteration)
            if agreed.check:
                self.corruption.ask(agreed.check)
            if agreed.save and self.steps_done and agreed.decision is None:
                self._save()
            if agreed.decision is not None or not agreed.waits:
                return agreed
            self._hear_of_saves()
            phase = "data-wait"

    def _hear_of_saves(self) -> None:
        """Tell how a save in the background has ended, also to anyone who asked for it. Collective while there is
        one."""
        self._saver.poll()
        self.control_signals.settle(self._saver.was_saved)

    def _next_batch(self) -> int:
        """Samples of the next step, in micro batches of its size; none where it is passed over."""
        if self.skips.advance(self.progress.position, self.config) is not None:
            return 0
        samples = batch_size_at(self.progress.consumed_samples, self.config.batch)
        assert self.stream is not None
        self.stream.resize(self.config.batch.micro_batch_at(samples))
        return samples

    def _train_stream(self) -> MicroBatchStream:
        """The training's samples from where it stands; nothing is read when all that is left is passed over."""
        skipped = self.skips.advance(self.progress.position, self.config)
        if skipped is not None and skipped.last >= self.total:
            return EmptyStream(self.progress.consumed_samples)
        consumed, batch = self.progress.consumed_samples, self.config.batch
        return self.samples.train(consumed, batch.micro_batch_at(batch_size_at(consumed, batch)))

    def _pass_over(self) -> bool:
        """Move every counter over a skipped range that starts here; True when there was one."""
        skipped = self.skips.advance(self.progress.position, self.config)
        if skipped is None or self.stream is None:
            return False
        self.progress = self.progress.moved_to(skipped.position)
        if self.progress.iteration < self.total:
            self.stream.skip_to(self.progress.consumed_samples)
        for line in skipped.lines:
            self._say(line)
        self.metrics.event("skipped", {"first": skipped.first, "last": skipped.last, "samples": skipped.samples})
        return True

    def _answer(self, action: RollBack | Flag) -> None:
        """Say that there is a spike; go back to before it when that was decided. Collective."""
        self._say(action.line)
        spike = action.spike
        self.metrics.event(
            "spike",
            {"iteration": spike.iteration, "what": spike.kind, "value": spike.value, "median": spike.median},
        )
        if not isinstance(action, RollBack):
            return
        self.heartbeat.beat("loading", self.progress.iteration)
        self.spikes.roll_back(action, self.fence)
        resumed = load_step(self.config, self.mesh, self.engine, action.to_step, self._say)
        self.progress, self.learning_rate = resumed.progress, resumed.plan
        self._saver.went_back_to(action.to_step)
        self.skips = self.spikes.skips
        assert self.stream is not None
        self.stream.skip_to(self.progress.consumed_samples)
        self.metrics.event("roll-back", {"to": action.to_step, "skip": str(action.skip)})

    def _learning_rate(self) -> float:
        return self.learning_rate.at(self.progress.scheduled_samples, self.progress.scheduled_tokens)

    def _evaluate(
        self, groups: Sequence[str], open_stream: Callable[[str], MicroBatchStream], prefix: str = ""
    ) -> StopDecision | None:
        """Mean loss of each group over the same samples every time, so that the values can be compared.

        Between its batches a stop is honoured: an evaluation of many sets took longer than the margin before the
        time limit.
        """
        count, batch = self.config.evaluation.iterations, self.config.batch
        micro_batches = batch.micro_batches(batch.global_batch_size, self.mesh.data)
        progress = self.progress
        for group in groups:
            stream, found = open_stream(group), []
            try:
                for _ in range(count):
                    decision = self._ready("evaluating", stream, batch.global_batch_size).decision
                    if decision is not None and decision.reason != "exit-interval":
                        return decision
                    with self._first_time("evaluation"):
                        found.append(self.engine.measure(stream, micro_batches))
            finally:
                stream.close()
            name = f"{prefix} {group}" if prefix and len(groups) > 1 else prefix
            mean = Measured.mean(found)
            self.metrics.validation(
                group, progress.iteration, progress.consumed_samples, progress.consumed_tokens,
                mean.loss, self.throughput.gigaflops(progress.consumed_samples), name, mean.parts,
            )  # fmt: skip
        return None

    def _log(self, interval: Interval, result: StepResult) -> None:
        progress, length = self.progress, None
        interval.zeros = self.engine.take_zeros()
        if self.config.curriculum is not None:
            length = sequence_length_at(progress.iteration, self.config.curriculum, self.config.model.sequence_length)
        loss, other_losses = interval.losses()
        record = StepRecord(
            iteration=progress.iteration,
            total_iterations=self.total,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            seconds_per_iteration=interval.seconds / interval.steps,
            learning_rate=self._learning_rate(),
            global_batch_size=interval.samples // interval.steps,
            lm_loss=loss,
            grad_norm=result.grad_norm,
            samples_per_second=interval.samples / interval.seconds,
            tflops=self.throughput.tflops(interval),
            loss_scale=result.loss_scale,
            params_norm=self.engine.params_norm() if self.config.logging.params_norm else None,
            num_zeros=float(interval.zeros / interval.steps),
            curriculum_length=length,
            skipped_iterations=interval.skipped,
            nan_iterations=interval.nan,
            other_losses=other_losses,
        )
        self.metrics.step(record, self.throughput.numbers(interval), self.throughput.context(interval, progress))

    def _facts(self) -> StepFacts:
        progress = self.progress
        return StepFacts(
            self.engine.optimizer_step() if self.dumps.enabled else 0,
            self._learning_rate(),
            progress.consumed_samples,
            progress.consumed_tokens,
        )

    # ------------------------------------------------------------------ saving and leaving
    @property
    def _saver(self) -> Saver:
        assert self.saver is not None, "nothing is saved before the training has loaded"
        return self.saver

    def _save(self) -> float:
        """Save this iteration, or begin to; returns the seconds that the training stood still. Collective."""
        self.control_signals.enter("saving", self.progress.iteration)
        self.dumps.on_save(self.progress.iteration, self.engine.named_parameters(), self._facts())
        return self._saver.save(self.progress, self.learning_rate, self.clock())

    def _await_save(self) -> CheckpointError | None:
        """Stand still until the save in the background has ended; its fault, if it failed. Collective."""
        if self._saver.in_flight is not None:
            self.heartbeat.beat("saving", self.progress.iteration)
        fault = self._saver.wait()
        self.control_signals.settle(self._saver.was_saved)  # a roll-back may follow
        return fault

    def _leave_node(self) -> StopDecision:
        """The end of a training in which one node keeps every save from coming about: what is lost only grows."""
        failed = self._saver.failed_saves
        return StopDecision("error", True, failed.line(self._saver.saved_step), save=False, node=failed.node)

    def _end(self, decision: StopDecision) -> str:
        """Save what is not saved, then leave the end marker: nothing that follows it may matter."""
        if self.saver is not None and self.steps_done and decision.save:
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
        if self.rank == 0 and not (self.lease and self.lease.lost_to_own_job()):
            iteration, step = self._standing()
            word = (decision.reason, decision.restart, iteration, step, decision.line.strip())
            write_end_marker(self.config.paths, self.attempt, *word, node=decision.node)
        if self.lease is not None:
            self.lease.release()
        return decision.reason

    def _after_failed_save(self, fault: CheckpointError, decision: StopDecision) -> StopDecision:
        """The end of a training whose last save failed: because another trainer took over, or for any other reason."""
        found = self._agree().decision
        if found is not None and found.reason == "superseded":
            return found
        lost = f"the last save failed, all steps after {self._saver.saved_step or 0} are lost: {fault}"
        return StopDecision("error", True, f"{lost} (leaving: {decision.reason})")

    def _standing(self) -> tuple[int, int | None]:
        """Iteration and newest saved step; before anything was loaded, as `latest` says."""
        if self.progress.iteration and self.saver is not None:
            return self.progress.iteration, self.saver.saved_step
        step = newest_step(self.config.paths)
        return step or 0, step

    def _say(self, line: str) -> None:
        if self.rank == 0:
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
    """Train until something says stop, leave an end marker, and end this process with its exit status.

    `start_time`: of the monotonic clock, when this process began. `lease`: of rank 0, where it was begun.
    """
    rank = int(os.environ.get("RANK", "0"))
    trainer = Trainer(config, card, attempt, heartbeat, flag, start_time, lease)
    try:
        reason = trainer.train()
    except Exception as error:  # whatever it is, it is recorded before the process goes
        end_if_asked(config.kill_switch, config.paths, attempt, heartbeat, rank)
        reason = "refused" if is_refusal(error, trainer.steps_done) else "error"
        tell(f"tr11: refused: {error}" if reason == "refused" else failure_text(error), sys.stderr)
        record_failure(config.paths, attempt, rank, error, reason, trainer.progress.iteration)
        if isinstance(error, RuntimeError) or lost_a_rank(error):
            _keep_operations(record_path(config.paths, attempt.job_id, attempt.launch, rank))
    heartbeat.beat("ended", trainer.progress.iteration)
    exit_process(exit_code(reason), trainer.close)


def _keep_operations(path: Path) -> None:
    """What this rank waited for, beside its failure: that is in place first."""
    try:
        write_record(path)
    except OSError as problem:
        tell(f"tr11: the operations between the ranks could not be kept: {problem}", sys.stderr)
