"""Samples kept through crashes and full disks, and the day on which a file system will be full."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tr11ops.base.observed import Unknown
from tr11ops.rundir import disk_usage
from tr11ops.rundir.disk_usage import (
    DAY_SECONDS,
    Usage,
    append_usage,
    forecast,
    newest,
    read_usage,
    thinned,
    usage_path,
)  # fmt: skip
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths

NOW = 1_650_000_000.0


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(RunPaths(tmp_path, "demo", "main"), tmp_path / "kill-switch")


def sample(
    age_days: float, percent: float = 50.0, name: str = "SCRATCH", inodes: float | None = None
) -> Usage:
    return Usage(
        NOW - age_days * DAY_SECONDS, name, "du", "/x", bytes_used=percent * 1e10, bytes_limit=1e12, inodes_used=inodes,
        inodes_limit=None if inodes is None else 100.0,
    )  # fmt: skip


def test_samples_are_kept_and_read_back(directory: RunDirectory) -> None:
    assert read_usage(directory) == ()
    first, second = sample(2), Usage(NOW, "WORK", "idrquota", bytes_share=0.862, inodes_share=0.687)
    append_usage(directory, [first], NOW)
    append_usage(directory, [second, sample(0)], NOW)
    append_usage(directory, [], NOW)
    assert read_usage(directory) == (first, second, sample(0))
    assert usage_path(directory).stat().st_mode & 0o777 == 0o664
    assert newest([sample(0, 7), first])["SCRATCH"] == sample(0, 7)
    assert second.percent("bytes") == pytest.approx(86.2) and first.percent("inodes") is None


def test_a_cut_line_costs_itself_alone(directory: RunDirectory) -> None:
    append_usage(directory, [sample(2)], NOW)
    with usage_path(directory).open("a") as stream:
        stream.write('{"time": 3, "name": "SCR')  # the disk was full, or the host died
    append_usage(directory, [sample(0)], NOW)
    assert read_usage(directory) == (sample(2), sample(0))


@pytest.mark.parametrize(
    "line",
    ["[]", "7", "{}", '{"time": "x", "name": "a", "source": "b"}', '{"time": 1, "name": 2, "source": "b"}', "\x00",
     '{"time": NaN, "name": "a", "source": "b"}', '{"time": 1, "name": "a", "source": "b", "bytes_used": -1}',
     '{"time": 1, "name": "a", "source": "b", "bytes_used": true}', "[" * 100000],
)  # fmt: skip
def test_garbage_is_left_out_and_garbage_alone_is_unknown(
    directory: RunDirectory, line: str
) -> None:
    path = usage_path(directory)
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert isinstance(read_usage(directory), Unknown)
    append_usage(directory, [sample(0)], NOW)
    assert read_usage(directory) == (sample(0),)


def test_a_newer_tr11_may_say_more(directory: RunDirectory) -> None:
    path = usage_path(directory)
    path.parent.mkdir(parents=True)
    path.write_text('{"time": 1, "name": "a", "source": "b", "pool": "fast", "bytes_used": null}\n')
    assert read_usage(directory) == (Usage(1, "a", "b"),)


def test_the_file_stays_small(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_usage, "THIN_ABOVE_BYTES", 20_000)
    # six an hour would be more than is kept
    many = [sample(hour / 240) for hour in range(200 * 240, 0, -40)]
    for start in range(0, len(many), 300):
        append_usage(directory, many[start : start + 300], NOW)
    kept = read_usage(directory)
    assert not isinstance(kept, Unknown)
    assert len(kept) < 7 * 24 + 90 + 5 + 300 and kept[-1] == many[-1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 120), st.sampled_from("ab")), max_size=60))
def test_thinning_keeps_the_newest_of_each_and_may_be_repeated(
    ages: list[tuple[float, str]],
) -> None:
    samples = [sample(age, name=name) for age, name in ages]
    kept = thinned(samples, NOW)
    assert set(kept) <= set(samples) and thinned(kept, NOW) == kept
    recent = [one for one in samples if NOW - one.time <= 90 * DAY_SECONDS]
    assert newest(kept) == newest(recent)


# ----------------------------------------------------------------------------- the forecast
def course(
    level: Callable[[float], float], days: float = 10.0, every_hours: float = 12.0
) -> list[Usage]:
    """Samples of the last `days`, whose fullness in percent is a function of the day."""
    count = int(days * 24 / every_hours)
    return [
        sample(days - day, level(day))
        for day in (number * every_hours / 24 for number in range(count + 1))
    ]


def test_steady_growth() -> None:
    found = forecast(course(lambda day: 50 + 3 * day), NOW)
    assert found.kind == "bytes" and found.full_at == pytest.approx(NOW + 20 / 3 * DAY_SECONDS)
    assert found.per_day == pytest.approx(3.0) and found.not_before is None


def test_odd_samples_do_not_count() -> None:
    points = course(lambda day: 50 + 3 * day + (25 if day == 5 else 0))
    assert forecast(points, NOW).full_at == pytest.approx(NOW + 20 / 3 * DAY_SECONDS, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.2, 8), st.integers(0, 10**6))
def test_noise_moves_the_day_little(slope: float, seed: int) -> None:
    noise = random.Random(seed)
    found = forecast(course(lambda day: 10 + slope * day + noise.uniform(-0.1, 0.1)), NOW)
    assert found.full_at is not None
    days = (found.full_at - NOW) / DAY_SECONDS
    assert days == pytest.approx((90 - 10 * slope) / slope, rel=0.15)


def test_no_growth_and_growth_that_stopped() -> None:
    assert forecast(course(lambda day: 60), NOW).why == "it does not grow"
    assert forecast(course(lambda day: 80 - 2 * day), NOW).full_at is None
    stopped = forecast(course(lambda day: 50 + 4 * min(day, 5)), NOW)
    assert (stopped.full_at, stopped.why) == (None, "growth has stopped")


def test_one_deletion_leaves_the_pace() -> None:
    found = forecast(course(lambda day: 40 + 4 * day - (30 if day >= 7 else 0)), NOW)
    assert found.full_at == pytest.approx(NOW + 12.5 * DAY_SECONDS) and found.not_before is None


def test_deletions_again_and_again_say_not_before() -> None:
    """Four points a day, twelve deleted every fourth day: it grows by one a day on the whole."""
    found = forecast(
        course(lambda day: 50 + 4 * day - 12 * (day // 4), days=12, every_hours=6), NOW
    )
    last = 50 + 48 - 36
    assert found.not_before == pytest.approx(NOW + (100 - last) / 4 * DAY_SECONDS)
    assert found.full_at is not None and found.full_at > NOW + 20 * DAY_SECONDS
    level = forecast(course(lambda day: 50 + 4 * (day % 3), days=12, every_hours=6), NOW)
    assert level.not_before is not None and (
        level.full_at is None or level.full_at > NOW + 100 * DAY_SECONDS
    )


def test_full_already_and_the_limit_that_was_raised() -> None:
    assert forecast(course(lambda day: 91 + day), NOW).full_at == NOW
    raised = [Usage(one.time, "x", "lfs", bytes_used=one.bytes_used, bytes_limit=5e11 if one.time < NOW - 5e5 else 1e12)
              for one in course(lambda day: 30 + day)]  # fmt: skip
    assert forecast(raised, NOW).full_at == pytest.approx(NOW + 60 * DAY_SECONDS)


def test_inodes_may_come_first() -> None:
    points = [sample(10 - day, 50 + day, inodes=40 + 5 * day) for day in range(11)]
    found = forecast(points, NOW)
    assert found.kind == "inodes" and found.full_at == pytest.approx(NOW + 2 * DAY_SECONDS)


def test_shares_alone_are_enough() -> None:
    points = [
        Usage(NOW - (10 - day) * DAY_SECONDS, "W", "idrquota", bytes_share=(50 + day) / 100)
        for day in range(11)
    ]
    assert forecast(points, NOW).full_at == pytest.approx(NOW + 40 * DAY_SECONDS)


@pytest.mark.parametrize(
    "points",
    [[], [sample(0)], [sample(0.1), sample(0.05), sample(0)], [sample(40), sample(30), sample(20)]],
)
def test_too_little_to_say(points: list[Usage]) -> None:
    found = forecast(points, NOW)
    assert (found.full_at, found.why) == (None, "too few samples yet")


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(-2, 20), st.floats(0, 200)), max_size=30))
def test_any_samples_give_a_forecast_that_json_can_carry(points: list[tuple[float, float]]) -> None:
    """Also with a clock that was set back: samples of the future are left out."""
    found = forecast([sample(age, percent) for age, percent in points], NOW)
    json.dumps([found.full_at, found.not_before, found.per_day], allow_nan=False)
