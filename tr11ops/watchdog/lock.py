"""Whose turn it is to act: of all watchdogs of a run, on any number of machines, one at a time.

    state/acting/N.json    the claim of turn N, as in trainer/contract/lease.py: who, where, and whether it is over

A turn that was not given back is over after `STALE_SECONDS`, by the file server's clock alone; who slept through that
finds out before its next effect.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from msgspec.structs import replace

from tr11ops.base.units import duration
from trainer.contract.lease import KEPT_CLAIMS, LeaseClaim, LeaseFolder
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.state_file import read_bytes

FOLDER = "acting"
STALE_SECONDS = 900.0  # beyond the longest pass: a launch against a controller that is frozen all the while
_TAIL_BYTES = 64


class WatchdogLock(Record):
    """A turn that is ours: `epoch` is its number."""

    folder: LeaseFolder
    epoch: int

    def is_ours(self) -> bool:
        """Whether no one has taken over since. Raises OSError when that cannot be seen."""
        return self.folder.is_newest(self.epoch)

    def seconds_ahead(self) -> float:
        """How far this machine's clock was ahead of the file server's (behind: below zero) when the turn was taken.

        Raises OSError or ValueError when that cannot be seen.
        """
        path = self.folder.file(self.epoch)
        return float(json.loads(read_bytes(path))["time"]) - path.stat().st_mtime

    def release(self) -> None:
        """End the turn; one that cannot be ended is over after a while."""
        with suppress(OSError):
            self.folder.renew(self.epoch, 0, held=False)
            self.folder.clear(KEPT_CLAIMS)


def acquire_lock(paths: RunPaths) -> WatchdogLock | str:
    """A turn, or in words who has it now. Raises OSError as the file system does."""
    folder = LeaseFolder(paths, FOLDER)
    epoch, content = folder.newest()
    if epoch and _is_held(content):
        age = folder.age(epoch)
        if age < STALE_SECONDS:
            return f"another watchdog is at work: {_who(content)}, since {duration(age)}"
    claim = LeaseClaim.of_this_process("pulse", 0)
    claim = replace(claim, epoch=epoch + 1)
    if folder.claim(epoch + 1, claim) and folder.is_newest(epoch + 1):
        return WatchdogLock(folder, epoch + 1)
    return "another watchdog has just begun"


def _is_held(content: bytes) -> bool:
    """Whether a claim's owner has not given it back; one that cannot be read yet is being written."""
    try:
        return bool(json.loads(content)["held"])
    except (ValueError, KeyError, TypeError):
        return True


def _who(content: bytes) -> str:
    try:
        value = json.loads(content)
        return f"{value['user']} on {value['host']}, process {value['pid']}"
    except (ValueError, KeyError, TypeError):
        return os.fsdecode(content[:_TAIL_BYTES]) or "no one has signed"
