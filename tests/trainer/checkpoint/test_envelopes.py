"""What is around a tensor's bytes depends on its type and shape alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.checkpoint.save_plan import Envelopes

DESCRIPTOR = b"PK\x07\x08"  # of a zip file; torch's writer looks for it in all that it writes


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("count", [32, 100_000])
def test_memory_that_held_an_archive_makes_no_other(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Envelopes().of(dtype, (count,))
    empty = torch.empty

    def left_over(*arguments: Any, **options: Any) -> Tensor:
        made = empty(*arguments, **options)
        held = bytearray(DESCRIPTOR * (made.nbytes // len(DESCRIPTOR)))
        return made.copy_(torch.frombuffer(held, dtype=dtype).view(made.shape))

    monkeypatch.setattr(torch, "empty", left_over)
    assert Envelopes().of(dtype, (count,)) == before
