"""The loop's course with everything on: curriculum, skipped ranges, restarts, spikes, roll-backs,
schedule rules.

Each case is a real training of a tiny model on two stages; what a restart must give is what the
uninterrupted run gave.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.courses import (
    Curve,
    attempt_cut_in_roll_back,
    card,
    curve,
    disagreeing_attempt,
    diverged_attempt,
    poisoned_attempt,
    records,
    refusal,
    run,
)
from tests.trainer.spawn import RanksFailed, run_ranks
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoint_names import checkpoint_steps, read_latest
from trainer.contract.origin import BranchOrigin
from trainer.contract.recovery import (
    BY_HAND,
    PendingMoves,
    RecoveryEvent,
    RecoveryRecord,
    read_recovery,
    write_recovery,
)

COURSE: dict[str, Any] = {
    "batch": {"ramp": {"start": 8, "increment": 8, "samples": 48}},
    "curriculum": {"kind": "linear", "start_length": 8, "step": 4, "total_steps": 12},
    "data": {"skip_ranges": ["4-6", "15-15"]},
    "model": {"attention_dropout": 0.1, "hidden_dropout": 0.1, "activation_checkpointing": True},
    "evaluation": {"interval": 5, "iterations": 1},
}


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """The curve of eight steps without a break, by the card as it is."""
    config = card(tmp_path_factory.mktemp("eight"), run={"exit_interval": 8})
    assert run(config) == ("exit-interval", 8)
    return curve(config)


def test_restarts_inside_curriculum_and_ramp_change_nothing(tmp_path: Path) -> None:
    whole = card(
        tmp_path, **COURSE, run={"directory": str(tmp_path / "whole"), "exit_interval": 18}
    )
    assert run(whole) == ("exit-interval", 18)
    expected = curve(whole)
    assert set(expected) == set(range(1, 19)) - {4, 5, 6, 15}
    lengths = [values[5] for _, values in sorted(expected.items())]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (8, 16)
    # The counters moved over what was skipped: whole global batches, at the lengths that the
    # curriculum has there.
    assert expected[7][2] - expected[3][2] == 3 * 8 + 16
    cut = card(tmp_path, **COURSE, run={"directory": str(tmp_path / "cut"), "exit_interval": 7})
    assert run(cut, 1) == ("exit-interval", 7)
    assert run(cut, 2) == ("exit-interval", 14)  # the next step would be the skipped one
    last = card(tmp_path, **COURSE, run={"directory": str(tmp_path / "cut"), "exit_interval": 18})
    assert run(last, 3) == ("exit-interval", 18)
    assert curve(cut) == expected  # bit for bit
    evaluations = [
        (record["iteration"], record["lm_loss"]) for record in records(whole, "validation")
    ]
    assert [iteration for iteration, _ in evaluations] == [10]  # 5 and 15 were skipped
    assert [
        (record["iteration"], record["lm_loss"]) for record in records(cut, "validation")
    ] == evaluations


def test_a_training_ends_at_its_tokens_and_after_a_skipped_end(tmp_path: Path) -> None:
    tokens = card(
        tmp_path,
        batch={"train_tokens": 16 * 16 * 6 - 1},
        run={"directory": str(tmp_path / "tokens-run")},
    )
    assert run(tokens) == ("finished", 6)
    skipped = card(
        tmp_path, data={"skip_ranges": ["8-400"]}, run={"directory": str(tmp_path / "skipped")}
    )
    assert run(skipped) == ("finished", 24)
    assert max(curve(skipped)) == 7
    assert run(skipped, 2)[0] == "finished"  # a restart has nothing left to train


def test_a_spike_is_rolled_back_and_its_data_skipped(tmp_path: Path) -> None:
    recovery = {"on_spike": "roll_back", "skip_margin": 1, "roll_backs": 1}
    config = card(
        tmp_path, recovery=recovery, checkpoint={"interval": 4}, run={"exit_interval": 20}
    )
    assert run(config, spike_at=14) == ("exit-interval", 20)
    spikes, backs = records(config, "spike"), records(config, "roll-back")
    assert spikes[0]["iteration"] in {14, 15}
    assert backs[0]["to"] == 12
    losses = {iteration: values[0] for iteration, values in curve(config).items()}
    # ln 64 is 4.2, and the spike was far above
    assert max(losses[iteration] for iteration in range(17, 21)) < 5.0
    remembered = read_recovery(config.paths)
    assert [event.to_step for event in remembered.events] == [12]
    first, last = remembered.events[0].skip_first, remembered.events[0].skip_last
    assert first <= 14 <= last
    trained_again = [record["iteration"] for record in records(config)]
    assert not [step for step in trained_again[trained_again.index(max(14, spikes[0]["iteration"])) + 1 :]
                if first <= step <= last]  # fmt: skip
    # A restart knows of it, and what was saved in the spike is out of its way.
    again = card(tmp_path, recovery=recovery, checkpoint={"interval": 4}, run={"exit_interval": 22})
    assert run(again, 2) == ("exit-interval", 22)
    assert read_latest(config.paths.checkpoints) == 22


def test_a_cut_off_roll_back_is_finished_by_the_next_attempt(tmp_path: Path) -> None:
    # Only the norms of steps 14 and 15 make it a spike, so step 14 has been saved by then.
    recovery = {"on_spike": "roll_back", "skip_margin": 1, "roll_backs": 1, "loss_factor": 1e6}
    config = card(
        tmp_path, recovery=recovery, checkpoint={"interval": 1}, run={"exit_interval": 20}
    )
    with pytest.raises(RanksFailed):
        run_ranks(attempt_cut_in_roll_back, 2, config, launch=False)
    event = read_recovery(config.paths).events[0]
    discarded = [
        step for step in checkpoint_steps(config.paths.checkpoints) if step >= event.first_sign
    ]
    assert discarded  # the record is there, and nothing was renamed yet
    assert run(config, 2) == ("exit-interval", 20)
    names = {entry.name for entry in config.paths.checkpoints.iterdir()}
    assert {f"global_step{step}.discarded" for step in discarded} <= names
    assert len(read_recovery(config.paths).events) == 1
    trained = [record["iteration"] for record in records(config) if record["job_id"] == "2"]
    assert (event.to_step, event.skip_first) == (13, 14)
    assert trained == list(range(event.skip_last + 1, 21))


def test_a_roll_back_by_hand_equals_a_card_that_skips_the_same(tmp_path: Path) -> None:
    """Recorded, and cut off before the first rename: the next start finishes it."""
    sparse = {**COURSE, "checkpoint": {"interval": 7}, "evaluation": {"iterations": 0}}
    until = {"directory": str(tmp_path / "whole"), "exit_interval": 16}
    whole = card(tmp_path, **{**sparse, "data": {"skip_ranges": ["4-6", "9-11"]}}, run=until)
    assert run(whole) == ("exit-interval", 16)
    skips = {**sparse, "data": {"skip_ranges": ["4-6"]}}
    config = card(tmp_path, **skips, run={"exit_interval": 12})
    assert run(config, 1) == ("exit-interval", 12)
    assert checkpoint_steps(config.paths.checkpoints) == [7, 12]
    moves = (("global_step12", "global_step12.discarded"),)
    event = RecoveryEvent(
        BY_HAND, math.nan, math.nan, 12, 9, 7, 9, 11, 1.0, moves, "global_step12", "ana"
    )
    pending = PendingMoves(moves, "global_step7", {"kind": "roll-back", "to": 7})
    write_recovery(config.paths, RecoveryRecord((event,), pending))
    assert run(card(tmp_path, **skips, run={"exit_interval": 16}), 2) == ("exit-interval", 16)
    assert "global_step12.discarded" in {entry.name for entry in config.paths.checkpoints.iterdir()}
    again = {record["iteration"] for record in records(config) if record["job_id"] == "2"}
    assert again == {8, *range(12, 17)}
    found, expected = curve(config), curve(whole)
    # bit for bit
    assert {step: found[step] for step in again} == {step: expected[step] for step in again}
    assert [record["to"] for record in records(config, "roll-back")] == [7]
    assert read_recovery(config.paths).pending is None


def test_a_spike_that_is_only_flagged_stops_nothing(tmp_path: Path) -> None:
    config = card(tmp_path, recovery={"on_spike": "flag"}, run={"exit_interval": 16})
    assert run(config, spike_at=13) == ("exit-interval", 16)
    assert records(config, "spike")
    assert not records(config, "roll-back")


def test_what_one_rank_alone_sees_decides_nothing(tmp_path: Path) -> None:
    """A rank with numbers of its own would wait in a roll-back for ranks that train on."""
    config = card(tmp_path, recovery={"on_spike": "roll_back"}, run={"exit_interval": 18})
    assert (
        run_ranks(disagreeing_attempt, 2, config, launch=False, timeout=300.0)
        == [("exit-interval", 18)] * 2
    )
    assert not records(config, "spike")
    assert max(values[0] for values in curve(config).values()) < 6.0  # the log says what decides


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_is_dropped_and_counted(tmp_path: Path, dtype: str) -> None:
    config = card(tmp_path, precision={"dtype": dtype}, run={"exit_interval": 8})
    assert run_ranks(poisoned_attempt, 2, config, 4, launch=False) == [("exit-interval", 8)] * 2
    found = records(config)
    assert [record["nan_iterations"] for record in found] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert [record["skipped_iterations"] for record in found] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert found[3]["lm_loss"] is None
    assert all(math.isfinite(record["lm_loss"]) for record in found if record["iteration"] != 4)


def test_minutes_between_saves(tmp_path: Path) -> None:
    config = card(
        tmp_path, checkpoint={"interval": None, "interval_minutes": 1e-6}, run={"exit_interval": 4}
    )
    assert run(config) == ("exit-interval", 4)
    assert checkpoint_steps(config.paths.checkpoints) == [1, 2, 3, 4]


@pytest.mark.parametrize("style", ["tr11-synchronous", "deepspeed"])
def test_other_ways_of_saving_resume_alike(tmp_path: Path, style: str, eight_steps: Curve) -> None:
    saving = {"asynchronous": False} if style != "deepspeed" else {"format": "deepspeed"}
    cut = card(tmp_path, checkpoint=saving, run={"exit_interval": 4})
    assert run(cut, 1) == ("exit-interval", 4)
    assert run(cut, 2) == ("exit-interval", 8)
    assert curve(cut) == eight_steps
    marker = EndMarker.read(cut.paths.end_marker("2"))
    assert marker is not None
    assert marker.checkpoint_step == 8


def test_a_schedule_that_differs_is_named_and_can_be_overridden(tmp_path: Path) -> None:
    first = card(tmp_path, run={"exit_interval": 3})
    run(first)
    hotter = {"learning_rate": 1e-3, "warmup_samples": 64}
    refused = run_ranks(refusal, 2, card(tmp_path, schedule=hotter), 2, launch=False)
    assert refused[0] == refused[1]
    assert (
        "learning rate: value from checkpoint (0.003) is not equal to the card's (0.001)"
        in refused[0]
    )
    betas = run_ranks(refusal, 2, card(tmp_path, optimizer={"beta2": 0.95}), 3, launch=False)
    assert "optimizer.beta2 is 0.999 there and 0.95 in the card" in betas[0]
    seed = run_ranks(refusal, 2, card(tmp_path, run={"seed": 7}), 6, launch=False)
    assert seed[0] == seed[1] and "was trained on other data: run.seed was 1234, is 7" in seed[0]
    over = card(
        tmp_path, schedule=hotter | {"on_resume": "override"}, run={"exit_interval": 6, "seed": 7},
        data={"on_resume": "switch"},
    )  # fmt: skip
    assert run(over, 4) == ("exit-interval", 6)
    assert max(values[4] for step, values in curve(over).items() if step > 3) < 1.01e-3
    back = card(
        tmp_path,
        schedule=hotter | {"learning_rate": 3e-3, "on_resume": "checkpoint"},
        run={"exit_interval": 8, "seed": 7},
    )
    assert run(back, 5) == ("exit-interval", 8)
    assert max(values[4] for step, values in curve(back).items() if step > 6) < 1.01e-3


def test_fine_tuning_takes_the_weights_alone(tmp_path: Path, eight_steps: Curve) -> None:
    first = card(tmp_path, run={"directory": str(tmp_path / "first"), "exit_interval": 6})
    run(first)
    start = {"load": str(first.paths.checkpoints), "finetune": True}
    tuned = card(
        tmp_path, checkpoint=start, run={"directory": str(tmp_path / "tuned"), "exit_interval": 2}
    )
    assert run(tuned) == ("exit-interval", 2)
    assert curve(tuned)[1][2] == 16  # counters from zero, weights not
    assert not math.isclose(curve(tuned)[1][0], eight_steps[1][0], rel_tol=1e-4)  # fresh weights
    origin = BranchOrigin.read(tuned.paths)
    assert origin is not None
    assert (origin.folder, origin.step, origin.job_id) == (str(first.paths.checkpoints), 6, "1")
    assert origin.takes_weights and origin.is_fresh and BranchOrigin.read(first.paths) is None
    assert run(tuned, 2) == ("exit-interval", 4)  # its own checkpoint goes before checkpoint.load
    assert BranchOrigin.read(tuned.paths) == origin
    # as in a directory that was restored from an archive of checkpoints
    tuned.paths.origin.unlink()
    third = card(
        tmp_path, checkpoint=start, run={"directory": str(tmp_path / "tuned"), "exit_interval": 6}
    )
    assert run(third, 3) == ("exit-interval", 6) and BranchOrigin.read(tuned.paths) == origin
    again = card(
        tmp_path,
        checkpoint={"load": str(tuned.paths.checkpoints)},
        run={"directory": str(tmp_path / "again")},
    )
    where = tuned.paths.checkpoints
    for step in (4, 5, 6):
        shutil.rmtree(where / f"global_step{step}")
    (where / "latest").unlink()
    (where / "global_step2").rename(where / "kept")
    refused = run_ranks(refusal, 2, again, 1, launch=False)
    assert (
        refused
        == [
            f"checkpoint.load = {where} holds no checkpoint (global_stepN); name a folder of checkpoints, or"
            " leave the key out"
        ]
        * 2
    )
    assert BranchOrigin.read(again.paths) is None


def test_named_groups_are_validated_apart_and_tested_at_the_end(tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    data = {
        "prefixes": [],
        "train_group": f"train: 1 0:0.8 {prefix}",
        "valid_groups": [
            f"valid: 1 0.8:0.9 {prefix}",
            f"valid_aa: 0.5 0.8:0.85 {prefix}, 0.5 0.85:0.9 {prefix}",
        ],
        "test_groups": [f"test: 1 0.9:1 {prefix}"],
        "workers": 1,
    }
    config = card(
        tmp_path,
        data=data,
        evaluation={"interval": 4, "iterations": 1},
        batch={"train_samples": 16 * 6},
    )
    assert run(config) == ("finished", 6)
    found = [(record["iteration"], record["name"]) for record in records(config, "validation")]
    assert found == [(4, "valid"), (4, "valid_aa"), (6, "valid"), (6, "valid_aa"), (6, "test")]


@pytest.mark.parametrize(
    ("split", "tested"), [("80,10,10", True), ("949,50,1", False), ("90,10,0", False)]
)
def test_the_test_share_is_evaluated_at_the_end(tmp_path: Path, split: str, tested: bool) -> None:
    config = card(
        tmp_path,
        data={"split": split},
        evaluation={"interval": 4, "iterations": 1},
        batch={"train_samples": 16 * 6},
    )
    assert run(config) == ("finished", 6)
    found = [record["name"] for record in records(config, "validation")]
    assert found == ["valid", "valid", "test"] if tested else ["valid", "valid"]


def test_another_micro_batch_in_mid_run_changes_no_loss(tmp_path: Path, eight_steps: Curve) -> None:
    assert run(card(tmp_path, run={"exit_interval": 4}), 1) == ("exit-interval", 4)
    changed = card(tmp_path, batch={"micro_batch_size": 2}, run={"exit_interval": 8})
    assert run(changed, 2) == ("exit-interval", 8)
    found = curve(changed)
    assert set(found) == set(range(1, 9))
    for (
        step,
        values,
    ) in (
        eight_steps.items()
    ):  # the sums of a step are taken in another order: fp32 rounding, as in parity
        assert math.isclose(found[step][0], values[0], abs_tol=2e-6)
        assert math.isclose(found[step][1], values[1], rel_tol=1e-5)
        assert found[step][2:] == values[2:]


@pytest.mark.parametrize(
    ("dropped_steps", "interval", "iteration", "words"),
    [
        (
            3,
            5,
            9,
            "the last 3 steps, up to iteration 9, were not finite and changed nothing (recovery.dropped_steps = 3)",
        ),
        (0, 5, 10, "nothing was saved at iteration 10: not finite are"),
    ],
    ids=["steps-in-a-row", "at-the-next-save"],
)
def test_a_model_of_nan_stops_the_training_and_is_not_saved(
    tmp_path: Path, dropped_steps: int, interval: int, iteration: int, words: str
) -> None:
    config = card(
        tmp_path, recovery={"dropped_steps": dropped_steps}, checkpoint={"interval": interval}
    )
    results = run_ranks(diverged_attempt, 2, config, 7, launch=False)
    assert results[0] == results[1]
    said, reached, is_refused = results[0]
    assert (reached, is_refused) == (iteration, False) and words in said and "step 5" in said
    assert (
        checkpoint_steps(config.paths.checkpoints) == [5]
        and read_latest(config.paths.checkpoints) == 5
    )
