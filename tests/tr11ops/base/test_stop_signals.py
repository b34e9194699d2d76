"""Which processes count as living; a stop that a signal handler sets while the same thread waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.waiting import until
from tr11ops.base.processes import is_living
from tr11ops.base.stop_signals import StopEvent, obeying
from tr11ops.cluster.local_processes import descendants

# A signal at each instruction of a wait, one after the other: with `threading.Event` one of them
# comes while the wait holds the lock that `set` takes, and nothing goes on.
EVERYWHERE = """
import signal, sys
from tr11ops.base.stop_signals import StopEvent

def trace(frame, event, argument):
    global left
    frame.f_trace_opcodes = True
    if event == "opcode":
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGTERM)
    return trace

def instructions_until_signal(place):
    global left, stop
    left, stop = place, StopEvent()
    sys.settrace(trace)
    try:
        stop.wait(0.0)
    finally:
        sys.settrace(None)
    return place - left

signal.signal(signal.SIGTERM, lambda *_: stop.set())
place = 1
while instructions_until_signal(place) >= place:
    assert stop.is_set()
    place += 1
print("signals", place - 1)
"""


def test_a_signal_in_the_middle_of_a_wait() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERYWHERE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 20


def test_a_long_wait_ends_with_the_signal() -> None:
    stop, began = StopEvent(), time.monotonic()
    timer = threading.Timer(
        0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM)
    )
    with obeying(lambda _: stop.set()):
        timer.start()
        assert stop.wait(300)
    assert time.monotonic() - began < 200


def test_all_who_wait_are_woken() -> None:
    stop = StopEvent()
    heard: list[bool] = []
    threads = [threading.Thread(target=lambda: heard.append(stop.wait(300))) for _ in range(5)]
    for thread in threads:
        thread.start()
    stop.set()
    for thread in threads:
        thread.join(200)
    assert heard == [True] * 5
    assert stop.wait(300) and stop.is_set()


def test_a_wait_without_a_stop_is_over_in_time() -> None:
    stop = StopEvent()
    assert not stop.wait(0.01)
    assert not stop.wait(-1.0)
    assert not stop.is_set()


def test_a_stop_is_not_taken_back() -> None:
    with pytest.raises(NotImplementedError, match="not taken back"):
        StopEvent().clear()


def test_one_that_ended_and_was_not_collected_does_not_live() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    process = psutil.Process(child.pid)
    assert is_living(process) and process in descendants(os.getpid())
    assert child.stdin is not None
    child.stdin.close()
    until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert not is_living(process) and process not in descendants(os.getpid())
    child.wait()
    assert not is_living(process), "nor one that is gone"
