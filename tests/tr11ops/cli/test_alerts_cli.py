"""`tr11 alerts`: list, ack, snooze, assign, resolve, the shift, test, digest, rota, and every refusal;
through a real mail server.
"""

from __future__ import annotations

import getpass
import json
import re
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.tr11ops.alerts.office import ANA, BEN, CRITICAL, HOUR, WARNING, Mailbox, Server, finding
from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tr11ops.alerts.outbox import waiting
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.service import AlertInput, process
from tr11ops.alerts.state import UndeliveredMessages
from tr11ops.alerts.store import commit
from tr11ops.detect.detector import Finding
from tr11ops.observe.observations import UnwritableDirectory
from tr11ops.runcard.card import load_card
from tr11ops.rundir.fallback import fallback_of
from tr11ops.rundir.journal import read_journal

Type = Callable[..., Answer]


@pytest.fixture
def settings(server: Server) -> list[str]:
    lines = (
        'smtp_host="127.0.0.1"', f"smtp_port={server.port}", 'sender="bot@example.org"', f'recipients=["{ANA}"]',
        f'rota=["{ANA}","{BEN}"]', 'rota_start="2999-01-01"', 'time_zone="Europe/Paris"',
        'digest_time=""',  # else one more mail, where its time lies between two looks
    )  # fmt: skip
    return [word for line in lines for word in ("--set", f"alerts.{line}")]


@pytest.fixture
def alerts(bench: LocalBench, settings: list[str]) -> Type:
    """Types `tr11 alerts ...` for a run that has a directory."""
    directory = run_directory(bench)
    directory.root.mkdir()
    directory.kill_switch.touch()  # nothing was launched, and that is no fault

    def type_in(command: str, *words: str) -> Answer:
        return bench.tr11("alerts", command, *words, "--run", str(bench.card), *settings)

    return type_in


@pytest.fixture
def look(bench: LocalBench, settings: list[str]) -> Callable[..., None]:
    """The watchdog looks: by default now, and finds what it is given."""

    def do(*findings: Finding, ago: float = 0.0) -> None:
        card = load_card(bench.card, settings[1::2], {})
        sender = Sender.of(run_directory(bench), card, time.time() - ago, "tr11.toml")
        process(sender, AlertInput(findings, frozenset(), True))

    return do


TWO = (
    finding("stalled", CRITICAL, title="it stands \x1b[2J still"),
    finding("slow-node", WARNING, "n01"),
)


def names(alerts: Type) -> dict[str, str]:
    return {
        alert["detector"]: alert["fingerprint"] for alert in alerts("list", "--json").json["alerts"]
    }


def test_list_is_empty_before_anything_was_seen(alerts: Type) -> None:
    answer = alerts("list")
    assert (answer.code, answer.out, answer.err) == (0, "", f"no alert is open\non call: {ANA}\n")
    assert alerts("list", "--json").json == {
        "schema": 1, "alerts": [], "untold": [], "over": [], "waiting": {"count": 0, "since": None},
    }  # fmt: skip


def test_list_shows_who_has_what(alerts: Type, look: Callable[..., None]) -> None:
    look(*TWO, ago=2 * HOUR)
    found = names(alerts)
    alerts("ack", found["stalled"][:4], "--reason", "on it")
    alerts("assign", found["slow-node"], "cleo")
    lines = alerts("list").out.splitlines()
    assert lines[0].split() == ["SEVERITY", "ALERT", "SINCE", "WHO"]
    assert f"{getpass.getuser()} has it" in lines[1]
    assert lines[1].startswith("CRITICAL")
    assert "2 h 00 min" in lines[1]
    assert "\x1b" not in lines[2]
    assert "cleo" in lines[3]
    assert all(len(line) <= 80 for line in lines)


def test_list_all_shows_what_is_over_and_queued_jobs(
    alerts: Type, look: Callable[..., None], mailbox: Mailbox
) -> None:
    mailbox.data_answers = ["451 later"]
    look(*TWO, ago=3 * HOUR)
    look(TWO[0], ago=2 * HOUR)
    look(TWO[0], ago=HOUR)
    answer = alerts("list", "--all")
    assert "over, 1 h 00 min" in answer.out  # up to the first look that did not see it
    assert alerts("list", "--all", "--json").json["over"][0]["severity"] == "WARNING"


