"""Answers by file, also by files that no one would send in good faith."""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tr11ops.alerts.office import ANA, BEN, HOUR, MINUTE, NOON, Mailbox, Office, finding
from tr11ops.alerts.changes import resolve_prefix, seconds_of
from tr11ops.base.errors import NoSuchAlert

Make = Callable[..., Office]
RECIPIENTS = f'recipients=["{ANA}"]'


@pytest.fixture
def desk(office: Make) -> Office:
    """An office with one open alert."""
    made = office(RECIPIENTS, f'rota=["{ANA}","{BEN}"]')
    made.look(NOON, finding())
    made.folder_of("replies").mkdir(exist_ok=True)
    return made


def drop(desk: Office, name: str | bytes, content: str | bytes, age: float = 600.0) -> None:
    path = os.fsencode(desk.folder_of("replies")) + b"/" + os.fsencode(name)
    with open(path, "wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
    os.utime(path, (time.time() - age,) * 2)


def fingerprint(desk: Office) -> str:
    return str(desk.alert_state.alerts[0].fingerprint)


def test_a_line_of_text_acknowledges(desk: Office, mailbox: Mailbox) -> None:
    drop(desk, "answer.txt", f"ack {fingerprint(desk)[:5]} I am on it\n", age=0)
    assert desk.look(NOON + HOUR, finding()).notes == ()
    alert = desk.alert_state.alerts[0]
    assert (alert.acknowledged_by, alert.acknowledged_why) == (getpass.getuser(), "I am on it")
    assert len(mailbox.mails) == 1  # no escalation
    assert desk.files("replies/done") == ["answer.txt"]
    entry = desk.journal("alert-acknowledged")[0]
    assert (entry.who, entry.why) == (getpass.getuser(), "I am on it")


def test_an_answer_to_an_incident_is_none_to_a_later_one_of_its_kind(
    desk: Office, mailbox: Mailbox
) -> None:
    """The line that a mail says to write, or a page that stood open: the fault was over meanwhile, and
    is back as another incident.
    """
    first = desk.alert_state.alerts[0]
    mail = mailbox.mails[0][1].get_content()
    assert f"tr11 alerts ack --run tr11.toml {first.incident}" in mail
    assert f"`ack {first.incident}`" in " ".join(mail.split())
    assert resolve_prefix(desk.alert_state, first.incident) == first
    for minutes in (1, 2, 3):
        desk.look(NOON + minutes * MINUTE)
    with pytest.raises(NoSuchAlert, match="is over already"):
        resolve_prefix(desk.alert_state, first.incident)
    desk.look(NOON + 30 * HOUR, finding())
    later = desk.alert_state.open_alerts[0]
    assert later.fingerprint == first.fingerprint and later.incident != first.incident
    drop(desk, "late", f"ack {first.incident} I am on it")
    [note] = desk.look(NOON + 31 * HOUR, finding()).notes
    assert "is over; another incident of that kind is open since 2022-05-03 18:00" in note
    assert not desk.alert_state.open_alerts[0].is_acknowledged
    state = desk.alert_state
    assert {
        resolve_prefix(state, name) for name in (first.fingerprint, later.incident.upper())
    } == {state.open_alerts[0]}
    for name in (f"{first.fingerprint}-", f"{first.fingerprint}-zz", f"-{later.incident}"):
        with pytest.raises(NoSuchAlert):
            resolve_prefix(state, name)


def test_json_says_who(desk: Office) -> None:
    drop(
        desk,
        "a.json",
        json.dumps({"ack": fingerprint(desk), "who": "cleo", "reason": "on the train"}),
    )
    desk.look(NOON + HOUR, finding())
    assert desk.alert_state.alerts[0].acknowledged_by == f"cleo (file of {getpass.getuser()})"


def test_all_that_a_person_may_do(desk: Office, mailbox: Mailbox) -> None:
    name = fingerprint(desk)
    drop(desk, "1", f"assign {name} {BEN} yours")
    drop(desk, "2", json.dumps({"action": "snooze", "fingerprint": name, "for": "3h"}))
    desk.look(NOON + MINUTE, finding())
    alert = desk.alert_state.alerts[0]
    assert (alert.owner, alert.snoozed_until) == (BEN, NOON + MINUTE + 3 * HOUR)
    drop(desk, "3", f"resolve {name} false alarm")
    desk.look(NOON + 2 * MINUTE, blind={"stalled"})
    assert desk.alert_state.alerts[0].resolved_why == "false alarm"
    assert mailbox.subjects[-1].startswith("[OK]")
    assert "false alarm" in mailbox.mails[-1][1].get_content()
    kinds = {entry.kind for entry in desk.journal("alert-")}
    assert {"alert-assigned", "alert-snoozed", "alert-resolved"} <= kinds


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "says neither"),
        ("ack", "says neither"),
        ("delete 123", "says neither"),
        ("ack 000000", "not an open alert"),
        ("ack b", "too short"),
        ("snooze {} forever", "length of time"),
        ("assign {}", "to whom"),
        (b"\xff\xfeack", "UTF-8"),
        ('{"ack": ', "Expecting"),
        ("[" * 90000, "too large"),
        ('{"ack": {"a": 1}}', "not an open alert"),
    ],
)
def test_what_makes_no_sense_is_put_away_and_said(
    desk: Office, content: str | bytes, words: str
) -> None:
    text = (
        content.replace("{}", fingerprint(desk))
        if isinstance(content, str) and "{}" in content
        else content
    )
    drop(desk, "answer", text)
    outcome = desk.look(NOON + MINUTE, finding())
    assert words in outcome.notes[0]
    assert desk.files("replies/refused") == ["answer"]
    assert not desk.alert_state.alerts[0].is_acknowledged
    assert desk.look(NOON + 2 * MINUTE, finding()).notes == ()


