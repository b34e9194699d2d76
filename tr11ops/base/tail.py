"""The last whole lines of a file that may be growing."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.contract.state_file import open_for_reading


def tail_lines(path: Path, size: int) -> tuple[list[str], bool]:
    """The whole lines in the last `size` bytes of a file, and whether these are all of the file's
    lines.

    A line cut by the window, and a last line without its newline (being written), are left out.
    Invalid UTF-8 is replaced. Raises OSError as the file system does.
    """
    with open_for_reading(path) as stream:
        end = stream.seek(0, os.SEEK_END)
        start = max(0, end - size)
        stream.seek(start)
        data = stream.read(end - start)
    whole = data[: data.rfind(b"\n") + 1]
    if start:
        cut = whole.find(b"\n") + 1
        whole = whole[cut:]
    return whole.decode("utf-8", errors="replace").split("\n")[:-1], start == 0
