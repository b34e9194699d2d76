"""The schedulers under which faults are given, and how a node is lost on each."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import psutil

from tests.waiting import until
from tr11ops.cluster.base import Scheduler
from tr11ops.cluster.local import LocalScheduler
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

TWIN = TwinPlan(name="trainer-faults", nodes=4, gpus=0, slurmd_timeout_seconds=15)


class Site(Protocol):
    """Where a training runs. `folder` is the cell's own; `slurm` are the card's lines for it."""

    name: str
    slurm: str
    node_variable: str  # by which a worker knows its node

    def environment(self, folder: Path) -> Mapping[str, str]: ...

    def scheduler(self, folder: Path) -> Scheduler: ...

    def lose(self, folder: Path, node: str) -> None:
        """The node dies with all that runs there, at one moment."""

    def repair(self, folder: Path) -> None:
        """What was lost is back, for the next cell."""

    def close(self) -> None:
        """After the last cell."""


class LocalSite:
    """The embedded scheduler, which plays four nodes."""

    name = "local"
    slurm = ""
    node_variable = "TR11_NODE_NAME"

    def environment(self, folder: Path) -> Mapping[str, str]:
        return {"TR11_LOCAL_SCHEDULER": str(folder / "scheduler"), "TR11_LOCAL_NODES": "4"}

    def scheduler(self, folder: Path) -> Scheduler:
        return LocalScheduler(folder / "scheduler")

    def lose(self, folder: Path, node: str) -> None:
        own = {self.node_variable: node, **self.environment(folder)}
        end_at_once(processes_with(own))

    def repair(self, folder: Path) -> None:
        """A simulated node is there again as soon as it is asked."""

    def close(self) -> None:
        """Each cell has a folder of its own."""


class SlurmSite:
    """A real Slurm of four nodes on this machine. `twin`: one that is up already; else one is started in
    a folder of its own, so that two at once do not share one, and ended at the close.
    """

    name = "slurm"
    slurm = ""
    node_variable = "SLURMD_NODENAME"

    def __init__(self, twin: Twin | None = None) -> None:
        self._home: Path | None = None
        if twin is None:
            self._home = Path(tempfile.mkdtemp(prefix="tr11-faults-"))
            try:
                twin = Twin.up(TWIN, self._home)
            except BaseException:
                shutil.rmtree(self._home)
                raise
        self.twin = twin

    def environment(self, folder: Path) -> Mapping[str, str]:
        return self.twin.environment

    def scheduler(self, folder: Path) -> Scheduler:
        return SlurmScheduler(self.twin.environment)

    def lose(self, folder: Path, node: str) -> None:
        inject(self.twin, "node-dead", node=node)

    def repair(self, folder: Path) -> None:
        failed = [one.error for one in heal(self.twin) if one.error]
        assert not failed, failed
        until(lambda: all(node.states == {"idle"} for node in self.scheduler(folder).nodes()))

    def close(self) -> None:
        if self._home is not None:
            self.twin.down()
            shutil.rmtree(self._home)


SITES: Mapping[str, Callable[[], Site]] = {"local": LocalSite, "slurm": SlurmSite}


def processes_with(variables: Mapping[str, str]) -> list[psutil.Process]:
    """The processes of this machine that have all these in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if all(environment.get(name) == value for name, value in variables.items()):
            found.append(process)
    return found


def end_at_once(processes: list[psutil.Process]) -> None:
    """Stopped first, so that none of them sees another one die."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            if process.is_running() and process.pid != os.getpid():
                os.kill(process.pid, number)
