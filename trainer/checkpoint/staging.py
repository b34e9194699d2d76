"""Host memory for the copy of a checkpoint, page-locked where it is copied to from a GPU.

Torch's own pinned memory is rounded up to a power of two (33 GiB become 64) and kept when it is freed. So plain memory
of the very size is registered with the driver, and given back with the copy.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.files import aligned_buffer


class Staging:
    """`size` bytes in `memory`, aligned for files. `on_gpu`: what is copied lies on a GPU.

    Raises MemoryError or RuntimeError when there is no such memory, or the driver does not lock it.
    """

    def __init__(self, size: int, on_gpu: bool):
        self.memory = aligned_buffer(size)
        self.on_gpu = on_gpu
        self._release: weakref.finalize | None = None
        if on_gpu and size:
            driver = torch.cuda.cudart()
            _lock(driver, self.memory)
            self._release = weakref.finalize(self, _unlock, driver, self.memory)
            self._release.atexit = False  # the process takes its locks along

    def settle(self) -> None:
        """Wait until all that was copied from the GPU has arrived: before anyone reads the memory."""
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()

    def release(self) -> None:
        """Unlock the memory; it is freed with its last view."""
        if self._release is not None:
            self._release()


def _lock(driver: Any, memory: Tensor) -> None:
    status = driver.cudaHostRegister(memory.data_ptr(), len(memory), 0)
    if int(status) != 0:
        with suppress(RuntimeError):  # the refusal itself: it stays pending, and torch raises it at its next kernel
            _launch()
        raise RuntimeError(f"the driver locks no {len(memory):,} bytes of host memory (cudaHostRegister: {status})")


def _launch() -> None:
    torch.ones((), device=torch.device("cuda", torch.cuda.current_device()))


def _unlock(driver: Any, memory: Tensor) -> None:
    driver.cudaHostUnregister(memory.data_ptr())
