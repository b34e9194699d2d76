"""A process that has imported the embedded scheduler's supervisor, and forks itself for each job
that a test submits.

The fork detaches itself, takes over the job's lock and works as the started one does. Tests of
commands submit hundreds of jobs; those of the scheduler itself (tests/tr11ops/cluster), and all
that a child submits, start real supervisors.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
from pathlib import Path

from tests.plugins.command_server import serve, start_server
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.local_store import LocalStore

LOCK = 3  # the descriptor's number in the fork


@functools.cache
def _server() -> str:
    return start_server("tests.plugins.supervisor_server")[0][-1]


def fork_supervisor(store: LocalStore, job_id: int, lock: int) -> None:
    """Takes the place of `local_store.launch_supervisor`."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TR11_"))
    }
    mask = os.umask(0)
    os.umask(mask)
    words = [str(store.folder), str(job_id), str(LOCK)]
    message = json.dumps(
        {"words": words, "folder": "/", "environment": environment, "mask": mask}
    ).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        connection,
        (store.job_folder(job_id) / "supervisor.log").open("ab") as log,
        Path(os.devnull).open() as nothing,
    ):
        connection.connect(f"\0{_server()}")
        socket.send_fds(connection, [message], [nothing.fileno(), log.fileno(), log.fileno(), lock])
        if connection.recv(16) != b"0":
            raise SchedulerError(f"the supervisor of job {job_id} did not start")


if __name__ == "__main__":
    from tr11ops.cluster.local_supervisor import main

    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    sys.exit(main(sys.argv[1:]))
