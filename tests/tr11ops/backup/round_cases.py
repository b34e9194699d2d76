"""A run with small checkpoints, two archives, and a clock that tests set: one object makes rounds
of backup there.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.tr11ops.backup.copy_cases import OddArchive, make_checkpoint
from tr11ops.backup.archives import open_archive
from tr11ops.backup.base import ARCHIVE_RETRIES, Archive
from tr11ops.backup.due import CopyRequest
from tr11ops.backup.round_values import (
    BackupContext,
    Reading,
    RoundRequest,
    RoundResult,
    card_archives,
)
from tr11ops.backup.service import run_round
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.rundir.copies import CopyRecord, read_copies
from tr11ops.rundir.journal import Journal, read_journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.state_file import read_json

CARD = Path(__file__).parents[2] / "data" / "small-card.toml"
NOW = 1.7e9
DAY = 86_400.0
SMALL = {"weights/a": 900, "optimizer/b": 2000, "cursor.json": 30}


class Silent:
    """Progress that no one sees; what is said is kept."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done = 0

    def advance(self, count: int) -> None:
        self.done += count

    def say(self, line: str) -> None:
        self.said.append(line)


class Rounds:
    """One run below `folder`; both archives are folders. `odd`: archives by name that misbehave."""

    def __init__(self, folder: Path, *changes: str) -> None:
        self.folder = folder
        self.now = NOW
        self.stop = threading.Event()
        self.progress = Silent()
        self.odd: dict[str, Any] = {}
        self.store, self.url = folder / "store", folder / "bucket"
        for place in (self.store, self.url):
            place.mkdir(parents=True, exist_ok=True)
        common = (
            "run.directory=run",
            f"backup.store={self.store}", f"backup.url=file://{self.url}", "backup.store_interval=100",
            "backup.full_interval=300", "backup.weights_interval=100", "backup.milestone_percent=0",
        )  # fmt: skip
        self.card: RunCard = load_card(CARD, (*common, *changes), {}, directory=folder)
        self.directory = RunDirectory(self.card.paths, self.card.kill_switch)
        self.checkpoints = self.directory.paths.checkpoints
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def save(self, *steps: int, seed: int = 0, sizes: dict[str, int] | None = None) -> None:
        for step in steps:
            make_checkpoint(self.checkpoints, step, SMALL if sizes is None else sizes, seed)
            (self.checkpoints / "latest").write_text(f"global_step{step}")

    def place(self) -> BackupContext:
        @contextmanager
        def watch(what: str, total: int) -> Iterator[Silent]:
            yield self.progress

        return BackupContext(
            self.card, self.directory, Journal(self.directory.journal), self.progress.say, watch, self.stop,
            lambda: self.now, self.open, replace(ARCHIVE_RETRIES, tries=2, first_seconds=0.0),
        )  # fmt: skip

    def open(self, name: str, card: RunCard) -> Archive:
        archive = open_archive(name, card)
        if name in self.odd:
            made: Archive = OddArchive(archive, **self.odd[name])
            return made
        return archive

    def run(
        self,
        *archives: str,
        steps: tuple[int, ...] = (),
        reading: Reading = "share",
        **changes: Any,
    ) -> RoundResult:
        names = archives or card_archives(self.card)
        return run_round(
            self.place(), RoundRequest(names, CopyRequest(steps), reading=reading, **changes)
        )

    def copies(self) -> tuple[CopyRecord, ...]:
        return read_copies(self.directory)

    def copied(self, archive: str) -> list[tuple[int, str]]:
        """Sound copies on record."""
        return [
            (copy.step, copy.kind)
            for copy in self.copies()
            if copy.archive == archive and copy.is_sound
        ]

    def status(self) -> dict[str, Any]:
        """The content of status.json."""
        value = read_json(self.directory.paths.state / "backup" / "status.json")
        assert value is not None
        return value

    def journal(self, kind: str) -> list[dict[str, Any]]:
        """What entries of a kind say."""
        entries = read_journal(self.directory.journal).entries
        return [dict(entry.data) for entry in entries if entry.kind == kind]

    def far(self, step: int, path: str, archive: str = "store") -> Path:
        """A file of a whole copy at the destination."""
        root = self.store if archive == "store" else self.url
        return root / "checkpoints" / "main" / f"global_step{step}" / path


def flip(path: Path, position: int) -> None:
    """Change one bit of a file, and nothing of its time or size."""
    facts = path.stat()
    with path.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))

    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def receipts_below(folder: Path) -> dict[str, Any]:
    """All receipts of an archive, by their paths."""
    return {
        path.relative_to(folder).as_posix(): json.loads(path.read_text())
        for path in folder.rglob("*.copy.json")
    }
