"""The loss: its compiled soft-max is one kernel, without a strip in fp32, of rows that depend on nothing but
themselves; and that of a model of 1.7 billion parameters is counted on meta tensors: operations, bytes
moved, peak, host syncs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.distributed import ProcessGroup

from tests.trainer.counting import Counts
from tests.trainer.inductor import QUICK
from tests.trainer.softmax_ways import COUNTED, take
from trainer.config import kernel_choice
from trainer.model import compiled, loss
from trainer.model.layers import VocabularyParallelEmbedding
from trainer.model.loss import FUSED, LanguageModelHead, Softmax
from trainer.parallel import comm
from trainer.parallel.mesh import Mesh
from trainer.schedule.flops import PIECE_ELEMENTS, SOFTMAX_ELEMENTS

WIDTH, HEIGHT = 96, 8


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(SOFTMAX_ELEMENTS, "cpu", HEIGHT * WIDTH)
    torch._dynamo.reset()
    loss.compiled_softening.cache_clear()
    with torch._inductor.config.patch(QUICK):
        yield
    loss.compiled_softening.cache_clear()
    torch._dynamo.reset()


def softened(way: loss.Softmax, logits: Tensor, replaces: bool = True) -> tuple[Tensor, Tensor]:
    """Log-sum-exps and what is left of the logits, of strips with rows behind them that are not
    numbers.
    """
    room = torch.full((way.rows(len(logits), WIDTH, "cpu"), WIDTH), torch.nan, dtype=logits.dtype)
    room[: len(logits)] = logits
    local = torch.zeros(len(logits), 1, dtype=torch.long)
    sums = way.softened(room, local, logits.gather(1, local).float(), replaces)
    return sums, room[: len(logits)]


@pytest.mark.usefixtures("small_strips")
def test_one_kernel_and_a_row_depends_on_itself_alone() -> None:
    logits = (6 * torch.randn(19, WIDTH, generator=torch.Generator().manual_seed(1))).bfloat16()
    logits[3] -= 200
    code = run_and_get_code(loss.compiled_softening(), logits[:HEIGHT].clone(), True)[1]
    assert len(code) == 1
    body = code[0].rpartition("def call(")[2]
    assert len(re.findall(r"cpp_fused\w*\(", body)) == 1
    made = re.findall(r"empty_strided\w*\(\((\d+), (\d+)\)", body)
    assert made and all(shape == (str(HEIGHT), "1") for shape in made), (
        "nothing of a strip's size is made"
    )

    sums, left = softened(loss.COMPILED, logits)
    exact = logits.double()
    torch.testing.assert_close(
        sums.double(), exact.logsumexp(1, keepdim=True), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(left.double(), exact.softmax(1), rtol=2.0**-8, atol=1e-30)
    for begin, end in ((0, 5), (5, 19), (18, 19)):
        some_sums, some_left = softened(loss.COMPILED, logits[begin:end])
        assert torch.equal(some_sums, sums[begin:end]) and torch.equal(some_left, left[begin:end])
    quiet, _ = softened(loss.COMPILED, logits, replaces=False)
    assert torch.equal(quiet, sums), "an evaluation's losses are those of the training, bit for bit"


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was found of a device is forgotten before and behind a test."""
    loss.softmax_for.cache_clear()
    yield
    loss.softmax_for.cache_clear()


@pytest.mark.usefixtures("small_strips", "forgotten")
def test_what_each_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(compiled, "compiler_obstacle", lambda kind: None)
    assert loss.softmax_for(torch.device("cpu")) is loss.IN_CACHE
    assert loss.softmax_for(cuda) is loss.COMPILED
    monkeypatch.setattr(compiled, "compiler_obstacle", kernel_choice.compiler_obstacle)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert loss.softmax_for(torch.device("cuda", 1)) is loss.FUSED


@pytest.mark.usefixtures("small_strips", "forgotten")
def test_no_micro_batch_looks_for_a_compiler_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through all of PATH, which may be on a shared file system that hangs; and one that is gone
    meanwhile would change how a training rounds.
    """
    looked: list[str] = []

    def look(kind: str) -> str | None:
        looked.append(kind)
        return None if len(looked) == 1 else "it is gone"

    monkeypatch.setattr(compiled, "compiler_obstacle", look)
    ways = [loss.softmax_for(torch.device("cuda", 0)) for _ in range(3)]
    assert ways == [loss.COMPILED] * 3 and looked == ["cuda"]


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
