"""The test's own hub, judged by the unmodified `huggingface_hub` client and by git."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    HfFileSystem,
    constants,
    hf_hub_download,
    set_client_factory,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers
from huggingface_hub.utils._http import default_client_factory
from hypothesis import given, settings, strategies as st

import tr11ops.twin.hub.__main__
from tests.plugins.faulty_hub import FaultyHub, Window
from tr11ops.twin.hub.state import DEFAULT_ATTRIBUTES, git_blob, is_large_by_rule

NAME = "science/data"


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the library's own retries slept."""
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    return waits


@pytest.fixture
def api(
    hub_server: FaultyHub, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> Iterator[HfApi]:
    """The library as it comes, but for Xet, which has a switch: this hub's storage is plain."""
    set_client_factory(default_client_factory)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    yield HfApi(hub_server.url, token=hub_server.token)
    set_client_factory(default_client_factory)


def test_the_library_writes_and_reads(api: HfApi, hub_server: FaultyHub, tmp_path: Path) -> None:
    assert api.whoami()["name"] == "bot"
    assert api.create_repo(NAME, private=True).repo_id == NAME
    assert api.create_repo(NAME, exist_ok=True).repo_id == NAME
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(NAME)
    folder = tmp_path / "folder"
    (folder / "deep/er").mkdir(parents=True)
    large = os.urandom(5000)
    for path, content in {
        "a.txt": b"a",
        "deep/b.bin": large,
        "deep/er/c.txt": b"c" * 3000,
        "empty": b"",
    }.items():
        (folder / path).write_bytes(content)
    made = api.upload_folder(repo_id=NAME, folder_path=folder, commit_message="all")
    assert hub_server.files(NAME)["deep/b.bin"] == large and api.repo_info(NAME).sha == made.oid
    assert sorted(api.list_repo_files(NAME)) == [
        ".gitattributes",
        "a.txt",
        "deep/b.bin",
        "deep/er/c.txt",
        "empty",
    ]
    top = {item.path: type(item).__name__ for item in api.list_repo_tree(NAME)}
    assert top == {
        ".gitattributes": "RepoFile",
        "a.txt": "RepoFile",
        "deep": "RepoFolder",
        "empty": "RepoFile",
    }
    assert {item.path for item in api.list_repo_tree(NAME, "deep")} == {"deep/b.bin", "deep/er"}
    for path in ("a.txt", "deep/b.bin"):
        assert (
            Path(api.hf_hub_download(NAME, path, cache_dir=tmp_path / "cache")).read_bytes()
            == (folder / path).read_bytes()
        )
    back = Path(api.snapshot_download(NAME, local_dir=tmp_path / "back"))
    assert {p.relative_to(back) for p in back.rglob("*.*") if p.is_file() and ".cache" not in p.parts} >= {Path("a.txt"), Path("deep/b.bin")}  # fmt: skip
    api.create_commit(NAME, [CommitOperationCopy("deep/b.bin", "copy.bin"), CommitOperationCopy("a.txt", "a2.txt"), CommitOperationDelete("deep/", is_folder=True), CommitOperationDelete("empty")], commit_message="move")  # fmt: skip
    assert set(hub_server.files(NAME)) == {".gitattributes", "a.txt", "a2.txt", "copy.bin"}
    assert [commit.title for commit in api.list_repo_commits(NAME)] == [
        "move",
        "all",
        "initial commit",
    ]
    # an old commit is as it was
    assert hub_server.files(NAME, made.oid)["deep/er/c.txt"] == b"c" * 3000
    api.create_branch(NAME, branch="other", revision=made.oid)
    api.create_branch(NAME, branch="other", exist_ok=True)
    assert {ref.name for ref in api.list_repo_refs(NAME).branches} == {"main", "other"}
    api.upload_file(path_or_fileobj=b"new", path_in_repo="n.txt", repo_id=NAME, revision="other")
    assert api.file_exists(NAME, "n.txt", revision="other") and not api.file_exists(NAME, "n.txt")
    hub_server.create("science/set", "dataset", private=False)
    HfApi(hub_server.url, token=hub_server.token).upload_file(path_or_fileobj=b"x", path_in_repo="x.csv", repo_id="science/set", repo_type="dataset")  # fmt: skip
    files = HfFileSystem(endpoint=hub_server.url, token=hub_server.token)
    assert (
        files.cat_file("datasets/science/set/x.csv") == b"x"
        and files.cat_file(f"{NAME}/copy.bin", 10, 20) == large[10:20]
    )
    assert hub_server.authorizations_at_storage() == [] and hub_server.count("storage-get") > 0


def test_what_is_there_is_not_sent_again(api: HfApi, hub_server: FaultyHub, tmp_path: Path) -> None:
    hub_server.create(NAME)
    hub_server.configure(multipart_from=5000, part_bytes=2000)
    (tmp_path / "x.bin").write_bytes(os.urandom(5001))
    for name in ("x.bin", "y.bin"):
        api.upload_file(path_or_fileobj=tmp_path / "x.bin", path_in_repo=name, repo_id=NAME)
    assert hub_server.count("lfs-part") == 3 and hub_server.bytes_sent() == 5001
    before = len(hub_server.history(NAME))
    api.upload_file(path_or_fileobj=tmp_path / "x.bin", path_in_repo="x.bin", repo_id=NAME)
    assert len(hub_server.history(NAME)) == before  # the library drops what would change nothing


def test_what_the_library_makes_of_the_refusals(
    api: HfApi, hub_server: FaultyHub, tmp_path: Path
) -> None:
    hub_server.create(NAME)
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("science/none")
    with pytest.raises(RevisionNotFoundError):
        api.list_repo_commits(NAME, revision="none")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(
            NAME, "none", endpoint=hub_server.url, token=hub_server.token, cache_dir=tmp_path
        )
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(hub_server.url, token="hf_wrong").whoami()
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(hub_server.url, token=False).repo_info(NAME)  # private
    reader = HfApi(hub_server.url, token=hub_server.read_token)
    assert reader.repo_info(NAME).private
    with pytest.raises(
        HfHubHTTPError, match="403 Forbidden: Forbidden: you must use a write token"
    ):
        reader.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id=NAME)
    head = api.repo_info(NAME).sha
    api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id=NAME)
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(
            NAME, [CommitOperationAdd("y", b"y")], commit_message="late", parent_commit=head
        )
    with pytest.raises(HfHubHTTPError, match="A file with this name doesn't exist"):
        api.delete_file("none", NAME)
    big = CommitOperationAdd("big.txt", b"x" * (10 << 20) + b"x")
    big._upload_mode = "regular"
    with pytest.raises(HfHubHTTPError, match="larger than 10 MiB"):
        api.create_commit(NAME, [big], commit_message="big")
    with pytest.raises(ValueError, match="metadata"):
        api.upload_file(
            path_or_fileobj=b"---\n[broken\n---\n", path_in_repo="README.md", repo_id=NAME
        )
    assert len(hub_server.history(NAME)) == 2  # nothing of all this was made


