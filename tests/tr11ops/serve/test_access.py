"""Who may act: tokens, sessions, rates, and the command that makes a token and serves."""

from __future__ import annotations

import signal
import stat
from pathlib import Path

import pytest

from tests.tr11ops.serve.conftest import Site
from tr11ops.base.errors import PrivateFileError, Refusal, WrongUsage
from tr11ops.cli.main import execute
from tr11ops.serve.access import CookieSigner, RateLimit, is_known_host
from tr11ops.serve.tokens import make_token, owner_of, read_tokens, revoke_token


def test_tokens_are_kept_as_digests_in_a_file_of_the_owner_alone(tmp_path: Path) -> None:
    place = tmp_path / "config" / "tokens.json"
    first, other = make_token(place, "ana"), make_token(place, "bo")
    assert first not in place.read_text() and stat.S_IMODE(place.stat().st_mode) == 0o600
    assert (owner_of(place, first), owner_of(place, other)) == ("ana", "bo")
    assert owner_of(place, "tr11-x") is None and owner_of(place, "ä\udcff") is None
    again = make_token(place, "ana")
    assert owner_of(place, first) is None and owner_of(place, again) == "ana"
    revoke_token(place, "ana")
    assert owner_of(place, again) is None and len(read_tokens(place).tokens) == 1
    with pytest.raises(Refusal, match="has no token"):
        revoke_token(place, "ana")
    with pytest.raises(WrongUsage, match="letters, digits"):
        make_token(place, "a|b")
    place.chmod(0o644)
    with pytest.raises(PrivateFileError, match="chmod 600"):
        owner_of(place, other)


@pytest.mark.parametrize(
    ("typed", "lands"), [("", "/"), ("RUN", "/run/RUN"), ("//evil.example", "/")]
)
def test_who_signs_in_from_a_run_goes_on_there(
    site: Site, monkeypatch: pytest.MonkeyPatch, typed: str, lands: str
) -> None:
    monkeypatch.setattr(RateLimit, "allows", lambda *_: True)
    assert f'href="/login?run={site.run}"' in site.ask(f"/run/{site.run}").text
    form = {"token": site.token, "run": typed.replace("RUN", site.run)}
    said = site.ask("/login", form)
    assert (said.status, said.headers["location"]) == (303, lands.replace("RUN", site.run))


def test_a_seal_opens_only_what_it_made() -> None:
    seal, other = CookieSigner(), CookieSigner()
    cookie = seal.session("ana")
    assert seal.opened(cookie).name == "ana"
    for forged in ("", "|||", "ana|9|0|ä", cookie.replace("ana", "bob"), other.session("ana")):
        assert seal.opened(forged) is None
    plan = seal.plan(cookie, "kill", "run")
    assert seal.is_plan(plan, cookie, "kill", "run")
    assert not seal.is_plan(plan, cookie, "kill", "other")
    assert not seal.is_plan(plan.replace("1", "2", 1), cookie, "kill", "run")


def test_rates_and_names() -> None:
    rate = RateLimit(2)
    assert [rate.allows("a"), rate.allows("a"), rate.allows("a"), rate.allows("b")] == [
        True, True, False, True,
    ]  # fmt: skip
    known = ["localhost", "localhost:80", "127.0.0.1:8811", "[::1]:8811", "10.1.2.3", "Login1:80"]
    assert all(is_known_host(header, ("login1",)) for header in known)
    assert not any(is_known_host(header, ()) for header in ("", "evil.example", "localhost.evil"))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--listen", "0.0.0.0:1"), "give --cert and --key"),
        (("--listen", "x"), "give PORT or HOST:PORT"),
        (("--cert", "nowhere"), "go together"),
        (("token",), "give one NAME"),
        (("--revoke",), "goes with"),
    ],
)
def test_wrong_usage_is_one_line(
    typed: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["serve", *typed]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_token_is_made_and_revoked_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "tokens.json"
    assert execute(["serve", "token", "ana", "--tokens", str(place)]) == 0
    out = capsys.readouterr().out.strip()
    assert owner_of(place, out) == "ana"
    assert execute(["serve", "token", "ana", "--revoke", "--tokens", str(place)]) == 0
    assert owner_of(place, out) is None


def test_without_the_extra_one_line_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tr11ops.cli.serve.missing", lambda names: ("uvicorn",))
    assert execute(["serve"]) == 1
    assert 'pip install "tr11[serve]"' in capsys.readouterr().err


def test_the_page_may_be_ended_the_moment_it_says_that_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = []

    def end(line: str) -> None:
        said.append(line)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("tr11ops.cli.serve.say", end)
    tokens = str(tmp_path / "tokens.toml")
    assert execute(["serve", str(tmp_path), "--listen", "127.0.0.1:0", "--tokens", tokens]) == 0
    assert len(said) == 1
