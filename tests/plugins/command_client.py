"""Stands for `tr11` where a test types it: passes words, folder, environment, input and output on
to the command server.

The exit status, or the signal, by which the command ends is its own; what it is sent, it passes on.
Standard library only: it runs without the packages (`python -IS`), which is what makes it cheap.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main(name: str, words: list[str]) -> int:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{name}")
    mask = os.umask(0)
    os.umask(mask)
    folder = os.getcwd()  # noqa: PTH109  pathlib would take longer than all the rest
    typed = {"words": words, "folder": folder, "environment": dict(os.environ), "mask": mask}
    socket.send_fds(connection, [json.dumps(typed).encode()], [0, 1, 2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda got, _frame: connection.send(str(got).encode()))
    status = int(connection.recv(16) or b"1")
    if status < 0:
        if -status != signal.SIGKILL:  # which no one can hold back
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
