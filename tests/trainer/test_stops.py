"""Real trainers that meet on one run directory, and real trainers that are asked to stop while they wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cases import VOCABULARY, tiny
from spawn import run_ranks

from trainer.config import TrainerConfig
from trainer.contract import EndMarker, Heartbeat, Manifest, checkpoint_steps, read_latest
from trainer.data.indexed_write import IndexedWriter
from trainer.engine import StepResult
from trainer.lease import Claim, LeaseFolder
from trainer.lifecycle import Attempt, HeartbeatWriter, SignalFlag
from trainer.loop import Trainer
from trainer.metrics import Interval
from trainer.requests import Answer, Request, new_request

ROOT = Path(__file__).parents[2]


def card(folder: Path, **changes: Any) -> TrainerConfig:
    """A run that goes on for as long as a test may take; `changes` are sections with the keys to set in them."""
    if not (folder / "tokens.idx").exists():
        tokens = np.random.default_rng(3).integers(0, VOCABULARY, 60 * 40).astype(np.uint16)
        with IndexedWriter(folder / "tokens", "uint16") as writer:
            writer.add_documents(tokens, np.full(60, 40, dtype=np.int32))
    value = tiny().model_dump(mode="json")
    value["run"]["directory"] = str(folder / "run")
    value["batch"]["train_samples"] = 16 * 100_000
    value["data"] |= {"prefixes": [str(folder / "tokens")], "workers": 0, "order": "cyclic", "split": "1000,0,0"}
    value["logging"]["tensorboard"] = False
    value["evaluation"]["iterations"] = 0
    for section, keys in changes.items():
        value[section] = (value[section] or {}) | keys
    return TrainerConfig.model_validate(value)


class Processes:
    """Trainers of one process each, started as a launcher starts them. Whatever is left is killed by its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        self.others: list[int] = []

    def start(self, config: TrainerConfig, job: str) -> subprocess.Popen[bytes]:
        path = self.folder / "card.json"
        path.write_text(config.model_dump_json())
        environment = {**os.environ, "TR11_JOB_ID": job, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment.pop("RANK", None)
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", str(path)], env=environment, start_new_session=True,
            stdout=(self.folder / f"{job}.out").open("wb"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.started.append(process)
        return process

    def output(self, job: str) -> str:
        return (self.folder / f"{job}.out").read_text()

    def freeze_data_worker(self, process: subprocess.Popen[bytes]) -> None:
        (worker,) = psutil.Process(process.pid).children()
        self.others.append(worker.pid)
        os.kill(worker.pid, signal.SIGSTOP)

    def wait(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.out"))
            assert time.monotonic() < until, logs
            time.sleep(0.05)

    def clear(self) -> None:
        for number in [*self.others, *(process.pid for process in self.started if process.poll() is None)]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for process in self.started:
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    under_test = Processes(tmp_path)
    try:
        yield under_test
    finally:
        under_test.clear()


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


# ----------------------------------------------------------------------------- two trainers
def test_of_two_trainers_at_once_exactly_one_trains(tmp_path: Path, processes: Processes) -> None:
    config = card(tmp_path, checkpoint={"interval": 100_000})
    both = {job: processes.start(config, job) for job in ("1", "2")}
    processes.wait(lambda: any(process.poll() is not None for process in both.values()))
    (loser,) = [job for job, process in both.items() if process.poll() is not None]
    (winner,) = set(both) - {loser}
    assert both[loser].returncode == 2
    marker = ended(config, loser)
    # On a machine so busy that the first one was silent for the whole watch, it was superseded: one trains all the same.
    assert (marker.reason in {"refused", "superseded"}, marker.restart) == (True, False)
    assert f" job {winner} (launch 1) of " in marker.message
    assert f"process {both[winner].pid}" in marker.message
    assert processes.output(loser).count(marker.message) == 1
    processes.wait(lambda: at(config, winner, 3))
    both[winner].send_signal(signal.SIGTERM)
    assert both[winner].wait(timeout=120) == 0
    left = ended(config, winner)
    assert left.reason == "signal" and left.checkpoint_step == left.iteration >= 3
    assert jobs_of_checkpoints(config)[left.iteration] == winner


def test_a_frozen_trainer_that_was_superseded_publishes_nothing(tmp_path: Path, processes: Processes) -> None:
    config = card(tmp_path, checkpoint={"interval": 1})  # it saves all the time
    old = processes.start(config, "1")
    processes.wait(lambda: at(config, "1", 6))
    os.kill(old.pid, signal.SIGSTOP)
    new = processes.start(config, "2")
    processes.wait(lambda: at(config, "2", 8))
    config.kill_switch.touch()
    assert new.wait(timeout=120) == 0
    config.kill_switch.unlink()
    before = (jobs_of_checkpoints(config), read_latest(config.paths.checkpoints))
    newest = max(before[0])
    assert before[0][newest] == "2" and before[1] == newest
    claims = LeaseFolder(config.paths)
    assert claims.newest()[0] == 2
    os.kill(old.pid, signal.SIGCONT)
    assert old.wait(timeout=120) == 2
    assert (jobs_of_checkpoints(config), read_latest(config.paths.checkpoints)) == before
    marker = ended(config, "1")
    assert (marker.reason, marker.restart) == ("superseded", False)
    assert "job 2 (launch 1)" in marker.message and "has taken over (epoch 2, ours was 1)" in marker.message


class Overtaken(Trainer):
    """Another trainer takes the lease over while this one does its third step."""

    def _step(self, interval: Interval) -> StepResult:
        result = super()._step(interval)
        if self.progress.iteration == 3 and self.rank == 0:
            assert LeaseFolder(self.config.paths).claim(2, Claim("9", 1, "elsewhere", 1, "ana", 0.0, "token", 2))
        return result


def attend(kind: type[Trainer], config: TrainerConfig, job: str) -> tuple[str, int]:
    beats = HeartbeatWriter(config.paths, int(os.environ["RANK"]), job)
    attempt = Attempt(job, 1, config.paths.stop_request(job))
    trainer = kind(config, Path("none.json"), attempt, beats, SignalFlag(), time.monotonic())
    reason = trainer.train()
    trainer.close()
    return reason, trainer.progress.iteration


WAYS: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "synchronous": {"asynchronous": False},
    "original-layout": {"format": "deepspeed"},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_saving_publishes_without_the_lease(tmp_path: Path, way: str) -> None:
    config = card(tmp_path, checkpoint={"interval": 2, **WAYS[way]})
    assert {reason for reason, _ in run_ranks(attend, 2, Overtaken, config, "1", launch=False)} == {"superseded"}
    steps = checkpoint_steps(config.paths.checkpoints)
    # A save in the background may have been published before the third step had ended.
    assert steps in ([[], [2]] if way == "asynchronous" else [[2]])
    assert read_latest(config.paths.checkpoints) == (2 if steps else None)
    marker = ended(config, "1")
    assert (marker.reason, marker.restart) == ("superseded", False)


# ----------------------------------------------------------------------------- requests
class Asked(Trainer):
    """Somebody asks for a checkpoint while this trainer does its third step, and stops it some steps later."""

    request: Request

    def _step(self, interval: Interval) -> StepResult:
        result = super()._step(interval)
        if self.progress.iteration == 3 and self.rank == 0:
            self.request.write(self.config.paths.checkpoint_request)
        return result


def asked(config: TrainerConfig, request: Request) -> tuple[str, int]:
    Asked.request = request
    return attend(Asked, config, "1")


def test_a_checkpoint_that_was_asked_for_is_saved_at_once_and_the_training_goes_on(tmp_path: Path) -> None:
    config = card(tmp_path, checkpoint={"interval": 100_000}, run={"exit_interval": 9})
    request = new_request("checkpoint", "ana", "before the maintenance", config.paths.root)
    assert run_ranks(asked, 2, config, request, launch=False) == [("exit-interval", 9)] * 2
    assert checkpoint_steps(config.paths.checkpoints) == [3, 9]
    answer = Answer.read(config.paths.answer(request.id))
    assert answer is not None and (answer.step, answer.job_id) == (3, "1")
    beats = [Heartbeat.read(config.paths.heartbeat(rank)) for rank in range(2)]
    assert [found.request for found in beats if found] == [request.id] * 2  # each rank's receipt
    assert not config.paths.checkpoint_request.exists()


def test_a_pause_lets_the_named_attempt_train_and_no_other(tmp_path: Path) -> None:
    config = card(tmp_path, run={"exit_interval": 2})
    new_request("pause", "ana", "", config.paths.root, exempt="1").write(config.paths.pause)
    assert run_ranks(attend, 1, Trainer, config, "2", launch=False) == [("pause", 0)]
    assert (ended(config, "2").reason, ended(config, "2").restart) == ("pause", False)
    assert run_ranks(attend, 1, Trainer, config, "1", launch=False) == [("exit-interval", 2)]


def test_a_stop_while_data_do_not_come_saves_and_the_data_worker_ignores_it(
    tmp_path: Path, processes: Processes
) -> None:
    config = card(tmp_path, data={"workers": 1}, checkpoint={"interval": 100_000})
    trainer = processes.start(config, "1")
    processes.wait(lambda: at(config, "1", 3))
    processes.freeze_data_worker(trainer)
    processes.wait(lambda: (found := beat(config, "1")) is not None and found.phase == "data-wait")
    os.killpg(trainer.pid, signal.SIGTERM)  # as Slurm does it: the data worker gets it too
    assert trainer.wait(timeout=120) == 0
    marker = ended(config, "1")
    assert marker.reason == "signal" and marker.checkpoint_step == marker.iteration >= 3
    manifest = Manifest.read(config.paths.checkpoint(marker.iteration))
    assert manifest is not None and manifest.job_id == "1"


def test_an_end_at_once_is_honoured_while_data_do_not_come(tmp_path: Path, processes: Processes) -> None:
    config = card(tmp_path, data={"workers": 1}, checkpoint={"interval": 100_000})
    trainer = processes.start(config, "1")
    processes.wait(lambda: at(config, "1", 3))
    os.kill(trainer.pid, signal.SIGSTOP)  # wherever it is, it must not be faster than the request is read
    request = new_request("kill-now", "ana", "wrong card", config.paths.root)
    request.write(config.kill_switch)
    os.kill(trainer.pid, signal.SIGCONT)
    assert trainer.wait(timeout=120) == 0
    marker = ended(config, "1")
    assert (marker.reason, marker.restart, marker.checkpoint_step) == ("kill-switch", False, None)
    assert checkpoint_steps(config.paths.checkpoints) == []
    found = beat(config, "1")
    assert found is not None and (found.request, found.phase) == (request.id, "ended")
    assert json.loads(config.kill_switch.read_text())["why"] == "wrong card"
