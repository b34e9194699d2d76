"""Reads what a launch left in its attempt's folder: failures, node agents' records, torch elastic's
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tr11ops.base.units import counted, size
from tr11ops.diagnose.attribution.evidence import Failure, MissedWorker, NodeReport
from tr11ops.rundir.attempts import LaunchRecord
from trainer.contract.documents import record_of
from trainer.contract.state_file import read_json


def read_failures(attempt: Path, launch: int) -> tuple[Failure, ...]:
    """The failures that this launch recorded. A half-dead node may leave half a record: the others
    still speak.
    """
    found = []
    for value in read_objects(attempt / "failures"):
        if value.get("launch", launch) != launch:
            continue
        try:
            found.append(record_of(Failure, value))
        except ValueError:
            continue
    return tuple(sorted(found, key=lambda one: one.time))


def all_failures(attempt: Path, record: LaunchRecord) -> tuple[Failure, ...]:
    """The failures of a launch, the first one first; torch elastic's files speak where a node has
    no better word.
    """
    own = read_failures(attempt, record.launch)
    hosts = {one.host for one in own}
    files = read_elastic_errors(attempt, record.nodes, record.start)
    return tuple(
        sorted((*own, *(one for one in files if one.host not in hosts)), key=lambda one: one.time)
    )


def read_elastic_errors(attempt: Path, nodes: Sequence[str], since: float) -> tuple[Failure, ...]:
    """What workers left in the error files of torch elastic, written since `since` (seconds since
    the epoch).

    Such a file says when a worker failed and why; its path says on which node of the launch, the
    n-th of `nodes`, and as which of its workers.
    """
    found = []
    for path in (attempt / "torchrun").glob("*/*/attempt_*/*/error.json"):
        number = path.relative_to(attempt).parts[1]
        if number.isdecimal():
            place = int(number)
        else:
            place = len(nodes)
        if place >= len(nodes):
            continue
        try:
            error_record = (read_json(path) or {})["message"]
            if isinstance(error_record, str):
                text, when = (error_record, path.stat().st_mtime)
            else:
                text, when = (
                    error_record["message"],
                    float(error_record["extraInfo"]["timestamp"]),
                )
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if when >= since:
            error = str(text).strip().splitlines()
            found.append(Failure(nodes[place], None, when, error[-1] if error else "no words"))
    return tuple(sorted(found, key=lambda one: one.time))


def read_ranks(attempt: Path) -> dict[int, str]:
    """Node by global rank, as the workers' logs lie; of a rank that has moved, where it wrote last."""
    newest: dict[int, tuple[float, str]] = {}
    for path in (attempt / "workers").glob("*/rank-*.log"):
        number = path.stem.removeprefix("rank-")
        try:
            written = path.stat().st_mtime
        except OSError:
            continue
        if number.isdecimal():
            newest[int(number)] = max(
                newest.get(int(number), (0.0, "")), (written, path.parent.name)
            )
    return {rank: node for rank, (_, node) in sorted(newest.items())}


def read_reports(attempt: Path, launch: int) -> tuple[NodeReport, ...]:
    """The node agents' records of this launch."""
    found = []
    for value in read_objects(attempt / "nodes"):
        if value.get("launch") != launch or not isinstance(value.get("node"), str):
            continue
        status = value.get("exit_status")
        checks = value.get("checks")
        bad = tuple(
            f"{check.get('name')}: {check.get('why')}"
            for check in (checks if isinstance(checks, list) else [])
            if isinstance(check, dict) and check.get("result") == "bad"
        )
        passed = tuple(
            str(check.get("name"))
            for check in (checks if isinstance(checks, list) else [])
            if isinstance(check, dict) and check.get("result") in {"fine", "warning"}
        )
        addresses = value.get("addresses")
        if isinstance(addresses, list):
            own = tuple(map(str, addresses))
        else:
            own = ()
        exit_status = status if isinstance(status, int) else None
        holder = str(value.get("port_holder") or "")
        memory = _memory_said(value.get("memory"))
        found.append(
            NodeReport(
                value["node"],
                exit_status,
                bad_checks=bad,
                addresses=own,
                first_missed=_missed(value),
                port_holder=holder,
                memory=memory,
                passed_checks=passed,
            )
        )
    return tuple(found)


def _memory_said(memory: object) -> str:
    """What a node's record tells of its memory while the workers ran (see
    `tr11ops.agent.memory_watch`).
    """
    if not isinstance(memory, dict):
        return ""
    killed, warnings = memory.get("oom_kills"), memory.get("warnings")
    if isinstance(killed, int) and killed > 0:
        return f"the kernel killed {counted(killed, 'process', 'processes')} for want of memory"
    if isinstance(warnings, list) and warnings:
        return str(warnings[-1])
    lowest, total = memory.get("lowest_available_bytes"), memory.get("total_bytes")
    if not isinstance(lowest, int) or not isinstance(total, int) or killed is None:
        return ""
    return f"no want of memory was seen: at the least {size(lowest)} of {size(total)} were left"


def _missed(record: Mapping[str, Any]) -> MissedWorker | None:
    """The failed worker of a node's record that was missed first, those that were told to go left
    out.
    """
    found = []
    for value in record.get("failed_workers") or ():
        try:
            one = record_of(MissedWorker, value)
        except ValueError:
            continue
        if one.how != "ended by SIGTERM":
            found.append(one)
    return min(found, key=lambda one: one.time, default=None)


def read_fixed_port(attempt: Path) -> int | None:
    """Rank 0's port, where the attempt's card fixes it."""
    try:
        port = (read_json(attempt / "card.json") or {}).get("slurm", {}).get("master_port")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(port, int):
        return port
    return None


def read_objects(folder: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in a folder; what cannot be read is left out."""
    for path in sorted(folder.glob("*.json")):
        try:
            value = read_json(path)
        except (OSError, ValueError):
            continue
        if value is not None:
            yield value
