"""A synchronisation that is killed at any point: the next one finishes it, and what is at the hub
is always whole.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from tests.tr11ops.hub.sync_cases import EVENTS, LOG, REPOSITORY, Mirror, record
from tr11ops.hub.masking import whole_events

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
