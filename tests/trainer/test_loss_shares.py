"""The loss over tensor ranks, against fp64 on one: also where a label's rank has next to none of
the probability.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.trainer.cases import CPU
from tests.trainer.softmax_ways import WAYS, take
from tests.trainer.spawn import run_ranks
from trainer.config.card import ParallelSection
from trainer.model.layers import VocabularyParallelEmbedding
from trainer.model.loss import LanguageModelHead
from trainer.model.matmul import compute_dtype
from trainer.parallel.mesh import Mesh
from trainer.schedule.ends import PIECE_ELEMENTS, SOFTMAX_ELEMENTS

WORDS, HIDDEN, TOKENS = 64, 16, 48
# Of the gradients, relative: twice the unit in the last place, and in fp32 what it makes of logits
# of 300.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, table and labels, in values that `dtype` has. Each fourth label has a logit
    far below the others: its rank has e^-30 of the probability, or e^-300.
    """
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1, TOKENS, HIDDEN, generator=generator)
    table = torch.randn(WORDS, HIDDEN, generator=generator) / 4
    labels = torch.randint(WORDS, (1, TOKENS), generator=generator)
    table[:, 0] = 0.0
    table[: WORDS // 2, 0] = 1.0
    hidden[:, :, 0] = 0.0
    if dtype != torch.float16:  # whose logits end at 65504, and its exponents far before
        hidden[:, ::8, 0], hidden[:, 4::8, 0] = 30.0, 300.0
        labels[:, ::4] = WORDS - 1
    labels[:, 3] = -100
    return hidden.to(dtype), table.to(dtype), labels


def on_ranks() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Loss, and the gradients of hidden states and of this rank's rows: of each dtype, by each way
    to soften.
    """
    mesh = Mesh.create(ParallelSection(tensor=torch.distributed.get_world_size()), CPU)
    return [_computed(mesh, dtype, way) for dtype in BOUNDS for way in WAYS]


def _computed(mesh: Mesh, dtype: torch.dtype, way: str) -> tuple[Tensor, Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        # several pieces, of several strips
        patch.setitem(PIECE_ELEMENTS, "cpu", 20 * WORDS // mesh.tensor)
        patch.setitem(SOFTMAX_ELEMENTS, "cpu", 7 * WORDS // mesh.tensor)
        take(way, patch)
        hidden, table, labels = given(dtype)
        embedding = VocabularyParallelEmbedding(WORDS, HIDDEN, 1.0, mesh).to(dtype)
        first = embedding.first_row
        embedding.weight.data.copy_(table[first : first + len(embedding.weight)])
        head = LanguageModelHead(mesh)
        hidden.requires_grad_()
        found = head.loss(head.attach(embedding, hidden * 1), labels)
        found.backward()
    assert hidden.grad is not None and embedding.weight.grad is not None
    return found.detach(), hidden.grad, embedding.weight.grad


def on_one() -> list[tuple[float, Tensor, Tensor]]:
    """Of each dtype what is expected; on a rank, whose products are those of the others."""
    return [expected(dtype) for dtype in BOUNDS]


def expected(dtype: torch.dtype) -> tuple[float, Tensor, Tensor]:
    """The same in fp64 on one, of logits as this machine rounds them: where it lacks products in
    the dtype, to fp32.
    """
    hidden, table, labels = given(dtype)
    wide, rows = hidden.double().requires_grad_(), table.double().requires_grad_()
    logits = (wide @ rows.t())[0]
    kind = compute_dtype(hidden)
    rounded = logits + ((hidden[0].to(kind) @ table.t().to(kind)).double() - logits).detach()
    found = torch.nn.functional.cross_entropy(rounded, labels[0], ignore_index=-100)
    found.backward()
    assert wide.grad is not None and rows.grad is not None
    return float(found.detach()), wide.grad, rows.grad


def test_loss_and_gradients_over_two_ranks() -> None:
    """Within the rounding of logits and gradients, which are of the dtype; and the ranks agree on
    every bit.
    """
    (references,) = run_ranks(on_one, 1, launch=False)
    first, second = run_ranks(on_ranks, 2)
    cases = [case for case in zip(BOUNDS, references, strict=True) for _ in WAYS]
    for (dtype, (mean, to_hidden, to_rows)), one, other in zip(cases, first, second, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert float(one[0]) == pytest.approx(mean, rel=1e-5), dtype
        for ours, theirs in ((one[1], to_hidden), (torch.cat([one[2], other[2]]), to_rows)):
            assert ours.isfinite().all()
            assert float((ours.double() - theirs).norm()) <= BOUNDS[dtype] * float(theirs.norm()), (
                dtype
            )