def test_ack_is_recorded_with_who_and_why_and_stops_the_mails(
    alerts: Type, look: Callable[..., None], bench: LocalBench, mailbox: Mailbox
) -> None:
    look(*TWO, ago=2 * HOUR)
    assert len(mailbox.mails) == 2
    answer = alerts("ack", "--all", "--as", "cleo", "--reason", "night shift")
    assert answer.code == 0
    assert len(answer.err.splitlines()) == 3 and "no mail reaches cleo" in answer.err
    look(*TWO)
    assert len(mailbox.mails) == 2
    entries = [
        entry
        for entry in read_journal(run_directory(bench).journal).entries
        if entry.kind == "alert-acknowledged"
    ]
    assert [(entry.who, entry.why) for entry in entries] == [(getpass.getuser(), "night shift")] * 2
    shown = alerts("list", "--json").json["alerts"]
    assert {alert["acknowledged_by"] for alert in shown} == {f"cleo (typed by {getpass.getuser()})"}
    assert alerts("ack", "--all").code == 0  # by someone else, later: allowed, and recorded


def test_snooze_and_assign_and_resolve(
    alerts: Type, look: Callable[..., None], mailbox: Mailbox
) -> None:
    look(TWO[1], ago=HOUR)
    name = names(alerts)["slow-node"]
    assert (
        alerts("snooze", name, "--for", "90m", "--json").json["alerts"][0]["snoozed_until"]
        > time.time() + 5000
    )
    assert alerts("assign", name, BEN).code == 0
    assert mailbox.told() == [(ANA,), (BEN,)]
    assert "This is now yours" in mailbox.mails[1][1].get_content()
    answer = alerts("resolve", name, "--reason", "false alarm")
    assert answer.code == 0
    assert re.fullmatch(rf"resolved: {name}-[0-9a-f]+ slow-node it is\n", answer.err)
    assert mailbox.told()[2:] == [(ANA, BEN)]
    assert mailbox.subjects[2].startswith("[OK]")
    assert alerts("list").err == f"no alert is open\non call: {ANA}\n"


def test_who_is_on_call_by_the_rota_has_no_shift_to_take(
    alerts: Type, look: Callable[..., None], mailbox: Mailbox
) -> None:
    look(TWO[1], ago=HOUR)
    said = alerts("take-shift", "--as", ANA)
    assert said.code == 0 and f"nothing to do, on call already: {ANA}" in said.err
    assert mailbox.told() == [(ANA,)]


def test_who_loses_an_alert_is_named_and_told(
    alerts: Type, look: Callable[..., None], mailbox: Mailbox
) -> None:
    look(TWO[1], ago=HOUR)
    name = names(alerts)["slow-node"]
    alerts("assign", name, BEN)
    plan = alerts("ack", name, "--as", ANA, "--dry-run")
    assert f"would be acknowledged: {name}" in plan.err and f"{BEN} has it now" in plan.err
    assert f"taken over from {BEN}: slow-node it is" in alerts("ack", name, "--as", ANA).err
    assert mailbox.told() == [(ANA,), (BEN,), (BEN,)]
    assert f"This is no longer yours: {ANA}" in mailbox.mails[2][1].get_content()
    [alert] = alerts("list", "--json").json["alerts"]
    assert not alert["owner"] and alert["acknowledged_by"].startswith(ANA)
    said = alerts("ack", name)  # a name that no mail reaches
    assert f"tr11: no mail reaches {getpass.getuser()}" in said.err and f"{ANA} (typed" in said.err
    assert "taken over" not in alerts("ack", name).err and mailbox.told()[3:] == [(ANA,)]


