"""Replies by mail: through a real SMTP and a real IMAP conversation, also those that no one sends in good faith."""

from __future__ import annotations

import imaplib
import re
from collections.abc import Callable, Iterator
from email.message import EmailMessage
from pathlib import Path

import pytest

from tests.tr11ops.alerts.imap_server import PASSWORD, USER, ImapServer, Letterbox
from tests.tr11ops.alerts.office import (
    ANA,
    BEN,
    CLEO,
    CRITICAL,
    HOUR,
    MINUTE,
    NOON,
    WARNING,
    Mailbox,
    Office,
    finding,
)
from tr11ops.alerts.mail_replies import parse_reply
from tr11ops.alerts.people import send_test
from tr11ops.runcard.card import CardError

Make = Callable[..., Office]


@pytest.fixture
def imap() -> Iterator[ImapServer]:
    server = ImapServer()
    yield server
    server.close()


@pytest.fixture
def box(imap: ImapServer) -> Letterbox:
    return imap.box


def settings(imap: ImapServer, secret: Path, *more: str) -> tuple[str, ...]:
    secret.write_text(f"# of the alerts\n{USER}\n{PASSWORD}\n")
    secret.chmod(0o600)
    return (
        f'rota=["{ANA}","{BEN}"]', f'recipients=["{ANA}"]', 'rota_start="2022-05-02"', 'imap_host="127.0.0.1"',
        f"imap_port={imap.port}", "imap_tls=false", f'imap_credentials_file="{secret}"', *more,
    )  # fmt: skip


@pytest.fixture
def desk(office: Make, imap: ImapServer, tmp_path: Path) -> Office:
    return office(*settings(imap, tmp_path / "imap"))


def reply(
    mailbox: Mailbox,
    text: str,
    number: int = -1,
    sender: str = ANA,
    html: bool = False,
    **more: str,
) -> bytes:
    """What a mail program makes of an answer to a mail of ours."""
    _, asked = mailbox.mails[number]
    mail = EmailMessage()
    mail["From"] = f"Someone <{sender}>"
    mail["To"] = str(asked["From"])
    mail["Subject"] = f"Re: {asked['Subject']}"
    mail["Message-ID"] = more.pop("identity", f"<{len(text)}-{number}-{sender}>")
    mail["In-Reply-To"] = more.pop("answers", str(asked["Message-ID"]))
    mail["References"] = " ".join(
        filter(None, (str(asked["References"] or ""), str(asked["Message-ID"])))
    )
    for name, value in more.items():
        mail[name.replace("_", "-")] = value
    quoted = "".join(f"> {line}\n" for line in asked.get_content().splitlines())
    mail.set_content(f"{text}\n\nOn Monday the watchdog wrote:\n{quoted}")
    if html:
        mail.set_content(
            f"<html><body><div>{text}</div><blockquote>ack</blockquote></body></html>",
            subtype="html",
        )
    return mail.as_bytes()


@pytest.mark.parametrize("text", ["ack", "Ack.", "ACK I am on it", "\n\nack, thanks"])
@pytest.mark.parametrize("html", [False, True])
def test_one_word_acknowledges(
    desk: Office, mailbox: Mailbox, box: Letterbox, text: str, html: bool
) -> None:
    desk.look(NOON, finding())
    assert "reply to this mail with the one word: ack" in mailbox.mails[0][1].get_content()
    box.put(reply(mailbox, text, html=html))
    assert desk.look(NOON + HOUR, finding()).notes == ()
    assert desk.alert_state.alerts[0].acknowledged_by == ANA
    assert len(mailbox.mails) == 1  # no escalation
    (entry,) = desk.journal("alert-acknowledged")
    assert entry.who == ANA
    desk.look(NOON + 2 * HOUR, finding())
    assert len(desk.journal("alert-acknowledged")) == 1 and box.fetched == [1]  # read once


def test_snooze_and_a_reply_to_a_later_mail_of_the_thread(
    desk: Office, mailbox: Mailbox, box: Letterbox
) -> None:
    desk.look(NOON, finding())
    desk.look(NOON + 40 * MINUTE, finding())  # escalated
    box.put(reply(mailbox, "snooze 3h the site repairs it", sender=BEN))
    desk.look(NOON + 41 * MINUTE, finding())
    alert = desk.alert_state.alerts[0]
    assert (alert.snoozed_until, alert.snoozed_by) == (NOON + 41 * MINUTE + 3 * HOUR, BEN)
    assert desk.journal("alert-snoozed")[0].why == "the site repairs it"


