"""The one defect that needs the whole card: saves too far apart for the time that an attempt has."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.units import duration
from tr11ops.importer.defects_table import defect
from tr11ops.importer.results import Defect
from tr11ops.runcard.card import RunCard
from trainer.schedule import flops

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
    advised = max(1, int(_LARGEST_SHARE * limit / 2 / a_step))
    code = "save-interval-beyond-limit" if seconds >= limit else "save-interval-wide"
    span, basis = duration(seconds), f"at {tflops:g} TFLOPs a GPU, an assumption"
    yield defect(code, line, interval=interval, span=span, basis=basis, nodes=card.slurm.nodes, advised=advised)
