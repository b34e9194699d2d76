"""The training loop: the steps of one attempt on one screen, and what each of them does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta

from trainer.contract.errors import CheckpointError
from trainer.contract.recovery import RollBack
from trainer.control.control_signals import Agreed, ControlSignals
from trainer.control.lifecycle import StopDecision, Stopped, Worker
from trainer.control.resume import load_step
from trainer.control.saving import Saver
from trainer.data.samples import Samples
from trainer.data.stream import EmptyStream, MicroBatchStream
from trainer.debug.dump import DebugDumps
from trainer.debug.record import StepFacts
from trainer.engine import Engine, StepResult
from trainer.instruments import Instruments
from trainer.model.compiled import compile_caches
from trainer.parallel.mesh import Mesh
from trainer.pipeline.partial_losses import Measured
from trainer.schedule.learning_rate import LearningRatePlan
from trainer.schedule.path import Progress, Skipped, batch_size_at, path_of, sequence_length_at
from trainer.spikes.recovery import SpikeWatch

# how long a rank waits for its data before all ranks look for a reason to stop
DATA_LOOK_SECONDS = 1.0


@dataclass
class Trainer:
    """One attempt's training on this rank, from where its checkpoint left it. Every part exists.

    `compiles`: some code of a step is made when its kind comes for the first time.
    """

    worker: Worker
    mesh: Mesh
    control_signals: ControlSignals
    engine: Engine
    samples: Samples
    dumps: DebugDumps
    spikes: SpikeWatch
    instruments: Instruments
    saver: Saver
    progress: Progress
    learning_rate: LearningRatePlan
    compiles: bool

    steps_done: int = 0  # by this attempt
    # kinds of steps, see _kind_of_step
    compiled_for: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.config, self.say = self.worker.config, self.worker.say
        # iterations of the whole training
        self.total = path_of(self.config, self.progress.position).total_iterations
        self.stream = self._train_stream()

    def train(self) -> StopDecision:
        """All steps that are left; why it stops."""
        config = self.config
        try:
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
                        return decision
            self._evaluate_at_end()
        except Stopped as stopped:
            return stopped.decision
        return StopDecision("finished", False, f"after training is done: {self.total} iterations")

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
        self.worker.heartbeat.beat(phase, self.progress.iteration)

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
            self.say(line)
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
            self.say(
                f"compiling in step {step}, the first of this launch; {compile_caches(os.environ)}"
            )
        self.engine.set_learning_rate(self._learning_rate())
        self.dumps.before_step(step, self.engine.named_parameters(), self.facts())
        batches = self.dumps.watch(self.stream)
        with self._first_time("step", *kind):
            result = self.engine.train_step(batches, samples, self.progress.iteration, length)
        self.compiled_for.add(kind)
        if compiles_first:
            self.say(f"step {step} took {time.perf_counter() - began:.1f} s, compiling included")
        self.progress = self.progress.after_step(samples, length, result.loss, result.skipped)
        self.steps_done += 1
        is_traced = self.instruments.profiler.is_tracing
        news = None
        if self.engine.compiler is not None:
            news = self.engine.compiler.news()
        if news is not None:
            self.say(news)
        self.instruments.profiler.after_step(step)
        self.dumps.after_step(step, self.engine.named_parameters(), self.facts())
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

    def facts(self) -> StepFacts:
        """For the dumps: where the training stands."""
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
        self.say(action.line)
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
        self.worker.heartbeat.beat("loading", self.progress.iteration)
        self.spikes.roll_back(action, self.worker.fence)
        resumed = load_step(self.engine, action.to_step, self.say)
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
    def _agree(self, waits: bool = False) -> Agreed:
        """What all ranks do next. Collective."""
        due = self.saver.minutes_are_over(self.worker.clock())
        return self.control_signals.agree(self.progress.iteration, self.steps_done > 0, due, waits)

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
    def _save(self) -> float:
        """Save this iteration, or begin to; returns the seconds that the training stood still.
        Collective.
        """
        self.control_signals.enter("saving", self.progress.iteration)
        self.dumps.on_save(self.progress.iteration, self.engine.named_parameters(), self.facts())
        return self.saver.save(self.progress, self.learning_rate, self.worker.clock())

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
            self.worker.heartbeat.beat("saving", self.progress.iteration)
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

    def leave(self, decision: StopDecision) -> StopDecision:
        """No step comes any more: save what is not saved, and answer who waits. The decision that
        stands then.
        """
        self.instruments.give_up()
        if self.steps_done and decision.save:
            fault = self._await_save()
            if self.progress.iteration != self.saver.saved_step:
                self._save()
                fault = self._await_save()
            if fault is not None and self.progress.iteration != self.saver.saved_step:
                decision = self._after_failed_save(fault, decision)
            self.control_signals.settle(self.saver.was_saved, is_last=True)
        return decision

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
