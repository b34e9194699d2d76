"""The training loop: start, the step on one screen, and the one way out."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from trainer.checkpoint.catalogue import CheckpointError
from trainer.config import CardError, TrainerConfig
from trainer.config_rules import cross_problems
from trainer.contract import StepRecord, read_latest
from trainer.data.errors import DataError
from trainer.engine import Engine, init_distributed
from trainer.lifecycle import (
    NO_SIGNS,
    Attempt,
    Decision,
    HeartbeatWriter,
    Limits,
    SignalFlag,
    decide,
    exit_code,
    exit_process,
    look,
    pass_on,
    steady_clock,
    tell,
    write_end_marker,
    write_failure,
)
from trainer.mesh import Mesh
from trainer.metrics import Interval, MetricsWriter
from trainer.model.flops import tflops_per_gpu
from trainer.resume import Progress, load_newest, read_card_hash, save_progress
from trainer.samples import open_samples
from trainer.schedule import batch_size_at, learning_rate_at, total_iterations

REFUSALS = (CardError, CheckpointError, DataError)


def run(config: TrainerConfig, card: Path, flag: SignalFlag, start_time: float) -> NoReturn:
    """Train until something says stop, leave an end marker, and end this process with its exit status.

    `start_time`: of the monotonic clock, when this process began.
    """
    attempt = Attempt.from_environment(os.environ, config.paths)
    rank = int(os.environ.get("RANK", "0"))
    heartbeat = HeartbeatWriter(config.paths, rank, attempt.job_id)
    trainer = Trainer(config, card, attempt, heartbeat, flag, start_time)
    try:
        reason = trainer.train()
    except Exception as error:  # whatever it is, it is recorded before the process goes
        reason = "refused" if _is_refusal(error, trainer.steps_done) else "error"
        tell(f"tr11: refused: {error}" if reason == "refused" else traceback.format_exc().rstrip(), sys.stderr)
        _leave_word(config, attempt, rank, error, reason, trainer.progress.iteration)
    heartbeat.beat("ended", trainer.progress.iteration)
    exit_process(exit_code(reason), trainer.close)


def _is_refusal(error: Exception, steps_done: int) -> bool:
    """Bad input, which the next try would meet again: not a rank that was lost on the way, nor what came after steps.

    The difference matters: after a refusal no later array task trains.
    """
    lost_a_rank = isinstance(error.__cause__, RuntimeError)
    return isinstance(error, REFUSALS) and steps_done == 0 and not lost_a_rank


def _leave_word(
    config: TrainerConfig, attempt: Attempt, rank: int, error: BaseException, reason: str, iteration: int
) -> None:
    try:
        write_failure(config.paths, attempt, rank, error, iteration)
        if reason == "refused":
            write_end_marker(config.paths, attempt, reason, False, iteration, None, str(error))
    except OSError as problem:
        tell(f"tr11: the failure could not be recorded: {problem}", sys.stderr)


@dataclass
class Trainer:
    """One attempt's training on this rank. `train` is called once; `close` releases what it opened."""

    config: TrainerConfig
    card: Path
    attempt: Attempt
    heartbeat: HeartbeatWriter
    flag: SignalFlag
    start_time: float

    def __post_init__(self) -> None:
        self.progress = Progress()
        self.saved_step: int | None = None
        self.failed_saves: list[int] = []
        self.clock = steady_clock()
        self.steps_done = 0
        self._closers: list[Callable[[], None]] = []

    def close(self) -> None:
        for closer in reversed(self._closers):
            closer()

    # ------------------------------------------------------------------ start
    def train(self) -> str:
        """The whole attempt; returns the end reason."""
        config = self.config
        self.heartbeat.beat("starting", 0)
        device = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        init_distributed(device)
        self._closers.append(_leave_group)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.limits = Limits(
            config.kill_switch, config.run.exit_duration_minutes, config.run.exit_interval, self._earliest_start()
        )
        self.card_hash = read_card_hash(self.card)
        problems = cross_problems(config, self.world_size)
        if problems:
            raise CardError(str(self.card), problems)
        self.total = total_iterations(config.batch)
        decision = self._decision()
        if decision is not None:
            return self._end(decision)
        self.mesh = Mesh.create(config.parallel, device)
        self.data_parallel = config.data_parallel(self.world_size)
        self._say(
            f"using world size: {self.world_size}, data-parallel-size: {self.data_parallel}, "
            f"tensor-model-parallel size: {config.parallel.tensor}, "
            f"pipeline-model-parallel size: {config.parallel.pipeline} "
        )
        self._say(f"setting training iterations to {self.total}")
        self.engine = Engine.build(config, self.mesh)
        self._closers.append(self.engine.close)
        self.samples = open_samples(config, self.mesh, self.engine.needs_data)
        self.heartbeat.beat("loading", 0)
        self.progress = load_newest(config, self.mesh, self.engine, self._say)
        self.saved_step = self.progress.iteration or None
        self.metrics = MetricsWriter(
            config.paths,
            self.attempt.job_id,
            self.rank == self.world_size - 1,
            config.logging.tensorboard,
            config.logging.tensorboard_queue,
            self.world_size,
        )
        self.metrics.open()
        self._closers.append(self.metrics.close)
        self._say("training ...")
        return self._end(self._loop())

    def _earliest_start(self) -> float:
        """Start of the earliest rank, so that every rank counts the exit duration from the same moment.

        Ages are compared, not times of day: one node with a wrong clock must not end, or prolong, the attempt.
        """
        age = _on_device(torch.tensor([time.monotonic() - self.start_time], dtype=torch.float64))
        dist.all_reduce(age, dist.ReduceOp.MAX)
        return self.clock() - float(age.item())

    # ------------------------------------------------------------------ the loop
    def _loop(self) -> Decision:
        config, batch = self.config, self.config.batch
        going_on = self.progress.iteration < self.total
        stream = self.samples.train(self.progress.consumed_samples) if going_on else iter(())
        interval = Interval()
        while self.progress.iteration < self.total:
            decision = self._decision()
            if decision is not None:
                return decision
            self.heartbeat.beat("training", self.progress.iteration)
            global_batch = batch_size_at(self.progress.consumed_samples, batch)
            self.engine.set_learning_rate(self._learning_rate())
            began = time.perf_counter()
            result = self.engine.train_step(stream, global_batch, step=self.progress.iteration)
            self.progress = self.progress.after_step(
                global_batch, config.model.sequence_length, result.loss, result.skipped
            )
            self.steps_done += 1
            interval.add(result.loss, time.perf_counter() - began, global_batch, result.skipped)
            iteration = self.progress.iteration
            if iteration % config.logging.interval == 0:
                self._log(interval, global_batch, result.grad_norm)
                interval = Interval()
            # The save comes first: a hang or fault in the evaluation must not cost a finished interval.
            if iteration % config.checkpoint.interval == 0:
                self._save()
            if config.evaluation.iterations and iteration % config.evaluation.interval == 0:
                decision = self._evaluate("valid")
                if decision is not None:
                    return decision
        if self.steps_done and config.evaluation.iterations:
            self._evaluate("the end of training for val data")
        return Decision("finished", False, f"after training is done: {self.total} iterations")

    def _decision(self) -> Decision | None:
        """One small broadcast: rank 0 decides, and all act on what it saw."""
        now, signs = self.clock(), NO_SIGNS
        if self.rank == 0:
            signs = look(self.limits, self.flag, self.attempt.stop_request, now)
        else:
            pass_on(self.flag, self.attempt.stop_request)
        seen = _on_device(torch.tensor(signs, dtype=torch.int32))
        dist.broadcast(seen, 0)
        return decide(seen.tolist(), self.limits, self.progress.iteration, self.steps_done > 0, now)

    def _learning_rate(self) -> float:
        return learning_rate_at(self.progress.consumed_samples, self.config.schedule, self.config.decay_samples)

    def _evaluate(self, name: str) -> Decision | None:
        """Mean validation loss over the same samples every time, so that the values can be compared.

        Between its batches a stop is honoured: an evaluation of many sets took longer than the margin before the
        time limit.
        """
        self.heartbeat.beat("evaluating", self.progress.iteration)
        count = self.config.evaluation.iterations
        micro_batches = self.config.batch.global_batch_size // (self.config.batch.micro_batch_size * self.data_parallel)
        stream = self.samples.valid()
        losses = []
        for _ in range(count):
            decision = self._decision()
            if decision is not None and decision.reason != "exit-interval":
                return decision
            losses.append(self.engine.evaluate(stream, micro_batches))
            self.heartbeat.beat("evaluating", self.progress.iteration)
        progress = self.progress
        self.metrics.validation(
            name, progress.iteration, progress.consumed_samples, progress.consumed_tokens, math.fsum(losses) / count
        )
        return None

    def _log(self, interval: Interval, global_batch: int, grad_norm: float | None) -> None:
        config, progress = self.config, self.progress
        seconds = interval.seconds / interval.steps
        record = StepRecord(
            iteration=progress.iteration,
            total_iterations=self.total,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            seconds_per_iteration=seconds,
            learning_rate=self._learning_rate(),
            global_batch_size=global_batch,
            lm_loss=interval.loss / interval.steps,
            grad_norm=grad_norm,
            samples_per_second=interval.samples / interval.seconds,
            tflops=tflops_per_gpu(
                config.model,
                config.tokenizer.padded_vocabulary_size,
                interval.samples / interval.steps,
                seconds,
                self.world_size,
            ),
            params_norm=self.engine.params_norm() if config.logging.params_norm else None,
            skipped_iterations=interval.skipped,
            nan_iterations=interval.nan,
        )
        self.metrics.step(record, self.data_parallel, config.model.sequence_length)

    # ------------------------------------------------------------------ saving and leaving
    def _save(self) -> CheckpointError | None:
        """Save this iteration; returns the fault when it could not be written (disk full, no rights). Collective.

        The older checkpoints are then untouched, and all ranks know the same, so the training may go on.
        """
        if self.progress.iteration in {0, self.saved_step}:
            return None
        self.heartbeat.beat("saving", self.progress.iteration)
        drifted = self.engine.disagreeing_parameters()
        if drifted:
            raise RuntimeError(
                f"copies of these parameters differ between ranks, so nothing was saved: {', '.join(drifted)}"
            )
        try:
            save_progress(
                self.config, self.card_hash, self.mesh, self.engine, self.progress, self.attempt.job_id, self._say
            )
        except CheckpointError as fault:
            if isinstance(fault.__cause__, RuntimeError):
                raise  # a rank was lost: there is nothing to go on with
            newest = "there is none yet" if self.saved_step is None else f"the newest is of step {self.saved_step}"
            self.failed_saves.append(self.progress.iteration)
            self._say(f"tr11: WARNING: SAVE FAILED at iteration {self.progress.iteration}, {newest}: {fault}")
            return fault
        self.saved_step = self.progress.iteration
        if self.failed_saves:  # said again: where the disk was full, the log could not take the warning
            missing = ", ".join(map(str, self.failed_saves))
            self._say(f"tr11: WARNING: saves failed before this one, at iteration {missing}; they work again")
            self.failed_saves.clear()
        return None

    def _end(self, decision: Decision) -> str:
        """Save what is not saved, then leave the end marker: nothing that follows it may matter."""
        fault = self._save() if self.steps_done else None
        if fault is not None:
            lost = f"the last save failed, all steps after {self.saved_step or 0} are lost: {fault}"
            decision = Decision("error", True, f"{lost} (leaving: {decision.reason})")
        self._say(decision.line)
        self.heartbeat.beat("ending", self.progress.iteration)
        dist.barrier()
        if self.rank == 0:
            iteration, step = self._standing()
            write_end_marker(
                self.config.paths,
                self.attempt,
                decision.reason,
                decision.restart,
                iteration,
                step,
                decision.line.strip(),
            )
        return decision.reason

    def _standing(self) -> tuple[int, int | None]:
        """Iteration and newest saved step; before anything was loaded, as `latest` says."""
        if self.progress.iteration:
            return self.progress.iteration, self.saved_step
        try:
            step = read_latest(self.config.paths.checkpoints)
        except (OSError, ValueError):
            step = None
        return step or 0, step

    def _say(self, line: str) -> None:
        if self.rank == 0:
            tell(line)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda() if dist.get_backend() == "nccl" else tensor
