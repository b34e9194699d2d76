"""`python -IS twin_keeper.py FOLDER SECONDS`: ends what a session of tests leaves of its twins, however
that session ends.

It waits for a line on its input, or for its end, which comes with the end of the session, after a kill
-9 too. Processes that have FOLDER in their environment, as all daemons and jobs of a twin have, get
SECONDS to leave; then they are named, killed, and the folder is removed. Exits with 1 where there were any.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

ROUNDS = 5  # a daemon that ends may be starting another process


def living(folder: str) -> dict[int, str]:
    """The process id and command line of each process with the folder in its environment."""
    found = {}
    for place in Path("/proc").iterdir():
        if not place.name.isdecimal() or int(place.name) == os.getpid():
            continue
        with suppress(OSError):
            if folder.encode() in (place / "environ").read_bytes():
                words = (
                    (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found[int(place.name)] = words.strip()
    return found


def main(folder: str, seconds: float) -> int:
    sys.stdin.readline()
    end = time.monotonic() + seconds
    while (left := living(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    for number, words in left.items():
        print(f"process {number}: {words}")
    for _ in range(ROUNDS):
        for number in living(folder):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.1 if left else 0)
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
