"""The faults of a twin, kept in its own folder: any process sees what is broken, and can heal what
another broke.

A record is written before anything is broken, so that a crash of the one who breaks leaves nothing
that is unknown.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import TwinError
from tr11ops.twin.plan import TwinFolders
from tr11ops.twin.processes import ProcessRecord
from trainer.contract.documents import read_record, write_record
from trainer.contract.files import append_line
from trainer.contract.record import Record


class InjectedFault(Record):
    """One fault that was given to a twin. Times in seconds since the epoch; `until` None: until
    someone heals it.

    `target` is a node, a directory, or "slurmctld". `processes` were killed or stopped; `agent`
    keeps the fault up, or heals it in time. `is_complete` is False while it is being done, and
    stays so when its doer crashed.
    """

    kind: str
    target: str
    identity: str
    started: float
    until: float | None = None
    by: str = ""
    is_complete: bool = False
    processes: tuple[ProcessRecord, ...] = ()
    agent: ProcessRecord | None = None
    details: Mapping[str, str] = {}

    @property
    def key(self) -> str:
        """Name of its record: a target has at most one fault of a kind."""
        return f"{self.kind}@{re.sub(r'[^A-Za-z0-9._-]', '_', self.target)[-120:]}"

    @property
    def is_lost(self) -> bool:
        """True when the process that keeps it up, or heals it in time, has ended."""
        return self.agent is not None and not self.agent.is_alive

    def __str__(self) -> str:
        return f"{self.kind} on {self.target}"


def new_fault(kind: str, target: str, seconds: float | None) -> InjectedFault:
    """A fault that begins now and, with `seconds`, ends by itself."""
    now = time.time()
    return InjectedFault(
        kind,
        target,
        identity=secrets.token_hex(6),
        started=now,
        until=None if seconds is None else now + seconds,
        by=f"process {os.getpid()}",
    )


class FaultStore(Record):
    """The records below one twin's folder, and its history of faults."""

    folders: TwinFolders

    @property
    def folder(self) -> Path:
        return self.folders.root / "faults"

    @property
    def history(self) -> Path:
        """One JSON line for each fault that began or was healed, with its time."""
        return self.folders.logs / "faults.jsonl"

    @property
    def helpers(self) -> Path:
        """The ledger of the processes that keep faults up."""
        return self.folders.root / "helpers.jsonl"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One at a time: a second command, or a fault that ends by itself, waits. Raises TwinError
        without a twin.
        """
        try:
            descriptor = os.open(
                self.folders.root / "faults.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise TwinError(
                f"{self.folders.root} cannot be written ({error.strerror}): is the twin yours?"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def active(self) -> tuple[InjectedFault, ...]:
        """What is broken now, oldest first. Raises TwinError for a record that cannot be read."""
        found = []
        for path in self.folder.glob("*.json"):
            try:
                fault = read_record(InjectedFault, path, "a fault")
            except (OSError, ValueError) as error:
                raise TwinError(
                    f"{path} is no record of a fault ({error}): remove it, or take the twin down"
                ) from error
            if fault is not None:  # else healed at this moment
                found.append(fault)
        return tuple(sorted(found, key=lambda fault: (fault.started, fault.key)))

    def find(self, key: str) -> InjectedFault | None:
        """The active fault of that key."""
        return next((fault for fault in self.active() if fault.key == key), None)

    def write(self, fault: InjectedFault) -> InjectedFault:
        """Keep a fault's record and return it."""
        write_record(self.folder / f"{fault.key}.json", fault)
        return fault

    def complete(self, fault: InjectedFault) -> InjectedFault:
        """The fault is done: keep that, and note it in the history."""
        done = self.write(replace(fault, is_complete=True))
        self._note("broken", done)
        return done

    def remove(self, fault: InjectedFault) -> None:
        """The fault is healed, or was over at once."""
        (self.folder / f"{fault.key}.json").unlink(missing_ok=True)
        self._note("healed", fault)

    def _note(self, event: str, fault: InjectedFault) -> None:
        value = {"event": event, "kind": fault.kind, "target": fault.target, "time": time.time()}
        pids = [record.pid for record in fault.processes]
        append_line(self.history, json.dumps({**value, "identity": fault.identity, "pids": pids}))
