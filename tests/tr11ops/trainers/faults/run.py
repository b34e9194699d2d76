"""A training of an unchanged trainer that a person launches with `tr11`, for faults to be given to."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.plugins.command_server import tr11_command
from tests.tr11ops.trainers.faults.sites import Site, end_at_once, processes_with
from tests.tr11ops.trainers.faults.trainers import FaultedTrainer
from tests.tr11ops.trainers.kept import QUIET
from tr11ops.cluster.base import Job, JobState
from tr11ops.dialects.settings import TrainerSettings
from tr11ops.runcard.card import load_card
from tr11ops.runcard.kinds import ForeignCard
from tr11ops.trainers.checkpoints import survey
from trainer.contract.attempt import EndMarker
from trainer.contract.metrics_record import MetricsRecord, records
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

LOOK_SECONDS = 0.3
COMMAND_SECONDS = 180.0
MARK = "TR11_FAULT_CELL"  # in the environment of the trainer's processes


class TooLate(Exception):
    """Something did not come true in time; the text says what."""


class SeenWhole(Record):
    """A checkpoint that was once seen whole: its step, and when it was written."""

    name: str
    step: int
    written: float


class FaultRun:
    """One training; `folder` is new and empty. `patience`: how much longer than on a machine of its own
    something may take. `pace`: seconds of a step there. `watch`: more lines of the card's [watch].
    """

    def __init__(
        self,
        trainer: FaultedTrainer,
        site: Site,
        folder: Path,
        patience: float = 1.0,
        pace: float = 1.0,
        watch: str = "",
    ) -> None:
        self.trainer, self.site, self.folder, self.patience = trainer, site, folder, patience
        self.pace, self.watch = pace * patience, watch
        self.root, self.card = folder / "run", folder / "tr11.toml"
        self.paths = RunPaths(self.root, "toy", "main")
        self.environment = {
            **os.environ, **QUIET, **site.environment(folder), "COLUMNS": "200",
        }  # fmt: skip
        self.whole: dict[str, SeenWhole] = {}
        self._settings: TrainerSettings | None = None

    # ------------------------------------------------------------------ what a person types
    def tr11(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of tr11 on this run. Raises subprocess.TimeoutExpired."""
        return subprocess.run(
            [*tr11_command(), *words, "--run", str(self.card)],
            capture_output=True, text=True, timeout=COMMAND_SECONDS * self.patience,
            env=self.environment, check=False,
        )  # fmt: skip

    def write_card(
        self,
        seconds: float | None = None,
        time_limit: str = "00:20:00",
        slurm: str = "",
        **environment: str,
    ) -> None:
        """`seconds`: of a step, where it is not the run's own pace."""
        pace = self.pace if seconds is None else seconds
        given = {MARK: str(self.root), self.trainer.pace: str(pace), **environment}
        lines = f'time_limit = "{time_limit}"\n{self.site.slurm}\n{slurm}'
        self.card.write_text(
            self.trainer.card(self.root, lines, self.watch, given), encoding="utf-8"
        )
        card = load_card(self.card)
        assert isinstance(card, ForeignCard)
        self._settings = card.settings

    def launch(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`tr11 launch`, with what it says."""
        return self.tr11("launch", "--scheduler", self.site.name, "--yes", *words)

    def begin(self, *words: str) -> None:
        """Launch it, which must go well."""
        done = self.launch(*words)
        if done.returncode != 0:
            raise TooLate(f"the launch was refused: {done.stdout}{done.stderr}")

    def status(self) -> str:
        """What `tr11 status` says; where it says nothing, why."""
        done = self.tr11("status")
        return done.stdout or f"{done.returncode} {done.stderr}"

    # ------------------------------------------------------------------ what is seen of it
    @property
    def checkpoints(self) -> Path:
        """The trainer's own folder of checkpoints."""
        assert self._settings is not None and self._settings.checkpoint_folder is not None
        return self._settings.checkpoint_folder

    def look(self) -> None:
        """Keep in mind which checkpoints are whole now."""
        assert self._settings is not None and self._settings.dialect.checkpoints is not None
        if not self.checkpoints.is_dir():
            return
        with suppress(OSError):
            found = survey(self._settings.dialect.checkpoints, self.checkpoints, 2, time.time())
            for one in found.whole:
                key = f"{one.name} of {one.changed}"
                self.whole[key] = SeenWhole(one.name, one.step or 0, one.changed)

    def forget(self, name: str) -> None:
        """A checkpoint was broken on purpose."""
        for key in [key for key, one in self.whole.items() if one.name == name]:
            del self.whole[key]

    def newest(self) -> SeenWhole | None:
        """The newest whole checkpoint."""
        self.look()
        return max(self.whole.values(), key=lambda one: one.step, default=None)

    def records(self) -> list[MetricsRecord]:
        return [one for one in records(self.paths.metrics) if one.is_step]

    def step(self) -> int:
        """The last one that was told."""
        return next((one.iteration or 0 for one in reversed(self.records())), 0)

    def ends(self) -> list[EndMarker]:
        """The end markers of all attempts, the oldest first."""
        found = (EndMarker.read(one) for one in self.root.glob("state/attempts/*/end.json"))
        return sorted((one for one in found if one is not None), key=_time_of)

    def until(self, holds: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        """Wait for something to come true, and look at the checkpoints meanwhile. Raises TooLate."""
        end = time.monotonic() + seconds * self.patience
        while not holds():
            if time.monotonic() > end:
                raise TooLate(f"{what}: not within {seconds * self.patience:.0f} s")
            self.look()
            time.sleep(LOOK_SECONDS)

    def until_saved(self, step: int) -> None:
        """Until a checkpoint of this step, or a newer one, is whole."""
        self.until(lambda: (self.newest() or _NONE).step >= step, f"a checkpoint of step {step}")

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def until_idle(self, seconds: float = 240.0) -> None:
        """Until nothing of it runs, or will without a person: what waits is held. Raises TooLate."""
        scheduler = self.site.scheduler(self.folder)

        def is_idle() -> bool:
            return all(_stands(job) for job in scheduler.jobs("toy"))

        self.until(is_idle, "the end of all jobs", seconds)

    # ------------------------------------------------------------------ what happens to it
    def workers(self) -> dict[int, psutil.Process]:
        """The rank processes that run now, by their rank."""
        found = {}
        for process in processes_with({MARK: str(self.root)}):
            with suppress(psutil.Error, OSError):
                rank, words = process.environ().get("RANK"), process.cmdline()
                is_script = any(word.endswith(self.trainer.script) for word in words)
                if rank is not None and is_script and "torch.distributed.run" not in words:
                    found[int(rank)] = process
        return found

    def worker(self, rank: int) -> psutil.Process:
        """Raises TooLate where it does not run."""
        self.until(lambda: rank in self.workers(), f"a worker of rank {rank}", 30)
        return self.workers()[rank]

    def node_of(self, rank: int) -> str:
        """The node of a rank."""
        return self.worker(rank).environ().get(self.site.node_variable, "")

    def kill_in_save(self, seconds: float = 180.0) -> None:
        """All ranks are killed at a moment at which a checkpoint is begun and not whole: they are
        stopped as soon as something of it is there, and go on where it was whole by then. Where it is never
        there but whole, at the moment at which it gets its name.

        Raises TooLate.
        """
        with _at_once():
            end = time.monotonic() + seconds * self.patience
            while time.monotonic() < end and not self._killed_in_next_save(end):
                pass
        if time.monotonic() > end:
            raise TooLate("no save was met in its middle")

    def _killed_in_next_save(self, end: float) -> bool:
        before = set(_names(self.checkpoints))
        workers = list(self.workers().values())
        while time.monotonic() < end and set(_names(self.checkpoints)) <= before:
            time.sleep(0.0002)
        with suppress(ProcessLookupError):
            _send(workers, signal.SIGSTOP)
        is_torn = self.trainer.appears_whole or self._has_torn(before)
        if is_torn:
            end_at_once(workers)
        with suppress(ProcessLookupError):
            _send(workers, signal.SIGCONT)
        return is_torn

    def _has_torn(self, before: set[str]) -> bool:
        assert self._settings is not None and self._settings.dialect.checkpoints is not None
        later = time.time() + 3600  # as if no one had written for long
        found = survey(self._settings.dialect.checkpoints, self.checkpoints, 2, later)
        whole = {one.name for one in found.whole}
        return bool(set(_names(self.checkpoints)) - before - whole)

    def close(self) -> None:
        """Nothing of it runs on, whatever came of it."""
        scheduler = self.site.scheduler(self.folder)
        for job in scheduler.jobs("toy"):
            if not job.state.is_final:
                scheduler.cancel(job.job_id)
        with suppress(TooLate):
            self.until_idle(60)
        end_at_once(processes_with({MARK: str(self.root)}))
        self.site.repair(self.folder)


_NONE = SeenWhole("", 0, 0.0)


@contextmanager
def _at_once() -> Iterator[None]:
    """This process before all others meanwhile, where it may."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _stands(job: Job) -> bool:
    # of an array that is held Slurm gives that as the reason of the task that runs, too
    is_held = job.state is JobState.PENDING and job.reason.startswith("JobHeld")
    return job.state.is_final or is_held


def _time_of(end: EndMarker) -> float:
    return end.time


def _names(folder: Path) -> Sequence[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - nothing may be slower here
    except OSError:
        return ()


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        os.kill(process.pid, number)
