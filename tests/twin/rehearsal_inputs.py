"""Cards of rehearsals in miniature, from the shipped one, and what a rehearsal leaves in its run directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tr11ops.runcard import RunCard, load_card, resolved, shipped_folder
from trainer.contract import EndMarker, RunPaths

SMALL = (
    "slurm.nodes=2", "slurm.spare_nodes=0", "slurm.workers_per_node=2", "slurm.gpus_per_node=0", "parallel.tensor=2",
    "parallel.pipeline=2", "model.layers=2", "batch.ramp=none", "batch.global_batch_size=8", "batch.micro_batch_size=1",
    "batch.train_samples=800", "schedule.decay_samples=700", "schedule.warmup_samples=10", "checkpoint.interval=5",
    "slurm.cpus_per_task=1", "rehearsal.step_seconds=10", "rehearsal.start_seconds=50", "rehearsal.save_seconds=10",
    "rehearsal.bytes_per_rank=300", "rehearsal.collective_seconds=20",
)  # fmt: skip


def rehearsal_card(folder: Path, changes: Sequence[str] = ()) -> RunCard:
    """The shipped rehearsal on 2 nodes x 2 workers, 100 steps of a tenth of a second, below `folder`."""
    return load_card(shipped_folder() / "rehearsal.toml", [*SMALL, *changes], {}, directory=folder)


def write_resolved(card: RunCard, path: Path) -> Path:
    """The card as the node agent is given it."""
    path.write_text(json.dumps(resolved(card)))
    return path


def steps_of(paths: RunPaths) -> list[dict[str, Any]]:
    """All step records, in the order in which they were written."""
    if not paths.metrics.exists():
        return []
    records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


def ends_of(paths: RunPaths) -> list[EndMarker]:
    """All end markers, oldest first."""
    found = [EndMarker.read(path) for path in paths.attempts.glob("*/end.json")]
    return sorted((end for end in found if end is not None), key=lambda end: end.time)
