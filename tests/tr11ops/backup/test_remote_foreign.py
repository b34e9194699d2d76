"""A bucket whose answers are not those of an object store: nothing is known by them, and nothing is
done for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.foreign_answers import FOREIGN_BODIES
from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.bucket_cases import LARGE, QUANTUM, begin, get, send, some_bytes
from tests.tr11ops.backup.fault_proxy import Fault
from tests.tr11ops.backup.round_cases import Rounds
from tr11ops.backup.base import Archive, as_pieces
from tr11ops.base.errors import ArchivePermanentError, ArchiveUnavailable

KIND = {"kind": "storage#objects"}


def page(*items: Any, **rest: Any) -> str:
    return json.dumps({**KIND, "items": list(items), **rest})


def item(**fields: Any) -> dict[str, Any]:
    return {"name": "tr11-test/a", "size": "1", **fields}


FOREIGN_PAGES = [
    *FOREIGN_BODIES,
    page({"size": "1"}),
    page(item(name=7)),
    page(item(name=None)),
    page(item(name="elsewhere/a")),  # not below what was asked for
    page({"name": "tr11-test/a"}),
    page(item(size="many")),
    page(item(size="-1")),
    page(item(size="9" * 5_000)),
    page(item(size=None)),
    page("tr11-test/a"),
    page(item(), item()),
    json.dumps({**KIND, "items": {"name": "tr11-test/a", "size": "1"}}),
    json.dumps({**KIND, "items": "tr11-test/a"}),
    json.dumps({**KIND, "items": None}),
    page(item(), nextPageToken=7),
    page(item(), nextPageToken=["a"]),
    json.dumps({"items": [item()]}),  # without its kind
]


def is_one_line(error: Exception) -> bool:
    return "\n" not in str(error) and len(str(error)) < 300


@pytest.mark.parametrize("body", FOREIGN_PAGES)
def test_a_listing_that_is_none_says_nothing(object_store: ObjectStore, body: str) -> None:
    archive = object_store.open()
    archive.put("a", b"1")
    object_store.faults.plant(
        Fault("answer", "GET", "maxResults=1000", status=200, body=body.encode())
    )
    with pytest.raises(
        ArchiveUnavailable, match="does not speak as an object store does"
    ) as caught:
        list(archive.list(""))
    assert is_one_line(caught.value)
    assert [file.path for file in archive.list("")] == ["a"]


@pytest.mark.parametrize(
    "names", [("a", "b", "c"), (), ("a",)], ids=["other names", "empty pages", "the same page"]
)
@pytest.mark.parametrize("tokens", [("t", "t"), ("t", "u", "t")], ids=["at once", "in a round"])
def test_a_listing_whose_pages_come_back_ends(
    object_store: ObjectStore, names: tuple[str, ...], tokens: tuple[str, ...]
) -> None:
    archive = object_store.open()
    for number, token in enumerate(tokens):
        items = [item(name=f"tr11-test/{names[number % len(names)]}")] if names else []
        body = page(*items, nextPageToken=token)
        object_store.faults.plant(
            Fault("answer", "GET", "maxResults=1000", status=200, body=body.encode())
        )
    with pytest.raises(ArchiveUnavailable, match="does not speak as an object store does"):
        list(archive.list(""))


def test_an_empty_page_before_others_is_a_page(object_store: ObjectStore, archive: Archive) -> None:
    archive.put("a", b"1")
    body = page(nextPageToken="t")
    object_store.faults.plant(
        Fault("answer", "GET", "maxResults=1000", status=200, body=body.encode())
    )
    archive = object_store.open()
    assert [file.path for file in archive.list("")] == ["a"], "the server takes any token"


@pytest.fixture
def archive(object_store: ObjectStore) -> Archive:
    return object_store.open()


OBJECT = {"kind": "storage#object", "name": "tr11-test/x", "size": "5"}
FOREIGN_OBJECTS = [
    *FOREIGN_BODIES,
    json.dumps({"kind": "storage#object", "name": "tr11-test/x"}),
    json.dumps({**OBJECT, "size": "some"}),
    json.dumps({**OBJECT, "size": -5}),
    json.dumps({**OBJECT, "size": 5.5}),
    json.dumps({**OBJECT, "size": True}),
    json.dumps({**OBJECT, "name": "tr11-test/y"}),  # of another
]


def look(archive: Archive) -> None:
    archive.look("x")


def put(archive: Archive) -> None:
    archive.put("x", b"12345")


def whole(archive: Archive) -> None:
    content = some_bytes(LARGE)
    archive.upload("large", LARGE, "i", as_pieces(content))


@pytest.mark.parametrize("body", FOREIGN_OBJECTS)
@pytest.mark.parametrize(
    ("ask", "method", "skip"), [(look, "GET", 0), (put, "POST", 0), (whole, "PUT", 8)]
)
def test_an_object_that_is_none_is_neither_there_nor_gone(
    object_store: ObjectStore,
    archive: Archive,
    ask: Callable[[Archive], None],
    method: str,
    skip: int,
    body: str,
) -> None:
    archive.put("x", b"12345")
    object_store.faults.plant(Fault("foreign", method, skip=skip, body=body.encode()))
    with pytest.raises(
        ArchiveUnavailable, match="does not speak as an object store does"
    ) as caught:
        ask(archive)
    assert is_one_line(caught.value)
    assert object_store.objects()["tr11-test/x"] == 5, (
        "nothing was removed for an answer without a meaning"
    )
    assert not [seen for seen in object_store.faults.seen if seen[0] == "DELETE"]
    ask(archive)


@pytest.mark.parametrize(
    "body",
    [
        *FOREIGN_BODIES,
        '{"done": "yes"}',
        '{"done": false}',
        '{"done": false, "rewriteToken": 7}',
        '{"done": 1}',
    ],
)
def test_what_is_not_known_to_be_copied_is_not_removed(
    object_store: ObjectStore, archive: Archive, body: str
) -> None:
    archive.put("old/x", b"12345")
    object_store.faults.plant(Fault("answer", "POST", "rewriteTo", status=200, body=body.encode()))
    with pytest.raises(ArchiveUnavailable, match="does not speak as an object store does"):
        archive.move("old", "new")
    assert object_store.objects() == {"tr11-test/old/x": 5}
    archive.move("old", "new")
    assert object_store.objects() == {"tr11-test/new/x": 5}


def test_what_was_said_to_be_copied_and_is_not_there_is_not_removed(
    object_store: ObjectStore, archive: Archive
) -> None:
    archive.put("old/x", b"12345")
    done = json.dumps({"kind": "storage#rewriteResponse", "done": True}).encode()
    object_store.faults.plant(Fault("answer", "POST", "rewriteTo", status=200, body=done))
    with pytest.raises(ArchiveUnavailable, match="old/x was copied to new/x, and is not there"):
        archive.move("old", "new")
    assert object_store.objects() == {"tr11-test/old/x": 5}


def test_a_rewriting_that_gets_no_further_ends(object_store: ObjectStore, archive: Archive) -> None:
    archive.put("old/x", b"12345")
    going = {
        "kind": "storage#rewriteResponse",
        "done": False,
        "rewriteToken": "t",
        "totalBytesRewritten": "3",
    }
    fault = Fault(
        "answer", "POST", "rewriteTo", status=200, body=json.dumps(going).encode(), times=2
    )
    object_store.faults.plant(fault)
    with pytest.raises(ArchiveUnavailable, match="does not speak as an object store does"):
        archive.move("old", "new")
    assert object_store.objects() == {"tr11-test/old/x": 5}


@pytest.mark.parametrize("held", [LARGE, LARGE + 1, 10 * LARGE])
def test_more_than_the_file_is_not_the_whole_file(
    object_store: ObjectStore, archive: Archive, held: int
) -> None:
    content = some_bytes(LARGE)
    begin(archive, "x", LARGE, content[: 5 * QUANTUM])
    fault = Fault("answer", "PUT", status=308, headers={"Range": f"bytes=0-{held - 1}"}, body=b"")
    object_store.faults.plant(fault)
    assert send(object_store.open(), "x", content) == 0, "that session is of no use"
    assert object_store.content("tr11-test/x") == content


@pytest.mark.parametrize(
    "told",
    [
        "bytes 0-99/5000",
        "bytes 101-200/5000",
        "bytes 100-150/5000",
        "bytes */5000",
        "100",
        "bytes 100-x/5000",
    ],
)
def test_another_part_than_was_asked_for_is_no_part(
    object_store: ObjectStore, archive: Archive, told: str
) -> None:
    archive.put("x", some_bytes(5000))
    object_store.faults.plant(Fault("foreign", "GET", "alt=media", headers={"Content-Range": told}))
    with pytest.raises(ArchiveUnavailable, match="does not speak as an object store does"):
        get(archive, "x", 100, 101)
    assert get(archive, "x", 100, 101) == some_bytes(5000)[100:201]
    assert get(archive, "x", 4990, 100) == some_bytes(5000)[4990:], "to the end of the file"


def test_a_server_that_gives_the_whole_gives_no_more_than_was_asked(
    object_store: ObjectStore, archive: Archive
) -> None:
    archive.put("x", b"0123456789")
    for offset, length in ((0, 4), (3, 4), (3, None), (0, None), (8, 5)):
        object_store.faults.plant(
            Fault("answer", "GET", "alt=media", status=200, body=b"0123456789")
        )
        if offset:
            with pytest.raises(
                ArchivePermanentError, match="cannot read from a place inside a file"
            ):
                get(archive, "x", offset, length)
        else:
            assert (
                get(archive, "x", offset, length)
                == b"0123456789"[: None if length is None else length]
            )


# ----------------------------------------------------------------------------- a whole round
@pytest.fixture
def rounds(object_store: ObjectStore, tmp_path: Path) -> Rounds:
    options = [f"backup.options.{name}={value}" for name, value in object_store.options.items()]
    return Rounds(tmp_path, f"backup.url={object_store.url}", *options)


@pytest.mark.parametrize(
    "body",
    [
        page({"size": "1"}),
        json.dumps({**KIND, "items": {"a": 1}}),
        page(item(name="tr11-test/a"), item()),
        "{}",
    ],
)
def test_a_round_goes_on_with_its_other_copies(
    rounds: Rounds, object_store: ObjectStore, body: str
) -> None:
    rounds.save(100)
    assert rounds.run().exit_code == 0
    before, records = object_store.objects(), rounds.copied("url")
    assert records == [(100, "weights")]
    rounds.save(200, 300)
    fault = Fault("answer", "GET", "maxResults=1000", status=200, body=body.encode(), times=100)
    object_store.faults.plant(fault)
    rounds.now += 60
    done = rounds.run("url", "store")
    assert done.exit_code == 3
    assert rounds.copied("store") == [(100, "full"), (200, "full"), (300, "full")]
    assert rounds.copied("url") == records, "what is unknown is neither damaged nor gone"
    assert object_store.objects() == before
    assert (
        rounds.status()["message"].count("\n") == 0
        and "does not speak as an object store does" in rounds.status()["message"]
    )
    object_store.faults.clear()
    rounds.now += 60
    assert rounds.run().exit_code == 0
    assert rounds.copied("url") == [(100, "weights"), (200, "weights"), (300, "full")]
