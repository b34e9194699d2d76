"""When the workers' arithmetic is compared, and what is written where results differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from trainer.config.card import TrainerConfig
from trainer.config.run import RunSection
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.corruption import judge
from trainer.contract.documents import document
from trainer.contract.files import write_json
from trainer.contract.requests import RequestAnswer, leave_answer
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.spikes.corruption_check import (
    PEER_FAULT,
    allow_repeatable_kernels,
    check_workers,
    use_repeatable_kernels,
)

MOST_NAMED = 4  # suspects in one answer; the findings have all
NO_REPEATABLE_KERNELS = (
    "on GPUs the kernels that repeat are chosen at the start: set run.corruption_interval in the card; it counts from "
    "the next task on"
)


def _repeats(run: RunSection) -> bool:
    return run.deterministic or run.corruption_interval is not None


def choose_kernels(run: RunSection) -> None:
    """Prepare what the card asks for, before anything is computed."""
    if _repeats(run):
        allow_repeatable_kernels()
    if run.deterministic:
        use_repeatable_kernels()


@dataclass
class CorruptionWatch:
    """Compares the workers' arithmetic every `run.corruption_interval` iterations, and when asked.
    The training goes on in any case.
    """

    config: TrainerConfig
    mesh: Mesh
    attempt: AttemptIdentity
    say: Callable[[str], None]
    _asked: int = 0

    def ask(self, request: int) -> None:
        """Check after the next step, and answer the request of this number. All ranks are asked
        alike.
        """
        if self.mesh.device.type == "cuda" and not _repeats(self.config.run):
            self._answer(request, None, f"nothing was checked: {NO_REPEATABLE_KERNELS}")
        elif self._asked:
            self._answer(
                request, None, "nothing was checked: another check is under way; ask again"
            )
        else:
            self._asked = request

    def give_up(self) -> None:
        """No step comes any more: answer who still waits for a check."""
        if self._asked:
            self._answer(
                self._asked, None, "nothing was checked: the training ended before its next step"
            )
        self._asked = 0

    def after_step(self, iteration: int, engine: Engine) -> None:
        """Check when it is due or asked for; rank 0 writes down whom the results make suspect.
        Collective.
        """
        interval = self.config.run.corruption_interval
        if not self._asked and (interval is None or iteration % interval):
            return
        request, self._asked = self._asked, 0
        began = time.perf_counter()
        usual = timedelta(minutes=self.config.parallel.step_timeout_minutes)
        with self.mesh.groups.first_time(usual, "check"):
            outcomes = check_workers(engine.stage(), self.mesh, self.config.run.seed, iteration)
        if self.mesh.rank:
            return
        suspects = judge(outcomes)
        unable = [outcome for outcome in outcomes if outcome.fault]
        # those that stopped others come first
        unable.sort(key=lambda outcome: outcome.fault == PEER_FAULT)
        faults = [f"rank {outcome.rank} on {outcome.host}: {outcome.fault}" for outcome in unable]
        for line in faults[:1]:
            self.say(
                f"tr11: {len(faults)} of {len(outcomes)} ranks could not check their arithmetic; {line}"
            )
        if not suspects:
            compared = len(outcomes) - len(faults)
            if compared == 1:
                ranks = "1 rank"
            else:
                ranks = f"{compared} ranks"
            line = f"{ranks} computed as before ({time.perf_counter() - began:.1f} s)"
            self.say(f"tr11: {line}")
            left = ""
            if faults:
                left = f"; {len(faults)} could not be checked: {faults[0]}"
            self._answer(
                request, None if faults else iteration, f"iteration {iteration}: {line}{left}"
            )
            return
        for suspect in suspects:
            self.say(f"tr11: SILENT CORRUPTION: {suspect}")
        words = "; ".join(str(suspect) for suspect in suspects[:MOST_NAMED])
        more = ""
        if len(suspects) > MOST_NAMED:
            more = f"; and {len(suspects) - MOST_NAMED} more"
        self._answer(request, None, f"SILENT CORRUPTION at iteration {iteration}: {words}{more}")
        place = (
            self.config.paths.corruptions
            / f"{self.attempt.job_id}-{self.attempt.launch}-{iteration}.json"
        )
        value = {
            "time": time.time(),
            "job_id": self.attempt.job_id,
            "launch": self.attempt.launch,
            "iteration": iteration,
            "suspects": [document(suspect) for suspect in suspects],
        }
        try:
            write_json(place, value)
        except OSError as error:
            self.say(f"tr11: whom it concerns cannot be written down: {error}")

    def _answer(self, request: int, step: int | None, text: str) -> None:
        if request and self.mesh.rank == 0:
            leave_answer(
                self.config.paths,
                RequestAnswer(request, step, text, time=time.time(), job_id=self.attempt.job_id),
            )
