"""One retry loop for hub, archives, remote status and scheduler, and what all who speak HTTP agree on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace

from tr11ops.alerts.url_route import ping
from tr11ops.backup.base import ARCHIVE_RETRIES
from tr11ops.backup.remote_http import error_of_status
from tr11ops.base.errors import (
    ArchiveError,
    ArchiveUnavailable,
    HubError,
    HubUnavailable,
    NetworkError,
    SchedulerError,
    SchedulerUnreachable,
    Unavailable,
)
from tr11ops.base.http import get, may_pass
from tr11ops.base.retry import RetryPolicy, retry
from tr11ops.hub.base import hub_retries
from tr11ops.hub.remote_log import ask, remote_retries


class Scene:
    """What is slept and said, with a clock that only sleeping moves."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.said: list[str] = []
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def failing(self, *failures: Exception) -> Callable[[], str]:
        left = iter(failures)

        def action() -> str:
            failure = next(left, None)
            if failure is not None:
                raise failure
            return "done"

        return action


def policies(scene: Scene, chance: float = 0.0) -> dict[str, RetryPolicy]:
    own = {
        "sleep": scene.sleep,
        "say": scene.said.append,
        "clock": lambda: scene.now,
        "chance": lambda: chance,
    }
    found = {
        "hub": hub_retries(600.0),
        "archive": ARCHIVE_RETRIES,
        "status --remote": remote_retries(
            scene.sleep, scene.said.append, 3, longest=20.0, spread=0.2
        ),
        "logs --follow": remote_retries(
            scene.sleep, scene.said.append, None, longest=300.0, spread=0.2, most=300.0
        ),
    }
    return {name: replace(policy, **own) for name, policy in found.items()}


