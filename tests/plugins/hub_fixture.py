"""A hub of our own, for tests: it speaks the hub's HTTP API, so the unmodified `huggingface_hub`
works against it.

    def test_it(hub_server: FaultyHub, hub: Hub): ...

Fixtures
- `hub_server`: a fresh running `tests.plugins.faulty_hub.FaultyHub`. Accounts: `hub_server.token` (bot, writes to bot/...
  and science/...) and `hub_server.read_token` (reads science/...). `hub_server.url` is the endpoint.
- `hub_waits`: the list of seconds that `hub` slept: nothing really sleeps.
- `hub`: `tr11ops.hub.client.Hub` for that server with the writing token, a time-out of 5 s, an hour's patience, and a
  sleep and clock of its own (the server's limits stay on real time unless `hub_server.now` is set).
- `make_hub(token=..., **patience)`: the same with other credentials or patience.

The server
- `create(name, kind="model", private=True)`; `put(name, path, content)`: a commit by someone else.
- `history(name)`: commits oldest first (`.files` is a snapshot: path -> Blob(oid, size, sha256)), `files(name, revision)`:
  path -> bytes, `repo(name)`.
- `requests`: list of Seen(kind, method, host, url, authorization, agent, bytes_in, status, range), `count(kind)`, `counts()`,
  `bytes_sent()` (large objects), `forget_requests()`, `authorizations_at_storage()`, `secrets()`.
- kinds: whoami create info refs branch preupload lfs-batch lfs-put lfs-part lfs-complete lfs-verify commit commits tree
  paths-info resolve storage-get validate-yaml
  chunks-token other; "*" is any.
- faults, all with `times=1, after=0`: `fail(kind, status, headers={"Retry-After": "7"})`, `reset(kind)`, `hang(kind)` (until
  the returned fault's `.release()`), `lose_answer(kind)` (done, but no answer), `lag(kind)` (done, answered at release),
  `truncate(kind)`, `garble(kind)` (a web page), `on(kind, call)` (run something in mid-request), `is_down = True`, `mend()`.
- limits: `commit_limit` / `request_limit` = `Window(limit, seconds, name)` or None; `now = lambda: t` sets the clock that
  they and the commits' dates go by.
- `hub.chunks = FOLDER`: it has a chunked (Xet) storage in that folder (and believes what is said to be in it); the default is none.
- `configure(tree_page=, commits_page=, multipart_from=, part_bytes=)`.

By hand: `python -m tr11ops.twin.hub --port 8123 --repository bot/logs` prints HF_ENDPOINT and
HF_TOKEN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.plugins.faulty_hub import FaultyHub
from tr11ops.hub.base import Credentials, Secret, hub_retries
from tr11ops.hub.client import Hub

TIMEOUT_SECONDS = 5.0


@pytest.fixture
def hub_server() -> Iterator[FaultyHub]:
    """A hub of this test's own."""
    with FaultyHub() as server:
        yield server


@pytest.fixture
def hub_waits() -> list[float]:
    """What was slept, in seconds."""
    return []


@pytest.fixture
def make_hub(hub_server: FaultyHub, hub_waits: list[float]) -> Callable[..., Hub]:
    """Makes edges to the test's hub that sleep in no time."""

    def make(
        token: str | None = "",
        seconds: float = 3600.0,
        timeout: float = TIMEOUT_SECONDS,
        say: Callable[[str], None] | None = None,
    ) -> Hub:
        text = hub_server.token if token == "" else token
        credentials = Credentials() if text is None else Credentials(Secret(text), "the test")
        retries = hub_retries(seconds, hub_waits.append, lambda: sum(hub_waits), lambda: 0.5, say)
        return Hub(hub_server.url, credentials, retries, timeout)

    return make


@pytest.fixture
def hub(make_hub: Callable[..., Hub]) -> Hub:
    """An edge to the test's hub, with the token that may write."""
    return make_hub()
