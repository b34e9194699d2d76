"""Starting one launch of the workers: through srun on Slurm, as child processes where this machine plays the nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tr11ops.agent.allocation import Allocation
from tr11ops.agent.processes import adopt_orphans, end_descendants
from trainer.contract import STOP_REQUEST_FILE
from trainer.lifecycle import request_stop

PEER_GRACE_SECONDS = 30.0  # how long the other nodes may go on after one node's agent failed


@dataclass(frozen=True)
class Launch:
    """One start of the workers on a set of nodes."""

    number: int
    attempt: Path
    card: Path
    job_id: str
    nodes: tuple[str, ...]
    workers_per_node: int
    master_address: str
    master_port: int

    @property
    def node_command(self) -> list[str]:
        """The node agent's command line, the same on every node."""
        return [
            sys.executable, "-m", "tr11ops.agent.node",
            "--attempt", str(self.attempt), "--card", str(self.card), "--job-id", self.job_id,
            "--launch", str(self.number), "--node-count", str(len(self.nodes)),
            "--workers", str(self.workers_per_node),
            "--master-address", self.master_address, "--master-port", str(self.master_port),
        ]  # fmt: skip


def srun_command(launch: Launch) -> list[str]:
    """One task a node, and the whole step ends when one node fails.

    Never with srun's `--no-kill`: it returns 0 although a node died (measured on Slurm 22.05).
    """
    count = str(len(launch.nodes))
    return [
        "srun", "--wait=60", "--kill-on-bad-exit=1", "--jobid", launch.job_id, "--nodes", count, "--ntasks", count,
        "--ntasks-per-node=1", "--nodelist", ",".join(launch.nodes), *launch.node_command,
    ]  # fmt: skip


class LineTee:
    """Copies whole lines to this process's output and to `main_log.txt`; both stay line-whole with many writers."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o664)
        self._lock = threading.Lock()
        self._complained = False

    def write(self, data: bytes) -> None:
        """Write one or more whole lines. A log that cannot be written never stops a training: it is said once."""
        with self._lock:
            for descriptor in (self._file, sys.stdout.fileno()):
                try:
                    os.write(descriptor, data)
                except OSError as error:
                    if not self._complained:
                        self._complained = True
                        print(f"tr11: a log cannot be written: {error}", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        """Write one line of tr11's own."""
        self.write((text + "\n").encode())

    def copy(self, stream: IO[bytes], keep: Callable[[bytes], None] | None = None) -> None:
        """Copy a stream line by line until it ends; `keep` sees every line too."""
        for line in stream:
            self.write(line if line.endswith(b"\n") else line + b"\n")
            if keep is not None:
                keep(line)


class StopFlag:
    """Set by the batch script's signals; the second signal asks for an immediate end."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def install(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            signal.signal(number, lambda received, _frame: self.received.append(received))


def run_launch(
    launch: Launch,
    allocation: Allocation,
    environment: Mapping[str, str],
    tee: LineTee,
    stop: StopFlag,
    keep: Callable[[bytes], None],
) -> int:
    """Run one launch to its end and return the highest exit status of its nodes.

    A first signal asks the trainer to save and leave; a second one (Ctrl-C twice) ends everything at once.
    """
    adopt_orphans()
    if allocation.kind == "slurm":
        children = [_start(srun_command(launch), dict(environment))]
    else:
        children = [
            _start(launch.node_command, {**environment, "TR11_NODE_RANK": str(rank), "TR11_NODE_NAME": name})
            for rank, name in enumerate(launch.nodes)
        ]
    pumps = [threading.Thread(target=tee.copy, args=(child.stdout, keep), daemon=True) for child in children]
    for pump in pumps:
        pump.start()
    statuses = _wait_all(children, launch, tee, stop)
    for pump in pumps:
        pump.join(timeout=5.0)
    if allocation.kind != "slurm":
        end_descendants(grace_seconds=5.0)
    return max(statuses)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: a Ctrl-C at the terminal reaches only this controller, which passes it on in order.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )


def _wait_all(children: list[subprocess.Popen[bytes]], launch: Launch, tee: LineTee, stop: StopFlag) -> list[int]:
    asked = 0
    failed_since: float | None = None
    while any(child.poll() is None for child in children):
        time.sleep(0.1)
        if len(stop.received) > asked:
            name = signal.Signals(stop.received[asked]).name
            asked += 1
            if asked == 1:
                tee.line(f"tr11: {name} received: asking the trainer to save and leave")
                request_stop(launch.attempt / STOP_REQUEST_FILE, f"{name} to the batch script")
            elif stop.received[asked - 1] == signal.SIGINT:
                tee.line("tr11: interrupted again: ending the workers now")
                end_descendants(grace_seconds=2.0)
        if failed_since is None and any(child.poll() not in (None, 0) for child in children):
            failed_since = time.monotonic()
        if failed_since is not None and time.monotonic() - failed_since > PEER_GRACE_SECONDS:
            tee.line("tr11: a node failed and the others did not follow: ending them")
            end_descendants(grace_seconds=5.0)
    return [_status(child.wait()) for child in children]


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code
