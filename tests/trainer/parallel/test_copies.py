"""Tied and replicated parameters stay equal, bit for bit, also where gradients are summed over
three replicas or more.

Two replicas prove nothing: a sum of two numbers has one order.
"""

from __future__ import annotations

import pytest

from tests.trainer.cases import tiny, train
from tests.trainer.spawn import run_ranks


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_copies_stay_equal_over_three_replicas(dtype: str) -> None:
    card = tiny(2, 1, dtype, hidden_size=36)
    sizes = (12,) * 6
    batch = card.batch.model_copy(update={"global_batch_size": 12})
    (reference,) = run_ranks(
        train, 1, tiny(dtype=dtype, hidden_size=36).model_copy(update={"batch": batch}), sizes
    )
    for rank in run_ranks(train, 6, card.model_copy(update={"batch": batch}), sizes):
        assert rank.disagreements == []
        assert rank.losses == pytest.approx(reference.losses, abs=2e-6 if dtype == "fp32" else 2e-3)
