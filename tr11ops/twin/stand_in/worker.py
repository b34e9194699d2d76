"""One worker of a stand-in training: the trainer's own life cycle, log lines and checkpoints, and
no work between.

What it shares with the trainer is imported from it: what stops a training, heartbeats, end markers,
failures, the log line, the course of batches and learning rates, leases, manifests. A step is a
pause of the card's length.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tr11ops.runcard.sections import RehearsalSection
from tr11ops.twin.stand_in import checkpoint
from tr11ops.twin.stand_in.ailments import Ailments
from tr11ops.twin.stand_in.crew import RankLost, StandInGroup
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import AttemptIdentity, exit_code, tell
from trainer.contract.checkpoints import refusal_code, take_run
from trainer.contract.compute_record import ComputeRecord, RankPosition
from trainer.contract.errors import CheckpointError, NodeFilesError
from trainer.contract.files import append_line, host_name
from trainer.contract.lease import Lease
from trainer.contract.manifest import FileEntry
from trainer.contract.metrics_record import SAVE_FAILED, StepRecord, format_step, format_validation
from trainer.contract.paths import RunPaths, newest_step
from trainer.contract.record import IterationRange, JsonObject, Record
from trainer.contract.recovery import read_recovery
from trainer.contract.requests import RequestAnswer, leave_answer, watch_for_kill_now
from trainer.control.control_signals import Agreed, ControlSignals
from trainer.control.exits import (
    FailedSaves,
    end_by_itself,
    end_if_asked,
    end_now,
    end_with_another,
    record_end,
)
from trainer.control.lifecycle import (
    HeartbeatWriter,
    SignalFlag,
    StopConditions,
    StopDecision,
    Worker,
    exit_process,
)
from trainer.schedule.flops import tflops_per_gpu
from trainer.schedule.learning_rate import plan_of
from trainer.schedule.path import Progress, SkipPlan, batch_size_at, path_of, sequence_length_at

DATA_LOOK_SECONDS = 1.0  # between two looks for data
PIECE_SECONDS = 0.1  # of a pause
# as the trainer says it, of what stands here for all weights
COPIES_DIFFER = "copies of these parameters differ between ranks, so nothing was saved: chain"


class Seat(Record):
    """This worker's place: its rank among `world`, and where rank 0 listens."""

    rank: int
    world: int
    address: str
    port: int


def run(
    config: TrainerConfig, pace: RehearsalSection, card_hash: str, seat: Seat, flag: SignalFlag
) -> NoReturn:
    """Pretend to train until something says stop, leave an end marker, and end this process with
    its exit status.
    """
    paths = config.paths
    rank = seat.rank
    ailments = Ailments(config, os.environ)
    ailments.mistake_the_time()
    attempt = AttemptIdentity.from_environment(os.environ, paths)
    # the time as it is mistaken
    heartbeat = HeartbeatWriter(
        paths, rank, job_id=attempt.job_id, clock=time.time, launch=attempt.launch
    )
    worker = Worker(config, attempt, rank, heartbeat=heartbeat, flag=flag)
    watch_for_kill_now(config.kill_switch, partial(end_now, worker))
    training = StandIn(worker, pace, card_hash=card_hash, seat=seat, ailments=ailments)
    try:
        reason = training.train()
    except Exception as error:  # whatever it is, it is recorded before the process goes
        end_if_asked(worker)
        reason = _fail(training, error)
    heartbeat.beat("ended", training.progress.iteration)
    exit_process(exit_code(reason), training.close)


def _fail(training: StandIn, error: Exception) -> str:
    """Say and record why this rank ends, as the trainer does; returns the end reason."""
    worker = training.worker
    iteration = training.progress.iteration
    if isinstance(error, RankLost):
        reason = end_with_another(worker, error=error, iteration=iteration)
        if reason is not None:
            return reason
    return end_by_itself(worker, error=error, steps_done=training.steps_done, iteration=iteration)


