"""What is found in a course of numbers, and what is not: each rule beside the quiet course it must
be silent on.
"""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from tests.tr11ops.curves.logs import BATCH, changed, quiet
from tr11ops.curves.judge import CurveJudgement, judge
from tr11ops.curves.steps import LoggedStep


def kinds(judged: CurveJudgement) -> list[str]:
    return [anomaly.kind for anomaly in judged.wrong]


def test_a_quiet_course_is_fine() -> None:
    judged = judge(quiet(31_000, 33_000))
    assert judged == CurveJudgement(2001, 31_000, 33_000, 1, ())


def test_nothing_is_judged_of_nothing() -> None:
    assert judge([]) == CurveJudgement(0, 0, 0, 0, ())


# ----------------------------------------------------------------------------- spikes
def april(steps: list[LoggedStep]) -> list[LoggedStep]:
    """The spike of the 176B training at iteration 31214, with the numbers of its log."""
    norms = {31_214: 0.24, 31_215: 0.95, 31_216: 2.4, 31_217: 15.9, 31_218: 145.0, 31_219: 960.0}
    for iteration, norm in norms.items():
        steps = changed(steps, iteration, iteration, grad_norm=norm)
    steps = changed(steps, 31_219, 31_219, lm_loss=5.098)
    for iteration in range(31_220, 31_250):
        steps = changed(
            steps,
            iteration,
            iteration,
            lm_loss=2.2 + 2.0 * 0.85 ** (iteration - 31_219),
            grad_norm=iteration % 7 / 10,
        )
    return steps


def test_the_spike_of_april_is_found() -> None:
    [spike] = judge(april(list(quiet(31_000, 31_400)))).wrong
    assert (spike.kind, spike.first, spike.line) == ("spike", 31_217, 31_217)
    assert (
        "loss 2.1" in spike.text
        and "5.098 at iteration 31,219" in spike.text
        and "960" in spike.text
    )
    assert "back to 2." in spike.text


def test_one_high_gradient_norm_is_noise() -> None:
    assert kinds(judge(changed(quiet(1, 300), 200, 200, grad_norm=900.0))) == []


def test_a_loss_that_stays_high_diverged() -> None:
    """As after the warm-up of the 104B training: 6.4, 14, then flat."""
    steps = changed(quiet(6_500, 7_400, loss=6.4), 7_000, 7_400, lm_loss=14.0)
    judged = judge(steps)
    assert kinds(judged) == ["divergence", "spike"]
    assert "did not come back within 100 lines" in judged.wrong[1].text
    assert "ends at 14" in judged.wrong[0].text


def test_a_spike_at_the_end_is_open() -> None:
    [spike] = judge(changed(quiet(1, 300), 297, 300, lm_loss=8.0)).wrong
    assert spike.last == 300 and spike.text.endswith("the log ends in it")


# ----------------------------------------------------------------------------- throughput
def test_one_slow_gpu_is_seen() -> None:
    """As on 28 April: 149 to 141 TFLOPs between two lines, for good."""
    [fall] = judge(changed(quiet(42_500, 43_000), 42_783, 43_000, tflops=141.5)).wrong
    assert fall.kind == "throughput-fall" and 42_781 <= fall.first <= 42_783
    assert "from 149.0 to 14" in fall.text and fall.text.endswith("to the end of the log")


def test_slow_lines_of_a_save_are_none() -> None:
    steps = changed(quiet(1, 600), 300, 303, tflops=90.0)
    assert kinds(judge(steps)) == []


def test_a_fall_that_ends_says_how_long() -> None:
    [fall] = judge(changed(quiet(1, 600), 300, 349, tflops=120.0)).wrong
    assert fall.text.endswith("for 52 iterations") or "for 5" in fall.text


def test_the_fall_of_a_small_training_has_its_numbers() -> None:
    steps = changed(changed(quiet(1, 600), 1, 600, tflops=0.00412), 300, 600, tflops=0.00351)
    [fall] = judge(steps).wrong
    assert "from 0.00412 to 0.00351 TFLOPs (-14" in fall.text


def test_another_batch_is_no_fall() -> None:
    assert kinds(judge(changed(quiet(1, 600), 300, 600, tflops=120.0, global_batch_size=784))) == []


