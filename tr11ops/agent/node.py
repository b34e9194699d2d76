"""The node agent: one per node, started by the batch controller. Runs torchrun and leaves nothing
behind.

It checks the node's health before it starts anything. Then it passes the workers' output on line by
line, keeps a file per rank, hands a stop request down, watches the memory, and ends the whole
process tree when torchrun ends, or when torchrun stays although a worker has failed or the trainer
has said that it is done.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from tr11ops.agent.exit_records import (
    HostFailure,
    NodeRecord,
    NodeSettings,
    launch_has_failed,
    trainer_is_done,
)
from tr11ops.agent.lines import whole_lines
from tr11ops.agent.memory_watch import MemoryWatch, WorkerWatch
from tr11ops.agent.worker_environment import (
    FLIGHT_RECORDS,
    prepare_caches,
    torch_version,
    worker_defaults,
)
from tr11ops.base.job_environment import step_of
from tr11ops.base.processes import (
    CONTROLLER_VARIABLE,
    adopt_orphans,
    begin_launcher,
    end_descendants,
    exit_status,
    leave,
    signal_children,
)
from tr11ops.base.units import counted
from tr11ops.health.base import (
    EXIT_BAD_NODE,
    CheckOutcome,
    CheckResult,
    NodeRequirements,
    System,
    worst,
)
from tr11ops.health.host import exported_folder
from tr11ops.health.registry import chosen, run_checks
from tr11ops.rundir.attempts import launch_line
from tr11ops.trainers.trainer import KEEPER, NodePlaces, trainer_of
from trainer.contract.attempt import EXIT_ERROR, STOP_SIGNALS, request_stop
from trainer.contract.documents import document
from trainer.contract.files import host_name, make_shared, open_shared, user_of
from trainer.contract.paths import STOP_REQUEST_FILE, label_in
from trainer.contract.record import Record
from trainer.contract.units import signal_number

# Who listens on a TCP port of this host: what is seen of it without any right.

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENING = "0A"  # the kernel's number of that state


def holder_of(port: int) -> str:
    """`process 77 (nc) of ana`: who listens on `port`. "" where no one does, this agent's own
    launcher, or the system does not tell.

    Of a process of another user only the user is seen.
    """
    uid = next(_listeners(port), None)
    if uid is None:
        return ""
    process = _process(port)
    who = "a process"
    if process is not None:
        if process.pid in {child.pid for child in psutil.Process().children(recursive=True)}:
            return ""
        who = f"process {process.pid} ({_name(process)})"
    return f"{who} of {user_of(uid)}"


def _listeners(port: int) -> Iterator[int]:
    """The users who listen on it, by the kernel's tables (proc(5))."""
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield int(fields[7])


def _process(port: int) -> psutil.Process | None:
    try:
        for one in psutil.net_connections(kind="tcp"):
            is_listener = one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
            if is_listener and one.pid is not None:
                return psutil.Process(one.pid)
    except (psutil.Error, OSError):
        return None
    return None


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "gone since"


# at the latest: a trainer that wrote its end marker must be gone within this time
QUIT_SECONDS = 60.0
# at the most, a node that is bad waits for what the others' health checks say
OTHERS_SECONDS = 10.0
CONTROLLER_GONE = 1
_RANK_PREFIX = re.compile(rb"^\[default(\d+)\]:")
# torchrun's own line, of its first failure
_KILLED = re.compile(rb"failed \(exitcode: -(\d+)\) local_rank: (\d+) ")
_TOLD = re.compile(rb"^tr11: worker (\d+) \(process (\d+)\) failed: (.+)$")  # the launcher's words
_LAUNCHER = re.compile(rb"^tr11: the launcher on \S+ failed: (.+)$")  # its own words, of itself
_SIGNAL = re.compile(r"^ended by (SIG[A-Z0-9+]+|signal \d+)$")
# its first words after a worker has failed
_FAILING = re.compile(rb"closing signal SIG|failed \(exitcode: ")


