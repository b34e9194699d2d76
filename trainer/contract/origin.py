"""Where the weights of a training came from: the checkpoint of another run that it began with.
Standard library only.

state/checkpoints/VARIANT/origin.json    written by the trainer when it has loaded it; none for random weights

Each checkpoint's cursor holds it too, from which the record is made again where a run directory was
restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import read_record, record_of, write_record
from trainer.contract.files import make_shared
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

ORIGIN_KEY = "origin"  # of a cursor


class BranchOrigin(Record):
    """The checkpoint that a variant's training began with. `run`: NAME/VARIANT, "" where its folder
    is no run's.

    `takes_weights`: its optimizer was left alone. `is_fresh`: all counters began at zero. `time`:
    seconds since the epoch, when attempt `job_id` loaded it. `before`: in words, what that run had
    begun with, nearest first.
    """

    folder: str
    step: int
    run: str
    takes_weights: bool
    is_fresh: bool
    time: float
    job_id: str
    before: tuple[str, ...] = ()

    def __str__(self) -> str:
        """In one line: which checkpoint of which run, and what of it was taken."""
        how = "weights alone" if self.takes_weights else "weights and optimizer"
        counters = ", counters from zero" if self.is_fresh else ""
        return f"{self.name} ({how}{counters})"

    @property
    def lineage(self) -> str:
        """In one line, with what the other run had begun with in its turn."""
        return "; ".join((str(self), *(f"that run with {text}" for text in self.before)))

    @property
    def name(self) -> str:
        """The checkpoint: its run and step, or its path where it is of no run."""
        if self.run:
            return f"{self.run} step {self.step}"
        return str(Path(self.folder) / checkpoint_name(self.step))

    def write(self, paths: RunPaths) -> None:
        """Keep it as the origin of the variant whose paths these are. Raises OSError as the file
        system does.
        """
        make_shared(paths.origin.parent)
        write_record(paths.origin, self)

    @classmethod
    def read(cls, paths: RunPaths) -> BranchOrigin | None:
        """The origin of a variant; None where none is kept. Raises OSError, and ValueError where it
        is malformed.
        """
        return cls.of_file(paths.origin)

    @classmethod
    def of_file(cls, path: Path) -> BranchOrigin | None:
        """As `read`, of the file itself."""
        return read_record(cls, path, "an origin")

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> BranchOrigin | None:
        """The origin from its JSON values; None for what is none."""
        try:
            return record_of(cls, value)
        except ValueError:
            return None


def run_of_checkpoints(folder: Path) -> str:
    """NAME/VARIANT of the run whose checkpoints lie in `folder`; "" where that cannot be told."""
    paths = RunPaths.of_checkpoints(folder)
    if paths is None:
        return ""
    try:
        name = (read_json(paths.run_record) or {}).get("run")
    except (OSError, ValueError):
        return ""
    if isinstance(name, str) and name:
        return f"{name}/{paths.variant}"
    return ""


def lineage_before(folder: Path) -> tuple[str, ...]:
    """What the run whose checkpoints lie in `folder` had begun with, nearest first; empty where
    that is not kept.
    """
    paths = RunPaths.of_checkpoints(folder)
    try:
        if paths is None:
            origin = None
        else:
            origin = BranchOrigin.read(paths)
    except (OSError, ValueError):
        return ()
    if origin is None:
        return ()
    return (origin.name, *origin.before)
