"""Days of a repeated fault on a fake clock, through a real mail server: exactly the mails of the
table, and no other.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from datetime import date, time
from pathlib import Path

import pytest

from tests.tr11ops.alerts.office import (
    ANA,
    BEN,
    CLEO,
    CRITICAL,
    DAY,
    HOUR,
    INFO,
    LIST,
    MINUTE,
    NOON,
    WARNING,
    Mailbox,
    Office,
    at,
    finding,
    run_days,
)
from tr11ops.alerts.changes import AlertChange, change_alerts, change_shift
from tr11ops.alerts.incidents import ACKNOWLEDGED, ASSIGNED, SNOOZED, look
from tr11ops.alerts.notify import tell
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.state import AlertState
from tr11ops.detect.detector import Severity

ROTA = (f'rota=["{ANA}","{BEN}","{CLEO}"]', f'recipients=["{LIST}"]', 'rota_start="2022-05-02"')
EVERYBODY = (ANA, BEN, CLEO, LIST)

Make = Callable[..., Office]


def do(office: Office, now: float, made: AlertChange, who: str = "ana", why: str = "") -> None:
    """One person's change of the one open alert."""
    name = office.alert_state.open_alerts[0].fingerprint
    change_alerts(Sender.of(office.directory, office.card, now), [name], made, who, why)


def test_mails_go_to_who_took_the_shift_and_to_the_rota_again_when_it_is_over(
    office: Make, mailbox: Mailbox
) -> None:
    desk = office(*ROTA)
    dan = "dan@example.org"
    taken = desk.sender(NOON).policy.taken_by(dan, NOON, 2 * HOUR)
    after, notes = change_shift(desk.sender(NOON), taken, "six", "ana is ill")
    assert (after, notes, mailbox.told()) == (taken, (), [(dan, ANA)])
    said = mailbox.mails[0][1]
    assert said["Subject"] == f"[ON CALL] small: {dan} until 2022-05-02 14:00 UTC"
    words = " ".join(said.get_content().split())
    assert "By six: ana is ill." in words and "alerts end-shift --run tr11.toml" in words
    assert f"This is in place of {ANA}. Then follows {ANA}." in words
    desk.look(NOON + MINUTE, finding())
    desk.look(NOON + 40 * MINUTE, finding())
    assert mailbox.told()[1:] == [(dan,), (ANA,)], "then it escalates by the rota"
    desk.look(NOON + HOUR, blind={"stalled"})
    _, notes = change_shift(desk.sender(NOON + HOUR), None, "six", "")
    assert (notes, mailbox.told()[3]) == ((), (ANA, dan))
    assert f"The shift that {dan} took is over" in " ".join(
        mailbox.mails[3][1].get_content().split()
    )
    desk.look(NOON + 61 * MINUTE, finding("down", subject="run"))
    assert mailbox.told()[-1] == (ANA,)
    kinds = [(one.kind, one.who, one.data["on_call"]) for one in desk.journal("shift-")]
    assert kinds == [("shift-taken", "six", [dan]), ("shift-ended", "six", [ANA])]


def test_a_shift_that_runs_out_is_told_once_with_what_is_open(
    office: Make, mailbox: Mailbox
) -> None:
    desk = office(*ROTA)
    dan = "dan@example.org"
    change_shift(desk.sender(NOON), desk.sender(NOON).policy.taken_by(dan, NOON, HOUR), "six", "")
    desk.look(NOON + MINUTE, finding(severity=WARNING))
    do(desk, NOON + 2 * MINUTE, AlertChange(ACKNOWLEDGED, dan))
    told = [(dan, ANA), (dan,)]
    for minute in (59, 60, 61):
        desk.look(NOON + minute * MINUTE, finding(severity=WARNING))
        told += [(ANA, dan)] * (minute == 60)
        assert mailbox.told() == told
    said = mailbox.mails[-1][1]
    words = " ".join(said.get_content().split())
    assert said["Subject"].startswith(f"[ON CALL] small: {ANA} until ")
    assert f"On call now: {ANA} until" in words and "was over at 2022-05-02 13:00 UTC" in words
    assert f"The shift that {dan} took is over" in words
    assert f"stalled it is since 2022-05-02 12:01 UTC (59 min); {dan} has it" in words
    [entry] = desk.journal("shift-ended")
    assert entry.who == "tr11" and entry.data["before"] == [dan]
    assert entry.data["on_call"] == [ANA]


