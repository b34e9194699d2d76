"""Who may do a thing of which only one may be done at a time, on any number of hosts, without locks.

    state/cron/claims/THING/N.json     the claim of epoch N

The owner of the highest epoch has the thing until it lets go. A claim is made by a hard link to a finished file: the
file server lets exactly one of many succeed. A claim never changes hands; whoever takes over makes the next one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tr11ops.cluster.local_processes import is_alive, mark
from tr11ops.cluster.local_records import ProcessMark
from tr11ops.journal import user_name
from tr11ops.rundir import RunDirectory, make_shared
from trainer.contract import host_name, write_atomically, write_beside
from trainer.state_file import content_of

KEPT_CLAIMS = 4
UNREADABLE_SECONDS = 600.0  # a claim that cannot be read counts as held for so long
TOLERANCE_SECONDS = 600.0  # between two machines' clocks
_NAME = re.compile(r"(\d+)\.json")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


@dataclass(frozen=True)
class Claim:
    """One claim. `process` made it, `child` is what it started, `expires` when others may doubt it (epoch seconds)."""

    token: str
    host: str
    user: str
    time: float
    expires: float
    process: ProcessMark
    child: ProcessMark | None = None
    held: bool = True
    epoch: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_this_process(cls, now: float, seconds: float, token: str = "", **data: Any) -> Claim:
        """A claim in this process's name; it gets its epoch when it is made."""
        return cls(
            token or secrets.token_hex(4), host_name(), user_name(), now, now + seconds, mark(os.getpid()), data=data
        )

    def __str__(self) -> str:
        return f"process {self.process.pid} of {self.user} on {self.host}"

    def is_living(self, now: float) -> bool:
        """Whether its owner may still be at it. On this host the processes are asked, on another the clock is.

        The work of an owner that was killed goes on as long as its child lives, for at most the claim's own time.
        """
        if not self.held or now >= self.expires:
            return False
        if self.is_of_this_host:
            return is_alive(self.process) or is_alive(self.child)
        return self.time <= now + TOLERANCE_SECONDS  # else a clock was set back, and `expires` says nothing

    @property
    def is_of_this_host(self) -> bool:
        return self.host == host_name() and self.process.boot == mark(os.getpid()).boot


class ClaimTaken(Exception):
    """Somebody else has the thing; `owner` is None where he was faster by a moment."""

    def __init__(self, owner: Claim | None) -> None:
        super().__init__(str(owner) if owner is not None else "somebody else, since this moment")
        self.owner = owner


class ClaimFolder:
    """The claims on one thing. Every method raises OSError as the file system does."""

    def __init__(self, directory: RunDirectory, thing: str):
        self.path = directory.paths.state / "cron" / "claims" / thing

    def newest(self) -> Claim | None:
        """The claim of the highest epoch, held or not; None when nobody ever claimed."""
        for _ in range(10):
            epoch = max(self._epochs(), default=0)
            if not epoch:
                return None
            try:
                return _parse(epoch, self._file(epoch))
            except FileNotFoundError:  # others were made since, and this one was removed
                continue
        raise OSError(errno.EAGAIN, "the claims change all the time", str(self.path))

    def acquire(self, now: float, seconds: float) -> Claim:
        """The thing for this process, for so long. Raises ClaimTaken when somebody living has it."""
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
            self._file(claim.epoch).unlink()

    def take(self, claim: Claim, after: Claim | None) -> Claim | None:
        """Make the claim that follows `after`; None when somebody else was faster."""
        made = replace(claim, epoch=(after.epoch if after else 0) + 1)
        make_shared(self.path)
        draft = write_beside(self._file(made.epoch), _text(made))
        try:
            os.link(draft, self._file(made.epoch))
        except FileExistsError:
            # over NFS the answer to a link that succeeded can be lost, and the repetition fails: look whose it is
            if content_of(self._file(made.epoch)) != _text(made).encode():
                return None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if not self._create(made):
                return None
        finally:
            draft.unlink(missing_ok=True)
        for epoch in self._epochs():
            if epoch <= made.epoch - KEPT_CLAIMS:
                with suppress(OSError):  # another user's, in a folder with the sticky bit: it does no harm
                    self._file(epoch).unlink()
        return made

    def write(self, claim: Claim) -> None:
        """Replace one's own claim, to name its child or to let go."""
        write_atomically(self._file(claim.epoch), _text(claim))

    def _create(self, claim: Claim) -> bool:
        """As `take` where there are no hard links: it may be seen unfinished, and then counts as held."""
        try:
            descriptor = os.open(self._file(claim.epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(_text(claim))
        return True

    def _epochs(self) -> list[int]:
        try:
            names = [path.name for path in self.path.iterdir()]
        except FileNotFoundError:
            return []
        return [int(match[1]) for match in map(_NAME.fullmatch, names) if match]

    def _file(self, epoch: int) -> Path:
        return self.path / f"{epoch}.json"


def _text(claim: Claim) -> str:
    return json.dumps(asdict(claim), indent=1, sort_keys=True)


def _parse(epoch: int, path: Path) -> Claim:
    """The claim in a file. One that cannot be read is somebody's, from when it was written and for a while."""
    content = content_of(path)
    try:
        value = json.loads(content)
        known = {entry.name: value[entry.name] for entry in fields(Claim) if entry.name in value}
        process, child = ProcessMark(**known["process"]), known.get("child")
        claim = Claim(**{**known, "process": process, "child": ProcessMark(**child) if child else None, "epoch": epoch})
        return replace(claim, time=float(claim.time), expires=float(claim.expires))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        written = path.stat().st_mtime
        nobody = ProcessMark(0, "gone", "unknown")
        return Claim("", "an unknown host", "?", written, written + UNREADABLE_SECONDS, nobody, epoch=epoch)
