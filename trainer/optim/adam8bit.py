"""AdamW whose moments are held in eight bits, block by block; the arithmetic of a step is fp32.

As in arXiv 2110.02861, blocks are of 256 elements, and small tensors keep fp32 moments, as does the
word embedding. Blocks never hold elements of two parameters, and begin at multiples of 256 of a
parameter's flattened local slice, so that all ways of cutting it at such multiples give the same
blocks. A block that ZeRO-1 cuts in two is two blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.contract.record import Record
from trainer.optim.interface import (
    MOMENTS,
    PartitionShare,
    TrainingOptimizer,
    UpdateNumbers,
    chunk_elements,
)

# Eight-bit codes of block-wise scaled numbers: many significant steps near the largest, seven
# decades below it.
#
# The code is the dynamic map of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861):
# with n equal bins in [0.1, 1], the decade 10^(i-6) holds the bins' middles times 10^(i-6), for i =
# 0..6, where n is 2^i for signed numbers (each with its negative) and 2^(i+1) for others; then 0
# and 1. Together 256 values.

DECADES = 7
SMALLEST_SCALE = 2.0**-100  # below it a block counts as zero, so that no product below is denormal


def code_values(signed: bool) -> np.ndarray:
    """The 256 values in ascending order, float32 [256]."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        bins = 2 ** (decade if signed else decade + 1)
        middles = [
            (0.1 + 0.9 * (index + 0.5) / bins) * 10.0 ** (decade - DECADES + 1)
            for index in range(bins)
        ]
        values += middles + ([-middle for middle in middles] if signed else [])
    return np.sort(np.asarray(values, dtype=np.float64)).astype(np.float32)


