"""Curves laid over each other: levels, noise, what was done again, where one reaches another."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from tests.tr11ops.curves.logs import changed, quiet
from tr11ops.curves.compare import compare, text_plot
from tr11ops.curves.curve import RunCurve, curve_of
from tr11ops.curves.steps import LoggedStep


def line(name: str, slope: float, last: int = 100, noise: float = 0.0) -> RunCurve:
    places = [float(x) for x in range(1, last + 1)]
    return RunCurve(name, places, [10.0 + slope * x + noise * (-1) ** int(x) for x in places])


def test_levels_and_differences_are_exact() -> None:
    compared = compare([line("a", 0.0), line("b", -0.01)], rows=4, lines=1)
    assert [row.x for row in compared.rows] == [25.75, 50.5, 75.25, 100.0]
    assert [round(row.difference(1), 9) for row in compared.rows] == [-0.25, -0.5, -0.75, -1.0]


def test_another_loss_is_a_value() -> None:
    steps = changed(quiet(1, 4), 3, 4, other_losses=(("sop", 0.5),))
    curve = curve_of("a", steps, "iteration", "sop-loss")
    assert (list(curve.x), list(curve.y)) == ([3.0, 4.0], [0.5, 0.5])


def test_the_shorter_run_ends_the_table() -> None:
    compared = compare([line("a", 0.0, 100), line("b", 0.0, 40)], rows=2, lines=5)
    assert compared.rows[-1].x == 40.0


def test_noise_is_no_difference() -> None:
    noisy = compare([line("a", 0.0, noise=1.0), line("b", 0.0005, noise=1.0)], rows=3, lines=20)
    assert not any(row.is_sure(1) for row in noisy.rows)
    assert "do not differ by more than noise" in noisy.sentence(1, "iteration")
    clear = compare([line("a", 0.0, noise=0.01), line("b", -0.05, noise=0.01)], rows=3, lines=20)
    assert all(row.is_sure(1) for row in clear.rows)


def test_it_says_where_the_other_is_ahead() -> None:
    first, second = line("slow", -0.01), line("fast", -0.02)
    compared = compare([first, second], rows=5, lines=2)
    assert compared.reached == (51.0,)
    said = compared.sentence(1, "iteration")
    assert said.startswith(
        "fast is 0.995 below slow at iteration 100; below in 5, above in 0 of 5 rows"
    )
    assert said.endswith("it is at slow's last level by iteration 51.")


def test_runs_that_share_nothing_are_refused() -> None:
    late = RunCurve("late", [500.0], [1.0])
    with pytest.raises(ValueError, match="late begins at 500, where another has ended"):
        compare([line("a", 0.0), late])
    with pytest.raises(ValueError, match="b: holds no finite value"):
        compare([line("a", 0.0), RunCurve("b", [], [])])


def test_one_point_each_can_be_compared() -> None:
    compared = compare([RunCurve("a", [5.0], [1.0]), RunCurve("b", [5.0], [2.0])])
    assert [row.difference(1) for row in compared.rows] == [1.0]


# ----------------------------------------------------------------------------- from the log
def test_a_short_window_has_a_row_for_each_value() -> None:
    """It had ten, several with one iteration's number and different levels."""
    window = RunCurve("a", (2.0, 3.0, 4.0, 5.0), (4.4, 4.3, 4.2, 4.1))
    assert [row.x for row in compare([window, window]).rows] == [3, 4, 5]


def test_what_was_done_again_counts_once() -> None:
    steps = [*quiet(1, 50), *changed(quiet(31, 60, "2"), 31, 60, lm_loss=1.5)]
    curve = curve_of("run", steps, "iteration", "loss")
    assert list(curve.x) == [float(x) for x in range(1, 61)]
    assert set(curve.y[30:]) == {1.5}


def test_hours_are_hours_of_training() -> None:
    every_tenth = [step for step in quiet(10, 100) if step.record.iteration % 10 == 0]
    curve = curve_of("run", every_tenth, "hours", "loss")
    # the first line stands for one step at least
    assert curve.x[-1] == pytest.approx((1 + 90) * 105.2 / 3600)


def test_axes_and_values() -> None:
    steps = list(quiet(1, 3))
    assert list(curve_of("run", steps, "samples", "batch").x) == [2048.0, 4096.0, 6144.0]
    assert list(curve_of("run", steps, "tokens", "tflops").y) == [
        step.record.tflops for step in steps
    ]


def test_what_is_not_finite_is_left_out() -> None:
    steps: list[LoggedStep] = changed(quiet(1, 5), 2, 3, lm_loss=math.nan)
    steps = [replace(step, record=replace(step.record, grad_norm=None)) for step in steps]
    assert list(curve_of("run", steps, "iteration", "loss").x) == [1.0, 4.0, 5.0]
    assert list(curve_of("run", steps, "iteration", "grad-norm").x) == []


# ----------------------------------------------------------------------------- the plot
def test_the_plot_fits_and_shows_both() -> None:
    drawn = text_plot([line("a", 0.0), line("b", -0.05)], 79, 9)
    assert len(drawn) == 9 and max(map(len, drawn)) <= 79
    assert drawn[0].startswith("       10 |") and drawn[0].count("A") > 60
    # the mean of its column
    assert drawn[-1].endswith("B") and drawn[-1].split("|")[0].strip() == "5.025"


def test_a_flat_curve_can_be_drawn() -> None:
    assert any("A" in row for row in text_plot([line("a", 0.0)], 40, 5))
