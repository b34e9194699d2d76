"""Page-locked staging, with the driver mocked: its exact size, its release, and that nothing reads it too early."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.checkpoint.synthetic import Model, Shape, state
from trainer.checkpoint import files, writer
from trainer.checkpoint.staging import Staging
from trainer.checkpoint.store import CheckpointInfo, Extras
from trainer.checkpoint.writer import AsyncSaver, Finished

SHAPE = Shape()
EXTRAS = Extras({"consumed_samples": 1, "consumed_tokens": 1})


class Driver:
    """`torch.cuda.cudart()` and the current stream; `events` is what happened, in order."""

    def __init__(self, status: int = 0):
        self.status = status
        self.events: list[str] = []
        self.locked: dict[int, int] = {}
        self.error_pending = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        if self.status == 0:
            self.locked[address] = size
        else:
            self.error_pending = True
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]

    def launch(self) -> None:
        """A kernel: torch raises, once, what an earlier call has left."""
        pending, self.error_pending = self.error_pending, False
        if pending:
            raise RuntimeError("CUDA error: out of memory")

    def synchronize(self) -> None:
        self.events.append("synchronize")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    mock = Driver()
    monkeypatch.setattr("torch.cuda.cudart", lambda: mock)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: mock)
    monkeypatch.setattr("trainer.checkpoint.staging._launch", mock.launch)
    return mock


def test_as_much_is_locked_as_is_needed(driver: Driver) -> None:
    """Not the next power of two, and nothing is kept."""
    size = 3 * files.ALIGNMENT
    staging = Staging(size, on_gpu=True)
    assert driver.locked == {staging.memory.data_ptr(): size}
    staging.release()
    assert driver.locked == {}
    forgotten = Staging(size, on_gpu=True)
    assert len(driver.locked) == 1
    del forgotten
    assert driver.locked == {}
    assert len(Staging(0, on_gpu=True).memory) == 0
    Staging(size, on_gpu=False).settle()
    assert driver.locked == {} and driver.events == []


def test_torch_sees_that_the_memory_is_locked(driver: Driver) -> None:
    """It asks about the first byte of a view's storage; the locked range is the storage, in whole pages."""
    staging = Staging(3 * files.ALIGNMENT, on_gpu=True)
    storage = staging.memory[files.ALIGNMENT :].untyped_storage()
    assert driver.locked == {storage.data_ptr(): storage.nbytes()}
    assert storage.data_ptr() % files.ALIGNMENT == 0 and storage.nbytes() == 3 * files.ALIGNMENT


def test_a_refused_lock_leaves_no_error_for_the_next_kernel(driver: Driver) -> None:
    driver.status = 2
    with pytest.raises(RuntimeError, match="the driver locks no"):
        Staging(4000, on_gpu=True)
    driver.launch()


def test_a_driver_that_locks_nothing_makes_the_save_synchronous(
    driver: Driver, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.status = 2
    monkeypatch.setattr(writer, "_lies_on_gpu", lambda parts: True)
    said: list[str] = []
    saver = AsyncSaver(memory, said.append)
    saver.start(1, state(Model(2, 64, 64), SHAPE, 0, 1), EXTRAS, CheckpointInfo({}, {}))
    assert isinstance(saver.wait()[0], Finished) and "could not allocate the memory" in said[0]


def test_staging_is_settled_before_it_is_read(driver: Driver, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from a GPU are not awaited one by one: the writer must not begin before the stream has done them all."""
    copy, write = files.copy_bytes, writer._write

    def copied(target: torch.Tensor, source: files.Bytes) -> None:
        driver.events.append("copy")
        copy(target, source)

    def written(partial: Path, images: Mapping[str, torch.Tensor], small: Any) -> Any:
        driver.events.append("write")
        return write(partial, images, small)

    monkeypatch.setattr(files, "copy_bytes", copied)
    monkeypatch.setattr(writer, "_write", written)
    monkeypatch.setattr(writer, "_lies_on_gpu", lambda parts: True)
    saver = AsyncSaver(memory, pytest.fail)
    saver.start(1, state(Model(2, 64, 64), SHAPE, 0, 1), EXTRAS, CheckpointInfo({}, {}))
    assert isinstance(saver.wait()[0], Finished)
    saver.close()
    place = driver.events.index("synchronize")
    assert place > 0 and set(driver.events[:place]) == {"copy"} and driver.events[place + 1] == "write"
    assert driver.locked == {}
