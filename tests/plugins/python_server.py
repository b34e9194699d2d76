"""A process that has imported tr11, and forks itself for each `python -u -c PROGRAM` that a test starts."""

from __future__ import annotations

import functools
import socket
import sys

from tests.plugins.command_server import import_tr11, serve, start_server


@functools.cache
def forking_python() -> tuple[str, ...]:
    """The words that take the place of `python -u`. The server ends with this process."""
    return start_server("tests.plugins.python_server")[0]


if __name__ == "__main__":
    import_tr11()
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    program = sys.argv[2]
    sys.argv[:] = ["-c", *sys.argv[3:]]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
