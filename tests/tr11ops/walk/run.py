"""One run of the walk: its directory, its card as people change it, and what it has saved."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.lose_it import Case, Kind
from tests.tr11ops.walk.truth import Saved
from tr11ops.checkpoints.catalogue import Catalogue, Clocks, read_catalogue
from trainer.contract.resumable import ResumeNeed


@dataclass
class Run:
    """One run directory. `keys`: what its card has beside that of `Case`; `ranges`: see
    `World.roll_back`.
    """

    number: int
    folder: Path
    kind: Kind
    bucket: ObjectStore | None
    keys: dict[str, str]
    layers: int = 2
    launches: int = 0
    saved: list[Saved] = field(default_factory=list)
    ranges: list[tuple[int, int, frozenset[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.skew = 0.0
        self.case = self._made()

    def set(self, **keys: str) -> None:
        """Change the card; "__" stands for a dot."""
        self.keys.update({name.replace("__", "."): value for name, value in keys.items()})
        self.case = self._made()

    @property
    def changes(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.keys.items()]

    def _made(self) -> Case:
        case = Case(self.folder, self.kind, self.bucket, *self.changes)
        case.now = time.time() + self.skew
        return case

    @property
    def interval(self) -> int:
        """Of the steps that the card wants copied whole."""
        backup = self.case.card.backup
        return backup.full_interval if self.kind == "bucket" else backup.store_interval

    @property
    def address(self) -> str:
        """Of the archive that the card names."""
        backup = self.case.card.backup
        return str(backup.url if self.kind == "bucket" else backup.store)

    @property
    def id(self) -> str:
        path = self.case.directory.paths.state / "run.json"
        return str(json.loads(path.read_text())["id"]) if path.exists() else ""

    def clocks(self) -> Clocks:
        """This host's clock may be wrong; the file server's is right."""
        return Clocks(time.time() + self.skew, time.time())

    def catalogue(self) -> Catalogue:
        return read_catalogue(
            self.case.directory, self.clocks(), need=ResumeNeed.of(self.case.card)
        )

    def steps(self) -> list[int]:
        return self.case.here()
