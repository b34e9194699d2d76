"""Where the small jobs of a chain run: a partition without GPUs, beside the training and not behind
it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tr11ops.base.errors import NoPartition
from tr11ops.cluster.base import Node, Partition
from tr11ops.runcard.card import RunCard
from trainer.contract.record import Record

LINK_MEGABYTES = 2048  # a look, with one detector after another, takes a tenth of it


class JobPlacement(Record):
    """A partition (None: the scheduler's default) and what memory to ask for. `note`: what a person
    should know of it.

    Without a figure for memory some sites give a job a whole node's; where a node's memory is not
    configured, none can be asked for.
    """

    partition: str | None = None
    memory_megabytes: int | None = None
    note: str = ""


def choose_placement(
    card: RunCard, partitions: Sequence[Partition], nodes: Iterable[Node], seconds: int
) -> JobPlacement:
    """The card's partition, else the best without GPUs that takes a job of so many `seconds`.
    Raises NoPartition.
    """
    by_name = {node.name: node for node in nodes}
    default = next((one.name for one in partitions if one.is_default), None)
    training = card.slurm.partition or default
    if card.cron.partition is not None:
        chosen = next((one for one in partitions if one.name == card.cron.partition), None)
        return JobPlacement(card.cron.partition, _memory(chosen, by_name))
    fit = [one for one in partitions if _is_fit(one, by_name, seconds)]
    if not fit:
        seen = ", ".join(sorted(one.name for one in partitions)) or "none"
        raise NoPartition(
            f"no partition without GPUs takes a job of {seconds // 60} min (there are: {seen}), and elsewhere the "
            "watchdog waits behind the training: use `tr11 cron install --way crontab` on a login node, or name one "
            "with --set cron.partition=NAME"
        )
    trained_on = {name for one in partitions if one.name == training for name in one.node_names}
    best = min(
        fit,
        key=lambda one: (one.name == training, bool(trained_on & set(one.node_names)), one.name),
    )
    shared = bool(trained_on & set(best.node_names))
    note = (
        "its nodes are the training's: on a full cluster the watchdog waits behind the training"
        if shared
        else ""
    )
    return JobPlacement(best.name, _memory(best, by_name), note)


def _is_fit(partition: Partition, nodes: dict[str, Node], seconds: int) -> bool:
    members = [nodes[name] for name in partition.node_names if name in nodes]
    is_long_enough = partition.max_time_seconds is None or partition.max_time_seconds >= seconds
    return (
        partition.is_up
        and is_long_enough
        and bool(members)
        and not any(node.gpus for node in members)
    )


def _memory(partition: Partition | None, nodes: dict[str, Node]) -> int | None:
    if partition:
        sizes = [nodes[name].memory_megabytes for name in partition.node_names if name in nodes]
    else:
        sizes = []
    if sizes and min(sizes) >= LINK_MEGABYTES:
        return LINK_MEGABYTES
    return None
