"""The processes of a twin: each is known by pid and start time, so that no other process is ever
touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from tr11ops.cluster.process_marks import boot_mark, start_mark
from tr11ops.twin.plan import TwinFolders
from trainer.contract.documents import document, record_of_text
from trainer.contract.record import Record

MARK = "TR11_TWIN_MARK"  # in the environment of every daemon; its value is unique for each twin
DEFAULT_SIGNALS = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
)


class ProcessRecord(Record):
    """One process: what it is, and the two numbers which identify it until the machine restarts."""

    role: str  # "munged", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "hub", "store", "job"
    name: str  # the node of a slurmd, otherwise the role
    pid: int
    start_ticks: int  # clock ticks since boot, as the kernel counts them
    boot_id: str

    @property
    def is_alive(self) -> bool:
        """True while exactly this process runs; a zombie or another process with the same pid is
        not it.
        """
        return self.boot_id == boot_mark() and start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None if there is none or it is a
    zombie.
    """
    mark = start_mark(pid)
    if mark is None:
        return None
    return int(mark)


def spawn(
    folders: TwinFolders,
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    role: str = "",
    ledger: Path | None = None,
) -> ProcessRecord:
    """Start a daemon in its own session, output appended to its log, and note it in the ledger at
    once.

    `role`: the name where it is not given; `ledger`: the twin's own.
    """
    log = folders.logs / f"{name}.out"
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(
        arguments[0],
        list(arguments),
        dict(environment),
        file_actions=actions,
        setsid=True,
        setsigmask=(),
        setsigdef=DEFAULT_SIGNALS,  # Python ignores SIGPIPE, and jobs would inherit that
    )
    record = ProcessRecord(role or name, name, pid, start_ticks(pid) or 0, boot_mark())
    with (ledger or folders.processes).open("a") as stream:
        stream.write(json.dumps(document(record)) + "\n")
    return record


def read_ledger(ledger: Path) -> tuple[ProcessRecord, ...]:
    """All records of a twin; a last line cut short by a crash is left out, since the mark finds its
    process.
    """
    records = []
    try:
        lines = ledger.read_text().splitlines()
    except FileNotFoundError:
        return ()
    for line in lines:
        with contextlib.suppress(ValueError):
            records.append(record_of_text(ProcessRecord, line))
    return tuple(records)


def marked(mark: str, configuration: Path) -> tuple[ProcessRecord, ...]:
    """Running processes that belong to a twin: daemons by `mark`, step managers and jobs by their
    environment.

    Slurm clears the environment of slurmstepd but for SLURM_CONF. A job's process has the twin's
    slurm.conf and the name of a node there, which a person's shell inside the twin has not; what a
    job started is found through its parents too.
    """
    mark_entry = f"{MARK}={mark}".encode()
    conf_entry = f"SLURM_CONF={configuration}".encode()
    found: dict[int, ProcessRecord] = {}
    here = boot_mark()
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process.pid)
        entries = environment_of(process.pid)
        if mark_entry in entries:
            role = "daemon"
        elif conf_entry in entries and (
            any(entry.startswith(b"SLURMD_NODENAME=") for entry in entries)
            or command_name(process.pid) == "slurmstepd"
        ):
            role = "job"
        else:
            continue
        ticks = start_ticks(process.pid)
        if ticks is not None:
            found[process.pid] = ProcessRecord(role, role, process.pid, ticks, here)
    waiting = list(found)
    while waiting:
        for child in children.get(waiting.pop(), []):
            ticks = start_ticks(child)
            if child not in found and ticks is not None:
                found[child] = ProcessRecord("job", "job", child, ticks, here)
                waiting.append(child)
    found.pop(os.getpid(), None)
    return tuple(found.values())


def environment_of(pid: int) -> list[bytes]:
    """The entries of a process's first environment; empty when it is gone or another user's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def command_name(pid: int) -> str:
    """The kernel's short name of a process; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def end(records: Iterable[ProcessRecord], grace_seconds: float) -> tuple[ProcessRecord, ...]:
    """End exactly these processes: SIGTERM, then SIGKILL after `grace_seconds` (0: at once).
    Returns what survived.
    """
    alive = [record for record in records if record.is_alive]
    if grace_seconds > 0:
        send(alive, signal.SIGTERM)
        send(alive, signal.SIGCONT)  # a stopped daemon must wake to see it
        alive = _wait(alive, grace_seconds)
    send(alive, signal.SIGKILL)
    return tuple(_wait(alive, 10.0))


def send(records: Iterable[ProcessRecord], number: signal.Signals) -> int:
    """Send a signal to exactly these processes; returns how many were there to get it."""
    reached = 0
    for record in records:
        with contextlib.suppress(ProcessLookupError):
            if record.is_alive:
                os.kill(record.pid, number)
                reached += 1
    return reached


def _wait(records: Sequence[ProcessRecord], seconds: float) -> list[ProcessRecord]:
    deadline = time.monotonic() + seconds
    while True:
        alive = [record for record in records if record.is_alive]
        for record in records:
            if record not in alive and record.boot_id == boot_mark():
                with contextlib.suppress(ChildProcessError):
                    # ours, when this process started it: leave no zombie
                    os.waitpid(record.pid, os.WNOHANG)
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.02)
