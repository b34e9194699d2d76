"""The edge to the hub against a hub that fails in every way: what comes back, how long it waits,
what it never says.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins.faulty_hub import FaultyHub, Window
from tests.plugins.foreign_answers import FOREIGN_BODIES
from tests.tr11ops.hub.repositories import LARGE, LOGS
from tr11ops.base.errors import HubMissing, HubPermanentError, HubUnavailable
from tr11ops.hub.base import (
    Add,
    Credentials,
    Delete,
    HubCopy,
    HubFile,
    Repository,
    Secret,
    hub_retries,
)
from tr11ops.hub.client import Hub


# ----------------------------------------------------------------------------- what it does
def test_a_repository_is_made_once_and_a_branch_too(hub: Hub, hub_server: FaultyHub) -> None:
    first = hub.ensure_repository(LOGS, private=True)
    assert hub.ensure_repository(LOGS, private=False) == first == hub.head(LOGS)
    assert (
        hub_server.count("create") == 1
        and hub_server.repo(LOGS.name).private
        and hub.is_private(LOGS)
    )
    step = Repository(LOGS.name, branch="global_step7")
    assert hub.ensure_repository(step) == first  # the branch begins where main is
    assert hub.ensure_repository(step) == first and hub_server.count("branch") == 1
    data = Repository("science/data", "dataset")
    assert hub.ensure_repository(data, private=False) == hub.head(data)
    assert not hub_server.repo("science/data", "dataset").private


def test_a_commit_holds_everything_and_is_read_back(
    hub: Hub, hub_server: FaultyHub, logs: Repository, tmp_path: Path
) -> None:
    growing = tmp_path / "main_log.txt"
    growing.write_bytes(b"line\n" * 1000 + b"half a li")
    sent: dict[str, int] = {}
    made = hub.commit(
        logs,
        [
            Add("logs/a b#?.txt", growing, size=5000),
            Add("w.bin", LARGE),
            Add("empty.txt", b""),
            Add("big.bin", growing, 4096),
        ],
        "new data",
        progress=lambda path, count: sent.update({path: count}),
    )
    files = hub_server.files(logs.name)
    assert (
        files["logs/a b#?.txt"] == b"line\n" * 1000
        and files["w.bin"] == LARGE
        and files["empty.txt"] == b""
    )
    assert sent["big.bin"] == 4096 and files["big.bin"] == growing.read_bytes()[:4096]
    assert made == hub.head(logs) == hub_server.history(logs.name)[-1].id
    assert hub_server.history(logs.name)[-1].title == "new data"

    tree = hub.list_tree(logs)
    assert tree["w.bin"] == HubFile(
        len(LARGE), tree["w.bin"].oid, hashlib.sha256(LARGE).hexdigest()
    )
    assert set(tree) == set(files) and tree["logs/a b#?.txt"].sha256 is None
    assert hub.look(logs, ["w.bin", "logs", "nothing"]) == {"w.bin": tree["w.bin"]}
    for path in ("w.bin", "logs/a b#?.txt"):
        assert hub.read(logs, path) == files[path]
        assert (
            hub.read(logs, path, 7, 11) == files[path][7:18]
            and hub.read(logs, path, 4000) == files[path][4000:]
        )
        assert hub.read(logs, path, 10**6, 5) == b"" and hub.read(logs, path, 3, 0) == b""
    assert hub.read(logs, "w.bin", revision=made) == LARGE
    with pytest.raises(HubMissing, match=r"no\.txt of science/logs: .* answers 404"):
        hub.read(logs, "no.txt")

    hub.commit(logs, [Delete("empty.txt"), HubCopy("copy.bin", "w.bin")], "tidy")
    files = hub_server.files(logs.name)
    assert "empty.txt" not in files and files["copy.bin"] == LARGE
    assert (
        hub.commit(logs, [Add("w.bin", LARGE)], "nothing new")
        == hub_server.history(logs.name)[-1].id
    )
    assert [commit.title for commit in hub_server.history(logs.name)[1:]] == ["new data", "tidy"]


def test_pages_are_followed(hub: Hub, hub_server: FaultyHub, logs: Repository) -> None:
    hub_server.configure(tree_page=7)
    hub.commit(logs, [Add(f"logs/{number}.txt", b"%d" % number) for number in range(30)], "many")
    assert len(hub.list_tree(logs)) == 31 and hub_server.count("tree") >= 5


@pytest.mark.parametrize("part_bytes", [1000, 1024, 4096])
def test_a_large_file_goes_in_parts(
    hub: Hub, hub_server: FaultyHub, logs: Repository, tmp_path: Path, part_bytes: int
) -> None:
    content = os.urandom(4096)
    (tmp_path / "x").write_bytes(content + b"grown")
    hub_server.configure(multipart_from=2000, part_bytes=part_bytes)
    hub_server.fail("lfs-part", after=1)
    hub.commit(logs, [Add("x.bin", tmp_path / "x", 4096)], "large")
    assert hub_server.files(logs.name)["x.bin"] == content
    assert hub_server.authorizations_at_storage() == []


# ---------------------------------------------------------------------------- what fails and passes
FAULTS = ("info", "preupload", "lfs-batch", "lfs-put", "lfs-verify", "commit")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        *((kind, 503) for kind in FAULTS),
        *(("preupload", status) for status in (408, 425, 429, 500, 502, 504)),
    ],
)
def test_what_may_pass_is_tried_again(
    hub: Hub,
    hub_server: FaultyHub,
    hub_waits: list[float],
    logs: Repository,
    kind: str,
    status: int,
) -> None:
    hub_server.fail(kind, status, times=2, headers={"Retry-After": "40"})
    hub.commit(logs, [Add("w.bin", LARGE)], "one")
    # what was asked for, and no one below slept on its own; an object whose check failed is there
    # at the second try
    assert hub_waits == [40.0] * (1 if kind == "lfs-verify" else 2)
    assert [commit.title for commit in hub_server.history(logs.name)] == ["initial commit", "one"]
    # what arrived is not sent again
    assert hub_server.bytes_sent() == len(LARGE) * (3 if kind == "lfs-put" else 1)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_broken_connection_is_made_again(
    hub: Hub, hub_server: FaultyHub, logs: Repository, kind: str
) -> None:
    hub_server.break_off("reset", kind, times=2)
    hub.commit(logs, [Add("w.bin", LARGE), Add("b.txt", b"text")], "one")
    assert len(hub_server.history(logs.name)) == 2 and hub_server.files(logs.name)["w.bin"] == LARGE


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_answer_makes_no_second_commit(
    hub: Hub, hub_server: FaultyHub, logs: Repository, times: int
) -> None:
    hub_server.break_off("lose", "commit", times=times)
    made = hub.commit(logs, [Add("b.txt", b"text")], "one")
    assert [commit.title for commit in hub_server.history(logs.name)] == ["initial commit", "one"]
    assert made == hub_server.history(logs.name)[-1].id and hub_server.count("commit") == 1


def test_a_commit_that_comes_late_is_not_made_twice(
    hub_server: FaultyHub, make_hub: Callable[..., Hub]
) -> None:
    hub_server.create(LOGS.name)
    slow = make_hub(timeout=0.3)
    fault = hub_server.break_off("lag", "commit")
    made = slow.commit(LOGS, [Add("b.txt", b"text")], "one")
    fault.release()
    assert made == hub_server.history(LOGS.name)[-1].id and len(hub_server.history(LOGS.name)) == 2


@pytest.mark.parametrize("kind", ["tree", "resolve", "storage-get", "info", "commits"])
@pytest.mark.parametrize("how", ["truncate", "garble", "reset"])
def test_a_cut_or_foreign_answer_is_asked_for_again(
    hub: Hub, hub_server: FaultyHub, logs: Repository, kind: str, how: str
) -> None:
    hub.commit(logs, [Add("w.bin", LARGE), Add("b.txt", b"text" * 50)], "one")
    _ = hub_server.garble(kind) if how == "garble" else hub_server.break_off(how, kind)
    if kind == "commits":
        hub_server.break_off("lose", "commit")
        hub.commit(logs, [Add("c.txt", b"c")], "two")
        assert len(hub_server.history(logs.name)) == 3
    assert len(hub.list_tree(logs)) >= 3 and hub.head(logs) == hub_server.history(logs.name)[-1].id
    if how != "garble" or kind not in {
        "resolve",
        "storage-get",
    }:  # a page with status 200 instead of a file is a file
        assert hub.read(logs, "w.bin") == LARGE and hub.read(logs, "b.txt", 4, 8) == b"text" * 2


@pytest.mark.parametrize("kind", ["info", "preupload", "lfs-batch", "commit", "tree", "commits"])
@pytest.mark.parametrize("body", FOREIGN_BODIES)
def test_an_answer_that_is_not_a_hubs_may_be_another_later(
    hub: Hub, hub_server: FaultyHub, logs: Repository, kind: str, body: str
) -> None:
    if kind == "commits":
        hub_server.break_off("lose", "commit")
    hub_server.garble(kind, body=body)
    try:
        hub.commit(logs, [Add("w.bin", LARGE)], "one")
        hub.list_tree(logs)
    except HubPermanentError:  # where the library says that it is malformed
        hub.commit(logs, [Add("w.bin", LARGE)], "one")
    assert len(hub_server.history(logs.name)) == 2 and hub.read(logs, "w.bin") == LARGE


@pytest.mark.parametrize("pages", ["00", "010", "0121"])
def test_a_listing_whose_pages_come_back_ends(
    hub_server: FaultyHub, make_hub: Callable[..., Hub], pages: str
) -> None:
    hub_server.create(LOGS.name)
    hub = make_hub(seconds=0.0)
    for page in pages:
        address = f"{hub_server.url}/api/models/{LOGS.name}/tree/main?recursive=true&cursor={page}"
        hub_server.garble("tree", body="[]", headers={"Link": f'<{address}>; rel="next"'})
    with pytest.raises(HubUnavailable, match="does not speak as a hub does"):
        hub.list_tree(LOGS)
    hub_server.heal()
    assert len(hub.list_tree(LOGS)) == 1


def test_patience_begins_again_where_a_long_upload_got_on(
    hub_server: FaultyHub, hub_waits: list[float]
) -> None:
    """Four failures, each after ten minutes of sending, with a patience of one minute."""
    hub_server.create(LOGS.name)
    now = [0.0]

    def sleep(seconds: float) -> None:
        hub_waits.append(seconds)
        now[0] += seconds

    def hours() -> None:
        now[0] += 600.0

    hub = Hub(
        hub_server.url,
        Credentials(Secret(hub_server.token)),
        hub_retries(60.0, sleep, lambda: now[0], lambda: 0.5),
    )
    hub_server.on("info", hours)  # a first try asks for this, later ones for the next
    hub_server.on("commits", hours, times=3)
    hub_server.fail("commit", times=4)
    hub.commit(LOGS, [Add("b.txt", b"b")], "one")
    assert hub_waits == [1.0] * 4


def test_silence_ends(
    hub_server: FaultyHub, make_hub: Callable[..., Hub], hub_waits: list[float]
) -> None:
    hub_server.create(LOGS.name)
    said: list[str] = []
    hub = make_hub(timeout=1.0, say=said.append)  # what answers does so sooner, on any machine
    hub_server.break_off("hang", "info")
    hub_server.break_off("hang", "tree")
    assert hub.head(LOGS) and hub.list_tree(LOGS)
    assert hub_waits == [1.0, 1.0]
    assert (
        said[0]
        == "science/logs: 127.0.0.1 gives no answer (silent for too long): trying again in 1 s"
    )


def test_an_answer_larger_than_any_is_not_read_to_its_end(
    hub_server: FaultyHub, make_hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.create(LOGS.name)
    monkeypatch.setattr("tr11ops.base.http.LARGEST_ANSWER_BYTES", 1 << 20)
    hub_server.garble("info", body="[" * (3 << 20))
    with pytest.raises(HubPermanentError, match="answers with more than 1 MiB"):
        make_hub().head(LOGS)


def test_patience_ends(
    hub_server: FaultyHub, make_hub: Callable[..., Hub], hub_waits: list[float]
) -> None:
    hub_server.create(LOGS.name)
    hub = make_hub(seconds=100.0)
    hub_server.is_down = True
    with pytest.raises(
        HubUnavailable, match=r"^science/logs: 127\.0\.0\.1 gives no answer \(.*\)$"
    ):
        hub.head(LOGS)
    assert hub_waits == [1, 2, 4, 8, 16, 32]  # the next would be past the end
    hub_server.heal()
    hub_server.fail("info", 429, headers={"RateLimit": '"api";r=0;t=2000', "Retry-After": "12"})
    with pytest.raises(
        HubUnavailable,
        match=r"answers 429: it was asked too often for now, and asks for 33 min .*: not waited for",
    ) as away:
        hub.head(LOGS)
    assert away.value.wait == 2000.0 and len(hub_waits) == 6  # a wait past the end is not begun
    assert hub.head(LOGS)


def test_the_commit_limit_is_waited_for(
    hub_server: FaultyHub, make_hub: Callable[..., Hub], hub_waits: list[float]
) -> None:
    hub_server.create(LOGS.name)
    hub_server.commit_limit = Window(2, 3600, "commits")
    hub_server.now = lambda: 1000.0 + sum(hub_waits)
    hub = make_hub(seconds=7200.0)
    for number in range(3):
        hub.commit(LOGS, [Add("b.txt", b"%d" % number)], f"number {number}")
    assert len(hub_server.history(LOGS.name)) == 4 and hub_waits == [3601.0]