def test_without_tflops_samples_count() -> None:
    steps = changed(
        changed(quiet(1, 400), 1, 400, tflops=math.nan), 300, 400, samples_per_second=17.0
    )
    [fall] = judge(steps).wrong
    assert "samples/s" in fall.text


# ----------------------------------------------------------------------------- restarts
def test_a_restart_that_goes_on_is_only_said() -> None:
    judged = judge([*quiet(1, 250), *quiet(201, 500, "2")])
    assert judged.starts == 2 and judged.wrong == ()
    [restart] = judged.anomalies
    assert "goes on at 201, 50 iterations done again" in restart.text
    assert restart.evidence == ("the losses of 50 iterations that were done twice are the same",)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"consumed_samples": 0}, "consumed samples are 0 at iteration 251, not 514,048"),
        ({"learning_rate": 6e-6}, "the learning rate is 6e-06 at iteration 251"),
        ({"lm_loss": 2.5}, "the loss is 2.5 after it, 2.2"),
        ({"grad_norm": 0.9}, "the gradient norm is 0.9 after it, 0.2"),
    ],
)
def test_what_does_not_go_on_is_named(values: dict[str, float], words: str) -> None:
    last = 251 if "consumed_samples" in values else 500
    judged = judge([*quiet(1, 250), *changed(quiet(251, 500, "2"), 251, last, **values)])
    [restart] = [anomaly for anomaly in judged.wrong if anomaly.kind == "restart"]
    assert any(words in line for line in restart.evidence), restart


def test_other_losses_for_the_same_steps_are_said() -> None:
    [restart] = judge(
        [*quiet(1, 250), *changed(quiet(201, 500, "2"), 201, 500, lm_loss=2.21)]
    ).anomalies
    assert restart.evidence[-1].startswith(
        "the losses of 50 iterations that were done twice differ by at most 0.0"
    )


def test_a_start_from_the_beginning_is_no_rise() -> None:
    """An empty run directory: iteration 1 again. What was before it cannot be compared with its
    first steps.
    """
    judged = judge([*quiet(1, 250), *quiet(1, 300, "2", loss=11.0)])
    assert any("250 iterations done again" in anomaly.text for anomaly in judged.anomalies)


def test_lines_lost_between_two_starts_are_named() -> None:
    [restart] = judge([*quiet(1, 250), *quiet(280, 500, "2")]).wrong
    assert "no line between iterations 250 and 280" in restart.text


# ----------------------------------------------------------------------- missing, repeated, dropped
def test_a_missing_loss_is_a_range() -> None:
    [missing] = judge(changed(quiet(1, 100), 40, 44, lm_loss=math.nan)).wrong
    assert (missing.kind, missing.first, missing.last) == ("missing-loss", 40, 44)


def test_overflow_repeats_the_norm() -> None:
    judged = judge(changed(quiet(1, 100), 40, 43, grad_norm=0.251, skipped_iterations=1))
    assert kinds(judged) == ["dropped-steps", "repeated-norm"]
    assert "4 updates were dropped in 100 lines, 4 lines after one another" in judged.wrong[0].text


def test_a_rounded_norm_may_repeat_by_chance() -> None:
    assert kinds(judge(changed(quiet(1, 100), 40, 46, grad_norm=0.251))) == []


def test_one_dropped_update_is_the_loss_scale_at_work() -> None:
    judged = judge(changed(quiet(1, 100), 40, 40, skipped_iterations=1))
    assert judged.wrong == () and len(judged.anomalies) == 1


def test_missing_lines_within_a_start_are_a_gap() -> None:
    [gap] = judge([*quiet(1, 50), *quiet(61, 100)]).wrong
    assert (gap.kind, gap.first, gap.last) == ("gap", 51, 60)


def test_a_log_interval_of_ten_is_no_gap() -> None:
    every = [step for step in quiet(1, 500) if step.record.iteration % 10 == 0]
    assert judge(every).wrong == ()


def test_samples_of_another_batch_are_not_guessed() -> None:
    after = [
        replace(step, record=replace(step.record, global_batch_size=BATCH // 2))
        for step in quiet(251, 300, "2")
    ]
    assert judge([*quiet(1, 250), *after]).wrong == ()
