"""Who may do a thing of which only one may be done at a time, on any number of hosts, without
locks.

    state/cron/claims/THING/N.json     the claim of epoch N

The owner of the highest epoch has the thing until it lets go (see
`trainer/contract/numbered_files.py`). A claim never changes hands; who takes over makes the next
one.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.cluster.local_records import ProcessMark, is_alive, mark
from tr11ops.rundir.journal import user_name
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document, record_of_text
from trainer.contract.errors import Tr11Error
from trainer.contract.files import host_name, write_atomically
from trainer.contract.numbered_files import NumberedFiles
from trainer.contract.record import Finite, Record

KEPT_CLAIMS = 4
UNREADABLE_SECONDS = 600.0  # a claim that cannot be read counts as held for so long
TOLERANCE_SECONDS = 600.0  # between two machines' clocks


class Claim(Record):
    """One claim. `process` made it, `child` is what it started, `expires` when others may doubt it
    (epoch seconds).
    """

    token: str
    host: str
    user: str
    time: Finite
    expires: Finite
    process: ProcessMark
    child: ProcessMark | None = None
    held: bool = True
    epoch: int = 0
    data: Mapping[str, Any] = {}

    @classmethod
    def of_this_process(cls, now: float, seconds: float, token: str = "", **data: Any) -> Claim:
        """A claim in this process's name; it gets its epoch when it is made."""
        return cls(
            token or secrets.token_hex(4),
            host_name(),
            user=user_name(),
            time=now,
            expires=now + seconds,
            process=mark(os.getpid()),
            data=data,
        )

    def __str__(self) -> str:
        return f"process {self.process.pid} of {self.user} on {self.host}"

    def is_living(self, now: float) -> bool:
        """Whether its owner may still be at it. On this host the processes are asked, on another
        the clock is.

        The work of an owner that was killed goes on as long as its child lives, for at most the
        claim's own time.
        """
        if not self.held or now >= self.expires:
            return False
        if self.is_of_this_host:
            return is_alive(self.process) or is_alive(self.child)
        # else a clock was set back, and `expires` says nothing
        return self.time <= now + TOLERANCE_SECONDS

    @property
    def is_of_this_host(self) -> bool:
        return self.host == host_name() and self.process.boot == mark(os.getpid()).boot


class ClaimTaken(Tr11Error):
    """Someone else has the thing; `owner` is None where he was faster by a moment."""

    def __init__(self, owner: Claim | None) -> None:
        super().__init__(str(owner or "someone else, since this moment"))
        self.owner = owner

    @property
    def at_work(self) -> str:
        """Who is at it, and which step of the training it is about, where it is about one."""
        if self.owner is None:
            return "someone else has just begun"
        step = self.owner.data.get("step")
        if step is None:
            return f"{self} is at it"
        return f"{self} is at it (step {step})"


class ClaimFolder:
    """The claims on one thing. Every method raises OSError as the file system does."""

    def __init__(self, directory: RunDirectory, thing: str):
        self._files = NumberedFiles(directory.paths.state / "cron" / "claims" / thing)
        self.path = self._files.path

    def newest(self) -> Claim | None:
        """The claim of the highest epoch, held or not; None when no one ever claimed."""
        epoch, content = self._files.newest()
        if epoch:
            return _parse(epoch, content, self._files.file(epoch))
        return None

    def acquire(self, now: float, seconds: float) -> Claim:
        """The thing for this process, for so long. Raises ClaimTaken when someone living has it."""
        before = self.newest()
        if before is not None and before.is_living(now):
            raise ClaimTaken(before)
        mine = self.take(Claim.of_this_process(now, seconds), before)
        if mine is None:
            raise ClaimTaken(None)
        return mine

    def release(self, claim: Claim) -> None:
        """Let go of one's own claim; on a full disk, which takes no new word, by removing it."""
        try:
            self.write(replace(claim, held=False))
        except OSError:
            self._files.file(claim.epoch).unlink()

    def take(self, claim: Claim, after: Claim | None) -> Claim | None:
        """Make the claim that follows `after`; None when another was faster, or others went on
        while this one slept.
        """
        made = replace(claim, epoch=(after.epoch if after else 0) + 1)
        if not self._files.make(made.epoch, _text(made).encode()) or not self._files.is_newest(
            made.epoch
        ):
            return None
        self._files.clear(KEPT_CLAIMS)
        return made

    def write(self, claim: Claim) -> None:
        """Replace one's own claim, to name its child or to let go."""
        write_atomically(self._files.file(claim.epoch), _text(claim))


def _text(claim: Claim) -> str:
    return json.dumps(document(claim), indent=1, sort_keys=True)


def _parse(epoch: int, content: bytes, path: Path) -> Claim:
    """The claim in a file. One that cannot be read is someone's, from when it was written and for a
    while.
    """
    try:
        return replace(record_of_text(Claim, content), epoch=epoch)
    except ValueError:
        try:
            written = path.stat().st_mtime
        except FileNotFoundError:  # a later one has been made meanwhile
            written = time.time()
        no_one = ProcessMark(0, "gone", "unknown")
        return Claim(
            "",
            "an unknown host",
            user="?",
            time=written,
            expires=written + UNREADABLE_SECONDS,
            process=no_one,
            epoch=epoch,
        )
