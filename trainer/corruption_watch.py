"""When the workers' arithmetic is compared, and what is written where results differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from trainer.config import TrainerConfig
from trainer.config_run import RunSection
from trainer.contract import write_json
from trainer.corruption import judge
from trainer.corruption_check import allow_repeatable_kernels, check_workers, use_repeatable_kernels
from trainer.engine import Engine
from trainer.lifecycle import Attempt
from trainer.mesh import Mesh


def choose_kernels(run: RunSection) -> None:
    """Prepare what the card asks for, before anything is computed."""
    if run.deterministic or run.corruption_interval is not None:
        allow_repeatable_kernels()
    if run.deterministic:
        use_repeatable_kernels()


@dataclass(frozen=True)
class CorruptionWatch:
    """Compares the workers' arithmetic every `run.corruption_interval` iterations. The training goes on in any case."""

    config: TrainerConfig
    mesh: Mesh
    attempt: Attempt
    say: Callable[[str], None]

    def after_step(self, iteration: int, engine: Engine) -> None:
        """Check when it is due; rank 0 writes down whom the results make suspect. Collective."""
        interval = self.config.run.corruption_interval
        if interval is None or iteration % interval:
            return
        began = time.perf_counter()
        outcomes = check_workers(engine.stage(), self.mesh, self.config.run.seed, iteration)
        if self.mesh.rank:
            return
        suspects = judge(outcomes)
        faults = [f"rank {outcome.rank} on {outcome.host}: {outcome.fault}" for outcome in outcomes if outcome.fault]
        for line in faults[:1]:
            self.say(f"tr11: {len(faults)} of {len(outcomes)} ranks could not check their arithmetic; {line}")
        if not suspects:
            compared = len(outcomes) - len(faults)
            self.say(f"tr11: {compared} ranks computed as before ({time.perf_counter() - began:.1f} s)")
            return
        for suspect in suspects:
            self.say(f"tr11: SILENT CORRUPTION: {suspect}")
        place = self.config.paths.corruptions / f"{self.attempt.job_id}-{self.attempt.launch}-{iteration}.json"
        value = {
            "time": time.time(), "job_id": self.attempt.job_id, "launch": self.attempt.launch,
            "iteration": iteration, "suspects": [asdict(suspect) for suspect in suspects],
        }  # fmt: skip
        try:
            write_json(place, value)
        except OSError as error:
            self.say(f"tr11: whom it concerns cannot be written down: {error}")
