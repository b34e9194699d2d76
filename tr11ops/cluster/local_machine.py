"""The nodes of the embedded scheduler: this machine as it is, or the nodes that it is asked to
play.

The machine is one node. Its jobs share it: each has the GPUs and cores that it asks for, to itself.
A simulated node belongs to one job; the machine's GPUs are shared out evenly among such nodes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from msgspec.structs import replace

from tr11ops.base.errors import Unanswered
from tr11ops.base.nvidia import NO_PROGRAM, Gpu, list_gpus, visible
from tr11ops.base.probes import LocalCommands
from tr11ops.cluster.local_records import LocalSettings
from trainer.contract.record import Record

GPU_SECONDS = 20.0  # a driver without its persistence daemon starts each GPU first


class LocalNode(Record):
    """One node, and what its jobs can have. Memory in MiB.

    `gpus`: real ones. `pretended_gpus`: that it has by the settings in place of these; nothing
    stands behind them. `gpu_fault`: why it is not known which GPUs there are, "" where it is.
    """

    name: str
    cpus: int
    memory_megabytes: int
    gpus: tuple[Gpu, ...] = ()
    pretended_gpus: int | None = None
    gpu_fault: str = ""
    is_simulated: bool = False

    @property
    def gpu_count(self) -> int:
        if self.pretended_gpus is None:
            return len(self.gpus)
        return self.pretended_gpus


class GpuList(Record):
    """The machine's GPUs as its driver lists them, or why that is not known."""

    gpus: tuple[Gpu, ...] = ()
    fault: str = ""


def machine_name() -> str:
    """The node's name where it is this machine."""
    return socket.gethostname().partition(".")[0]


def node_names(settings: LocalSettings) -> tuple[str, ...]:
    """The names of the nodes, without a look at the machine."""
    if settings.nodes is None:
        return (machine_name(),)
    return settings.nodes


def look_at_gpus() -> GpuList:
    """The GPUs of this machine now. Without nvidia-smi there are none."""
    try:
        return GpuList(list_gpus(LocalCommands(), GPU_SECONDS))
    except Unanswered as error:
        if str(error) == NO_PROGRAM:
            return GpuList()
        return GpuList(fault=str(error))


def local_nodes(settings: LocalSettings, found: GpuList) -> tuple[LocalNode, ...]:
    """The nodes, with the GPUs that were found."""
    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    names = node_names(settings)
    shares = _shares(found.gpus, len(names), settings.gpus_per_node)
    return tuple(
        LocalNode(
            name=name,
            cpus=cpus,
            memory_megabytes=memory,
            gpus=share,
            pretended_gpus=None if settings.gpus_per_node == len(share) else settings.gpus_per_node,
            gpu_fault=found.fault,
            is_simulated=settings.nodes is not None,
        )
        for name, share in zip(names, shares, strict=True)
    )


def open_to(nodes: Sequence[LocalNode], visible_devices: str | None) -> tuple[LocalNode, ...]:
    """The nodes with those of their GPUs that a submitter's CUDA_VISIBLE_DEVICES lets them have;
    None: all.
    """
    seen = set(visible([gpu for node in nodes for gpu in node.gpus], visible_devices))
    return tuple(
        replace(node, gpus=tuple(gpu for gpu in node.gpus if gpu in seen)) for node in nodes
    )


def _shares(gpus: Sequence[Gpu], nodes: int, each: int | None) -> list[tuple[Gpu, ...]]:
    """The GPUs of each node: as many as the settings say where there are enough for that, else
    equally many.
    """
    if each is None:
        count = len(gpus) // nodes
    else:
        count = each
    if count * nodes > len(gpus):
        count = 0
    return [tuple(gpus[count * place : count * (place + 1)]) for place in range(nodes)]
