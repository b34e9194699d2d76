"""The edge to the hub against a hub that fails in every way: what comes back, how long it waits, what it never says."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tr11ops.base.redact import one_line, redact
from tr11ops.base.retry_after import wait_of
from tr11ops.hub.address import endpoint_of
from tr11ops.hub.base import (
    Add,
    Delete,
    HubConflict,
    HubCopy,
    HubFile,
    HubMissing,
    HubPermanentError,
    HubUnavailable,
    Repository,
    hub_retries,
)
from tr11ops.hub.client import Hub
from tr11ops.hub.content import FileChanged, FileView
from tr11ops.hub.credentials import Credentials, CredentialsError, Secret, find_credentials, read_credentials
from tr11ops.twin.hub.faults import Window
from tr11ops.twin.hub.server import HubServer

LOGS = Repository("science/logs")
LARGE = os.urandom(64) + b"\0" * 3000


@pytest.fixture
def logs(hub_server: HubServer) -> Repository:
    hub_server.create(LOGS.name)
    hub_server.forget_requests()
    return LOGS


# ----------------------------------------------------------------------------- what it does
def test_a_repository_is_made_once_and_a_branch_too(hub: Hub, hub_server: HubServer) -> None:
    first = hub.ensure_repository(LOGS, private=True)
    assert hub.ensure_repository(LOGS, private=False) == first == hub.head(LOGS)
    assert hub_server.count("create") == 1 and hub_server.repo(LOGS.name).private and hub.is_private(LOGS)
    step = Repository(LOGS.name, branch="global_step7")
    assert hub.ensure_repository(step) == first  # the branch begins where main is
    assert hub.ensure_repository(step) == first and hub_server.count("branch") == 1
    data = Repository("science/data", "dataset")
    assert hub.ensure_repository(data, private=False) == hub.head(data)
    assert not hub_server.repo("science/data", "dataset").private


def test_a_commit_holds_everything_and_is_read_back(
    hub: Hub, hub_server: HubServer, logs: Repository, tmp_path: Path
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
    assert files["logs/a b#?.txt"] == b"line\n" * 1000 and files["w.bin"] == LARGE and files["empty.txt"] == b""
    assert sent["big.bin"] == 4096 and files["big.bin"] == growing.read_bytes()[:4096]
    assert made == hub.head(logs) == hub_server.history(logs.name)[-1].id
    assert hub_server.history(logs.name)[-1].title == "new data"

    tree = hub.list_tree(logs)
    assert tree["w.bin"] == HubFile(len(LARGE), tree["w.bin"].oid, hashlib.sha256(LARGE).hexdigest())
    assert set(tree) == set(files) and tree["logs/a b#?.txt"].sha256 is None
    assert hub.list_tree(logs, folder="logs") == {"logs/a b#?.txt": tree["logs/a b#?.txt"]}
    assert hub.list_tree(logs, folder="nothing") == {}
    assert hub.look(logs, ["w.bin", "logs", "nothing"]) == {"w.bin": tree["w.bin"]}
    for path in ("w.bin", "logs/a b#?.txt"):
        assert hub.read(logs, path) == files[path]
        assert hub.read(logs, path, 7, 11) == files[path][7:18] and hub.read(logs, path, 4000) == files[path][4000:]
        assert hub.read(logs, path, 10**6, 5) == b"" and hub.read(logs, path, 3, 0) == b""
    assert hub.read(logs, "w.bin", revision=made) == LARGE
    with pytest.raises(HubMissing, match=r"no\.txt of science/logs: .* answers 404"):
        hub.read(logs, "no.txt")

    hub.commit(logs, [Delete("empty.txt"), HubCopy("copy.bin", "w.bin")], "tidy")
    files = hub_server.files(logs.name)
    assert "empty.txt" not in files and files["copy.bin"] == LARGE
    assert hub.commit(logs, [Add("w.bin", LARGE)], "nothing new") == hub_server.history(logs.name)[-1].id
    assert [commit.title for commit in hub_server.history(logs.name)[1:]] == ["new data", "tidy"]


def test_pages_are_followed(hub: Hub, hub_server: HubServer, logs: Repository) -> None:
    hub_server.configure(tree_page=7)
    hub.commit(logs, [Add(f"logs/{number}.txt", b"%d" % number) for number in range(30)], "many")
    assert len(hub.list_tree(logs)) == 31 and hub_server.count("tree") >= 5


@pytest.mark.parametrize("part_bytes", [1000, 1024, 4096])
def test_a_large_file_goes_in_parts(
    hub: Hub, hub_server: HubServer, logs: Repository, tmp_path: Path, part_bytes: int
) -> None:
    content = os.urandom(4096)
    (tmp_path / "x").write_bytes(content + b"grown")
    hub_server.configure(multipart_from=2000, part_bytes=part_bytes)
    hub_server.fail("lfs-part", after=1)
    hub.commit(logs, [Add("x.bin", tmp_path / "x", 4096)], "large")
    assert hub_server.files(logs.name)["x.bin"] == content
    assert hub_server.authorizations_at_storage() == []


# ----------------------------------------------------------------------------- what fails and passes
FAULTS = ("info", "preupload", "lfs-batch", "lfs-put", "lfs-verify", "commit")


@pytest.mark.parametrize(
    ("kind", "status"),
    [*((kind, 503) for kind in FAULTS), *(("preupload", status) for status in (408, 425, 429, 500, 502, 504))],
)
def test_what_may_pass_is_tried_again(
    hub: Hub, hub_server: HubServer, hub_waits: list[float], logs: Repository, kind: str, status: int
) -> None:
    hub_server.fail(kind, status, times=2, headers={"Retry-After": "40"})
    hub.commit(logs, [Add("w.bin", LARGE)], "one")
    # what was asked for, and no one below slept on its own; an object whose check failed is there at the second try
    assert hub_waits == [40.0] * (1 if kind == "lfs-verify" else 2)
    assert [commit.title for commit in hub_server.history(logs.name)] == ["initial commit", "one"]
    assert hub_server.bytes_sent() == len(LARGE) * (3 if kind == "lfs-put" else 1)  # what arrived is not sent again


@pytest.mark.parametrize("kind", FAULTS)
def test_a_broken_connection_is_made_again(hub: Hub, hub_server: HubServer, logs: Repository, kind: str) -> None:
    hub_server.reset(kind, times=2)
    hub.commit(logs, [Add("w.bin", LARGE), Add("b.txt", b"text")], "one")
    assert len(hub_server.history(logs.name)) == 2 and hub_server.files(logs.name)["w.bin"] == LARGE


@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_answer_makes_no_second_commit(hub: Hub, hub_server: HubServer, logs: Repository, times: int) -> None:
    hub_server.lose_answer("commit", times=times)
    made = hub.commit(logs, [Add("b.txt", b"text")], "one")
    assert [commit.title for commit in hub_server.history(logs.name)] == ["initial commit", "one"]
    assert made == hub_server.history(logs.name)[-1].id and hub_server.count("commit") == 1


def test_a_commit_that_comes_late_is_not_made_twice(hub_server: HubServer, make_hub: Callable[..., Hub]) -> None:
    hub_server.create(LOGS.name)
    slow = make_hub(timeout=0.3)
    fault = hub_server.lag("commit")
    made = slow.commit(LOGS, [Add("b.txt", b"text")], "one")
    fault.release()
    assert made == hub_server.history(LOGS.name)[-1].id and len(hub_server.history(LOGS.name)) == 2


@pytest.mark.parametrize("kind", ["tree", "resolve", "storage-get", "info", "commits"])
@pytest.mark.parametrize("how", ["truncate", "garble", "reset"])
def test_a_cut_or_foreign_answer_is_asked_for_again(
    hub: Hub, hub_server: HubServer, logs: Repository, kind: str, how: str
) -> None:
    hub.commit(logs, [Add("w.bin", LARGE), Add("b.txt", b"text" * 50)], "one")
    getattr(hub_server, how)(kind)
    if kind == "commits":
        hub_server.lose_answer("commit")
        hub.commit(logs, [Add("c.txt", b"c")], "two")
        assert len(hub_server.history(logs.name)) == 3
    assert len(hub.list_tree(logs)) >= 3 and hub.head(logs) == hub_server.history(logs.name)[-1].id
    if how != "garble" or kind not in {"resolve", "storage-get"}:  # a page with status 200 instead of a file is a file
        assert hub.read(logs, "w.bin") == LARGE and hub.read(logs, "b.txt", 4, 8) == b"text" * 2


@pytest.mark.parametrize("kind", ["info", "preupload", "lfs-batch", "commit", "tree", "commits"])
@pytest.mark.parametrize("body", ["{}", "[]", "7", '[{"a": 1}]', '{"files": [{}], "objects": [{}]}'])
def test_an_answer_that_is_not_a_hubs_may_be_another_later(
    hub: Hub, hub_server: HubServer, logs: Repository, kind: str, body: str
) -> None:
    if kind == "commits":
        hub_server.lose_answer("commit")
    hub_server.garble(kind, body=body)
    try:
        hub.commit(logs, [Add("w.bin", LARGE)], "one")
        hub.list_tree(logs)
    except HubPermanentError:  # where the library says that it is malformed
        hub.commit(logs, [Add("w.bin", LARGE)], "one")
    assert len(hub_server.history(logs.name)) == 2 and hub.read(logs, "w.bin") == LARGE


def test_patience_begins_again_where_a_long_upload_got_on(hub_server: HubServer, hub_waits: list[float]) -> None:
    """Four failures, each after ten minutes of sending, with a patience of one minute."""
    hub_server.create(LOGS.name)
    now = [0.0]

    def sleep(seconds: float) -> None:
        hub_waits.append(seconds)
        now[0] += seconds

    def hours() -> None:
        now[0] += 600.0

    hub = Hub(
        hub_server.url, Credentials(Secret(hub_server.token)), hub_retries(60.0, sleep, lambda: now[0], lambda: 0.5)
    )
    hub_server.on("info", hours)  # a first try asks for this, later ones for the next
    hub_server.on("commits", hours, times=3)
    hub_server.fail("commit", times=4)
    hub.commit(LOGS, [Add("b.txt", b"b")], "one")
    assert hub_waits == [1.0] * 4


def test_silence_ends(hub_server: HubServer, make_hub: Callable[..., Hub], hub_waits: list[float]) -> None:
    hub_server.create(LOGS.name)
    said: list[str] = []
    hub = make_hub(timeout=0.2, say=said.append)
    hub_server.hang("info")
    hub_server.hang("tree")
    assert hub.head(LOGS) and hub.list_tree(LOGS)
    assert hub_waits == [1.0, 1.0]
    assert said[0] == "science/logs: 127.0.0.1 gives no answer (silent for too long): trying again in 1 s"


def test_an_answer_larger_than_any_is_not_read_to_its_end(
    hub_server: HubServer, make_hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.create(LOGS.name)
    monkeypatch.setattr("tr11ops.hub.transport.LARGEST_ANSWER_BYTES", 1 << 20)
    hub_server.garble("info", body="[" * (3 << 20))
    with pytest.raises(HubPermanentError, match="answers with more than 1 MiB"):
        make_hub().head(LOGS)


def test_patience_ends(hub_server: HubServer, make_hub: Callable[..., Hub], hub_waits: list[float]) -> None:
    hub_server.create(LOGS.name)
    hub = make_hub(seconds=100.0)
    hub_server.is_down = True
    with pytest.raises(HubUnavailable, match=r"^science/logs: 127\.0\.0\.1 gives no answer \(.*\)$"):
        hub.head(LOGS)
    assert hub_waits == [1, 2, 4, 8, 16, 32]  # the next would be past the end
    hub_server.mend()
    hub_server.fail("info", 429, headers={"RateLimit": '"api";r=0;t=2000', "Retry-After": "12"})
    with pytest.raises(HubUnavailable, match=r"answers 429, and asks for 33 min .*: not waited for") as away:
        hub.head(LOGS)
    assert away.value.wait == 2000.0 and len(hub_waits) == 6  # a wait past the end is not begun
    assert hub.head(LOGS)


def test_the_commit_limit_is_waited_for(
    hub_server: HubServer, make_hub: Callable[..., Hub], hub_waits: list[float]
) -> None:
    hub_server.create(LOGS.name)
    hub_server.commit_limit = Window(2, 3600, "commits")
    hub_server.now = lambda: 1000.0 + sum(hub_waits)
    hub = make_hub(seconds=7200.0)
    for number in range(3):
        hub.commit(LOGS, [Add("b.txt", b"%d" % number)], f"number {number}")
    assert len(hub_server.history(LOGS.name)) == 4 and hub_waits == [3601.0]


# ----------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "answers 400"),
        (401, "the token of the test is not valid"),
        (403, "the token of the test has no permission for this; it needs write access"),
        (404, "there is no such thing, or the token may not see it"),
        (409, "it is there already"),
        (410, "it was taken away"),
        (413, "too large"),
    ],
)
def test_what_will_not_pass_is_one_line_with_the_cure(
    hub: Hub, hub_server: HubServer, hub_waits: list[float], logs: Repository, status: int, words: str
) -> None:
    hub_server.fail("commit", status, text=f"no:\nbad token {hub_server.token}\x1b[31m at https://u:p@host/x?sig=1")
    with pytest.raises(HubPermanentError) as refused:
        hub.commit(logs, [Add("b.txt", b"text")], "one")
    text = str(refused.value)
    assert (
        words in text and "\n" not in text and "\x1b" not in text and hub_server.token not in text and ":p@" not in text
    )
    assert refused.value.status == status and hub_waits == []
    assert isinstance(refused.value, HubMissing) == (status in {404, 410})


def test_the_wrong_token_and_none(
    hub_server: HubServer, make_hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else_entirely")
    hub_server.create(LOGS.name)
    with pytest.raises(HubPermanentError, match="the token of the test is not valid") as refused:
        make_hub("hf_wrong_wrong").ensure_repository(LOGS)
    assert "hf_wrong_wrong" not in str(refused.value)
    with pytest.raises(HubPermanentError, match=r"401: no token; name hub\.credentials_file, set HF_TOKEN"):
        make_hub(None).head(LOGS)
    assert {seen.authorization for seen in hub_server.requests} == {"Bearer hf_wrong_wrong", None}
    reader = make_hub(hub_server.read_token)
    assert reader.head(LOGS)
    with pytest.raises(HubPermanentError, match="403: the token of the test has no permission for this"):
        reader.commit(LOGS, [Add("b.txt", b"text")], "one")
    with pytest.raises(HubPermanentError, match="403"):
        make_hub().ensure_repository(Repository("elsewhere/logs"))
    hub_server.create("science/open", private=False)
    assert make_hub(None).head(Repository("science/open"))


def test_a_regular_file_may_not_be_large(hub: Hub, hub_server: HubServer, logs: Repository) -> None:
    """The hub asks for what is above 10 MiB as a large object without being told; one that came otherwise is refused."""
    hub.commit(logs, [Add("logs/main_log.txt", b"x" * (11 << 20))], "large")
    assert hub_server.history(logs.name)[-1].files["logs/main_log.txt"].sha256 is not None
    with pytest.raises(Exception, match="larger than 10 MiB"):
        hub_server.put(logs.name, "other.txt", b"x" * (11 << 20))


def test_someone_else_commits_meanwhile(hub: Hub, hub_server: HubServer, logs: Repository) -> None:
    old = hub.head(logs)
    hub_server.put(logs.name, "README.md", b"by hand")
    with pytest.raises(HubConflict, match="someone else has committed meanwhile"):
        hub.commit(logs, [Add("b.txt", b"text")], "one", parent=old)
    hub_server.on("commit", lambda: hub_server.put(logs.name, "README.md", b"again") and None)
    hub.commit(logs, [Add("b.txt", b"text")], "one")
    assert hub_server.files(logs.name) | {".gitattributes": b""} == {
        "README.md": b"again",
        "b.txt": b"text",
        ".gitattributes": b"",
    }


def test_a_file_that_shrinks_stops_the_commit(
    hub: Hub, hub_server: HubServer, logs: Repository, tmp_path: Path
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(LARGE)
    hub_server.on("lfs-batch", lambda: os.truncate(path, 10))
    with pytest.raises(FileChanged, match=r"x\.bin: became shorter"):
        hub.commit(logs, [Add("x.bin", path)], "one")
    assert len(hub_server.history(logs.name)) == 1
    with pytest.raises(FileChanged):
        hub.commit(logs, [Add("x.bin", path, 11)], "one")


def test_a_large_object_that_storage_refuses_is_asked_for_again(
    hub: Hub, hub_server: HubServer, logs: Repository, hub_waits: list[float]
) -> None:
    hub_server.fail("lfs-put", 403, text="Request has expired")
    hub.commit(logs, [Add("w.bin", LARGE)], "one")
    assert hub_server.count("lfs-batch") == 2 and hub_waits == [1.0]


def test_which_hub() -> None:
    assert (
        endpoint_of(None, {}) == "https://huggingface.co"
        and endpoint_of("http://h:1/x/", {"HF_ENDPOINT": "y"}) == "http://h:1/x"
    )
    assert endpoint_of(None, {"HF_ENDPOINT": "https://mirror/"}) == "https://mirror"
    for wrong in ("https://u:hidden@h", "h/hidden", "https://h?hidden"):
        with pytest.raises(ValueError, match=r"\$HF_ENDPOINT must be a hub's address") as refused:
            endpoint_of(None, {"HF_ENDPOINT": wrong})
        assert "hidden" not in str(refused.value)


def test_the_library_shows_no_bars(
    hub: Hub, logs: Repository, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    hub.commit(logs, [Add(f"{number}.bin", LARGE + bytes([number])) for number in range(3)], "several at once")
    assert capfd.readouterr() == ("", "")


def test_offline_by_wish(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubPermanentError, match="HF_HUB_OFFLINE is set"):
        hub.head(LOGS)


# ----------------------------------------------------------------------------- secrets
def test_no_secret_leaves_by_any_way(
    hub_server: HubServer,
    hub: Hub,
    logs: Repository,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Everything that is printed, logged or raised, with the library's logging turned up, while all kinds of calls fail."""
    from huggingface_hub import constants
    from huggingface_hub import logging as hub_logging

    texts: list[str] = []
    caplog.set_level(logging.DEBUG)
    assert hub.head(logs)  # installs what keeps quiet; then the user turns it up again
    hub_logging.set_verbosity_debug()
    for name in ("huggingface_hub", "httpx2", "httpcore2.http11", "httpcore2.connection"):
        caplog.set_level(logging.DEBUG, name)
    debug, constants.HF_DEBUG = constants.HF_DEBUG, True
    try:
        for kind in ("info", "preupload", "lfs-batch", "lfs-put", "lfs-verify", "commit", "storage-get"):
            for status in (401, 403, 404, 500):
                hub_server.fail(kind, status, text=f"Bearer {hub_server.token} ?X-Amz-Signature={hub_server.signature}")
                try:
                    hub.commit(logs, [Add(f"{kind}{status}.bin", LARGE + f"{kind}{status}".encode())], "one")
                    hub.read(logs, f"{kind}{status}.bin")
                except (HubPermanentError, HubUnavailable) as error:
                    texts += [str(error), repr(error), "".join(traceback.format_exception(error))]
                hub_server.mend()
    finally:
        constants.HF_DEBUG = debug
        hub_logging.set_verbosity_error()
    said = capfd.readouterr()
    texts += [said.out, said.err, caplog.text, repr(hub.credentials), str(vars(hub))]
    assert len(caplog.records) > 50 and len(texts) > 40
    for secret in hub_server.secrets():
        assert not any(secret in text for text in texts)
    assert hub_server.authorizations_at_storage() == []
    assert not any(
        secret in seen.url for seen in hub_server.requests for secret in (hub_server.token, hub_server.read_token)
    )
    assert {seen.authorization for seen in hub_server.requests if seen.host == "hub"} == {f"Bearer {hub_server.token}"}
    assert not any("torch" in seen.agent or "agent/" in seen.agent for seen in hub_server.requests)