def test_a_reply_to_a_mail_takes_all_its_alerts_and_no_other(
    desk: Office, mailbox: Mailbox, box: Letterbox
) -> None:
    nodes = [finding("slow-node", WARNING, f"n{number}") for number in range(3)]
    desk.look(NOON, *nodes, finding())
    (number,) = (n for n, (_, mail) in enumerate(mailbox.mails) if "WARNING" in mail["Subject"])
    box.put(reply(mailbox, "ack", number))
    desk.look(NOON + MINUTE, *nodes, finding())
    assert {alert.detector: alert.is_acknowledged for alert in desk.alert_state.open_alerts} == {
        "slow-node": True, "stalled": False,
    }  # fmt: skip


def test_a_mail_program_that_names_the_thread_is_understood(
    desk: Office, mailbox: Mailbox, box: Letterbox
) -> None:
    desk.look(NOON, finding())
    box.put(reply(mailbox, "ack", answers="<draft@phone>"))
    desk.look(NOON + MINUTE, finding())
    assert desk.alert_state.alerts[0].is_acknowledged


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (
            "ack",
            {"sender": "eve@example.org"},
            "reply of eve@example.org: is none of the people of this run",
        ),
        (
            "Thanks a lot",
            {},
            "reply of ana@example.org: begins with 'Thanks', neither ack nor snooze 2h",
        ),
        ("snooze forever", {}, "length of time"),
        ("", {}, "begins with 'On'"),
    ],
)
def test_what_is_not_heeded_is_said_once(
    desk: Office, mailbox: Mailbox, box: Letterbox, text: str, more: dict[str, str], words: str
) -> None:
    desk.look(NOON, finding())
    box.put(reply(mailbox, text, **more))
    assert words in desk.look(NOON + MINUTE, finding()).notes[0]
    assert desk.look(NOON + 2 * MINUTE, finding()).notes == ()
    assert (
        not desk.alert_state.alerts[0].is_acknowledged
        and desk.alert_state.alerts[0].snoozed_until is None
    )


def test_holiday_notes_and_closed_alerts_are_passed_over(
    desk: Office, mailbox: Mailbox, box: Letterbox
) -> None:
    desk.look(NOON, finding())
    box.put(reply(mailbox, "ack", Auto_Submitted="auto-replied"))
    box.put(
        reply(mailbox, "ack", answers="<x@0123456789ab.tr11.invalid>").replace(
            b"References:", b"X-Old:"
        )
    )
    assert desk.look(NOON + MINUTE, finding()).notes == ()
    assert not desk.alert_state.alerts[0].is_acknowledged
    assert box.fetched == [1]  # the server is asked for this run's alone
    for minute in (2, 3):
        desk.look(NOON + minute * MINUTE)
    box.put(reply(mailbox, "ack"))
    assert desk.look(NOON + 4 * MINUTE).notes == ()


def test_a_renumbered_mailbox_is_read_and_nothing_counts_twice(
    desk: Office, mailbox: Mailbox, box: Letterbox
) -> None:
    desk.look(NOON, finding())
    box.put(reply(mailbox, "snooze 1h"))
    desk.look(NOON + MINUTE, finding())
    box.validity, box.mails = 8, {40: box.mails[1]}
    desk.look(NOON + 2 * MINUTE, finding())
    assert box.fetched == [1, 40]
    assert desk.alert_state.alerts[0].snoozed_until == NOON + MINUTE + HOUR
    assert desk.alert_state.mailbox == (8, 40)


def test_a_bad_server_is_one_line_and_alerts_go_out(
    office: Make, mailbox: Mailbox, imap: ImapServer, tmp_path: Path
) -> None:
    secret = tmp_path / "imap"
    desk = office(*settings(imap, secret, "delivery_seconds=0.4"))
    imap.box.drips.set()
    outcome = desk.look(NOON, finding())
    assert outcome.notes == (f"mailbox 127.0.0.1:{imap.port}: not done within 0.4 s",)
    assert len(mailbox.mails) == 1
    imap.box.drips.clear()
    imap.over.set()
    desk.set(*settings(imap, secret, 'imap_folder="Alerts"'))
    assert "no such folder" in desk.look(NOON + MINUTE, finding()).notes[0]
    secret.write_text(f"{USER}\nwr0ngpass\n")
    (note,) = desk.look(NOON + 2 * MINUTE, finding()).notes
    assert "AUTHENTICATIONFAILED" in note and "wr0ngpass" not in note
    secret.chmod(0o644)
    assert "chmod 600" in desk.look(NOON + 3 * MINUTE, finding()).notes[0]
    secret.chmod(0o600)
    secret.write_text("one line\n")
    assert "two lines" in desk.look(NOON + 4 * MINUTE, finding()).notes[0]


