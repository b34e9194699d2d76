"""Rectangles: a flat run of a tensor, cut into blocks."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings, strategies as st

from trainer.model.loss import _put
from trainer.parallel.state import Rectangle, rectangles
from trainer.parallel.widened import add_widened
from trainer.schedule.flops import WIDENED_ELEMENTS


@st.composite
def runs(draw: st.DrawFn, largest: int) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, largest), max_size=4)))
    total = math.prod(shape)
    start = draw(st.integers(0, total))
    return shape, start, draw(st.integers(0, total - start))


@settings(max_examples=300, deadline=None)
@given(runs(6))
def test_blocks_tile_the_run_in_order(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, numel = run
    flat = torch.arange(math.prod(shape))
    whole, held = flat.view(shape), flat[start : start + numel]
    seen = []
    for found in rectangles(shape, start, numel):
        region = whole[
            tuple(slice(o, o + s) for o, s in zip(found.offsets, found.sizes, strict=True))
        ]
        block = held[found.start : found.start + math.prod(found.sizes)].view(found.sizes)
        assert torch.equal(region, block)
        seen += block.flatten().tolist()
    assert seen == held.tolist()


def is_contiguous_block(shape: tuple[int, ...], begin: int, end: int) -> bool:
    """Whether elements [begin, end) form a rectangle: by looking at all their coordinates."""
    coordinates = [torch.unravel_index(torch.tensor(i), shape) for i in range(begin, end)]
    columns = [sorted({int(c[d]) for c in coordinates}) for d in range(len(shape))]
    filled = math.prod(len(column) for column in columns) == end - begin
    return filled and all(column[-1] - column[0] + 1 == len(column) for column in columns)


@settings(max_examples=40, deadline=None)
@given(runs(3))
def test_no_cut_has_fewer_blocks(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, numel = run
    end = start + numel

    @cache
    def fewest(begin: int) -> int:
        if begin == end:
            return 0
        return 1 + min(
            fewest(stop)
            for stop in range(begin + 1, end + 1)
            if is_contiguous_block(shape, begin, stop)
        )

    assert len(rectangles(shape, start, numel)) == fewest(start)


def test_scalar_and_empty() -> None:
    assert rectangles((), 0, 1) == [Rectangle((), (), 0)]
    assert rectangles((4, 2), 3, 0) == []


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, 7), (6, 1), (2, -1)])
def test_a_run_outside_the_tensor_is_refused(start: int, numel: int) -> None:
    with pytest.raises(ValueError, match="outside a tensor of 6 elements"):
        rectangles((2, 3), start, numel)


# ----------------------------------------------------------------------------- widened
# Sums in fp32 of bf16 numbers: the bits of torch's own, in strips or not.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, WIDENED_ELEMENTS + 5), (2, WIDENED_ELEMENTS)], ids=str)
def test_strips_add_what_torch_adds(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    total, part = torch.randn(shape), (torch.randn(shape) * 100).to(dtype)
    for turned in (False, True):
        given = part.t().contiguous().t() if turned and part.dim() == 2 else part
        expected = total.clone().add_(given.float())
        own = total.clone()
        assert add_widened(own, given) is own and torch.equal(own, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_number_of_each_row_is_set(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    room = torch.randn(40, 9).to(dtype)
    rows, places, values = room[:33], torch.randint(0, 9, (33, 1)), torch.randn(33, 1).to(dtype)
    expected = room.clone()
    expected[:33].scatter_(1, places, values)
    _put(rows, places, values)
    assert torch.equal(room, expected)
