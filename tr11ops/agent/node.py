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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from tr11ops.agent.exit_records import Death, keep_launchers_word, trainer_is_done
from tr11ops.agent.memory_watch import MemoryWatch, WorkerWatch
from tr11ops.agent.node_record import NodeRecord, NodeSettings, launch_has_failed
from tr11ops.agent.worker_environment import (
    FLIGHT_RECORDS,
    prepare_caches,
    torch_version,
    worker_defaults,
)
from tr11ops.base.processes import (
    CONTROLLER_VARIABLE,
    adopt_orphans,
    die_with_parent,
    end_descendants,
    exit_status,
    signal_children,
)
from tr11ops.base.units import counted
from tr11ops.cluster.rehearsal import is_rehearsal
from tr11ops.health.base import EXIT_BAD_NODE, CheckOutcome, CheckResult, NodeRequirements, worst
from tr11ops.health.host import exported_folder
from tr11ops.health.registry import chosen, run_checks
from tr11ops.health.system import System
from tr11ops.rundir.attempts import launch_line
from trainer.contract.attempt import STOP_SIGNALS, request_stop
from trainer.contract.documents import document
from trainer.contract.end_marker import EXIT_ERROR
from trainer.contract.files import host_name, user_of
from trainer.contract.paths import STOP_REQUEST_FILE, label_in
from trainer.contract.record import Record
from trainer.contract.sharing import make_shared, open_shared
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
    node_rank: int
    node_count: int
    workers: int
    master_address: str
    master_port: int
    controller_time: float | None = None

    @property
    def command(self) -> list[str]:
        """torchrun with a static rendezvous: the node list is known, so nothing has to be
        negotiated.

        A rehearsal has its own launcher, which takes the same places.
        """
        places = [
            f"--nnodes={self.node_count}",
            f"--node-rank={self.node_rank}",
            f"--nproc-per-node={self.workers}",
            f"--master-addr={self.master_address}",
            f"--master-port={self.master_port}",
        ]
        if is_rehearsal(self.card):
            return [sys.executable, "-u", "-m", "tr11ops.twin.stand_in", *places, str(self.card)]
        return [
            sys.executable,
            "-u",
            "-m",
            "trainer.control.launcher",
            *places,
            "--max-restarts=0",
            "--tee=3",
            f"--log-dir={self.attempt / 'torchrun' / str(self.node_rank)}",
            "-m",
            "trainer",
            str(self.card),
        ]

    def environment(self, settings: NodeSettings) -> dict[str, str]:
        """Of the workers."""
        # NCCL's watchdog makes no folder; without one there is no record, and no harm
        with suppress(OSError):
            make_shared(self.attempt / FLIGHT_RECORDS)
        temporary = Path(tempfile.gettempdir())
        # one of this attempt's own: slower, and no one else's code
        if not prepare_caches(temporary):
            temporary = Path(tempfile.mkdtemp(prefix="tr11-"))
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
            "TR11_LAUNCH": str(self.launch),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


@dataclass
class Course:
    """What has happened to this launch on this node so far; set by signal handlers and by the
    reader of the output.
    """

    received: list[int] = field(default_factory=list)
    failed: threading.Event = field(default_factory=threading.Event)
    workers: WorkerWatch = field(default_factory=WorkerWatch)


def run(task: NodeTask) -> int:
    """Check the node and run its workers to their end.

    Returns torchrun's exit status (128 + n when a signal ended it), or EXIT_BAD_NODE when a check
    found the node bad: then no worker was started.
    """
    parent = int(os.environ.get(CONTROLLER_VARIABLE) or os.getppid())
    adopt_orphans()
    course = Course()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda received, _frame: course.received.append(received))
    settings = NodeSettings.read(task.card)
    record = NodeRecord(task.attempt, task.node_rank, task.launch)
    results = check_node(task, settings)
    record.write(checks=[document(entry) for entry in results])
    if _report(results) is CheckOutcome.BAD:
        _wait_for_others(task, course)
        record.write(end=time.time(), exit_status=EXIT_BAD_NODE)
        return EXIT_BAD_NODE
    if signal.SIGTERM in course.received:  # the step is being ended
        record.write(end=time.time(), exit_status=128 + signal.SIGTERM)
        return 128 + signal.SIGTERM
    return _run_workers(task, settings, record=record, course=course, parent=parent)


