"""Steps, their end, NaN, a loss of exactly 0 and slowness, in what each trainer prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import launches_of
from tests.tr11ops.dialects.trainer_lines import (
    LINES,
    WITH_TOTAL,
    WITHOUT_NUMBERS,
    WITHOUT_SPEED,
    healthy,
    log,
)
from tr11ops.diagnose.causes import judge
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.signature import FaultClass, NextStep

REAL = Path(__file__).parents[2] / "data" / "dialects"
RAISED = "\nTraceback (most recent call last):\n  File \"train.py\", line 1, in <module>\n    main()\nKeyError: 'input_ids'\n"


def judged(text: str, size: int = 1 << 20) -> Diagnosis:
    return judge([launches_of(text, size)[-1]])


@pytest.mark.parametrize("name", LINES)
def test_a_healthy_log_is_healthy_wherever_it_ends(name: str) -> None:
    """Also one that is still written, whose last line has no end."""
    text = log(LINES[name], healthy(40))
    for part in (text, text.rstrip("\n"), text[: 2 * len(text) // 3]):
        found = judged(part)
        assert (found.fault, found.step) == (FaultClass.UNKNOWN, NextStep.NONE), found.explanation
        if name not in WITHOUT_NUMBERS:
            assert "It ends after step 1" in found.explanation


@pytest.mark.parametrize("size", [1, 700, 1 << 20])
@pytest.mark.parametrize("name", LINES)
def test_losses_that_are_no_numbers(name: str, size: int) -> None:
    text = log(LINES[name], [*healthy(20), *["nan"] * 5])
    for part in (text, text.rstrip("\n")):
        found = judged(part, size)
        assert found.fault is FaultClass.NUMERICS and found.step is NextStep.ROLLBACK_AND_SKIP, (
            found.explanation
        )
        if name not in WITHOUT_NUMBERS:
            assert "the numbers broke at iteration 120." in found.explanation


def test_a_spike_that_had_come_back_is_not_why_the_numbers_broke() -> None:
    losses = [*healthy(20), "9.1", "8.2", *healthy(40), *["nan"] * 4]
    assert (
        "the numbers broke at iteration 162."
        in judged(log(LINES["torchtitan"], losses)).explanation
    )
    diverged = [*healthy(20), "9.1", "12.2", "9.0", "7.0", *["nan"] * 4]
    assert (
        "to 9.1 at iteration 120 and did not come back"
        in judged(log(LINES["torchtitan"], diverged)).explanation
    )


@pytest.mark.parametrize("name", LINES)
def test_gradients_that_are_no_numbers(name: str) -> None:
    losses, norms = healthy(25), [*["1.2"] * 20, *["nan"] * 5]
    assert judged(log(LINES[name], losses, norms)).fault is FaultClass.NUMERICS


@pytest.mark.parametrize("name", LINES)
def test_a_loss_of_exactly_0(name: str) -> None:
    found = judged(log(LINES[name], [*healthy(20), *["0.0"] * 4]))
    assert found.fault is FaultClass.NUMERICS and "exactly 0" in found.explanation
    assert found.step is NextStep.ROLLBACK_AND_SKIP
    from_the_first = judged(log(LINES[name], ["0.0"] * 12))
    assert (from_the_first.fault, from_the_first.step) == (FaultClass.NUMERICS, NextStep.FIX_CONFIG)


def test_a_loss_of_0_that_says_nothing() -> None:
    """Policy gradients are 0 where all rewards are alike; a small loss may round to 0."""
    reward = "{'loss': 0.0, 'grad_norm': 0.1, 'learning_rate': 1e-06, 'rewards/mean': 0.4, 'kl': 0.0, 'epoch': 0.1}\n"
    policy = "step:%d - actor/pg_loss:0.000 - actor/grad_norm:0.100 - critic/score/mean:0.4\n"
    small = log(LINES["huggingface-dicts"], ["0.02", "0.004", "0.0003", "0.0", "0.0", "0.0"])
    for text in (reward * 12, "".join(policy % step for step in range(12)), small):
        assert judged(text).fault is FaultClass.UNKNOWN


@pytest.mark.parametrize("name", [name for name in LINES if name not in WITHOUT_SPEED])
def test_slowness(name: str) -> None:
    count = 80
    speeds = [
        *[100.0 + number % 3 for number in range(count)],
        *[70.0 + number % 3 for number in range(count)],
    ]
    found = judged(log(LINES[name], healthy(2 * count), None, speeds))
    assert found.fault is FaultClass.GPU_HARDWARE and "it ran at" in found.explanation, (
        found.explanation
    )
    much = judged(log(LINES[name], healthy(2 * count), None, [100.0] * count + [11.0] * count))
    assert (much.fault, much.step) == (
        FaultClass.UNKNOWN,
        NextStep.PAGE,
    ) and "it ran at" in much.explanation


@pytest.mark.parametrize(
    "name", [name for name in LINES if name not in WITHOUT_SPEED | {"megatron"}]
)
def test_a_speed_that_varies_is_no_slowness(name: str) -> None:
    speeds = [100.0 - 35.0 * (number % 7 == 0) - 5.0 * (number % 3) for number in range(120)]
    assert judged(log(LINES[name], healthy(120), None, speeds)).fault is FaultClass.UNKNOWN


@pytest.mark.parametrize("name", sorted(WITH_TOTAL))
def test_the_step_and_the_last_one_decide_whether_it_ended(name: str) -> None:
    """A line that says that a loop is over says no more than that."""
    end = "\nTraining completed.\n"
    short = judged(log(LINES[name], healthy(20)) + end)
    assert short.fault is FaultClass.UNKNOWN and "ended at step 119 of 900" in short.explanation
    assert judged(log(LINES[name], healthy(20), total=119) + end).fault is FaultClass.CLEAN_EXIT
    assert judged(log(LINES[name], healthy(20), total=119)).fault is FaultClass.CLEAN_EXIT


def test_the_total_may_stand_at_the_begin_of_a_log() -> None:
    begin = "[titan] - INFO - Training starts at step 1, with local batch size 8, total steps 9,000 (warmup 200)\n"
    found = judged(
        begin
        + log(LINES["torchtitan"], healthy(20))
        + "[titan] - root - INFO - Training completed\n"
    )
    assert found.fault is FaultClass.UNKNOWN and "ended at step 119 of 9000" in found.explanation


@pytest.mark.parametrize("name", LINES)
def test_the_step_before_a_failure(name: str) -> None:
    found = judged(log(LINES[name], healthy(20)) + RAISED)
    assert found.fault is FaultClass.USER_CODE and "No step came before it" not in found.explanation
    if name not in WITHOUT_NUMBERS:
        assert "The last step before it was 119." in found.explanation


def test_that_no_step_came_is_said_only_of_a_trainer_that_is_known() -> None:
    assert (
        "No step came before it."
        in judged("using world size: 8, data-parallel-size: 1\n" + RAISED).explanation
    )
    assert (
        "No step came before it."
        in judged("INFO: GPU available: True (cuda), used: True\n" + RAISED).explanation
    )
    assert (
        "No step"
        not in judged("my trainer: batch 1200 done in 3 s, objective 2.1\n" + RAISED).explanation
    )


def test_bars_of_other_work_are_no_steps() -> None:
    bars = "Loading checkpoint shards: 100%|██████████| 4/4 [00:10<00:00,  2.61s/it]\n" * 20
    [launch] = launches_of(bars + RAISED)
    assert launch.progress is None
    evaluation = "".join(
        f"\n\r {number}%|█   | {number}/100 [00:01<00:09,  4.83it/s]\x1b[A"
        for number in range(1, 101)
    )
    [launch] = launches_of(log(LINES["huggingface"], healthy(20)) + evaluation)
    assert launch.progress is not None and (launch.progress.iteration, launch.progress.total) == (
        119,
        900,
    )
    assert judge([launch]).fault is FaultClass.UNKNOWN


@pytest.mark.parametrize(
    ("name", "last", "total", "broke"), [("huggingface", 24, 24, 20), ("lightning", 40, None, 34)]
)
def test_logs_of_real_trainings(name: str, last: int, total: int | None, broke: int) -> None:
    """Bars that overprint themselves, bars of evaluations inside them, and NaN as each prints it."""
    text = (REAL / f"{name}.log").read_text(encoding="utf-8")
    for part in (text, text.rstrip("\n")):
        [launch] = launches_of(part)
        assert launch.progress is not None and (
            launch.progress.iteration,
            launch.progress.total,
        ) == (last, total)
        found = judge([launch])
        assert (
            found.fault is FaultClass.NUMERICS
            and f"broke at iteration {broke}." in found.explanation
        )
        assert found.root_cause is not None and found.root_cause.text.count("nan") in {1, 2}
