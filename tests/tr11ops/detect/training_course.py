"""The course of a training on a clock of its own: what a run directory would hold at any moment,
with or without faults.

Batch ramp, warm-up and decay of the learning rate, growing sequence lengths, saves, evaluations and
restarts go as in a large run; numbers have its noise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from tests.tr11ops.status_cases import NOW, changed, facts_with, pending, record, running, snapshot
from tr11ops.detect import registry
from tr11ops.detect.detector import Finding
from tr11ops.observe.observations import LogFile, Phase, TrainingEvent
from tr11ops.observe.snapshot import Attempt, Checkpoint, Checkpoints, RunFacts, Snapshot, Step
from tr11ops.runcard.exit_duration import ExitPlan
from trainer.contract.attempt import Heartbeat
from trainer.contract.metrics_record import StepRecord

Change = Callable[[StepRecord], StepRecord]
WARM_UP_SAMPLES, DECAY_SAMPLES, LARGEST_RATE = 8_000, 400_000, 6e-5


class Over(Exception):
    """The moment of the look has come."""


@dataclass
class Course:
    """One training. `pace` is the seconds of an iteration, `restarts` the iterations at which an
    attempt dies.

    `change` alters a line before it is logged; `hook` is called before each iteration and may raise
    `Over` to stop there.
    """

    until: float = math.inf
    seed: int = 0
    pace: float = 105.0
    begin: int = 1
    last: int = 10_000
    ranks: int = 8
    save_every: int = 100
    save_seconds: float = 40.0
    evaluate_every: int = 150
    evaluation_seconds: float = 300.0
    restarts: tuple[int, ...] = ()
    noise: float = 0.003
    log_interval: int = 1
    change: Change = lambda line: line
    hook: Callable[[Course], None] = lambda _: None
    clock: float = NOW
    job: int = 2001
    iteration: int = 0
    phase: str = ""
    steps: list[Step] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    saved: list[tuple[int, float]] = field(default_factory=list)
    events: list[TrainingEvent] = field(default_factory=list)
    started: float = NOW
    beat_time: float = NOW
    logged: float = NOW
    dead: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.speed = 1.0
        self.left = list(self.restarts)
        if self.begin > 1:
            self.saved.append((self.begin - 1, self.clock - 5.0))

    # ------------------------------------------------------------------ the schedule
    def batch(self, iteration: int) -> int:
        return min(192, 16 * (1 + iteration // 40))

    def samples(self, iteration: int) -> int:
        """Consumed by the end of an iteration: 39 of the first batch, then 40 of each, as `batch`
        says.
        """
        steps, rest = divmod(iteration + 1, 40)
        whole = sum(40 * min(192, 16 * (1 + step)) for step in range(min(steps, 11)))
        return whole + 40 * 192 * max(0, steps - 11) + rest * self.batch(iteration) - 16

    def length(self, iteration: int) -> int:
        return min(2048, 512 + 256 * (iteration // 90))

    def rate(self, samples: int) -> float:
        if samples < WARM_UP_SAMPLES:
            return LARGEST_RATE * samples / WARM_UP_SAMPLES
        done = min(1.0, (samples - WARM_UP_SAMPLES) / DECAY_SAMPLES)
        return 6e-6 + (LARGEST_RATE - 6e-6) * 0.5 * (1 + math.cos(math.pi * done))

    # ------------------------------------------------------------------ the course
    def run(self) -> Course:
        try:
            while True:
                if not self.attempt():
                    break
        except Over:
            pass
        return self

    def pass_time(self, seconds: float) -> None:
        self.clock += seconds
        if self.clock > self.until:
            self.clock = self.until
            raise Over

    def enter(self, phase: str) -> None:
        if phase != self.phase:
            if self.phases and self.phases[-1].job_id == str(self.job):
                self.phases[-1] = replace(self.phases[-1], ended=self.clock)
            self.phases.append(Phase(str(self.job), 1, phase, self.iteration, self.clock))
        self.phase, self.beat_time = phase, self.clock

    def attempt(self) -> bool:
        """One attempt, from its start to its death; False when the training is at its end."""
        self.started, self.phase, self.dead = self.clock, "", False
        self.speed = self.random.uniform(0.95, 1.0)  # other nodes
        self.enter("starting")
        self.pass_time(self.random.uniform(60, 200))
        self.iteration = self.saved[-1][0] if self.saved else 0
        self.enter("loading")
        self.pass_time(self.random.uniform(20, 90))
        dies = self.left.pop(0) if self.left else math.inf
        first = True
        while self.iteration < self.last:
            self.enter("training")
            self.hook(self)
            if self.iteration + 1 > dies:
                self.dead = True
                self.pass_time(self.random.uniform(5, 400))
                self.job += 1
                return True
            self.step(3.0 if first else 1.0)
            first = False
            if self.iteration % self.save_every == 0:
                self.enter("saving")
                self.pass_time(self.save_seconds * self.random.uniform(0.8, 1.5))
                self.saved.append((self.iteration, self.clock))
            if self.iteration % self.evaluate_every == 0:
                self.enter("evaluating")
                self.pass_time(self.evaluation_seconds * self.random.uniform(0.8, 1.5))
        return False

    def step(self, factor: float) -> None:
        seconds = self.pace * factor * (1 + abs(self.random.gauss(0, self.noise)))
        self.pass_time(seconds)
        self.iteration += 1
        if self.iteration % self.log_interval == 0:
            self.log(seconds / factor)

    def log(self, seconds: float) -> None:
        samples, batch, length = (
            self.samples(self.iteration),
            self.batch(self.iteration),
            self.length(self.iteration),
        )
        loss = 2.0 + 9.0 / (1.0 + samples / 2000.0) ** 0.3
        line = record(
            self.iteration,
            consumed_samples=samples,
            consumed_tokens=samples * length,
            seconds_per_iteration=seconds,
            learning_rate=self.rate(samples),
            global_batch_size=batch,
            lm_loss=loss * self.random.uniform(0.97, 1.03),
            grad_norm=0.2 * math.exp(self.random.gauss(0, 0.35)),
            samples_per_second=batch / seconds,
            tflops=150.0 * self.speed * batch / 192 * length / 2048 * self.pace / seconds,
            curriculum_length=length,
        )
        self.steps.append(Step(self.change(line), self.clock, str(self.job)))
        self.logged = self.clock

    # ------------------------------------------------------------------ what is seen
    def see(self, **changes: Any) -> Snapshot:
        """The snapshot of this moment."""
        beats = tuple(
            Heartbeat(
                rank,
                f"n{rank // 4 + 1:02d}",
                1,
                self.phase,
                self.iteration,
                self.beat_time,
                str(self.job),
            )
            for rank in range(self.ranks)
        )
        examined = tuple(
            Checkpoint(step, True, created, 1, "sizes")
            for step, created in reversed(self.saved[-1:])
        )
        newest = self.saved[-1][0] if self.saved else None
        found = Checkpoints(tuple(step for step, _ in self.saved), newest, examined)
        facts = RunFacts(
            "tr11-176B-ml", "main", snapshot().run.directory, snapshot().run.kill_switch, nodes=2, total_iterations=10**6,
            checkpoint_interval=self.save_every,
            log_interval=self.log_interval,
        )  # fmt: skip
        job = running(
            job_id=f"1000_{self.job - 2000}", raw_id=str(self.job), start_time=self.started - 5, nodes=("n01", "n02"),
            node_count=2,
        )  # fmt: skip
        values: dict[str, Any] = {
            "time": self.clock,
            "run": facts_with(facts, exit_plan=ExitPlan(6000.0)),
            "jobs": (pending(node_count=2),) if self.dead else (job, pending(node_count=2)),
            "steps": tuple(self.steps[-400:]),
            "heartbeats": beats,
            "attempts": (Attempt(str(self.job), self.started, None),),
            "checkpoints": found,
            "phases": tuple(self.phases[-300:]),
            "events": tuple(self.events),
            "logs": (
                LogFile("main_log.txt", 10**9, self.logged),
                LogFile("metrics.jsonl", 10**6, self.logged),
            ),
        }
        return snapshot(**{**values, **changes})


# ----------------------------------------------------------------------------- looking at it
OF_TRAINING = {
    "hung", "stalled", "slow", "slow-node", "loss-spike", "gradient-norm", "loss-not-finite", "counters-jump",
    "log-not-growing", "checkpoint-overdue", "checkpoint-unsound",
}  # fmt: skip


def findings(given_snapshot: Snapshot) -> list[Finding]:
    return [
        finding
        for finding in registry.detect_all(given_snapshot)
        if finding.detector in OF_TRAINING
    ]


def names(given_snapshot: Snapshot) -> list[str]:
    return [finding.detector for finding in findings(given_snapshot)]


def only(given_snapshot: Snapshot, detector: str) -> Finding:
    (finding,) = [finding for finding in findings(given_snapshot) if finding.detector == detector]
    return finding


def at(iteration: int, **changes: Any) -> Course:
    """A course that is looked at as it begins the iteration after this one."""

    def stop(course: Course) -> None:
        if course.iteration == iteration:
            raise Over

    return Course(hook=stop, **changes).run()


def later(course: Course, seconds: float, **changes: Any) -> Snapshot:
    """The same files, seen so much later."""
    seen = course.see()
    return changed(seen, time=seen.time + seconds, **changes)


def moved(course: Course, ranks: set[int], **changes: Any) -> tuple[Heartbeat, ...]:
    given_beats = course.see().heartbeats
    assert isinstance(given_beats, tuple)
    return tuple(replace(beat, **changes) if beat.rank in ranks else beat for beat in given_beats)
