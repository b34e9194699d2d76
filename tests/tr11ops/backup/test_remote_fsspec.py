"""Archives in any file system of fsspec's: whole files alone are seen, and every failure is one of three errors,
in one line without a secret.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, strategies as st

from tests.tr11ops.backup.bucket_cases import Cut, begin, send
from tests.tr11ops.backup.copy_cases import contents, copy, make_checkpoint
from tr11ops.backup.base import Archive, as_pieces
from tr11ops.backup.folder import Owner
from tr11ops.backup.remote import PARTS, open_remote
from tr11ops.backup.remote_http import error_of_status
from tr11ops.backup.survey import list_receipts
from tr11ops.base.errors import ArchiveError, ArchiveFull, ArchivePermanentError, ArchiveUnavailable
from tr11ops.base.http import wait_of
from tr11ops.base.redact import LONGEST_TEXT, one_line


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/far"
        return
    memory = fsspec.filesystem("memory")
    yield f"memory://{tmp_path.name}"
    if memory.exists(f"/{tmp_path.name}"):
        memory.rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def archive(url: str) -> Archive:
    return open_remote(url, {"auto_mkdir": True} if url.startswith("file") else {})


def paths(archive: Archive, folder: str = "") -> list[str]:
    return sorted(file.path for file in archive.list(folder))


def test_files_come_and_go(archive: Archive) -> None:
    assert archive.look("a/b") is None
    assert paths(archive) == []
    archive.put("a/b", b"one")
    archive.put("a/b", b"second")
    archive.put("a/c/d", b"")
    archive.put("ab", b"x")
    assert paths(archive) == ["a/b", "a/c/d", "ab"]
    assert paths(archive, "a") == ["a/b", "a/c/d"]
    assert archive.look("a/b").bytes == 6  # type: ignore[union-attr]
    assert archive.look("a") is None
    assert b"".join(archive.read("a/b")) == b"second"
    assert b"".join(archive.read("a/b", 2, 3)) == b"con"
    assert b"".join(archive.read("a/b", 6)) == b""
    archive.move("a", "z")
    assert paths(archive) == ["ab", "z/b", "z/c/d"]
    with pytest.raises(ArchivePermanentError, match="is not there"):
        archive.move("a", "y")
    with pytest.raises(ArchivePermanentError, match="is not replaced"):
        archive.move("ab", "z")
    with pytest.raises(ArchivePermanentError, match="is not there"):
        list(archive.read("none"))


def test_nothing_shows_before_finish_the_sweep_takes_the_rest(archive: Archive) -> None:
    def cut_off(offset: int) -> Iterator[bytes]:
        yield b"12345"
        assert paths(archive) == [] and archive.look("x") is None
        raise Cut

    with pytest.raises(Cut):
        archive.upload("x", 10, "i", cut_off)
    assert paths(archive) == [] and archive.look("x") is None
    assert send(archive, "x", b"1234567890") == 0
    assert paths(archive) == ["x"]
    begin(archive, "y", 10)
    assert archive.sweep(0) == 0
    archive.sweep(1e12)
    assert paths(archive, PARTS) == paths(archive, "none") == []
    assert b"".join(archive.read("x")) == b"1234567890"


def test_a_file_that_arrives_short_is_not_published(archive: Archive) -> None:
    with pytest.raises(ArchiveUnavailable, match="arrived with 5 of 10 bytes"):
        archive.upload("x", 10, "i", as_pieces(b"12345"))
    assert archive.look("x") is None


@pytest.mark.parametrize("size", [None, -1, "5", 5.5])
def test_a_file_whose_size_is_not_told_is_not_taken_for_an_empty_one(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, size: Any
) -> None:
    archive.put("a/b", b"12345")
    facts = {"name": f"{archive._root}/a/b", "type": "file", "size": size}  # type: ignore[attr-defined]
    monkeypatch.setattr(archive._files, "info", lambda path: facts)  # type: ignore[attr-defined]
    monkeypatch.setattr(archive._files, "find", lambda path, detail: {facts["name"]: facts})  # type: ignore[attr-defined]
    with pytest.raises(ArchiveUnavailable, match="does not tell its size"):
        archive.look("a/b")
    with pytest.raises(ArchiveUnavailable, match="does not tell its size"):
        list(archive.list(""))


def test_a_checkpoint_is_copied_and_found(archive: Archive, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "run")
    receipt = copy(archive, source)
    assert list_receipts(archive, "main") == (receipt,)
    assert {
        path: b"".join(archive.read(f"{receipt.location}/{path}")) for path in contents(source)
    } == contents(source)


def test_an_archive_has_one_run(url: str) -> None:
    options: dict[str, Any] = {"auto_mkdir": True} if url.startswith("file") else {}
    open_remote(url, options, owner=Owner("mine")).put("x", b"1")
    open_remote(url, options, owner=Owner("mine")).put("y", b"1")
    with pytest.raises(ArchivePermanentError, match="is the archive of 'mine', not of 'other'"):
        open_remote(url, options, owner=Owner("other")).put("x", b"1")
    open_remote(url, options).put("tr11-archive.json", b"garbage")
    with pytest.raises(ArchivePermanentError, match="cannot be read"):
        open_remote(url, options, owner=Owner("other")).put("x", b"1")


class Response:
    def __init__(self, status: int) -> None:
        self.status_code = status


class Odd(Exception):
    def __init__(self, **facts: Any) -> None:
        super().__init__(
            "odd, see https://host/x?signature=planted password=planted Bearer planted"
        )
        for name, value in facts.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ArchiveFull),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ArchiveFull),
        (OSError(errno.EROFS, "Read-only file system"), ArchivePermanentError),
        (PermissionError(errno.EACCES, "Permission denied"), ArchivePermanentError),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), ArchivePermanentError),
        (OSError(errno.EIO, "Input/output error"), ArchiveUnavailable),
        (TimeoutError(), ArchiveUnavailable),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), ArchiveUnavailable),
        (Odd(status=503), ArchiveUnavailable),
        (Odd(status=403), ArchivePermanentError),
        (Odd(code="404"), ArchivePermanentError),
        (Odd(status_code=429), ArchiveUnavailable),
        (Odd(response=Response(500)), ArchiveUnavailable),
        (Odd(response=Response(401)), ArchivePermanentError),
        (Odd(response={"ResponseMetadata": {"HTTPStatusCode": 507}}), ArchiveFull),
        (Odd(), ArchiveUnavailable),
        (type("NoCredentialsError", (Exception,), {})(), ArchivePermanentError),
    ],
    ids=repr,
)
def test_whatever_a_library_raises_is_one_of_three(
    url: str,
    archive: Archive,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[ArchiveError],
) -> None:
    archive.put("x", b"1")

    def fail(*_: object, **__: object) -> None:
        raise error

    for method in ("open", "info", "find", "mv_file"):
        monkeypatch.setattr(type(archive._files), method, fail, raising=False)  # type: ignore[attr-defined]
    records = (
        lambda: list(archive.read("x")),
        lambda: archive.look("x"),
        lambda: list(archive.list("")),
        lambda: archive.put("y", b"1"),
        lambda: archive.move("x", "y"),
        lambda: archive.sweep(1e12),
    )
    for deed in records:
        with pytest.raises(kind) as caught:
            deed()
        assert type(caught.value) is kind
        assert "planted" not in str(caught.value) and "\n" not in str(caught.value)


SECRET = "hunter2hunter2"


@given(
    before=st.text(max_size=50),
    after=st.text(max_size=300),
    form=st.sampled_from(
        [
            "Authorization: Bearer {}",
            "authorization: bearer {}",
            "token={}",
            "access_token: {}",
            "password={}",
            "upload_id={}",
            "https://me:{}@host/path",
            "http://host/path?x=1&signature={}",
            "see https://storage.example/x?upload_id={}&y",
            "-----BEGIN PRIVATE KEY-----\n{}\n",
            "ya29.{}",
        ]
    ),
)
def test_secrets_are_taken_out_of_any_text(before: str, after: str, form: str) -> None:
    shown = one_line(f"{before} {form.format(SECRET)} {after}")
    assert SECRET not in shown
    assert len(shown) <= LONGEST_TEXT
    assert shown.isprintable()


@given(st.integers(0, 10**12))
def test_seconds_are_waited_but_never_longer_than_a_day(seconds: int) -> None:
    headers = Message()
    headers["retry-after"] = str(seconds)
    assert wait_of(headers, 0.0) == (min(seconds, 86400) if seconds < 10**9 else 0)


@pytest.mark.parametrize(
    ("after", "date", "wait"),
    [
        ("Sat, 01 Jan 2022 00:01:30 GMT", "Sat, 01 Jan 2022 00:00:00 GMT", 90.0),
        ("Sat, 01 Jan 2022 00:00:00 GMT", "Sat, 01 Jan 2022 00:01:00 GMT", 0.0),
        ("Sun, 01 Jan 2023 00:00:00 GMT", "Sat, 01 Jan 2022 00:00:00 GMT", 86400.0),
        ("Sat, 01 Jan 2022 00:01:30 GMT", "", 0.0),
        ("Sat, 01 Jan 2022 00:01:30", "Sat, 01 Jan 2022 00:00:00 GMT", 90.0),
        ("soon", "Sat, 01 Jan 2022 00:00:00 GMT", 0.0),
        ("-5", "", 0.0),
        ("1e9", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_a_date_is_compared_with_the_server_s_own_clock(after: str, date: str, wait: float) -> None:
    headers = Message()
    headers["Retry-After"], headers["Date"] = after, date
    assert wait_of(headers, 4e9) == wait


@given(status=st.integers(300, 599), message=st.text(max_size=300), wait=st.floats(0, 3600))
def test_every_status_has_a_meaning(status: int, message: str, wait: float) -> None:
    error = error_of_status(status, "gs://bucket/x", "the default credentials", message, wait)
    assert type(error) in {ArchiveUnavailable, ArchiveFull, ArchivePermanentError}
    assert str(error).startswith("gs://bucket/x: ")
    assert "\n" not in str(error)
    if status >= 500 and status != 507:
        assert isinstance(error, ArchiveUnavailable) and error.wait == wait
    if status in {401, 404, 410}:
        assert isinstance(error, ArchivePermanentError)
