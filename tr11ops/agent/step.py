"""One launch of the workers, to its end: through srun on Slurm, as child processes where this
machine plays the nodes.

However it ends, nothing of it is left when `run_launch` returns: not later than
`end_within_seconds` after the first process of it has failed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from tr11ops.agent.allocation import Allocation, gpus_of_node
from tr11ops.agent.exit_records import HostFailure, trainer_is_done
from tr11ops.agent.lines import whole_lines
from tr11ops.base.processes import CONTROLLER_VARIABLE, adopt_orphans, end_descendants, exit_status
from tr11ops.diagnose.attribution.srun import PREFIXES, parse_lines
from tr11ops.dialects.image import TrainerImage, runtime_words
from tr11ops.runcard.sections import ContainerSection
from trainer.contract.attempt import request_stop
from trainer.contract.files import host_name, make_shared, open_shared
from trainer.contract.paths import STOP_REQUEST_FILE
from trainer.contract.record import Record

# how long the other nodes may go on when one has failed after the trainer's end marker
DONE_GRACE_SECONDS = 5.0
LOOK_SECONDS = 0.05
MOST_LINES = 400  # of srun, kept for the attribution: two for each node of the largest trainings
_WORKER = re.compile(rb"^tr11: worker (\d+) \(process \d+\) failed: exit status (\d+)")


class WorkerLaunch(Record):
    """One start of the workers on a set of nodes."""

    number: int
    attempt: Path
    card: Path
    job_id: str
    nodes: tuple[str, ...]
    workers_per_node: int
    master_address: str
    master_port: int
    container: ContainerSection | None = None
    uses_gpus: bool = False

    @property
    def node_command(self) -> list[str]:
        """The node agent's command line, the same on every node. Its clock is compared with the
        time of this call.
        """
        return self.command_at(time.time())

    def command_at(self, began: float | None) -> list[str]:
        """The same with the controller's own time of the start, in seconds since the epoch, where
        that is known.
        """
        if began is None:
            clock = []
        else:
            clock = ["--controller-time", f"{began:.3f}"]
        python = sys.executable if self.container is None else self.container.python
        return [
            python,
            "-m",
            "tr11ops.agent.node",
            "--attempt",
            str(self.attempt),
            "--card",
            str(self.card),
            "--job-id",
            self.job_id,
            "--launch",
            str(self.number),
            "--node-count",
            str(len(self.nodes)),
            "--workers",
            str(self.workers_per_node),
            "--master-address",
            self.master_address,
            "--master-port",
            str(self.master_port),
            *clock,
        ]


class AgentProcess(Protocol):
    """A node agent, or srun for all of them: a child process, or something on another machine with
    its face.
    """

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


class OtherMachines(Protocol):
    """The machines beside this one, where no scheduler starts agents on them."""

    def start(self, launch: WorkerLaunch) -> Sequence[AgentProcess]: ...

    def end(self, grace_seconds: float) -> None: ...


def srun_command(launch: WorkerLaunch) -> list[str]:
    """One task a node, and the whole step ends when one node fails.

    Never with srun's `--no-kill`: it returns 0 although a node died (measured on Slurm 22.05).
    """
    count = str(len(launch.nodes))
    return [
        # `--overlap`: what a dead node still holds of the launch before must not keep this one
        # waiting.
        "srun",
        "--wait=60",
        "--kill-on-bad-exit=1",
        "--overlap",
        "--jobid",
        launch.job_id,
        "--nodes",
        count,
        "--ntasks",
        count,
        "--ntasks-per-node=1",
        "--nodelist",
        ",".join(launch.nodes),
        *in_container(launch),
        *launch.node_command,
    ]


def in_container(launch: WorkerLaunch) -> list[str]:
    """What stands before the node agent's command so that it runs in the card's image; empty
    without one.

    Signals and exit codes go through: Pyxis is part of srun, and Apptainer passes them on.
    """
    section = launch.container
    if section is None:
        return []
    image = TrainerImage(
        section.image,
        section.runtime,
        mounts=tuple(section.mounts),
        options=tuple(section.options),
        uses_gpus=launch.uses_gpus,
    )
    return list(runtime_words(image))


class LineTee:
    """Copies whole lines to this process's output and to `main_log.txt`; both stay line-whole with
    many writers.
    """

    def __init__(self, path: Path):
        make_shared(path.parent)
        self._file = open_shared(path, os.O_WRONLY | os.O_APPEND)
        self._lock = threading.Lock()
        self._complained = False

    def write(self, data: bytes) -> None:
        """Write one or more whole lines. A log that cannot be written never stops a training: it is
        said once.
        """
        with self._lock:
            for descriptor in (self._file, sys.stdout.fileno()):
                try:
                    os.write(descriptor, data)
                except OSError as error:
                    if not self._complained:
                        self._complained = True
                        with suppress(OSError):  # it may be the same full disk
                            print(
                                f"tr11: a log cannot be written: {error}",
                                file=sys.stderr,
                                flush=True,
                            )

    def line(self, text: str) -> None:
        """Write one line."""
        self.write((text + "\n").encode())

    def say(self, text: str) -> None:
        """Write one line of tr11's own."""
        self.line(f"tr11: {text}")

    def copy(self, stream: IO[bytes], keep: Callable[[bytes], None]) -> None:
        """Copy the lines of a stream that are passed on until it ends; `keep` sees each of them."""
        for line in whole_lines(stream):
            self.write(line)
            keep(line)


