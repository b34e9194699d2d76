"""Links in mails: one person's, for what the mail is about, and nothing else."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.alerts.office import ANA, BEN, HOUR, NOON, Mailbox, Office, finding
from tr11ops.alerts.answer_link import LINK_SECONDS, AnswerLink, opened, signing_key
from tr11ops.base.errors import PrivateFileError

Make = Callable[..., Office]
TWO = f'recipients=["{ANA}","{BEN}"]'
SERVER = 'serve_url="https://runs.example.org/tr11/"'
KEY = b"k" * 64
LINK = AnswerLink("0123456789ab", NOON, NOON + HOUR, ("ab12cd34ef56", "0011"), "ana|b@example.org")


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the key of this user is."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "tr11" / "answer-links.key"


def tokens(mailbox: Mailbox) -> dict[str, str]:
    """The link's token in the mail of each person."""
    found = {}
    for to, mail in mailbox.mails:
        [address] = to
        [token] = re.findall(
            r"https://runs\.example\.org/tr11/answer/(\S+)", mail.get_body().get_content()
        )
        found[address] = token
    return found


def test_a_token_says_what_was_signed_and_no_other_key_opens_it() -> None:
    assert opened(LINK.token(KEY), KEY) == LINK
    assert opened(LINK.token(KEY), b"x" * 64) is None


def test_each_character_of_a_token_counts() -> None:
    token = LINK.token(KEY)
    for place, letter in enumerate(token):
        other = "A" if letter != "A" else "B"
        assert opened(f"{token[:place]}{other}{token[place + 1 :]}", KEY) is None
        assert opened(token[:place] + token[place + 1 :], KEY) is None
    mine, theirs = token, replace(LINK, who="eve@example.org").token(b"e" * 64)
    assert opened(f"{theirs.partition('.')[0]}.{mine.partition('.')[2]}", KEY) is None
    for odd in ("", ".", "..", "ä.ö", f"{token}=", f"{token}.", "A" * 100_000, "\n", "%00"):
        assert opened(odd, KEY) is None


def test_the_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    place = tmp_path / "tr11" / "answer-links.key"
    made = signing_key(place)
    assert signing_key(place) == made and len(made) == 64
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert [path.name for path in place.parent.iterdir()] == [place.name], "no draft is left"
    place.chmod(0o640)
    with pytest.raises(PrivateFileError, match="chmod 600"):
        signing_key(place)
    place.chmod(0o600)
    place.write_text("short")
    with pytest.raises(PrivateFileError, match="is no key"):
        signing_key(place)


@pytest.mark.usefixtures("key")
def test_without_a_server_a_mail_is_as_it_was(office: Make, mailbox: Mailbox) -> None:
    office(TWO).look(NOON, finding())
    [(to, mail)] = mailbox.mails
    assert to == (ANA, BEN) and "/answer/" not in mail.get_body().get_content()


def test_each_person_has_a_mail_with_a_link_of_their_own(
    office: Make, mailbox: Mailbox, key: Path
) -> None:
    desk = office(TWO, SERVER)
    assert desk.look(NOON, finding()).notes == ()
    alert = desk.alert_state.alerts[0]
    found = tokens(mailbox)
    assert set(found) == {ANA, BEN}
    for address, token in found.items():
        link = opened(token, signing_key(key))
        assert link == AnswerLink(
            desk.directory.mark, NOON, NOON + LINK_SECONDS, (alert.fingerprint,), address
        )
    first, second = (mail for _, mail in mailbox.mails)
    assert str(first["To"]) == ANA and first["Message-ID"] == second["Message-ID"]
    text = first.get_body().get_content()
    assert text.index("/answer/") < text.index("tr11 alerts ack") < text.index("---- tr11 runbook")
    kept = [path.read_text() for path in desk.folder_of("sent").iterdir()]
    assert kept and not any(token in words for words in kept for token in found.values())
    assert len(desk.journal("alert-sent")) == 1


def test_an_all_clear_has_nothing_to_answer(office: Make, mailbox: Mailbox, key: Path) -> None:
    desk = office(f'recipients=["{ANA}"]', SERVER, "resolve_after=1")
    desk.look(NOON, finding())
    desk.look(NOON + 2 * HOUR)
    bodies = [mail.get_body().get_content() for _, mail in mailbox.mails]
    assert ["/answer/" in body for body in bodies] == [True, False]
    assert key.exists()


def test_a_mail_about_several_has_one_link_for_all_that_still_stand(
    office: Make, mailbox: Mailbox, key: Path
) -> None:
    desk = office(f'recipients=["{ANA}"]', SERVER)
    names = ("node1", "node2", "node3")
    desk.look(NOON, *(finding("node-lost", subject=name) for name in names))
    link = opened(tokens(mailbox)[ANA], signing_key(key))
    assert link is not None
    assert set(link.alerts) == {alert.fingerprint for alert in desk.alert_state.alerts}
    assert len(link.alerts) == 3


def test_a_key_that_others_can_read_costs_the_link_and_not_the_mail(
    office: Make, mailbox: Mailbox, key: Path
) -> None:
    signing_key(key)
    key.chmod(0o644)
    office(f'recipients=["{ANA}"]', SERVER).look(NOON, finding())
    [(_, mail)] = mailbox.mails
    text = " ".join(mail.get_body().get_content().split())
    assert "/answer/" not in text and f"{key}: others can read it; type: chmod 600 {key}" in text


@pytest.mark.usefixtures("key")
def test_one_who_is_refused_or_slow_keeps_no_one_else_waiting(
    office: Make, mailbox: Mailbox
) -> None:
    desk = office(TWO, SERVER, "delivery_seconds=1")
    mailbox.slow.add(ANA)
    [note] = desk.look(NOON, finding()).notes
    assert "not done within" in note and mailbox.mails == []
    desk.look(NOON + 300, finding())  # now the one who was not tried is first
    assert mailbox.told() == [(BEN,)]
    mailbox.slow.clear()
    desk.look(NOON + 1200, finding())
    assert mailbox.told() == [(BEN,), (ANA,)]
    assert desk.files("outbox") == []
