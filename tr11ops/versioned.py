"""A small file that many hosts change: numbered versions of the whole, each put in place by a hard link.

    NAME.json                       a copy of the newest version, for people and other programs
    NAME.d/NNNNNNNN.json

The link fails where the number is taken: of two hosts that change the file at once, one tries again on top of the
other's version. No lock is held, so none can be left behind; a process that is killed at any point leaves the old
version or the new one. What a version says, and which one is read, is its owner's matter.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.contract import write_atomically, write_beside

_LEFTOVER_SECONDS = 3600.0
_VERSION = re.compile(r"(\d{8,})\.json")


@dataclass(frozen=True)
class VersionedFile:
    """The versions beside `copy`, of which the last `kept` are kept. Every method raises OSError as the file system."""

    copy: Path
    kept: int

    @property
    def folder(self) -> Path:
        """Where the versions are; who puts the first one makes it."""
        return self.copy.with_suffix(".d")

    def numbers(self) -> list[int]:
        """The numbers of the versions that are there, ascending."""
        try:
            names = os.listdir(self.folder)  # noqa: PTH208  a name is enough
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in map(_VERSION.fullmatch, names) if match)

    def file(self, number: int) -> Path:
        """Where one version is, or would be."""
        return self.folder / f"{number:08d}.json"

    def put(self, number: int, text: str) -> bool:
        """Put a version in place; False when its number is taken."""
        target = self.file(number)
        draft = write_beside(target, text)
        try:
            try:
                target.hardlink_to(draft)
            except FileExistsError:
                if draft.stat().st_nlink < 2:  # else our own link was made, and its answer lost on the network
                    return False
        finally:
            draft.unlink(missing_ok=True)
        if self.numbers()[-1] >= number + self.kept:
            target.unlink(missing_ok=True)  # we slept so long that the number was used and tidied away
            return False
        return True

    def publish(self, newest: Callable[[], tuple[int, str]]) -> None:
        """Copy the newest version (number and text), and again if a newer one came meanwhile."""
        while True:
            number, text = newest()
            write_atomically(self.copy, text)
            numbers = self.numbers()
            if not numbers or numbers[-1] <= number:
                return

    def tidy(self) -> None:
        """Remove old versions, and drafts of processes that were killed. What cannot be removed is left to the next."""
        for number in self.numbers()[: -self.kept]:
            with suppress(OSError):
                self.file(number).unlink()
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                if entry.name.startswith(".") and time.time() - entry.stat().st_mtime > _LEFTOVER_SECONDS:
                    Path(entry.path).unlink(missing_ok=True)
