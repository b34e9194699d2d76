"""A process that has imported torch and the trainer, and forks itself for each worker that torchrun
starts.

A worker is three seconds of imports. The fork has the words, folder, environment, output, signals
and exit status of the one that it stands for; tests/test_end_to_end_local.py and the tests on the
twin start real ones.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import socket
import sys
from pathlib import Path

from tests.plugins.command_server import serve, start_server

WORKER = ["-u", "-m", "trainer"]


def worker_python(folder: Path) -> tuple[Path, int]:
    """What torchrun takes for Python ($PYTHON_EXEC), and the server's process id; it ends with this
    process.

    The command lines of the server and of its forks have the folder in them: a worker that is left
    behind is seen.
    """
    words, server = start_server("tests.plugins.worker_server", str(folder))
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    return program, server.pid


def import_trainer() -> None:
    from tests.trainer.spawn import PRELOADED

    os.environ["OMP_NUM_THREADS"] = "1"  # as the node agent has it; read when torch is imported
    for module in PRELOADED:
        if not module.startswith("tests."):
            importlib.import_module(module)


if __name__ == "__main__":
    import_trainer()
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    assert sys.argv[1:4] == WORKER, sys.argv
    sys.argv[1:4] = []
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)
