"""Rounds of synchronisation against the test's hub: what is sent, what is not, what stays; whatever happens meanwhile,
a kill at any point too.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.plugins.faulty_hub import FaultyHub
from tests.tr11ops.hub.sync_cases import EVENTS, LOG, REPOSITORY, Mirror, record
from tr11ops.hub.base import Credentials, Secret, hub_retries
from tr11ops.hub.client import Hub
from tr11ops.hub.masking import whole_events


def test_the_first_round_makes_a_private_repository(mirror):
    mirror.write(LOG, b"one\ntwo\n")
    mirror.write(EVENTS, record(b"first"))
    outcome = mirror.sync()
    assert mirror.there() == {LOG: b"one\ntwo\n", EVENTS: record(b"first")}
    assert mirror.server.repo(REPOSITORY).private
    files = mirror.server.history(REPOSITORY)[-1].files
    assert files[LOG].sha256 and files[EVENTS].sha256
    assert mirror.commits() == 2  # the rules, then the logs
    assert {send.path for send in outcome.sends} == {LOG, EVENTS}


def test_a_round_without_news_costs_one_question(mirror):
    mirror.write(LOG, b"one\n")
    mirror.sync()
    mirror.server.forget_requests()
    outcome = mirror.sync()
    assert not outcome.sends and outcome.files == 1 and outcome.bytes == 4
    assert mirror.server.counts() == {"info": 1}


# ----------------------------------------------------------------------------- only what is whole
def test_an_unfinished_line_waits_until_it_is_finished(mirror):
    mirror.write(LOG, b"one\ntw")
    mirror.sync()
    assert mirror.there() == {LOG: b"one\n"}
    assert not mirror.sync().sends
    mirror.add(LOG, b"o\nthree")
    assert [send.reason for send in mirror.sync().sends] == ["grown"]
    assert mirror.there() == {LOG: b"one\ntwo\n"}


def test_the_last_words_are_sent_when_no_one_writes_any_more(mirror):
    mirror.write(LOG, b"one\nKilled by sig")
    mirror.sync()
    mirror.now += 899
    assert not mirror.sync().sends
    mirror.now += 2
    mirror.sync()
    assert mirror.there() == {LOG: b"one\nKilled by sig"}
    mirror.add(LOG, b"nal 9\nnext\n")
    mirror.sync()
    assert mirror.there() == {LOG: b"one\nKilled by signal 9\nnext\n"}


def test_an_unfinished_record_waits(mirror):
    first, second = record(b"first"), record(b"second" * 100)
    mirror.write(EVENTS, first + second[:-1])
    mirror.sync()
    assert mirror.there() == {EVENTS: first}
    mirror.add(EVENTS, second[-1:])
    mirror.sync()
    assert mirror.there() == {EVENTS: first + second}


def test_what_is_no_event_file_is_taken_as_it_is_when_quiet(mirror):
    mirror.write(EVENTS, b"no event file at all, but it is called one")
    assert not mirror.sync().sends
    mirror.now += 1000
    mirror.sync()
    assert mirror.there()[EVENTS].startswith(b"no event")


def test_a_hole_in_a_log_is_not_sent_while_it_may_be_filled(mirror):
    mirror.write(LOG, b"one\n" + bytes(10) + b"\nthree\n")
    mirror.sync()
    assert mirror.there() == {LOG: b"one\n"}
    mirror.now += 1
    mirror.write(LOG, b"one\ntwo two tw\nthree\n")
    mirror.sync()
    assert mirror.there() == {LOG: b"one\ntwo two tw\nthree\n"}


# ----------------------------------------------------------------------- nothing at the hub is lost
def test_a_file_that_vanished_here_stays_there(mirror):
    mirror.write(LOG, b"one\n")
    mirror.write("logs/main/other.txt", b"other\n")
    mirror.sync()
    mirror.path("logs/main/other.txt").unlink()
    mirror.add(LOG, b"two\n")
    mirror.sync()
    assert mirror.there() == {LOG: b"one\ntwo\n", "logs/main/other.txt": b"other\n"}


@pytest.mark.parametrize("left", [b"", b"one\n", b"one\ntw"])
def test_a_file_that_was_cut_here_stays_whole_there(mirror, left):
    mirror.write(LOG, b"one\ntwo\n")
    mirror.sync()
    mirror.write(LOG, left)
    outcome = mirror.sync()
    assert mirror.there() == {LOG: b"one\ntwo\n"} and not outcome.sends
    assert [note.why for note in outcome.notes] == [
        f"has {len(left)} bytes here and 8 at the hub, which keeps them"
    ]
    mirror.write(LOG, b"one\ntwo\nthree\n")
    mirror.sync()
    assert mirror.there() == {LOG: b"one\ntwo\nthree\n"}


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize(
    "content", [b"1\n", b"another log\n", b"another log, longer than the old one\n"]
)
def test_a_replaced_file_takes_the_place_of_the_old_one_kept(mirror, content, anew):
    mirror.write(LOG, b"one\ntwo\nthree\n")
    mirror.sync(anew=anew)
    mirror.write(LOG, content)
    [send] = mirror.sync(anew=anew).sends
    assert (send.reason, send.superseded) == ("changed", "logs/main/main_log-superseded-1.txt")
    assert mirror.there() == {LOG: content, send.superseded: b"one\ntwo\nthree\n"}
    mirror.write(LOG, b"a third one, of which nothing was seen before\n")
    mirror.sync(anew=anew)
    assert mirror.there()["logs/main/main_log-superseded-2.txt"] == content
    assert len(mirror.there()) == 3 and mirror.commits() == 4


def test_a_small_file_of_git_itself_is_kept_too(mirror):
    mirror.server.create(REPOSITORY)
    mirror.server.put(REPOSITORY, LOG, b"by hand\n")
    mirror.write(LOG, b"mine\n")
    mirror.sync()
    assert mirror.there() == {LOG: b"mine\n", "logs/main/main_log-superseded-1.txt": b"by hand\n"}


def test_a_document_is_replaced_when_quiet_and_history_keeps_it(mirror):
    mirror.patterns = ("*.json",)
    mirror.write("logs/main/facts.json", b'{"a": 1}')
    assert not mirror.sync().sends
    mirror.touch("logs/main/facts.json", 1000)
    mirror.sync()
    mirror.write("logs/main/facts.json", b"{}")
    mirror.touch("logs/main/facts.json", 950)
    mirror.sync()
    assert mirror.there() == {"logs/main/facts.json": b"{}"}
    older = mirror.server.history(REPOSITORY)[-2]
    assert mirror.server.files(REPOSITORY, older.id)["logs/main/facts.json"] == b'{"a": 1}'
    assert not mirror.sync().sends


# ----------------------------------------------------------------------------- which files
def test_only_files_of_this_folder_that_fit_a_pattern_go(mirror, tmp_path):
    wanted = {
        "logs/main/main_log.txt",
        "logs/main/deep/er.txt",
        "logs/main/with space.txt",
        "logs/main/gr\u00fcn.txt",
    }
    for name in wanted:
        mirror.write(name, b"line\n")
    for name in (
        "logs/main/metrics.jsonl",
        "logs/.git/x.txt",
        "logs/main/.draft.txt",
        "top.txt",
        "tensorboard/a.txt",
    ):
        mirror.write(name, b"line\n")
    (tmp_path / "secret.txt").write_bytes(b"secret\n")
    folder = mirror.path("logs/main")
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "nothing.txt").symlink_to("nowhere")
    (folder / "same.txt").symlink_to("main_log.txt")
    (folder / "loop").symlink_to("..")
    (mirror.path("logs") / "far").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.txt")
    (folder / "line\nfeed.txt").write_bytes(b"x\n")
    (folder / os.fsdecode(b"\xff.txt")).write_bytes(b"x\n")
    (folder / "back\\slash.txt").write_bytes(b"x\n")
    outcome = mirror.sync()
    assert set(mirror.there()) == wanted | {"logs/main/same.txt"}
    assert {(note.path, note.why.split()[-1]) for note in outcome.notes} == {
        ("logs/main/out.txt", "folder"),
        ("logs/main/nothing.txt", "nothing"),
        ("logs/far", "folder"),
        ("logs/main/pipe.txt", "file"),
        ("logs/main/line?feed.txt", "hold"),
        ("logs/main/?.txt", "hold"),
        ("logs/main/back\\slash.txt", "hold"),
    }
    assert all(b"secret" not in content for content in mirror.there().values())


def test_files_of_the_repositorys_root_are_not_logs(mirror):
    mirror.patterns = ("*",)
    for name in ("README.md", "status.json", ".gitattributes", "notes.txt"):
        mirror.write(name, b"mine\n")
        mirror.touch(name, 1000)
    outcome = mirror.sync()
    assert mirror.there() == {"notes.txt": b"mine\n"}
    assert {note.path for note in outcome.notes} == {"README.md", "status.json"}


# ----------------------------------------------------------------------------- large files
def test_another_owners_repository_gets_the_rules_before_a_log(mirror):
    mirror.server.create(REPOSITORY)
    mirror.server.put(REPOSITORY, ".gitattributes", b"*.bin filter=lfs\n# ours\nlogs/** -filter")
    mirror.server.put(REPOSITORY, LOG, b"small\n")
    mirror.write(LOG, b"small\n" + b"x" * 99 + b"\n" * (11 << 20))
    mirror.sync()
    rules = mirror.server.files(REPOSITORY)[".gitattributes"]
    assert (
        rules
        == b"*.bin filter=lfs\n# ours\nlogs/** -filter\n*.txt filter=lfs diff=lfs merge=lfs -text\n"
    )
    assert mirror.server.history(REPOSITORY)[-1].files[LOG].sha256
    assert mirror.there() == {LOG: mirror.path(LOG).read_bytes()}
    assert mirror.commits() == 4


def test_a_very_large_log_goes_in_parts(mirror):
    mirror.server.create(REPOSITORY)
    mirror.server.configure(multipart_from=10_000, part_bytes=4096)
    mirror.write(LOG, b"line\n" * 5000 + b"unfinished")
    mirror.sync()
    assert mirror.there() == {LOG: b"line\n" * 5000} and mirror.server.counts()["lfs-part"] == 7


NAMES = ("logs/main/a.txt", "logs/main/b.txt")
DEEDS = (
    "append",
    "append",
    "append",
    "begin",
    "cut",
    "rewrite",
    "replace",
    "remove",
    "wait",
    "forget",
    "scribble",
    "tidy",
)
records = st.lists(
    st.tuples(st.sampled_from(DEEDS), st.sampled_from(NAMES), st.integers(0, 99)), max_size=14
)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyHub]:
    with FaultyHub() as running:
        running.commit_limit = None
        yield running


def do(mirror: Mirror, deed: str, name: str, number: int) -> None:
    path, old = mirror.path(name), b""
    if path.exists():
        old = path.read_bytes()
    mirror.now += 1
    match deed:
        case "append":
            mirror.write(name, old + b"line %d\n" % number)
        case "begin":
            mirror.write(name, old + b"unfinished %d" % number)
        case "cut":
            mirror.write(name, old[: number % (len(old) + 1)])
        case "rewrite":
            mirror.write(name, bytes(reversed(old)) + b"%d\n" % number)
        case "replace":
            mirror.write(name, b"another %d\n" % number)
        case "remove":
            path.unlink(missing_ok=True)
        case "wait":
            mirror.now += 1000
        case "forget":
            (mirror.directory.paths.state / "sync" / "state.json").unlink(missing_ok=True)
        case "scribble":
            mirror.server.put(REPOSITORY, name, b"by someone %d\n" % number)
        case "tidy":
            mirror.server.put(REPOSITORY, "README.md", b"%d" % number)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(records, st.randoms(use_true_random=False))
def test_nothing_is_ever_lost(server: FaultyHub, steps, chance: random.Random) -> None:
    server.hub.repos.clear()
    server.create(REPOSITORY)
    with TemporaryDirectory() as folder:
        hub = Hub(server.url, Credentials(Secret(server.token)), hub_retries(5.0), 5.0)
        mirror = Mirror(Path(folder), hub, server, now=time.time() - 1e6)
        mirror.path("logs/main").mkdir(parents=True)
        for deed, name, number in steps:
            do(mirror, deed, name, number)
            if chance.random() < 0.6:
                check_round(mirror)
        check_round(mirror)
        count = mirror.commits()
        assert not mirror.sync(anew=False).commits and mirror.commits() == count


def check_round(mirror: Mirror) -> None:
    before = mirror.there()
    outcome = mirror.sync(anew=False)
    after = mirror.there()
    noted = {note.path for note in outcome.notes}
    for path, content in before.items():
        stem = path.removesuffix(".txt")
        kept = [
            other
            for name, other in after.items()
            if name == path or name.startswith(f"{stem}-superseded-")
        ]
        assert any(other.startswith(content) for other in kept), path
    for name in NAMES:
        if mirror.path(name).exists() and name not in noted:
            here = mirror.path(name).read_bytes()
            whole = here[: here.rfind(b"\n") + 1]
            there = after.get(name, b"")
            assert here.startswith(there) and len(there) >= len(whole)


KILLS = 50


@pytest.fixture
def child(tmp_path: Path, hub_server):
    environment = {**os.environ, "HF_TOKEN": hub_server.token}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.tr11ops.hub.sync_child", str(tmp_path), hub_server.url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True,
    ) as process:  # fmt: skip
        yield process
        process.stdin.close()


def one_round(child: subprocess.Popen[str], seconds: float | None = None) -> int:
    """The exit code of a round that is killed after so many seconds."""
    child.stdin.write("go\n")
    child.stdin.flush()
    number = int(child.stdout.readline())
    if seconds is not None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):  # it was faster
            os.kill(number, signal.SIGKILL)
    return int(child.stdout.readline())


def test_fifty_kills_lose_nothing_and_repeat_nothing(tmp_path, hub, hub_server, child):
    chance = random.Random(11)
    mirror = Mirror(tmp_path, hub, hub_server)
    names = [LOG, "logs/main/second.txt", EVENTS]
    ends = []
    took = 0.0
    for number in range(
        -2, KILLS
    ):  # the first makes the repository, the second tells how long a round takes
        mirror.now = time.time()
        mirror.add(names[0], f"\nline {number} of the log, and the next one is unf".encode())
        mirror.add(names[1], f"line {number}\n".encode())
        mirror.add(names[2], record(b"x" * (number + 2)))
        if number % 10 == 9:
            mirror.add(f"logs/main/new-{number}.txt", b"new\n")
        began = time.monotonic()
        if number < 0:
            assert one_round(child) == 0
            took = time.monotonic() - began
        else:
            ends.append(one_round(child, chance.random() * took))
    assert ends.count(-signal.SIGKILL) >= KILLS // 3, ends
    assert one_round(child) == 0
    there = mirror.there()
    folder = mirror.directory.paths.published
    here = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}
    assert here.keys() == there.keys()
    for path, content in here.items():
        assert there[path] == content[: len(there[path])] and len(content) - len(there[path]) < 100
    commits = hub_server.history(REPOSITORY)
    for before, after in pairwise(commits):
        assert before.files != after.files  # nothing is committed twice
        assert before.files.keys() <= after.files.keys()
    for commit in commits[1:]:
        for path, content in hub_server.files(REPOSITORY, commit.id).items():
            if path.endswith(".txt"):
                assert content.endswith(b"\n") and there[path].startswith(content)
            elif "tfevents" in path:
                assert whole_events(
                    lambda start, length, data=content: data[start : start + length],
                    0,
                    len(content),
                ).end == len(content)
    assert not any("superseded" in path for path in there)
    count = len(commits)
    assert one_round(child) == 0
    assert len(hub_server.history(REPOSITORY)) == count
