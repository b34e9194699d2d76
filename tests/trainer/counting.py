"""What a piece of the trainer does to tensors, counted operation by operation; on meta tensors at
any size at once.

The counts are exact and the same on every machine, so budgets can be asserted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
HOST_SYNCS = ("_local_scalar_dense", "nonzero", "equal", "masked_select")
NO_TRAFFIC = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
)
COMPILED = "tr11_tests"  # stands for what torch compiles to one kernel
NAMESPACES = ("aten", "c10d", COMPILED)
ATTENTION = ("_scaled_dot_product_efficient_attention", "flex_attention")
# the first tensor they are given
ONLY_WRITES = ("copy", "fill", "zero", "zeros_like", "ones_like", "full_like")
TAKES = ("gather", "index_select", "embedding")
SCATTERS = ("scatter", "scatter_add")


class Counts(TorchDispatchMode):
    """Counts while it is entered. Raises ValueError for an operation on tensors of two devices.

    `operations`: calls by name, views left out. `bytes`: read and written by each operation that is
    no matrix product, as if nothing stayed in a cache: every tensor that goes in is read once,
    every one that comes out is written once. Of what is indexed only the places that are taken or
    set count, at 8 bytes each. `collectives`: bytes handed to each kind of message.
    `product_flops`: two for each multiplication and addition, in attention over the full window;
    what its kernel computes again for itself in the backward pass is left out, as is flex
    attention's second pass for dropout, which mixes no whole values. `peak`: most bytes held at
    once of what was made meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.product_flops = 0
        self.peak = 0
        self._given: dict[
            int, StorageWeakRef
        ] = {}  # a weak reference keeps the address from being used again
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def total_bytes(self) -> int:
        return self.bytes.total()

    @property
    def host_syncs(self) -> int:
        return sum(self.operations[name] for name in HOST_SYNCS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        given = list(_tensors((args, options)))
        devices = {tensor.device for tensor in given if tensor.dim()}
        if len(devices) > 1:
            raise ValueError(f"{func} mixes tensors of {' and '.join(sorted(map(str, devices)))}")
        result = func(*args, **options)
        made = list(_tensors(result))
        self._note(func, args, options, given, made)
        return result

    def _note(
        self, func: Any, args: Any, options: Any, given: list[Tensor], made: list[Tensor]
    ) -> None:
        self._hold(given, made)
        name = func._schema.name.rpartition("::")[2].strip("_" if func.namespace == "c10d" else "")
        name = name.rstrip("_")
        if func.is_view or name in NO_TRAFFIC or func.namespace not in NAMESPACES:
            return
        self.operations[name] += 1
        if name in PRODUCTS:
            factors = [item for item in args if isinstance(item, Tensor)]
            left, right = factors[:2] if name == "_scaled_mm" else factors[-2:]
            self.product_flops += 2 * left.numel() * right.shape[-1]
            return
        if func.namespace == "c10d":
            self.collectives[name] += given[0].nbytes if name != "allgather_base" else 0
            return
        if name.startswith(ATTENTION):
            self.product_flops += _attention_flops(name, given)
        read = _read(name, args, options)
        written = made or _changed(func, args)
        if func.namespace == COMPILED:
            written = made + _changed(func, args)
        if name in SCATTERS:
            written = [tensor for tensor in read if tensor.dtype == torch.int64]
        self.bytes[name] += sum(tensor.nbytes for tensor in (*read, *written))

    def _hold(self, given: list[Tensor], made: list[Tensor]) -> None:
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._given:
                self._given[storage._cdata] = StorageWeakRef(storage)
        new = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in made}
        new = {
            key: storage
            for key, storage in new.items()
            if key not in self._given and key not in self._made
        }
        if not new:
            return
        self._made.update(
            {key: (StorageWeakRef(storage), storage.nbytes()) for key, storage in new.items()}
        )
        self._made = {key: found for key, found in self._made.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))


def _read(name: str, args: Any, options: Any) -> list[Tensor]:
    """What an operation reads of what it was given."""
    tensors = list(
        _tensors([list(args), [value for key, value in options.items() if key != "out"]])
    )
    if name in ONLY_WRITES or name in SCATTERS:
        return tensors[1:]
    if name in TAKES:
        return [tensor for tensor in tensors if tensor.dtype == torch.int64]
    return tensors


def _changed(func: Any, args: Any) -> list[Tensor]:
    """What an operation without a result writes into."""
    schema = zip(func._schema.arguments, args, strict=False)
    return list(
        _tensors(
            [
                value
                for argument, value in schema
                if argument.alias_info and argument.alias_info.is_write
            ]
        )
    )


def _attention_flops(name: str, given: list[Tensor]) -> int:
    """Two products forward; four backward, of which the gradient is the first that is given."""
    query, key, value = given[1:4] if name.endswith("backward") else given[:3]
    if value.shape[3] != query.shape[3]:
        return 0
    each = 2 * query.numel() * key.shape[2]
    return 4 * each if name.endswith("backward") else 2 * each


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
