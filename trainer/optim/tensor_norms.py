"""Norms of whole logical tensors, of which tensor ranks hold slices and ZeRO-1's partitions hold runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.optim.interface import PartitionShare
from trainer.parallel.mesh import Mesh


class TensorNorms:
    """Sums of squares of every tensor of the model, added up over all ranks in one reduction. Making one is collective.

    `kinds`: how many sums there are of each tensor. `idle`: names whose copies on this rank are not counted, because
    the first stage's are (tied weights). The sums are a table, fp64 [tensor ranks, kinds, tensors]: a row holds what
    one tensor rank's slices come to. Every rank reads the same table, so copies of a weight get the same norms, bit by
    bit.
    """

    def __init__(self, mesh: Mesh, shares: Iterable[PartitionShare], kinds: int, idle: Collection[str] = ()):
        self._mesh, self._idle = mesh, frozenset(idle)
        known = {share.name: (share.whole_numel, share.is_sharded, share.group) for share in shares}
        if mesh.world_size > 1:
            everywhere: list[dict[str, tuple[int, bool, int]]] = [{}] * mesh.world_size
            dist.all_gather_object(everywhere, known, group=mesh.cpu_group)
            known = {name: facts for part in everywhere for name, facts in part.items()}
        self.number = {name: number for number, name in enumerate(sorted(known))}
        facts = [known[name] for name in self.number]
        self.elements = torch.tensor([numel for numel, _, _ in facts], dtype=torch.float64, device=mesh.device)
        self.is_sharded = torch.tensor([sharded for _, sharded, _ in facts], dtype=torch.bool, device=mesh.device)
        self._sums = torch.zeros((mesh.tensor, kinds, len(known)), dtype=torch.float64, device=mesh.device)
        self._groups = [group for _, _, group in facts]
        self._members: dict[frozenset[int], Tensor] = {}  # numbers of the tensors of some groups
        self._counted = torch.arange(len(known), device=mesh.device)  # of those that are counted now
        self._part = self._sums  # their sums, while the ranks add them up
        self._under_way: dist.Work | None = None

    def clear(self, groups: frozenset[int]) -> None:
        """Begin to count the tensors of these parameter groups again; what is known of all others stays."""
        self._settle()
        if groups not in self._members:
            members = [number for number, group in enumerate(self._groups) if group in groups]
            self._members[groups] = torch.tensor(members, dtype=torch.int64, device=self._mesh.device)
        self._counted = self._members[groups]
        self._sums[..., self._counted] = 0.0

    def add(self, kind: int, share: PartitionShare, values: Tensor) -> None:
        """Count some elements of a tensor, which are widened to fp64 for it. Not collective."""
        if share.name not in self._idle:
            wide = values.double()
            self._sums[self._mesh.tensor_rank, kind, self.number[share.name]] += torch.dot(wide, wide)

    def reduce(self) -> None:
        """Begin to add up what all ranks counted; a reader of a norm waits for it. Collective."""
        if self._mesh.world_size > 1:
            self._part = self._sums[..., self._counted].contiguous()
            self._under_way = dist.all_reduce(self._part, async_op=True)

    def squares(self, kind: int) -> Tensor:
        """Sums of squares of whole tensors, fp64 [tensors]. What all tensor ranks hold alike counts once."""
        self._settle()
        rows = self._sums[:, kind]
        return torch.where(self.is_sharded, rows.sum(0), rows[0])

    def set_squares(self, kind: int, squares: Tensor) -> None:
        """Take what `squares` gave, on whatever ranks. Not collective: all ranks say the same."""
        self._settle()
        self._sums[:, kind] = 0.0
        self._sums[0, kind] = squares

    def whole(self, kind: int) -> Tensor:
        """Norms of whole tensors, fp64 [tensors]."""
        return self.squares(kind).sqrt()

    def of_slice(self, kind: int) -> Tensor:
        """Norms of this tensor rank's slices alone, fp64 [tensors]."""
        self._settle()
        return self._sums[self._mesh.tensor_rank, kind].sqrt()

    def _settle(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
            self._sums[..., self._counted] = self._part
