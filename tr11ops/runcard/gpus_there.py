"""A card as the GPUs that it will run on complete it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tr11ops.cluster.base import Node
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.speed import gpu_of
from trainer.schedule.devices import device_peak


def with_gpus_of(card: RunCard, nodes: Iterable[Node]) -> RunCard:
    """The card with kind and memory of these nodes' GPUs, where it does not name them and they are
    all alike.
    """
    there = [node for node in nodes if node.gpus >= max(1, card.slurm.gpus_per_node)]
    if not card.slurm.gpus_per_node or not there:
        return card
    found: dict[str, object] = {}
    kinds = {node.gpu_kind for node in there}
    kind = ""
    if len(kinds) == 1:
        kind = kinds.pop()
    if gpu_of(card) is None and device_peak(kind) is not None:
        found["gpu_kind"] = kind
    memory = min(node.gpu_memory_megabytes for node in there)
    if card.slurm.gpu_memory_gb is None and memory:
        found["gpu_memory_gb"] = memory_gb(memory)
    if found:
        return card.model_copy(update={"slurm": card.slurm.model_copy(update=found)})
    return card


def memory_gb(megabytes: int) -> float:
    """`slurm.gpu_memory_gb` of a GPU with so many MiB: rounded down."""
    return math.floor(megabytes / 1024 * 10) / 10