class DynamicCode(Record):
    """Quantiser of blocks. Numbers whose sign, exponent and first 7 bits of the significand agree
    are one *cell*.

    `values`: fp32 [256]. `zero`: the code of 0. `first`: uint8 [65536], the code of a cell's
    smallest number. `edge`: fp32 [65536], the number in the cell above which the next code is
    nearer; infinite where the cell has one code.
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
            # a second moment that is not zero stays so: the step divides by its root
            edges[0] = 0.0
        bits = np.arange(1 << 16, dtype=np.uint32) << 16
        one, other = bits.view(np.float32), (bits | 0xFFFF).view(np.float32)
        finite = np.isfinite(one) & np.isfinite(other)
        low, high = (
            np.where(finite, np.minimum(one, other), 0.0),
            np.where(finite, np.maximum(one, other), 0.0),
        )
        first, last = (
            np.searchsorted(edges, low, side="left"),
            np.searchsorted(edges, high, side="left"),
        )
        assert np.all(last - first <= 1), "a cell holds more than two codes"
        edge = np.where(last > first, edges[np.minimum(first, len(edges) - 1)], np.float32(np.inf))
        tables = (values, first.astype(np.uint8), edge.astype(np.float32))
        return cls(
            signed,
            int(np.searchsorted(values, 0.0)),
            *(torch.from_numpy(table).to(device) for table in tables),
        )

    def encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [elements], and scales, fp32 [blocks], of fp32 `blocks` [blocks, width].

        A block's scale is its number of largest magnitude, with its sign: that number is code 1.0,
        and stays exact. Of what `decode` gives, it makes the same codes and scales again.
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
        return (
            self.values.index_select(0, codes.int()).view(len(scales), -1).mul_(scales.unsqueeze(1))
        )


BLOCK = 256
SMALLEST_IN_8_BITS = 4096  # elements of the whole parameter


class BlockSpan(Record):
    """Elements [start, start + blocks x width) of a run, which are `blocks` blocks from number
    `block` on.
    """

    start: int
    block: int
    blocks: int
    width: int

    @property
    def stop(self) -> int:
        return self.start + self.blocks * self.width


def spans_of(first: int, numel: int, chunk: int) -> Iterator[BlockSpan]:
    """The blocks of a run whose first element is number `first` of its parameter, in spans of at
    most `chunk`.
    """
    start, block = 0, 0
    while start < numel:
        to_grid, left = -(first + start) % BLOCK, numel - start
        if to_grid or left < BLOCK:
            blocks, width = 1, min(to_grid or BLOCK, left)
        else:
            blocks, width = min(left, chunk) // BLOCK, BLOCK
        yield BlockSpan(start, block, blocks, width)
        start, block = start + blocks * width, block + blocks


class FullMoment:
    """A moment in fp32."""

    def __init__(self, numel: int, device: torch.device):
        self.values = torch.zeros(numel, dtype=torch.float32, device=device)

    def read(self, span: BlockSpan) -> Tensor:
        """The numbers of a span, live."""
        return self.values[span.start : span.stop]

    def write(self, span: BlockSpan, numbers: Tensor) -> None:
        """Take the numbers of a span; what `read` gave is in place."""
        held = self.read(span)
        if held.data_ptr() != numbers.data_ptr():
            held.copy_(numbers)


class CodedMoment:
    """A moment in eight bits: codes, uint8 [elements], and scales, fp32 [blocks]."""

    def __init__(self, numel: int, blocks: int, code: DynamicCode):
        device = code.values.device
        self.code = code
        self.codes = torch.full((numel,), code.zero, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(blocks, dtype=torch.float32, device=device)

    def read(self, span: BlockSpan) -> Tensor:
        """The numbers of a span, fp32: a copy."""
        scales = self.scales[span.block : span.block + span.blocks]
        return self.code.decode(self.codes[span.start : span.stop], scales).flatten()

    def write(self, span: BlockSpan, numbers: Tensor) -> None:
        """Round the numbers of a span to codes."""
        codes, scales = self.code.encode(numbers.view(span.blocks, span.width))
        self.codes[span.start : span.stop] = codes
        self.scales[span.block : span.block + span.blocks] = scales


class MomentRun(Record):
    """The state of one share, whose elements of the partition begin at `start`; its moments in the
    order of MOMENTS.
    """

    start: int
    spans: tuple[BlockSpan, ...]
    moments: tuple[FullMoment | CodedMoment, FullMoment | CodedMoment]


class Adam8bit(TrainingOptimizer):
    """AdamW with eight-bit moments: 2 x (1 + 4/256) bytes an element, and a chunk of fp32 while it
    steps.

    `in_full`: names of parameters whose moments stay in fp32, as those of fewer than 4096 elements
    do. The update of an element does not depend on where in a partition it lies, but for the blocks
    that the partition's ends cut.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float,
        in_full: Collection[str] = (),
    ):
        super().__init__(
            groups, {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0}
        )
        self._in_full = frozenset(in_full)

    def materialise(self, shares: Iterable[PartitionShare]) -> None:
        """Create the state of every share. What lies outside of them (padding) is never stepped."""
        codes: dict[torch.device, tuple[DynamicCode, DynamicCode]] = {}
        for group in self.param_groups:
            for partition in group["params"]:
                device = partition.device
                codes[device] = (DynamicCode.build(True, device), DynamicCode.build(False, device))
                step = torch.zeros((), dtype=torch.float32)  # on the CPU: it is read at every step
                self.state[partition] = {"step": step, "runs": {}}
        for share in shares:
            partition = self.partition(share.group)
            device = partition.device
            spans = tuple(spans_of(share.first, share.numel, chunk_elements(device)))
            moments: tuple[FullMoment | CodedMoment, FullMoment | CodedMoment]
            if share.name in self._in_full or math.prod(share.global_shape) < SMALLEST_IN_8_BITS:
                moments = (FullMoment(share.numel, device), FullMoment(share.numel, device))
            else:
                blocks = sum(span.blocks for span in spans)
                signed, unsigned = codes[device]
                moments = (
                    CodedMoment(share.numel, blocks, signed),
                    CodedMoment(share.numel, blocks, unsigned),
                )
            self.state[partition]["runs"][share.name] = MomentRun(share.start, spans, moments)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the shares of every partition that has a gradient."""
        for group in self.param_groups:
            for partition in group["params"]:
                if partition.grad is None:
                    continue
                state = self.state[partition]
                state["step"] += 1
                numbers = UpdateNumbers.of(group, int(state["step"].item()))
                for run in state["runs"].values():
                    _step_run(run, partition.data, partition.grad, numbers)

    @torch.no_grad()
    def moments(self, share: PartitionShare) -> dict[str, Tensor]:
        """Copies, in host memory: on the device they would be as large as what eight bits save."""
        run, found = self._run(share), {}
        for name, moment in zip(MOMENTS, run.moments, strict=True):
            found[name] = torch.empty(share.numel, dtype=torch.float32)
            for span in run.spans:
                found[name][span.start : span.stop].copy_(moment.read(span))
        return found

    @torch.no_grad()
    def set_moments(self, share: PartitionShare, moments: Mapping[str, Tensor]) -> None:
        """Round them to codes. What `moments` gave becomes the same codes again."""
        run, device = self._run(share), self.partition(share.group).device
        for name, moment in zip(MOMENTS, run.moments, strict=True):
            for span in run.spans:
                moment.write(span, moments[name][span.start : span.stop].to(device))

    def _run(self, share: PartitionShare) -> MomentRun:
        run: MomentRun = self.state[self.partition(share.group)]["runs"][share.name]
        return run


def _step_run(run: MomentRun, masters: Tensor, gradients: Tensor, numbers: UpdateNumbers) -> None:
    """Decode, step and encode a run, span by span.

    Only single multiplications, additions, divisions and roots: each is rounded alike on every
    device and at every place of a tensor, which fused kernels do not promise, so that tied copies
    of a weight stay equal.
    """
    first, second = run.moments
    decay = 1.0 - numbers.learning_rate * numbers.decay
    rate = numbers.learning_rate / numbers.mean_bias
    for span in run.spans:
        place = slice(run.start + span.start, run.start + span.stop)
        weights, gradient = masters[place], gradients[place]
        mean, square = first.read(span), second.read(span)
        numbers.advance(mean, square, gradient)
        weights.mul_(decay).sub_((mean / numbers.root(square)).mul_(rate))
        first.write(span, mean)
        second.write(span, square)
