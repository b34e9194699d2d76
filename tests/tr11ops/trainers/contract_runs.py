"""The trainers of the contract suite: our own, the twin's stand-in, and one that speaks each dialect, under the
keeper. Each has a run directory, and is started with the words that the node's agent starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.forks import forked
from tests.tr11ops.trainers.dialect_words import (
    RANKS,
    broken_files,
    checkpoint_plan,
    lines_of,
    step_line,
)
from tests.tr11ops.trainers.fake_trainer import write_file
from tests.twin.rehearsal_inputs import rehearsal_card, write_resolved
from tr11ops.agent.allocation import free_port
from tr11ops.base.processes import die_with_parent
from tr11ops.dialects.dialect import Dialect, dialect_named, names
from tr11ops.dialects.settings import settings_of
from tr11ops.trainers import hold, keeper, stopping
from tr11ops.trainers.stopping import NEXT_CHECKPOINT, way_of
from tr11ops.trainers.trainer import NodePlaces, trainer_of
from tr11ops.twin.plan import TwinFolders, TwinPlan, TwinPorts, TwinSite, slurm_conf, twin_record
from tr11ops.twin.stand_in import __main__ as stand_in
from trainer.contract import lease
from trainer.contract.attempt import EXIT_ERROR, EXIT_REFUSED, EndMarker, Heartbeat, read_phases
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name
from trainer.contract.manifest import MANIFEST_FILE
from trainer.contract.metrics_record import records
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

FAKE = Path(__file__).with_name("fake_trainer.py")
FOREVER = 100_000


class Course(Record):
    """How long a training is, in steps, and after how many it saves."""

    total: int
    interval: int


class Launch:
    """One start of a trainer; `status` is None while it runs."""

    def __init__(self, job: str, pid: int, poll: Callable[[], int | None]) -> None:
        self.job, self.pid, self._poll = job, pid, poll
        self.status: int | None = None

    def has_ended(self) -> bool:
        if self.status is None:
            self.status = self._poll()
        return self.status is not None

    def end(self) -> None:
        """Whatever a test came to, nothing of it runs on."""
        if not self.has_ended():
            with suppress(psutil.Error):
                for one in [
                    *psutil.Process(self.pid).children(recursive=True),
                    psutil.Process(self.pid),
                ]:
                    with suppress(psutil.Error):
                        one.kill()


class TrainerRun:
    """A run directory and its trainer. `can_be_asked`: whether it saves at once when it is to stop; `ends_itself`:
    whether it says itself how it ended, so that none of its ends is unexplained; `refused`: the exit status of what
    was started where a rank refuses. A launcher as torchrun has 1 then, and the end marker tells.
    """

    can_be_asked, ends_itself, refused, workers = True, True, EXIT_REFUSED, RANKS

    def __init__(self, folder: Path, paths: RunPaths, kill_switch: Path) -> None:
        self.folder, self.paths, self.kill_switch = folder, paths, kill_switch
        self.card = folder / "card.json"
        self.launches: dict[str, Launch] = {}

    @property
    def command(self) -> list[str]:
        """What a node's agent starts."""
        places = NodePlaces(1, 0, self.workers, "127.0.0.1", free_port())
        return trainer_of(self.card).command(self.card, self.paths.attempt("7"), places)

    def start(self, job: str) -> Launch:
        self.paths.attempt(job).mkdir(parents=True, exist_ok=True)
        self.launches[job] = self._started(job)
        return self.launches[job]

    def _started(self, job: str) -> Launch:
        raise NotImplementedError

    def forked(self, job: str, main: Callable[[], int], environment: dict[str, str]) -> Launch:
        """`main` in a fork of this process, with the modules that it has loaded."""

        def work() -> None:
            die_with_parent(signal.SIGTERM)
            os.environ.update({"TR11_JOB_ID": job, "TR11_LAUNCH": "1", **environment})
            with self.log(job).open("ab") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            sys.stdout, sys.stderr = (
                os.fdopen(1, "w", closefd=False),
                os.fdopen(2, "w", closefd=False),
            )
            lease.RENEW_SECONDS = 0.3
            os._exit(main())

        pid = forked(work)

        def poll() -> int | None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if ended else None

        return Launch(job, pid, poll)

    def worker_of(self, launch: Launch) -> int:
        """The process of one of its ranks."""
        return int(psutil.Process(launch.pid).children()[-1].pid)

    def leave_after(self, steps: int) -> None:
        """At the next start, with status 0, and unasked."""
        raise NotImplementedError

    def lay_broken(self, after: int) -> None:
        """A checkpoint of a later step than `after`, as a kill in its save leaves it."""
        home, new = self.paths.checkpoint(after), self.paths.checkpoint(after + 1)
        new.mkdir()
        for path in home.rglob("*"):
            if path.is_file() and path.name != MANIFEST_FILE:
                (new / path.relative_to(home)).parent.mkdir(parents=True, exist_ok=True)
                (new / path.relative_to(home)).write_bytes(path.read_bytes())
        self.name_latest(after + 1)

    def name_latest(self, step: int) -> None:
        (self.paths.checkpoints / LATEST_FILE).write_text(checkpoint_name(step), encoding="utf-8")

    # ------------------------------------------------------------------ what is left behind
    def log(self, job: str) -> Path:
        return self.folder / f"{job}.out"

    def said(self, job: str) -> str:
        return self.log(job).read_text(encoding="utf-8", errors="replace")

    def end(self, job: str) -> EndMarker | None:
        return EndMarker.read(self.paths.end_marker(job))

    def beat(self) -> Heartbeat | None:
        return Heartbeat.read(self.paths.heartbeat(0))

    def phases(self, job: str) -> list[str]:
        return [one.phase for one in read_phases(self.paths.phases(job))]

    def steps(self, job: str) -> list[int]:
        if not self.paths.metrics.exists():
            return []
        found = [one for one in records(self.paths.metrics) if one.is_step and one.job_id == job]
        return [one.iteration for one in found if one.iteration is not None]

    def at(self, job: str, count: int) -> bool:
        """Whether a launch has taken so many steps, or has ended."""
        return self.launches[job].has_ended() or len(self.steps(job)) >= count


