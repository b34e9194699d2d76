"""Times of day, the rota and escalation, in zones whose clocks change."""

from __future__ import annotations

from datetime import date, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tests.tr11ops.alerts.office import (
    ANA,
    BEN,
    CLEO,
    DAY,
    HOUR,
    LIST,
    MINUTE,
    NOON,
    at,
)
from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.state import AlertState, OnCall, merged
from tr11ops.runcard.card import load_card
from trainer.config.card import CardError

PARIS = ZoneInfo("Europe/Paris")
THREE = Policy("r", "/r", rota=(ANA, BEN, CLEO), recipients=(LIST,), rota_start=date(2022, 5, 2))


def policy(**changes: object) -> Policy:

    return replace(THREE, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("span", "quiet", "loud"),
    [
        ((time(22), time(7)), ["22:00", "23:59", "00:00", "06:59"], ["07:00", "12:00", "21:59"]),
        ((time(0), time(6)), ["00:00", "05:59"], ["06:00", "23:59"]),
        ((time(8), time(8)), [], ["08:00", "07:59", "20:00"]),
        (None, [], ["03:00"]),
    ],
)
def test_quiet_hours(span: tuple[time, time] | None, quiet: list[str], loud: list[str]) -> None:
    rules = policy(quiet_hours=span, zone=PARIS)
    assert [
        clock
        for clock in [*quiet, *loud]
        if rules.is_quiet(at(f"2022-05-02 {clock}", "Europe/Paris"))
    ] == quiet


def test_quiet_hours_in_the_night_that_has_an_hour_more_or_less() -> None:
    rules = policy(quiet_hours=(time(22), time(7)), zone=PARIS)
    for day, length in (("2022-03-26", 8), ("2022-10-29", 10), ("2022-05-02", 9)):
        begin = at(f"{day} 22:00", "Europe/Paris")
        assert [rules.is_quiet(begin + hour * HOUR) for hour in range(length + 1)] == [
            True
        ] * length + [False]


def test_the_rota_goes_round_and_begins_with_its_first() -> None:
    first = at("2022-05-02 00:00")
    before = [THREE.on_call(None, first - days * DAY).who for days in (0.001, 1, 7, 8, 400)]
    assert before == [(ANA,)] * 5
    following = [THREE.on_call(None, first + week * 7 * DAY) for week in range(4)]
    assert [one.who for one in following] == [(ANA,), (BEN,), (CLEO,), (ANA,)]
    assert following[0] == OnCall((ANA,), until=first + 7 * DAY)
    assert policy(rota=()).on_call(None, NOON) == OnCall((LIST,))


def test_a_shift_that_was_taken_comes_before_the_rota_until_it_ends() -> None:
    monday = at("2022-05-09 00:00")  # Ben's turn begins
    by_default = THREE.taken_by(CLEO, NOON)
    assert by_default == OnCall((CLEO,), NOON + DAY, taken=NOON)
    late = THREE.taken_by(CLEO, monday - HOUR)
    assert late.until == monday, "the rota's change ends it"
    assert policy(rota=()).taken_by(CLEO, NOON).until == NOON + DAY
    asked = THREE.taken_by(CLEO, monday - HOUR, 8 * HOUR)
    assert [who.who for who, _, _ in THREE.turns(asked, monday - HOUR, 3)] == [
        (CLEO,),
        (BEN,),
        (CLEO,),
    ]
    assert THREE.on_call(asked, monday + 7 * HOUR - 1) == asked
    over = THREE.on_call(asked, monday + 7 * HOUR)
    assert (over.who, over.taken) == ((BEN,), None)
    assert asked.words(monday) == f"{CLEO} (took the shift, 7 h 00 min left)"
    ahead = OnCall((CLEO,), NOON + 400 * DAY, taken=NOON + 2 * HOUR)
    assert THREE.on_call(ahead, NOON).who == (ANA,), (
        "what a clock that ran ahead has left counts not"
    )
    assert THREE.on_call(replace(ahead, taken=NOON + MINUTE), NOON).who == (CLEO,), "a little does"


