"""No request gets more than it should, or holds up another."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from tests.tr11ops.serve.conftest import HOSTILE, Site, form_of, published, served
from tests.waiting import until
from tr11ops.serve.access import CookieSigner
from tr11ops.serve.app import ServeSettings
from tr11ops.serve.poller import RunPoller


@pytest.mark.parametrize(
    ("cookie", "form", "headers", "status"),
    [
        ("", {"action": "kill"}, {}, 403),
        ("tr11=ana|9999999999|00|" + "0" * 64, {"action": "kill"}, {}, 403),
        ("mine", {"action": "kill", "reason": "x"}, {}, 403),
        ("mine", {"action": "kill", "reason": "x", "form": "0" * 64}, {}, 403),
        ("mine", {"action": "kill", "reason": "x", "form": "right"}, {"Origin": "http://evil.example"}, 403),
        ("mine", {"action": "kill", "reason": "x", "form": "right"}, {"Sec-Fetch-Site": "cross-site"}, 403),
        ("mine", {"action": "kill", "form": "right"}, {"Content-Type": "text/plain"}, 403),
        ("mine", {"action": "rm -rf", "form": "right"}, {}, 400),
        ("mine", {"action": "exclude", "nodes": "--force", "reason": "x", "form": "right"}, {}, 400),
        ("mine", {"action": "ack", "alert": "--all", "form": "right"}, {}, 400),
        ("mine", {"action": "snooze", "alert": "abcd-1f", "length": "9999d", "form": "right"}, {}, 400),
    ],
)  # fmt: skip
def test_what_the_page_does_not_send_changes_nothing(
    site: Site, cookie: str, form: dict[str, str], headers: dict[str, str], status: int
) -> None:
    site.watcher.find(site.run)
    if cookie == "mine":
        cookie = sessions(site)
    if form.get("form") == "right":
        form = {**form, "form": form_of(site, cookie)}
    switch = site.folder / "run" / "kill-switch"
    before = switch.read_text()
    assert site.ask(f"/run/{site.run}/act", form, cookie, headers).status == status
    assert switch.read_text() == before


_SESSIONS: dict[int, str] = {}


def sessions(site: Site) -> str:
    """One session for the attacks: a person may not sign in more than some times a minute."""
    if site.port not in _SESSIONS:
        seal = CookieSigner()
        assert seal.opened(seal.session("ana")) is not None
        until(lambda: site.ask("/login", {"token": site.token}).status in {303, 429})
        _SESSIONS[site.port] = until_signed_in(site)
    return _SESSIONS[site.port]


def until_signed_in(site: Site) -> str:
    found: list[str] = []

    def signed() -> bool:
        said = site.ask("/login", {"token": site.token})
        if said.status == 303:
            found.append(said.headers["set-cookie"].partition(";")[0])
        return bool(found)

    until(signed, pause=1.0)
    return found[0]


def test_guessing_a_token_is_slowed_down(site: Site) -> None:
    codes = [site.ask("/login", {"token": f"tr11-{number}"}).status for number in range(8)]
    assert codes[-1] == 429 and 303 not in codes


@pytest.mark.parametrize(
    "path",
    [
        "/run/../../etc/passwd", "/run/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/assets/../app.py",
        "/assets/%2e%2e%2ftokens.py", "/runbook/..%2f..%2fpyproject.toml", "/run/%00", "/run/" + "a" * 4000,
        "/run/x/log?q=" + "%ff" * 50,
    ],
)  # fmt: skip
def test_no_path_leads_out(site: Site, path: str) -> None:
    said = site.ask(path)
    assert said.status == 404 and "root:" not in said.text and "import" not in said.text


def test_pages_carry_what_keeps_a_browser_safe(site: Site) -> None:
    said = site.ask("/")
    policy = said.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert (
        "frame-ancestors 'none'" in policy and said.headers["x-content-type-options"] == "nosniff"
    )
    assert site.ask("/", headers={"Host": "evil.example"}).status == 421
    assert site.ask("/", headers={"Host": "runs.example"}).status == 200
    assert "HttpOnly" in site.ask("/login", {"token": "x"}).headers.get("set-cookie", "HttpOnly")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "null", "[" * 50_000, json.dumps({"schema": 1, "run": HOSTILE}),
        published(run={"name": HOSTILE, "variant": HOSTILE}, line=HOSTILE, sleep_needs=[HOSTILE]),
        published(findings="x", iteration="nan", loss=[1], finish=7, nodes="no", attempts=3, unknown={}),
        published(verdict=["down"], exit_code=True, time="9999-99-99T00:00:00+00:00"),
        published(iteration=1e400, total_iterations=-1, throughput={"percent": "x"}, goodput=[]),
        published(x="y" * (2 << 20)),
    ],
    ids=range(11),
)  # fmt: skip
def test_huge_and_broken_documents_are_shown_as_what_they_are(site: Site, text: str) -> None:
    (site.folder / "mirror" / "status.json").write_text(text)
    looked = site.watcher.find(site.mirror)
    assert looked is not None
    site.watcher.look_again(site.mirror)
    until(lambda: site.watcher.find(site.mirror).looked > looked.looked)
    for path in ("/", f"/run/{site.mirror}", f"/run/{site.mirror}/details"):
        said = site.ask(path)
        assert said.status == 200 and "<script>document" not in said.text, said.text
        assert "<img" not in said.text
    (site.folder / "mirror" / "status.json").write_text(published())


def test_what_others_leave_in_a_shared_folder_leads_nowhere_and_stops_no_page(
    tmp_path: Path,
) -> None:
    """A log that is a link to a key, a pipe or a device; names that no text has, or that turn it."""
    secret = tmp_path / "secret"
    secret.write_text("the key\n")
    folder, bidi = tmp_path / "runs", "a\u202egnp.exe\u2066\x00\x1b[31m"
    names = (b"link", b"pipe", b"device", b"status", b"\xff\xfe", "b\u202e\n<b>".encode())
    for name in names:
        place = folder / os.fsdecode(name)
        (place / "logs" / "main").mkdir(parents=True)
        told = published(run={"name": bidi, "variant": bidi}, line=bidi)
        (place / "status.json").write_text(told)
    logs = Path("logs", "main", "main_log.txt")
    (folder / "link" / logs).symlink_to(secret)
    os.mkfifo(folder / "pipe" / logs)
    (folder / "device" / logs).symlink_to("/dev/zero")
    (folder / "status" / "status.json").unlink()
    (folder / "status" / "status.json").symlink_to(secret)
    watcher = RunPoller([folder], "local")
    settings = ServeSettings(tmp_path / "tokens.json", tmp_path / "links.key")
    with served(watcher, settings) as port:
        watcher.start()
        until(lambda: len(watcher.news()) == 6 and all(one.looked for one in watcher.news()))
        site, shown = Site(port, "", folder, watcher), []
        pages = [f"/run/{one.key}{end}" for one in watcher.news() for end in ("", "/log")]
        for path in ("/", "/runs.json", *pages):
            said = site.ask(path)
            assert said.status == 200, (path, said.text)
            shown.append(said.text)
        watcher.stop()
    every = "".join(shown)
    assert "the key" not in every and "is a link" in every and "is a pipe" in every
    assert not {"\u202e", "\u2066", "\x00", "\x1b"} & set(every)


def test_a_form_too_large_or_never_ending_is_not_read(site: Site) -> None:
    assert site.ask("/login", {"token": "x" * 100_000}).status in {400, 429}


def test_slow_and_silent_readers_hold_up_no_one(site: Site) -> None:
    """Two hundred that open a stream and read nothing of it; another is served all the same."""
    streams = []
    try:
        for _ in range(200):
            stream = socket.create_connection(("127.0.0.1", site.port), timeout=300)
            stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            streams.append(stream)
        for stream in streams[:20]:
            assert stream.recv(12) == b"HTTP/1.1 200"
        codes: list[int] = []
        threads = [
            threading.Thread(target=lambda: codes.append(site.ask("/").status)) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert codes == [200] * 20
    finally:
        for stream in streams:
            stream.close()
