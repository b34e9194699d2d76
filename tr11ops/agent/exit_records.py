"""What a node leaves on record: words of processes about their end (the trainer's end marker, the
death of what could not speak), and what its agent found and did.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from trainer.contract.attempt import EXIT_ERROR, EndMarker
from trainer.contract.documents import document, record_of
from trainer.contract.files import host_name, write_json
from trainer.contract.record import Record
from trainer.contract.state_file import read_json
from trainer.contract.units import signal_name


def trainer_is_done(attempt: Path, launch: int) -> bool:
    """Has the trainer of this launch left its end marker?"""
    try:
        return EndMarker.of_launch(attempt, launch) is not None
    except (ValueError, OSError):
        return False


def forget_earlier_life(attempt: Path, launch: int) -> None:
    """Remove what is recorded of a launch that has not begun: the job had this number before it was
    requeued.

    What cannot be read or removed stays; it is said by whoever reads it.
    """
    for folder in ("failures", "nodes"):
        for path in (attempt / folder).glob("*.json"):
            with suppress(OSError, ValueError):
                value = read_json(path)
                if isinstance(value, dict) and value.get("launch") == launch:
                    path.unlink()


class HostFailure(Record):
    """What failed on a host, as it is kept in `failures/`; `rank` of a worker, else None. `signal`:
    that ended it, so that it cannot tell of it itself.
    """

    error: str
    launch: int
    rank: int | None = None
    signal: int | None = None

    @classmethod
    def killed(cls, what: str, number: int, launch: int, rank: int | None = None) -> HostFailure:
        return cls(f"{what} was ended by {signal_name(number)}", launch, rank, number)

    def write(self, attempt: Path, name: str, host: str) -> None:
        """Keep it as `failures/NAME-HOST.json`. Raises OSError when it cannot be written."""
        value = {"host": host, "time": time.time(), **document(self)}
        if self.signal is None:
            del value["signal"]
        write_json(attempt / "failures" / f"{name}-{host}.json", value)


# ----------------------------------------------------------------------------- the node's agent
class NodeSettings(Record):
    """What the agent itself needs of the run card. The defaults hold where it cannot be read:
    `fault` says why.
    """

    gpus: int = 0
    tensor: int = 1
    check_scripts: tuple[str | dict[str, Any], ...] = ()
    skip_checks: tuple[str, ...] = ()
    check_seconds: float = 30.0
    end_within_seconds: float = 20.0
    fault: str = ""

    @classmethod
    def read(cls, card: Path) -> NodeSettings:
        """From the resolved card: plain JSON, because building a RunCard would take longer than all
        checks together.
        """
        try:
            value = read_json(card) or {}
            tensor = value.get("parallel", {}).get("tensor", 1)
            gpus = value["slurm"]["gpus_per_node"]
            return record_of(cls, {**value.get("resilience", {}), "tensor": tensor, "gpus": gpus})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return cls(fault=f"its health settings cannot be read: {error}")


class NodeRecord:
    """`state/attempts/JOBID/nodes/NODE.json`: what this agent found and did, replaced at each turn
    of events.
    """

    def __init__(self, attempt: Path, node_rank: int, launch: int):
        self._path = attempt / "nodes" / f"{host_name()}.json"
        self._value: dict[str, Any] = {
            "node": host_name(),
            "node_rank": node_rank,
            "launch": launch,
            "pid": os.getpid(),
            "start": time.time(),
            "end": None,
            "exit_status": None,
            "ended_processes": [],
            "checks": [],
            "addresses": own_addresses(),
        }

    def write(self, **changes: Any) -> None:
        """Change some values and replace the file. A file that cannot be written stops nothing, and
        is said.
        """
        self._value.update(changes)
        try:
            write_json(self._path, self._value)
        except OSError as error:
            print(f"tr11: the record of {host_name()} could not be written: {error}", flush=True)


def own_addresses() -> list[str]:
    """The addresses of this node's interfaces by which its peers may speak of it; empty where they
    are not known.
    """
    try:
        interfaces = psutil.net_if_addrs().values()
    except OSError:
        return []
    kinds = (socket.AF_INET, socket.AF_INET6)
    found = {
        entry.address.partition("%")[0]
        for own in interfaces
        for entry in own
        if entry.family in kinds
    }
    return sorted(one for one in found if not ipaddress.ip_address(one).is_loopback)


def launch_has_failed(attempt: Path, launch: int) -> bool:
    """Has a worker or a node of this launch failed already, by what they recorded?"""
    for path in (*(attempt / "failures").glob("*.json"), *(attempt / "nodes").glob("*.json")):
        try:
            value = read_json(path) or {}
            if value["launch"] == launch and value.get("exit_status", EXIT_ERROR) not in {None, 0}:
                return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # half a record of a half-dead node
    return False
