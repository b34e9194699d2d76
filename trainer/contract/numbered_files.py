"""Files with a number, each made by one of many hosts: claims on something shared, and versions of
a file.

A file is finished beside its place and gets its name by a hard link: the file server lets exactly
one of many succeed, so no lock is needed, and none that a file system may lack is used. The highest
number fences off those below it: who slept while others went on finds out by it. Standard library
only.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.files import make_shared, open_shared
from trainer.contract.state_file import LARGEST_BYTES, content_of

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


@dataclass
class NumberedFiles:
    """The files PREFIX NUMBER SUFFIX of one folder, numbers from 1 on with at least `digits`
    digits.

    Each method is one step; between two, anything may happen. Every method raises OSError as the
    file system does.
    """

    path: Path
    prefix: str = ""
    suffix: str = ".json"
    digits: int = 1

    def __post_init__(self) -> None:
        self._name = re.compile(
            rf"{re.escape(self.prefix)}(\d{{{self.digits},}}){re.escape(self.suffix)}"
        )

    def file(self, number: int) -> Path:
        """Where a number is, or would be."""
        return self.path / f"{self.prefix}{number:0{self.digits}d}{self.suffix}"

    def numbers(self) -> list[int]:
        """The numbers that are there, ascending."""
        try:
            names = os.listdir(self.path)  # noqa: PTH208  a name is enough
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in map(self._name.fullmatch, names) if match)

    def newest(self, most_bytes: int = LARGEST_BYTES) -> tuple[int, bytes]:
        """The highest number and what its file holds; (0, b"") when there is none."""
        for _ in range(10):
            number = max(self.numbers(), default=0)
            if not number:
                return 0, b""
            try:
                return number, content_of(self.file(number), most_bytes)
            except FileNotFoundError:  # others were made since, and this one was removed
                continue
        raise OSError(errno.EAGAIN, "the claims change all the time", str(self.path))

    def make(
        self, number: int, content: bytes, *, is_flushed: bool = True, is_signed: bool = True
    ) -> bool:
        """Make a number; False when another has. The folder is made where there is none.

        `is_signed`: no one else writes the same content, and where the file system has no hard
        links the file may be seen unfinished; else that is an error. `is_flushed`: it survives a
        power cut.
        """
        target = self.file(number)
        make_shared(self.path)
        draft = self.path / f".{target.name}.{secrets.token_hex(6)}"
        try:
            with draft.open("xb") as stream:
                stream.write(content)
                if is_flushed:
                    stream.flush()
                    os.fsync(stream.fileno())
            draft.chmod(0o664)
            os.link(draft, target)
        except FileExistsError:
            # Over NFS the answer to a link that succeeded can be lost, and the repetition fails:
            # look whose it is.
            return draft.stat().st_nlink > 1 or (is_signed and content_of(target) == content)
        except OSError as error:
            if error.errno not in _NO_LINKS or not is_signed:
                raise
            return self._make_without_links(target, content)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _make_without_links(self, target: Path, content: bytes) -> bool:
        try:
            descriptor = open_shared(target, os.O_WRONLY | os.O_EXCL)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        return True

    def is_newest(self, number: int, surely: bool = True) -> bool:
        """Whether the number is there and the highest.

        `surely`: also against what an NFS client remembers of the folder, which a change made by
        this node corrects.
        """
        if surely:
            refresh(self.path)
        return max(self.numbers(), default=0) == number

    def age(self, number: int) -> float:
        """Seconds since the file was written, by the clock of the file server, which stamps a new
        file now.
        """
        with _probe(self.path) as probe:
            return probe.stat().st_mtime - self.file(number).stat().st_mtime

    def clear(self, kept: int) -> None:
        """Remove all but the highest ones. What cannot be removed harms no one: the highest counts."""
        for number in self.numbers()[:-kept]:
            # another user's, in a folder with the sticky bit, or a folder of that name
            with suppress(OSError):
                self.file(number).unlink(missing_ok=True)


def refresh(folder: Path) -> None:
    """Make an NFS client forget what it remembers of a folder: a change that it makes itself does
    that.
    """
    # a full disk, or not ours to write to: then what is listed must do
    with suppress(OSError), _probe(folder):
        pass


@contextmanager
def _probe(folder: Path) -> Iterator[Path]:
    """A new file that is there for a moment."""
    probe = folder / f".probe-{secrets.token_hex(6)}"
    try:
        probe.touch()
        yield probe
    finally:
        probe.unlink(missing_ok=True)