def test_the_limits(api: HfApi, hub_server: FaultyHub, slept: list[float]) -> None:
    hub_server.create(NAME)
    now = [5000.0]
    hub_server.now = lambda: now[0]
    assert hub_server.commit_limit is not None
    for number in range(128):
        hub_server.put(NAME, "x", b"%d" % number)  # by hand: not counted
        assert hub_server.commit_limit.take(now[0])[0] == 0
        now[0] += 10
    with pytest.raises(HfHubHTTPError, match="128 per hour") as refused:
        api.upload_file(path_or_fileobj=b"x", path_in_repo="y", repo_id=NAME)
    told = parse_ratelimit_headers(refused.value.response.headers)
    assert told is not None and (told.remaining, told.limit, told.window_seconds) == (0, 128, 3600)
    assert (
        told.reset_in_seconds
        == 3600 - 1280 + 1
        == int(refused.value.response.headers["Retry-After"])
    )
    now[0] += told.reset_in_seconds
    api.upload_file(path_or_fileobj=b"x", path_in_repo="y", repo_id=NAME)
    hub_server.request_limit = Window(2, 10, "api")
    for _ in range(2):
        api.repo_info(NAME)
    with pytest.raises(HfHubHTTPError, match="429"):
        api.repo_info(NAME)


def test_ranges_and_heads_as_plain_http(hub_server: FaultyHub) -> None:
    hub_server.create(NAME, private=False)
    hub_server.put(NAME, "x.txt", b"0123456789")

    def ask(extra: dict[str, str], method: str = "GET") -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(
            f"{hub_server.url}/{NAME}/resolve/main/x.txt", headers=extra, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)

    assert ask({})[:2] == (200, b"0123456789")
    status, body, headers = ask({"Range": "bytes=3-5"})
    assert (status, body, headers["Content-Range"]) == (206, b"345", "bytes 3-5/10")
    assert ask({"Range": "bytes=8-"})[1] == b"89" and ask({"Range": "bytes=8-99"})[1] == b"89"
    status, _, headers = ask({"Range": "bytes=10-"})
    assert status == 416 and headers["Content-Range"] == "bytes */10"
    status, body, headers = ask({}, "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", "10")
    assert headers["X-Repo-Commit"] == hub_server.history(NAME)[-1].id
    assert headers["ETag"] == f'"{git_blob(b"0123456789")}"'


