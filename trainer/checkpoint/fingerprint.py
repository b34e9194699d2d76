"""A tensor in a few numbers: least, largest, mean, Euclidean norm, and a digest of its bits that
adds over shards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.contract.record import JsonObject, Record

PIECE_ELEMENTS = 1 << 22  # numbers looked at in one go: the temporaries are a few times 32 MiB
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64
# the columns' names of `table_row`, centred
TABLE_HEAD = f"{'min':^13} {'max':^13} {'mean':^13} {'l2 norm':^12} metadata"


class Fingerprint(Record):
    """Numbers of a tensor or of a part of it; `joined` with those of the other parts they are those
    of the whole.

    `digest`: sum over all elements of (bits x odd number made of the element's place in the whole
    tensor), modulo 2^64. A single changed element always changes it, as do two that trade places;
    and it does not depend on how the tensor was cut. `minimum`, `maximum`, `mean`, `norm` are NaN
    where an element is (see `non_finite`).
    """

    count: int
    minimum: float
    maximum: float
    mean: float
    norm: float
    non_finite: int
    digest: int

    def joined(self, other: Fingerprint) -> Fingerprint:
        """The fingerprint of both parts together."""
        if not self.count or not other.count:
            if self.count:
                return self
            return other
        count = self.count + other.count
        return Fingerprint(
            count=count,
            minimum=_least(self.minimum, other.minimum),
            maximum=-_least(-self.maximum, -other.maximum),
            mean=self.mean * (self.count / count) + other.mean * (other.count / count),
            norm=math.hypot(self.norm, other.norm),
            non_finite=self.non_finite + other.non_finite,
            digest=(self.digest + other.digest) % _MODULUS,
        )

    @property
    def largest(self) -> float:
        """The largest absolute value."""
        return max(abs(self.minimum), abs(self.maximum))

    def document(self) -> JsonObject:
        """As JSON values: what is not finite becomes null, the digest 16 hexadecimal digits."""
        numbers = {
            "min": self.minimum,
            "max": self.maximum,
            "mean": self.mean,
            "l2_norm": self.norm,
        }
        shown = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {
            "count": self.count,
            **shown,
            "non_finite": self.non_finite,
            "digest": f"{self.digest:016x}",
        }

    @classmethod
    def from_document(cls, value: JsonObject) -> Fingerprint:
        """Read what `document` made. Raises KeyError or ValueError for anything else."""
        least, most, mean, norm = (
            math.nan if value[name] is None else float(value[name])
            for name in ("min", "max", "mean", "l2_norm")
        )
        return cls(
            int(value["count"]),
            least,
            most,
            mean=mean,
            norm=norm,
            non_finite=int(value["non_finite"]),
            digest=int(value["digest"], 16),
        )


EMPTY = Fingerprint(0, math.nan, math.nan, mean=math.nan, norm=0.0, non_finite=0, digest=0)


def fingerprint(
    tensor: Tensor, whole: Sequence[int] | None = None, offsets: Sequence[int] | None = None
) -> Fingerprint:
    """Numbers of `tensor`, which lies at `offsets` of a tensor of shape `whole` (itself if not
    given).
    """
    values = tensor.detach().reshape(tensor.shape or (1,))
    if whole:
        shape = tuple(whole)
    else:
        shape = tuple(values.shape)
    if offsets:
        start = list(offsets)
    else:
        start = [0] * values.dim()
    found = EMPTY
    rows = max(1, PIECE_ELEMENTS // max(1, math.prod(values.shape[1:])))
    for row in range(0, values.shape[0], rows):
        part = values[row : row + rows]
        found = found.joined(_piece(part, _places(part, shape, [start[0] + row, *start[1:]])))
    return found


def _piece(part: Tensor, places: Tensor) -> Fingerprint:
    if not part.numel():
        return EMPTY
    wide = part.double()
    bits = part.contiguous().view(_INTEGERS[part.element_size()]).to(torch.int64)
    return Fingerprint(
        count=part.numel(),
        minimum=float(wide.min()),
        maximum=float(wide.max()),
        mean=float(wide.mean()),
        norm=float(torch.linalg.vector_norm(wide)),
        non_finite=part.numel() - int(torch.isfinite(wide).sum()),
        # int64 wraps around, which is what is meant
        digest=int((bits * (2 * places + 1)).sum()) % _MODULUS,
    )


def _places(part: Tensor, whole: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Index of every element in the flattened whole tensor; the shape of `part`."""
    places = torch.zeros((1,) * part.dim(), dtype=torch.int64, device=part.device)
    for dim, size in enumerate(part.shape):
        stride = math.prod(whole[dim + 1 :])
        index = (torch.arange(size, device=part.device) + offsets[dim]) * stride
        places = places + index.view([-1 if inner == dim else 1 for inner in range(part.dim())])
    return places


def _least(one: float, other: float) -> float:
    if math.isnan(one) or math.isnan(other):
        return math.nan
    return min(one, other)


def state_digest(state: Tensor) -> str:
    """16 hexadecimal digits that tell one generator's state (any flat tensor) from another."""
    return hashlib.blake2b(state.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def table_row(name: str, numbers: Fingerprint, shape: Sequence[int]) -> str:
    """One line of the table of fingerprints."""
    return (
        f"{numbers.minimum:13.6e} {numbers.maximum:13.6e} {numbers.mean:13.6e} {numbers.norm:12.6e} "
        f"{name} {list(shape)}"
    )