@pytest.mark.parametrize(
    ("taker", "open_alert", "looked", "told"),
    [
        (BEN, WARNING, (1, 7), [7]),  # quiet until seven: no one is woken to hear who is on call
        (BEN, CRITICAL, (1, 7), [1]),  # but by what is critical, and is theirs now
        (BEN, None, (1, 7), [7]),
        (ANA, CRITICAL, (1, 7), []),  # she has the turn of the rota too: nothing changes
        (BEN, None, (30,), []),  # the watchdog was away for longer than a day
    ],
)
def test_the_end_of_a_shift_wakes_no_one_for_nothing(
    taker: str, open_alert: Severity | None, looked: tuple[int, ...], told: list[int]
) -> None:
    midnight = at("2022-05-03 00:00")
    policy = Policy(
        "small",
        "/runs/small",
        rota=(ANA, BEN),
        rota_start=date(2022, 5, 2),
        quiet_hours=(time(22), time(7)),
    )
    state = AlertState(shift=policy.taken_by(taker, midnight - HOUR, HOUR))
    seen = []
    for hour in looked:
        now = midnight + hour * HOUR
        found = () if open_alert is None else (finding(severity=open_alert),)
        state = look(state, found, blind=frozenset(), policy=policy, now=now)
        state, messages = tell(state, policy, now)
        seen += [hour for one in messages if one.kind == "shift" and one.to == (ANA, BEN)]
    assert seen == told


