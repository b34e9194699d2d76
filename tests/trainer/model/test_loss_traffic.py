"""The loss of a model of 1.7 billion parameters, counted on meta tensors: operations, bytes moved,
peak, host syncs.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch.distributed import ProcessGroup

from tests.trainer.counting import Counts
from tests.trainer.softmax_ways import COUNTED, take
from trainer.model import loss
from trainer.model.layers import VocabularyParallelEmbedding
from trainer.model.loss import FUSED, LanguageModelHead, Softmax
from trainer.parallel import comm
from trainer.parallel.mesh import Mesh
from trainer.schedule.ends import PIECE_ELEMENTS, SOFTMAX_ELEMENTS

META = torch.device("meta")
WORDS, HIDDEN, SAMPLES, LENGTH = 250_880, 2048, 4, 2048
LOGITS, TABLE, STREAM = SAMPLES * LENGTH * WORDS, WORDS * HIDDEN, SAMPLES * LENGTH * HIDDEN
STRIP = SOFTMAX_ELEMENTS["cuda"] // WORDS
STRIPS = -(-SAMPLES * LENGTH // STRIP)
UNSEEN = (STRIPS * STRIP - SAMPLES * LENGTH) * WORDS  # what fills the last strip
SMALL = 50 * SAMPLES * LENGTH * 8  # statistics, labels: some numbers for each token


def counted(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, parts: int = 1, way: Softmax = COUNTED
) -> Counts:
    """One micro batch's loss, forward and backward, in the pieces of a GPU, on one of `parts`
    tensor ranks.

    What these exchange is left out: some numbers for each token, and the hidden states' gradient.
    """
    take(way, monkeypatch)
    for sizes in (PIECE_ELEMENTS, SOFTMAX_ELEMENTS):
        monkeypatch.setitem(sizes, "meta", sizes["cuda"])
    mesh = Mesh.single(META)
    embedding = VocabularyParallelEmbedding(WORDS // parts, HIDDEN, 1.0, mesh).to(dtype)
    hidden = torch.empty(SAMPLES, LENGTH, HIDDEN, dtype=dtype, device=META, requires_grad=True)
    labels = torch.empty(SAMPLES, LENGTH, dtype=torch.long, device=META)
    head = LanguageModelHead(mesh)
    if parts > 1:
        head.group = cast(ProcessGroup, object())  # asked for nothing below
        monkeypatch.setattr(
            loss, "_exchange", lambda normaliser, target, _: (normaliser + 1.0, target)
        )
        monkeypatch.setattr(comm, "start_all_reduce", lambda gradient, _: lambda: gradient)
    with Counts() as counts:
        head.loss(head.attach(embedding, hidden), labels).backward()
    return counts


def test_each_logit_is_read_once_and_written_once_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiled kernel (2 + 2). The weight's gradient is made once and scaled once."""
    counts = counted(torch.bfloat16, monkeypatch)
    assert 0 <= counts.total_bytes - 4 * (LOGITS + UNSEEN) - 4 * TABLE < 16 * STREAM + SMALL
    assert counts.operations["soften"] == STRIPS
    assert counts.operations["mm"] == 3
    assert counts.product_flops == 3 * 2 * STREAM * WORDS
    assert counts.host_syncs == 0


def test_each_logit_moves_twenty_bytes_in_bf16_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bf16 to fp32 (2 + 4), soft-max (4 + 4), gradient (4 + 2)."""
    counts = counted(torch.bfloat16, monkeypatch, way=FUSED)
    assert 0 <= counts.total_bytes - 20 * LOGITS - 4 * TABLE < 16 * STREAM + SMALL
    assert counts.total_bytes < 141.1e9 / 3  # what the loss moved when it was summed over pieces
    assert counts.operations["mm"] == 3
    assert counts.product_flops == 3 * 2 * STREAM * WORDS
    assert counts.host_syncs == 0


def test_in_fp32_each_logit_moves_eight_bytes_and_sixteen_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for way, each in ((COUNTED, 8 * (LOGITS + UNSEEN)), (FUSED, 16 * LOGITS)):
        counts = counted(torch.float32, monkeypatch, way=way)
        assert 0 <= counts.total_bytes - each - 8 * TABLE < 32 * STREAM + SMALL
        assert (counts.operations["mm"], counts.host_syncs) == (3, 0)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_tensor_rank_moves_its_part_of_the_same_bytes(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass more over its logits than one rank alone makes, and no third product more."""
    counts = counted(torch.bfloat16, monkeypatch, parts, FUSED)
    assert 0 <= counts.total_bytes - (20 * LOGITS + 4 * TABLE) // parts < 34 * STREAM + 2 * SMALL
    # of eight, the hidden states weigh as much
    assert counts.total_bytes < 141.1e9 / 3 / parts or parts > 2
    assert (counts.operations["mm"], counts.host_syncs) == (3, 0)
    most = (
        (2 * LOGITS + 2 * TABLE) // parts
        + 2 * 4 * SOFTMAX_ELEMENTS["cuda"]
        + 3 * 2 * STREAM
        + 2 * SMALL
    )
    assert counts.peak < most


def test_the_logits_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside them: gradients of weight and hidden states; without a compiler also strips of the
    soft-max in fp32.
    """
    held = 2 * LOGITS + 2 * TABLE
    most = held + 2 * UNSEEN + 3 * 2 * STREAM + SMALL
    assert held < counted(torch.bfloat16, monkeypatch).peak < most
    strips = 2 * 4 * SOFTMAX_ELEMENTS["cuda"]
    assert (
        held
        < counted(torch.bfloat16, monkeypatch, way=FUSED).peak
        < held + strips + 3 * 2 * STREAM + SMALL
    )


def test_two_devices_in_one_operation_are_refused() -> None:
    with pytest.raises(ValueError, match="mixes tensors of cpu and meta"), Counts():
        torch.stack([torch.empty(2, device=META)]).add_(torch.ones(2))
