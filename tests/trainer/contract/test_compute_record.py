"""What a rank leaves of its own compute times: the last steps, and what was usual on it at first."""

from __future__ import annotations

from pathlib import Path

from trainer.contract.attempt import AttemptIdentity
from trainer.contract.compute_record import (
    FIRST_STEPS,
    USUAL_STEPS,
    ComputeRecord,
    ComputeTimes,
    RankPosition,
)
from trainer.contract.paths import RunPaths


def test_what_is_usual_is_of_the_steps_after_the_first_ones_and_stays(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    record = ComputeRecord(
        paths, AttemptIdentity("12", 1, paths.stop_request("12")), 0, RankPosition(0, 0)
    )

    def after(iteration: int) -> ComputeTimes:
        found = ComputeTimes.read(paths.compute("12", 0))
        assert found is not None and found.iteration == iteration
        return found

    for iteration in range(1, FIRST_STEPS + USUAL_STEPS + 31):
        seconds = (
            9.0
            if iteration <= FIRST_STEPS
            else 2.0
            if iteration <= FIRST_STEPS + USUAL_STEPS
            else 6.0
        )
        record.add(iteration, {"forward": seconds / 2, "backward": seconds / 2})
        if iteration == USUAL_STEPS:
            assert after(iteration).usual is None, "it is not known yet"
    last = after(FIRST_STEPS + USUAL_STEPS + 30)
    assert (last.usual, set(last.recent)) == (2.0, {6.0})