@given(
    st.text(),
    st.text(alphabet="abcdefXYZ0123", min_size=6),
    st.sampled_from(["{0}{1}{0}", "Bearer {1}", "https://{1}@h/{0}", "https://h/x?sig={1}", "hf_{1} {0}"]),
)
def test_redacted_texts_hold_no_secret(text: str, secret: str, shape: str) -> None:
    shown = one_line(shape.format(text.replace("?", "").replace("{", ""), secret), [secret])
    assert secret not in shown and "\n" not in shown and len(shown) <= 300
    assert all(character.isprintable() or character == " " for character in shown if ord(character) < 160)


def test_redaction_knows_tokens_that_are_not_ours() -> None:
    assert redact("x hf_abcdefghijkl y") == "x *** y"
    assert redact("GET https://a:b@host/p?sig=1&x=2 done") == "GET https://***@host/p?... done"
    assert redact("Authorization: Bearer abc.def") == "Authorization: Bearer ***"
    assert redact("authorization: abc, x-amz-signature=abc&b=2") == "authorization: ***, x-amz-signature=***&b=2"


# ----------------------------------------------------------------------------- credentials
def test_where_the_token_comes_from(tmp_path: Path) -> None:
    named, home = tmp_path / "hub.json", tmp_path / "home"
    named.write_text('{"username": "bot", "email": "bot@lab", "auth_token": " hf_file "}')
    named.chmod(0o640)
    stored = home / ".cache/huggingface/token"
    stored.parent.mkdir(parents=True)
    stored.write_text("hf_stored\n")
    environment = {"HOME": str(home), "HF_TOKEN": "hf_environment"}

    def token(path: Path | None, environment: dict[str, str]) -> str | None:
        found = find_credentials(path, environment)
        assert "hf_" not in repr(found) and "hf_" not in str(found)
        return None if found.token is None else found.token.reveal()

    assert token(named, environment) == "hf_file" and read_credentials(named).user == "bot"
    assert read_credentials(named).mail == "bot@lab"
    assert token(None, environment) == "hf_environment"
    assert token(None, {"HOME": str(home)}) == "hf_stored"
    assert token(None, {"HOME": str(home), "HF_HOME": str(tmp_path)}) is None
    assert token(None, {"HF_TOKEN_PATH": str(stored)}) == "hf_stored"
    named.chmod(0o644)
    with pytest.raises(CredentialsError, match=r"every user of the machine can read it; type: chmod o-rwx"):
        token(named, environment)


