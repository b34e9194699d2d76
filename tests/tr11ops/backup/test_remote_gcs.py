"""The bucket edge against the real object-store server: what is sent arrives, whatever happens on
the way.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.bucket_cases import LARGE, QUANTUM, begin, get, send, some_bytes
from tests.tr11ops.backup.fault_proxy import Fault
from tr11ops.backup.base import Archive, as_pieces
from tr11ops.backup.folder import Owner
from tr11ops.backup.remote import open_remote
from tr11ops.base.errors import ArchiveError, ArchiveFull, ArchivePermanentError, ArchiveUnavailable


@pytest.fixture
def archive(object_store: ObjectStore) -> Archive:
    return object_store.open()


@pytest.mark.parametrize(
    "size", [0, 1, QUANTUM - 1, QUANTUM, QUANTUM + 1, 2 * QUANTUM, 2 * QUANTUM + 1, LARGE]
)
def test_what_is_sent_is_there_and_is_read_back(
    object_store: ObjectStore, archive: Archive, size: int
) -> None:
    content = some_bytes(size)
    assert send(archive, "checkpoints/main/a file.pt", content, piece=700_001) == 0
    assert object_store.objects() == {"tr11-test/checkpoints/main/a file.pt": size}
    assert archive.look("checkpoints/main/a file.pt").bytes == size  # type: ignore[union-attr]
    assert get(archive, "checkpoints/main/a file.pt") == content
    assert object_store.content("tr11-test/checkpoints/main/a file.pt") == content
    assert not list(object_store.state.rglob("*.json")), "the session is forgotten"


def test_ranges_are_read(archive: Archive) -> None:
    content = some_bytes(3 << 20)
    archive.put("x", content)
    for offset, length in [
        (0, 1),
        (5, 2 << 20),
        (3 << 20, None),
        ((3 << 20) - 1, None),
        (7, 0),
        (1, 99 << 20),
    ]:
        assert (
            get(archive, "x", offset, length)
            == content[offset : None if length is None else offset + length]
        )


def test_a_reader_may_stop_early(archive: Archive) -> None:
    archive.put("x", some_bytes(4 << 20))
    for _ in range(3):
        pieces = archive.read("x")
        assert len(next(pieces)) <= 16 << 20
        pieces.close()  # type: ignore[attr-defined]
    assert archive.look("x") is not None


def test_lists_all_pages_and_nothing_of_a_neighbour(
    object_store: ObjectStore, archive: Archive
) -> None:
    names = [f"a/{number:04}" for number in range(1007)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: archive.put(name, b"1"), names))
    object_store.replace("tr11-test-2/a/neighbour", b"")
    archive.put("ab/0", b"")
    assert sorted(file.path for file in archive.list("a")) == names
    assert sorted(file.path for file in archive.list("")) == [*names, "ab/0"]
    assert list(archive.list("none")) == []


def test_odd_names_come_back(archive: Archive) -> None:
    for name in ["a b", "ä/ö?x=1#y", "100%", "a+b&c", "..x", "[1]*"]:
        archive.put(f"odd/{name}", name.encode())
        assert get(archive, f"odd/{name}") == name.encode()
    assert len(list(archive.list("odd"))) == 6


def test_an_interrupted_move_of_a_folder_is_repeated(object_store: ObjectStore) -> None:
    archive = object_store.open()
    for name in ("one", "two/three"):
        archive.put(f"old/{name}", name.encode())
    object_store.faults.plant(Fault("answer", "DELETE", "two"))
    with pytest.raises(ArchiveUnavailable):
        archive.move("old", "new")
    archive.move("old", "new")
    assert object_store.objects() == {"tr11-test/new/one": 3, "tr11-test/new/two/three": 9}
    with pytest.raises(ArchivePermanentError, match="is not there"):
        archive.move("old", "newer")
    archive.put("old/one", b"1")
    with pytest.raises(ArchivePermanentError, match="is not replaced"):
        archive.move("old", "new")


# ------------------------------------------------------------------------- uploads that are cut off


def test_goes_on_in_mid_file_in_another_process_s_archive(object_store: ObjectStore) -> None:
    content = some_bytes(LARGE)
    begin(object_store.open(), "x", LARGE, content[: 5 * QUANTUM + 1000])
    assert object_store.objects() == {}, "no half object"
    assert send(object_store.open(), "x", content) == 5 * QUANTUM
    assert object_store.content("tr11-test/x") == content


def test_another_checkpoint_of_the_same_name_is_sent_again(object_store: ObjectStore) -> None:
    first, second = some_bytes(LARGE, 1), some_bytes(LARGE, 2)
    begin(object_store.open(), "x", LARGE, first[: 4 * QUANTUM], identity="first")
    assert send(object_store.open(), "x", second, identity="second") == 0
    assert object_store.content("tr11-test/x") == second


def test_nothing_is_visible_before_finish(object_store: ObjectStore, archive: Archive) -> None:
    content = some_bytes(LARGE)
    begin(archive, "x", LARGE, content)  # all its bytes, but their source was found wrong then
    assert archive.look("x") is None
    assert list(archive.list("")) == []
    assert send(archive, "x", content) > 0


def test_sessions_are_for_their_user_alone(object_store: ObjectStore, archive: Archive) -> None:
    begin(archive, "x", LARGE)
    (path,) = object_store.state.rglob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    begun = len(object_store.faults.sessions)
    begin(archive, "x", LARGE)
    assert len(object_store.faults.sessions) == begun + 1, (
        "what others could have written is not used"
    )


@pytest.mark.parametrize("damage", ["", "{}", "[]", "\0", '{"target": 5}'])
def test_a_garbled_session_file_costs_the_resumption_alone(
    object_store: ObjectStore, archive: Archive, damage: str
) -> None:
    begin(archive, "x", LARGE)
    (path,) = object_store.state.rglob("*.json")
    path.write_text(damage)
    assert send(archive, "x", some_bytes(LARGE)) == 0


def test_no_place_for_sessions_costs_the_resumption_alone(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert send(object_store.open(), "x", some_bytes(LARGE)) == 0


def test_sweep_ends_old_sessions_and_keeps_young_ones(
    object_store: ObjectStore, archive: Archive
) -> None:
    begin(archive, "x", LARGE)
    assert archive.sweep(0) == 0
    assert archive.sweep(1e12) == 1
    assert archive.sweep(1e12) == 0
    assert object_store.faults.sessions == {}
    assert send(archive, "x", some_bytes(LARGE)) == 0


FAULTS_ON_THE_WAY = [
    Fault("answer", "PUT", status=503),
    Fault("answer", "PUT", status=429, headers={"Retry-After": "0"}),
    Fault("answer", "PUT", status=408),
    Fault("answer", "PUT", status=410),
    Fault("answer", "PUT", status=404),
    Fault("deaf", "PUT", status=500),
    Fault("reset", "PUT"),
    Fault("lose-answer", "PUT"),
    Fault("cut-sent", "PUT", at=1000),
    Fault("truncate", "PUT", at=10),
]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plan=st.lists(st.tuples(st.sampled_from(FAULTS_ON_THE_WAY), st.integers(0, 10)), max_size=5),
    piece=st.sampled_from([100_000, 1 << 20, 8 << 20]),
)
def test_whatever_happens_to_the_requests_the_file_arrives_once(
    object_store: ObjectStore, plan: list[tuple[Fault, int]], piece: int
) -> None:
    from msgspec.structs import replace

    object_store.faults.clear()
    object_store.faults.plant(*(replace(fault, skip=skip) for fault, skip in plan))
    content = some_bytes(LARGE, len(plan))
    send(object_store.open(), "x", content, identity=repr(plan), piece=piece)
    object_store.faults.clear()
    assert object_store.objects() == {"tr11-test/x": LARGE}
    assert object_store.content("tr11-test/x") == content


def test_a_lost_last_answer_sends_nothing_twice(object_store: ObjectStore) -> None:
    content = some_bytes(5 * QUANTUM)
    object_store.faults.plant(Fault("lose-answer", "PUT", skip=4))
    assert send(object_store.open(), "x", content) == len(content)
    assert object_store.content("tr11-test/x") == content


def test_a_server_that_publishes_on_demand_has_no_half_object(object_store: ObjectStore) -> None:
    """The real server without the proxy has this fault."""
    content = some_bytes(LARGE)
    direct = "http://{}:{}".format(*object_store.server)
    begin(object_store.open(endpoint_url=direct), "x", LARGE, content[: 5 * QUANTUM])
    assert object_store.objects() == {}
    assert send(object_store.open(endpoint_url=direct), "x", content) == 0
    assert object_store.content("tr11-test/x") == content


def test_a_changed_upload_is_seen_in_what_is_read_back(
    object_store: ObjectStore, archive: Archive
) -> None:
    content = some_bytes(1000)
    object_store.faults.plant(Fault("corrupt-sent", "POST", at=500))
    archive.put("x", content)
    assert hashlib.sha256(get(archive, "x")).digest() != hashlib.sha256(content).digest()


def test_a_stale_connection_is_not_used(object_store: ObjectStore, archive: Archive) -> None:
    archive.put("x", b"1")
    object_store.faults.plant(Fault("deaf", "GET", status=500))
    with pytest.raises(ArchiveUnavailable):
        archive.look("x")
    assert get(archive, "x") == b"1"


def test_many_threads_share_an_archive(object_store: ObjectStore, archive: Archive) -> None:
    contents = {
        f"t/{number}": some_bytes(QUANTUM + number * 100_000, number) for number in range(12)
    }
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda pair: send(archive, *pair), contents.items()))
        got = dict(zip(contents, pool.map(lambda name: get(archive, name), contents), strict=True))
    assert got == contents


# ----------------------------------------------------------------------- what is said when it fails


def read_all(archive: Archive) -> None:
    get(archive, "x")


def look(archive: Archive) -> None:
    archive.look("x")


def walk(archive: Archive) -> None:
    list(archive.list(""))


def write(archive: Archive) -> None:
    archive.put("x", b"12345")


def begin_large(archive: Archive) -> None:
    begin(archive, "y", LARGE)


DEEDS = (read_all, look, walk, write, begin_large)


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (
            Fault("answer", status=401, message="Invalid Credentials"),
            ArchivePermanentError,
            "no credentials are not accepted",
        ),
        (
            Fault("answer", status=403, message="no storage.objects.get access"),
            ArchivePermanentError,
            "may not do this",
        ),
        (
            Fault("answer", status=403, message="The user rate limit was exceeded"),
            ArchiveUnavailable,
            "alone for a while",
        ),
        (Fault("answer", status=403, message="quota exceeded"), ArchiveFull, "no quota"),
        (Fault("answer", status=429, headers={"Retry-After": "7"}), ArchiveUnavailable, "HTTP 429"),
        (Fault("answer", status=503), ArchiveUnavailable, "HTTP 503"),
        (Fault("answer", status=410), ArchivePermanentError, "HTTP 410"),
        (Fault("reset", times=2), ArchiveUnavailable, "gs://"),
        (Fault("answer", status=400, message="bad"), ArchivePermanentError, "HTTP 400"),
    ],
    ids=lambda value: getattr(value, "message", getattr(value, "__name__", None)),
)
def test_each_answer_has_its_meaning(
    object_store: ObjectStore,
    deed: Callable[[Archive], None],
    fault: Fault,
    kind: type[ArchiveError],
    text: str,
) -> None:
    archive = object_store.open()
    archive.put("x", b"12345")
    object_store.faults.plant(fault)
    with pytest.raises(kind) as caught:
        deed(archive)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    if isinstance(caught.value, ArchiveUnavailable):
        assert caught.value.wait == (7.0 if "Retry-After" in fault.headers else 0.0)


def test_a_hanging_server_is_given_up(object_store: ObjectStore) -> None:
    object_store.open().put("x", b"1")
    archive = object_store.open(requests_timeout=0.1)
    for deed in DEEDS:
        object_store.faults.plant(Fault("hang"))
        with pytest.raises(ArchiveUnavailable, match=r"nothing was heard for 0.1 s"):
            deed(archive)


def test_a_server_that_does_not_read_is_given_up(object_store: ObjectStore) -> None:
    import socket

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        archive = object_store.open(
            endpoint_url=f"http://127.0.0.1:{deaf.getsockname()[1]}", requests_timeout=0.1
        )
        with pytest.raises(ArchiveUnavailable, match=r"nothing was heard"):
            archive.put("x", bytes(64 << 20))


def test_an_answer_that_stalls_is_given_up(object_store: ObjectStore) -> None:
    content, came = some_bytes(3 << 20), b""
    object_store.open().put("x", content)
    object_store.faults.plant(Fault("stall", "GET", "alt=media", at=2 << 20))
    with pytest.raises(ArchiveUnavailable, match=r"nothing was heard for 0.5 s"):
        for piece in object_store.open(requests_timeout=0.5).read("x"):
            came += piece
    assert content[: 2 << 20].startswith(came)


def test_a_truncated_answer_is_no_end_of_file(object_store: ObjectStore, archive: Archive) -> None:
    archive.put("x", some_bytes(100_000))
    object_store.faults.plant(Fault("truncate", "GET", "alt=media", at=50_000))
    with pytest.raises(ArchiveUnavailable, match="cut off"):
        get(archive, "x")
    object_store.faults.plant(Fault("truncate", "GET", "maxResults", at=20))
    with pytest.raises(ArchiveUnavailable, match="cut off"):
        list(archive.list(""))


def test_no_server_at_all(object_store: ObjectStore) -> None:
    archive = object_store.open(endpoint_url="http://127.0.0.1:1")
    with pytest.raises(ArchiveUnavailable, match="Connection refused"):
        archive.look("x")


def test_no_such_bucket(object_store: ObjectStore) -> None:
    archive = open_remote("gs://no-such-bucket/x", object_store.options)
    for deed in DEEDS:
        with pytest.raises(ArchivePermanentError, match=r"gs://no-such-bucket"):
            deed(archive)


def test_what_is_missing_in_a_bucket_that_is_there(archive: Archive) -> None:
    assert archive.look("x") is None
    with pytest.raises(ArchivePermanentError, match="is not there"):
        get(archive, "x")


def test_a_bucket_has_one_run(object_store: ObjectStore) -> None:
    mine = open_remote(object_store.url, object_store.options, owner=Owner("mine"))
    threads = [threading.Thread(target=send, args=(mine, f"{number}", b"1")) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert object_store.objects()["tr11-test/tr11-archive.json"] > 0
    send(open_remote(object_store.url, object_store.options, owner=Owner("mine")), "x", b"1")
    other = open_remote(object_store.url, object_store.options, owner=Owner("other"))
    assert get(other, "x") == b"1", "reading is free"
    with pytest.raises(ArchivePermanentError, match="is the archive of 'mine', not of 'other'"):
        other.upload("y", 1, "i", as_pieces(b"1"))
