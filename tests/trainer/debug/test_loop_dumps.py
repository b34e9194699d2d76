"""Dumps of the real loop: a restart shows in them as equal to going on, with data from worker
processes and dropout.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.trainer.cases import tiny
from tests.trainer.courses import attempt_of, trained, write_tokens
from tests.trainer.spawn import run_ranks
from trainer.checkpoint.__main__ import main
from trainer.config.card import TrainerConfig
from trainer.debug.record import DumpRecord, companions
from trainer.loop import Trainer


def card(folder: Path, directory: str, leave_at: int) -> TrainerConfig:
    value = tiny(2, 1, hidden_dropout=0.1).model_dump(mode="json")
    value["run"] |= {"directory": str(folder / directory), "exit_interval": leave_at}
    value["evaluation"] |= {"interval": 3, "iterations": 1}
    value["data"]["prefixes"] = [str(folder / "tokens")]
    value["debug"] = {"dump": "fingerprint", "iterations": ["4-6"]}
    return TrainerConfig.model_validate(value)


def attend(config: TrainerConfig, job: str) -> str:
    # Python seeds its generator again in each process; nothing in the training draws from it
    random.seed(7)
    return trained(attempt_of(Trainer, config, job))[0]


def test_a_restart_is_the_same_as_going_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path, 200)
    for directory, job, leave_at in (
        ("stopped", "7", 4),
        ("stopped", "8", 6),
        ("straight", "9", 6),
    ):
        config = card(tmp_path, directory, leave_at)
        assert run_ranks(attend, 2, config, job, launch=False) == ["exit-interval"] * 2
    places = {
        job: str(tmp_path / directory / "state" / "attempts" / job / "debug" / "launch-1")
        for directory, job in (("stopped", "7"), ("stopped", "8"), ("straight", "9"))
    }
    after = next(
        path
        for path in companions(Path(places["9"]))
        if path.name.endswith("6-pp0-tp0-dp0-after-iteration.json")
    )
    record = DumpRecord.read(after)
    assert (record.facts.optimizer_step, record.facts.consumed_samples) == (6, 96)
    assert record.facts.samples_digest is not None
    for one, other in (("7", "8"), ("9", "8")):
        code = main(["diff", places[one], places[other]])
        assert code == 0, capsys.readouterr().out
    assert (
        main(["diff", f"{places['9']}:6:after-iteration", f"{places['9']}:5:after-iteration"]) == 1
    )