@pytest.mark.parametrize("command", [("ack",), ("snooze",), ("resolve", "--reason", "x")])
def test_dry_run_changes_nothing(
    alerts: Type, look: Callable[..., None], command: tuple[str, ...]
) -> None:
    look(*TWO)
    before = alerts("list", "--json").json
    answer = alerts(command[0], "--all", "--dry-run", *command[1:])
    assert answer.code == 0
    assert "would be" in answer.err
    assert "nothing was changed" in answer.err
    assert alerts("list", "--json").json == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("ack",), "FP...: name alerts, or give --all, not both; see: tr11 alerts list"),
        (("ack", "abc", "--all"), "FP...: name alerts, or give --all, not both"),
        (("ack", "zzzz"), "FP: 'zzzz' is not an open alert"),
        (("ack", "z"), "FP: 'z' is too short for a fingerprint"),
        (
            ("snooze", "abcd", "--for", "soon"),
            "--for 'soon' is not a length of time; use 30m, 2h or 1d",
        ),
        (("resolve", "abcd"), "--reason is needed"),
        (("assign", "abcd", " "), "WHO: is empty"),
        (("digest", "--again"), "--again goes with --send"),
        (
            ("take-shift", "--as", "dan"),
            "no mail reaches 'dan': type `tr11 alerts take-shift --run ",
        ),
        (("take-shift", "--as", "dan@"), "no mail reaches 'dan@'"),
        (("take-shift", "--as", "ben", "--for", "soon"), "--for 'soon' is not a length of time"),
    ],
)
def test_refusals_are_one_line(
    alerts: Type, look: Callable[..., None], words: tuple[str, ...], line: str
) -> None:
    look(*TWO)
    answer = alerts(words[0], *words[1:])
    assert answer.code == 2
    assert answer.err.startswith(f"tr11: {line}")
    assert len(answer.err.splitlines()) == 1


def test_the_list_speaks_of_the_present_as_status_does(
    alerts: Type, look: Callable[..., None], bench: LocalBench
) -> None:
    """It told a node's slowness five minutes after that was excluded, and of no fault before a mail."""
    run_directory(bench).kill_switch.unlink()
    look(TWO[1])
    listed = " ".join(alerts("list").out.split())
    assert listed.count("not told yet: no watchdog looks") == 1 and "no longer found" in listed
    assert alerts("list", "--json").json["untold"][0]["subject"] == "down"
    look(TWO[1], finding("down", CRITICAL))
    listed = " ".join(alerts("list").out.split())
    assert listed.count("no one has taken it") == 1 and listed.count("no longer found") == 1
    assert "not told yet" not in listed


def test_one_wrong_fingerprint_changes_nothing(alerts: Type, look: Callable[..., None]) -> None:
    look(*TWO)
    answer = alerts("ack", names(alerts)["stalled"], "zzzz")
    assert "nothing was changed" in answer.err
    assert all(not alert["acknowledged_by"] for alert in alerts("list", "--json").json["alerts"])


def test_a_run_never_launched_and_an_unreadable_record(alerts: Type, bench: LocalBench) -> None:
    folder = run_directory(bench).paths.state / "alerts" / "book.d"
    folder.mkdir(parents=True)
    (folder / "00000001.json").write_text("garbage")
    answer = alerts("list")
    assert answer.code == 3
    assert "cannot be read" in answer.err
    assert json.loads(alerts("list", "--json").out)["error"]["exit_code"] == 3
    (folder / "00000001.json").unlink()
    folder.rmdir()
    folder.parent.rmdir()
    folder.parent.parent.rmdir()
    run_directory(bench).kill_switch.unlink()
    run_directory(bench).root.rmdir()
    answer = alerts("list")
    assert answer.code == 1
    assert "nothing was launched from this card" in answer.err
    assert not run_directory(bench).exists


def test_a_test_message_is_sent_for_real_and_refusals_count(
    alerts: Type, mailbox: Mailbox, bench: LocalBench
) -> None:
    answer = alerts("test")
    assert answer.code == 0
    assert mailbox.told() == [(ANA,), (BEN,)]
    assert [line.split() for line in answer.out.splitlines()] == [
        ["ROUTE", "TO", "RESULT"], ["mail", ANA, "taken"], ["mail", BEN, "taken"],
    ]  # fmt: skip
    mailbox.recipient_answers = {"x@example.org": "550 no such user"}
    answer = alerts("test", "--to", "x@example.org", "--json")
    assert answer.code == 1
    assert answer.json["results"][0]["trouble"].endswith("the server said 550 no such user")
    answer = alerts("test", "--to", "x@example.org")
    assert answer.code == 1 and "alerts.smtp_host" in answer.err and "urls_file" not in answer.err
    answer = bench.tr11("alerts", "test", "--run", str(bench.card))
    assert answer.code == 1
    assert "no one would be told" in answer.err