def test_commits_at_once_are_one_after_another(api: HfApi, hub_server: FaultyHub) -> None:
    hub_server.create(NAME)
    threads = [threading.Thread(target=lambda n=n: [api.upload_file(path_or_fileobj=b"%d" % n, path_in_repo=f"{n}-{k}", repo_id=NAME) for k in range(3)]) for n in range(4)]  # type: ignore[misc]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = hub_server.history(NAME)
    assert len(history) == 13 and len(history[-1].files) == 13
    assert all(later.parent == earlier.id for earlier, later in pairwise(history))


@settings(max_examples=10, deadline=None)
@given(st.binary(max_size=100))
def test_blobs_are_named_as_git_names_them(content: bytes) -> None:
    said = subprocess.run(
        ["git", "hash-object", "--stdin"],
        input=content,
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert git_blob(content) == said.stdout.decode().strip()
    assert hashlib.sha1(b"").hexdigest() != git_blob(b"")


def test_attributes_are_read_as_git_reads_them(tmp_path: Path) -> None:
    attributes = DEFAULT_ATTRIBUTES + "logs/**/*.txt filter=lfs\nlogs/small/*.txt -filter\n/top.csv filter=lfs\n?.dat filter=lfs\nx/** filter=lfs\n# *.py filter=lfs\n*.md filter=other\n"  # fmt: skip
    paths = [
        "a.bin", "deep/a.bin", "a.txt", "logs/a.txt", "logs/main/a.txt", "logs/small/a.txt", "top.csv", "deep/top.csv",
        "events.out.tfevents.1", "tb/main/events.out.tfevents.17.host", "saved_model/a/b", "saved_model/b", "x.py", "a.md",
        "1.dat", "12.dat", "x/y/z", "x", "a.tar.gz", "model.safetensors", "model.safetensors.index.json", "a.lfs.b",
    ]  # fmt: skip
    (tmp_path / ".gitattributes").write_text(attributes)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=60)
    said = subprocess.run(["git", "-C", str(tmp_path), "check-attr", "filter", "--", *paths], capture_output=True, text=True, check=True, timeout=300)  # fmt: skip
    by_git = {path for path in paths if f"{path}: filter: lfs" in said.stdout.splitlines()}
    assert {path for path in paths if is_large_by_rule(attributes, path)} == by_git and 8 < len(
        by_git
    ) < len(paths)


def test_a_hub_that_is_ended_leaves_nothing_of_what_was_uploaded(tmp_path: Path) -> None:
    """As a twin ends it."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HF_TOKEN": "hf_test"}
    with subprocess.Popen(
        [sys.executable, "-m", "tr11ops.twin.hub", "--repository", "bot/logs"],
        env=environment, stdout=subprocess.PIPE, text=True,
    ) as hub:  # fmt: skip
        assert hub.stdout is not None and hub.stdout.readline().startswith("HF_ENDPOINT=")
        assert list(tmp_path.iterdir())
        hub.terminate()
        assert hub.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_hub_may_be_ended_the_moment_it_says_that_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    def end(line: str, **_: object) -> None:
        said.append(line)
        if line.startswith("HF_ENDPOINT="):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("builtins.print", end)
    monkeypatch.setattr(sys, "argv", ["hub", "--repository", "bot/logs"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tr11ops.twin.hub.__main__.main()
    assert said[-1] == "ended" and list(tmp_path.iterdir()) == []
