"""The next micro batch on its way to a GPU while the present one computes: a record of what a
mocked CUDA is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tests.trainer.cases import CPU, batches, tiny
from tests.trainer.spawn import run_ranks
from trainer.contract.errors import DataError
from trainer.data.dataset import NextTokenRow
from trainer.data.prefetch import Batch, BatchesAhead
from trainer.data.stream import SampleStream
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh

GPU = torch.device("cuda", 0)


@dataclass
class FakeCuda:
    """What the side stream, the training's own and their events were asked for, in order."""

    calls: list[str] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "Stream", lambda device: "side")
        patch.setattr(torch.cuda, "stream", self.entered)
        patch.setattr(torch.cuda, "current_stream", lambda device: self)
        patch.setattr(torch.cuda, "Event", lambda: self)
        patch.setattr(
            Tensor, "record_stream", lambda tensor, stream: self.calls.append("kept for main")
        )
        patch.setattr("trainer.data.prefetch._copied", self.copied)

    @contextlib.contextmanager
    def entered(self, stream: str) -> Iterator[None]:
        self.calls.append(f"enter {stream}")
        yield
        self.calls.append(f"leave {stream}")

    def copied(self, part: Tensor, device: torch.device) -> Tensor:
        assert device == GPU and self.calls[-1] in ("enter side", "copy")
        self.calls.append("copy")
        return part.clone()

    def record(self, stream: str) -> None:
        assert stream == "side"
        self.calls.append("record")

    def wait_event(self, event: Any) -> None:
        self.calls.append("wait")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def numbered(count: int, log: list[str], broken: int | None = None) -> Iterator[Batch]:
    for number in range(count):
        if number == broken:
            raise DataError("the samples cannot be read")
        log.append(f"read {number}")
        yield torch.tensor([number]), torch.tensor([-number])


def computed(ahead: BatchesAhead, source: Iterator[Batch], count: int, log: list[str]) -> list[int]:
    """What a stage does: take a batch, launch its forward pass."""
    forward: Callable[[int], None] = ahead.following(lambda number: log.append(f"forward {number}"))
    found = []
    taken = ahead.of(source, count)
    for _ in range(count):
        tokens, labels = next(taken)
        found.append(int(tokens))
        assert int(labels) == -int(tokens)
        forward(int(tokens))
    return found


def test_the_next_is_copied_behind_the_present_forward_pass(cuda: FakeCuda) -> None:
    ahead = BatchesAhead(GPU, True, False)
    assert computed(ahead, numbered(9, cuda.calls), 2, cuda.calls) == [0, 1]
    copy = ["enter side", "copy", "record", "leave side"]
    take = ["wait", "kept for main"]
    assert cuda.calls == ["read 0", *copy, *take, "forward 0", "read 1", *copy, *take, "forward 1"]


def test_nothing_is_read_beyond_a_step(cuda: FakeCuda) -> None:
    """The next step may have another size, or pass samples over: the stream's count is that of what
    was used.
    """
    ahead, source = BatchesAhead(GPU, True, True), SampleStream(Rows(), 2)
    first = [int(tokens[0, 0]) for tokens, _ in ahead.of(source, 3)]
    assert (first, source.state()) == ([0, 2, 4], 6)
    source.resize(1)
    second = [int(tokens[0, 0]) for tokens, _ in ahead.of(source, 2)]
    assert (second, source.state()) == ([6, 7], 8)
    source.skip_to(20)
    assert [int(tokens[0, 0]) for tokens, _ in ahead.of(source, 1)] == [20]
    resumed = SampleStream(Rows(), 1, consumed_samples=source.state())
    assert torch.equal(next(ahead.of(resumed, 1))[0], next(source)[0])


def test_errors_and_the_end_come_in_their_own_turn(cuda: FakeCuda) -> None:
    """Batch 1 cannot be read while batch 0 computes: batch 0 is computed, and the reader's own
    error follows.
    """
    ahead, log = BatchesAhead(GPU, True, True), []
    with pytest.raises(DataError, match="cannot be read"):
        computed(ahead, numbered(3, log, broken=1), 3, log)
    assert log == ["read 0", "forward 0"]
    with pytest.raises(StopIteration):
        computed(ahead, numbered(1, log), 2, log)
    assert log == ["read 0", "forward 0"] * 2
    assert computed(ahead, numbered(2, log), 2, log) == [0, 1]


def test_on_a_processor_the_batches_pass_as_they_are() -> None:
    ahead, log = BatchesAhead(CPU, True, True), []
    source = numbered(2, log)
    assert ahead.of(source, 2) is source and ahead.following(log.append) == log.append
    assert not log


class Rows:
    """Sample n is n, n + 1, n + 2, ..."""

    row = NextTokenRow(4)

    def __len__(self) -> int:
        return 40

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        out[:] = np.arange(index, index + 5)


def losses_with(fake: bool) -> list[float]:
    """Three steps and an evaluation, each stage's batches fetched ahead; to be run by `run_ranks`."""
    with pytest.MonkeyPatch.context() as patch:
        config = tiny(2, 1)
        mesh = Mesh.create(config.parallel, CPU)
        if fake:
            FakeCuda().install(patch)
            ahead = BatchesAhead
            patch.setattr("trainer.engine.BatchesAhead", lambda device, *needs: ahead(GPU, *needs))
        engine = Engine.build(config, mesh)
        losses = [
            engine.train_step(batches(config, mesh, step, size), size).loss
            for step, size in enumerate((8, 16, 16))
        ]
        losses.append(engine.measure(batches(config, mesh, 9, 16), 8).loss)
        engine.close()
    return losses


def test_a_training_is_the_same_with_and_without() -> None:
    assert run_ranks(losses_with, 2, True) == run_ranks(losses_with, 2, False)


def test_a_stage_between_the_first_and_the_last_reads_nothing(cuda: FakeCuda) -> None:
    ahead, log = BatchesAhead(GPU, False, False), []
    ahead.of(numbered(2, log), 2)
    ahead.following(log.append)("forward 0")
    assert log == ["forward 0"] and cuda.calls == []
