"""Mail servers that are unreachable, that hang, refuse or drop the line; processes that are killed,
and two at once.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forks import exit_code, forked, killed_at
from tests.tr11ops.alerts.office import (
    ANA,
    BEN,
    DAY,
    HOUR,
    LIST,
    MINUTE,
    NOON,
    WARNING,
    Mailbox,
    Office,
    Server,
    finding,
)
from tr11ops.alerts.mail_route import MailRoute, compose, is_address
from tr11ops.alerts.outbox import (
    CLAIM_SECONDS,
    OutboxEntry,
    delay,
    deliver,
    in_turn,
    queue,
    waiting,
    waiting_entries,
)
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.state import Message
from tr11ops.alerts.store import incidents, open_alerts
from tr11ops.alerts.url_route import ping
from tr11ops.base.observed import Unknown
from tr11ops.detect.detector import Severity
from tr11ops.runcard.card import shipped_folder

Make = Callable[..., Office]
TWO = f'recipients=["{ANA}","{BEN}"]'


def message(number: int = 1, to: tuple[str, ...] = (ANA,), **more: object) -> Message:
    values = {
        "id": f"0123456789ab-{number}", "kind": "opened", "alert": "0123456789ab", "detector": "stalled",
        "severity": Severity.CRITICAL, "subject": "[CRITICAL] small: it stands still", "body": "What: it\n", "to": to,
        "time": NOON + number, "message_id": f"<m{number}@tr11.invalid>",
    }  # fmt: skip
    return Message(**{**values, **more})  # type: ignore[arg-type]


def closed_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def route(port: int, **more: object) -> MailRoute:
    return MailRoute("127.0.0.1", port, "bot@example.org", "here", lambda: NOON + 60, **more)  # type: ignore[arg-type]


def identities(mailbox: Mailbox) -> list[str]:
    return [str(mail["Message-ID"]) for _, mail in mailbox.mails]


# ----------------------------------------------------------------------------- servers
def test_a_server_that_is_away_for_three_hours(
    office: Make, mailbox: Mailbox, server: Server
) -> None:
    desk = office(TWO, 'digest_time="14:30"', "resolve_after=1", "escalate_minutes=[]")
    desk.port = closed_port()
    desk.set(TWO, 'digest_time="14:30"', "resolve_after=1", "escalate_minutes=[]")
    seen = {
        0: [finding()],
        1: [finding(), finding("slow", WARNING, "n01")],
        2: [finding("slow", WARNING, "n01")],
    }
    for hour, found in seen.items():
        outcome = desk.look(NOON + hour * HOUR, *found)
        assert outcome.sent == 0
        assert "127.0.0.1" in outcome.notes[0]
        assert "refused" in outcome.notes[0]
    left = waiting(desk.directory)
    assert not isinstance(left, Unknown)
    assert (left.count, left.since) == (3, NOON)
    desk.port = server.port
    desk.set(TWO, 'digest_time="14:30"', "resolve_after=1", "escalate_minutes=[]")
    outcome = desk.look(NOON + 3 * HOUR, finding("slow", WARNING, "n01"))
    assert [subject.partition(" ")[0] for subject in mailbox.subjects] == [
        "[CRITICAL]",
        "[WARNING]",
        "[OK]",
        "[DIGEST]",
    ]
    assert outcome.sent == 4
    assert outcome.waiting.count == 0
    assert "This waited 3 h 00 min for the mail server" in mailbox.mails[0][1].get_content()
    assert (
        "3 messages wait to be sent, the oldest since 2022-05-02 12:00"
        in mailbox.mails[3][1].get_content()
    )
    for quarter in range(1, 9):
        desk.look(NOON + 3 * HOUR + quarter * 15 * MINUTE, finding("slow", WARNING, "n01"))
    assert len(mailbox.mails) == 4
    assert len(desk.files("sent")) == 4
    assert desk.files("outbox") == desk.files("claims") == []


def test_back_off_doubles_up_to_an_hour_and_never_ends() -> None:
    delays = [delay("m", attempts, False) for attempts in range(1, 3000)]
    assert 30 <= delays[0] <= 60
    assert max(delays) <= HOUR
    assert all(delay("m", attempts, False) >= HOUR / 2 for attempts in range(7, 100))
    assert len({delay(f"m{number}", 5, False) for number in range(50)}) == 50  # not all at once
    assert DAY / 2 <= delay("m", 99, True) <= DAY


def test_a_server_that_takes_it_and_drops_the_line_has_it(office: Make, mailbox: Mailbox) -> None:
    desk = office(TWO)
    mailbox.drop_after = True
    assert desk.look(NOON, finding()).sent == 1
    desk.look(NOON + MINUTE, finding())
    assert len(mailbox.mails) == 1


def test_a_server_that_is_busy_gets_it_later(office: Make, mailbox: Mailbox) -> None:
    desk = office(TWO)
    mailbox.data_answers = ["451 come back later"]
    outcome = desk.look(NOON, finding(), finding("slow", WARNING, "n01"))
    assert outcome.sent == 1  # the busy answer was about the one mail: the other went out
    assert outcome.waiting.count == 1
    assert "451" in outcome.notes[0]
    desk.look(NOON + 5 * MINUTE, finding(), finding("slow", WARNING, "n01"))
    assert sorted(mailbox.told()) == [(ANA, BEN), (ANA, BEN)]
    assert len(set(identities(mailbox))) == 2


def test_a_refused_address_does_not_hold_up_the_others(office: Make, mailbox: Mailbox) -> None:
    desk = office(TWO, "escalate_minutes=[]")
    mailbox.recipient_answers = {BEN: "550 no such user"}
    outcome = desk.look(NOON, finding())
    assert mailbox.told() == [(ANA,)]
    assert outcome.notes == ("mail: ben@example.org: the server said 550 no such user",)
    mailbox.recipient_answers = {BEN: "450 grey"}
    # refused for good: tried again a day later, in case it was repaired
    desk.look(NOON + DAY - HOUR, finding())
    assert waiting_entries(desk.directory)[0].left == (BEN,)
    mailbox.recipient_answers = {}
    desk.look(NOON + DAY - 2 * MINUTE, finding())
    assert mailbox.told() == [(ANA,), (BEN,)]
    assert len(set(identities(mailbox))) == 1
    assert desk.files("outbox") == []


def test_a_refused_address_gone_from_the_card_is_given_up(office: Make, mailbox: Mailbox) -> None:
    desk = office(TWO)
    mailbox.recipient_answers = {BEN: "550 gone"}
    desk.look(NOON, finding())
    desk.set(f'recipients=["{ANA}"]')
    desk.look(NOON + 2 * DAY)
    assert desk.files("outbox") == []


def test_a_server_that_hangs_costs_its_time_out_and_the_round(
    mailbox: Mailbox, server: Server, tmp_path: Path
) -> None:
    mailbox.silent = True
    desk = Office(tmp_path, server.port)
    for number in (1, 2):
        queue(desk.directory, message(number), ("mail",))
    sent, _ = deliver(desk.directory, (route(server.port, timeout=0.2),), lambda: NOON + 60, 5.0)
    assert sent == []
    assert mailbox.connections == 2
    with socket.socket() as mute:  # takes the connection and never says a word
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        report = route(mute.getsockname()[1], timeout=0.2).send(
            OutboxEntry(message(), "mail", left=(ANA,))
        )
    assert report.is_unreachable
    assert "timed out" in report.trouble
    assert {entry.attempts for entry in waiting_entries(desk.directory)} == {1}


def test_a_mail_that_is_late_in_every_round_keeps_up_no_alarm(
    mailbox: Mailbox, server: Server, tmp_path: Path
) -> None:
    desk = Office(tmp_path, server.port)
    mailbox.slow = {LIST}
    slow = {"kind": "digest", "alert": "", "severity": Severity.INFO, "to": (LIST,)}
    for number in (1, 2, 3):
        queue(desk.directory, message(number, **slow), ("mail",))  # type: ignore[arg-type]
    queue(desk.directory, message(4), ("mail",))
    sent, _ = deliver(desk.directory, (route(server.port, deadline=0.4),), lambda: NOON + 60, 60.0)
    assert [entry.message.id for entry in sent] == ["0123456789ab-4"]
    # the line was open: each was tried
    assert {entry.attempts for entry in waiting_entries(desk.directory)} == {1}


def test_urgent_messages_go_first_and_incidents_keep_order() -> None:
    cleared = {"kind": "cleared", "alert": "a"}
    entries = [
        OutboxEntry(message(1, alert="", kind="digest"), "mail", due=NOON + HOUR, attempts=3),
        OutboxEntry(message(2, alert="b", severity=WARNING), "mail", attempts=1),
        OutboxEntry(message(3, alert="c", severity=WARNING), "mail"),
        OutboxEntry(message(4, alert="a", severity=WARNING), "mail", due=NOON + HOUR, attempts=2),
        OutboxEntry(message(5, alert="d", alerts=("d", "a")), "mail"),
        OutboxEntry(message(6, **cleared), "mail"),
        OutboxEntry(message(7, alert="e"), "mail", attempts=1),
    ]
    turns = [entry.message.id.partition("-")[2] for entry in in_turn(entries, NOON)]
    assert turns == ["4", "5", "7", "3", "6", "2", "1"]


@pytest.mark.parametrize(
    "wrong", ["a@b\r\nBcc: x@y", "nobody", "a b@c", "ünï@example.org", "a@b,c@d", "<a@b>", ""]
)
def test_what_is_no_address_is_never_sent(wrong: str, mailbox: Mailbox, server: Server) -> None:
    assert not is_address(wrong)
    report = route(server.port).send(
        OutboxEntry(message(to=(wrong, ANA)), "mail", left=(wrong, ANA))
    )
    assert mailbox.told() == [(ANA,)]
    assert report.withdrawn == (wrong,)


def test_headers_cannot_be_forged_and_utf_8_arrives(mailbox: Mailbox, server: Server) -> None:
    text = "Größe 7 µs — 時\n" + "x" * 3000 + "\n.\nQUIT\n"
    hostile = message(subject="[CRITICAL] r: a\r\nBcc: eve@example.org\r\n\r\nbody — 時", body=text)
    report = route(server.port).send(OutboxEntry(hostile, "mail", left=(ANA,)))
    assert report.done == (ANA,)
    to, mail = mailbox.mails[0]
    assert to == (ANA,)
    assert mail["Bcc"] is None
    assert mail["Subject"] == "[CRITICAL] r: a Bcc: eve@example.org body — 時"
    assert mail.get_content().replace("\r\n", "\n") == text
    assert max(map(len, compose(hostile, "bot@example.org", NOON).as_bytes().split(b"\r\n"))) <= 998
    assert mail["Message-ID"] == "<m1@tr11.invalid>"
    assert mail["Importance"] == "high"
    assert mail["Auto-Submitted"] == "auto-generated"


# ----------------------------------------------------------------------------- kills
EFFECTS = {"os.rename", "os.link", "os.remove", "smtplib.connect", "smtplib.send"}


def is_effect(event: str, arguments: tuple[Any, ...]) -> bool:
    """Also what is appended to."""
    return event in EFFECTS or (event == "open" and bool(int(arguments[2] or 0) & os.O_APPEND))


def age_claims(desk: Office) -> None:
    """A quarter of an hour passes on the file server."""
    for name in desk.files("claims"):
        past = time.time() - CLAIM_SECONDS - 1
        os.utime(desk.folder_of("claims") / name, (past, past))


def test_a_kill_before_any_effect_loses_nothing(
    tmp_path: Path, mailbox: Mailbox, server: Server
) -> None:
    doubled, was_killed, effect = [], True, 0
    while was_killed:
        effect += 1
        mailbox.mails.clear()
        folder = tmp_path / str(effect)
        folder.mkdir()
        desk = Office(folder, server.port, TWO, "resolve_after=1", "escalate_minutes=[]")
        was_killed = killed_at(effect, lambda desk=desk: desk.look(NOON, finding()), is_effect)
        age_claims(desk)
        desk.look(NOON + 20 * MINUTE, finding())
        desk.look(NOON + 40 * MINUTE)
        sent = Counter(identities(mailbox))
        assert Counter(subject.partition(" ")[0] for subject in set(mailbox.subjects)) == {
            "[CRITICAL]": 1,
            "[OK]": 1,
        }
        assert len(sent) == 2, effect
        doubled += [effect] * (sum(sent.values()) - 2)
        assert desk.files("outbox") == [], effect
        assert desk.alert_state.messages == desk.alert_state.events == ()
        for kind in ("alert-opened", "alert-resolved"):
            assert len({entry.data["event"] for entry in desk.journal(kind)}) == 1, effect
    assert effect > 20
    # where the kill fell between the server's yes and the record of it
    assert len(doubled) <= 2, doubled


def test_two_watchdogs_at_once_send_each_message_once(
    tmp_path: Path, mailbox: Mailbox, server: Server
) -> None:
    desk = Office(tmp_path, server.port, TWO, "escalate_minutes=[]")
    found = [finding("slow-node", WARNING, f"n{number}") for number in range(8)]
    children = [
        forked(lambda shift=shift: desk.look(NOON + shift, *found)) for shift in (0.0, 0.001, 0.002)
    ]
    assert [exit_code(child) for child in children] == [0, 0, 0]
    desk.look(NOON + HOUR, *found)
    assert list(Counter(identities(mailbox)).values()) == [1]
    assert len(desk.alert_state.open_alerts) == 8
    assert len({entry.data["fingerprint"] for entry in desk.journal("alert-opened")}) == 8


# ----------------------------------------------------------------------------- disks
def test_people_hear_of_it_where_nothing_can_be_written(
    tmp_path: Path, mailbox: Mailbox, server: Server
) -> None:
    desk = Office(tmp_path, server.port, TWO)

    def look() -> None:
        # as a full disk does: files may be made, nothing goes in
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        outcome = desk.look(NOON, finding())
        assert "alerts cannot be recorded" in outcome.notes[0]
        assert outcome.sent == 1

    for _ in range(2):
        assert exit_code(forked(look)) == 0
    assert mailbox.told() == [(ANA, BEN)] * 2
    desk.look(NOON + HOUR, finding())
    desk.look(NOON + HOUR + MINUTE, finding())
    assert len(mailbox.mails) == 3


def test_a_folder_that_cannot_be_used_is_said(office: Make, mailbox: Mailbox) -> None:
    desk = office(TWO)
    desk.directory.paths.state.mkdir()
    desk.folder_of("").parent.joinpath("alerts").write_text("in the way")
    outcome = desk.look(NOON, finding())
    assert any("the run directory cannot be written (" in note for note in outcome.notes)
    assert len(mailbox.mails) == 1


def test_no_run_directory_is_made_where_none_is(
    tmp_path: Path, mailbox: Mailbox, server: Server
) -> None:
    desk = Office(tmp_path, server.port, TWO)
    desk.directory.root.rmdir()
    outcome = desk.look(NOON, finding())
    assert "there is no run directory" in outcome.notes[0]
    assert not desk.directory.exists
    assert len(mailbox.mails) == 1


@pytest.mark.parametrize(
    "garbage", [b"", b"{", b"\xff\xfe", b"[1]", b'{"schema": 1}', b'{"schema": 1, "alerts": [7]}']
)
def test_a_damaged_book_falls_back_to_the_version_before_it(
    office: Make, mailbox: Mailbox, garbage: bytes
) -> None:
    desk = office(TWO)
    desk.look(NOON, finding())
    versions = sorted(desk.folder_of("book.d").iterdir())
    (versions[-1].parent / f"{int(versions[-1].stem) + 1:08d}.json").write_bytes(garbage)
    outcome = desk.look(NOON + MINUTE, finding())
    assert "is not a file of alert state" in outcome.notes[0]
    assert len(mailbox.mails) == 1
    assert desk.look(NOON + 2 * MINUTE, finding()).notes == ()


def test_without_a_readable_version_the_next_look_begins_again(
    office: Make, mailbox: Mailbox
) -> None:
    desk = office(TWO)
    desk.look(NOON, finding())
    for path in [*desk.folder_of("book.d").iterdir(), desk.folder_of("book.json")]:
        path.write_text("garbage")
    assert isinstance(open_alerts(desk.directory), Unknown)
    assert isinstance(incidents(desk.directory), Unknown)
    desk.look(NOON + MINUTE, finding())
    assert len(mailbox.mails) == 2  # said once more rather than never
    assert len(set(identities(mailbox))) == 2


def test_a_book_of_a_newer_tr11_is_left_alone(office: Make, mailbox: Mailbox) -> None:
    desk = office(TWO)
    desk.look(NOON, finding())
    newest = max(desk.folder_of("book.d").iterdir())
    newer = newest.with_name(f"{int(newest.stem) + 1:08d}.json")
    newer.write_text(json.dumps({"schema": 2, "alerts": "in another way"}))
    outcome = desk.look(NOON + MINUTE, finding("slow", WARNING, "n01"))
    assert "newer tr11" in outcome.notes[0]
    assert max(desk.folder_of("book.d").iterdir()) == newer
    assert len(mailbox.mails) >= 2


def test_garbage_in_the_outbox_holds_nothing_up(office: Make, mailbox: Mailbox) -> None:
    desk = office(TWO)
    desk.look(NOON, finding("slow", WARNING, "n01"))
    for name, content in (
        ("a-mail.json", b"{}"),
        ("b-mail.json", b"\xff"),
        ("c-mail.json", b""),
        ("d\n.json", b""),
    ):
        (desk.folder_of("outbox") / name).write_bytes(content)
    outcome = desk.look(NOON + MINUTE, finding())
    assert len(mailbox.mails) == 2
    assert any("a-mail.json" in note for note in outcome.notes)


def test_a_claim_of_a_killed_process_runs_out(
    office: Make, mailbox: Mailbox, server: Server
) -> None:
    desk = office(TWO)
    queue(desk.directory, message(), ("mail",))
    queue(desk.directory, message(), ("mail",))  # the same again: it is one
    desk.folder_of("claims").mkdir(parents=True)
    (desk.folder_of("claims") / "0123456789ab-1-mail.1").touch()
    assert deliver(desk.directory, (route(server.port),), lambda: NOON + 60, 5.0)[0] == []
    age_claims(desk)
    assert len(deliver(desk.directory, (route(server.port),), lambda: NOON + 60, 5.0)[0]) == 1
    assert desk.files("claims") == []
    queue(desk.directory, message(), ("mail",))  # it was sent: it is not queued again
    assert desk.files("outbox") == []


def test_mail_to_lists_goes_once_with_no_delivery_when_asked(
    office: Make, mailbox: Mailbox
) -> None:
    desk = office(f'recipients=["{LIST}"]')
    outcome = desk.look(NOON, finding(), deliver=False)
    assert outcome.suppressed
    assert [made.to for made in outcome.messages] == [(LIST,)]
    assert mailbox.mails == []
    assert desk.files("outbox") == []
    entry = desk.journal("alert-sent")[0]
    assert entry.data["suppressed"] is True
    assert desk.look(NOON + MINUTE, finding()).sent == 1  # no one has heard of it yet
    assert mailbox.told() == [(LIST,)]
    assert desk.journal("alert-sent")[-1].data["to"] == [LIST]


# ----------------------------------------------------------------------------- one deadline
class Drip:
    """A mail server that sends a line of its greeting every twentieth of a second, and never the
    last one.
    """

    def __init__(self, beginning: bytes = b"") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.beginning, self.over = beginning, threading.Event()
        self.cut_off = threading.Event()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            try:
                connection.sendall(self.beginning)
                while not self.over.wait(0.05):
                    connection.sendall(b"220-still here\r\n")
            except OSError:
                self.cut_off.set()

    def close(self) -> None:
        self.over.set()
        self.listener.close()
        self.thread.join()


@pytest.mark.parametrize("beginning", [b"", b"220 here\r\n"], ids=["greeting", "answer"])
def test_a_slow_server_costs_one_deadline_and_is_tried_again(
    tmp_path: Path, mailbox: Mailbox, server: Server, beginning: bytes
) -> None:
    drip = Drip(beginning)
    try:
        desk = Office(tmp_path, drip.port, TWO, "delivery_seconds=0.4", "escalate_minutes=[]")
        outcome = desk.look(NOON, finding(), finding("slow", WARNING, "n01"))
        assert drip.cut_off.wait(10)
    finally:
        drip.close()
    assert outcome.sent == 0 and outcome.waiting.count == 2
    assert outcome.notes == (f"mail: 127.0.0.1:{drip.port}: not done within 0.4 s",)
    desk.port = server.port
    desk.set(TWO, "escalate_minutes=[]")
    assert desk.look(NOON + 10 * MINUTE, finding(), finding("slow", WARNING, "n01")).sent == 2
    assert len(mailbox.mails) == 2


def test_a_service_that_drips_costs_one_deadline(tmp_path: Path) -> None:
    drip = Drip(b"HTTP/1.1 200 OK\r\n")
    secret = tmp_path / "url"
    secret.write_text(f"http://127.0.0.1:{drip.port}/x\n")
    secret.chmod(0o600)
    try:
        assert "within" in ping(secret, timeout=0.2)
    finally:
        drip.close()


def test_a_command_for_an_absolute_card_needs_no_folder(
    office: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is named from a folder, or ships with tr11, means this run there alone; so does one
    whose run was launched into the folder where the command was typed.
    """
    desk = office(TWO)
    shipped = str(shipped_folder() / "demo.toml")
    folders = {
        typed: Sender.of(desk.directory, desk.card, NOON, typed).policy.folder
        for typed in ("", "tr11.toml", shipped, "/cards/tr11.toml")
    }
    here = str(Path.cwd())
    assert folders == {"": here, "tr11.toml": here, shipped: here, "/cards/tr11.toml": ""}
    beside = desk.directory.paths.root.parent
    monkeypatch.chdir(beside)
    for typed, folder in (("/cards/tr11.toml", str(beside)), (str(beside / "tr11.toml"), "")):
        assert Sender.of(desk.directory, desk.card, NOON, typed).policy.folder == folder