class NodeTask(Record):
    """What this node has to run. `attempt` is the folder `state/attempts/JOBID`.

    `controller_time` is when the batch controller started the launch, by its clock, in seconds
    since the epoch.
    """

    attempt: Path
    card: Path
    job_id: str
    launch: int
    places: NodePlaces
    controller_time: float | None = None

    @property
    def command(self) -> list[str]:
        """What trains on this node, as the card's trainer has it."""
        return trainer_of(self.card).command(self.card, self.attempt, self.places)

    def environment(self, settings: NodeSettings) -> dict[str, str]:
        """Of the workers."""
        # NCCL's watchdog makes no folder; without one there is no record, and no harm
        with suppress(OSError):
            make_shared(self.attempt / FLIGHT_RECORDS)
        temporary = Path(tempfile.gettempdir())
        # one of this attempt's own: slower, and no one else's code
        if not prepare_caches(temporary):
            temporary = Path(tempfile.mkdtemp(prefix="tr11-"))
        own = {}
        # how many threads another trainer's workers have is for whoever starts them
        if trainer_of(self.card) is not KEEPER:
            own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        torch = ""
        if settings.gpus:
            torch = torch_version()
        return {
            **os.environ,
            **worker_defaults(
                os.environ,
                self.attempt,
                self.launch,
                temporary,
                gpus=settings.gpus,
                tensor=settings.tensor,
                torch=torch,
            ),
            "TR11_JOB_ID": self.job_id,
            "TR11_ATTEMPT": str(self.attempt),
            "TR11_LAUNCH": str(self.launch),
            "PYTHONUNBUFFERED": "1",
            **own,
        }


def run(task: NodeTask) -> int:
    """Check the node and run its workers to their end.

    Returns torchrun's exit status (128 + n when a signal ended it), or EXIT_BAD_NODE when a check
    found the node bad: then no worker was started.
    """
    parent = int(os.environ.get(CONTROLLER_VARIABLE) or os.getppid())
    adopt_orphans()
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda got, _frame: received.append(got))
    settings = NodeSettings.read(task.card)
    record = NodeRecord(task.attempt, task.places.node_rank, task.launch)
    results = check_node(task, settings)
    record.write(checks=[document(entry) for entry in results])
    if _report(results) is CheckOutcome.BAD:
        _wait_for_others(task, received)
        record.write(end=time.time(), exit_status=EXIT_BAD_NODE)
        return EXIT_BAD_NODE
    if signal.SIGTERM in received:  # the step is being ended
        record.write(end=time.time(), exit_status=128 + signal.SIGTERM)
        return 128 + signal.SIGTERM
    return NodeWorkers(task, settings, record, received).run(parent)


def _wait_for_others(task: NodeTask, received: Sequence[int]) -> None:
    """Stay until each node has told how its checks ended: Slurm ends the step when this agent
    leaves, and what fails on one node alone is told from what fails everywhere by the answers of
    the others.
    """
    from tr11ops.diagnose.attribution.records import read_reports  # 30 ms, for a bad node alone

    until = time.monotonic() + OTHERS_SECONDS
    while signal.SIGTERM not in received and time.monotonic() < until:
        told = [
            one
            for one in read_reports(task.attempt, task.launch)
            if one.bad_checks or one.passed_checks
        ]
        if len(told) >= task.places.nodes:
            return
        time.sleep(0.2)


def check_node(task: NodeTask, settings: NodeSettings) -> tuple[CheckResult, ...]:
    """All health checks of this node, at once; about 0.1 s when all is well."""
    folder = task.attempt / "nodes"
    with suppress(OSError):  # the check itself says what is wrong with the run directory
        make_shared(folder)
    wanted = NodeRequirements(
        node=host_name(),
        job_id=task.job_id,
        launch=task.launch,
        gpus=settings.gpus,
        workers=task.places.workers,
        folder=folder,
        temporary=exported_folder(os.environ),
        controller_time=task.controller_time,
        ends_leftovers=_owns_node(os.environ),
        seconds=settings.check_seconds,
        interfaces=tuple(filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))),
    )
    results = run_checks(
        chosen(wanted, settings.check_scripts, settings.skip_checks), System(), wanted
    )
    if settings.fault:
        return (CheckResult("card", CheckOutcome.UNKNOWN, settings.fault), *results)
    return results


def _owns_node(environment: Mapping[str, str]) -> bool:
    """Under Slurm a node belongs to one attempt at a time; the embedded scheduler's nodes share one
    machine.
    """
    return step_of(environment) is not None and environment.get("TR11_SCHEDULER") != "local"


