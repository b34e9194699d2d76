"""`tr11 logs --remote` and `tr11 status --remote` against a whole hub: large files elsewhere,
refusals, faults, renewal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.faulty_hub import FaultyHub
from tests.tr11ops.logs.hub_server import Hub as SmallHub, serving
from tests.tr11ops.logs.log_cases import log_of
from tests.tr11ops.status.publishing import published
from tests.tr11ops.status_cases import NOW, snapshot
from tr11ops.base.errors import HubPermanentError, HubUnavailable
from tr11ops.cli.main import execute
from tr11ops.hub.base import Add, Repository
from tr11ops.hub.client import Hub
from tr11ops.hub.remote_log import RemoteFollower, RemoteLog, ask, remote_retries
from tr11ops.logs.line_filter import LineQuery
from tr11ops.logs.show import Query

NAME = "bot/tr11-logs"
LOG = "logs/main/main_log.txt"
ATTRIBUTES = b"*.txt filter=lfs diff=lfs merge=lfs -text\n"

Answer = tuple[int, str, str]
Type = Callable[..., Answer]


@pytest.fixture
def repository(hub_server: FaultyHub, hub: Hub) -> Iterator[FaultyHub]:
    """A hub with a private repository as the sync leaves it: the log among the large files."""
    hub_server.now = lambda: NOW
    hub_server.create(NAME)
    hub_server.put(NAME, ".gitattributes", ATTRIBUTES)
    hub_server.put(NAME, "status.json", json.dumps(published(snapshot())).encode())
    send(hub, log_of(range(31000, 31220)))
    assert hub_server.repo(NAME).resolve("main").files[LOG].sha256 is not None
    hub_server.forget_requests()
    yield hub_server


def send(hub: Hub, content: bytes, path: str = LOG) -> None:
    repository = Repository(NAME)
    hub.commit(repository, [Add(path, content)], "log", parent=hub.head(repository))


@pytest.fixture
def tr11(
    repository: FaultyHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Type:
    """Types on a laptop whose folder is empty, with the reader's token unless another is given ("":
    none).
    """
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "login"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("tr11ops.cli.status.time.time", lambda: NOW + 60)

    def typed(*words: str, token: str | None = None) -> Answer:
        monkeypatch.setenv("HF_TOKEN", repository.token if token is None else token)
        code = execute([*words, "--endpoint", repository.url])
        out, err = capsys.readouterr()
        assert not [secret for secret in repository.secrets() if secret in out + err]
        assert "Traceback" not in err and not repository.authorizations_at_storage()
        return code, out, err

    return typed


# ----------------------------------------------------------------------------- as it should be
def test_the_log_lies_in_the_hubs_storage(tr11: Type, repository: FaultyHub) -> None:
    code, out, _ = tr11("logs", "--remote", NAME, "-n", "2")
    assert code == 0 and [line.split("/")[0].split()[-1] for line in out.splitlines()] == [
        "31218",
        "31219",
    ]
    assert {seen.kind for seen in repository.requests} == {"resolve", "storage-get"}
    assert all(seen.range for seen in repository.requests)


def test_the_status_of_a_private_repository(tr11: Type, repository: FaultyHub) -> None:
    code, out, _ = tr11("status", "--remote", NAME, "--json")
    told = json.loads(out)
    assert code == 0 and told["verdict"] == "healthy" and told["log"]["iteration"] == 31219
    assert told["commit"] == repository.history(NAME)[-1].id and told["age_seconds"] == 60
    code, out, _ = tr11("status", "--remote", NAME)
    assert code == 0 and "HEALTHY  tr11-176B-ml / main" in out


def test_what_else_is_there(tr11: Type, repository: FaultyHub) -> None:
    repository.put(NAME, "logs/main/node-checks.txt", b"all well\n")
    repository.put(NAME, "logs/small/main_log.txt", b"small\n")
    assert tr11("logs", "--remote", f"{NAME}/logs/main/node-checks.txt")[1] == "all well\n"
    assert tr11("logs", "--remote", NAME, "--variant", "small")[1] == "small\n"
    code, _, err = tr11("logs", "--remote", NAME, "--variant", "large")
    assert (
        code == 1
        and "there is no logs/large/main_log.txt in it; it has logs/main/main_log.txt, logs/main"
        in err
    )
    assert tr11("logs", "--remote", f"{NAME}/x.txt", "--variant", "small")[0] == 2
    assert (
        "there are logs of: main, small"
        in tr11("status", "--remote", NAME, "--variant", "large")[2]
    )


# ----------------------------------------------------------------------------- refused
@pytest.mark.parametrize("command", ["logs", "status"])
@pytest.mark.parametrize(
    ("token", "words"),
    [("", "hf auth login, or set HF_TOKEN"), ("hf_OfNobody0000000000000000", "token has ended")],
)
def test_who_may_not_see_it_hears_one_line(
    tr11: Type, command: str, token: str, words: str
) -> None:
    code, out, err = tr11(command, "--remote", NAME, token=token)
    assert (
        code == 1
        and words in err
        and out == ""
        and len(err.splitlines()) == 1
        and "OfNobody" not in err
    )


def test_a_repository_that_is_not_there(tr11: Type) -> None:
    for command in ("logs", "status"):
        code, _, err = tr11(command, "--remote", "bot/none")
        assert (
            code == 1 and "404: there is no such repository" in err and len(err.splitlines()) == 1
        )


# ----------------------------------------------------------------------------- faults
def faults() -> list[Any]:
    return [
        pytest.param(
            lambda server: server.fail("resolve", 429, headers={"Retry-After": "3"}), id="429"
        ),
        pytest.param(lambda server: server.fail("resolve", 503), id="503"),
        pytest.param(lambda server: server.break_off("reset", "resolve"), id="reset"),
        pytest.param(
            lambda server: server.break_off("truncate", "storage-get", after=1), id="truncated"
        ),
        pytest.param(lambda server: server.garble("resolve"), id="web page"),
        pytest.param(lambda server: server.fail("storage-get", 403), id="old signature"),
        pytest.param(lambda server: server.break_off("reset", "storage-get"), id="storage reset"),
    ]


@pytest.mark.parametrize("fault", faults())
@pytest.mark.parametrize("command", ["logs", "status"])
def test_a_fault_that_passes_is_waited_out(
    tr11: Type, repository: FaultyHub, command: str, fault: Callable[[FaultyHub], object]
) -> None:
    fault(repository)
    code, out, err = tr11(command, "--remote", NAME)
    assert code == 0 and ("31,219" if command == "status" else "31219") in out
    assert "trying again" in err and "answers again" in err


@pytest.mark.parametrize("command", ["logs", "status"])
def test_a_hub_that_stays_away(tr11: Type, repository: FaultyHub, command: str) -> None:
    repository.is_down = True
    code, out, err = tr11(command, "--remote", NAME)
    assert code == 3 and out == "" and "nothing may be concluded" in err.splitlines()[-1]


def test_a_hub_that_is_silent_is_given_up(repository: FaultyHub) -> None:
    silent = repository.break_off("hang", "info", times=9)
    with pytest.raises(HubUnavailable, match="no answer"):
        ask(f"{repository.url}/api/models/{NAME}", repository.token, lambda *_: None, timeout=0.2)
    silent.release()


def test_a_limit_of_requests_is_honoured(
    tr11: Type, repository: FaultyHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    repository.fail("info", 429, headers={"RateLimit": '"api";r=0;t=55'})
    assert tr11("status", "--remote", NAME)[0] == 0
    assert len(slept) == 1 and 55 <= slept[0] <= 66


# ----------------------------------------------------------------------------- following
def test_following_gets_new_bytes_and_sees_a_rewritten_log(repository: FaultyHub, hub: Hub) -> None:
    said: list[str] = []
    log = RemoteLog(
        f"{repository.url}/{NAME}/resolve/main/{LOG}",
        repository.token,
        remote_retries(lambda _: None, said.append),
    )
    follower = RemoteFollower(log, Query(LineQuery(), lines=1), said.append)
    assert len(list(follower.begin())) == 1
    send(hub, log_of(range(31000, 31223)))
    repository.forget_requests()
    assert len(list(follower.more())) == 3
    sizes = [
        int(seen.range.split("-")[1]) - int(seen.range[6:].split("-")[0])
        for seen in repository.requests
        if seen.range
    ]
    # one question, redirected; a few known bytes before
    assert len(repository.requests) == 2 and max(sizes) >= 256
    send(hub, b"shorter now\n")
    assert list(follower.more()) == ["shorter now"] and said == [
        "the remote log was written again: its end again"
    ]


def test_a_redirect_at_the_hub_itself_keeps_the_token() -> None:
    """A hub that serves small files from a second address of its own; a third party gets no token."""
    with (
        serving(SmallHub(b"x", path="/there")) as other,
        serving(SmallHub(b"x", path="/there")) as first,
    ):
        first.redirects = {"/here": f"{first.url}/there", "/away": f"{other.url}/there"}
        for path in ("/here", "/away"):
            assert (
                ask(
                    first.url + path,
                    "hf_x",
                    lambda stream, status, headers: status,
                    {"Range": "bytes=0-0"},
                )
                == 206
            )
        assert [token for _, token in first.asked] == ["Bearer hf_x"] * 3
        assert [token for _, token in other.asked] == [""]


def test_a_redirect_to_a_file_is_not_followed(tmp_path: Path) -> None:
    with serving(SmallHub(b"x", path="/there")) as first:
        (tmp_path / "secret").write_text("x")
        for place in (f"file://{tmp_path}/secret", "ftp://127.0.0.1/x"):
            first.redirects = {"/here": place}
            with pytest.raises(HubPermanentError):
                ask(f"{first.url}/here", "hf_x", lambda stream, status, headers: stream.read())
