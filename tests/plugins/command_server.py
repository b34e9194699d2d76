"""A process that has imported tr11, and forks itself for each command that a test types.

A command is most of a second of imports, and the tests on the twin type hundreds. The fork is a
process of its own with the words, folder, environment, file mode mask, input, output and exit
status of the one that it stands for. What it does not do again is to find and import tr11's
modules: `tests/tr11ops/cli/test_main.py` and the end-to-end tests do that.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

CLIENT = Path(__file__).with_name("command_client.py")
ROOT = Path(__file__).parents[2]
# They read the environment when they are imported; a command imports what it needs of them.
LATE = ("tr11ops.hub", "tr11ops.twin.hub")
MESSAGE_BYTES = 1 << 18


@functools.cache
def tr11_command() -> tuple[str, ...]:
    """The words that take the place of `tr11`. The server starts with the first call, and ends with
    this process.
    """
    return start_server("tests.plugins.command_server")[0]


def start_server(module: str, *more: str) -> tuple[tuple[str, ...], subprocess.Popen[bytes]]:
    """The words that take the place of a command, and the process that forks for them: `python -m
    module ... more`.
    """
    name = f"tr11-tests-{os.getpid()}-{uuid4().hex}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(64)
    reading, _writing = os.pipe()  # the other end is this process's alone, and stays open
    # it serves all tests, whatever the first of them has in its environment
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TR11_"))
    }
    server = subprocess.Popen(
        [sys.executable, "-m", module, str(listener.fileno()), str(reading), *more], cwd=ROOT,
        pass_fds=(listener.fileno(), reading), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env=environment,
    )  # fmt: skip
    listener.close()
    os.close(reading)
    return (sys.executable, "-IS", str(CLIENT), name), server


def import_tr11() -> None:
    import tr11ops

    for module in pkgutil.walk_packages(tr11ops.__path__, "tr11ops."):
        if not module.name.startswith(LATE) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def serve(listener: socket.socket, tests: int) -> None:
    """Fork for each command; returns in the fork that is to be the command. Ends when the tests
    have ended.
    """
    gc.collect()
    gc.freeze()  # what is imported stays shared with the forks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, tests], [], [])
        if tests in ready:
            sys.exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(tests)
            if attend(connection):
                return
            os._exit(0)
        connection.close()


def attend(connection: socket.socket) -> bool:
    """Start one command and tell how it ended. True in the command, False when it has ended."""
    # the fourth: a lock that is handed over
    message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 4)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = os.fork()
    if command == 0:
        connection.close()
        become(json.loads(message), files)
        return True
    for file in files:
        os.close(file)
    ended = os.pidfd_open(command)
    while ended not in select.select([ended, connection], [], [])[0]:
        passed_on = connection.recv(16)
        os.kill(command, int(passed_on or signal.SIGKILL))
    _, status = os.waitpid(command, 0)
    with contextlib.suppress(BrokenPipeError):  # whoever typed it has gone
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    return False


def become(typed: dict[str, object], files: list[int]) -> None:
    """Take over everything by which a process that was started there would differ from this one."""
    for number, file in enumerate(files):
        if file != number:
            os.dup2(file, number)
            os.close(file)
    os.chdir(str(typed["folder"]))
    os.umask(int(str(typed["mask"])))
    os.environ.clear()
    os.environ.update(typed["environment"])  # type: ignore[call-overload]
    time.tzset()
    sys.argv[1:] = typed["words"]  # type: ignore[call-overload]


if __name__ == "__main__":
    import_tr11()
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    from tr11ops.cli.main import run

    sys.argv[0] = "tr11"
    run()
