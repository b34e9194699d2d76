"""A mail is read, its link followed, its button pressed; and all who should not get anything that way."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.alerts.office import ANA, DAY, Mailbox, Server, finding
from tests.tr11ops.serve.conftest import Site, served
from tr11ops.alerts.answer_link import AnswerLink, opened, signing_key
from tr11ops.alerts.changes import AlertChange, change_alerts, change_shift
from tr11ops.alerts.incidents import ACKNOWLEDGED, RESOLVED
from tr11ops.alerts.sending import Sender
from tr11ops.alerts.service import process_some
from tr11ops.alerts.state import Alert
from tr11ops.alerts.store import current_alert_state
from tr11ops.api import Run
from tr11ops.runcard.card import load_card
from tr11ops.rundir.journal import JournalEntry, read_journal
from tr11ops.serve.app import ServeSettings

URL = "http://127.0.0.1"


class Office:
    """The watchdog's side of a served run: it opens alerts and sends mails."""

    def __init__(self, site: Site, mailbox: Mailbox, port: int) -> None:
        self.site, self.mailbox = site, mailbox
        news = site.watcher.find(site.run)
        assert news is not None and news.run is not None
        self.run: Run = news.run
        settings = {"smtp_host": "127.0.0.1", "smtp_port": port, "serve_url": f"{URL}:{site.port}"}
        lines = [f'alerts.{name}="{value}"' for name, value in settings.items()]
        lines[1] = f"alerts.smtp_port={port}"
        people = [f'alerts.recipients=["{ANA}"]', "alerts.rota=[]", 'alerts.digest_time=""']
        self.card = load_card(site.folder / "run", [*lines, *people], os.environ)

    def sender(self) -> Sender:
        return Sender.of(self.run.directory, self.card, time.time())

    def told(self, detector: str) -> str:
        """Open an alert, and return the path of the link in its mail."""
        before = len(self.mailbox.mails)
        process_some(self.sender(), [finding(detector, subject="node9")])
        for _, mail in self.mailbox.mails[before:]:
            if f"{detector} it is" in str(mail["Subject"]):
                text = mail.get_body().get_content()
                [path] = re.findall(rf"{URL}:{self.site.port}(/answer/\S+)", text)
                return str(path)
        raise AssertionError("no mail of it")

    def alert(self, detector: str) -> Alert:
        every = current_alert_state(self.run.directory).alerts
        [found] = (one for one in every if one.detector == detector and one.is_open)
        return found

    def resolve(self, detector: str) -> None:
        change = AlertChange(RESOLVED, "ben", "it was a test")
        name = self.alert(detector).fingerprint
        change_alerts(self.sender(), [name], change, who="ben", why="it was a test")

    def journal(self, kind: str) -> list[JournalEntry]:
        every = read_journal(self.run.directory.journal).entries
        return [entry for entry in every if entry.kind == kind]

    def signed(self, path: str, **changes: Any) -> str:
        """The path of a link that says something else, signed with the server's own key."""
        key = signing_key(self.site.folder / "tr11" / "answer-links.key")
        link = opened(path.removeprefix("/answer/"), key)
        assert isinstance(link, AnswerLink)
        return f"/answer/{replace(link, **changes).token(key)}"


@pytest.fixture
def office(
    site: Site, mailbox: Mailbox, server: Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Office]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(site.folder))
    yield Office(site, mailbox, server.port)


def state_of(site: Site) -> dict[Path, float]:
    """When each file of alerts and journal was last written."""
    folder = site.folder / "run"
    places = [folder / "journal", folder / "state" / "alerts"]
    return {
        path: path.stat().st_mtime_ns
        for place in places
        for path in place.rglob("*")
        if path.is_file()
    }


def test_a_mail_is_acknowledged_by_its_link(site: Site, office: Office) -> None:
    path = office.told("stalled")
    before = state_of(site)
    shown = site.ask(path)
    assert shown.status == 200 and "stalled it is" in shown.text and ANA in shown.text
    assert shown.text.count("<button") == 1 and ">Acknowledge</button>" in shown.text
    assert state_of(site) == before, "looking acts on nothing: scanners of mail follow links"
    done = site.ask(path, {"action": "ack"})
    assert done.status == 200 and f"Acknowledged by {ANA}: stalled it is" in done.text
    alert = office.alert("stalled")
    assert alert.acknowledged_by == ANA and alert.acknowledged_why == "from the link in a mail"
    [entry] = office.journal("alert-acknowledged")
    assert entry.data["fingerprint"] == alert.fingerprint and entry.who == ANA
    assert [one.who for one in office.journal("served-act")] == [ANA, ANA]
    assert f"{ANA} has it" in site.ask(path).text, "the page says who has it"


