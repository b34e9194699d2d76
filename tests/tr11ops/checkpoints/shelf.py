"""A run directory with small real checkpoints, copies on record and whatever else speaks for
keeping one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.checkpoints.catalogue import Catalogue, Clocks, read_catalogue
from tr11ops.checkpoints.prune import Pruner
from tr11ops.checkpoints.retention import RetentionPolicy
from tr11ops.runcard.watching import BackupSection
from tr11ops.rundir.checkpoint_pins import pin
from tr11ops.rundir.copies import CopyRecord, Kind, identity_of, location_of, write_copy
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import SUPERSEDED_SUFFIX, checkpoint_name, checkpoint_steps
from trainer.contract.files import write_atomically
from trainer.contract.manifest import FileEntry, Manifest, file_digest
from trainer.contract.paths import RunPaths
from trainer.contract.replacing import free_name

NOW = 1_795_289_822.25
DAY = 86400.0
STORE, URL = "/archive", "gs://bucket/run"
FILES = ("weights/a.bin", "weights/b.bin", "optimizer/a.bin", "cursor.json")


def policy(**changes: Any) -> RetentionPolicy:
    """Keeps the newest two; every 1000th goes to the store; no milestones, no url."""
    copies = BackupSection(store="/archive", milestone_percent=0)
    whole = RetentionPolicy(2, 0, 100_000, copies, {"store": STORE, "url": URL})
    return replace(whole, **changes)


def all_seen(copies: Iterable[CopyRecord], clocks: Clocks) -> dict[tuple[str, str], str]:
    """Every copy is where its record says."""
    return {}


class Shelf:
    """The checkpoints of one run below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.directory = RunDirectory(
            RunPaths(folder / "run", "small", "main"), folder / "run" / "kill-switch"
        )
        self.folder = self.directory.paths.checkpoints
        self.folder.mkdir(parents=True)

    def save(self, *steps: int, size: int = 64) -> None:
        """Whole checkpoints, the last of which `latest` names."""
        for step in steps:
            place = self.folder / checkpoint_name(step)
            for name in FILES:
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_bytes(os.urandom(size))
            self.write_manifest(step)
            write_atomically(self.folder / "latest", checkpoint_name(step))

    def write_manifest(self, step: int, /, **changes: Any) -> None:
        place = self.folder / checkpoint_name(step)
        entries = changes.get("files") or tuple(
            FileEntry(name, (place / name).stat().st_size, file_digest(place / name))
            for name in FILES
        )
        values: dict[str, Any] = {
            "step": step, "consumed_samples": step, "consumed_tokens": 16 * step, "files": entries,
            "topology": {"tensor": 4, "pipeline": 12, "data": 8}, "model": {}, "run_card_hash": "h", "created": NOW,
        }  # fmt: skip
        Manifest(**{**values, **changes}).write(place)

    def without_optimizer(self, step: int) -> None:
        """Make it one of weights alone, as `checkpoint.save_optimizer = false` saves it."""
        place = self.folder / checkpoint_name(step)
        kept = tuple(name for name in FILES if not name.startswith("optimizer/"))
        files = tuple(
            FileEntry(name, (place / name).stat().st_size, file_digest(place / name))
            for name in kept
        )
        self.write_manifest(step, files=files)

    def half(self, step: int, age: float = 2 * DAY) -> Path:
        """A save that did not end, last written to so long ago."""
        place = self.folder / checkpoint_name(step)
        (place / "weights").mkdir(parents=True)
        (place / "weights" / "a.bin").write_bytes(b"half")
        for path in (place / "weights" / "a.bin", place / "weights", place):
            os.utime(path, (NOW - age, NOW - age))
        return place

    def discard(self, step: int) -> Path:
        """What a roll-back leaves."""
        home = self.folder / checkpoint_name(step)
        return home.rename(home.with_name(f"{home.name}.discarded"))

    def supersede(self, step: int) -> Path:
        """What a save of the same step leaves of the older one; `latest` names the new one then."""
        home = self.folder / checkpoint_name(step)
        quarantined = home.rename(free_name(self.folder, f"{home.name}{SUPERSEDED_SUFFIX}"))
        self.save(step)
        return quarantined

    def pin(self, step: int) -> None:
        pin(self.directory, step, "ana", "", NOW)

    def hidden(self) -> set[str]:
        return {name for name in self.names() if name.startswith(".")}

    def copy(
        self, step: int, kind: Kind = "full", archive: str = "store", **changes: Any
    ) -> CopyRecord:
        place = self.folder / checkpoint_name(step)
        record = CopyRecord(
            archive, STORE if archive == "store" else URL, step, kind, identity_of(place),
            location_of(kind, self.directory.paths.variant, step), "files", len(FILES), 256, NOW, NOW,
        )  # fmt: skip
        record = replace(record, **changes)
        write_copy(self.directory, record)
        return record

    # ------------------------------------------------------------------ what is there
    def steps(self) -> list[int]:
        return checkpoint_steps(self.folder)

    def names(self) -> set[str]:
        return {entry.name for entry in os.scandir(self.folder)}

    def prints(self, steps: Iterable[int]) -> dict[str, str]:
        """A digest of every file of these checkpoints."""
        return {
            str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for step in steps
            for path in (self.folder / checkpoint_name(step)).rglob("*")
            if path.is_file()
        }

    def assert_whole(self) -> None:
        """Nothing that bears a checkpoint's name lacks a file."""
        for step in self.steps():
            place = self.folder / checkpoint_name(step)
            missing = [name for name in (*FILES, "manifest.json") if not (place / name).is_file()]
            assert not missing, f"{place.name} is half a checkpoint: {missing}"

    # ------------------------------------------------------------------ looking and pruning
    def catalogue(self, **changes: Any) -> Catalogue:
        return read_catalogue(self.directory, Clocks(NOW, NOW), **changes)

    def pruner(self, **changes: Any) -> Pruner:
        values: dict[str, Any] = {"look_at_clocks": lambda folder: Clocks(NOW, NOW)}
        return Pruner(
            self.directory,
            changes.pop("policy", policy()),
            "ana",
            changes.pop("sight", all_seen),
            **{**values, **changes},
        )
