"""The gradient that the optimizer is given is the sum of the micro batches' gradients, in every
topology.

bf16 cards: each micro batch's gradient is a bf16 tensor, and their sum is fp32 from the first
addition to the optimizer. The reference is the same sum in fp64. An fp32 sum of n terms is off by
at most n x 2^-24 x the sum of their sizes, in whichever order ranks and micro batches are added;
dividing by 1, 2 or 4 replicas is exact. So the bound is 1 in that unit, for each element. Rounding
the sum to bf16 anywhere on the way is off by 2^-9: thousands of units.
"""

from __future__ import annotations

from tests.trainer.cases import tiny
from tests.trainer.gradients import each, worst
from tests.trainer.spawn import run_ranks

# pipeline x tensor; the rest of four ranks are replicas
FOUR = [(4, 1), (1, 4), (2, 2), (2, 1), (1, 2), (1, 1)]


def test_the_optimizer_gets_the_fp32_sum_of_the_micro_batches() -> None:
    """One micro batch a replica, and three. Eight ranks, with all three axes:
    `test_collectives.py`.
    """
    cards = [tiny(pipeline, tensor, "bf16", clip=0.0, layers=6) for pipeline, tensor in FOUR]
    ranks = run_ranks(each, 4, cards, (1, 3))
    found = {
        (shape, index): worst([rank[number][index] for rank in ranks])
        for number, shape in enumerate(FOUR)
        for index in range(2)
    }
    assert {key: value for key, value in found.items() if value[0] > 1.0} == {}