def test_a_reminder_goes_to_who_has_the_shift_then(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    desk.look(NOON, finding(severity=WARNING))
    do(desk, NOON + MINUTE, AlertChange(ACKNOWLEDGED, "ana"))
    now = NOON + 25 * HOUR
    change_shift(desk.sender(now), desk.sender(now).policy.taken_by(BEN, now), "six", "")
    desk.look(now, finding(severity=WARNING))
    assert mailbox.told() == [(ANA,), (BEN, ANA), (BEN, ANA)]


def test_a_day_of_a_critical_fault_that_no_one_takes(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    log = run_days(desk, mailbox, NOON, 26, lambda now: [finding()], "UTC")
    subject = "[CRITICAL] small: stalled it is"
    assert log == [
        ("02 12:00", (ANA,), subject),  # on duty
        (
            "02 13:00",
            EVERYBODY,
            subject,
        ),  # an hourly watchdog finds both steps of the escalation due
        ("03 13:00", EVERYBODY, subject),  # a day after the last
    ]


def test_escalation_by_the_minute_and_acknowledgement(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA, "escalate_minutes=[30,60,90]")
    told = []
    for minute in range(0, 130, 10):
        desk.look(NOON + minute * MINUTE, finding())
        told += [(minute, to) for to in mailbox.told()[len(told) :]]
    assert told == [(0, (ANA,)), (30, (BEN,)), (60, (CLEO,)), (90, EVERYBODY)]
    assert "No one has acknowledged this for 30 min" in body(mailbox, 1)
    assert "ben@example.org" in body(mailbox, 2).split("Told before:")[1]


def test_an_acknowledgement_stops_it_for_a_day(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    desk.look(NOON, finding())
    do(desk, NOON + 10 * MINUTE, AlertChange(ACKNOWLEDGED, "ana", "on it"))
    log = run_days(desk, mailbox, NOON + HOUR, 48, lambda now: [finding()], "UTC")
    assert [(when, to) for when, to, _ in log] == [
        (
            "03 13:00",
            (ANA,),
        ),  # the acknowledgement is a day old, and it still stands: said once again,
        ("03 14:00", EVERYBODY),  # and as no one takes it, escalated as at first
    ]
    assert [entry.who for entry in desk.journal("alert-acknowledged")] == ["ana"]
    assert len(desk.journal("alert-acknowledgement-expired")) == 1


def test_a_day_of_a_warning_with_quiet_hours(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA, 'quiet_hours="22:00-07:00"', 'time_zone="Europe/Paris"')
    begin = at("2022-05-02 23:00", "Europe/Paris")
    warning = finding("disk-full", WARNING, "SCRATCH")

    def sees(now: float) -> list[object]:
        return [warning] if now < begin + 34 * HOUR else []

    log = run_days(desk, mailbox, begin, 60, sees, "Europe/Paris")
    assert log == [
        (
            "03 07:00",
            (ANA,),
            "[WARNING] small: disk-full it is",
        ),  # held back until the quiet hours ended
        ("04 07:00", (ANA,), "[WARNING] small: disk-full it is"),
        (
            "04 10:00",
            (ANA,),
            "[OK] small: over: disk-full it is",
        ),  # two looks without it: 9:00 and 10:00
    ]


def test_what_comes_and_goes_in_the_quiet_hours_is_never_said(
    office: Make, mailbox: Mailbox
) -> None:
    desk = office(*ROTA, 'quiet_hours="22:00-07:00"')
    begin = at("2022-05-02 23:00")
    log = run_days(
        desk,
        mailbox,
        begin,
        20,
        lambda now: [finding("slow", WARNING)] if now < begin + HOUR else [],
        "UTC",
    )
    assert log == []
    assert desk.alert_state.incidents()[0].resolved is not None


def test_critical_and_its_all_clear_do_not_wait_for_the_morning(
    office: Make, mailbox: Mailbox
) -> None:
    desk = office(*ROTA, 'quiet_hours="22:00-07:00"')
    begin = at("2022-05-02 23:00")
    log = run_days(
        desk, mailbox, begin, 12, lambda now: [finding()] if now < begin + HOUR else [], "UTC"
    )
    assert [(when, to, subject[:4]) for when, to, subject in log] == [
        ("02 23:00", (ANA,), "[CRI"),
        ("03 01:00", (ANA,), "[OK]"),
    ]


def test_an_all_clear_of_a_warning_waits_for_the_morning(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA, 'quiet_hours="22:00-07:00"')
    begin = at("2022-05-02 21:00")
    log = run_days(
        desk,
        mailbox,
        begin,
        14,
        lambda now: [finding("slow", WARNING)] if now < begin + HOUR else [],
        "UTC",
    )
    assert [(when, subject[:4]) for when, _, subject in log] == [
        ("02 21:00", "[WAR"),
        ("03 07:00", "[OK]"),
    ]


def test_info_is_in_the_digest_alone(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA, 'digest_time="08:00"')
    log = run_days(desk, mailbox, NOON, 24, lambda now: [finding("namesake", INFO)], "UTC")
    assert [(when, to, subject) for when, to, subject in log] == [
        ("03 08:00", (LIST, ANA), "[DIGEST] small: 1 open alert")
    ]
    assert "namesake it is" in body(mailbox, 0)


def test_a_fault_that_becomes_worse_is_said_again(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    desk.look(NOON, finding("disk-full", WARNING, "SCRATCH"))
    do(desk, NOON + MINUTE, AlertChange(ACKNOWLEDGED, "ana"))
    do(desk, NOON + MINUTE, AlertChange(SNOOZED, "ana", seconds=5 * HOUR))
    desk.look(NOON + 10 * MINUTE, finding("disk-full", CRITICAL, "SCRATCH"))
    assert mailbox.subjects == [
        "[WARNING] small: disk-full it is",
        "[CRITICAL] small: disk-full it is",
    ]
    assert "This has become worse. ana took on the lesser fault; this is no one's yet." in " ".join(
        body(mailbox, 1).split()
    )
    # a little better: no one need hear
    desk.look(NOON + 20 * MINUTE, finding("disk-full", WARNING, "SCRATCH"))
    desk.look(NOON + 30 * MINUTE, finding("disk-full", CRITICAL, "SCRATCH"))
    assert len(mailbox.mails) == 2


def test_a_snooze_ends_with_a_word(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    desk.look(NOON, finding())
    do(desk, NOON + MINUTE, AlertChange(SNOOZED, "ana", seconds=3 * HOUR))
    log = run_days(desk, mailbox, NOON + HOUR, 4, lambda now: [finding()], "UTC")
    assert [(when, to) for when, to, _ in log] == [("02 16:00", (ANA,))]


def test_a_flapping_warning_is_one_incident_and_is_back_once(
    office: Make, mailbox: Mailbox
) -> None:
    desk = office(*ROTA, "resolve_after=1")
    log = []
    for minute in range(0, 240, 10):  # seen in one look, gone in the next, for four hours
        before = len(mailbox.mails)
        desk.look(
            NOON + minute * MINUTE, *([finding(severity=WARNING)] if minute % 20 == 0 else [])
        )
        log += [(minute, subject[:4]) for subject in mailbox.subjects[before:]]
    assert log == [(0, "[WAR"), (10, "[OK]"), (20, "[WAR")]
    desk.look(NOON + 290 * MINUTE)
    assert mailbox.subjects[3][:4] == "[OK]"
    assert "It came and went from 2022-05-02 12:20 UTC to 2022-05-02 15:50 UTC" in " ".join(
        body(mailbox, 3).split()
    )
    assert len(desk.alert_state.incidents()) == 1
    assert "came back" in body(mailbox, 2)
    assert len({str(mail["In-Reply-To"]) for _, mail in mailbox.mails[1:]}) == 1  # one thread


def test_a_fault_that_comes_back_later_is_a_new_incident(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA, "resolve_after=1")
    for now, seen in ((0, True), (1, False), (3, True), (4, False)):
        desk.look(NOON + now * HOUR, *([finding()] if seen else []))
    assert [subject[:4] for subject in mailbox.subjects] == ["[CRI", "[OK]", "[CRI", "[OK]"]
    assert len(desk.alert_state.incidents()) == 2
    assert mailbox.mails[2][1]["In-Reply-To"] is None


def test_the_same_fault_in_the_next_job_is_the_same_incident(
    office: Make, mailbox: Mailbox
) -> None:
    desk = office(*ROTA)
    desk.look(NOON, finding(subject="1000_7"), finding("slow-node", WARNING, "n07"))
    desk.look(NOON + MINUTE, finding(subject="1000_8"), finding("slow-node", WARNING, "n07"))
    assert len(mailbox.mails) == 2
    desk.look(NOON + 2 * MINUTE, finding(subject="1000_8"), finding("slow-node", WARNING, "n08"))
    assert len(mailbox.mails) == 3


def test_milder_stays_milder_and_worse_is_said_again(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA, "escalate_minutes=[30]")
    grave = {"title": "no attempt can start"}
    desk.look(NOON, finding("exclusion-cap", CRITICAL, "", **grave))
    desk.look(NOON + 40 * MINUTE, finding("exclusion-cap", WARNING, ""))
    assert desk.alert_state.open_alerts[0].severity is CRITICAL  # one look may have seen it badly
    desk.look(NOON + 50 * MINUTE, finding("exclusion-cap", WARNING, ""))
    [alert] = desk.alert_state.open_alerts
    assert alert.severity is WARNING and alert.title == "exclusion-cap it is"
    desk.look(NOON + 90 * MINUTE, finding("exclusion-cap", WARNING, ""))
    assert len(mailbox.mails) == 1  # no escalation of what is no longer critical
    desk.look(NOON + 100 * MINUTE, finding("exclusion-cap", CRITICAL, "", **grave))
    assert len(mailbox.mails) == 2 and "no attempt can start" in mailbox.subjects[1]


def test_a_fault_of_which_a_remark_is_left_is_over(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    desk.look(NOON, finding("unfinished-end", WARNING))
    for minute in range(1, 200, 10):
        desk.look(NOON + minute * MINUTE, finding("unfinished-end", INFO))
    # a remark is an incident of its own
    assert [alert.severity for alert in desk.alert_state.open_alerts] in ([], [INFO])
    assert len(mailbox.mails) == 2 and mailbox.subjects[1].startswith("[OK]")


def test_what_comes_back_milder_is_milder_at_once(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    desk.look(NOON, finding(severity=CRITICAL, title="all is lost"))
    for minute in (1, 2):
        desk.look(NOON + minute * MINUTE)
    assert desk.alert_state.open_alerts == ()
    desk.look(NOON + 3 * MINUTE, finding(severity=WARNING, title="some is lost"))
    assert [(alert.severity, alert.title) for alert in desk.alert_state.open_alerts] == [
        (WARNING, "some is lost")
    ]


def test_what_a_mail_says_to_type_works_from_any_folder(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    desk.look(NOON, finding())
    lines = [line.strip() for line in mailbox.mails[0][1].get_content().splitlines()]
    here = f"cd {shlex.quote(str(Path.cwd()))}"
    assert [lines[index + 1].split()[:2] for index, line in enumerate(lines) if line == here] == [
        ["tr11", "logs"],
        ["tr11", "alerts"],
        ["export", "TR11_RUN=tr11.toml"],  # before the commands of the runbook
    ]


def test_anyone_who_has_no_address_gets_no_mail(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    desk.look(NOON, finding())
    do(desk, NOON + MINUTE, AlertChange(ASSIGNED, owner="eve @ example.org"))
    looked = desk.look(NOON + 2 * MINUTE, finding())
    assert len(mailbox.mails) == 1 and not [note for note in looked.notes if "eve" in note]


def test_unknown_never_clears(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA, "escalate_minutes=[]", "repeat_hours=8000")
    desk.look(NOON, finding())
    for hour in range(1, 30):
        if hour % 2:
            desk.look(NOON + hour * HOUR, blind={"stalled"})
        else:
            desk.look(NOON + hour * HOUR, observed=False)
    assert len(mailbox.mails) == 1
    assert desk.alert_state.open_alerts[0].clear_looks == 0
    desk.look(NOON + 30 * HOUR)
    desk.look(NOON + 31 * HOUR, blind={"stalled"})
    assert len(mailbox.mails) == 1
    desk.look(NOON + 32 * HOUR)
    assert mailbox.subjects[1].startswith("[OK]")


@pytest.mark.parametrize(
    ("begin", "length_of_the_odd_day"),
    [("2022-03-24 00:00", 23), ("2022-10-27 00:00", 25)],  # the last Sunday is on the fourth day
)
def test_a_week_with_a_change_of_clocks_has_seven_digests(
    office: Make, mailbox: Mailbox, begin: str, length_of_the_odd_day: int
) -> None:
    """At 02:30, the worst time: in spring the clock skips it, in autumn it comes twice."""
    zone = "Europe/Paris"
    desk = office(f'recipients=["{LIST}"]', 'digest_time="02:30"', f'time_zone="{zone}"')
    start = at(begin, zone)
    hours = 6 * 24 + length_of_the_odd_day
    times = []
    for quarter in range(hours * 4):
        now = start + quarter * 15 * MINUTE
        before = len(mailbox.mails)
        if (
            quarter % 16 == 0 or 8 <= quarter % 96 <= 15
        ):  # every quarter of an hour round the time, else now and then
            desk.look(now)
        times += [now] * (len(mailbox.mails) - before)
    assert set(mailbox.subjects) == {"[DIGEST] small: nothing to report"}
    assert len(times) == 7
    days = [int((now - start) // DAY) for now in times]
    assert len(set(days)) == 7


def test_a_digest_after_days_of_no_one_looking_comes_once(office: Make, mailbox: Mailbox) -> None:
    desk = office(f'recipients=["{LIST}"]', 'digest_time="08:00"')
    for now in (
        NOON,
        NOON + 4 * DAY,
        NOON + 4 * DAY + HOUR,
        NOON + 3 * DAY,
        NOON + 4 * DAY + 21 * HOUR,
    ):
        desk.look(now)  # the fourth: a clock that was set back
    assert mailbox.subjects == ["[DIGEST] small: nothing to report"] * 2


def test_the_rota_turns_at_midnight_of_its_zone(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA, 'time_zone="Europe/Paris"', "resolve_after=1")
    turn = at("2022-05-09 00:00", "Europe/Paris")
    desk.look(turn - 1, finding("slow-node", WARNING, "n01"))
    desk.look(turn, finding("slow-node", WARNING, "n02"))
    # the last is the all-clear of n01: to those who knew of it
    assert mailbox.told() == [(ANA,), (BEN,), (ANA,)]
    desk.look(turn + 14 * DAY, finding("slow-node", WARNING, "n03"))
    # three turns later it is Ana again; Ben's n02 is over
    assert sorted(mailbox.told()[3:]) == [(ANA,), (BEN,)]


def body(mailbox: Mailbox, number: int) -> str:
    return str(mailbox.mails[number][1].get_content())


def test_the_sites_support_hears_of_what_only_it_can_repair(office: Make, mailbox: Mailbox) -> None:
    desk = office(*ROTA)
    resilience = desk.card.resilience.model_copy(update={"support_address": "assist@example.org"})
    desk.card = desk.card.model_copy(update={"resilience": resilience})
    short = finding("nodes-short", CRITICAL, "", title="47 nodes can be used, 48 are needed")
    for hours in range(4):  # escalated within the run's own people alone
        desk.look(NOON + hours * HOUR, short, finding("stalled", CRITICAL))
    for minutes in (10, 20, 30):
        desk.look(NOON + 3 * HOUR + minutes * MINUTE)
    [opened, over] = [mail for to, mail in mailbox.mails if to == ("assist@example.org",)]
    assert opened["Subject"] == "small: 47 nodes can be used, 48 are needed"
    assert (
        f"To be asked about it: {ANA}." in opened.get_content()
        and "tr11 " not in opened.get_content()
    )
    assert over["Subject"].startswith("[OK] ") and "has the nodes again" in over.get_content()
    assert (ANA,) in mailbox.told() and EVERYBODY in mailbox.told()
