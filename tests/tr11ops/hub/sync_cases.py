"""A run directory with logs, and a synchronisation of it with the test's hub; the clock is the
test's own.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.plugins.faulty_hub import FaultyHub
from tr11ops.hub.base import Repository
from tr11ops.hub.client import Hub
from tr11ops.hub.masking import masked_crc
from tr11ops.hub.sync import sync_once
from tr11ops.hub.sync_files import RunningDigests
from tr11ops.hub.sync_round import SyncOutcome, SyncSettings
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths

REPOSITORY = "bot/logs"
LOG = "logs/main/main_log.txt"
EVENTS = "tensorboard/main/events.out.tfevents.1.host.2.0"
PATTERNS = ("tensorboard/*/*tfevents*", "logs/*/*.txt")


def record(data: bytes) -> bytes:
    """One record of an event file."""
    header = struct.pack("<Q", len(data))
    return (
        header + struct.pack("<I", masked_crc(header)) + data + struct.pack("<I", masked_crc(data))
    )


@dataclass
class Mirror:
    """Where a test writes logs, and how it mirrors them."""

    root: Path
    hub: Hub
    server: FaultyHub
    patterns: tuple[str, ...] = PATTERNS
    status: bytes | None = None
    now: float = field(default_factory=time.time)
    said: list[str] = field(default_factory=list)
    running: RunningDigests = field(default_factory=RunningDigests)

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(RunPaths(self.root, "run", "main"), self.root / "kill-switch")

    @property
    def setting(self) -> SyncSettings:
        return SyncSettings(
            hub=self.hub,
            repository=Repository(REPOSITORY),
            directory=self.directory,
            patterns=self.patterns,
            private=True,
            status=lambda: self.status,
            clock=lambda: self.now,
            say=self.said.append,
        )

    def path(self, name: str) -> Path:
        return self.directory.paths.published / name

    def write(self, name: str, content: bytes) -> None:
        """A file as it is now, just written."""
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_bytes(content)
        self.touch(name)

    def add(self, name: str, content: bytes) -> None:
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        with self.path(name).open("ab") as stream:
            stream.write(content)
        self.touch(name)

    def touch(self, name: str, ago: float = 0.0) -> None:
        """As if it was written so many seconds ago, by the test's clock."""
        moment = int((self.now - ago) * 1e9)
        os.utime(self.path(name), ns=(moment, moment))

    def sync(self, rebuild: bool = False, anew: bool = True) -> SyncOutcome:
        """A round; `anew` is a fresh process, which has hashed nothing yet."""
        return sync_once(self.setting, RunningDigests() if anew else self.running, rebuild)

    def there(self) -> dict[str, bytes]:
        """What is at the hub, without the hub's own file."""
        files = self.server.files(REPOSITORY)
        return {path: content for path, content in files.items() if path != ".gitattributes"}

    def commits(self) -> int:
        """Commits at the hub after its own first one."""
        return len(self.server.history(REPOSITORY)) - 1


def other(mirror: Mirror, hub: Hub) -> Mirror:
    """The same run, mirrored through another edge."""
    return dataclasses.replace(mirror, hub=hub, said=[])  # noqa: TID251 (a dataclass)
