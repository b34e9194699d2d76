"""What attention knows of positions: ALiBi's slopes and rotary rotations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.config.model import ModelSection
from trainer.model.documents import positions_in_documents
from trainer.parallel.mesh import Mesh


def alibi_slopes(heads: int) -> list[float]:
    """One slope per head (Press et al. 2022; as in BLOOM).

    For a power of two n they are 2^(-8/n), its square, its cube ...; otherwise the slopes of the
    largest power below n, followed by every second slope of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = _geometric(power)
    if power < heads:
        slopes += _geometric(2 * power)[::2][: heads - power]
    return slopes


def local_alibi_slopes(heads: int, mesh: Mesh) -> Tensor:
    """The slopes of this tensor rank's heads, fp32 [heads / tensor]."""
    local = heads // mesh.tensor
    first = mesh.tensor_rank * local
    return torch.tensor(
        alibi_slopes(heads)[first : first + local], dtype=torch.float32, device=mesh.device
    )


def _geometric(heads: int) -> list[float]:
    ratio = 2.0 ** (-8.0 / heads)
    return [ratio ** (index + 1) for index in range(heads)]


def rotary_frequencies(model: ModelSection, device: torch.device) -> Tensor:
    """Radians per position of each plane of a head, fp32 [head size / 2], stretched where the card
    asks for it.

    Raises ValueError for an odd head size.
    """
    plain = plain_frequencies(model.head_size, model.rotary_base, device)
    if model.rotary_factor == 1.0 or model.rotary_original_length is None:
        return plain
    length = model.rotary_original_length
    return stretched(
        plain,
        model.rotary_factor,
        length=length,
        low=model.rotary_low_factor,
        high=model.rotary_high_factor,
    )


def plain_frequencies(head_size: int, base: float, device: torch.device) -> Tensor:
    """base^(-2 i / head size), fp32 [head size / 2] (Su et al. 2021)."""
    if head_size % 2:
        raise ValueError(
            f"rotary positions need an even head size, not {head_size}: change model.kv_channels"
        )
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size
    return (base**-exponents).to(torch.float32)


def stretched(frequencies: Tensor, factor: float, length: int, low: float, high: float) -> Tensor:
    """Frequencies for texts longer than `length`, of which the model knew texts (Llama 3.1;
    Grattafiori et al. 2024).

    A wave that fits more than `high` times into `length` stays as it is; one that fits fewer than
    `low` times is stretched by `factor`; between them the frequency goes over linearly in the
    number of times.
    """
    times = length * frequencies / (2.0 * math.pi)
    kept = ((times - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / factor


class Rotary:
    """Rotates queries and keys by angles that grow with the position (Su et al. 2021; halves as in
    GPT-NeoX).

    Component i of the first half of a head and component i of the second are one plane, turned by the position times
    `frequencies[i]`. Angles and rotation are fp32 whatever the model's dtype. One object serves all
    blocks of a worker; `reset_positions` counts positions within documents. `rotate` turns queries and keys: `compiled`
    in one pass over both, else by torch's operations, each over all of them in fp32.
    """

    def __init__(self, frequencies: Tensor, reset_positions: bool, compiled: bool = False):
        self.frequencies = frequencies
        self.reset_positions = reset_positions
        self.rotate = rotated
        if compiled:
            self.rotate = torch.compile(rotated)
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._last: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def angles(self, length: int, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions of sequences of `length`, each [batch or 1, length, 1,
        head size / 2].

        Made once per length; where positions count within `documents` [batch, sequence], once per
        micro batch.
        """
        if not self.reset_positions or documents is None:
            return self._of_length(length)
        if self._last is None or self._last[0] is not documents:
            cosine, sine = self._of_length(length)
            positions = positions_in_documents(documents)
            self._last = (documents, (cosine[0, positions], sine[0, positions]))
        return self._last[1]

    def _of_length(self, length: int) -> tuple[Tensor, Tensor]:
        found = self._made.get(length)
        if found is None:
            places = torch.arange(length, dtype=torch.float32, device=self.frequencies.device)
            angles = torch.outer(places, self.frequencies)[None, :, None, :]
            found = self._made[length] = (angles.cos(), angles.sin())
        return found


def rotated(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [batch, sequence, heads, head size], turned by the angles."""
    return _turned(query, cosine, sine), _turned(key, cosine, sine)


def _turned(tensor: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = tensor.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(tensor.dtype)
