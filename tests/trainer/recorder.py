"""A record of every collective and every message of this rank: operation, group, dtype, elements,
where they lie.

On a CPU all tensors lie in host memory. Which of them would lie there on a GPU too is told by how
they were made: by a factory function without a `device`, or from such tensors alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.contract.record import Record
from trainer.parallel.mesh import Mesh

REDUCING = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_base")
NCCL_DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool,
)  # fmt: skip


class Entry(Record):
    """One operation. `group`: the axes over which its members differ, or `cpu`. `communicator`: the
    group's own name.

    `peer`: the other rank of a message. `is_host`: a tensor of it would lie in host memory on a GPU
    machine.
    """

    operation: str
    group: str
    dtype: torch.dtype
    elements: int
    is_host: bool
    communicator: str
    peer: int | None = None

    @property
    def line(self) -> str:
        """What the golden list holds; no rank numbers, so that ranks which do the same have the
        same lines.
        """
        dtype, place = str(self.dtype).removeprefix("torch."), "host" if self.is_host else "device"
        return f"{self.operation:<16} {self.group:<18} {dtype:<9} {self.elements:>7} {place}"


class _HostTensors(TorchFunctionMode):
    """Marks what was made in host memory, and what is made of that alone."""

    def __init__(self) -> None:
        super().__init__()
        self._factories = {*_device_constructors(), torch.from_numpy}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if not isinstance(result, Tensor):
            return result
        given = [item for item in (*args, *options.values()) if isinstance(item, Tensor)]
        if func in self._factories:
            is_host = "device" not in options
        else:
            moved = "device" in options or any(
                isinstance(item, (torch.device, str)) for item in args
            )
            is_host = bool(given) and all(is_host_tensor(item) for item in given) and not moved
        if is_host and not is_host_tensor(result):
            result.made_in_host_memory = True  # type: ignore[attr-defined]
        return result


def is_host_tensor(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "made_in_host_memory", False))


class _Collectives(TorchDispatchMode):
    """Notes each operation of torch.distributed, no matter who calls it."""

    def __init__(self, note: Callable[[str, list[Tensor], Any, tuple[Any, ...]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            names = [argument.name for argument in func._schema.arguments]
            group = dist.ProcessGroup.unbox(args[names.index("process_group")])
            self._note(
                func._schema.name.removeprefix("c10d::").strip("_"), list(_flat(args)), group, args
            )
        return func(*args, **(kwargs or {}))


def _flat(items: Iterable[Any]) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _flat(item)


@contextlib.contextmanager
def recorded(mesh: Mesh) -> Iterator[list[Entry]]:
    """The record of what this thread does in the block."""
    entries: list[Entry] = []

    def note(operation: str, tensors: list[Tensor], group: Any, args: tuple[Any, ...]) -> None:
        peers = dist.get_process_group_ranks(group)
        peer = peers[args[2]] if operation in ("send", "recv") else None
        entries.append(
            Entry(
                operation, _axes(group, peers, mesh), tensors[0].dtype,
                sum(tensor.numel() for tensor in tensors), any(map(is_host_tensor, tensors)),
                group.group_name, peer,
            )
        )  # fmt: skip

    with _HostTensors(), _Collectives(note):
        yield entries


def _axes(group: Any, ranks: list[int], mesh: Mesh) -> str:
    if mesh.cpu_group is not None and group.group_name == mesh.cpu_group.group_name:
        return "cpu"
    if len(ranks) == mesh.world_size:
        return "world"
    tensor = {rank % mesh.tensor for rank in ranks}
    data = {rank // mesh.tensor % mesh.data for rank in ranks}
    stages = {rank // (mesh.tensor * mesh.data) for rank in ranks}
    named = (("pipeline", stages), ("data", data), ("tensor", tensor))
    return " x ".join(name for name, places in named if len(places) > 1) or "alone"
