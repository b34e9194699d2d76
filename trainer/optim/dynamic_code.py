"""Eight-bit codes of block-wise scaled numbers: many significant steps near the largest, seven decades below it.

The code is the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861): with n equal bins in
[0.1, 1], the decade 10^(i-6) holds the bins' middles times 10^(i-6), for i = 0..6, where n is 2^i for signed numbers
(each with its negative) and 2^(i+1) for others; then 0 and 1. Together 256 values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.contract.record import Record

DECADES = 7
SMALLEST_SCALE = 2.0**-100  # below it a block counts as zero, so that no product below is denormal


def code_values(signed: bool) -> np.ndarray:
    """The 256 values in ascending order, float32 [256]."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        bins = 2 ** (decade if signed else decade + 1)
        middles = [(0.1 + 0.9 * (index + 0.5) / bins) * 10.0 ** (decade - DECADES + 1) for index in range(bins)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return np.sort(np.asarray(values, dtype=np.float64)).astype(np.float32)


class DynamicCode(Record):
    """Quantiser of blocks. Numbers whose sign, exponent and first 7 bits of the significand agree are one *cell*.

    `values`: fp32 [256]. `zero`: the code of 0. `first`: uint8 [65536], the code of a cell's smallest number. `edge`:
    fp32 [65536], the number in the cell above which the next code is nearer; infinite where the cell has one code.
    """

    signed: bool
    zero: int
    values: Tensor
    first: Tensor
    edge: Tensor

    @classmethod
    def build(cls, signed: bool, device: torch.device) -> DynamicCode:
        """Tables for encoding with two look-ups instead of a search."""
        values = code_values(signed)
        edges = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
        if not signed:
            edges[0] = 0.0  # a second moment that is not zero stays so: the step divides by its root
        bits = np.arange(1 << 16, dtype=np.uint32) << 16
        one, other = bits.view(np.float32), (bits | 0xFFFF).view(np.float32)
        finite = np.isfinite(one) & np.isfinite(other)
        low, high = np.where(finite, np.minimum(one, other), 0.0), np.where(finite, np.maximum(one, other), 0.0)
        first, last = np.searchsorted(edges, low, side="left"), np.searchsorted(edges, high, side="left")
        assert np.all(last - first <= 1), "a cell holds more than two codes"
        edge = np.where(last > first, edges[np.minimum(first, len(edges) - 1)], np.float32(np.inf))
        tables = (values, first.astype(np.uint8), edge.astype(np.float32))
        return cls(signed, int(np.searchsorted(values, 0.0)), *(torch.from_numpy(table).to(device) for table in tables))

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [elements], and scales, fp32 [blocks], of fp32 `blocks` [blocks, width].

        A block's scale is its number of largest magnitude, with its sign: that number is code 1.0, and stays exact.
        Of what `decode` gives, it makes the same codes and scales again.
        """
        scales = blocks.amax(dim=1)
        if self.signed:
            low = blocks.amin(dim=1)
            scales = torch.where(low + scales < 0, low, scales)
        scales = scales.masked_fill_(scales.abs() < SMALLEST_SCALE, 0.0)
        relative = blocks.div(scales.masked_fill(scales == 0, torch.inf).unsqueeze(1)).flatten()
        cells = relative.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
        codes = self.first.index_select(0, cells)
        codes += relative > self.edge.index_select(0, cells)
        return codes, scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The numbers, fp32 [blocks, width], of codes [elements] and scales [blocks]."""
        return self.values.index_select(0, codes.int()).view(len(scales), -1).mul_(scales.unsqueeze(1))
