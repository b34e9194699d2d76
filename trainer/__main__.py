"""`python -m trainer CARD.json`: one worker of the training; start it with torchrun, or alone for
one process.

CARD.json is a resolved run card, as `tr11 launch` and `tr11 train` write it. Exit status: 0 the
training stopped as it should (see the end marker), 1 it failed, 2 it refused its input.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from functools import partial
from pathlib import Path

from trainer.contract.attempt import AttemptIdentity
from trainer.contract.lease import Lease
from trainer.contract.requests import watch_for_kill_now
from trainer.control.exits import end_now
from trainer.control.lifecycle import HeartbeatWriter, SignalFlag, Worker, without_collections
from trainer.debug.flight_recorder import OperationsOnRequest


def main(arguments: list[str]) -> None:
    start_time = time.monotonic()
    # Before the slow imports: a stop signal during them must not end the process without a word.
    flag = SignalFlag()
    flag.install()
    if len(arguments) != 1 or arguments[0] in {"-h", "--help"}:
        print(__doc__, file=sys.stderr)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)

    from trainer.config.card import CardError, load_trainer_config

    card = Path(arguments[0])
    try:
        config = load_trainer_config(card)
    except CardError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(2)

    if "RANK" not in os.environ:
        os.environ.update(_alone())
    rank, paths = int(os.environ["RANK"]), config.paths
    attempt = AttemptIdentity.from_environment(os.environ, paths)
    heartbeat = HeartbeatWriter(paths, rank, attempt.job_id, launch=attempt.launch)
    worker = Worker(config, attempt, rank, heartbeat=heartbeat, flag=flag, start_time=start_time)
    watch_for_kill_now(
        config.kill_switch,
        partial(end_now, worker),
        OperationsOnRequest(paths, attempt.job_id, attempt.launch, rank),
    )
    # A newcomer watches the one who holds the lease for some seconds: these.
    if rank == 0:
        worker.lease = Lease.begin(paths, attempt.job_id, attempt.launch)
    with without_collections():
        from trainer.attempt import run

    run(worker, card)


def _alone() -> dict[str, str]:
    """What a launcher sets, for a training of this one process."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
