"""The card of each launch: what of it is decided before the workers start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.agent.allocation import Allocation
from tr11ops.agent.attempt_context import AttemptContext
from tr11ops.agent.step import LaunchRun, LaunchWatch, LineTee, StopFlag
from tr11ops.agent.workers import PlannedLaunch, RealWorkers
from tr11ops.launch.plan import resolved_card
from tr11ops.runcard.card import load_card
from trainer.config.card import load_trainer_config
from trainer.contract.files import write_json


@pytest.mark.parametrize("number", [1, 2])
def test_all_workers_of_a_launch_read_how_often_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    card = load_card(write_card(tmp_path), (), {})
    context = AttemptContext(
        card,
        Allocation("foreground", "7", array_id=None, task_id=None, nodes=("n1", "n2")),
        {},
        "tag",
    )
    write_json(context.folder / "card.json", resolved_card(card))
    started: list[Path] = []

    def note(self: LaunchRun, *_: object) -> None:
        started.append(self._launch.card)

    monkeypatch.setattr(LaunchRun, "run", note)
    workers = RealWorkers(context, StopFlag(), LineTee(tmp_path / "main_log"))
    planned = PlannedLaunch(number, ("n1", "n2"), started=0.0, save_minutes=12.5)
    workers.run(planned, LaunchWatch(), lambda: None)
    config = load_trainer_config(started[0])
    # the card's own interval holds as well
    assert (config.checkpoint.interval, config.checkpoint.interval_minutes) == (10, 12.5)
    written = load_trainer_config(context.folder / "card.json")
    assert written.checkpoint.interval_minutes is None
