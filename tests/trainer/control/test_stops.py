"""Real trainers that meet on one run directory, and real trainers that are asked to stop while they
wait.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.control.trainers import Processes, at, beat, card, ended, jobs_of_checkpoints
from tests.trainer.courses import attempt_of, trained
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.contract.checkpoint_names import checkpoint_steps, read_latest
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.manifest import Manifest
from trainer.contract.phases import Heartbeat
from trainer.contract.requests import Request, RequestAnswer, new_request
from trainer.engine import StepResult
from trainer.loop import Trainer


# ----------------------------------------------------------------------------- two trainers
def test_of_two_trainers_at_once_exactly_one_trains(tmp_path: Path, processes: Processes) -> None:
    config = card(tmp_path, checkpoint={"interval": 100_000})
    both = {job: processes.start(config, job) for job in ("1", "2")}
    processes.wait(lambda: any(process.exit_code is not None for process in both.values()))
    (loser,) = [job for job, process in both.items() if process.exit_code is not None]
    (winner,) = set(both) - {loser}
    assert both[loser].exit_code == 2
    marker = ended(config, loser)
    # On a machine so busy that the first one was silent for the whole watch, it was superseded: one
    # trains all the same.
    assert (marker.reason in {"refused", "superseded"}, marker.restart) == (True, False)
    assert f" job {winner} (launch 1) of " in marker.message
    assert f"process {both[winner].pid}" in marker.message
    assert processes.output(loser).count(marker.message) == 1
    processes.wait(lambda: at(config, winner, 3))
    both[winner].send(signal.SIGTERM)
    assert both[winner].wait() == 0
    left = ended(config, winner)
    assert left.reason == "signal" and left.checkpoint_step == left.iteration >= 3
    assert jobs_of_checkpoints(config)[left.iteration] == winner


def test_a_frozen_trainer_that_was_superseded_publishes_nothing(
    tmp_path: Path, processes: Processes
) -> None:
    config = card(tmp_path, checkpoint={"interval": 1})  # it saves all the time
    old = processes.start(config, "1")
    processes.wait(lambda: at(config, "1", 6))
    os.kill(old.pid, signal.SIGSTOP)
    new = processes.start(config, "2")
    processes.wait(lambda: at(config, "2", 8))
    config.kill_switch.touch()
    assert new.wait() == 0
    config.kill_switch.unlink()
    before = (jobs_of_checkpoints(config), read_latest(config.paths.checkpoints))
    newest = max(before[0])
    assert before[0][newest] == "2" and before[1] == newest
    claims = LeaseFolder(config.paths)
    assert claims.newest()[0] == 2
    os.kill(old.pid, signal.SIGCONT)
    assert old.wait() == 2
    assert (jobs_of_checkpoints(config), read_latest(config.paths.checkpoints)) == before
    marker = ended(config, "1")
    assert (marker.reason, marker.restart) == ("superseded", False)
    assert (
        "job 2 (launch 1)" in marker.message
        and "has taken over (epoch 2, ours was 1)" in marker.message
    )


class Overtaken(Trainer):
    """Another trainer takes the lease over while this one does its third step."""

    def _step(self) -> StepResult:
        result = super()._step()
        if self.progress.iteration == 3 and self.mesh.rank == 0:
            assert LeaseFolder(self.config.paths).claim(
                2, LeaseClaim("9", 1, "elsewhere", 1, "ana", 0.0, "token", 2)
            )
        return result


def attend(kind: type[Trainer], config: TrainerConfig, job: str) -> tuple[str, int]:
    return trained(attempt_of(kind, config, job))


WAYS: dict[str, dict[str, Any]] = {
    "asynchronous": {},
    "synchronous": {"asynchronous": False},
    "original-layout": {"format": "deepspeed"},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_saving_publishes_without_the_lease(tmp_path: Path, way: str) -> None:
    config = card(tmp_path, checkpoint={"interval": 2, **WAYS[way]})
    assert {reason for reason, _ in run_ranks(attend, 2, Overtaken, config, "1", launch=False)} == {
        "superseded"
    }
    steps = checkpoint_steps(config.paths.checkpoints)
    # A save in the background may have been published before the third step had ended.
    assert steps in ([[], [2]] if way == "asynchronous" else [[2]])
    assert read_latest(config.paths.checkpoints) == (2 if steps else None)
    marker = ended(config, "1")
    assert (marker.reason, marker.restart) == ("superseded", False)


# ----------------------------------------------------------------------------- requests
class Asked(Trainer):
    """Someone asks for a checkpoint while this trainer does its third step, and stops it some steps
    later.
    """

    request: Request

    def _step(self) -> StepResult:
        result = super()._step()
        if self.progress.iteration == 3 and self.mesh.rank == 0:
            self.request.write(self.config.paths.checkpoint_request)
        return result


def asked(config: TrainerConfig, request: Request) -> tuple[str, int]:
    Asked.request = request
    return attend(Asked, config, "1")


def test_a_requested_checkpoint_is_saved_at_once(tmp_path: Path) -> None:
    config = card(tmp_path, checkpoint={"interval": 100_000}, run={"exit_interval": 9})
    request = new_request("checkpoint", "ana", "before the maintenance", config.paths.root)
    assert run_ranks(asked, 2, config, request, launch=False) == [("exit-interval", 9)] * 2
    assert checkpoint_steps(config.paths.checkpoints) == [3, 9]
    answer = RequestAnswer.read(config.paths.answer(request.id))
    assert answer is not None and (answer.step, answer.job_id) == (3, "1")
    beats = [Heartbeat.read(config.paths.heartbeat(rank)) for rank in range(2)]
    assert [found.request for found in beats if found] == [request.id] * 2  # each rank's receipt
    assert not config.paths.checkpoint_request.exists()


class AskedTwice(Trainer):
    """Someone asks for checkpoints at two steps; how their saves end is heard of only at the end."""

    requests: dict[int, Request]

    def _step(self) -> StepResult:
        result = super()._step()
        if self.mesh.rank == 0 and self.progress.iteration in self.requests:
            self.requests[self.progress.iteration].write(self.config.paths.checkpoint_request)
        return result

    def _hear_of_saves(self) -> None:
        """As where a save takes as long as all steps that follow."""


def asked_twice(config: TrainerConfig, requests: dict[int, Request]) -> tuple[str, int]:
    AskedTwice.requests = requests
    return attend(AskedTwice, config, "1")


def test_each_request_hears_of_its_own_save_however_late(tmp_path: Path) -> None:
    config = card(tmp_path, checkpoint={"interval": 100_000}, run={"exit_interval": 9})
    wanted = {
        step: new_request("checkpoint", "ana", f"at {step}", config.paths.root) for step in (3, 5)
    }
    assert run_ranks(asked_twice, 2, config, wanted, launch=False) == [("exit-interval", 9)] * 2
    assert checkpoint_steps(config.paths.checkpoints) == [3, 5, 9]
    for step, request in wanted.items():
        answer = RequestAnswer.read(config.paths.answer(request.id))
        assert answer is not None and answer.step == step


def test_a_pause_lets_the_named_attempt_train_and_no_other(tmp_path: Path) -> None:
    config = card(tmp_path, run={"exit_interval": 2})
    new_request("pause", "ana", "", config.paths.root, exempt="1").write(config.paths.pause)
    assert run_ranks(attend, 1, Trainer, config, "2", launch=False) == [("pause", 0)]
    assert (ended(config, "2").reason, ended(config, "2").restart) == ("pause", False)
    assert run_ranks(attend, 1, Trainer, config, "1", launch=False) == [("exit-interval", 2)]


def test_a_stop_while_data_do_not_come_saves(tmp_path: Path, processes: Processes) -> None:
    config = card(tmp_path, data={"workers": 1}, checkpoint={"interval": 100_000})
    trainer = processes.start(config, "1")
    processes.wait(lambda: at(config, "1", 3))
    processes.freeze_data_worker(trainer)
    processes.wait(lambda: (found := beat(config, "1")) is not None and found.phase == "data-wait")
    os.killpg(trainer.pid, signal.SIGTERM)  # as Slurm does it: the data worker gets it too
    assert trainer.wait() == 0
    marker = ended(config, "1")
    assert marker.reason == "signal" and marker.checkpoint_step == marker.iteration >= 3
    manifest = Manifest.read(config.paths.checkpoint(marker.iteration))
    assert manifest is not None and manifest.job_id == "1"


def test_an_end_at_once_is_honoured_while_data_do_not_come(
    tmp_path: Path, processes: Processes
) -> None:
    config = card(tmp_path, data={"workers": 1}, checkpoint={"interval": 100_000})
    trainer = processes.start(config, "1")
    processes.wait(lambda: at(config, "1", 3))
    # wherever it is, it must not be faster than the request is read
    os.kill(trainer.pid, signal.SIGSTOP)
    request = new_request("kill-now", "ana", "wrong card", config.paths.root)
    request.write(config.kill_switch)
    os.kill(trainer.pid, signal.SIGCONT)
    assert trainer.wait() == 0
    marker = ended(config, "1")
    assert (marker.reason, marker.restart, marker.checkpoint_step) == ("kill-switch", False, None)
    assert checkpoint_steps(config.paths.checkpoints) == []
    found = beat(config, "1")
    assert found is not None and (found.request, found.phase) == (request.id, "ended")
    assert json.loads(config.kill_switch.read_text())["why"] == "wrong card"
