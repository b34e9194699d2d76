"""A line between a terminal and a program that can be held: keys go through at once, and what the
program draws waits while a file is there. What waits is written into another file.

    python slow_line.py HELD WAITING PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import sys
import termios
import tty
from pathlib import Path


def main(held: Path, waiting: Path, program: list[str]) -> int:
    size = fcntl.ioctl(0, termios.TIOCGWINSZ, b"\0" * 8)
    child, line = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, size)
        os.execv(program[0], program)
    tty.setraw(0)
    pending = b""
    while True:
        ready, _, _ = select.select([0, line], [], [], 0.05)
        if 0 in ready:
            os.write(line, os.read(0, 4096))
        if line in ready:
            try:
                pending += os.read(line, 65536)
            except OSError:  # it has ended
                break
            waiting.write_bytes(pending)
        if not held.exists():
            os.write(1, pending)
            pending = b""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
