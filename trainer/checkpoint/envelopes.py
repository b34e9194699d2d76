"""What `torch.save` puts around the bytes of a tensor, so that a file can be laid out before the bytes are at hand.

DCP stores every chunk as one `torch.save` archive. Head and tail of such an archive depend on dtype and shape alone
as long as no CRC32 of the content is asked for; the manifest's SHA-256 of the whole file is the check here.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from trainer.contract.record import Record

_READ_BYTES = 8  # of what is written to an archive, by torch's writer
_SMALL_BYTES = 64 << 10  # nothing but a tensor's own bytes is written in a piece larger than this


class Envelope(Record):
    """The bytes before and after a tensor's own bytes in its archive."""

    head: bytes
    tail: bytes


class Envelopes:
    """Envelopes by dtype and shape; each is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.dtype, tuple[int, ...]], Envelope] = {}

    def of(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
        """The envelope of a contiguous tensor with at least one element."""
        found = self._made.get((dtype, shape))
        if found is None:
            found = self._made[dtype, shape] = _make(dtype, shape)
        return found


def _make(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    size = math.prod(shape) * dtype.itemsize
    recorder = _Recorder()
    # Uninitialised: of a large tensor one page is touched, since the recorder drops the content unread. But its first
    # bytes are read: content that begins as a descriptor of a zip file does, as freed memory may, gets into the id.
    blank = torch.empty(shape, dtype=dtype)
    blank.view(-1)[:_READ_BYTES].zero_()
    with _without_crc32():
        torch.save(blank, cast(IO[bytes], recorder))
    if size > _SMALL_BYTES:
        assert recorder.dropped == size, f"torch.save wrote {recorder.dropped} bytes for a tensor of {size}"
        return Envelope(recorder.before.getvalue(), recorder.after.getvalue())
    archive = recorder.before.getvalue()
    begin = _content_offset(archive)
    return Envelope(archive[:begin], archive[begin + size :])


def _content_offset(archive: bytes) -> int:
    """Where the tensor's bytes begin in a whole archive: behind the local header of the entry `data/0`."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        [entry] = [info for info in opened.infolist() if info.filename.endswith("/data/0")]
    lengths = archive[entry.header_offset + 26 : entry.header_offset + 30]  # of name and extra field, little-endian
    return entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


class _Recorder(io.RawIOBase):
    """Keeps all that is written except large pieces, of which it only counts the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = io.BytesIO(), io.BytesIO()
        self.dropped = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        with memoryview(data) as view:
            if view.nbytes > _SMALL_BYTES:
                self.dropped += view.nbytes
            else:
                (self.after if self.dropped else self.before).write(view)
            return view.nbytes


@contextmanager
def _without_crc32() -> Generator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
