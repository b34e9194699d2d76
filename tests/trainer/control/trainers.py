"""Real trainers of one process each, and what they wrote."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from tests.trainer.cases import tiny
from tests.trainer.courses import write_tokens
from tests.trainer.spawn import fork_server
from tests.waiting import until
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import EndMarker, Heartbeat
from trainer.contract.checkpoint_names import checkpoint_steps
from trainer.contract.manifest import Manifest


def card(folder: Path, **changes: Any) -> TrainerConfig:
    """A run that goes on for as long as a test may take; `changes` are sections with the keys to
    set in them.
    """
    write_tokens(folder)
    value = tiny().model_dump(mode="json")
    value["run"]["directory"] = str(folder / "run")
    value["batch"]["train_samples"] = 16 * 100_000
    value["data"] |= {
        "prefixes": [str(folder / "tokens")],
        "workers": 0,
        "order": "cyclic",
        "split": "1000,0,0",
    }
    value["logging"]["tensorboard"] = False
    value["evaluation"]["iterations"] = 0
    for section, keys in changes.items():
        value[section] = (value[section] or {}) | keys
    return TrainerConfig.model_validate(value)


class Training:
    """A trainer of one process and of a session of its own, as a launcher starts it; forked with
    torch loaded.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        process.start()
        assert process.pid is not None
        self.pid: int = process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float = 300.0) -> int:
        self._process.join(seconds)
        assert self.exit_code is not None, f"process {self.pid} goes on"
        return self.exit_code

    def send(self, number: signal.Signals) -> None:
        assert self.exit_code is None
        os.kill(self.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _train(card_path: Path, job: str, output: Path) -> None:
    """What `TR11_JOB_ID=JOB python -m trainer CARD` does."""
    from trainer.__main__ import main

    os.setsid()
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.pop("RANK", None)
    os.environ["TR11_JOB_ID"] = job
    main([str(card_path)])


class Processes:
    """Trainers of one process each. Whatever is left is killed by its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Training] = []
        self.others: list[int] = []

    def start(self, config: TrainerConfig, job: str) -> Training:
        path = self.folder / "card.json"
        path.write_text(config.model_dump_json())
        process = fork_server().Process(target=_train, args=(path, job, self.folder / f"{job}.out"))
        self.started.append(Training(process))
        return self.started[-1]

    def output(self, job: str) -> str:
        return (self.folder / f"{job}.out").read_text()

    def freeze_data_worker(self, process: Training) -> None:
        (worker,) = psutil.Process(process.pid).children()
        self.others.append(worker.pid)
        os.kill(worker.pid, signal.SIGSTOP)

    def wait(self, condition: Callable[[], object], seconds: float = 600.0) -> None:
        logs = self.folder.glob("*.out")
        until(
            condition,
            seconds=seconds,
            context=lambda: "\n".join(path.read_text()[-2000:] for path in logs),
        )

    def clear(self) -> None:
        for training in self.started:
            training.end()
        for number in self.others:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def beat(config: TrainerConfig, job: str) -> Heartbeat | None:
    found = Heartbeat.read(config.paths.heartbeat(0))
    return found if found is not None and found.job_id == job else None


def at(config: TrainerConfig, job: str, iteration: int) -> bool:
    found = beat(config, job)
    return found is not None and found.iteration >= iteration


def ended(config: TrainerConfig, job: str) -> EndMarker:
    marker = EndMarker.read(config.paths.end_marker(job))
    assert marker is not None
    return marker


def jobs_of_checkpoints(config: TrainerConfig) -> dict[int, str]:
    folder = config.paths.checkpoints
    manifests = [Manifest.read(config.paths.checkpoint(step)) for step in checkpoint_steps(folder)]
    return {manifest.step: manifest.job_id for manifest in manifests if manifest is not None}
