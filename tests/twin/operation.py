"""A rehearsal under way on a twin, as the acceptance tests drive it: tr11's commands, its files,
the twin's faults.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.plugins.command_server import tr11_command
from tests.twin.rehearsal_inputs import attempts_of, ends_of, steps_of
from tests.waiting import PATIENCE_SECONDS, end_of_file, until
from tr11ops.cluster.base import Job
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.runcard.card import RunCard, load_card, shipped_folder
from tr11ops.twin.fault_store import FaultStore
from tr11ops.twin.twin import Twin
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.manifest import Manifest as CheckpointManifest, manifest_faults
from trainer.contract.paths import ATTEMPT_FILE, RunPaths

SHAPE = (
    "slurm.workers_per_node=1", "slurm.gpus_per_node=8", "parallel.tensor=1", "parallel.pipeline=1", "model.layers=2",
    "batch.ramp=none", "batch.global_batch_size=60", "batch.micro_batch_size=1", "checkpoint.interval=5",
    "rehearsal.step_seconds=20", "rehearsal.start_seconds=50", "rehearsal.save_seconds=10",
    "rehearsal.collective_seconds=120", "resilience.exclusion_cap_percent=50", "resilience.end_within_seconds=10",
)  # fmt: skip


def tasks_waiting(jobs: Iterable[Job]) -> int:
    """Array tasks among the jobs of a run that wait."""
    return sum(max(1, len(job.pending_tasks)) for job in jobs if not job.state.is_active)


@dataclass
class Operation:
    """One run of the rehearsal card, in a folder of its own."""

    twin: Twin
    folder: Path
    nodes: int
    spares: int
    changes: Sequence[str] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slurm = SlurmScheduler(self.twin.environment)
        sizes = (f"slurm.nodes={self.nodes}", f"slurm.spare_nodes={self.spares}")
        self.overrides = [*SHAPE, *sizes, *self.changes]
        self.card: RunCard = load_card(self.card_path, self.overrides, {}, directory=self.folder)
        self.paths: RunPaths = self.card.paths

    @property
    def card_path(self) -> Path:
        return shipped_folder() / "rehearsal.toml"

    # ------------------------------------------------------------------ commands
    def tr11(
        self, *words: str, expect: int | None = 0, seconds: float = PATIENCE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Type a command for this run; no traceback may ever be shown."""
        command = [*tr11_command(), *words, "--run", str(self.card_path)]
        for change in self.overrides:
            command += ["--set", change]
        done = subprocess.run(
            command, cwd=self.folder, env={**os.environ, **self.twin.environment, "PYTHONPATH": str(Path.cwd())},
            capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        shown = f"tr11 {' '.join(words)} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr, shown
        assert expect is None or done.returncode == expect, shown
        return done

    def launch(self, *words: str) -> str:
        """Submit; returns the job's number."""
        return str(json.loads(self.tr11("launch", *words, "--json").stdout)["job_id"])

    # ------------------------------------------------------------------ what is seen
    def iteration(self) -> int:
        """The last step that was logged."""
        steps = steps_of(self.paths)
        return int(steps[-1]["iteration"]) if steps else 0

    def launches(self) -> list[dict[str, Any]]:
        """Every launch of every attempt, in the order of their starts."""
        found = []
        for path in self.paths.attempts.glob("*/launches/*.json"):
            found.append({**json.loads(path.read_text()), "job_id": path.parent.parent.name})
        return sorted(found, key=lambda launch: launch["start"])

    def attempts(self) -> list[str]:
        """Numbers of all attempts that began, in their order."""
        return [name for name in attempts_of(self.paths) if self._has_begun(name)]

    def _has_begun(self, attempt: str) -> bool:
        return (self.paths.attempt(attempt) / ATTEMPT_FILE).exists()

    def ends(self) -> list[EndMarker]:
        return ends_of(self.paths)

    def jobs(self) -> list[Job]:
        """What Slurm still has of this run, running or waiting."""
        return [
            job
            for job in self.slurm.jobs()
            if job.name == self.card.run.name and not job.state.is_final
        ]

    def tasks_left(self) -> int:
        """Array tasks that wait."""
        return tasks_waiting(self.jobs())

    def excluded(self) -> set[str]:
        """The run's own list."""
        path = self.paths.state / "exclusions.json"
        if not path.exists():
            return set()
        value = json.loads(path.read_text())
        entries = value["exclusions"] if isinstance(value, dict) else value
        return {entry["node"] for entry in entries}

    def log(self) -> str:
        return (
            self.paths.main_log.read_text(errors="replace") if self.paths.main_log.exists() else ""
        )

    # ------------------------------------------------------------------ waiting
    def until(
        self, condition: Callable[[], object], what: str, seconds: float | None = None
    ) -> None:
        until(
            condition,
            what,
            seconds=seconds,
            pause=0.2,
            context=lambda: end_of_file(self.paths.main_log),
        )

    def until_step(self, iteration: int) -> None:
        self.until(lambda: self.iteration() >= iteration, f"step {iteration}")

    def until_trains_again(self, launches: int, more: int = 3) -> None:
        """Until there are so many launches, and the last has trained `more` steps beyond the last
        end.
        """
        self.until(lambda: len(self.launches()) >= launches, f"launch {launches}")
        began = self.launches()[-1]["start"]
        self.until(
            lambda: sum(step["time"] > began for step in steps_of(self.paths)) >= more,
            f"steps of launch {launches}",
        )

    # ------------------------------------------------------------------ what must always hold
    def check_nothing_is_lost(self) -> None:
        """Every step was trained, done twice only after a fault, the same both times; the newest
        checkpoint is whole.
        """
        steps = steps_of(self.paths)
        assert {step["iteration"] for step in steps} == set(range(1, steps[-1]["iteration"] + 1))
        different = {
            (step["iteration"], step["consumed_samples"], step["lm_loss"]) for step in steps
        }
        assert len(different) == steps[-1]["iteration"]
        newest = read_latest(self.paths.checkpoints)
        assert newest is not None
        manifest = CheckpointManifest.read(self.paths.checkpoint(newest))
        assert manifest is not None
        assert manifest_faults(self.paths.checkpoint(newest), manifest, read_digests=True) == []

    def fault_times(self) -> list[dict[str, Any]]:
        """When each fault began and was healed, as the twin noted it."""
        return [
            json.loads(line)
            for line in FaultStore(self.twin.folders).history.read_text().splitlines()
        ]

    def relaunch_figures(self) -> list[dict[str, float]]:
        """For each launch after another: seconds from the end of the one before to its start, and
        to its first step.
        """
        launches, steps = self.launches(), steps_of(self.paths)
        found = []
        for before, after in itertools.pairwise(launches):
            first = next((step["time"] for step in steps if step["time"] > after["start"]), None)
            found.append(
                {
                    "same_allocation": before["job_id"] == after["job_id"],
                    "end_to_start": after["start"] - before["end"],
                    "start_to_first_step": (first or float("nan")) - after["start"],
                }
            )
        return found
