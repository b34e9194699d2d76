"""The copy on the hub: only what is new is fetched, through every fault of a network, and the token
stays with the hub.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tr11ops.logs.hub_server import Hub, serving
from tests.tr11ops.logs.log_cases import log_of
from tr11ops.base.errors import HubPermanentError, HubUnavailable
from tr11ops.hub.remote_log import RemoteFollower, RemoteLog, remote_retries
from tr11ops.logs.line_filter import LineQuery
from tr11ops.logs.show import Query

TOKEN = "hf_secretsecret"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub()) as server:
        yield server


class Bench:
    """A follower whose waits take no time, and what it said."""

    def __init__(self, hub: Hub, query: Query | None = None, tries: int | None = 4) -> None:
        self.slept: list[float] = []
        self.said: list[str] = []
        self.log = RemoteLog(
            hub.url + hub.path, TOKEN, remote_retries(self.slept.append, self.said.append, tries)
        )
        self.follower = RemoteFollower(
            self.log, query or Query(LineQuery(), lines=2), self.said.append
        )


def test_only_new_bytes_are_fetched(hub: Hub) -> None:
    hub.content = log_of(range(1, 9000))
    bench = Bench(hub)
    assert [line.split("/")[0].split()[-1] for line in bench.follower.begin()] == ["8998", "8999"]
    assert hub.sent < 1 << 20
    before = hub.sent
    assert list(bench.follower.more()) == []
    hub.content += b"new\nunfini"
    assert list(bench.follower.more()) == ["new"]
    hub.content += b"shed\n"
    assert list(bench.follower.more()) == ["unfinished"]
    assert hub.sent - before < 1000 + len(b"new\nunfinished\n")


def test_more_than_one_piece_at_once(hub: Hub) -> None:
    hub.content = b"first\n"
    bench = Bench(hub)
    list(bench.follower.begin())
    hub.content += b"".join(b"%063d\n" % number for number in range(80_000))
    assert sum(1 for _ in bench.follower.more()) == 80_000


@pytest.mark.parametrize("anew", [b"other\nbeginning\nand\nmore\n", b"x\n", b""])
def test_a_log_that_was_written_again_is_noticed(hub: Hub, anew: bytes) -> None:
    hub.content = b"one\ntwo\nthree\n"
    bench = Bench(hub)
    assert list(bench.follower.begin()) == ["two", "three"]
    hub.content = anew
    assert list(bench.follower.more()) == anew.decode().split()[-2:]
    assert bench.said == ["the remote log was written again: its end again"]
    hub.content += b"goes on\n"
    assert list(bench.follower.more()) == ["goes on"]


def test_an_empty_log_may_grow(hub: Hub) -> None:
    bench = Bench(hub)
    assert list(bench.follower.begin()) == []
    hub.content = b"one\n"
    assert list(bench.follower.more()) == ["one"]


def test_failures_are_waited_out_with_growing_patience(hub: Hub) -> None:
    hub.content = b"one\ntwo\nthree\n"
    hub.failures = [(503, ""), (503, ""), (429, "77")]
    bench = Bench(hub)
    assert list(bench.follower.begin()) == ["two", "three"]
    assert bench.slept == [5.0, 10.0, 77.0]
    assert bench.said[0] == "127.0.0.1 answers 503: trying again in 5 s" and "429" in bench.said[1]
    assert bench.said[2] == "127.0.0.1 answers again" and len(bench.said) == 3


def test_without_following_it_is_given_up(hub: Hub) -> None:
    hub.failures = [(500, "")] * 9
    with pytest.raises(HubUnavailable, match="answers 500"):
        list(Bench(hub).follower.begin())
    assert len(hub.failures) == 5


def test_a_cut_answer_and_a_dead_server_are_failures(hub: Hub) -> None:
    hub.content = b"one\n" * 2000
    bench = Bench(hub)
    list(bench.follower.begin())
    hub.content += b"two\n" * 50
    hub.cut_next = True
    assert list(bench.follower.more()) == ["two"] * 50
    gone = Bench(Hub(url="http://127.0.0.1:9"))
    with pytest.raises(HubUnavailable, match="gives no answer"):
        list(gone.follower.begin())


@pytest.mark.parametrize(
    ("status", "words"), [(401, "hf auth login"), (403, "private"), (404, "no such file")]
)
def test_what_the_hub_refuses_is_not_tried_again(hub: Hub, status: int, words: str) -> None:
    hub.failures = [(status, "")] * 3
    with pytest.raises(HubPermanentError, match=words) as caught:
        list(Bench(hub).follower.begin())
    assert len(hub.failures) == 2 and TOKEN not in str(caught.value)


def test_the_token_is_shown_to_the_hub_and_not_to_redirects(hub: Hub) -> None:
    with serving(Hub(b"one\ntwo\n")) as store:
        hub.redirect = f"{store.url}{store.path}?signature=secret"
        bench = Bench(hub)
        assert list(bench.follower.begin()) == ["one", "two"]
        store.failures = [(500, "")]
        store.content += b"three\n"
        assert list(bench.follower.more()) == ["three"]
        assert {token for _, token in hub.asked} == {f"Bearer {TOKEN}"}
        assert {token for _, token in store.asked} == {""} and store.asked[0][0].startswith(
            "bytes="
        )
        assert "secret" not in " ".join(bench.said)


def test_a_server_without_ranges_gives_the_same_lines(hub: Hub) -> None:
    hub.content, hub.knows_ranges = b"one\ntwo\nthree\n", False
    bench = Bench(hub)
    assert list(bench.follower.begin()) == ["two", "three"]
    hub.content += b"four\n"
    assert list(bench.follower.more()) == ["four"]


def test_iterations_are_searched_by_ranges(hub: Hub) -> None:
    hub.content = log_of(range(1, 30_000))
    bench = Bench(hub, Query(LineQuery(iterations=(100, 102))))
    assert len(list(bench.follower.begin())) == 3
    assert hub.sent < len(hub.content) / 3