def test_the_last_to_take_a_shift_has_it_and_what_was_given_back_stays_so() -> None:
    """Two machines, one of which could not write the run directory meanwhile."""
    ben, cleo = THREE.taken_by(BEN, NOON), THREE.taken_by(CLEO, NOON + MINUTE)
    given_back = replace(cleo, until=NOON + HOUR)
    for home, local, counts in (
        (ben, cleo, cleo),
        (cleo, ben, cleo),
        (cleo, given_back, given_back),
    ):
        assert merged(AlertState(shift=home), AlertState(shift=local)).shift == counts
    assert merged(AlertState(), AlertState(shift=ben)).shift == ben
    assert not given_back.holds(NOON + HOUR)


def test_a_name_stands_for_one_address_of_the_card() -> None:
    assert [THREE.address_of(name) for name in ("ben", "dan@x.org", "dan", "be")] == [
        BEN, "dan@x.org", "", "",
    ]  # fmt: skip
    assert policy(recipients=("ben@other.org",)).address_of("ben") == "", "it may be either of two"
    alone = policy(rota=(), recipients=())
    assert (
        alone.address_of("dan") == "dan" and alone.called(alone.taken_by("dan", NOON), NOON) == ()
    )


@given(st.floats(0, 4e9), st.sampled_from([0.5, 1.0, 3.5, 7.0, 14.0]))
def test_a_turn_ends_when_the_next_begins(now: float, days: float) -> None:
    rules = policy(rota_days=days, zone=PARIS)
    end = rules.turn_ends(now)
    assert end > now - HOUR
    if end > now:
        assert rules.turn(end - 1) == rules.turn(now) or end - now > days * DAY
        assert rules.turn(end + HOUR) != rules.turn(now)


def test_escalation_asks_each_of_the_rota_once_and_then_all() -> None:
    rules = policy(escalate_minutes=(10.0, 20.0, 30.0, 40.0))
    assert [rules.steps_due(minutes * MINUTE) for minutes in (0, 9, 10, 25, 99)] == [0, 0, 1, 2, 4]
    assert rules.escalation(1, (ANA,), None, NOON) == (BEN,)
    assert rules.escalation(2, (ANA, BEN), None, NOON) == (CLEO,)
    every = (ANA, BEN, CLEO, LIST)
    assert rules.escalation(3, (ANA, BEN, CLEO), None, NOON) == rules.everyone == every
    assert rules.escalation(4, (ANA,), None, NOON) == rules.everyone
    # it is Ben's turn now, and he was not asked
    assert rules.escalation(1, (ANA,), None, NOON + 7 * DAY) == (BEN,)
    # who took the shift since is asked first, and then it goes on by the rota
    taken = rules.taken_by("dan@example.org", NOON)
    assert rules.escalation(1, (ANA,), taken, NOON) == ("dan@example.org",)
    assert rules.escalation(2, ("dan@example.org",), taken, NOON) == (ANA,)
    assert rules.escalation(4, (ANA,), taken, NOON) == (*every, "dan@example.org")


@given(
    st.integers(0, 10_000_000),
    st.sampled_from(["Europe/Paris", "UTC", "America/Sao_Paulo", "Australia/Lord_Howe"]),
)
def test_the_digest_is_due_once_a_day(quarters: int, zone: str) -> None:
    rules = policy(digest_time=time(2, 30), zone=ZoneInfo(zone))
    now = 1_600_000_000 + quarters % 100_000 * 900.0
    due = rules.digest_moment(now)
    assert due is not None
    assert due <= now < due + 26 * HOUR
    day = rules.local(due).date()
    following = rules.digest_moment(due + 26 * HOUR)
    assert following is not None
    assert timedelta(0) < rules.local(following).date() - day <= timedelta(days=1)
    assert policy(digest_time=None).digest_moment(now) is None


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('time_zone="Europe/Nowhere"', "alerts.time_zone"),
        ('time_zone="../../etc/passwd"', "alerts.time_zone"),
        ('time_zone="Europe"', "alerts.time_zone"),
        ('rota_start="2022-02-30"', "alerts.rota_start"),
    ],
)
def test_a_card_with_no_such_zone_or_day_is_refused_at_once(tmp_path, line: str, key: str) -> None:
    with pytest.raises(CardError) as caught:
        load_card(write_card(tmp_path), [f"alerts.{line}"], {}, directory=tmp_path)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)
