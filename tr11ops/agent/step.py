"""Starting one launch of the workers: through srun on Slurm, as child processes where this machine plays the nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tr11ops.agent.allocation import Allocation
from tr11ops.agent.processes import CONTROLLER_VARIABLE, adopt_orphans, end_descendants, exit_status
from tr11ops.agent.verdict import Death, trainer_is_done
from trainer.contract import STOP_REQUEST_FILE, host_name
from trainer.lifecycle import request_stop

PEER_GRACE_SECONDS = 30.0  # how long the other nodes may go on after one node's agent failed
DONE_GRACE_SECONDS = 5.0  # and how long when the trainer has left its end marker


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
                        with suppress(OSError):  # it may be the same full disk
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
    hosts: tuple[str, ...]
    if allocation.kind == "slurm":
        kept, hosts = "srun", (host_name(),)
        children = [_start(srun_command(launch), dict(environment))]
    else:
        kept, hosts = "the node agent", launch.nodes
        mine = {CONTROLLER_VARIABLE: str(os.getpid())}
        children = [
            _start(launch.node_command, {**environment, **mine, "TR11_NODE_RANK": str(rank), "TR11_NODE_NAME": name})
            for rank, name in enumerate(launch.nodes)
        ]
    pumps = [threading.Thread(target=tee.copy, args=(child.stdout, keep), daemon=True) for child in children]
    for pump in pumps:
        pump.start()
    try:
        statuses = _wait_all(children, launch, tee, stop, lambda: _record_killed(children, hosts, kept, launch))
    finally:
        if allocation.kind != "slurm":
            end_descendants(grace_seconds=5.0)
        for pump in pumps:
            pump.join(timeout=5.0)
    return max(statuses)


def _record_killed(children: list[subprocess.Popen[bytes]], hosts: Sequence[str], what: str, launch: Launch) -> None:
    """Keep the death of children (`what` they are, one for each of `hosts`) that could not record it themselves."""
    for host, child in zip(hosts, children, strict=True):
        code = child.poll()
        if code is not None and code < 0:
            with suppress(OSError):  # the log says it too
                Death(what, host, -code, launch.number).write(launch.attempt, "agent")


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: a Ctrl-C at the terminal reaches only this controller, which passes it on in order.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )


def _wait_all(
    children: list[subprocess.Popen[bytes]],
    launch: Launch,
    tee: LineTee,
    stop: StopFlag,
    record_killed: Callable[[], None],
) -> list[int]:
    asked = 0
    failed_since: float | None = None
    ending = False
    while any(child.poll() is None for child in children):
        time.sleep(0.1)
        if len(stop.received) > asked:
            name = signal.Signals(stop.received[asked]).name
            asked += 1
            if asked == 1:
                tee.line(f"tr11: {name} received: asking the trainer to save and leave")
                _ask(children, launch, tee, name)
            elif stop.received[asked - 1] == signal.SIGINT:
                tee.line("tr11: interrupted again: ending the workers now")
                ending = True
                end_descendants(grace_seconds=2.0)
        codes = [child.poll() for child in children]
        if failed_since is None and any(code not in (None, 0) for code in codes):
            failed_since = time.monotonic()
            if not ending:
                record_killed()
        if failed_since is not None and not ending and time.monotonic() - failed_since > _patience(launch, codes):
            ending = True
            tee.line("tr11: a node failed and the others did not follow: ending them")
            end_descendants(grace_seconds=5.0)
    if failed_since is None:  # the last one, a moment ago
        record_killed()
    return [exit_status(child.wait()) for child in children]


def _patience(launch: Launch, codes: list[int | None]) -> float:
    """How long to wait for the other nodes when one has failed: only as long as they may still have something to do."""
    if any(code is not None and code < 0 for code in codes):
        return 0.0  # nobody keeps the workers of a killed agent
    # After a clean end, torchrun waits five minutes for a peer that will never come.
    return DONE_GRACE_SECONDS if trainer_is_done(launch.attempt, launch.number) else PEER_GRACE_SECONDS


def _ask(children: list[subprocess.Popen[bytes]], launch: Launch, tee: LineTee, name: str) -> None:
    try:
        request_stop(launch.attempt / STOP_REQUEST_FILE, f"{name} to the batch script")
    except OSError as error:
        tee.line(f"tr11: no stop request can be written, signalling the node agents: {error}")
        for child in children:  # srun passes USR1 on to each agent
            child.send_signal(signal.SIGUSR1)
