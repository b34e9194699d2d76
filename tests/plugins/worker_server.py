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


def worker_python(folder: Path) -> tuple[Path, int]:
    """What torchrun takes for Python ($PYTHON_EXEC), and the server's process id; it ends with this
    process. It takes `-m MODULE` or a script, with words, and is `sys.executable` there, but for tr11's
    own trainer.

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
    program = Path(sys.argv[3]) / "python"
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    words = [word for word in sys.argv[1:2] if word != "-u"] + sys.argv[2:]
    if words[:2] != ["-m", "trainer"]:  # whose data workers inherit what a fork has not
        sys.executable = str(program)
    if words[0] == "-m":
        sys.argv[1:] = words[2:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
