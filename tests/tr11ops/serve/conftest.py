"""A real server over the recorded run, a broken one, and a mirrored copy."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
import uvicorn

from tests.pins.commands import beside
from tests.pins.recording import unpacked
from tests.waiting import until
from tr11ops.alerts.answer_link import AnswerLink, signing_key
from tr11ops.alerts.store import current_alert_state
from tr11ops.serve.app import ServeSettings, application
from tr11ops.serve.poller import RunPoller, key_of
from tr11ops.serve.tokens import make_token
from trainer.contract.record import Record

HOSTILE = "<script>document.title='taken'</script>\"'><img src=x onerror=alert(1)>"


class Said(Record):
    """An answer of the server."""

    status: int
    text: str
    headers: dict[str, str]


class Site(Record):
    """A server that runs, and what it serves."""

    port: int
    token: str
    folder: Path
    watcher: RunPoller

    @property
    def run(self) -> str:
        return key_of(self.folder / "run")

    @property
    def mirror(self) -> str:
        return key_of(self.folder / "mirror")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        form: dict[str, str] | None = None,
        cookie: str = "",
        headers: dict[str, str] | None = None,
        method: str = "",
    ) -> Said:
        """One request; with a form it is sent as a page sends it."""
        sent = {"Cookie": cookie, **(headers or {})}
        body = None
        if form is not None:
            body = urlencode(form)
            sent.setdefault("Content-Type", "application/x-www-form-urlencoded")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            usual = "GET" if form is None else "POST"
            connection.request(method or usual, path, body, sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Said(answer.status, answer.read().decode(), found)
        finally:
            connection.close()

    def link(self, who: str) -> str:
        """The path of a link in a mail to a person, about all alerts that are open now."""
        news = self.watcher.find(self.run)
        assert news is not None and news.run is not None
        every = current_alert_state(news.run.directory).open_alerts
        now = time.time()
        link = AnswerLink(
            run=news.run.directory.mark,
            told=now,
            until=now + 3600,
            alerts=tuple(alert.fingerprint for alert in every),
            who=who,
        )
        return f"/answer/{link.token(signing_key(self.folder / 'tr11' / 'answer-links.key'))}"

    def sign_in(self) -> str:
        """The cookie of a person who has shown a token."""
        said = self.ask("/login", {"token": self.token})
        assert said.status == 303, said.text
        return said.headers["set-cookie"].partition(";")[0]


def published(**changes: object) -> str:
    """What a run publishes."""
    told = {
        "schema": 1, "time": "2026-11-22T21:22:00+00:00", "interval_seconds": 3600,
        "run": {"name": "far", "variant": "main"}, "verdict": "healthy", "line": "the training runs",
        "exit_code": 0, "may_sleep": None, "sleep_needs": [], "iteration": 7, "total_iterations": 70,
    }  # fmt: skip
    return json.dumps({**told, **changes})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The server; it is ended with the module."""
    folder = unpacked(tmp_path_factory.mktemp("served").resolve())
    broken = folder / "broken" / "state" / "submissions" / "20260101-000000-00000000"
    broken.mkdir(parents=True)
    (broken / "card.json").write_text("{")
    (folder / "mirror").mkdir()
    (folder / "mirror" / "status.json").write_text(published())
    shutil.copytree(folder / "run", folder / "copy" / "run")
    costly(folder / "run")
    tokens = folder / "tokens.json"
    settings = ServeSettings(tokens, folder / "tr11" / "answer-links.key", ("runs.example",))
    with beside(folder):
        watcher = RunPoller([folder], "local")
        with served(watcher, settings) as port:
            watcher.start()
            found = Site(port, make_token(tokens, "ana"), folder, watcher)
            until(lambda: len(watcher.news()) == 4 and all(one.looked for one in watcher.news()))
            yield found
            watcher.stop()


@contextmanager
def served(watcher: RunPoller, settings: ServeSettings) -> Iterator[int]:
    """A server of these runs; its port."""
    config = uvicorn.Config(
        application(watcher, settings), port=0, log_level="error", lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)


def costly(folder: Path) -> None:
    """Its card names a team, GPUs and their price, as a list of several runs shows them."""
    for place in (folder / "state" / "submissions").glob("*/card.json"):
        card = json.loads(place.read_text())
        card["operation"] = {"team": "large models", "gpu_hour_price": 2.5, "currency": "EUR"}
        card["slurm"]["gpus_per_node"] = 4
        place.write_text(json.dumps(card))


def words(text: str) -> str:
    """What a page says, without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def form_of(site: Site, cookie: str) -> str:
    """What a form of this session carries."""
    page = site.ask(f"/run/{site.run}", cookie=cookie).text
    return re.findall(r'name="form" value="([0-9a-f]{64})"', page)[0]