@dataclass
class StandIn:
    """One attempt of a stand-in training on this rank. `train` is called once; `close` leaves the
    others.
    """

    worker: Worker
    pace: RehearsalSection
    card_hash: str
    seat: Seat
    ailments: Ailments

    def __post_init__(self) -> None:
        worker = self.worker
        self.config, self.attempt, self.heartbeat = (
            worker.config,
            worker.attempt,
            worker.heartbeat,
        )
        self.clock = worker.clock
        self.group = StandInGroup(
            self.seat.rank,
            self.seat.world,
            address=self.seat.address,
            port=self.seat.port,
            timeout_seconds=self.pace.collective_seconds,
        )
        self.progress = Progress()
        self.chain = checkpoint.FIRST_LINK
        self.saved_step: int | None = None
        self.failed_saves = FailedSaves()
        self.last_save = worker.start_time
        self.steps_done = 0
        parallel = self.config.parallel
        seat = self.seat
        place = RankPosition.of(seat.rank, seat.world, parallel.tensor, parallel.pipeline)
        self.compute = ComputeRecord(self.config.paths, self.attempt, seat.rank, place)

    def close(self) -> None:
        self.group.close()
        if self.worker.lease is not None:
            self.worker.lease.release()

    # ------------------------------------------------------------------ start
    def train(self) -> str:
        """The whole attempt; returns the end reason."""
        if self.seat.rank == 0:
            self.worker.lease = Lease.begin(
                self.config.paths, self.attempt.job_id, self.attempt.launch
            )
        self._pass(self.pace.start_seconds, "starting")
        self.group.join()
        self.worker.say(f"tr11: REHEARSAL: {self.seat.world} stand-in workers; nothing is trained")
        age = self.group.meet("start", time.monotonic() - self.worker.start_time, max)
        paths = self.config.paths
        limits = StopConditions.of(self.config, self.clock() - age)
        self.control_signals = ControlSignals(self.worker, limits, self._largest)
        self.course = path_of(self.config)
        self.learning_rate = plan_of(self.config)
        self.control_signals.enter("starting", 0)
        for prepare in (self._take_lease, self._load):
            decision = self._agree().decision or prepare()
            if decision is not None:
                return self._end(decision)
        rolled_back: list[list[int]] = self._on_first("the roll-backs", lambda: _ranges(paths))
        self.skips = SkipPlan.of(
            self.config, [IterationRange(first, last) for first, last in rolled_back]
        )
        self.worker.say("training ...")
        return self._end(self._loop())

    def _take_lease(self) -> StopDecision | None:
        """A decision when a living training keeps this one out."""
        fault = self._on_first(
            "the run's lease", lambda: take_run(self.worker.lease, self.config.paths)
        )
        if fault:
            return StopDecision("refused", False, f"tr11: refused: {fault}")
        return None

    def _load(self) -> None:
        """Resume from the newest complete checkpoint, or start at zero."""
        self.heartbeat.beat("loading", 0)
        step = self._on_first("the start", lambda: checkpoint.find(self.config, self.worker.say))
        folder = self.config.paths.checkpoints
        if step is None:
            self.worker.say(f"no checkpoint in {folder}: starting from random weights")
            return
        self.progress, self.chain = checkpoint.load(folder, step, self.seat.rank)
        self.saved_step = step
        self.group.meet("load", None, len)
        self.worker.say(f"  successfully loaded checkpoint from {folder} at iteration {step}")

    # ------------------------------------------------------------------ the loop
    def _loop(self) -> StopDecision:
        total = self.course.total_iterations
        settings = self.config.checkpoint
        evaluation = self.config.evaluation
        while self.progress.iteration < total:
            agreed = self._ready("training")
            if agreed.decision is not None:
                return agreed.decision
            if agreed.check and self.seat.rank == 0:
                text = "nothing was checked: this is a rehearsal, in which nothing is computed"
                leave_answer(
                    self.config.paths,
                    RequestAnswer(
                        agreed.check,
                        None,
                        message=text,
                        time=time.time(),
                        job_id=self.attempt.job_id,
                    ),
                )
            if agreed.save and self.steps_done:
                self._save()
            if self._pass_over():
                continue
            self._step(total)
            self.control_signals.settle(self._was_saved)
            iteration = self.progress.iteration
            if settings.interval is not None and iteration % settings.interval == 0:
                self._save()
            failed = self.failed_saves
            if failed.unable:
                return StopDecision(
                    "error", True, failed.line(self.saved_step), save=False, node=failed.node
                )
            if evaluation.iterations and iteration % evaluation.interval == 0:
                decision = self._evaluate()
                if decision is not None:
                    return decision
        return StopDecision("finished", False, f"after training is done: {total} iterations")

    def _pass_over(self) -> bool:
        """Move every counter over a skipped range that starts here, as the trainer does; True when
        there was one.
        """
        skipped = self.skips.advance(self.progress.position, self.config)
        if skipped is None:
            return False
        self.progress = self.progress.moved_to(skipped.position)
        for line in skipped.lines:
            self.worker.say(line)
        return True

    def _step(self, total: int) -> None:
        """One step: a pause, and a meeting of all ranks in place of the gradients' reduction."""
        config = self.config
        began = time.perf_counter()
        samples = batch_size_at(self.progress.consumed_samples, config.batch)
        length = sequence_length_at(
            self.progress.iteration + 1, config.curriculum, config.model.sequence_length
        )
        self._pass(self.pace.step_seconds, "training")
        own_seconds = time.perf_counter() - began
        self.ailments.die_of_bad_sample(
            self.progress.iteration + 1, self.seat.rank, self.seat.world
        )
        loss: float = self.group.meet("step", _loss(self.progress.consumed_samples), _mean)
        self.progress = self.progress.after_step(samples, length, loss, skipped=False)
        trained = self.progress.consumed_samples
        if self.ailments.weights_drift():
            trained += 1
        self.chain = checkpoint.next_link(self.chain, self.progress.iteration, trained)
        self.steps_done += 1
        self.compute.add(self.progress.iteration, {"forward": own_seconds})
        if (
            self.seat.rank == self.seat.world - 1
            and self.progress.iteration % config.logging.interval == 0
        ):
            self._log(total, samples, length=length, loss=loss, seconds=time.perf_counter() - began)

    def _log(self, total: int, samples: int, length: int, loss: float, seconds: float) -> None:
        """The line and the record of one step; on the last rank, as in the trainer."""
        progress = self.progress
        if self.pace.log_scale is not None:
            # without the noise of a shared machine
            seconds = max(0.1, round(seconds, 1)) * self.pace.log_scale
        loss, gradient_norm = self.ailments.numbers(progress.iteration, loss, 1.0)
        record = StepRecord(
            iteration=progress.iteration,
            total_iterations=total,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            seconds_per_iteration=seconds,
            learning_rate=self.learning_rate.at(
                progress.scheduled_samples, progress.scheduled_tokens
            ),
            global_batch_size=samples,
            lm_loss=loss,
            grad_norm=gradient_norm,
            samples_per_second=samples / seconds,
            tflops=tflops_per_gpu(
                self.config,
                global_batch_size=samples,
                seconds=seconds,
                world_size=self.seat.world,
                sequence_length=length,
            ),
        )
        tell(format_step(record))
        self._record({"kind": "step", **record.values(), "device": "stand-in"})

    def _record(self, value: JsonObject) -> None:
        line = json.dumps({**value, "time": time.time(), "job_id": self.attempt.job_id})
        try:
            append_line(self.config.paths.metrics, line)
        except OSError as error:
            tell(f"tr11: WARNING: metrics cannot be written, the training goes on: {error}")

    def _evaluate(self) -> StopDecision | None:
        for _ in range(self.config.evaluation.iterations):
            decision = self._ready("evaluating").decision
            if decision is not None and decision.reason != "exit-interval":
                return decision
            self._pass(self.pace.evaluation_seconds, "evaluating")
            loss = self.group.meet("evaluation", _loss(self.progress.consumed_samples), _mean)
        if self.seat.rank == self.seat.world - 1:
            tell(format_validation("validation", self.progress.iteration, loss))
        return None

    def _ready(self, phase: str) -> Agreed:
        """Wait until every rank has its data; there are none here, but a drill may keep them away."""
        while True:
            self.control_signals.enter(phase, self.progress.iteration)
            agreed = self._agree()
            if agreed.decision is not None or not agreed.waits:
                return agreed
            phase = "data-wait"
            time.sleep(DATA_LOOK_SECONDS)

    def _agree(self) -> Agreed:
        """What all ranks do next."""
        minutes = self.config.checkpoint.interval_minutes
        due = minutes is not None and time.monotonic() - self.last_save >= minutes * 60
        trained = self.steps_done > 0
        waits = trained and self.ailments.data_are_missing()
        return self.control_signals.agree(self.progress.iteration, trained, due, waits)

    def _largest(self, values: list[int]) -> list[int]:
        largest: list[int] = self.group.meet("decision", values, _largest)
        return largest

    def _pass(self, seconds: float, phase: str) -> None:
        """Let time pass in a phase, as the card scales it, with the heartbeat going on.

        As with real work, what is missed while this process is stopped is still to be done
        afterwards.
        """
        left = seconds / self.pace.time_scale
        while phase in ("training", "evaluating") and self.ailments.step_hangs():
            time.sleep(PIECE_SECONDS)  # and no heartbeat
        if phase == "training":
            left *= self.ailments.slowness()
        while True:
            self.heartbeat.beat(phase, self.progress.iteration)
            if left <= 0:
                return
            time.sleep(min(PIECE_SECONDS, left))
            left -= PIECE_SECONDS

    # ------------------------------------------------------------------ saving and leaving
    def _save(self) -> str:
        """Save this iteration; returns the fault, and keeps all older checkpoints, when that fails."""
        step = self.progress.iteration
        folder = self.config.paths.checkpoints
        self.last_save = time.monotonic()
        if step in {0, self.saved_step}:
            return ""
        if self.group.meet("the copies", self.chain, _differ):
            raise RuntimeError(COPIES_DIFFER)
        self.worker.say(f"saving checkpoint at iteration {step:7d} to {folder}")
        began = time.perf_counter()
        self.control_signals.enter("saving", step)
        try:
            partial = Path(self._on_first("saving", lambda: str(checkpoint.prepare(folder, step))))
            self._pass(self.pace.save_seconds, "saving")
            mine = self._try(lambda: self._write_part(partial))
            self._all("saving", mine, lambda parts: self._publish(partial, parts))
        except CheckpointError as fault:
            if self.saved_step is None:
                newest = "there is none yet"
            else:
                newest = f"the newest is of step {self.saved_step}"
            self.worker.say(f"tr11: WARNING: SAVE FAILED at iteration {step}, {newest}: {fault}")
            self.failed_saves = self.failed_saves.after(step, fault)
            if self.seat.rank == 0:
                self._record({"kind": SAVE_FAILED, **self.failed_saves.event(step, fault)})
            if self.failed_saves.node and not self.failed_saves.unable:
                again = "if the next fails there too, the training leaves that node"
                self.worker.say(f"tr11: WARNING: {self.failed_saves}: {again}")
            return str(fault)
        self.saved_step = step
        self.failed_saves = FailedSaves()
        self.worker.say(f"  successfully saved checkpoint at iteration {step:7d} to {folder}")
        self.worker.say(f"time (ms) | save-checkpoint: {(time.perf_counter() - began) * 1000:.2f}")
        return ""

    def _write_part(self, partial: Path) -> JsonObject:
        self.ailments.refuse_save(partial)
        return checkpoint.write_part(partial, self.seat.rank, self.chain, self.pace.bytes_per_rank)

    def _was_saved(self, step: int) -> bool:
        """Whether the save of a step came about; each has ended before it is asked for."""
        return step == self.saved_step

    def _publish(self, partial: Path, parts: Sequence[Any]) -> None:
        assert self.worker.lease is not None
        entries = [FileEntry(**part) for part in parts]
        checkpoint.publish(
            self.config,
            partial,
            progress=self.progress,
            chain=self.chain,
            parts=entries,
            card_hash=self.card_hash,
            job_id=self.attempt.job_id,
            world=self.seat.world,
            fence=self.worker.lease.check,
        )

    def _end(self, decision: StopDecision) -> str:
        """Save what is not saved, then leave the end marker."""
        if decision.save and self.steps_done and self.progress.iteration != self.saved_step:
            fault = self._save()
            found = self._agree().decision if fault else None
            if found is not None and found.reason == "superseded":
                decision = found
            elif fault:
                lost = f"the last save failed, all steps after {self.saved_step or 0} are lost: {fault}"
                decision = StopDecision("error", True, f"{lost} (leaving: {decision.reason})")
        self.control_signals.settle(self._was_saved)
        self.worker.say(decision.line)
        self.heartbeat.beat("ending", self.progress.iteration)
        self.group.meet("end", None, len)
        if self.seat.rank == 0 and not (self.worker.lease and self.worker.lease.lost_to_own_job()):
            iteration, step = self._standing()
            return record_end(self.worker, decision, iteration=iteration, checkpoint_step=step)
        return decision.reason

    def _standing(self) -> tuple[int, int | None]:
        """Iteration and newest saved step; before anything was loaded, as `latest` says."""
        if self.progress.iteration:
            return self.progress.iteration, self.saved_step
        step = newest_step(self.config.paths)
        return step or 0, step

    # ------------------------------------------------------------------ together
    def _on_first(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 and return its result on all ranks; a fault there is a
        CheckpointError on all.
        """
        return self._all(what, {"value": None}, lambda _: action())

    def _all(self, what: str, mine: JsonObject, action: Callable[[Sequence[Any]], Any]) -> Any:
        """As `_on_first`, with every rank's value for `action`; a rank that failed fails all."""

        def reduce(values: Sequence[JsonObject]) -> JsonObject:
            failed = [(rank, value) for rank, value in enumerate(values) if "fault" in value]
            if failed:
                text = f"rank {failed[0][0]}: {failed[0][1]['fault']}"
                hosts = {value["host"] for _, value in failed}
                served = {value["host"] for value in values} - hosts
                codes = [value["code"] for _, value in failed]
                is_nodes = bool(served) and None not in codes
                if is_nodes:
                    nodes = sorted(hosts)
                else:
                    nodes = []
                return {"fault": text, "failed": nodes, "served": sorted(served), "codes": codes}
            return self._try(lambda: action([value["value"] for value in values]))

        answer = self.group.meet(what, {**mine, "host": host_name()}, reduce)
        if "fault" in answer and answer.get("failed"):
            raise NodeFilesError(
                answer["fault"], answer["failed"], answer["served"], answer["codes"]
            )
        if "fault" in answer:
            raise CheckpointError(answer["fault"])
        return answer["value"]

    @staticmethod
    def _try(action: Callable[[], Any]) -> JsonObject:
        try:
            return {"value": action()}
        except (
            OSError,
            ValueError,
        ) as error:  # CheckpointError and LeaseLost are of the second kind
            return {"fault": " ".join(str(error).split()), "code": refusal_code(error)}


def _ranges(paths: RunPaths) -> list[list[int]]:
    """What the roll-backs of the run pass over, as JSON has it. Raises ValueError when their file
    is damaged.
    """
    return [[skip.first, skip.last] for skip in read_recovery(paths).ranges]


def _loss(samples: int) -> float:
    """A loss that falls as one of a language model does: the same wherever the training is resumed."""
    return 2.0 + 9.5 / math.pow(1.0 + samples / 2000.0, 0.3)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _differ(values: Sequence[str]) -> bool:
    return len(set(values)) > 1


def _largest(values: Sequence[Sequence[int]]) -> list[int]:
    return [max(column) for column in zip(*values, strict=True)]