@pytest.mark.parametrize(
    ("name", "low", "high", "asked"),
    [
        ("hub", [0.5, 1, 2, 4, 150], [1.5, 3, 6, 12, 450], 77.0),
        ("archive", [0.5, 1, 2, 4, 150], [1, 2, 4, 8, 300], 77.0),
        ("status --remote", [5, 10, 20, 20, 20], [6, 12, 24, 24, 24], 92.4),
    ],
)
def test_the_waits_of_each(name: str, low: list[float], high: list[float], asked: float) -> None:
    """Doubling and by chance. Only those who wait longer by chance stretch what is asked for; none
    ever shortens it.
    """
    least, most = (policies(Scene(), chance)[name] for chance in (0.0, 1.0))
    for policy, waits in ((least, low), (most, high)):
        assert [policy.delay(failures) for failures in (1, 2, 3, 4, 5000)] == pytest.approx(waits)
    assert least.delay(1, 77.0) == 77.0 and most.delay(1, 77.0) == pytest.approx(asked)
    assert least.delay(1, -5.0) == least.delay(1)
    chance = random.Random(3)
    assert len({RetryPolicy(chance=chance.random).delay(4) for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("name", "asked", "slept"),
    [
        ("hub", 600.0, [600.0]), ("hub", 601.0, None),  # no longer than it goes on at all
        # it counts as an hour: the copy must be made
        ("archive", 3600.0, [3600.0]), ("archive", 86_400.0, [3600.0]),
        # someone waits before the screen
        ("status --remote", 3600.0, [3600.0]), ("status --remote", 3601.0, None),
        ("logs --follow", 86_400.0, [300.0]),  # it goes on until it is interrupted
    ],
)  # fmt: skip
def test_how_long_a_wait_that_is_asked_for_is_kept_to(
    name: str, asked: float, slept: list[float] | None
) -> None:
    scene = Scene()
    action = scene.failing(Unavailable("busy", asked))
    if slept is not None:
        assert retry(action, policies(scene)[name]) == "done" and scene.slept == slept
        return
    with pytest.raises(
        Unavailable, match=r"^busy, and asks for .* of silence: not waited for$"
    ) as caught:
        retry(action, policies(scene)[name])
    assert caught.value.wait == asked and not scene.slept and not scene.said


def test_where_each_gives_up() -> None:
    for name, waits in (
        ("hub", 11),
        ("archive", 7),
        ("status --remote", 2),
    ):  # the hub: ten minutes, the others tries
        scene = Scene()
        with pytest.raises(Unavailable, match=r"^away$"):
            retry(scene.failing(*(Unavailable("away") for _ in range(99))), policies(scene)[name])
        assert len(scene.slept) == waits and scene.now <= 600.0
    scene = Scene()
    follow = policies(scene)["logs --follow"]
    assert retry(scene.failing(*(Unavailable("away") for _ in range(99))), follow) == "done"


def test_what_is_not_unavailable_is_not_tried_again() -> None:
    scene = Scene()
    with pytest.raises(SchedulerError, match="refused"):
        retry(
            scene.failing(SchedulerError("refused")),
            RetryPolicy(sleep=scene.sleep),
            SchedulerUnreachable,
        )
    with pytest.raises(Unavailable):
        retry(scene.failing(Unavailable("x")), RetryPolicy(sleep=scene.sleep), SchedulerUnreachable)
    assert not scene.slept


def test_what_was_given_up_inside_is_given_up_outside() -> None:
    scene = Scene()
    policy = RetryPolicy(tries=3, sleep=scene.sleep)
    inner = scene.failing(*(Unavailable("away") for _ in range(9)))
    with pytest.raises(Unavailable):
        retry(lambda: retry(inner, policy), policy)
    assert len(scene.slept) == 2


def test_progress_and_a_long_try_begin_the_count_again() -> None:
    scene, done = Scene(), [0]

    def upload() -> str:
        done[0] += 1
        if done[0] == 7:
            return "done"
        raise Unavailable("cut")

    assert (
        retry(upload, RetryPolicy(tries=2, sleep=scene.sleep), progress=lambda: done[0]) == "done"
    )

    def long() -> str:
        scene.now += 301.0
        return upload()

    done[0] = 0
    policy = RetryPolicy(
        seconds=10.0, long_try_seconds=300.0, sleep=scene.sleep, clock=lambda: scene.now
    )
    assert retry(long, policy) == "done"


def test_what_is_said() -> None:
    scene = Scene()
    failures = [Unavailable("away"), Unavailable("away"), Unavailable("answers 503")]
    policy = RetryPolicy(sleep=scene.sleep, say=scene.said.append, jitter=(1.0, 1.0))
    retry(scene.failing(*failures), policy, restored="it answers again")
    assert scene.said == [
        "away: trying again in 1 s",
        "answers 503: trying again in 4 s",
        "it answers again",
    ]
    scene.said.clear()
    retry(scene.failing(*failures), replace(policy, says_all=True))
    assert len(scene.said) == 3
    scene.said.clear()
    assert retry(lambda: "done", policy, restored="it answers again") == "done" and scene.said == []


def test_who_must_end_does_not_wait() -> None:
    scene = Scene()
    with pytest.raises(SchedulerUnreachable):
        retry(
            scene.failing(SchedulerUnreachable("no answer")), RetryPolicy(sleep=scene.sleep), SchedulerUnreachable,
            must_end=lambda: True,
        )  # fmt: skip
    assert not scene.slept


@contextmanager
def serving(
    status: int, headers: dict[str, str], body: bytes = b""
) -> Iterator[tuple[str, list[str]]]:
    """A server with one answer; its address, and the authorizations that it was shown."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.send_response(status if self.path == "/" else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "status", [400, 401, 404, 408, 409, 410, 412, 425, 429, 500, 502, 503, 504, 599]
)
def test_hub_and_bucket_try_the_same_answers_again(status: int) -> None:
    with serving(status, {}) as (address, _), pytest.raises(HubError) as caught:
        ask(address, None, lambda stream, status, headers: stream.read())
    of_bucket: ArchiveError = error_of_status(status, "gs://b", "ana")
    assert (
        isinstance(caught.value, HubUnavailable)
        is isinstance(of_bucket, ArchiveUnavailable)
        is may_pass(status)
    )


def test_the_token_follows_to_the_same_place_alone() -> None:
    with serving(200, {}) as (other, seen_there):
        for target, authorizations in (
            ("/there", ["Bearer hf_x", "Bearer hf_x"]),
            (f"{other}x", ["Bearer hf_x"]),
        ):
            with (
                serving(302, {"Location": target}) as (address, seen),
                get(address, token="hf_x") as answer,
            ):
                assert answer.status == 200 and seen == authorizations
        assert seen_there == [""]


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/x"])
def test_a_redirect_leads_to_the_web_alone(target: str) -> None:
    with serving(302, {"Location": target}) as (address, seen), get(address) as answer:
        assert answer.status == 302 and len(seen) == 1


def test_an_answer_that_is_cut_is_no_answer() -> None:
    with (
        serving(200, {"Content-Length": "100"}, b"x") as (address, _),
        pytest.raises(NetworkError, match="IncompleteRead"),
        get(address) as answer,
    ):
        answer.stream.read()


def test_no_server_is_no_answer_and_names_no_address(tmp_path: Path) -> None:
    with serving(200, {}) as (address, _):
        pass
    with pytest.raises(NetworkError, match=r"^Connection refused$"), get(f"{address}?key=secret"):
        raise AssertionError("nothing answers there")
    secret = tmp_path / "url"
    secret.write_text(f"{address}?key=secret\n")
    secret.chmod(0o600)
    assert ping(secret).endswith(": Connection refused") and "secret" not in ping(secret)


@pytest.mark.parametrize(
    ("status", "words"), [(200, ""), (404, "the service answered 404"), (503, "answered 503")]
)
def test_the_call_that_says_someone_looks(tmp_path: Path, status: int, words: str) -> None:
    secret = tmp_path / "url"
    with serving(status, {}) as (address, _):
        secret.write_text(f"{address}\n")
        secret.chmod(0o600)
        assert (words in ping(secret)) if words else ping(secret) == ""