def test_a_test_that_is_taken_sends_what_could_not_be_sent_before(
    alerts: Type, look: Callable[..., None], bench: LocalBench, mailbox: Mailbox
) -> None:
    """Status went on with "alerts are not delivered" until the next try was due, up to an hour
    later.
    """
    mailbox.data_answers = ["451 later"] * 2
    look(*TWO)
    left = waiting(run_directory(bench))
    assert isinstance(left, UndeliveredMessages) and left.count == 2 and left.trouble
    answer = alerts("test")
    assert answer.code == 0 and "2 messages that had waited were sent as well" in answer.err
    assert waiting(run_directory(bench)) == UndeliveredMessages()
    assert [subject.partition("]")[0] for subject in mailbox.subjects] == [
        "[TEST",
        "[TEST",
        "[CRITICAL",
        "[WARNING",
    ]


def test_the_digest_is_shown_and_sent_once(
    alerts: Type, look: Callable[..., None], mailbox: Mailbox, settings: list[str]
) -> None:
    settings += ["--set", 'alerts.digest_time="08:00"']
    look(*TWO, ago=25 * HOUR)
    sent = len(mailbox.mails)
    shown = alerts("digest").out
    assert "[DIGEST] small: 2 open alerts" in shown
    assert len(mailbox.mails) == sent
    assert alerts("digest", "--json").json["subject"] == "[DIGEST] small: 2 open alerts"
    assert "sent to ana@example.org" in alerts("digest", "--send").err
    assert "no digest is due" in alerts("digest", "--send").err
    assert alerts("digest", "--send", "--again", "--json").json["sent"]["to"] == [ANA]
    assert len(mailbox.mails) == sent + 2
    look(*TWO)
    assert sum(subject.startswith("[DIGEST]") for subject in mailbox.subjects) == 2


def test_the_first_digest_waits_for_its_time(
    alerts: Type, mailbox: Mailbox, settings: list[str]
) -> None:
    """`tr11 cron run` makes every round that never was: a run of one minute has no day to report."""
    settings += ["--set", 'alerts.digest_time="08:00"']
    assert "the first one's time is still to come" in alerts("digest", "--send").err
    assert "no digest is due" in alerts("digest", "--send").err
    assert mailbox.mails == []


def test_a_digest_for_no_one_and_one_that_cannot_be_made(alerts: Type, bench: LocalBench) -> None:
    answer = bench.tr11("alerts", "digest", "--send", "--run", str(bench.card))
    assert (answer.code, answer.err[:15]) == (0, "no one is told:")
    folder = run_directory(bench).paths.state / "alerts" / "book.d"
    for path in [*folder.iterdir(), folder.parent / "book.json"]:
        path.write_text("garbage")
    assert alerts("digest").code == 3
    (folder / "99999999.json").write_text('{"schema": 99}')
    answer = alerts("digest", "--send")
    assert answer.code == 3
    assert "newer tr11" in answer.err


def test_the_rota_shows_whose_turn_it_is(alerts: Type, bench: LocalBench) -> None:
    turns = alerts("rota", "--turns", "3", "--json").json["turns"]
    assert [turn["who"] for turn in turns] == [ANA, BEN, ANA]
    assert turns[0]["until"] == turns[1]["from"]
    lines = alerts("rota").out.splitlines()
    assert lines[0].split() == ["ON", "CALL", "UNTIL"]
    assert lines[1].split() == [ANA, "(now)", "2999-01-08", "00:00", "CET"]
    assert len(lines) == 5
    assert (
        bench.tr11("alerts", "rota", "--run", str(bench.card)).err
        == "the card has no rota: no one is told\n"
    )


