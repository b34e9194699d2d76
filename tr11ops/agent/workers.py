"""What starts the workers of a launch and stays until they have ended: srun on Slurm, this machine in
the foreground, a simulation in a replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from tr11ops.agent.allocation import free_port, master_address
from tr11ops.agent.attempt_context import AttemptContext
from tr11ops.agent.step import LaunchRun, LaunchWatch, LineTee, StopFlag, WorkerLaunch
from tr11ops.base.now import now
from tr11ops.runcard.card import ForeignCard
from tr11ops.runcard.sections import ContainerSection
from trainer.contract.files import write_json
from trainer.contract.record import Record


class PlannedLaunch(Record):
    """A launch that is to begin: which of its attempt, and where. `started`: when the attempt began,
    in seconds since the epoch. `skipped`: health checks that are left out. `save_minutes`: between
    two saves, None: as the card says.
    """

    number: int
    nodes: tuple[str, ...]
    started: float
    skipped: tuple[str, ...] = ()
    save_minutes: float | None = None


class Workers(Protocol):
    """How the workers of an attempt's launches are run."""

    def run(self, launch: PlannedLaunch, watch: LaunchWatch, look: Callable[[], None]) -> None:
        """Run a launch to its end. What is seen of it goes into `watch`, with its start, end and
        status; what it leaves behind, into the attempt's folder. `look` is called meanwhile.
        """


class RealWorkers:
    """Workers that are processes."""

    def __init__(self, context: AttemptContext, stop: StopFlag, tee: LineTee) -> None:
        self._context = context
        self._config = context.config
        self._folder = context.folder
        self._stop = stop
        self._tee = tee

    def run(self, planned: PlannedLaunch, watch: LaunchWatch, look: Callable[[], None]) -> None:
        slurm = self._config.slurm
        nodes = planned.nodes
        allocation = replace(self._context.allocation, nodes=nodes)
        peers = self._context.peers
        port = slurm.master_port or free_port()
        launch = WorkerLaunch(
            number=planned.number,
            attempt=self._folder,
            card=self._card(planned),
            job_id=self._context.job_id,
            nodes=nodes,
            workers_per_node=slurm.workers,
            master_address=master_address(allocation) if peers is None else peers.rendezvous.host,
            master_port=port if peers is None or port != peers.rendezvous.port else free_port(),
            container=self._agents_image(allocation.kind),
            uses_gpus=slurm.gpus_per_node > 0,
        )
        running = LaunchRun(
            launch,
            allocation,
            tee=self._tee,
            stop=self._stop,
            watch=watch,
            end_within_seconds=self._config.resilience.end_within_seconds,
            others=peers,
        )
        environment = {**self._context.environment, "TR11_JOB_ID": self._context.job_id}
        running.run(environment, look)

    def _agents_image(self, kind: str) -> ContainerSection | None:
        """The image that node agents run in; another trainer's is for its workers alone."""
        if kind != "slurm" or isinstance(self._config, ForeignCard):
            return None
        return self._config.slurm.container

    def _card(self, planned: PlannedLaunch) -> Path:
        """The card of a launch: a later one has what is left of the exit duration, and fewer health
        checks; each may save more often than the attempt's.
        """
        first = self._folder / "card.json"
        minutes = self._config.run.exit_duration_minutes
        is_left = minutes is not None or bool(planned.skipped)
        if planned.save_minutes is None and (planned.number == 1 or not is_left):
            return first
        value = json.loads(first.read_text(encoding="utf-8"))
        if minutes is not None:
            value["run"]["exit_duration_minutes"] = max(
                minutes - (now() - planned.started) / 60, 0.01
            )
        skipped = [*value["resilience"].get("skip_checks", ()), *planned.skipped]
        value["resilience"]["skip_checks"] = skipped
        if planned.save_minutes is not None:
            value["checkpoint"]["interval_minutes"] = planned.save_minutes
        path = self._folder / "launches" / f"{planned.number}.card"
        write_json(path, value)
        return path