def _wait_for_others(task: NodeTask, course: Course) -> None:
    """Stay until each node has told how its checks ended: Slurm ends the step when this agent
    leaves, and what fails on one node alone is told from what fails everywhere by the answers of
    the others.
    """
    from tr11ops.diagnose.attribution.records import read_reports  # 30 ms, for a bad node alone

    until = time.monotonic() + OTHERS_SECONDS
    while signal.SIGTERM not in course.received and time.monotonic() < until:
        told = [
            one
            for one in read_reports(task.attempt, task.launch)
            if one.bad_checks or one.passed_checks
        ]
        if len(told) >= task.node_count:
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
        workers=task.workers,
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
    return "SLURM_STEP_ID" in environment and environment.get("TR11_SCHEDULER") != "local"


def _report(results: tuple[CheckResult, ...]) -> CheckOutcome:
    """Say what is not well, one line a check; a node that is well says nothing."""
    for entry in results:
        if entry.result in {CheckOutcome.BAD, CheckOutcome.WARNING}:
            print(
                f"tr11: {host_name()}: health check {entry.name}: {entry.result}: {entry.why}",
                flush=True,
            )
    return worst(results)


def _run_workers(
    task: NodeTask, settings: NodeSettings, record: NodeRecord, course: Course, parent: int
) -> int:
    make_shared(task.attempt / "torchrun" / str(task.node_rank))
    process = subprocess.Popen(
        task.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=task.environment(settings),
        start_new_session=True,
        preexec_fn=_prepare_torchrun,  # noqa: PLW1509  no thread runs any more, unless a check hangs in the kernel
    )
    assert process.stdout is not None
    pump = threading.Thread(target=_pass_on, args=(process.stdout, task, course), daemon=True)
    pump.start()
    watch = MemoryWatch(host_name(), lambda line: print(line, flush=True))
    status = _wait(
        process, task, settings=settings, course=course, parent=parent, watch=watch, record=record
    )
    ended = end_descendants(grace_seconds=settings.end_within_seconds / 4)
    pump.join(timeout=5.0)
    record.write(
        end=time.time(),
        exit_status=status,
        ended_processes=ended,
        memory=watch.record(),
        swept_shared_memory=list(watch.sweep()),
        **_what_failed(task, course, has_failed=status != 0),
    )
    return status


def _what_failed(task: NodeTask, course: Course, has_failed: bool = True) -> dict[str, Any]:
    """What is known of a failure when it is told. It is kept then: this agent may be killed before
    all that it has started is gone.
    """
    is_first = has_failed and task.node_rank == 0
    return {
        "failed_workers": course.workers.failures,
        "port_holder": holder_of(task.master_port) if is_first else "",
    }


