"""Sums in fp32 of bf16 numbers: the bits of torch's own, in strips or not."""

from __future__ import annotations

import pytest
import torch

from trainer.model.loss import _put
from trainer.parallel.widened import add_widened
from trainer.schedule.ends import WIDENED_ELEMENTS


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