class OwnRun(TrainerRun):
    """Our own trainer, one process, forked with torch loaded."""

    workers = 1

    def __init__(self, folder: Path, course: Course) -> None:
        from tests.trainer.control.trainers import Processes, card  # torch: for our own alone

        self.config = card(
            folder,
            batch={"train_samples": 16 * course.total},
            checkpoint={"interval": course.interval},
        )
        super().__init__(folder, self.config.paths, self.config.kill_switch)
        self.processes = Processes(folder)
        self.card.write_text(self.config.model_dump_json(), encoding="utf-8")

    def _started(self, job: str) -> Launch:
        process = self.processes.start(self.config, job)
        return Launch(job, process.pid, lambda: process.exit_code)

    def worker_of(self, launch: Launch) -> int:
        return launch.pid


class StandInRun(TrainerRun):
    """The twin's stand-in, four ranks, where a twin's files are."""

    refused, workers = EXIT_ERROR, 4

    def __init__(self, folder: Path, course: Course) -> None:
        samples = 8 * course.total
        card = rehearsal_card(
            folder,
            [
                "rehearsal.start_seconds=1", f"checkpoint.interval={course.interval}", "rehearsal.collective_seconds=60",
                f"batch.train_samples={samples}", f"schedule.decay_samples={samples - 1}",
            ],
        )  # fmt: skip
        super().__init__(folder, card.paths, card.kill_switch)
        write_resolved(card, self.card)
        folders = TwinFolders(folder / "twin")
        folders.slurm_conf.parent.mkdir(parents=True, exist_ok=True)
        plan = TwinPlan(name="known", nodes=2)
        site = TwinSite(plan, folders, TwinPorts(plan, 20032), "m")
        folders.record.parent.mkdir(parents=True, exist_ok=True)
        folders.record.write_text(json.dumps(twin_record(site)), encoding="utf-8")
        folders.slurm_conf.write_text(slurm_conf(site, "root", (22, 5)), encoding="utf-8")
        self.environment = {"SLURM_CONF": str(folders.slurm_conf)}

    def _started(self, job: str) -> Launch:
        words = self.command
        assert words[2:4] == ["-m", "tr11ops.twin.stand_in"]
        return self.forked(job, lambda: stand_in.main(words[4:]), self.environment)