def _report(results: tuple[CheckResult, ...]) -> CheckOutcome:
    """Say what is not well, one line a check; a node that is well says nothing."""
    for entry in results:
        if entry.result in {CheckOutcome.BAD, CheckOutcome.WARNING}:
            print(
                f"tr11: {host_name()}: health check {entry.name}: {entry.result}: {entry.why}",
                flush=True,
            )
    return worst(results)


class NodeWorkers:
    """The workers of one launch on this node: torchrun, and all that it starts. `received`: the
    stop signals so far.
    """

    def __init__(
        self, task: NodeTask, settings: NodeSettings, record: NodeRecord, received: Sequence[int]
    ) -> None:
        self._task = task
        self._settings = settings
        self._record = record
        self._received = received
        self._watch = WorkerWatch()
        self._memory = MemoryWatch(host_name(), partial(print, flush=True))
        self._has_failed = threading.Event()  # by the first words about it
        self._failed_since: float | None = None
        self._done_since: float | None = None
        self._asked = self._told = 0

    def run(self, parent: int) -> int:
        """Run them to their end, or until the process `parent` has gone; torchrun's exit status."""
        task = self._task
        make_shared(task.attempt / "torchrun" / str(task.places.node_rank))
        process = subprocess.Popen(
            task.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=task.environment(self._settings),
            start_new_session=True,
            preexec_fn=begin_launcher,  # noqa: PLW1509  no thread runs any more, unless a check hangs in the kernel
        )
        assert process.stdout is not None
        pump = threading.Thread(target=self._pass_on, args=(process.stdout,), daemon=True)
        pump.start()
        status = self._wait(process, parent)
        ended = end_descendants(grace_seconds=self._settings.end_within_seconds / 4)
        pump.join(timeout=5.0)
        self._keep(
            has_failed=status != 0,
            end=time.time(),
            exit_status=status,
            ended_processes=ended,
            swept_shared_memory=list(self._memory.sweep()),
        )
        return status

    def _keep(self, has_failed: bool, **more: Any) -> None:
        """Keep what is known of a failure when it is told: this agent may be killed before all that
        it has started is gone.
        """
        holder = ""
        if has_failed and self._task.places.node_rank == 0:
            holder = holder_of(self._task.places.port)
        self._record.write(
            memory=self._memory.record(),
            failed_workers=self._watch.failures,
            port_holder=holder,
            **more,
        )

    def _wait(self, process: subprocess.Popen[bytes], parent: int) -> int:
        """The exit status. What runs on is the caller's to end."""
        while True:
            try:
                status = process.wait(timeout=0.2)
                if status < 0 and not self._is_done():
                    self._record_death("launcher", rank=None, number=-status, what="torchrun")
                return exit_status(status)
            except subprocess.TimeoutExpired:
                pass
            if os.getppid() != parent:
                return CONTROLLER_GONE
            self._look(process.pid)
            if len(self._received) > self._asked:
                number = self._received[self._asked]
                self._asked += 1
                if number == signal.SIGTERM and launch_has_failed(
                    self._task.attempt, self._task.launch
                ):
                    return 128 + number  # because of it: no one is left to save with
                self._ask(process.pid)
            overdue = self._overdue(process)
            if overdue is not None:
                return overdue

    def _is_done(self) -> bool:
        return trainer_is_done(self._task.attempt, self._task.launch)

    def _look(self, pid: int) -> None:
        """Notice and keep what has happened since the last look. `pid`: of torchrun."""
        self._watch.look(pid)
        if len(self._watch.failures) > self._told:
            self._told = len(self._watch.failures)
            self._keep(has_failed=True)
        if self._memory.sample(pid):
            self._record.write(memory=self._memory.record())
        if self._failed_since is None and self._has_failed.is_set():
            self._failed_since = time.monotonic()
            self._memory.look_at_tree(pid)
        if self._done_since is None and self._is_done():
            self._done_since = time.monotonic()

    def _overdue(self, process: subprocess.Popen[bytes]) -> int | None:
        """The exit status where the others outstay a failure, or all outstay the training; else
        None.
        """
        now = time.monotonic()
        within = self._settings.end_within_seconds
        if self._failed_since is not None and now - self._failed_since > within / 2:
            print(
                f"tr11: {host_name()}: a worker failed, but the others stay: ending them",
                flush=True,
            )
            return EXIT_ERROR
        patience = min(QUIT_SECONDS, within)
        if self._done_since is not None and now - self._done_since > patience:
            print(
                f"tr11: the trainer ended {patience:.0f} s ago, but its processes stay: ending them",
                flush=True,
            )
            end_descendants(grace_seconds=5.0)
            process.wait()
            return 0
        return None

    def _ask(self, pid: int) -> None:
        """Ask the trainer to save and leave: by the file, or, where no file can be written, by a
        signal to the workers.
        """
        request = self._task.attempt / STOP_REQUEST_FILE
        try:
            request_stop(request, f"signal to the node agent of {host_name()}")
        except OSError as error:
            print(
                f"tr11: no stop request can be written, signalling the workers: {error}", flush=True
            )
            signal_children(pid, signal.SIGUSR1)

    def _record_death(self, name: str, rank: int | None, number: int, what: str) -> None:
        """Keep what a killed process cannot say itself; its peers' own words are of the connection
        that it took along.
        """
        if number in STOP_SIGNALS:
            return  # told to go before it could listen: by a cancellation, not by a fault
        death = HostFailure.killed(what, number, self._task.launch, rank)
        try:
            death.write(self._task.attempt, name, host_name())
        except OSError as problem:
            print(f"tr11: {host_name()}: {death.error} (not recorded: {problem})", flush=True)

    def _pass_on(self, stream: IO[bytes]) -> None:
        """Copy the workers' lines to our output, and below the launch's own line to
        `workers/NODE/rank-R.log` (R: global).

        Whatever cannot be written, the reading goes on: a full pipe would stop the training.
        """
        task = self._task
        folder = task.attempt / "workers" / host_name()
        count = counted(task.places.nodes, "node")
        beginning = launch_line(task.job_id, label_in(task.attempt), task.launch, count)
        files: dict[int, IO[bytes]] = {}
        for line in whole_lines(stream):
            match = _RANK_PREFIX.match(line)
            if match is None:
                self._hear(line)
            else:
                rank = self._rank(match[1])
                # a full disk must not silence the main log, which says the same
                with suppress(OSError):
                    if rank not in files:
                        make_shared(folder)
                        log = open_shared(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_APPEND)
                        files[rank] = os.fdopen(log, "ab", buffering=0)
                        files[rank].write(f"{beginning}\n".encode())
                    files[rank].write(line[match.end() :])
            with suppress(OSError):
                os.write(sys.stdout.fileno(), line)
        for file in files.values():
            file.close()

    def _rank(self, local: bytes) -> int:
        return self._task.places.first_rank + int(local)

    def _hear(self, line: bytes) -> None:
        """Keep what torchrun and the launcher say of failed workers, and of themselves."""
        if _FAILING.search(line):
            self._has_failed.set()
        if told := _TOLD.match(line):
            rank = int(told[1])
            how = told[3].decode("utf-8", "replace")
            self._watch.told(rank, int(told[2]), how)
            by = _SIGNAL.search(how)
            number = signal_number(by[1]) if by else None
            # afterwards it is torchrun that ends them
            if number is not None and not self._has_failed.is_set():
                self._record_death(f"killed-{rank}", rank=rank, number=number, what="the worker")
        if launcher := _LAUNCHER.match(line):
            with suppress(OSError):  # the log says it too
                error = launcher[1].decode("utf-8", "replace")
                failure = HostFailure(error, self._task.launch)
                failure.write(self._task.attempt, "launcher", host_name())
        if killed := _KILLED.search(line):
            rank = self._rank(killed[2])
            number = int(killed[1])
            self._record_death(f"killed-{rank}", rank=rank, number=number, what="the worker")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tr11ops.agent.node", description=__doc__.split("\n\n")[0]
    )
    for name in ("attempt", "card"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--master-address", required=True)
    for name in ("launch", "node-count", "workers", "master-port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--controller-time", type=float, default=None)
    options = parser.parse_args(arguments)
    node_rank = int(os.environ.get("TR11_NODE_RANK") or os.environ["SLURM_NODEID"])
    places = NodePlaces(
        options.node_count,
        node_rank,
        options.workers,
        address=options.master_address,
        port=options.master_port,
    )
    task = NodeTask(
        options.attempt,
        options.card,
        options.job_id,
        launch=options.launch,
        places=places,
        controller_time=options.controller_time,
    )
    return run(task)


if __name__ == "__main__":
    leave(main())
