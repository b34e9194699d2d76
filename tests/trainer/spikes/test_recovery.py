"""What a spike makes of the checkpoints that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.courses import card
from trainer.config.card import RecoverySection
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.recovery import RollBack
from trainer.spikes.recovery import Flag, SpikeDetector, SpikeWatch


@pytest.mark.parametrize(("on_spike", "saves_finished"), [("roll_back", 1), ("flag", 0)])
def test_a_save_in_the_background_is_gone_back_to(
    on_spike: str, saves_finished: int, tmp_path: Path
) -> None:
    """It ends only when it is waited for, as on a slow file system."""
    config = card(tmp_path, recovery={"on_spike": on_spike, "skip_margin": 1})
    finished: list[int] = []

    def write(step: int) -> None:
        folder = config.paths.checkpoint(step)
        assert folder.name == checkpoint_name(step)
        folder.mkdir(parents=True)
        (folder / MANIFEST_FILE).touch()

    def finish_saves() -> None:
        finished.append(12)
        write(12)

    write(8)
    watch = SpikeWatch(config, None)
    watch._detector = SpikeDetector(RecoverySection(), losses=(1.0,) * 50, norms=(1.0,) * 50)
    steps = (watch.observe(step, 60.0, 60.0, False, finish_saves) for step in range(14, 20))
    action = next(found for found in steps if found is not None)
    assert len(finished) == saves_finished
    if on_spike == "flag":
        assert isinstance(action, Flag)
    else:
        assert isinstance(action, RollBack) and action.to_step == 12
