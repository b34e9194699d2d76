"""Which processes count as living."""

from __future__ import annotations

import os
import subprocess

import psutil

from tests.waiting import until
from tr11ops.base.processes import is_living
from tr11ops.cluster.local_processes import descendants


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
