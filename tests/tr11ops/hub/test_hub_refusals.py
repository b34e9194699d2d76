"""What the hub client refuses, keeps secret, and waits for."""

from __future__ import annotations

import io
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.plugins.faulty_hub import FaultyHub
from tests.tr11ops.hub.repositories import LARGE, LOGS
from tr11ops.base.errors import (
    FileChanged,
    HubConflict,
    HubMissing,
    HubPermanentError,
    HubUnavailable,
    PrivateFileError,
)
from tr11ops.base.http import wait_of
from tr11ops.base.redact import one_line, redact
from tr11ops.hub.base import (
    Add,
    Credentials,
    Repository,
    Secret,
    endpoint_of,
    find_credentials,
    read_credentials,
)
from tr11ops.hub.client import Hub
from tr11ops.hub.committing import FileView


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
    hub: Hub,
    hub_server: FaultyHub,
    hub_waits: list[float],
    logs: Repository,
    status: int,
    words: str,
) -> None:
    hub_server.fail(
        "commit",
        status,
        text=f"no:\nbad token {hub_server.token}\x1b[31m at https://u:p@host/x?sig=1",
    )
    with pytest.raises(HubPermanentError) as refused:
        hub.commit(logs, [Add("b.txt", b"text")], "one")
    text = str(refused.value)
    assert (
        words in text
        and "\n" not in text
        and "\x1b" not in text
        and hub_server.token not in text
        and ":p@" not in text
    )
    assert refused.value.status == status and hub_waits == []
    assert isinstance(refused.value, HubMissing) == (status in {404, 410})


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (403, "Private repository storage limit reached, please upgrade your plan", "storage or plan is at its limit"),
        (403, "Your storage patterns tripped our internal systems!", "storage or plan is at its limit"),
        (402, "Payment required", "storage or plan is at its limit"),
        (403, "Access to dataset a/b is restricted and you are not in the authorized list", "conditions are to be accepted"),
        (403, "This repository is disabled", "it is shut there; ask the hub"),
        (400, "rate limit for repository commits reached", "asked too often for now; try again later"),
        (403, "Come back on Monday", "it refuses this for a reason of its own (Come back on Monday)"),
        (409, "A commit is being made", "someone else is changing it (A commit is being made)"),
    ],
)  # fmt: skip
def test_the_hub_s_own_reason_is_said_and_the_token_is_not_blamed_for_another(
    hub: Hub, hub_server: FaultyHub, logs: Repository, status: int, said: str, words: str
) -> None:
    hub_server.fail("commit", status, text=said)
    with pytest.raises(HubPermanentError) as refused:
        hub.commit(logs, [Add("b.txt", b"text")], "one")
    text = str(refused.value)
    assert f"answers {status}: " in text and words in text and said in text and "\n" not in text
    assert "token of" not in text and "write access" not in text