def test_it_is_snoozed_and_the_shift_taken_by_their_own_button(site: Site, office: Office) -> None:
    path = office.told("slow")
    shown = site.ask(f"{path}?do=snooze")
    assert shown.text.count("<button") == 1 and ">Snooze for 2 hours</button>" in shown.text
    assert site.ask(path, {"action": "snooze"}).status == 200
    until = office.alert("slow").snoozed_until
    assert until is not None and until > time.time() + 3600
    assert office.alert("slow").snoozed_by == ANA and office.journal("alert-snoozed")[0].who == ANA
    assert "Give the shift back" not in shown.text and "On call: no one named" in shown.text
    taken = site.ask(path, {"action": "shift"})
    assert taken.status == 200 and f"on call: {ANA} until" in taken.text
    [entry] = office.journal("shift-taken")
    assert entry.data["on_call"] == [ANA] and entry.who == ANA
    assert entry.why == "from the link in a mail"
    # commands have the clock of this machine, days after that of the recorded run and its server
    mine = office.sender().policy.taken_by(ANA, time.time(), 30 * DAY)
    change_shift(office.sender(), mine, ANA, "")
    shown = site.ask(f"{path}?do=shift-back")
    assert shown.text.count("<button") == 1 and f"{ANA} (took the shift, " in shown.text
    assert site.ask(f"{path}?do=shift").status == 404, "who has it does not take it again"
    assert site.ask(path, {"action": "shift-back"}).status == 200
    [ended] = office.journal("shift-ended")
    assert ended.data["before"] == [ANA] and ended.who == ANA
    assert site.ask(f"{path}?do=kill").status == 404


def test_what_should_get_nothing_gets_nothing(site: Site, office: Office) -> None:
    path = office.told("spike")
    other = office.told("clock-skew")
    before = state_of(site)
    form = {"action": "ack"}
    mixed = f"{path.partition('.')[0]}.{other.partition('.')[2]}"
    foreign = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}
    tries = (
        (site.ask(mixed, form), 403, "was changed on its way"),
        (site.ask("/answer/forged", form), 403, "not made for this server"),
        (site.ask(office.signed(path, until=time.time() - 1), form), 410, "expired"),
        (site.ask(office.signed(path, run="0123456789ab"), form), 404, "has not seen that run"),
        (site.ask(office.signed(path, alerts=("00",)), form), 410, "is over"),
        (site.ask(path, form, headers=foreign), 403, "not sent from this page"),
        (site.ask(path, {"action": "kill", "reason": "x"}), 400, "no such button"),
        (site.ask(path, {}), 400, "no such button"),
        (site.ask(path, form, headers={"Content-Type": "text/plain"}), 403, "not sent from"),
    )
    for said, status, words in tries:
        assert (said.status, words in said.text) == (status, True), said.text
    assert state_of(site) == before
    site.ask(path, {"action": "ack", "alert": office.alert("clock-skew").fingerprint, "who": "eve"})
    assert office.alert("clock-skew").acknowledged_at is None, "a link is for its own alert alone"
    assert office.alert("spike").acknowledged_by.startswith(ANA), "and for its own person"


def test_a_private_server_shows_a_link_and_only_its_button_acts(site: Site) -> None:
    """A scanner of mails asks for the link in any way it likes, and has no token."""
    settings = ServeSettings(
        site.folder / "tokens.json", site.folder / "tr11" / "answer-links.key", is_private=True
    )
    path = site.link("bo@example.org")
    with served(site.watcher, settings) as port:
        private, before = replace(site, port=port), state_of(site)
        for other in ("/", f"/run/{site.run}", "/runs.json", "/events", f"/run/{site.run}/log"):
            assert private.ask(other).headers["location"] == "/login", other
        login = private.ask("/login").text
        assert "tr11 serve token ADDRESS" in login
        assert str(site.folder) not in login and socket.gethostname() not in login
        scanner = {"User-Agent": "scanner", "Purpose": "prefetch", "Sec-Purpose": "prefetch"}
        assert [private.ask(path, headers=scanner).status for _ in range(3)] == [200] * 3
        assert private.ask(path, method="HEAD").status == 200
        assert {private.ask(path, method=way).status for way in ("OPTIONS", "PUT", "DELETE")} == {
            405
        }
        for end in ("/", "?action=ack", "?do=ack&action=ack", "%00", "/../x"):
            private.ask(path + end, headers=scanner)
        for forged in (path[:-1], path + "A", path.replace(".", "..", 1), "/answer/" + "a" * 9000):
            assert private.ask(forged, {"action": "ack"}).status in {403, 404}, forged
        assert state_of(site) == before, "nothing of that was an answer"
        assert private.ask(path, {"action": "ack"}).status == 200
        assert state_of(site) != before


def test_what_has_changed_since_the_page_was_opened_is_shown_again(
    site: Site, office: Office
) -> None:
    path = office.told("slow-save")
    [seen] = re.findall(r'name="shown" value="(\w+)"', site.ask(path).text)
    change = AlertChange(ACKNOWLEDGED, "bo")
    name = office.alert("slow-save").fingerprint
    change_alerts(office.sender(), [name], change, who="bo", why="was first")
    said = site.ask(path, {"action": "ack", "shown": seen})
    assert "have changed since" in said.text and "bo has it" in said.text
    assert office.alert("slow-save").acknowledged_by == "bo", "it is not taken from him unseen"
    [seen] = re.findall(r'name="shown" value="(\w+)"', said.text)
    assert "Done" in site.ask(path, {"action": "ack", "shown": seen}).text


def test_what_is_over_is_not_answered_nor_is_what_came_after_it(site: Site, office: Office) -> None:
    path = office.told("lingering")
    office.resolve("lingering")
    assert site.ask(path).status == 410
    said = site.ask(path, {"action": "ack"})
    assert said.status == 410 and "That is over" in said.text
    newer = office.told("lingering")  # the same kind of fault once more: another incident
    assert site.ask(path, {"action": "ack"}).status == 410
    assert office.alert("lingering").acknowledged_at is None
    assert site.ask(newer, {"action": "ack"}).status == 200