@pytest.mark.parametrize("content", [b"", b"hf_abcdef", b"[]", b'{"auth_token": 7}', b'{"auth_token": ""}', b'{"auth_token": "hf_a\\nHost: x"}', b"\xff\xfe", b'{"auth_token": "' + b"x" * 70000 + b'"}'])  # fmt: skip
def test_a_file_without_a_token_is_refused_without_being_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hub.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(CredentialsError) as refused:
        find_credentials(path, {"HF_TOKEN": "hf_other"})  # a named file that is wrong is not passed over
    assert str(path) in str(refused.value) and "abcdef" not in str(refused.value) and "hf_a" not in str(refused.value)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), os.mkfifo])
def test_what_is_no_file_holds_no_token(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "hub.json")
    with pytest.raises(CredentialsError, match=r"hub\.json"):
        read_credentials(tmp_path / "hub.json")


def test_a_secret_shows_itself_nowhere() -> None:
    secret = Secret("hf_hidden")
    assert "hidden" not in f"{secret} {secret!r} {[secret]} {Credentials(secret)}" and secret == Secret("hf_hidden")
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)


# ----------------------------------------------------------------------------- views and waits
@given(
    st.binary(max_size=300),
    st.integers(0, 300),
    st.lists(st.tuples(st.sampled_from(["read", "seek", "end", "back"]), st.integers(-1, 350)), max_size=30),
)
def test_a_view_is_a_file_of_so_many_bytes(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, size: int, steps: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "viewed"
    path.write_bytes(content)
    size = min(size, len(content))
    with FileView(path, size) as view:
        model = io.BytesIO(content[:size])
        with path.open("ab") as stream:
            stream.write(b"grown")
        for what, number in steps:
            if what == "read":
                assert view.read(number) == model.read(number)
            elif what == "seek":
                assert view.seek(max(0, number)) == model.seek(max(0, number))
            elif what == "end":
                assert view.seek(0, os.SEEK_END) == model.seek(0, os.SEEK_END) == size
            else:
                view.seek(-min(view.tell(), abs(number)), os.SEEK_CUR)
                model.seek(-min(model.tell(), abs(number)), os.SEEK_CUR)
            assert view.tell() == model.tell()
        with pytest.raises(io.UnsupportedOperation):
            view.fileno()


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT"}, 40),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:01 GMT"}, 0),
        ({"Retry-After": "soon"}, 0),
        ({"Retry-After": "-3"}, 0),
        ({"Retry-After": "99999999999999"}, 0),
        ({"Retry-After": "9999999"}, 86400),
        ({"RateLimit": '"api";r=0;t=55', "Retry-After": "7"}, 55),
        ({"RateLimit": '"api";r=3;t=55'}, 0),
    ],
)
def test_what_an_answer_asks_to_wait(headers: dict[str, str], seconds: float) -> None:
    assert wait_of(headers, 60.0) == seconds
