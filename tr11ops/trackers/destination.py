"""What a tracker has to be able to do, and which there are. Each lives in a module of its own, which
imports its library only when it is opened.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from tr11ops.base.errors import WrongUsage
from tr11ops.base.installed import require
from tr11ops.trackers.points import Point
from trainer.contract.record import Record

ONLINE = "online"  # the place of a tracker that sends at once to its own server
Again = Literal["replaced", "skipped"]


class TrackedRun(Record):
    """The run as a tracker knows it. `place` is a folder or an address; `key` the same for every
    session of this run directory; `known_as` the tracker's own name of it, "" before the first.
    """

    name: str
    variant: str
    key: str
    place: str
    known_as: str = ""
    settings: Mapping[str, Any] = {}


class Destination(Protocol):
    """One run, open in a tracker. Every method raises what its library does.

    `known_as` is the tracker's own name of it, `look` the command that shows it.
    """

    known_as: str
    look: str

    def last(self) -> int | None:
        """The newest iteration in it, -1 where it has none; None where it cannot be asked."""

    def rewind(self, iteration: int) -> None:
        """Take back every point from `iteration` on; of those alone whose points are replaced."""

    def send(self, points: Sequence[Point]) -> None:
        """Add points, iterations ascending."""

    def close(self) -> None:
        """Write what is left, and let go."""


class Tracker(Record):
    """A tracker that there is. `again`: what becomes of iterations that are trained again once they
    were sent. `packages`: what it needs, by the names that are imported. `elsewhere`: the
    pattern of a place that is no folder, and `or_else` how it is called.
    """

    name: str
    title: str
    again: Again
    packages: tuple[str, ...]
    elsewhere: str = ""
    or_else: str = ""

    def require(self) -> None:
        """Raises Refusal where its library is not installed."""
        require(self.packages, f"tr11 track {self.name}", f'pip install "tr11[{self.name}]"')

    def check_place(self, place: str) -> None:
        """Raises WrongUsage for a place that is neither a folder nor an address that it knows."""
        is_elsewhere = "://" in place or place == ONLINE
        if is_elsewhere and not (self.elsewhere and re.fullmatch(self.elsewhere, place)):
            raise WrongUsage(f"--to {place}: {self.name} takes a folder{self.or_else}")

    def open(self, run: TrackedRun) -> Destination:
        """Open the run in it, as it was left. Raises what its library does."""
        module = importlib.import_module(f"tr11ops.trackers.{self.name}")
        opened: Destination = module.open_run(run)
        return opened


TRACKERS: Mapping[str, Tracker] = {
    tracker.name: tracker
    for tracker in (
        Tracker(
            "tensorboard",
            "TensorBoard",
            again="replaced",
            packages=("tensorboard",),
        ),
        Tracker(
            "mlflow",
            "MLflow",
            again="skipped",
            packages=("mlflow",),
            elsewhere=r"https?://.+",
            or_else=", or an address http://... of a server",
        ),
        Tracker(
            "wandb",
            "Weights & Biases",
            again="skipped",
            packages=("wandb",),
            elsewhere=ONLINE,
            or_else=", or the word online",
        ),
        Tracker(
            "trackio",
            "Trackio",
            again="skipped",
            packages=("trackio",),
        ),
    )
}