def test_a_file_that_is_still_being_written_is_left(desk: Office) -> None:
    drop(desk, "answer", "ac", age=0)
    drop(desk, ".hidden", "ack")
    assert desk.look(NOON + MINUTE, finding()).notes == ()
    assert desk.files("replies") == ["answer"]


def test_hostile_names_and_kinds_of_files(desk: Office, tmp_path: Path) -> None:
    name, secret = fingerprint(desk), tmp_path / "secret"
    secret.write_text(f"ack {name}")
    folder = desk.folder_of("replies")
    drop(desk, "a\n\x1b[2Jb", "rubbish")
    drop(desk, b"\xff\xfe", "rubbish")
    drop(desk, "x" * 255, "rubbish")
    (folder / "link").symlink_to(secret)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    outcome = desk.look(NOON + MINUTE, finding())
    assert len(outcome.notes) == 6
    assert all(note.isprintable() for note in outcome.notes)
    assert not desk.alert_state.alerts[0].is_acknowledged
    assert secret.read_text() == f"ack {name}"
    assert desk.files("replies") == ["done", "refused"] or desk.files("replies") == ["refused"]
    assert desk.look(NOON + 2 * MINUTE, finding()).notes == ()


def test_lengths_of_time() -> None:
    assert [seconds_of(text) for text in ("90s", "30m", "30min", "2h", "1.5d", "1w")] == [
        90,
        1800,
        1800,
        7200,
        129600,
        604800,
    ]
    for wrong in ("", "2", "h", "-1h", "0h", "1e9d", "200d", "2h30", "nan"):
        with pytest.raises(ValueError, match=r"length of time|must be"):
            seconds_of(wrong)


def test_prefixes(desk: Office) -> None:
    alert_state = desk.alert_state
    name = alert_state.alerts[0].fingerprint
    assert resolve_prefix(alert_state, name[:3].upper()) == alert_state.alerts[0]
    for wrong, words in (
        ("", "too short"),
        ("zzz", "not an open alert"),
        (name + "0", "not an open alert"),
    ):
        with pytest.raises(NoSuchAlert, match=words):
            resolve_prefix(alert_state, wrong)
