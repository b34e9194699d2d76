"""Weights & Biases, offline: each session is a folder below the place, which `wandb sync` sends in
their order; with the place `online`, at once to the server of $WANDB_BASE_URL.

Its steps only rise: one that it has already is left out by W&B itself too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tr11ops.trackers.destination import ONLINE, TrackedRun
from tr11ops.trackers.points import Point
from trainer.contract.files import make_shared


def open_run(run: TrackedRun) -> WandbRun:
    """The run in the project that is named as the run is; begun with the first point."""
    return WandbRun(run)


class WandbRun:
    """Raises wandb's errors. W&B's own process writes what was sent, a moment after `close`."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self.known_as = run.key
        self.look = f"wandb sync {run.place}/wandb/offline-run-*"
        if run.place == ONLINE:
            self.look = f"the project {run.name} at your W&B server"
        self._opened: Any = None

    def last(self) -> int | None:
        return None

    def rewind(self, iteration: int) -> None:
        raise NotImplementedError("W&B takes no point back")

    def send(self, points: Sequence[Point]) -> None:
        if self._opened is None:
            self._opened = self._begun()
        for point in points:
            self._opened.log(dict(point.values), step=point.iteration)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.finish()
            self._opened = None

    def _begun(self) -> Any:
        """Nothing of this process is recorded."""
        import wandb

        options: dict[str, Any] = {"mode": "online"}
        if self._run.place != ONLINE:
            folder = Path(self._run.place).absolute()
            make_shared(folder)
            options = {"mode": "offline", "dir": str(folder)}
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        return wandb.init(
            project=self._run.name,
            id=self._run.key,
            name=self._run.variant,
            config=dict(self._run.settings),
            resume="allow",
            settings=settings,
            **options,
        )
