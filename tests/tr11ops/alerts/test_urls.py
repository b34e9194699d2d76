"""Delivery URLs and the dead-man call, against a real web server: what is sent, and that no URL is
ever shown.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import apprise
import pytest

from tests.tr11ops.alerts.office import ANA, HOUR, MINUTE, NOON, Mailbox, Office, finding
from tr11ops.alerts.changes import send_test
from tr11ops.alerts.url_route import UrlRoute, ping, secret_lines, shown
from tr11ops.base.errors import PrivateFileError

SECRET = "hunter2tr0ub4dor"
Make = Callable[..., Office]


class Web(ThreadingHTTPServer):
    """Keeps every request; answers with `codes`, by and by, then with 200; never when `silent` is
    set.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.requests: list[tuple[str, str, bytes]] = []
        self.codes: list[int] = []
        self.silent = threading.Event()


class Answers(BaseHTTPRequestHandler):
    server: Web

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, body))
        if self.server.silent.is_set():
            return  # the connection is closed without a word
        self.send_response(self.server.codes.pop(0) if self.server.codes else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def secret_file(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    path = folder / "urls"
    path.write_text("# who is told\n\n" + "\n".join(lines) + "\n")
    path.chmod(mode)
    return path


def url(web: Web, word: str = SECRET) -> str:
    return f"json://bot:{word}@127.0.0.1:{web.server_address[1]}/{word}"


def test_every_message_goes_to_every_url_once(
    tmp_path: Path, web: Web, office: Make, mailbox: Mailbox
) -> None:
    path = secret_file(tmp_path, url(web), url(web, SECRET + "2"))
    desk = office(f'recipients=["{ANA}"]', f'urls_file="{path}"', "resolve_after=1")
    assert desk.look(NOON, finding()).sent == 2  # the mail, and the URLs
    assert sorted(where for _, where, _ in web.requests) == [f"/{SECRET}", f"/{SECRET}2"]
    told = json.loads(web.requests[0][2])
    assert told["title"] == "[CRITICAL] small: stalled it is"
    assert "line one" in told["message"]
    assert told["type"] == "failure"
    desk.look(NOON + HOUR)
    assert json.loads(web.requests[-1][2])["type"] == "success"
    assert len(web.requests) == 4
    everything = b"".join(
        file.read_bytes() for file in desk.directory.root.rglob("*") if file.is_file()
    )
    assert SECRET.encode() not in everything


def test_one_url_that_fails_is_tried_again_alone(
    tmp_path: Path, web: Web, office: Make, capfd: Any
) -> None:
    path = secret_file(tmp_path, url(web), url(web, SECRET + "2"))
    desk = office(f'urls_file="{path}"')
    web.codes = [500]
    outcome = desk.look(NOON, finding())
    assert outcome.waiting.count == 1
    assert outcome.notes == (f"urls: {shown(url(web))}: the service did not take it",)
    outcome = desk.look(NOON + 2 * MINUTE, finding())
    assert [where for _, where, _ in web.requests] == [f"/{SECRET}", f"/{SECRET}2", f"/{SECRET}"]
    assert outcome.waiting.count == 0
    assert SECRET not in "".join(capfd.readouterr())


def test_urls_that_are_no_longer_wanted_hold_nothing(
    tmp_path: Path, web: Web, office: Make
) -> None:
    desk = office(f'urls_file="{secret_file(tmp_path, url(web))}"')
    web.codes = [500]
    desk.look(NOON, finding())
    desk.set()
    assert desk.look(NOON + HOUR, finding()).waiting.count == 0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.chmod(0o640), "others can read it"),
        (lambda path: os.chown(path, 12345, -1), "belongs to another user"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "is not a file"),
        (lambda path: path.write_bytes(b"\xff\xfe" + SECRET.encode()), "is not UTF-8"),
        (lambda path: path.write_text(SECRET * 9999), "is larger than"),
    ],
)
def test_a_file_that_is_not_safe_is_refused(
    tmp_path: Path, web: Web, office: Make, spoil: Callable[[Path], object], words: str
) -> None:
    if os.geteuid() != 0 and "another" in words:
        pytest.skip("only root can give files away")
    path = secret_file(tmp_path, url(web))
    spoil(path)
    with pytest.raises(PrivateFileError, match=words) as caught:
        secret_lines(path)
    assert SECRET not in str(caught.value)
    desk = office(f'urls_file="{path}"')
    outcome = desk.look(NOON, finding())
    assert words in outcome.notes[0]
    assert outcome.waiting.count == 1
    assert web.requests == []