def test_the_wrong_token_and_none(
    hub_server: FaultyHub, make_hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else_entirely")
    hub_server.create(LOGS.name)
    with pytest.raises(HubPermanentError, match="the token of the test is not valid") as refused:
        make_hub("hf_wrong_wrong").ensure_repository(LOGS)
    assert "hf_wrong_wrong" not in str(refused.value)
    with pytest.raises(
        HubPermanentError, match=r"401: no token; name hub\.credentials_file, set HF_TOKEN"
    ):
        make_hub(None).head(LOGS)
    assert {seen.authorization for seen in hub_server.requests} == {"Bearer hf_wrong_wrong", None}
    reader = make_hub(hub_server.read_token)
    assert reader.head(LOGS)
    with pytest.raises(
        HubPermanentError, match="403: the token of the test has no permission for this"
    ):
        reader.commit(LOGS, [Add("b.txt", b"text")], "one")
    with pytest.raises(HubPermanentError, match="403"):
        make_hub().ensure_repository(Repository("elsewhere/logs"))
    hub_server.create("science/open", private=False)
    assert make_hub(None).head(Repository("science/open"))


def test_a_regular_file_may_not_be_large(hub: Hub, hub_server: FaultyHub, logs: Repository) -> None:
    """The hub asks for what is above 10 MiB as a large object without being told; one that came
    otherwise is refused.
    """
    hub.commit(logs, [Add("logs/main_log.txt", b"x" * (11 << 20))], "large")
    assert hub_server.history(logs.name)[-1].files["logs/main_log.txt"].sha256 is not None
    with pytest.raises(Exception, match="larger than 10 MiB"):
        hub_server.put(logs.name, "other.txt", b"x" * (11 << 20))


def test_someone_else_commits_meanwhile(hub: Hub, hub_server: FaultyHub, logs: Repository) -> None:
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
    hub: Hub, hub_server: FaultyHub, logs: Repository, tmp_path: Path
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
    hub: Hub, hub_server: FaultyHub, logs: Repository, hub_waits: list[float]
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
    hub.commit(
        logs,
        [Add(f"{number}.bin", LARGE + bytes([number])) for number in range(3)],
        "several at once",
    )
    assert capfd.readouterr() == ("", "")


def test_offline_by_wish(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubPermanentError, match="HF_HUB_OFFLINE is set"):
        hub.head(LOGS)


# ----------------------------------------------------------------------------- secrets
def test_no_secret_leaves_by_any_way(
    hub_server: FaultyHub,
    hub: Hub,
    logs: Repository,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Everything that is printed, logged or raised, with the library's logging turned up, while all
    kinds of calls fail.
    """
    from huggingface_hub import constants, logging as hub_logging

    texts: list[str] = []
    caplog.set_level(logging.DEBUG)
    assert hub.head(logs)  # installs what keeps quiet; then the user turns it up again
    hub_logging.set_verbosity_debug()
    for name in ("huggingface_hub", "httpx2", "httpcore2.http11", "httpcore2.connection"):
        caplog.set_level(logging.DEBUG, name)
    debug, constants.HF_DEBUG = constants.HF_DEBUG, True
    try:
        for kind in (
            "info",
            "preupload",
            "lfs-batch",
            "lfs-put",
            "lfs-verify",
            "commit",
            "storage-get",
        ):
            for status in (401, 403, 404, 500):
                hub_server.fail(
                    kind,
                    status,
                    text=f"Bearer {hub_server.token} ?X-Amz-Signature={hub_server.signature}",
                )
                try:
                    hub.commit(
                        logs,
                        [Add(f"{kind}{status}.bin", LARGE + f"{kind}{status}".encode())],
                        "one",
                    )
                    hub.read(logs, f"{kind}{status}.bin")
                except (HubPermanentError, HubUnavailable) as error:
                    texts += [str(error), repr(error), "".join(traceback.format_exception(error))]
                hub_server.heal()
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
        secret in seen.url
        for seen in hub_server.requests
        for secret in (hub_server.token, hub_server.read_token)
    )
    assert {seen.authorization for seen in hub_server.requests if seen.host == "hub"} == {
        f"Bearer {hub_server.token}"
    }
    assert not any("torch" in seen.agent or "agent/" in seen.agent for seen in hub_server.requests)


@given(
    st.text(),
    st.text(alphabet="abcdefXYZ0123", min_size=6),
    st.sampled_from(
        ["{0}{1}{0}", "Bearer {1}", "https://{1}@h/{0}", "https://h/x?sig={1}", "hf_{1} {0}"]
    ),
)
def test_redacted_texts_hold_no_secret(text: str, secret: str, shape: str) -> None:
    shown = one_line(shape.format(text.replace("?", "").replace("{", ""), secret), [secret])
    assert secret not in shown and "\n" not in shown and len(shown) <= 300
    assert all(
        character.isprintable() or character == " " for character in shown if ord(character) < 160
    )


def test_redaction_knows_tokens_that_are_not_ours() -> None:
    assert redact("x hf_abcdefghijkl y") == "x *** y"
    assert redact("GET https://a:b@host/p?sig=1&x=2 done") == "GET https://***@host/p?... done"
    assert redact("Authorization: Bearer abc.def") == "Authorization: Bearer ***"
    assert (
        redact("authorization: abc, x-amz-signature=abc&b=2")
        == "authorization: ***, x-amz-signature=***&b=2"
    )


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
    with pytest.raises(
        PrivateFileError, match=r"every user of the machine can read it; type: chmod o-rwx"
    ):
        token(named, environment)


@pytest.mark.parametrize("content", [b"", b"hf_abcdef", b"[]", b'{"auth_token": 7}', b'{"auth_token": ""}', b'{"auth_token": "hf_a\\nHost: x"}', b"\xff\xfe", b'{"auth_token": "' + b"x" * 70000 + b'"}'])  # fmt: skip
def test_a_file_without_a_token_is_refused_without_being_shown(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "hub.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(PrivateFileError) as refused:
        # a named file that is wrong is not passed over
        find_credentials(path, {"HF_TOKEN": "hf_other"})
    assert (
        str(path) in str(refused.value)
        and "abcdef" not in str(refused.value)
        and "hf_a" not in str(refused.value)
    )


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), os.mkfifo])
def test_what_is_no_file_holds_no_token(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "hub.json")
    with pytest.raises(PrivateFileError, match=r"hub\.json"):
        read_credentials(tmp_path / "hub.json")


def test_a_secret_shows_itself_nowhere() -> None:
    secret = Secret("hf_hidden")
    assert (
        "hidden" not in f"{secret} {secret!r} {[secret]} {Credentials(secret)}"
        and secret == Secret("hf_hidden")
    )
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)


# ----------------------------------------------------------------------------- views and waits
@given(
    st.binary(max_size=300),
    st.integers(0, 300),
    st.lists(
        st.tuples(st.sampled_from(["read", "seek", "end", "back"]), st.integers(-1, 350)),
        max_size=30,
    ),
)
def test_a_view_is_a_file_of_so_many_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    size: int,
    steps: list[tuple[str, int]],
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
