"""How often a launch saves, on a real Slurm: after faults it chooses another interval than its card's, and its
checkpoints lie that far apart. It takes minutes: no two saves are less than one apart.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.operation import Operation
from tests.twin.rehearsal_inputs import steps_of
from tr11ops.twin.faults import inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from trainer.contract.paths import newest_step

# so many GPUs that BLOOM's rate alone is a fault in a week
PLAN = TwinPlan(name="saves", nodes=10, gpus=64, cpu_nodes=0, message_timeout_seconds=5)
STEPS_BY_CARD = 5000


def operation(twin: Twin, folder: Path, interval: int) -> Operation:
    """A rehearsal whose card says how many steps lie between two saves at most."""
    changes = (
        "slurm.gpus_per_node=64", "batch.global_batch_size=64", "rehearsal.save_seconds=2",
        "resilience.adapt_save_interval=true", "backup.prune=true", "backup.interval_hours=1",
        f"backup.store={folder / 'archive'}", f"checkpoint.interval={interval}",
    )  # fmt: skip
    return Operation(twin, folder, 8, 2, changes)


def has_saved(run: Operation, after: int) -> bool:
    """Whether there is a checkpoint of a later step."""
    return (newest_step(run.paths) or 0) > after


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_checkpoints_lie_as_far_apart_as_the_launch_has_chosen(
    twin_home: Path, tmp_path: Path
) -> None:
    require_slurm()
    (tmp_path / "archive").mkdir()
    with Twin.up(PLAN, twin_home) as twin:
        run = operation(twin, tmp_path, 5)
        number = run.launch("--array", "1-9")
        for count, step in enumerate((12, 30), 2):
            run.until_step(step)
            inject(twin, "worker-crash")
            run.until_trains_again(count)
        assert [launch["save_minutes"] for launch in run.launches()] == [None] * 3
        assert "tr11: the training saves as often as its card says: one fault in " in run.log()
        run.tr11("kill", "--wait", "--yes", "--reason", "another card")
        run.slurm.cancel(number)

        run = operation(twin, tmp_path, STEPS_BY_CARD)
        run.tr11("resume", "--yes")
        run.launch("--array", "1-9")
        run.until_trains_again(4)
        [*_, launch] = run.launches()
        minutes, saved = launch["save_minutes"], [launch["checkpoint_before"]]
        assert f"tr11: the training saves every {minutes:g} min: one fault in " in run.log()
        due = json.loads(run.tr11("status", "--json").stdout)["next_checkpoint"]
        assert due["why"] == "minutes" and 0 < due["seconds"] <= 60 * minutes
        for _ in range(2):
            run.until(lambda: has_saved(run, saved[-1]), "a save")
            saved.append(newest_step(run.paths))

        ended = {step["iteration"]: step["time"] for step in steps_of(run.paths)}
        _, first, second = saved
        longest = max(
            step["seconds_per_iteration"]
            for step in steps_of(run.paths)
            if step["iteration"] > first
        )
        assert second < STEPS_BY_CARD
        apart = 60 * minutes
        # the first step that ends after that time is saved; a look at the clock comes within a step
        assert apart - longest < ended[second] - ended[first] < apart + 2 * longest

        inject(twin, "worker-crash")
        run.until_trains_again(5)
        [*_, after] = run.launches()
        # it goes on from a save that the card alone would not have made
        assert after["checkpoint_before"] >= second and after["save_minutes"] is not None
        run.tr11("kill", "--now", "--wait", "--yes", "--reason", "the end")