def test_a_shift_is_taken_shown_and_given_back(
    alerts: Type, bench: LocalBench, mailbox: Mailbox
) -> None:
    dan = "dan@example.org"
    planned = alerts("take-shift", "--as", dan, "--for", "8h", "--dry-run")
    assert planned.code == 0 and mailbox.mails == []
    first = f"{dan} takes the shift of small from {ANA}, for 8h"
    assert planned.err.startswith(f"{first}\nnothing was changed (--dry-run)\nthen on call: {dan}")
    assert f"{ANA} (now)" in alerts("rota").out
    done = alerts("take-shift", "--as", dan, "--for", "8h", "--reason", "ana is ill", "--json").json
    assert (done["action"], done["on_call"]["who"]) == ("shift-taken", [dan])
    assert done["on_call"]["until"] - done["on_call"]["taken"] == 8 * HOUR
    shown = alerts("rota", "--turns", "2", "--json").json["turns"]
    assert [(one["who"], one["taken"] is None) for one in shown] == [(dan, False), (ANA, True)]
    assert shown[0]["until"] == shown[1]["from"] == done["on_call"]["until"]
    assert f"{dan} (now, took the shift)" in alerts("rota").out
    assert f"{BEN} takes the shift of small from dan@" in alerts("take-shift", "--as", "ben").err
    given = alerts("end-shift")
    assert given.code == 0 and given.err.startswith(
        f"the shift of {BEN} ends; then on call: {ANA}\n"
    )
    again = alerts("end-shift")
    assert again.code == 0 and again.err.startswith(f"no shift is taken; on call: {ANA} until ")
    assert mailbox.told() == [(dan, ANA), (BEN, dan), (ANA, BEN)]
    kept = read_journal(run_directory(bench).journal).entries
    told = [(one.kind, one.who, one.why) for one in kept if one.kind.startswith("shift")]
    me = getpass.getuser()
    assert told == [
        ("shift-taken", me, "ana is ill"),
        ("shift-taken", me, ""),
        ("shift-ended", me, ""),
    ]


def test_a_shift_without_a_rota_and_one_that_cannot_be_read(
    alerts: Type, settings: list[str], bench: LocalBench
) -> None:
    settings += ["--set", "alerts.rota=[]"]
    taken = alerts("take-shift", "--as", BEN)
    assert f"{BEN} takes the shift of small from {ANA}, until the rota changes, a day" in taken.err
    shown = alerts("rota")
    assert f"{BEN} (now, took the shift)" in shown.out
    assert shown.err == f"the card has no rota: after that all goes to {ANA}\n"
    folder = run_directory(bench).paths.state / "alerts"
    for path in [*(folder / "book.d").iterdir(), folder / "book.json"]:
        path.write_text("garbage")
    for command in ("rota", "take-shift", "end-shift"):
        answer = alerts(command, *(["--as", "ana"] if command == "take-shift" else []))
        assert answer.code == 3 and "who took the shift cannot be read" in answer.err


def test_a_plan_to_acknowledge_is_for_the_incidents_that_it_showed(
    alerts: Type, look: Callable[..., None]
) -> None:
    look(TWO[0], ago=30 * HOUR)
    planned = alerts("ack", "--all", "--dry-run", "--as-shown", "?")
    mark = planned.err.rpartition(": ")[2].strip()
    old = alerts("list", "--json").json["alerts"][0]["incident"]
    for hours in (29, 28, 27):
        look(ago=hours * HOUR)
    look(TWO[0], ago=HOUR)
    said = alerts("ack", "--all", "--as-shown", mark)
    assert said.code != 0 and "the plan is another one now" in said.err
    said = alerts("snooze", old, "--for", "2h")
    assert said.code == 2 and len(said.err.splitlines()) == 1
    assert "is over; another incident of that kind is open since" in said.err
    assert "nothing was changed" in said.err
    [alert] = alerts("list", "--json").json["alerts"]
    assert not alert["acknowledged_by"] and alert["snoozed_until"] is None


def test_where_nothing_can_be_written_it_is_said_where_the_alerts_are(
    alerts: Type, bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watchdog on another machine keeps them there: here there are none, and that is no
    all-clear.
    """
    full = UnwritableDirectory(str(run_directory(bench).root), "no byte is left", is_full=True)
    monkeypatch.setattr("tr11ops.cli.alerts.read_unwritable_directories", lambda paths: (full,))
    for answer in (alerts("list"), alerts("ack", "3f2a")):
        said = " ".join(answer.err.split())
        assert "no byte is left" in said and "on the machine that its mails name" in said
    with fallback_of(run_directory(bench)) as local:
        commit(local, lambda known_there: (replace(known_there, looked=time.time()), None))
    assert "on the machine that" not in alerts("list").err