class StopFlag:
    """Set by the batch script's signals; the second signal asks for an immediate end."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def install(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            signal.signal(number, lambda received, _frame: self.received.append(received))


@dataclass
class LaunchWatch:
    """What is seen of a launch while it runs, and how it ended: the highest exit status of its
    nodes. `first_sign`: when its first process failed. Times are seconds since the epoch.
    """

    start: float = field(default_factory=time.time)
    end: float | None = None
    status: int = 0
    srun_lines: list[str] = field(default_factory=list)
    worker_statuses: dict[int, int] = field(default_factory=dict)
    first_sign: float | None = None
    overdue: bool = False

    def read(self, line: bytes) -> None:
        """Look at one line of the launch's output, worker's lines included: it has to be quick."""
        if line.startswith(PREFIXES):
            self._read_srun(line.decode("utf-8", "replace").strip())
        elif line.startswith(b"tr11: worker "):
            match = _WORKER.match(line)
            if match:
                self.worker_statuses[int(match[1])] = int(match[2])
                self.sign()

    def sign(self) -> None:
        """A process has failed; only the first time counts."""
        if self.first_sign is None:
            self.first_sign = time.time()

    def _read_srun(self, text: str) -> None:
        if len(self.srun_lines) < MOST_LINES:
            self.srun_lines.append(text)
        if parse_lines([text]):
            self.sign()


class LaunchRun:
    """One launch while it runs: starts its processes, waits for them, passes stops on, ends what
    outstays a failure. With `others`, this machine is the launch's first node alone.
    """

    def __init__(
        self,
        launch: WorkerLaunch,
        allocation: Allocation,
        tee: LineTee,
        stop: StopFlag,
        watch: LaunchWatch,
        end_within_seconds: float,
        others: OtherMachines | None = None,
    ) -> None:
        self._launch = launch
        self._allocation = allocation
        self._tee = tee
        self._stop = stop
        self._watch = watch
        self._end_within_seconds = end_within_seconds
        self._others = others
        self._children: list[AgentProcess] = []
        self._asked = 0
        self._failed_since: float | None = None
        self._ending = False

    def run(self, environment: Mapping[str, str], look: Callable[[], None]) -> None:
        """Run it to its end. `look` is called many times a second meanwhile.

        A first signal asks the trainer to save and leave; a second one (Ctrl-C twice) ends
        everything at once.
        """
        adopt_orphans()
        self._watch.start = time.time()
        self._start(environment)
        pumps = [
            threading.Thread(
                target=self._tee.copy, args=(child.stdout, self._watch.read), daemon=True
            )
            for child in self._children
        ]
        for pump in pumps:
            pump.start()
        try:
            statuses = self._wait(look)
        finally:
            if self._allocation.kind != "slurm":
                self._end(min(5.0, self._end_within_seconds / 4))
            for pump in pumps:
                pump.join(timeout=5.0)
        self._watch.status = max(statuses)
        self._watch.end = time.time()

    def _start(self, environment: Mapping[str, str]) -> None:
        if self._allocation.kind == "slurm":
            # A job with spares is submitted with --no-kill; a step that inherited that would hide a
            # dead node.
            inherited = dict(environment)
            inherited.pop("SLURM_NO_KILL", None)
            self._children.append(_started(srun_command(self._launch), inherited))
            return
        nodes = self._launch.nodes
        if self._others is not None:
            nodes = nodes[:1]
        for rank, name in enumerate(nodes):
            own = {
                **environment,
                CONTROLLER_VARIABLE: str(os.getpid()),
                "TR11_NODE_RANK": str(rank),
                "TR11_NODE_NAME": name,
            }
            if self._others is None:
                own |= gpus_of_node(environment, self._allocation.nodes, name)
            self._children.append(_started(self._launch.node_command, own))
        if self._others is not None:
            self._children += self._others.start(self._launch)

    def _wait(self, look: Callable[[], None]) -> list[int]:
        """The children's exit statuses, once all have ended."""
        while any(child.poll() is None for child in self._children):
            time.sleep(LOOK_SECONDS)
            look()
            if len(self._stop.received) > self._asked:
                self._pass_on()
            codes = [child.poll() for child in self._children]
            failed = any(code not in (None, 0) for code in codes)
            if failed:
                self._watch.sign()
            if self._failed_since is None and (failed or self._watch.first_sign is not None):
                self._failed_since = time.monotonic()
                if failed and not self._ending:
                    self._record_killed()
            since = self._failed_since
            if (
                since is not None
                and not self._ending
                and time.monotonic() - since > self._patience(codes)
            ):
                self._end_all()
        if self._failed_since is None:  # the last one, a moment ago
            self._record_killed()
        return [exit_status(child.wait()) for child in self._children]

    def _record_killed(self) -> None:
        """Keep the death of children that could not record it themselves."""
        what = "the node agent"
        hosts = self._launch.nodes
        if self._allocation.kind == "slurm":
            what = "srun"
            hosts = (host_name(),)
        for host, child in zip(hosts, self._children, strict=True):
            code = child.poll()
            if code is not None and code < 0:
                killed = HostFailure.killed(what, -code, self._launch.number)
                with suppress(OSError):  # the log says it too
                    killed.write(self._launch.attempt, "agent", host)

    def _pass_on(self) -> None:
        number = self._stop.received[self._asked]
        self._asked += 1
        if self._asked == 1:
            name = signal.Signals(number).name
            self._tee.say(f"{name} received: asking the trainer to save and leave")
            self._ask(name)
        elif number == signal.SIGINT:
            self._tee.say("interrupted again: ending the workers now")
            self._ending = True
            self._end(2.0)

    def _ask(self, name: str) -> None:
        request = self._launch.attempt / STOP_REQUEST_FILE
        try:
            request_stop(request, f"{name} to the batch script")
        except OSError as error:
            self._tee.say(f"no stop request can be written, signalling the node agents: {error}")
            for child in self._children:  # srun passes USR1 on to each agent
                child.send_signal(signal.SIGUSR1)

    def _end_all(self) -> None:
        """End what is left: srun, when it is told to go, tells the nodes that it can reach."""
        self._ending = self._watch.overdue = True
        self._tee.say("a node failed and the others did not follow: ending them")
        self._end(self._end_within_seconds / 4)

    def _end(self, grace_seconds: float) -> None:
        if self._others is not None:
            self._others.end(grace_seconds)
        end_descendants(grace_seconds)

    def _patience(self, codes: list[int | None]) -> float:
        """How long to wait for the others when one has failed: only as long as they may still have
        something to do.
        """
        if any(code is not None and code < 0 for code in codes):
            return 0.0  # no one keeps the workers of a killed agent
        within = self._end_within_seconds
        if trainer_is_done(self._launch.attempt, self._launch.number):
            # torchrun waits five minutes for a peer that will never come
            within = min(DONE_GRACE_SECONDS, within)
        return within / 2


def _started(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own: a Ctrl-C at the terminal reaches only this controller, which passes it
    # on in order.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
