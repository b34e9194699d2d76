"""The one defect that needs the whole card: saves too far apart for the time that an attempt has."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.importer.results import Defect, Severity
from tr11ops.runcard import RunCard
from trainer.model import flops

# TFLOPs that large trainings reached on each kind of GPU, by the word in the constraint or partition.
_REACHED = (("h100", 400.0), ("h200", 400.0), ("a100", 149.0), ("v100", 45.0))
_UNKNOWN = 149.0
_LARGEST_SHARE = 0.25  # of an attempt, between two saves


def save_interval(card: RunCard, line: int) -> Iterator[Defect]:
    """A crash costs up to one save interval; nothing is known of the speed but what such GPUs reach."""
    interval = card.checkpoint.interval
    if interval is None or not card.slurm.gpus_per_node:
        return
    words = f"{card.slurm.constraint} {card.slurm.partition} {card.slurm.account}".lower()
    tflops = next((value for word, value in _REACHED if word in words), _UNKNOWN)
    rows = card.tokenizer.padded_vocabulary_size
    a_step = flops.tflops_per_gpu(card.model, rows, card.batch.global_batch_size, 1.0, card.world_size) / tflops
    seconds, limit = a_step * interval, card.time_limit_seconds
    if seconds <= _LARGEST_SHARE * limit:
        return
    hours = f"{seconds / 3600:.1f} hours"
    basis = f"at {tflops:g} TFLOPs a GPU, an assumption"
    advised = max(1, int(_LARGEST_SHARE * limit / 2 / a_step))
    fix = f"--set checkpoint.interval={advised}, or checkpoint.interval_minutes"
    if seconds >= limit:
        what = f"a save every {interval} iterations is one in {hours}, more than the whole attempt ({basis})"
        cost = "only the save at the exit is ever made: a crash loses the attempt"
        yield Defect("save-interval-beyond-limit", Severity.ERROR, line, what, cost, fix, "checkpoint.interval")
    else:
        what = f"a save every {interval} iterations is one in {hours} ({basis})"
        cost = f"a crash loses up to {hours} of {card.slurm.nodes} nodes"
        yield Defect("save-interval-wide", Severity.WARNING, line, what, cost, fix, "checkpoint.interval")
