"""What is sent to the hub: bytes, or the first so many bytes of a file that may grow meanwhile."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tr11ops.base.errors import FileChanged
from tr11ops.hub.masking import Mask, Masks


class FileView(io.BufferedIOBase):
    """The first `size` bytes of a file with `masks` over them, readable and seekable.

    Nothing is copied; the file is open until `close`. `told` is called with the position after each read. It has no
    file descriptor for others: they would ask it for the size of a file that has grown since. Raises FileChanged when
    the file became shorter, OSError as the file system.
    """

    def __init__(
        self,
        path: Path,
        size: int | None = None,
        told: Callable[[int], None] | None = None,
        masks: Sequence[Mask] = (),
    ) -> None:
        self._stream = path.open("rb")
        self._path = path
        self._told = told
        self._masks = Masks(masks)
        self._position = 0
        there = os.fstat(self._stream.fileno()).st_size
        self.size = there if size is None else size
        if there < self.size:
            self._stream.close()
            raise FileChanged(f"{path.name}: became shorter")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise ValueError("a position before the beginning")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        self._stream.seek(self._position)
        piece = self._stream.read(wanted)
        if len(piece) < wanted:
            raise FileChanged(f"{self._path.name}: became shorter while it was sent")
        piece = self._masks.over(piece, self._position)
        self._position += len(piece)
        if self._told is not None:
            self._told(self._position)
        return piece

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(size)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
