"""Real file systems that never answer, in mounts of a test's own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

# What the cron runner starts in tests, in place of its own: with deadlines of seconds.
ENTRY = """\
from tr11ops.base import deadline
deadline.SILENCE_SECONDS = deadline.LOOK_SECONDS = 2.0
deadline.PASS_SECONDS = 6.0
from tr11ops.cli.main import run; run()
"""
NEW_MOUNTS, PRIVATE_BELOW = 0x20000, 0x4000 | 0x40000
DETACH = 2


def own_mounts() -> None:
    """What this process and its children mount is theirs alone. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (libc.unshare(NEW_MOUNTS), libc.mount(b"none", b"/", None, PRIVATE_BELOW, None)):
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def hang(place: str) -> int:
    """Mount over `place` a file system whose server has not said a word; returns what holds it.
    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    held = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={held},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hung", os.fsencode(place), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)
    return held


def heal(place: str, held: int) -> None:
    """What was there before answers again; what waits for the dead server fails."""
    ctypes.CDLL(None).umount2(os.fsencode(place), DETACH)
    os.close(held)


def printed_by(code: str, *words: str, seconds: float) -> str:
    """What a Python program prints, in a session of its own of which nothing is left behind: what it
    mounts is its alone, and what hangs there ends with it.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return text
