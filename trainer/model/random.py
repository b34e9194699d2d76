"""Dropout's masks by place: whether an element is dropped follows from where it is, not from how
many numbers were drawn before.

Of the seed, the step and the name of a place in the model (`Dropout`) come two words, of these
and a sample's number in the global batch two others, and of those, a head, a row and a column 32
bits, which are compared with a threshold. So a mask is the same however the model, its heads, its
sequences and its samples are dealt to workers, at every recomputation, and after a resume; nothing
of it is kept or drawn.

The bits are mixed by lowbias32 (Christopher Wellons, "Prospecting for Hash Functions", 2018,
nullprogram.com/blog/2018/07/31), a 32-bit hash of two multiplications, used as a generator on a
counter as in Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011; the words of a
place are of BLAKE2b.

Torch's own fused kernels on a GPU drop attention's weights themselves, from the device's generator,
which is seeded before each block by the same and the tensor rank: a recomputed mask is the first
one, on another shape it is another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from struct import unpack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.model.compiled import compiles_small_parts
from trainer.model.documents import passes_documents
from trainer.parallel.mesh import Mesh
from trainer.schedule.flops import WIDENED_ELEMENTS

HALF, WHOLE = 1 << 31, 1 << 32
LOW_16, LOW_17 = 0xFFFF, 0x1FFFF


def _signed(bits: int) -> int:
    """The same 32 bits as the signed number that torch and Triton multiply with."""
    if bits >= HALF:
        return bits - WHOLE
    return bits


FIRST, SECOND = _signed(0x7FEB352D), _signed(0x846CA68B)  # of Wellons' lowbias32
STRIDE = _signed(0x9E3779B1)  # 2^32 / the golden ratio: neighbours lie far apart


def least_kept(dropout: float) -> int:
    """The threshold of `is_kept` for this share of dropped elements, which it meets to 2^-32."""
    return round(dropout * WHOLE) - HALF


def scale_of_kept(least: int) -> float:
    """What kept elements are multiplied by, so that their mean is that of all."""
    return WHOLE / (HALF - least)


def row_words(words: tuple[Tensor, ...], *places: Tensor) -> tuple[Tensor, Tensor]:
    """The two words of a row, of those of its sample and its places in the tensor: a position, or
    a head and a position. Integers of any width and shape that fit together.

    Two, so that no two rows of a mask are the same numbers at another place.
    """
    one, other = words
    for place, opposite in zip(places, reversed(places), strict=True):
        one, other = _mixed(one ^ _narrow(place)), _mixed(other ^ _narrow(opposite))
    return one, other


def is_kept(row: tuple[Tensor, Tensor], column: Tensor, least: int) -> Tensor:
    """Whether an element stays. `row`: as `row_words` gives it; `least`: as `least_kept` does."""
    one, other = row
    bits = one ^ (_narrow(column) * STRIDE)
    bits = (bits ^ ((bits >> 16) & LOW_16)) * FIRST + other
    bits = (bits ^ ((bits >> 15) & LOW_17)) * SECOND
    return bits >= least


def _narrow(place: Tensor) -> Tensor:
    """As int32, whatever width it has when it is run: code traced with 32 bits is run with 64 at
    times, and a conversion that changes nothing is not in the trace.
    """
    return place.to(torch.int64).to(torch.int32)


def _mixed(bits: Tensor) -> Tensor:
    """All 32 bits of each of the results depend on all of its own: lowbias32."""
    bits = (bits ^ ((bits >> 16) & LOW_16)) * FIRST
    bits = (bits ^ ((bits >> 15) & LOW_17)) * SECOND
    return bits ^ ((bits >> 16) & LOW_16)


def kept_in_rows(row: tuple[Tensor, Tensor], columns: int, least: int) -> Tensor:
    """Which elements stay of rows of so many columns: bools [.., columns] for words [..].

    A CPU finds them so many at a time as stay in its cache.
    """
    one, other = row
    column = torch.arange(columns, device=one.device)
    if one.device.type != "cpu" or torch.compiler.is_compiling():
        return is_kept((one.unsqueeze(-1), other.unsqueeze(-1)), column, least)
    height = max(1, WIDENED_ELEMENTS // columns)
    parts = [
        is_kept(part, column, least)
        for part in zip(*(words.reshape(-1, 1).split(height) for words in row), strict=True)
    ]
    return torch.cat(parts).view(*one.shape, columns)


def dropped_rows(rows: Tensor, words: tuple[Tensor, Tensor], probability: float) -> Tensor:
    """The rows [.., columns] without what is dropped of them, by their words [..]."""
    least = least_kept(probability)
    return rows * kept_in_rows(words, rows.shape[-1], least) * scale_of_kept(least)


class Dropout(nn.Module):
    """One place in the model where dropout is, of activations outside tensor regions or of
    attention's weights.

    What `DropoutPlaces` sets: its `name`, the path in the model; of the present micro batch the
    `words` [samples, 2], and a `key`, by which generators are seeded.
    """

    def __init__(self, probability: float, mesh: Mesh):
        super().__init__()
        self.probability = probability
        self.stretch = mesh.tensor_rank if mesh.sequence_parallel else 0
        self.drop = dropout_for(mesh.device)
        self.name = self.key = ""
        self.words: Tensor | None = None

    @property
    def drops(self) -> bool:
        """Whether something is dropped now."""
        return self.training and self.probability > 0.0

    @passes_documents
    def forward(self, hidden: Tensor) -> Tensor:
        return self.apply_to(hidden)

    def apply_to(self, hidden: Tensor) -> Tensor:
        """Hidden states [batch, sequence, features] without what is dropped of them."""
        if not self.drops:
            return hidden
        assert self.words is not None, "a step has begun, and with it this micro batch"
        return self.drop(hidden, self.words, self.probability, self.stretch)

    def seed_generators(self) -> None:
        """For who draws from them until another place does."""
        torch.manual_seed(int.from_bytes(_digest(f"{self.key}/{self.name}"), "little") >> 1)


def dropout(hidden: Tensor, words: Tensor, probability: float, stretch: int) -> Tensor:
    """Dropout of one stretch of a sequence, [batch, sequence, features], as a rank that holds the
    whole drops it. `words`: of its samples.
    """
    length = hidden.shape[1]
    position = torch.arange(length, device=hidden.device) + stretch * length
    return dropped_rows(hidden, row_words(words[:, None].unbind(2), position), probability)


@cache
def dropout_for(device: torch.device) -> Callable[[Tensor, Tensor, float, int], Tensor]:
    """One code for all places, in one pass over the elements where something is there to compile
    it.
    """
    if compiles_small_parts(device):
        return torch.compile(dropout)
    return dropout


class Drop(NamedTuple):
    """Dropout of attention's weights. `words`: as a Dropout has them; `first_head`,
    `first_query`: where in the model's heads and in the sequence the weights begin that are at
    hand.
    """

    probability: float
    words: Tensor
    first_head: int = 0
    first_query: int = 0

    def dropped(self, weights: Tensor) -> Tensor:
        """Weights [batch, heads, queries, keys] without what is dropped of them."""
        _, heads, queries, _ = weights.shape
        head = torch.arange(heads, device=weights.device) + self.first_head
        query = torch.arange(queries, device=weights.device) + self.first_query
        words = row_words(self.words[:, None, None].unbind(3), head[:, None], query)
        return dropped_rows(weights, words, self.probability)


class DropoutPlaces:
    """All places of a worker where dropout is, and what their masks follow from in a step.

    `number`: the micro batch, of this replica's in the step, whose words they have now.
    """

    def __init__(self, mesh: Mesh):
        self.number = 0
        self._mesh = mesh
        self._places: list[Dropout] = []
        self._words: Sequence[Tensor] = ()
        self._keys: list[str] = []
        self._done: dict[int, int] = {}

    def locate(self, stage: Iterable[tuple[str, nn.Module]]) -> None:
        """Find the places in the (prefix, module) pairs of a stage."""
        for prefix, layer in stage:
            for name, module in layer.named_modules():
                if isinstance(module, Dropout) and module.probability > 0.0:
                    module.name = prefix + name
                    self._places.append(module)

    def begin(self, key: str, samples: Tensor) -> None:
        """Begin a step. `key` names seed and step; `samples`: numbers in the global batch of those
        of each micro batch [micro batches, samples].
        """
        self._words, self._done = (), {}
        if not self._places:
            return
        rank, device = self._mesh.tensor_rank, self._mesh.device
        self._keys = [f"{key}/{first}/{rank}" for first in samples[:, 0].tolist()]
        words = torch.tensor(
            [unpack("<2i", _digest(f"{key}/{place.name}")) for place in self._places]
        )
        here = words.to(device, torch.int32, non_blocking=True)
        numbers = samples.to(device, torch.int32, non_blocking=True)
        self._words = _mixed(here[:, None, None] ^ numbers[:, :, None]).unbind(1)
        self.enter(0)

    def next_of(self, part: int) -> None:
        """One of the worker's parts begins its next micro batch: each takes them in order."""
        self._done[part] = self._done.get(part, -1) + 1
        self.enter(self._done[part])

    def enter(self, number: int) -> None:
        """Give all places the words of a micro batch, whose masks are needed now."""
        self.number = number
        if self._words:
            for place, words in zip(self._places, self._words[number], strict=True):
                place.words, place.key = words, self._keys[number]


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()
