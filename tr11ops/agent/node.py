"""The node agent: one per node, started by the batch controller. Runs torchrun and leaves nothing behind.

It passes the workers' output on line by line, keeps a file per rank, hands a stop request down, and ends the whole
process tree when torchrun ends, or when torchrun stays although the trainer has said that it is done.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from tr11ops.agent.processes import (
    CONTROLLER_VARIABLE,
    adopt_orphans,
    die_with_parent,
    end_descendants,
    exit_status,
    signal_children,
)
from tr11ops.agent.verdict import Death, trainer_is_done
from trainer.contract import STOP_REQUEST_FILE, host_name, write_json
from trainer.lifecycle import STOP_SIGNALS, request_stop

QUIT_SECONDS = 60.0  # a trainer that wrote its end marker must be gone within this time
CONTROLLER_GONE = 1
_RANK_PREFIX = re.compile(rb"^\[default(\d+)\]:")
_KILLED = re.compile(rb"failed \(exitcode: -(\d+)\) local_rank: (\d+) ")  # torchrun's own line, of its first failure


@dataclass(frozen=True)
class NodeTask:
    """What this node has to run. `attempt` is the folder `state/attempts/JOBID`."""

    attempt: Path
    card: Path
    job_id: str
    launch: int
    node_rank: int
    node_count: int
    workers: int
    master_address: str
    master_port: int

    @property
    def command(self) -> list[str]:
        """torchrun with a static rendezvous: the node list is known, so nothing has to be negotiated."""
        return [
            sys.executable, "-u", "-m", "trainer.launcher",
            f"--nnodes={self.node_count}", f"--node-rank={self.node_rank}", f"--nproc-per-node={self.workers}",
            f"--master-addr={self.master_address}", f"--master-port={self.master_port}",
            "--max-restarts=0", "--tee=3", f"--log-dir={self.attempt / 'torchrun' / str(self.node_rank)}",
            "-m", "trainer", str(self.card),
        ]  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "TR11_JOB_ID": self.job_id,
            "TR11_LAUNCH": str(self.launch),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


def run(task: NodeTask) -> int:
    """Run the workers of one node to their end; returns torchrun's exit status (128 + n when a signal ended it)."""
    parent = int(os.environ.get(CONTROLLER_VARIABLE) or os.getppid())
    adopt_orphans()
    started = time.time()
    asked = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        asked.set()

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    (task.attempt / "torchrun" / str(task.node_rank)).mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        task.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=task.environment, start_new_session=True,
        preexec_fn=_prepare_torchrun,  # noqa: PLW1509  no thread runs yet
    )  # fmt: skip
    assert process.stdout is not None
    pump = threading.Thread(target=_pass_on, args=(process.stdout, task), daemon=True)
    pump.start()
    status = _wait(process, task, asked, parent)
    ended = end_descendants(grace_seconds=10.0)
    pump.join(timeout=5.0)
    record = {
        "node": host_name(),
        "node_rank": task.node_rank,
        "launch": task.launch,
        "start": started,
        "end": time.time(),
        "exit_status": status,
        "ended_processes": ended,
    }
    try:
        write_json(task.attempt / "nodes" / f"{host_name()}.json", record)
    except OSError as error:
        print(f"tr11: the end of {host_name()} could not be recorded: {error}", flush=True)
    return status


def _prepare_torchrun() -> None:
    """In the child, before torchrun: USR1 asks the trainer to save, and would end torchrun, which does not handle it.

    Workers take it over when they install their own; until then the stop request stands for it. And when this agent is
    killed, torchrun ends its workers: not every Slurm finds processes that were left in a session of their own.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], task: NodeTask, asked: threading.Event, parent: int) -> int:
    done_since: float | None = None
    while True:
        try:
            status = process.wait(timeout=0.2)
            if status < 0 and not trainer_is_done(task.attempt, task.launch):
                _record_death(task, "launcher", None, -status, "torchrun")
            return exit_status(status)
        except subprocess.TimeoutExpired:
            pass
        if os.getppid() != parent:
            return CONTROLLER_GONE  # the caller ends what runs here
        if asked.is_set():
            asked.clear()
            _ask(process, task)
        if done_since is None and trainer_is_done(task.attempt, task.launch):
            done_since = time.monotonic()
        if done_since is not None and time.monotonic() - done_since > QUIT_SECONDS:
            print(f"tr11: the trainer ended {QUIT_SECONDS:.0f} s ago, but its processes stay: ending them", flush=True)
            end_descendants(grace_seconds=5.0)
            process.wait()
            return 0


def _ask(process: subprocess.Popen[bytes], task: NodeTask) -> None:
    """Ask the trainer to save and leave: by the file, or, where no file can be written, by a signal to the workers."""
    try:
        request_stop(task.attempt / STOP_REQUEST_FILE, f"signal to the node agent of {host_name()}")
    except OSError as error:
        print(f"tr11: no stop request can be written, signalling the workers: {error}", flush=True)
        signal_children(process.pid, signal.SIGUSR1)


def _record_death(task: NodeTask, name: str, rank: int | None, number: int, what: str) -> None:
    """Keep what a killed process cannot say itself; its peers' own words are of the connection that it took along."""
    if number in STOP_SIGNALS:
        return  # told to go before it could listen: by a cancellation, not by a fault
    death = Death(what, host_name(), number, task.launch, rank)
    try:
        death.write(task.attempt, name)
    except OSError as problem:
        print(f"tr11: {death.host}: {death} (not recorded: {problem})", flush=True)


def _pass_on(stream: IO[bytes], task: NodeTask) -> None:
    """Copy the workers' lines to our output, and to `workers/NODE/rank-R.log` (R: global rank).

    Whatever cannot be written, the reading goes on: a full pipe would stop the training.
    """
    folder = task.attempt / "workers" / host_name()
    files: dict[int, IO[bytes]] = {}
    for line in stream:
        match = _RANK_PREFIX.match(line)
        if match:
            rank = task.node_rank * task.workers + int(match.group(1))
            with suppress(OSError):  # a full disk must not silence the main log, which says the same
                if rank not in files:
                    folder.mkdir(parents=True, exist_ok=True)
                    files[rank] = (folder / f"rank-{rank}.log").open("ab", buffering=0)
                files[rank].write(line[match.end() :])
        killed = _KILLED.search(line)
        if killed and not match:
            rank = task.node_rank * task.workers + int(killed.group(2))
            _record_death(task, f"killed-{rank}", rank, int(killed.group(1)), "the worker")
        with suppress(OSError):
            os.write(sys.stdout.fileno(), line)
    for file in files.values():
        file.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tr11ops.agent.node", description=__doc__.split("\n")[0])
    for name in ("attempt", "card"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--master-address", required=True)
    for name in ("launch", "node-count", "workers", "master-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args(arguments)
    node_rank = int(os.environ.get("TR11_NODE_RANK") or os.environ["SLURM_NODEID"])
    return run(NodeTask(node_rank=node_rank, **vars(options)))


if __name__ == "__main__":
    sys.exit(main())