def _prepare_torchrun() -> None:
    """In the child, before torchrun: USR1 asks the trainer to save, and would end torchrun, which
    does not handle it.

    Workers take it over when they install their own; until then the stop request stands for it. And
    when this agent is killed, torchrun ends its workers: not every Slurm finds processes that were
    left in a session of their own.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent(signal.SIGTERM)


def _wait(
    process: subprocess.Popen[bytes],
    task: NodeTask,
    settings: NodeSettings,
    course: Course,
    parent: int,
    watch: MemoryWatch,
    record: NodeRecord,
) -> int:
    done_since: float | None = None
    failed_since: float | None = None
    asked = told = 0
    while True:
        try:
            status = process.wait(timeout=0.2)
            if status < 0 and not trainer_is_done(task.attempt, task.launch):
                _record_death(task, "launcher", rank=None, number=-status, what="torchrun")
            return exit_status(status)
        except subprocess.TimeoutExpired:
            pass
        if os.getppid() != parent:
            return CONTROLLER_GONE  # the caller ends what runs here
        course.workers.look(process.pid)
        if len(course.workers.failures) > told:
            told = len(course.workers.failures)
            record.write(memory=watch.record(), **_what_failed(task, course))
        if watch.sample(process.pid):
            record.write(memory=watch.record())
        if len(course.received) > asked:
            number = course.received[asked]
            asked += 1
            if number == signal.SIGTERM and launch_has_failed(task.attempt, task.launch):
                return 128 + number  # the step is ended because of it: no one is left to save with
            _ask(process, task)
        if failed_since is None and course.failed.is_set():
            failed_since = time.monotonic()
            watch.look_at_tree(process.pid)
        if done_since is None and trainer_is_done(task.attempt, task.launch):
            done_since = time.monotonic()
        if (
            failed_since is not None
            and time.monotonic() - failed_since > settings.end_within_seconds / 2
        ):
            print(
                f"tr11: {host_name()}: a worker failed, but the others stay: ending them",
                flush=True,
            )
            return EXIT_ERROR  # the caller ends what runs here
        patience = min(QUIT_SECONDS, settings.end_within_seconds)
        if done_since is not None and time.monotonic() - done_since > patience:
            print(
                f"tr11: the trainer ended {patience:.0f} s ago, but its processes stay: ending them",
                flush=True,
            )
            end_descendants(grace_seconds=5.0)
            process.wait()
            return 0


def _ask(process: subprocess.Popen[bytes], task: NodeTask) -> None:
    """Ask the trainer to save and leave: by the file, or, where no file can be written, by a signal
    to the workers.
    """
    try:
        request_stop(task.attempt / STOP_REQUEST_FILE, f"signal to the node agent of {host_name()}")
    except OSError as error:
        print(f"tr11: no stop request can be written, signalling the workers: {error}", flush=True)
        signal_children(process.pid, signal.SIGUSR1)


def _record_death(task: NodeTask, name: str, rank: int | None, number: int, what: str) -> None:
    """Keep what a killed process cannot say itself; its peers' own words are of the connection that
    it took along.
    """
    if number in STOP_SIGNALS:
        return  # told to go before it could listen: by a cancellation, not by a fault
    death = Death(what, host_name(), number=number, launch=task.launch, rank=rank)
    try:
        death.write(task.attempt, name)
    except OSError as problem:
        print(f"tr11: {death.host}: {death} (not recorded: {problem})", flush=True)


def _pass_on(stream: IO[bytes], task: NodeTask, course: Course) -> None:
    """Copy the workers' lines to our output, and below the launch's own line to
    `workers/NODE/rank-R.log` (R: global).

    Whatever cannot be written, the reading goes on: a full pipe would stop the training. What
    torchrun and the launcher say of failed workers is kept in `course`.
    """
    folder = task.attempt / "workers" / host_name()
    count = counted(task.node_count, "node")
    beginning = launch_line(task.job_id, label_in(task.attempt), task.launch, count)
    files: dict[int, IO[bytes]] = {}
    for line in stream:
        match = _RANK_PREFIX.match(line)
        if match:
            rank = task.node_rank * task.workers + int(match.group(1))
            # a full disk must not silence the main log, which says the same
            with suppress(OSError):
                if rank not in files:
                    make_shared(folder)
                    log = open_shared(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_APPEND)
                    files[rank] = os.fdopen(log, "ab", buffering=0)
                    files[rank].write(f"{beginning}\n".encode())
                files[rank].write(line[match.end() :])
        if not match and _FAILING.search(line):
            course.failed.set()
        if match:
            told = None
        else:
            told = _TOLD.match(line)
        if told:
            rank, how = int(told[1]), told[3].decode("utf-8", "replace")
            course.workers.told(rank, int(told[2]), how)
            by = _SIGNAL.search(how)
            number = signal_number(by[1]) if by else None
            # afterwards it is torchrun that ends them
            if number is not None and not course.failed.is_set():
                _record_death(
                    task,
                    f"killed-{rank}",
                    rank=rank,
                    number=number,
                    what="the worker",
                )
        if match:
            launcher = None
        else:
            launcher = _LAUNCHER.match(line)
        if launcher:
            with suppress(OSError):  # the log says it too
                error = launcher[1].decode("utf-8", "replace")
                keep_launchers_word(task.attempt, task.launch, host_name(), error)
        killed = _KILLED.search(line)
        if killed and not match:
            rank = task.node_rank * task.workers + int(killed.group(2))
            _record_death(
                task, f"killed-{rank}", rank=rank, number=int(killed.group(1)), what="the worker"
            )
        with suppress(OSError):
            os.write(sys.stdout.fileno(), line)
    for file in files.values():
        file.close()


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
    return run(NodeTask(node_rank=node_rank, **vars(options)))


if __name__ == "__main__":
    sys.exit(main())
