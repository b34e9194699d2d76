"""When jobs are due: on the grid, once for many missed rounds, and whatever is done to the clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.cron import CronTrigger
from hypothesis import example, given, settings, strategies as st

from tr11ops.cron.jobs import Daily, Every, Schedule, is_due, next_due, slack

NOW = 1_795_289_822.25  # 2026-11-21 19:37:02 UTC
HOUR, DAY = 3600.0, 86_400.0
moments = st.floats(1e6, 4e9)
periods = st.one_of(st.sampled_from([1, 60, 300, 3600, 21_600, 86_400]), st.floats(0.5, 1e6))
zones = st.sampled_from(
    ["UTC", "Europe/Paris", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"]
)
clocks = st.builds("{:02d}:{:02d}".format, st.integers(0, 23), st.integers(0, 59))
schedules: st.SearchStrategy[Schedule] = st.one_of(
    st.builds(Every, periods), st.builds(Daily, clocks, zones)
)


@settings(deadline=None)
@given(schedules, moments)
def test_the_next_point_is_later_and_none_lies_between(schedule: Schedule, moment: float) -> None:
    point = schedule.after(moment)
    assert (
        moment
        < point
        <= moment
        + max(schedule.period_seconds * (1 + 1e-9), 25.5 * HOUR * isinstance(schedule, Daily))
    )
    between = moment + (point - moment) * 0.5
    if moment < between < point:
        assert schedule.after(between) == point


@settings(deadline=None)
@given(clocks, zones, moments)
def test_a_daily_point_is_what_apscheduler_finds(clock: str, zone: str, moment: float) -> None:
    hour, minute = map(int, clock.split(":"))
    local = ZoneInfo(zone)
    mine = datetime.fromtimestamp(Daily(clock, zone).after(moment), local)
    if (
        mine.utcoffset() != (mine - timedelta(hours=3)).utcoffset()
        or mine.utcoffset() != (mine + timedelta(hours=3)).utcoffset()
        or (mine.hour, mine.minute) != (hour, minute)
    ):
        return  # near a change of the clock both are right in their own way
    theirs = CronTrigger(hour=hour, minute=minute, timezone=local).get_next_fire_time(
        None, datetime.fromtimestamp(moment, local) + timedelta(microseconds=1)
    )
    assert abs(theirs.timestamp() - mine.timestamp()) < 1 or (
        theirs.utcoffset() != datetime.fromtimestamp(moment, local).utcoffset()
    )


def test_a_day_without_the_hour_and_a_day_with_it_twice() -> None:
    job = Daily("02:30", "Europe/Paris")
    spring = job.after(datetime(2026, 3, 28, 23, tzinfo=UTC).timestamp())
    # 03:30 by the new clock
    assert datetime.fromtimestamp(spring, UTC) == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    autumn = job.after(datetime(2026, 10, 24, 23, tzinfo=UTC).timestamp())
    assert datetime.fromtimestamp(autumn, UTC) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    assert job.after(autumn) - autumn == 25 * HOUR  # once, not twice


@settings(deadline=None)
@given(schedules, moments)
def test_the_first_round_is_at_once(schedule: Schedule, now: float) -> None:
    assert is_due(schedule, None, now)


@settings(deadline=None)
@given(schedules, moments)
def test_a_round_that_just_started_is_not_due_before_the_next(
    schedule: Schedule, now: float
) -> None:
    assert not is_due(schedule, now, now)
    point = schedule.after(now + slack(schedule))
    almost = now + (point - slack(schedule) - now) * 0.999
    if now < almost < point - slack(schedule):
        assert not is_due(schedule, now, almost)
    assert is_due(schedule, now, point)


@settings(deadline=None)
@given(schedules, st.floats(1e6, 4e9), st.floats(1, 1000))
def test_missed_rounds_are_one_round(schedule: Schedule, started: float, missed: float) -> None:
    now = started + (missed + 1) * schedule.period_seconds
    assert is_due(schedule, started, now)
    assert not is_due(schedule, now, now)


@settings(deadline=None)
@given(schedules, st.floats(1e7, 4e9), st.floats(0, 1e9))
@example(Every(HOUR), NOW, 5 * HOUR)
@example(Every(HOUR), NOW, 3650 * DAY)
def test_a_clock_that_is_set_back_stops_nothing(
    schedule: Schedule, started: float, back: float
) -> None:
    """Whatever the clock says now, the job is due at one of the next three points."""
    now = started - back
    within = schedule.after(schedule.after(schedule.after(now)))
    assert is_due(schedule, started, now) or is_due(schedule, started, within)


@settings(deadline=None)
@given(schedules, moments)
def test_rounds_do_not_drift(schedule: Schedule, now: float) -> None:
    """Each round starts late, by another delay; the points stay the same."""
    expected = now
    for delay in (0.0, 0.2, 0.05, 0.3):
        expected = schedule.after(expected + slack(schedule))
        started = expected + delay * slack(schedule)
        assert is_due(schedule, now, started)
        now = started


@pytest.mark.parametrize("lead", [0.0, 5.0, 29.0])
def test_a_node_whose_clock_is_behind_does_not_skip_the_round(lead: float) -> None:
    """The scheduler begins the job at its own 20:00:00; this node then runs one round, not none and
    not two.
    """
    point = Every(HOUR).after(NOW)
    started = point - lead
    assert is_due(Every(HOUR), NOW - HOUR, started)
    assert not is_due(Every(HOUR), started, point + 1)
    assert next_due(Every(HOUR), started, point) == point + HOUR


@pytest.mark.parametrize(
    "zone", ["Europe/Nowhere", "Europe", "../etc/passwd", "", "/etc/localtime"]
)
def test_a_zone_that_no_one_knows_is_refused(zone: str) -> None:
    with pytest.raises(ValueError, match="is not a time zone"):
        Daily("08:00", zone)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_an_impossible_period_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot run every"):
        Every(seconds)
