"""What looks at a training's steps and writes down what it sees: no number of the training depends
on it.
"""

from __future__ import annotations

from trainer.contract.compute_record import ComputeRecord, RankPosition
from trainer.contract.metrics_record import StepRecord
from trainer.control.lifecycle import Worker
from trainer.debug.profile import StepProfiler
from trainer.engine import Engine, StepResult
from trainer.metrics.throughput import ThroughputMeter
from trainer.metrics.writer import Interval, MetricsWriter
from trainer.schedule.path import Progress, sequence_length_at
from trainer.spikes.corruption_check import CorruptionWatch


class Instruments:
    """One attempt's, on this rank. `interval`: sums of the steps since the last log line."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        config, mesh, attempt = engine.config, engine.mesh, worker.attempt
        self._config, self._engine = config, engine
        self.interval = Interval()
        self.throughput = ThroughputMeter(config, mesh)
        self.metrics = MetricsWriter(
            config,
            attempt.job_id,
            is_writer=mesh.rank == mesh.world_size - 1,
            world_size=mesh.world_size,
            replicas=mesh.data,
        )
        self.profiler = StepProfiler(
            config.paths, attempt, (mesh.rank, mesh.world_size), mesh.device
        )
        position = RankPosition(mesh.pipeline_rank, mesh.tensor_rank)
        self.compute = ComputeRecord(config.paths, attempt, mesh.rank, position)
        self.corruption = CorruptionWatch(config, mesh, attempt, worker.say)

    def open(self, iteration: int) -> None:
        """Create the metrics' files. Raises OSError when the run directory refuses them."""
        self.metrics.open()
        self.metrics.settings(self._config.model_dump(mode="json"), iteration)

    def count(
        self,
        iteration: int,
        result: StepResult,
        *,
        seconds: float,
        samples: int,
        length: int,
        is_traced: bool,
    ) -> None:
        """Add one step of `samples` samples of `length` tokens. `is_traced`: its own times tell
        nothing.
        """
        self.interval.add(
            result.loss,
            seconds,
            samples,
            tokens=samples * length,
            skipped=result.skipped,
            parts=result.parts,
        )
        self.interval.time("optimizer", result.update_seconds)
        clock = self._engine.compute
        if is_traced:
            clock.take()
            clock.take_processor()
            self.compute.forget()
        elif self.compute.is_due(iteration):  # a GPU is waited for where these are read
            self.compute.add(iteration, *clock.take(), processor=clock.take_processor())

    def begin_interval(self) -> None:
        """Forget the steps since the last log line, and the zeros in their gradients."""
        self._engine.take_zeros()
        self.interval = Interval()

    def log(
        self, progress: Progress, result: StepResult, *, total: int, learning_rate: float
    ) -> None:
        """Write the record of the interval that ends with `result`, and begin the next. Collective."""
        config, interval, length = self._config, self.interval, None
        interval.zeros = self._engine.take_zeros()
        if config.curriculum is not None:
            length = sequence_length_at(
                progress.iteration, config.curriculum, config.model.sequence_length
            )
        loss, other_losses = interval.losses()
        record = StepRecord(
            iteration=progress.iteration,
            total_iterations=total,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            seconds_per_iteration=interval.seconds / interval.steps,
            learning_rate=learning_rate,
            global_batch_size=interval.samples // interval.steps,
            lm_loss=loss,
            grad_norm=result.grad_norm,
            samples_per_second=interval.samples / interval.seconds,
            tflops=self.throughput.tflops(interval),
            loss_scale=result.loss_scale,
            params_norm=self._engine.params_norm() if config.logging.params_norm else None,
            num_zeros=float(interval.zeros / interval.steps),
            curriculum_length=length,
            skipped_iterations=interval.skipped,
            nan_iterations=interval.nan,
            other_losses=other_losses,
        )
        timers = {name: seconds / interval.steps for name, seconds in interval.timers.items()}
        self.metrics.step(record, self.throughput.numbers(interval), timers)
        self.interval = Interval()

    def give_up(self) -> None:
        """No step comes any more: answer who still waits for a check or a profile."""
        self.corruption.give_up()
        self.profiler.give_up()
