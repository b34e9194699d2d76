"""A real server over the recorded run, a broken one, and a mirrored copy."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
import uvicorn

from tests.pins.commands import beside
from tests.pins.recording import unpacked
from tests.waiting import until
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
    ) -> Said:
        """One request; with a form it is sent as a page sends it."""
        sent = {"Cookie": cookie, **(headers or {})}
        body = None
        if form is not None:
            body = urlencode(form)
            sent.setdefault("Content-Type", "application/x-www-form-urlencoded")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("GET" if form is None else "POST", path, body, sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Said(answer.status, answer.read().decode(), found)
        finally:
            connection.close()

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
    tokens = folder / "tokens.json"
    with beside(folder):
        watcher = RunPoller([folder], "local")
        settings = ServeSettings(tokens, folder / "tr11" / "answer-links.key", ("runs.example",))
        config = uvicorn.Config(
            application(watcher, settings), port=0, log_level="error", lifespan="off", ws="none"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        watcher.start()
        found = Site(port, make_token(tokens, "ana"), folder, watcher)
        until(lambda: len(watcher.news()) == 4 and all(one.looked for one in watcher.news()))
        yield found
        watcher.stop()
        server.should_exit = True
        thread.join(60)