def test_the_test_of_the_routes_reads_the_mailbox(
    desk: Office, mailbox: Mailbox, box: Letterbox
) -> None:
    rows = send_test(desk.directory, desk.card, (), NOON)
    assert [(route, trouble) for route, _, trouble in rows] == [
        ("mail", ""),
        ("mail", ""),
        ("imap", ""),
    ]
    assert not any(
        word in command
        for command in box.commands
        for word in ("STORE", "SELECT", "EXPUNGE", "COPY")
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ('imap_host="mail.example.org"', 'imap_credentials_file="/x"', "imap_tls=false"),
            "in the open",
        ),
        (('imap_host="mail.example.org"',), "alerts.imap_credentials_file"),
        (
            ('imap_host="mail.example.org"', 'imap_credentials_file="/x"', "sender=none"),
            "alerts.sender",
        ),
    ],
)
def test_a_card_that_could_not_be_read_by_mail_is_refused(
    office: Make, lines: tuple[str, ...], words: str
) -> None:
    desk = office(f'recipients=["{CLEO}"]')
    kept = [line for line in lines if line != "sender=none"]
    fixed = [] if len(kept) < len(lines) else ['sender="bot@example.org"']
    from tr11ops.runcard.card import load_card

    with pytest.raises(CardError, match=words):
        load_card(
            desk.path, [f"alerts.{line}" for line in (*kept, *fixed)], {}, directory=desk.folder
        )


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"From: \xff\r\n\r\nack", b"In-Reply-To: " + b"<" * 5000 + b"\r\n\r\nack\r\n",
     b"Content-Type: multipart/mixed\r\n\r\n--x", b"Content-Type: text/plain; charset=no-such\r\n\r\nack",
     b"Content-Transfer-Encoding: base64\r\n\r\n%%%", b"Message-ID: <\r\nReferences: [x]\r\n\r\n"],
)  # fmt: skip
def test_garbage_is_a_reply_that_says_nothing_of_ours(content: bytes) -> None:
    assert parse_reply(content).answers == ()


@pytest.mark.parametrize("kind", [b"text/plain; charset*", b"text/plain; charset*=\x00''a"])
def test_a_reply_that_fails_is_one_note_and_the_next_one_counts(
    desk: Office, mailbox: Mailbox, box: Letterbox, kind: bytes
) -> None:
    desk.look(NOON, finding())
    box.put(
        re.sub(
            rb"Content-Type: [^\r\n]+", lambda _: b"Content-Type: " + kind, reply(mailbox, "ack")
        )
    )
    (note,) = desk.look(NOON + MINUTE, finding()).notes
    assert note.startswith("a reply cannot be read: ") and desk.alert_state.mailbox == (7, 1)
    box.put(reply(mailbox, "ack", sender=BEN))
    assert desk.look(NOON + 2 * MINUTE, finding()).notes == ()
    assert desk.alert_state.alerts[0].acknowledged_by == BEN and box.fetched == [1, 2]


def test_a_server_that_lists_no_mails_has_no_replies(
    desk: Office, mailbox: Mailbox, box: Letterbox
) -> None:
    box.is_terse = True
    assert desk.look(NOON, finding()).notes == ()
    assert len(mailbox.mails) == 1 and box.fetched == []


@pytest.mark.parametrize("error", [AttributeError, TypeError, IndexError, KeyError])
def test_what_the_library_stumbles_over_is_one_note(
    desk: Office, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def stumble(*_: object) -> None:
        raise error("odd")

    monkeypatch.setattr(imaplib.IMAP4, "uid", stumble)
    (note,) = desk.look(NOON, finding()).notes
    assert note.startswith("mailbox 127.0.0.1:") and "odd" in note
    assert len(mailbox.mails) == 1


def test_severity_still_counts_after_a_reply(
    desk: Office, mailbox: Mailbox, box: Letterbox
) -> None:
    desk.look(NOON, finding("disk-full", WARNING, "SCRATCH"))
    box.put(reply(mailbox, "ack"))
    desk.look(NOON + MINUTE, finding("disk-full", WARNING, "SCRATCH"))
    desk.look(NOON + 2 * MINUTE, finding("disk-full", CRITICAL, "SCRATCH"))
    assert mailbox.subjects[-1].startswith("[CRITICAL]")