@pytest.mark.parametrize(
    "wrong",
    ["nonsense", f"nosuch://{SECRET}", "json://", f"slack://{SECRET}", f"mailto://{SECRET}"],
)
def test_what_is_no_url_is_said_without_it(
    tmp_path: Path, wrong: str, office: Make, capfd: Any
) -> None:
    desk = office(f'urls_file="{secret_file(tmp_path, wrong)}"')
    outcome = desk.look(NOON, finding())
    assert outcome.waiting.count == 1
    assert outcome.notes
    assert SECRET not in " ".join(outcome.notes) + "".join(capfd.readouterr())
    assert isinstance(desk.card.alerts.urls_file, str)
    results = UrlRoute(Path(desk.card.alerts.urls_file)).send_each(outcome.messages[0])
    assert results[0][0].startswith(("url-", wrong.partition(":")[0] + "-"))


def test_a_service_that_does_not_answer_costs_its_time_out(tmp_path: Path, office: Make) -> None:
    import socket

    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        path = secret_file(tmp_path, f"json://127.0.0.1:{mute.getsockname()[1]}/{SECRET}")
        desk = office(f'urls_file="{path}"')
        made = desk.look(NOON, finding(), deliver=False).messages[0]
        results = UrlRoute(path, timeout=0.2).send_each(made)
    assert results[0][1] == "the service did not take it"


def test_the_test_message_reports_each_route(
    tmp_path: Path, web: Web, office: Make, mailbox: Mailbox
) -> None:
    desk = office(
        f'recipients=["{ANA}","ben@example.org"]', f'urls_file="{secret_file(tmp_path, url(web))}"'
    )
    mailbox.recipient_answers = {"ben@example.org": "550 no"}
    results = send_test(desk.sender(NOON), ())
    assert [(route, who, bool(trouble)) for route, who, trouble in results] == [
        ("mail", ANA, False),
        ("mail", "ben@example.org", True),
        ("urls", shown(url(web)), False),
    ]
    assert mailbox.subjects == ["[TEST] small: alerts arrive here"]


# ----------------------------------------------------------------------------- the dead man
def test_the_dead_man_is_called_only_when_something_was_seen(
    tmp_path: Path, web: Web, office: Make
) -> None:
    path = secret_file(tmp_path, f"http://127.0.0.1:{web.server_address[1]}/{SECRET}")
    desk = office(f'dead_man_url_file="{path}"', f'recipients=["{ANA}"]')
    desk.look(NOON, observed=False)
    assert web.requests == []
    assert desk.look(NOON + HOUR).notes == ()
    assert [where for _, where, _ in web.requests] == [f"/{SECRET}"]
    web.codes = [503]
    assert desk.look(NOON + 2 * HOUR).notes == (
        f"dead-man call: {shown(secret_lines(path)[0])}: the service answered 503",
    )
    web.silent.set()
    assert len(desk.look(NOON + 3 * HOUR).notes) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        f"ftp://h/{SECRET}",
        f"http://[{SECRET}",
        f"http://127.0.0.1:1/{SECRET}",
        f"http://h:x{SECRET}/",
        f"http://a b/{SECRET}",
    ],
)
def test_a_dead_man_call_that_fails_never_shows_its_url(tmp_path: Path, wrong: str) -> None:
    trouble = ping(secret_file(tmp_path, wrong))
    assert trouble
    assert SECRET not in trouble


# ----------------------------------------------------------------------------- recipes
def test_the_recipes_of_the_page_make_a_file_of_urls_that_are_known(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "chat.md").read_text(encoding="utf-8")
    recipe = re.search(
        r"## Chat.*?^```sh\n(.*?)^tr11 alerts test\n```", page, re.MULTILINE | re.DOTALL
    )
    assert recipe
    subprocess.run(["bash", "-ec", recipe[1]], cwd=tmp_path, check=True)
    assert len(secret_lines(tmp_path / "chats.txt")) == 1
    urls = re.findall(
        r"^(?:# )?([a-z]+://\S+)$", (tmp_path / "chats.txt").read_text(), re.MULTILINE
    )
    kinds = [type(apprise.Apprise.instantiate(url)).__name__ for url in urls]
    assert kinds == ["NotifyNtfy", "NotifyNtfy", "NotifySlack", "NotifyPagerDuty"]
