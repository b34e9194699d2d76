"""Real trainers that meet on one run directory, that are asked to stop while they wait, or of which one refuses
its input in a step: people read the refusal, and no traceback.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tr11ops.diagnose.diagnose_logs import of_text
from tests.trainer.cases import VOCABULARY
from tests.trainer.control.trainers import Processes, at, beat, card, ended, jobs_of_checkpoints
from tests.trainer.courses import attempt_of, trained, worker_of
from tests.trainer.spawn import fork_server, run_ranks
from tr11ops.twin.machine import claimed_ports
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import EXIT_ERROR, EXIT_REFUSED, AttemptIdentity, EndMarker, Heartbeat
from trainer.contract.checkpoint_names import checkpoint_steps, read_latest
from trainer.contract.errors import DataError
from trainer.contract.files import host_name
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.manifest import Manifest
from trainer.contract.requests import Request, RequestAnswer, new_request
from trainer.contract.state_file import read_json
from trainer.control.exits import refusal_elsewhere
from trainer.control.lifecycle import write_failure
from trainer.data.groups import split_groups
from trainer.data.indexed_write import IndexedWriter
from trainer.data.sources import ReadOptions, plan_groups
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
class AskedOnce(Trainer):
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
    AskedOnce.request = request
    return attend(AskedOnce, config, "1")


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


SAMPLES, SEED = 16 * 20, 1234


def write_foreign(folder: Path, foreign: int) -> None:
    """Documents of 40 tokens in the order of the training, of which the sample `foreign` holds a
    token too many.
    """
    folder.mkdir(exist_ok=True)
    tokens = np.full(60 * 40, 3, dtype=np.uint16)
    ends = np.full(60, 40, dtype=np.int32)
    with IndexedWriter(folder / "numbered", "uint16") as writer:
        writer.add_sequences(np.arange(60 * 40, dtype=np.uint16), ends)
    (plan,) = plan_groups(
        split_groups([(1.0, folder / "numbered")], "1", {"train": SAMPLES}), ReadOptions(16, SEED)
    ).values()
    tokens[plan.open()[foreign][8]] = VOCABULARY
    with IndexedWriter(folder / "tokens", "uint16") as writer:
        writer.add_sequences(tokens, ends)


def _train(rank: int, world: int, port: int, card_path: Path, output: Path) -> None:
    """What `torchrun ... -m trainer CARD` starts, but that the look at the start sees only the
    first token.
    """
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from trainer.data import sources

    sources.FULL_TOKEN_CHECK_BYTES, sources.TOKEN_CHECK_PARTS, sources.TOKEN_CHECK_PART = 0, 1, 1
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TR11_JOB_ID="1",
    )  # fmt: skip
    from trainer.__main__ import main

    main([str(card_path)])


def run_two(folder: Path, **changes: Any) -> tuple[list[str], list[int | None], TrainerConfig]:
    """What two ranks said, how they ended, and their card."""
    batch = {"train_samples": SAMPLES, "micro_batch_size": 8}
    config = card(folder, batch=batch, run={"seed": SEED}, **changes)
    path = folder / "card.json"
    path.write_text(config.model_dump_json())
    outputs = [folder / f"{rank}.out" for rank in range(2)]
    with claimed_ports(1, beside_twins=True) as port:
        started = [
            fork_server().Process(target=_train, args=(rank, 2, port, path, outputs[rank]))
            for rank in range(2)
        ]
        try:
            for process in started:
                process.start()
            for process in started:
                process.join(300)
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                process.join()
    return (
        [output.read_text() for output in outputs],
        [process.exitcode for process in started],
        config,
    )


@pytest.mark.parametrize(
    ("pipeline", "workers", "foreign"),
    [
        pytest.param(1, 0, 3, id="the first replica"),
        pytest.param(1, 0, 11, id="the second replica, in a step"),
        pytest.param(1, 1, 11, id="the second replica, reading ahead"),
        pytest.param(2, 0, 3, id="the first stage"),
    ],
)
def test_the_others_say_that_one_has_refused(
    tmp_path: Path, pipeline: int, workers: int, foreign: int
) -> None:
    write_foreign(tmp_path, foreign)
    data = {"order": "single", "workers": workers}
    said, codes, config = run_two(tmp_path, data=data, parallel={"pipeline": pipeline})
    refuser = foreign // 8
    other = 1 - refuser
    refused = [line for line in said[refuser].splitlines() if line.startswith("tr11: refused: ")]
    assert len(refused) == 1 and f"holds token {VOCABULARY} at its place" in refused[0], said[
        refuser
    ]
    assert (
        f"tr11: ended with rank {refuser} on {host_name()}, which refused: its own line says why"
        in said[other]
    )
    for text in said:
        assert "Traceback" not in text and "Error" not in text and "gloo" not in text, text
    assert codes == [EXIT_REFUSED, EXIT_REFUSED]
    marker = EndMarker.read(config.paths.end_marker("1"))
    assert marker is not None and (marker.reason, marker.restart) == ("refused", False)
    assert f"holds token {VOCABULARY}" in marker.message
    kept = read_json(config.paths.attempt("1") / "failures" / f"rank-{other}.json")
    assert kept is not None and "peer" in kept["error"], "for who asks which connection broke"


def test_after_steps_it_is_a_failure_in_one_line_all_the_same(tmp_path: Path) -> None:
    write_foreign(tmp_path, 16 + 11)
    said, codes, config = run_two(tmp_path, data={"order": "single", "workers": 0})
    assert " iteration        1/" in said[1]
    stopped = [
        line for line in said[1].splitlines() if line.startswith("tr11: stopped: DataError: ")
    ]
    assert len(stopped) == 1 and f"holds token {VOCABULARY} at its place" in stopped[0], said[1]
    assert (
        f"tr11: ended with rank 1 on {host_name()}, which stopped: its own line says why" in said[0]
    )
    for text in said:
        assert "Traceback" not in text and "gloo" not in text, text
    assert codes == [EXIT_ERROR, EXIT_ERROR]
    assert of_text(tmp_path, said[1]).fault.value == "user_code", (
        "what stopped it is known without a traceback"
    )
    assert EndMarker.read(config.paths.end_marker("1")) is None, "the next task may train on"


def test_only_a_refusal_of_this_launch_and_of_another_rank_excuses(tmp_path: Path) -> None:
    """An error that only looks like a lost rank keeps its traceback: no one else has left a word
    for it.
    """
    config = card(tmp_path)
    paths = config.paths
    now, before = (AttemptIdentity("7", launch, paths.stop_request("7")) for launch in (2, 1))
    write_failure(paths, before, 1, DataError("of the launch before"), 0, refusal="refused")
    write_failure(paths, now, 2, RuntimeError("a fault with a place"), 0)
    write_failure(paths, now, 3, DataError("its own"), 0, refusal="refused")
    (paths.attempt("7") / "failures" / "rank-4.json").write_text("half a rec")
    assert refusal_elsewhere(worker_of(config, "7", rank=3, launch=2)) is None
    found = refusal_elsewhere(worker_of(config, "7", rank=2, launch=2))
    assert found is not None and found[0] == "refused" and "rank 3" in found[1]
