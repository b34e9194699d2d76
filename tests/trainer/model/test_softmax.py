"""The compiled soft-max of logits: one kernel, no strip in fp32, and rows that depend on nothing
but themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tests.trainer.inductor import QUICK
from trainer.config import kernel_choice
from trainer.model import compiled, loss
from trainer.schedule.ends import SOFTMAX_ELEMENTS

WIDTH, HEIGHT = 96, 8


@pytest.fixture(autouse=True)
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


@pytest.mark.usefixtures("forgotten")
def test_what_each_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(compiled, "compiler_obstacle", lambda kind: None)
    assert loss.softmax_for(torch.device("cpu")) is loss.IN_CACHE
    assert loss.softmax_for(cuda) is loss.COMPILED
    monkeypatch.setattr(compiled, "compiler_obstacle", kernel_choice.compiler_obstacle)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert loss.softmax_for(torch.device("cuda", 1)) is loss.FUSED


@pytest.mark.usefixtures("forgotten")
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
