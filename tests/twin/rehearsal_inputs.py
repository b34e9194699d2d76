"""Cards of rehearsals in miniature, from the shipped one, and what a rehearsal leaves in its run
directory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tr11ops.observe.files import read_details
from tr11ops.runcard.card import RunCard, load_card, resolved, shipped_folder
from trainer.contract.attempt import EndMarker
from trainer.contract.metrics_record import records
from trainer.contract.paths import ATTEMPT_FILE, RunPaths

CARD = """
[run]
name = "heal"
directory = "run"

[rehearsal]
time_scale = 100
start_seconds = 5
step_seconds = 5
save_seconds = 1
bytes_per_rank = 256
collective_seconds = 6000

[slurm]
nodes = 3
spare_nodes = 1
workers_per_node = 2
time_limit = "00:30:00"
signal_seconds_before_limit = 60

[parallel]
tensor = 2

[model]
layers = 2
hidden_size = 32
attention_heads = 4
sequence_length = 32

[batch]
micro_batch_size = 2
global_batch_size = 12
train_samples = 12_000_000

[schedule]
learning_rate = 1e-3

[checkpoint]
interval = 5

[evaluation]
iterations = 0

[data]
prefixes = ["data/none"]

[tokenizer]
padded_vocabulary_size = 512

[logging]
tensorboard = false

[resilience]
end_within_seconds = 8
exclusion_cap_percent = 50
"""


SMALL = (
    "slurm.nodes=2", "slurm.spare_nodes=0", "slurm.workers_per_node=2", "slurm.gpus_per_node=0", "parallel.tensor=2",
    "parallel.pipeline=2", "model.layers=2", "batch.ramp=none", "batch.global_batch_size=8", "batch.micro_batch_size=1",
    "batch.train_samples=800", "schedule.decay_samples=700", "schedule.warmup_samples=10", "checkpoint.interval=5",
    "slurm.cpus_per_task=1", "rehearsal.step_seconds=10", "rehearsal.start_seconds=50", "rehearsal.save_seconds=10",
    "rehearsal.bytes_per_rank=300", "rehearsal.collective_seconds=20",
)  # fmt: skip


def rehearsal_card(folder: Path, changes: Sequence[str] = ()) -> RunCard:
    """The shipped rehearsal on 2 nodes x 2 workers, 100 steps of a tenth of a second, below
    `folder`.
    """
    return load_card(shipped_folder() / "rehearsal.toml", [*SMALL, *changes], {}, directory=folder)


def write_resolved(card: RunCard, path: Path) -> Path:
    """The card as the node agent is given it."""
    path.write_text(json.dumps(resolved(card)))
    return path


def steps_of(paths: RunPaths) -> list[dict[str, Any]]:
    """All step records, in the order in which they were written. A line that is still being written
    is none yet; one that was cut by a full disk is none either.
    """
    return [dict(record.values) for record in records(paths.metrics) if record.is_step]


def ends_of(paths: RunPaths) -> list[EndMarker]:
    """All end markers, oldest first."""
    found = [EndMarker.read(path) for path in paths.attempts.glob("*/end.json")]
    return sorted((end for end in found if end is not None), key=lambda end: end.time)


def attempts_of(paths: RunPaths) -> list[str]:
    """Numbers of a run's attempts in the order of their starts, those that have not said when at the
    end. The numbers do not say it: the last task of an array has the array's own, the lowest.
    """
    starts = {
        path.name: read_details(path / ATTEMPT_FILE).get("start", math.inf)
        for path in paths.attempts.glob("*")
    }
    return sorted(starts, key=lambda name: (starts[name], int(name)))
