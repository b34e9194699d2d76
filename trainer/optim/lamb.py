"""LAMB: Adam whose step of each tensor is as long as the tensor's own norm says (You et al., arXiv
1904.00962).

The variants differ in which tensors adapt, and in how a ratio is made; `LambRules` says it. Norms
are of whole logical tensors, so that tensor parallelism, pipeline stages and ZeRO-1 change nothing,
but where `NormOf` says so.

A step goes over the elements twice: for the norms, and, when all ranks have added them up, to move.
With the norms of the step before (`NormOf.STALE`) it goes once, and the ranks add up for the next
step while the training goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.record import Record
from trainer.optim.interface import (
    MOMENTS,
    NOISE,
    FlatStateOptimizer,
    PartitionShare,
    UpdateNumbers,
    chunk_elements,
)
from trainer.parallel.mesh import Mesh

# Norms of whole logical tensors, of which tensor ranks hold slices and ZeRO-1's partitions hold
# runs.


class TensorNorms:
    """Sums of squares of every tensor of the model, added up over all ranks in one reduction.
    Making one is collective.

    `kinds`: how many sums there are of each tensor. `idle`: names whose copies on this rank are not
    counted, because the first stage's are (tied weights). The sums are a table, fp64 [tensor ranks,
    kinds, tensors]: a row holds what one tensor rank's slices come to. Every rank reads the same
    table, so copies of a weight get the same norms, bit by bit.
    """

    def __init__(
        self, mesh: Mesh, shares: Iterable[PartitionShare], kinds: int, idle: Collection[str] = ()
    ):
        self._mesh, self._idle = mesh, frozenset(idle)
        known = {share.name: (share.whole_numel, share.is_sharded, share.group) for share in shares}
        if mesh.world_size > 1:
            everywhere: list[dict[str, tuple[int, bool, int]]] = [{}] * mesh.world_size
            dist.all_gather_object(everywhere, known, group=mesh.cpu_group)
            known = {name: facts for part in everywhere for name, facts in part.items()}
        self.number = {name: number for number, name in enumerate(sorted(known))}
        facts = [known[name] for name in self.number]
        self.elements = torch.tensor(
            [numel for numel, _, _ in facts], dtype=torch.float64, device=mesh.device
        )
        self.is_sharded = torch.tensor(
            [sharded for _, sharded, _ in facts], dtype=torch.bool, device=mesh.device
        )
        self._sums = torch.zeros(
            (mesh.tensor, kinds, len(known)), dtype=torch.float64, device=mesh.device
        )
        self._groups = [group for _, _, group in facts]
        self._members: dict[frozenset[int], Tensor] = {}  # numbers of the tensors of some groups
        # of those that are counted now
        self._counted = torch.arange(len(known), device=mesh.device)
        self._part = self._sums  # their sums, while the ranks add them up
        self._under_way: dist.Work | None = None

    def clear(self, groups: frozenset[int]) -> None:
        """Begin to count the tensors of these parameter groups again; what is known of all others
        stays.
        """
        self._settle()
        if groups not in self._members:
            members = [number for number, group in enumerate(self._groups) if group in groups]
            self._members[groups] = torch.tensor(
                members, dtype=torch.int64, device=self._mesh.device
            )
        self._counted = self._members[groups]
        self._sums[..., self._counted] = 0.0

    def add(self, kind: int, share: PartitionShare, values: Tensor) -> None:
        """Count some elements of a tensor, which are widened to fp64 for it. Not collective."""
        if share.name not in self._idle:
            wide = values.double()
            self._sums[self._mesh.tensor_rank, kind, self.number[share.name]] += torch.dot(
                wide, wide
            )

    def reduce(self) -> None:
        """Begin to add up what all ranks counted; a reader of a norm waits for it. Collective."""
        if self._mesh.world_size > 1:
            self._part = self._sums[..., self._counted].contiguous()
            self._under_way = dist.all_reduce(self._part, async_op=True)

    def squares(self, kind: int) -> Tensor:
        """Sums of squares of whole tensors, fp64 [tensors]. What all tensor ranks hold alike counts
        once.
        """
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


FLOOR = 1e-5  # of a weight's norm, for each of its elements: a bias that begins at zero moves
WEIGHT = 0  # the first of the sums; the directions' follow


class NormOf(StrEnum):
    """Of what the norms in a ratio are. LOCAL and MEAN_WEIGHT depend on the number of tensor ranks,
    which hold slices.

    At the first step MEAN_WEIGHT and STALE are LOCAL, with a floor under the weight's norm.
    """

    EXACT = "exact"  # whole tensors
    LOCAL = "local"  # this rank's slices
    # the weight: the root mean square over the slices; the direction: this rank's slice
    MEAN_WEIGHT = "mean-weight"
    STALE = "stale"  # whole tensors; the direction as it was one step earlier


class LambRules(Record):
    """`adapts_all`: tensors without weight decay adapt too. `floor`: least norm of a weight, for
    each of its elements.

    `corrects_mean`: the first moment's bias is corrected. `embedding_alpha`: a tensor of n elements
    steps 1 + alpha x n / (elements of the largest tensor) times as far.
    """

    adapts_all: bool = True
    floor: float = 0.0
    corrects_mean: bool = True
    embedding_alpha: float = 0.0
    norm_of: NormOf = NormOf.EXACT


class Chunk(Record):
    """Live views of some elements of one tensor: master weights, gradient, and the state by name."""

    weights: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class Lamb(FlatStateOptimizer):
    """LAMB with decoupled decay inside the ratio, on fp32 partitions.

    A ratio is 1 where the weight or its direction is zero. Gradients come clipped already, and a
    step uses them up. Only single multiplications, additions, divisions and roots: each is rounded
    alike wherever an element lies, so that tied copies stay equal.
    """

    state_names: ClassVar[tuple[str, ...]] = MOMENTS
    directions: ClassVar[int] = 1

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float,
        rules: LambRules,
        mesh: Mesh,
        tied_copies: Collection[str] = (),
    ):
        """`tied_copies`: names of weights on this rank that another stage owns."""
        super().__init__(
            groups, {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0}
        )
        self.rules = rules
        self._mesh, self._tied_copies = mesh, tied_copies
        self._shares: dict[Tensor, list[PartitionShare]] = {}
        self._norms: TensorNorms
        self._group_of: dict[Tensor, int] = {}
        # groups of which the norms for the next step are at hand
        self._known: frozenset[int] = frozenset()

    def materialise(self, shares: Iterable[PartitionShare]) -> None:
        """Zero state; agree with all ranks on the tensors that there are. What lies outside of
        shares never moves.
        """
        shares = list(shares)
        super().materialise(shares)
        self._group_of = {
            group["params"][0]: number for number, group in enumerate(self.param_groups)
        }
        for state in self.state.values():
            # in host memory: it is read at every step
            state["step"] = torch.zeros((), dtype=torch.float32)
        for share in shares:
            self._shares.setdefault(self.partition(share.group), []).append(share)
        self._norms = TensorNorms(self._mesh, shares, 1 + self.directions, self._tied_copies)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the shares of every partition that has a gradient. Collective over all ranks.

        ZeRO-1 steps its groups one by one where the weights are not bf16: `param_groups` is then
        one of them.
        """
        stepped = []
        for group in self.param_groups:
            for partition in group["params"]:
                if partition.grad is not None:
                    state = self.state[partition]
                    state["step"] += 1
                    numbers = UpdateNumbers.of(
                        group, int(state["step"].item()), self.rules.corrects_mean
                    )
                    stepped.append((partition, numbers))
        groups = frozenset(self._group_of[partition] for partition, _ in stepped)
        keeps, knows = self.rules.norm_of is NormOf.STALE, groups <= self._known
        if not knows:
            self._norms.clear(groups)
            for share, chunk, numbers in self._chunks(stepped):
                self.advance(chunk, numbers)
                directions = self.directions_of(chunk, numbers)
                self._count(share, chunk.weights, *directions)
                self.hold(chunk, directions)
            self._norms.reduce()
        rates = {numbers: self._rates(numbers, knows) for _, numbers in stepped}
        if keeps:
            self._norms.clear(groups)
            self._known |= groups
        for share, chunk, numbers in self._chunks(stepped):
            if knows:
                self.advance(chunk, numbers)
                directions = self.directions_of(chunk, numbers)
            else:
                directions = self.held(chunk, numbers)
            if keeps:
                self._count(share, None, *directions)
            number = self._norms.number[share.name]
            self.move(chunk, numbers, directions, [each[number] for each in rates[numbers]])
            if keeps:
                self._count(share, chunk.weights)
        if keeps:
            self._norms.reduce()

    def _count(self, share: PartitionShare, *parts: Tensor | None) -> None:
        """Take weights and directions of some elements, in this order, into the norms."""
        for kind, values in enumerate(parts, WEIGHT):
            if values is not None:
                self._norms.add(kind, share, values)

    # ------------------------------------------------------------------ norms of the step before
    def tensor_sums(self) -> dict[str, list[float]]:
        """Sums of squares of each tensor's last directions, where the next step needs them."""
        if self._known != self._all_groups:
            return {}
        kinds = torch.stack([self._norms.squares(kind) for kind in self._directions]).T.tolist()
        return dict(zip(self._norms.number, kinds, strict=True))

    def set_tensor_sums(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Take them, and add up the weights' again. Without them the next step takes its own
        directions' norms.
        """
        if self.rules.norm_of is not NormOf.STALE or not self.steps_done() or not self._fit(sums):
            return
        self._known = self._all_groups
        self._norms.clear(self._known)
        for partition, shares in self._shares.items():
            for share in shares:
                for place in _places(partition, share):
                    self._count(share, partition.data[place])
        self._norms.reduce()
        rows = torch.tensor([sums[name] for name in self._norms.number], dtype=torch.float64)
        for kind in self._directions:
            self._norms.set_squares(kind, rows[:, kind - 1].to(self._mesh.device))

    def set_steps_done(self, steps: int) -> None:
        """Set the update count; the norms of an earlier course are forgotten."""
        super().set_steps_done(steps)
        self._known = frozenset()

    @property
    def _directions(self) -> range:
        """Of the norms, those of directions."""
        return range(WEIGHT + 1, WEIGHT + 1 + self.directions)

    @property
    def _all_groups(self) -> frozenset[int]:
        return frozenset(self._group_of.values())

    def _fit(self, sums: Mapping[str, Sequence[float]]) -> bool:
        return all(len(sums.get(name, ())) == self.directions for name in self._norms.number)

    # ------------------------------------------------------------------ one chunk
    def advance(self, chunk: Chunk, numbers: UpdateNumbers) -> None:
        """Take the gradient into the moments."""
        mean, squares = (chunk.state[name] for name in MOMENTS)
        numbers.advance(mean, squares, chunk.gradient)

    def directions_of(self, chunk: Chunk, numbers: UpdateNumbers) -> tuple[Tensor, ...]:
        """In which directions the weights go, each before its ratio: new tensors."""
        mean, squares = (chunk.state[name] for name in MOMENTS)
        direction = numbers.scaled(mean, squares)
        return (direction.add_(chunk.weights * numbers.decay) if numbers.decay else direction,)

    def hold(self, chunk: Chunk, directions: tuple[Tensor, ...]) -> None:
        """Put directions by until their norms are known: in the place of the gradient, which is in
        the moments now.
        """
        chunk.gradient.copy_(directions[0])

    def held(self, chunk: Chunk, numbers: UpdateNumbers) -> tuple[Tensor, ...]:
        """What `hold` put by."""
        return (chunk.gradient,)

    def move(
        self,
        chunk: Chunk,
        numbers: UpdateNumbers,
        directions: tuple[Tensor, ...],
        rates: list[Tensor],
    ) -> None:
        """Move the weights along each direction, by its rate (a scalar). The directions are used
        up.
        """
        for direction, rate in zip(directions, rates, strict=True):
            chunk.weights.sub_(direction.mul_(rate))

    def _chunks(
        self, stepped: Iterable[tuple[Tensor, UpdateNumbers]]
    ) -> Iterator[tuple[PartitionShare, Chunk, UpdateNumbers]]:
        for partition, numbers in stepped:
            state = {name: self.state[partition][name] for name in self.state_names}
            assert partition.grad is not None
            for share in self._shares.get(partition, ()):
                for place in _places(partition, share):
                    held = {name: tensor[place] for name, tensor in state.items()}
                    yield share, Chunk(partition.data[place], partition.grad[place], held), numbers

    # ------------------------------------------------------------------ ratios
    def _rates(self, numbers: UpdateNumbers, knows: bool) -> list[Tensor]:
        """For each direction what a tensor's is multiplied by: rate, ratio and embedding factor;
        fp32 [tensors].

        `knows`: the directions' norms are of the step before.
        """
        return [self._rates_of(kind, numbers, knows) for kind in self._directions]

    def _rates_of(self, kind: int, numbers: UpdateNumbers, knows: bool) -> Tensor:
        norms, rules = self._norms, self.rules
        first = numbers.step == 1 and rules.norm_of in {NormOf.MEAN_WEIGHT, NormOf.STALE}
        if rules.norm_of is NormOf.LOCAL or first:
            weight, direction = norms.of_slice(WEIGHT), norms.of_slice(kind)
        elif rules.norm_of in {NormOf.EXACT, NormOf.STALE}:
            weight, direction = norms.whole(WEIGHT), norms.whole(kind)
        else:
            slices = torch.where(norms.is_sharded, float(self._mesh.tensor), 1.0)
            weight, direction = norms.whole(WEIGHT) / slices.sqrt(), norms.of_slice(kind)
        floor = FLOOR if first else rules.floor
        if floor:
            weight = torch.maximum(weight, norms.elements * floor)
        ratio = torch.where((weight > 0) & (direction > 0), weight / direction, 1.0)
        if knows:  # a tensor that had no direction then may have one now: it waits for a step
            ratio = torch.where(direction > 0, ratio, 0.0)
        if not (rules.adapts_all or numbers.decay):
            ratio = torch.ones_like(ratio)
        factor = 1.0 + rules.embedding_alpha * norms.elements / norms.elements.max()
        return (ratio * factor * numbers.learning_rate).float()


def _places(partition: Tensor, share: PartitionShare) -> Iterator[slice]:
    """A share's elements of its partition, in pieces that are worked on at a time."""
    size, stop = chunk_elements(partition.device), share.start + share.numel
    for start in range(share.start, stop, size):
        yield slice(start, min(start + size, stop))


class LayerNoiseLamb(Lamb):
    """A third number per element: the mean square of the noise.

    With m the momentum before this step, d = g - m: the directions are m and d, each over the root
    of its own mean square, with bias correction. The weight decays first, by itself. A tensor moves
    by at most twice the learning rate times its norm, which is taken before the decay.
    """

    state_names: ClassVar[tuple[str, ...]] = (*MOMENTS, NOISE)
    directions: ClassVar[int] = 2

    def advance(self, chunk: Chunk, numbers: UpdateNumbers) -> None:
        """Take gradient and noise into the mean squares; the momentum follows when the weights have
        moved.
        """
        mean, squares = (chunk.state[name] for name in MOMENTS)
        noise = chunk.gradient - mean
        squares.mul_(numbers.beta2).add_(
            (chunk.gradient * chunk.gradient).mul_(1.0 - numbers.beta2)
        )
        chunk.state[NOISE].mul_(numbers.beta2).add_(noise.mul_(noise).mul_(1.0 - numbers.beta2))

    def directions_of(self, chunk: Chunk, numbers: UpdateNumbers) -> tuple[Tensor, ...]:
        """Momentum and noise. The momentum is zero at the first step, and then goes nowhere."""
        mean, squares = (chunk.state[name] for name in MOMENTS)
        return numbers.scaled(mean, squares), numbers.scaled(
            chunk.gradient - mean, chunk.state[NOISE]
        )

    def hold(self, chunk: Chunk, directions: tuple[Tensor, ...]) -> None:
        """The gradient is needed once more: the directions are made again."""

    def held(self, chunk: Chunk, numbers: UpdateNumbers) -> tuple[Tensor, ...]:
        """The same directions, from the same numbers."""
        return self.directions_of(chunk, numbers)

    def move(
        self,
        chunk: Chunk,
        numbers: UpdateNumbers,
        directions: tuple[Tensor, ...],
        rates: list[Tensor],
    ) -> None:
        """Decay, move along both directions, and take the gradient into the momentum."""
        if numbers.decay:
            chunk.weights.mul_(1.0 - numbers.learning_rate * numbers.decay)
        super().move(chunk, numbers, directions, rates)
        mean = chunk.state[MOMENTS[0]]
        mean.mul_(numbers.beta1).add_(chunk.gradient * (1.0 - numbers.beta1))
