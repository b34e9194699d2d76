"""What a training says by itself: with `tr11_beat.py`, and by the reporter of Hugging Face's Trainer."""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.tr11ops.trainers.unchanged import HUGGING_FACE, STEPS, train
from tr11ops.cli.main import execute
from tr11ops.trainers import tr11_beat
from tr11ops.trainers.speech import Speech
from tr11ops.trainers.spoken import (
    Listener,
    TrainerWord,
    environment_for,
    leave_request,
    posted_word,
    read_words,
)

BEAT = Path(tr11_beat.__file__)
LOOP = """
import os, sys, time
from tr11_beat import asked, beat
rank = int(os.environ["RANK"])
for step in range(int(sys.argv[1])):
    beat(step + 1, loss=2.5, total=99, phase="training")
    time.sleep(0.01)
    wish = asked()
    if wish:
        print(wish, step + 1, flush=True)
    if wish == "stop":
        break
beat(step + 1, loss=float("nan"), total=99, phase="ending")
"""


def vendored(folder: Path, variable: str | None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file as a script beside it imports it, with the variable of tr11 set to this."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    monkeypatch.delenv("TR11_BEAT", raising=False)
    if variable is not None:
        monkeypatch.setenv("TR11_BEAT", variable)
    copy = folder / "tr11_beat.py"
    shutil.copy(BEAT, copy)
    spec = importlib.util.spec_from_file_location("vendored_beat", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def passes(module: ModuleType) -> None:
    """As if a second had passed."""
    module._BEAT.due = module._BEAT.look_due = module._BEAT.rest = 0.0


def words(folder: Path) -> tuple[TrainerWord, ...]:
    return read_words(folder, time.time())


# ----------------------------------------------------------------------------- tr11_beat.py
def test_a_word_is_read_as_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = vendored(tmp_path, str(tmp_path), monkeypatch)
    monkeypatch.setenv("RANK", "3")
    beat.beat(7, loss=2.5, tokens=4096, phase="training", total=100)
    (word,) = words(tmp_path)
    assert word == TrainerWord(3, 7, 2.5, "training", 100, word.time, tokens=4096)
    assert abs(word.time - time.time()) < 60


def test_a_word_a_second_and_a_new_phase_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = vendored(tmp_path, str(tmp_path), monkeypatch)
    beat.SLOW = 1000.0
    beat.INTERVAL = 1000.0
    beat.beat(1)
    beat.beat(2)
    assert words(tmp_path)[0].step == 1
    beat.beat(3, phase="saving")
    assert (words(tmp_path)[0].step, words(tmp_path)[0].phase) == (3, "saving")
    for step in range(
        4, 104
    ):  # a phase that changes with each step is no reason to write each time
        beat.beat(step, phase=("training", "saving")[step % 2])
    assert words(tmp_path)[0].step == 12
    passes(beat)
    beat.beat(104)
    assert words(tmp_path)[0].step == 104


def test_a_slow_folder_is_left_alone_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = vendored(tmp_path, str(tmp_path), monkeypatch)

    def slow(path: Path, content: bytes) -> None:
        time.sleep(0.06)

    monkeypatch.setattr(beat, "_replace", slow)
    began = time.monotonic()
    beat.beat(1)
    assert beat._BEAT.rest > began + 5
    passed = time.monotonic() + 2
    monkeypatch.setattr(beat.time, "monotonic", lambda: passed)
    beat.beat(2, phase="saving")
    assert beat._BEAT.phase == "training"


@pytest.mark.parametrize("variable", [None, ""])
def test_without_tr11_nothing_is_written(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = vendored(tmp_path, variable, monkeypatch)
    beat.beat(object(), loss=object(), phase=7)
    assert beat.asked() == ""
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["tr11_beat.py"]


class _Hostile:
    """A value that fails at all that is done with it."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)

    def __float__(self) -> float:
        raise MemoryError

    def __index__(self) -> int:
        raise RecursionError

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


HOSTILE: list[object] = [
    None, "7", -1, 10**400, 1.5, True, [1], float("nan"), float("inf"), -float("inf"), b"x",
    "x" * 10**6, "\ud800", "a\0b", _Hostile(), {}, object(),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_no_value_breaks_a_training(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = HOSTILE[place]
    beat = vendored(tmp_path, str(tmp_path), monkeypatch)
    for arguments in (
        {"step": value},
        {"step": 1, "loss": value},
        {"step": 1, "tokens": value},
        {"step": 1, "phase": value},
        {"step": 1, "total": value},
    ):
        passes(beat)
        beat.beat(**arguments)
        for word in words(tmp_path):
            assert word.step in (None, 1)
            assert word.loss is None or math.isnan(word.loss) or word.loss in (1.5, -1.0)
    assert not list(tmp_path.glob(".rank*"))


def test_a_loss_that_is_no_number_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = vendored(tmp_path, str(tmp_path), monkeypatch)
    for loss in (math.nan, math.inf, -math.inf):
        passes(beat)
        beat.beat(3, loss=loss)
        (word,) = words(tmp_path)
        assert word.loss is not None and math.isnan(word.loss)
    passes(beat)
    beat.beat(4, loss=10**400)  # too large for a number, so that none is known
    assert words(tmp_path)[0].loss is None


def test_no_folder_breaks_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("")
    for folder in ("/nowhere/at/all", str(a_file), "/dev/full", "/proc/self", "a\0b"[:1] * 5000):
        beat = vendored(tmp_path, folder, monkeypatch)
        beat.beat(1, loss=1.0)
        assert beat.asked() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_breaks_no_training_and_leaves_the_old_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = vendored(tmp_path, str(tmp_path), monkeypatch)
    beat.beat(1)
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        return write(os.open("/dev/full", os.O_WRONLY), content)

    with monkeypatch.context() as patch:
        patch.setattr(beat.os, "write", full)
        passes(beat)
        beat.beat(2)
    with monkeypatch.context() as patch:  # half of it went onto the disk
        patch.setattr(beat.os, "write", lambda descriptor, content: write(descriptor, content[:9]))
        passes(beat)
        beat.beat(3)
    assert words(tmp_path)[0].step == 1
    assert not list(tmp_path.glob(".rank*"))
    passes(beat)
    beat.beat(4)
    assert words(tmp_path)[0].step == 4


def test_threads_and_forks_leave_whole_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = vendored(tmp_path, str(tmp_path), monkeypatch)
    beat.INTERVAL, beat.SLOW = 0.0, 1000.0

    def loop() -> None:
        for step in range(200):
            beat.beat(step, loss=1.0)
            beat.asked()

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if child == 0:  # in the middle of what the threads do
        os.environ["RANK"] = "1"
        beat.beat(77)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    while any(thread.is_alive() for thread in threads):
        assert all(word.step is not None for word in words(tmp_path))
    ranks = {word.rank: word.step for word in words(tmp_path)}
    assert set(ranks) == {0, 1} and ranks[1] == 77
    assert not list(tmp_path.glob(".rank-0*"))


def test_it_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a ratio: no more than three dozen calls of an empty function. Without tr11 it is ten."""
    off = vendored(tmp_path, None, monkeypatch)
    on = vendored(tmp_path, str(tmp_path), monkeypatch)
    on.beat(1)
    on._BEAT.due = time.monotonic() + 1000

    def nothing(step: int, loss: float = 0.0) -> None:
        pass

    def cost(call: object) -> float:
        took = []
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(2000):
                call(5, loss=1.0)  # type: ignore[operator]
            took.append(time.perf_counter() - began)
        return min(took)

    empty = cost(nothing)
    assert cost(off.beat) < 10 * empty
    assert cost(on.beat) < 36 * empty


def interpreters() -> list[str]:
    """Pythons of this machine, the oldest that is promised among them where it is there."""
    known = (shutil.which(f"python3.{minor}") for minor in (8, 9, 12, 13))
    pyenv = Path.home() / ".pyenv/versions"
    roots = sorted(str(path) for path in pyenv.glob("3.*/bin/python3"))
    found = [sys.executable, *(path for path in known if path), *roots]
    runs = "import sys; sys.exit(sys.version_info < (3, 8))"
    return [
        path
        for path in found
        if not subprocess.run([path, "-c", runs], capture_output=True).returncode
    ]


def test_two_ranks_of_a_script_speak_and_are_asked_in_every_python(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    shutil.copy(BEAT, tmp_path)
    for number, python in enumerate(interpreters()):
        folder = tmp_path / str(number)
        folder.mkdir()
        environment = {**os.environ, **environment_for(folder, None)}
        wish = leave_request(folder, "save")
        ranks = [
            subprocess.Popen(
                [python, "loop.py", "9999"],
                cwd=tmp_path,
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        until = time.monotonic() + 60
        while [word.heard for word in words(folder)] != [wish, wish]:
            assert time.monotonic() < until, python
            time.sleep(0.05)
        leave_request(folder, "stop")
        said = [rank.communicate(timeout=60)[0].split() for rank in ranks]
        assert [one[0::2] for one in said] == [["save", "stop"]] * 2, python
        last = words(folder)
        assert [(word.rank, word.phase) for word in last] == [(0, "ending"), (1, "ending")]
        assert all(math.isnan(word.loss or 0) and word.total == 99 for word in last)
        assert [str(word.step) for word in last] == [one[3] for one in said]


def test_a_wish_to_save_is_told_once_and_one_to_stop_until_it_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = vendored(tmp_path, str(tmp_path), monkeypatch)

    def next_look() -> str:
        passes(beat)
        found: str = beat.asked()
        return found

    assert next_look() == ""
    leave_request(tmp_path, "save")
    assert beat.asked() == ""  # not before a second has passed
    assert [next_look(), beat.asked(), next_look()] == ["save", "", ""]
    leave_request(tmp_path, "save")
    assert next_look() == "save"
    leave_request(tmp_path, "stop")
    assert [next_look(), beat.asked(), next_look()] == ["stop"] * 3
    (tmp_path / "asked").unlink()
    assert [next_look(), beat.asked()] == ["", ""]
    for text in ("", "stop", "1 kill", "x stop", "\xff", "9" * 5000):
        (tmp_path / "asked").write_text(text)
        assert next_look() == ""
    (tmp_path / "asked").unlink()
    os.mkfifo(tmp_path / "asked")
    assert next_look() == ""


def test_what_is_no_word_is_left_out(tmp_path: Path) -> None:
    now = 1_790_000_000.0
    good = {
        "rank": 0, "pid": 1, "time": now, "step": 5, "loss": 1.0, "tokens": None,
        "phase": "validating", "total": None, "heard": 0,
    }  # fmt: skip
    (tmp_path / "rank-0.json").write_text(json.dumps(good))
    bad = [
        "", "{", "[]", "null", json.dumps(good), json.dumps({**good, "rank": 5, "step": -1}),
        json.dumps({**good, "rank": 6, "step": "7"}), json.dumps({**good, "rank": 7, "time": now + 1e6}),
        json.dumps({**good, "rank": 8, "time": None}), json.dumps({**good, "rank": 9, "loss": [1]}),
        json.dumps({**good, "rank": 10, "more": "x" * 5000}), "[" * 3000,
    ]  # fmt: skip
    for rank, text in enumerate(bad, 1):
        (tmp_path / f"rank-{rank}.json").write_text(text)
    (tmp_path / "rank-90.json").mkdir()
    os.mkfifo(tmp_path / "rank-91.json")
    (tmp_path / "rank-92.json").symlink_to("rank-92.json")
    (tmp_path / ".rank-0.json.7-7").write_text(json.dumps(good))
    assert read_words(tmp_path, now) == (TrainerWord(0, 5, 1.0, None, None, now),)
    assert read_words(tmp_path / "none", now) == ()


def test_the_file_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["trainer", "beat"]) == 0
    assert capsys.readouterr().out == BEAT.read_text()


# ----------------------------------------------------------------------------- Hugging Face's Trainer
@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    with Listener(tmp_path) as one:
        yield one


def post(listener: Listener, body: bytes, token: str | None = None, **headers: str) -> int:
    """The status that a post is answered with."""
    port = int(listener.url.split(":")[2].split("/")[0])
    connection = http.client.HTTPConnection(Listener.ADDRESS, port, timeout=20)
    bearer = token or listener.token_file.read_text()
    sent = {"Authorization": f"Bearer {bearer}", **headers}
    connection.request("POST", "/trainer", body, sent)
    status = connection.getresponse().status
    connection.close()
    return status


def status_of(percent: int, **metrics: object) -> bytes:
    listed = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    return json.dumps(
        {"trainerStatus": {"progressPercentage": percent, "metrics": listed}}
    ).encode()


def test_posts_are_words(listener: Listener) -> None:
    assert listener.word is None
    for body, step, loss, phase in (
        (status_of(0, total_steps=24), None, None, "training"),
        (status_of(25, current_step=6, total_steps=24, loss="2.5"), 6, 2.5, "training"),
        (status_of(100, loss="2.5"), 6, 2.5, "ending"),
    ):
        assert post(listener, body) == 200
        word = listener.word
        assert word is not None
        assert word == TrainerWord(0, step, loss, phase, 24, word.time)


def test_a_caller_without_the_token_and_a_body_that_is_none_are_refused(listener: Listener) -> None:
    body = status_of(25, current_step=6, total_steps=24)
    assert post(listener, body, token="another") == 403
    assert post(listener, b"x" * (65 << 10)) == 413
    assert post(listener, body, **{"Content-Length": "x"}) == 413
    for text in (b"", b"{}", b"[]", b"\xff", b'{"trainerStatus": 7}', b"[" * 60000):
        assert post(listener, text) == 400
    assert listener.word is None
    assert listener.token_file.stat().st_mode & 0o777 == 0o600


def test_a_post_says_no_more_than_it_can_know() -> None:
    for metrics in ({"current_step": "-3"}, {"current_step": "9" * 30}, {"current_step": "x"}):
        word = posted_word(status_of(25, **metrics), 1.0, None)
        assert word is not None and word.step is None
    word = posted_word(status_of(25, current_step=3, loss="nan"), 1.0, None)
    assert word is not None and word.loss is not None and math.isnan(word.loss)


def test_callers_that_say_nothing_neither_crowd_it_for_long_nor_hold_it_up(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    listener = Listener(tmp_path)
    port = int(listener.url.split(":")[2].split("/")[0])
    silent = [socket.create_connection((Listener.ADDRESS, port)) for _ in range(40)]
    until = time.monotonic() + 30
    while True:  # those are given up, and a reporter is heard
        try:
            assert post(listener, status_of(25, current_step=6)) == 200
            break
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < until
            time.sleep(0.1)
    more = [socket.create_connection((Listener.ADDRESS, port)) for _ in range(8)]
    listener.close()
    assert set(threading.enumerate()) <= before  # those of earlier tests may end meanwhile
    assert not listener.token_file.exists()
    with pytest.raises(OSError):
        socket.create_connection((Listener.ADDRESS, port))
    for one in (*silent, *more):
        one.close()


def test_the_environment_lets_it_speak_past_a_proxy_and_takes_no_ones_place(
    listener: Listener, tmp_path: Path
) -> None:
    found = environment_for(tmp_path, listener, {})
    assert found == {
        "TR11_BEAT": str(tmp_path),
        "KUBEFLOW_TRAINER_SERVER_URL": listener.url,
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(listener.token_file),
    }
    proxied = environment_for(tmp_path, listener, {"http_proxy": "http://p", "NO_PROXY": "a,b"})
    assert proxied["no_proxy"] == "a,b,127.0.0.1"
    kubeflow = environment_for(tmp_path, listener, {"KUBEFLOW_TRAINER_SERVER_URL": "https://k"})
    assert kubeflow == {"TR11_BEAT": str(tmp_path)}


def test_an_unchanged_trainer_of_hugging_face_is_heard(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # it would get all words, and lose them
    for name, value in environment_for(tmp_path, listener).items():
        monkeypatch.setenv(name, value)
    heard: list[TrainerWord] = []
    hear = listener.hear

    def recorded(body: bytes) -> bool:
        taken = hear(body)
        if taken and listener.word is not None:
            heard.append(listener.word)
        return taken

    monkeypatch.setattr(listener, "hear", recorded)
    log = tmp_path / "train.log"
    assert train(HUGGING_FACE, tmp_path / "out", log) == 0, log.read_text(errors="replace")
    assert [heard[0].step, heard[0].total, heard[0].phase] == [None, STEPS, "training"]
    assert heard[-1].phase == "ending"
    assert {word.total for word in heard} == {STEPS}
    steps = [word.step for word in heard if word.step is not None]
    assert steps == sorted(steps)
    assert heard[-1].rank == 0


def test_who_only_reports_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speech = Speech(has_reporter=True, say=print)
    try:
        given = speech.environment()
        token = Path(given["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text()
        port = int(given["KUBEFLOW_TRAINER_SERVER_URL"].split(":")[2].split("/")[0])
        connection = http.client.HTTPConnection(Listener.ADDRESS, port, timeout=20)
        sent = {"Authorization": f"Bearer {token}"}
        connection.request("POST", "/trainer", status_of(25, current_step=6), sent)
        assert connection.getresponse().status == 200
        connection.close()
        assert speech.words()[0].step == 6 and not speech.can_be_asked()
        vendored(tmp_path, given["TR11_BEAT"], monkeypatch).beat(7)
        assert speech.words()[0].step == 7 and speech.can_be_asked()
    finally:
        speech.close()