class KeptRun(TrainerRun):
    """A trainer that speaks a dialect and knows nothing of tr11, two ranks under the keeper."""

    ends_itself = False

    def __init__(self, dialect: Dialect, folder: Path, course: Course) -> None:
        root = folder / "run"
        super().__init__(folder, RunPaths(root, "toy", "main"), root / "kill-switch")
        self.dialect, self.out = dialect, folder / "out"
        assert dialect.checkpoints is not None
        self.checkpoints = self.out / dialect.checkpoints.folder
        needs = [dialect.stop.needs] if dialect.stop is not None and dialect.stop.needs else []
        line = step_line(dialect, course.total)
        table: dict[str, Any] = {
            "command": [sys.executable, "-I", "-S", str(FAKE), str(folder / "plan.json"), "{attempt}/left", *needs],
            "dialect": dialect.name, "start": "srun", "folder": str(self.out), "directory": str(folder),
            "first": [], "resume": self._resume_words(), "checkpoints": {"quiet": 0.2},
            "steps": None if line.has_total else course.total,
        }  # fmt: skip
        way = way_of(settings_of(table, "card"), RANKS)
        self.can_be_asked = way != NEXT_CHECKPOINT
        run = {"name": "toy", "directory": str(root), "variant": "main"}
        self.card.write_text(json.dumps({"run": run, "trainer": table}), encoding="utf-8")
        self.plan: dict[str, Any] = {
            **checkpoint_plan(dialect), "lines": lines_of(dialect, course.total), "folder": str(self.checkpoints),
            "total": course.total, "interval": course.interval, "seconds": 0.05, "leave_after": 0,
            "hears_term": way == "signal TERM", "stop_file": way.partition("file ")[2], "offset": dialect.offset,
            "speaker": RANKS - 1 if dialect.printed_by == "last" else 0,
        }  # fmt: skip

    def _resume_words(self) -> list[str]:
        """Where its trainer is told what to take, the fake one is told it too."""
        assert self.dialect.checkpoints is not None
        told = any("{path}" in word or "{step}" in word for word in self.dialect.resume)
        if told or self.dialect.checkpoints.newest == "told":
            return ["--from={step}", *self.dialect.resume]
        return []

    def _started(self, job: str) -> Launch:
        (self.folder / "plan.json").write_text(json.dumps(self.plan), encoding="utf-8")
        self.plan["leave_after"] = 0
        words = self.command
        assert words[2:4] == ["-m", "tr11ops.trainers.keeper"]

        def main() -> int:
            hold.LOOK_SECONDS, keeper.LOOK_SECONDS, stopping.LEAD_SECONDS = 0.2, 0.3, 0.5
            return keeper.main(words[4:], os.environ)

        return self.forked(job, main, {})

    def leave_after(self, steps: int) -> None:
        self.plan["leave_after"] = steps

    def lay_broken(self, after: int) -> None:
        for path, text in broken_files(self.dialect, after + 1000).items():
            (self.checkpoints / path).unlink(missing_ok=True)  # what is held is another file
            write_file(self.checkpoints / path, text)


def subjects() -> dict[str, Callable[[Path, Course], TrainerRun]]:
    """All trainers that tr11 has, by name: of the dialects those that tell of checkpoints."""
    dialects = [dialect_named(name) for name in names()]
    kept = {one.name: partial(KeptRun, one) for one in dialects if one.checkpoints is not None}
    return {"tr11": OwnRun, "stand-in": StandInRun, **kept}
