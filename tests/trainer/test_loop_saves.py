"""A save that fails must not cost the training; a last save that fails must not look like a good end."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.cases import tiny
from tests.trainer.courses import trained, trainer_of, write_tokens
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.checkpoints import CheckpointError
from trainer.contract.end_marker import EndMarker
from trainer.control.failure import is_refusal
from trainer.control.lifecycle import HeartbeatWriter, SignalFlag
from trainer.data.errors import DataError, LostWorkerError
from trainer.loop import Trainer


def card(folder: Path, **run: Any) -> TrainerConfig:
    write_tokens(folder)
    value = tiny().model_dump(mode="json")
    value["run"] |= {"directory": str(folder), **run}
    value["checkpoint"]["interval"] = 2
    value["evaluation"]["iterations"] = 0
    value["data"]["prefixes"] = [str(folder / "tokens")]
    return TrainerConfig.model_validate(value)


class Watched(Trainer):
    """A trainer that keeps its log, and whose checkpoints cannot be written until they `heal`."""

    def _say(self, line: str) -> None:
        self.lines = [*getattr(self, "lines", []), line]
        checkpoints = self.config.paths.root / "checkpoints"
        if self.rank != 0:
            return
        if line == "training ...":  # from now on no checkpoint can be written: a file lies where the folder should be
            checkpoints.write_text("in the way")
        if "SAVE FAILED" in line and self.heal:
            checkpoints.unlink()

    heal = False


def attend(config: TrainerConfig, heal: bool) -> tuple[str, int, list[str]]:
    trainer = trainer_of(Watched, config, "7")
    trainer.heal = heal
    return trained(trainer)[0], trainer.steps_done, trainer.lines


@pytest.mark.parametrize("heal", [True, False], ids=["space-comes-back", "space-stays-away"])
def test_a_failed_save_is_said_and_the_training_goes_on(tmp_path: Path, heal: bool) -> None:
    config = card(tmp_path, exit_interval=5)
    results = run_ranks(attend, 2, config, heal, launch=False)
    assert [steps for _, steps, _ in results] == [5, 5]
    warnings = [line for line in results[0][2] if "SAVE FAILED" in line]
    marker = EndMarker.read(config.paths.end_marker("7"))
    assert marker is not None
    assert "SAVE FAILED at iteration 2, there is none yet" in warnings[0]
    if heal:
        assert [reason for reason, _, _ in results] == ["exit-interval"] * 2
        assert len(warnings) == 1
        assert any("saves failed before this one, at iteration 2;" in line for line in results[0][2])
        assert (marker.reason, marker.checkpoint_step, marker.restart) == ("exit-interval", 5, True)
        assert config.paths.checkpoint(5).is_dir()
    else:
        assert [reason for reason, _, _ in results] == ["error"] * 2
        assert len(warnings) == 3  # of steps 2 and 4, and at the end
        assert (marker.reason, marker.iteration, marker.checkpoint_step, marker.restart) == ("error", 5, None, True)
        assert "the last save failed" in marker.message
        assert "exit-interval" in marker.message
    records = [json.loads(line) for line in config.paths.metrics.read_text().splitlines()]
    assert [record["iteration"] for record in records if record["kind"] == "step"] == [1, 2, 3, 4, 5]


def lose_a_rank() -> CheckpointError:
    error = CheckpointError("the ranks lost each other")
    error.__cause__ = RuntimeError("Connection closed by peer")
    return error


@pytest.mark.parametrize(
    ("error", "steps", "refused"),
    [
        (CheckpointError("another model"), 0, True),
        (DataError("no such file"), 0, True),
        (DataError("no such file"), 9, False),  # it could be read at the start: another try may go better
        (LostWorkerError("data worker 0 was killed"), 0, False),  # of this moment, before a first step too
        (lose_a_rank(), 0, False),  # else one killed worker would keep every later task from training
        (RuntimeError("boom"), 0, False),
    ],
)
def test_only_bad_input_is_a_refusal(error: Exception, steps: int, refused: bool) -> None:
    assert is_refusal(error, steps) is refused


def test_a_wrong_clock_on_one_node_does_not_end_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(
        card(tmp_path), tmp_path / "c", AttemptIdentity("7", 1, tmp_path / "s"), HeartbeatWriter(card(tmp_path).paths, 0, "7"),
        SignalFlag(), time.monotonic() - 60,
    )  # fmt: skip
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op, group: None)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    trainer.mesh = SimpleNamespace(cpu_group=None)  # type: ignore[assignment]
    before = trainer.clock()
    monkeypatch.setattr(time, "time", lambda: 86_400.0)  # set back to 1970 by a day
    assert math.isclose(trainer.clock() - trainer._earliest_start(), 60, abs_tol=5)
    assert trainer.clock() >= before
