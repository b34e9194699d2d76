"""A small file that many hosts change: numbered versions of the whole, each put in place by a hard
link.

    NAME.json                       a copy of the newest version, for people and other programs
    NAME.d/NNNNNNNN.json

The link fails where the number is taken: of two hosts that change the file at once, one tries again
on top of the other's version. No lock is held, so none can be left behind; a process that is killed
at any point leaves the old version or the new one. What a version says, and which one is read, is
its owner's matter.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from trainer.contract.files import NumberedFiles, write_atomically
from trainer.contract.record import Record

T = TypeVar("T")

PATIENCE_SECONDS = 30.0  # with others who change it all the time
_LEFTOVER_SECONDS = 3600.0


class VersionedFile(Record):
    """The versions beside `copy`, of which the last `kept` are kept. Every method raises OSError as
    the file system.

    `is_signed`: no two writers' texts are the same. Then a file system without hard links will do,
    where a reader may see a version unfinished.
    """

    copy: Path
    kept: int
    is_signed: bool = False

    @property
    def folder(self) -> Path:
        """Where the versions are; who puts the first one makes it."""
        return self.copy.with_suffix(".d")

    @property
    def _files(self) -> NumberedFiles:
        return NumberedFiles(self.folder, digits=8)

    def numbers(self) -> list[int]:
        """The numbers of the versions that are there, ascending."""
        return self._files.numbers()

    def file(self, number: int) -> Path:
        """Where one version is, or would be."""
        return self._files.file(number)

    def put(self, number: int, text: str) -> bool:
        """Put a version in place; False when its number is taken."""
        if not self._files.make(number, text.encode(), is_signed=self.is_signed):
            return False
        if self.numbers()[-1] >= number + self.kept:
            # we slept so long that the number was used and tidied away
            self.file(number).unlink(missing_ok=True)
            return False
        return True

    def commit(
        self,
        read: Callable[[], tuple[int, T]],
        change: Callable[[T], T | None],
        text: Callable[[int, T], str],
    ) -> tuple[int, T] | None:
        """Put in place what `change` makes of the newest version, and return it with its number.

        `read` gives the newest version, and its number; `text` is what a file says. `change` may
        run several times, each time another host was faster; where it returns None all stays as it
        is. Without the copy, which is for people, the change counts all the same. Raises
        TimeoutError when others were always faster.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            # before it is read: a version that comes in between must not be passed over
            taken = self.numbers()
            number, value = read()
            made = change(value)
            if made is None:
                return None
            number = max([number, *taken]) + 1  # beyond one that a power cut left empty
            if self.put(number, text(number, made)):
                with suppress(OSError, ValueError):
                    self.publish(read, text)
                self.tidy()
                return number, made
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.folder} was changed by others for {PATIENCE_SECONDS:.0f} s on end"
                )
            time.sleep(0.005 + secrets.randbelow(20) / 1000)

    def publish(self, read: Callable[[], tuple[int, T]], text: Callable[[int, T], str]) -> None:
        """Copy the newest version, and again if a newer one came meanwhile."""
        while True:
            number, value = read()
            write_atomically(self.copy, text(number, value))
            numbers = self.numbers()
            if not numbers or numbers[-1] <= number:
                return

    def tidy(self) -> None:
        """Remove old versions, and drafts of processes that were killed. What cannot be removed is
        left to the next.
        """
        with suppress(OSError):
            self._files.clear(self.kept)
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                if (
                    entry.name.startswith(".")
                    and time.time() - entry.stat().st_mtime > _LEFTOVER_SECONDS
                ):
                    Path(entry.path).unlink(missing_ok=True)
