"""Whose turn it is to act: of all watchdogs of a run, on any number of machines, one at a time.

    state/acting/N.json    the claim of turn N, as in trainer/lease.py: who, where, and whether it is over

A claim is a hard link, of which the file server lets one succeed. A turn that was not given back is over after
`STALE_SECONDS`, by the file server's clock alone; who slept through that finds out before its next effect.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.contract import RunPaths, read_bytes
from trainer.lease import Claim, LeaseFolder

FOLDER = "acting"
STALE_SECONDS = 900.0  # beyond the longest pass: a launch against a controller that is frozen all the while
_TAIL_BYTES = 64


@dataclass(frozen=True)
class Turn:
    """A turn that is ours: `epoch` is its number."""

    folder: LeaseFolder
    epoch: int

    def is_ours(self) -> bool:
        """Whether nobody has taken over since. Raises OSError when that cannot be seen."""
        return self.folder.is_newest(self.epoch)

    def seconds_ahead(self) -> float:
        """How far this machine's clock was ahead of the file server's (behind: below zero) when the turn was taken.

        Raises OSError or ValueError when that cannot be seen.
        """
        path = self.folder.path / f"{self.epoch}.json"
        return float(json.loads(read_bytes(path))["time"]) - path.stat().st_mtime

    def give_back(self) -> None:
        """End the turn; one that cannot be ended is over after a while."""
        with suppress(OSError):
            self.folder.renew(self.epoch, 0, held=False)
            self.folder.clear(self.epoch)


def take_turn(paths: RunPaths, stale_seconds: float = STALE_SECONDS) -> Turn | str:
    """A turn, or in words who has it now. Raises OSError as the file system does."""
    folder = LeaseFolder(paths, FOLDER)
    epoch, content = folder.newest()
    if epoch and _is_held(content):
        age = _age(folder, epoch)
        if age < stale_seconds:
            return f"another watchdog is at work: {_who(content)}, since {age:.0f} s"
    claim = Claim.of_this_process("pulse", 0)
    claim = Claim(**{**claim.__dict__, "epoch": epoch + 1})
    if folder.claim(epoch + 1, claim) and folder.is_newest(epoch + 1):
        return Turn(folder, epoch + 1)
    return "another watchdog has just begun"


def look_freshly(*folders: Path) -> None:
    """Make an NFS client forget what it remembers of these folders: a change that it makes itself does that."""
    for folder in folders:
        probe = folder / f".probe-{secrets.token_hex(6)}"
        with suppress(OSError):  # it is not there, or not ours to write to: then what is listed must do
            probe.touch()
            probe.unlink()


def _age(folder: LeaseFolder, epoch: int) -> float:
    """Seconds since the claim was written, by the clock of the file server, which stamps a new file now."""
    probe = folder.path / f".now-{secrets.token_hex(6)}"
    try:
        probe.touch()
        return probe.stat().st_mtime - (folder.path / f"{epoch}.json").stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


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
        return os.fsdecode(content[:_TAIL_BYTES]) or "nobody has signed"
