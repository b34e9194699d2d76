"""Records of real node failures, read into faults of a replay.

Two public formats are known: the fault trace of 400 GPU servers over 348 days (StepFun's
InfiniteHBD-Trace, JSON) and the failures of Los Alamos' clusters, 1996 to 2005 (CSV, also
compressed with xz). Neither says how a fault showed itself to a training; what is assumed of each
kind stands in `KINDS` and `LANL_KINDS`.
"""

from __future__ import annotations

import csv
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import WrongUsage
from tr11ops.base.observed import cause
from tr11ops.base.units import counted, duration
from trainer.contract.record import Record

DAY = 86_400.0
SERVERS = 400  # of the GPU trace; those without a fault are not named in it


class FaultSign(StrEnum):
    """How a fault shows itself to a training on the node."""

    HARDWARE = "hardware"  # a worker's error names broken hardware, and the health check finds it
    NETWORK = "network"  # the others lose the node's ranks, and say so
    CRASH = "crash"  # a worker dies by a signal; no health check finds why
    HANG = "hang"  # a worker goes no further; the others wait until they give up
    LOSS = "loss"  # the node is gone for the scheduler
    DEGRADED = "degraded"  # what runs goes on; the site takes the node when it is free
    SHARED = "shared"  # it is no node's: the workers of all nodes end with one error
    DATA = "data"  # of one step: a worker of each launch that trains it dies by a signal


class Fault(Record):
    """One fault of one node, from `start` until it was repaired at `end`, in seconds since the
    beginning of its trace. `what`: in the record's own words. `unseen`: seconds from `start` to its
    first sign, where the record says so. `node` is "" where it is no node's (SHARED, DATA).
    """

    node: str
    start: float
    end: float
    kind: FaultSign
    what: str = ""
    unseen: float | None = None


class Trace(Record):
    """All faults of a group of nodes, by their start. `nodes` are all that were watched, those
    without a fault too; `seconds`: how long. `is_in_order`: neighbours in `nodes` are neighbours in
    the machine room, which fail together.
    """

    name: str
    nodes: tuple[str, ...]
    seconds: float
    faults: tuple[Fault, ...]
    is_in_order: bool = False


class Window(Record):
    """A part of a trace for one replay: its own nodes, and faults in seconds since its beginning."""

    nodes: tuple[str, ...]
    seconds: float
    faults: tuple[Fault, ...]
    label: str = ""


# ----------------------------------------------------------------------------- 400 GPU servers
# By class and description; "" stands for all other descriptions of a class.
KINDS: Mapping[tuple[str, str], FaultSign] = {
    ("GPU", ""): FaultSign.HARDWARE,
    ("GPU", "GPU Temperature High"): FaultSign.DEGRADED,
    ("GPU", "GPU PCI link width low"): FaultSign.DEGRADED,
    ("GPU", "GPU P2P Bandwidth Low"): FaultSign.DEGRADED,
    ("GPU", "GPU SBE(Single Bit ECC) > Threshold"): FaultSign.DEGRADED,
    ("CPU", ""): FaultSign.LOSS,
    ("Motherboard", ""): FaultSign.LOSS,
    ("Operating System", ""): FaultSign.LOSS,
    ("System Crash", ""): FaultSign.LOSS,
    ("Parameter Plane Cable", ""): FaultSign.NETWORK,
    ("NIC", ""): FaultSign.NETWORK,
    ("NIC", "NIC PCI link Width low"): FaultSign.DEGRADED,
    ("NIC", "NIC Link Speed low"): FaultSign.DEGRADED,
    ("Unknown Error", ""): FaultSign.CRASH,
    ("Stress Test Failure", ""): FaultSign.CRASH,
    ("Training Task Troubleshooting", ""): FaultSign.CRASH,
    ("Other Failures", ""): FaultSign.CRASH,
    ("File System", ""): FaultSign.CRASH,
}


def read_trace(path: Path, system: str = "") -> Trace:
    """The trace in a file of a known format. `system`: of LANL's, which of its clusters; "" is the
    one with the most failures that has 128 nodes or more.

    Raises WrongUsage, which says what is wrong with it.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".xz":
            content = lzma.decompress(content)
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise WrongUsage(
            f"{path}: there is no such file; docs/how-to/replay.md says where traces are"
        ) from None
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise WrongUsage(f"{path}: it cannot be read as a trace: {cause(error)}") from None
    is_of_servers = text.lstrip().startswith("[")
    if is_of_servers and system:
        raise WrongUsage(f"--system {system}: {path} is of one cluster; leave it out")
    try:
        if is_of_servers:
            return _gpu_servers(path, json.loads(text))
        return _lanl(path, csv.DictReader(text.splitlines()), system)
    except ValueError as error:
        raise WrongUsage(
            f"{path}: it is neither a fault trace of InfiniteHBD-Trace (JSON) nor LANL's failures "
            f"(CSV): {error}"
        ) from None


@contextmanager
def _reading(part: str) -> Iterator[None]:
    """Raises ValueError, which names the part of the file, where it is not as it must be."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{part} has no {error}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{part}: {error}") from None


def _gpu_servers(path: Path, events: Sequence[Mapping[str, Any]]) -> Trace:
    """Raises ValueError for what is no such trace."""
    faults: list[Fault] = []
    begun: dict[tuple[str, str], float] = {}
    for number, event in enumerate(events, 1):
        with _reading(f"event {number}"):
            about = event["fault_type"]
            node = str(event["node_id"])
            when = float(event["event_time"]) * DAY
            key = (node, f"{about['Class']}: {about['Desc']}")
            if event["event_type"] == "fault_start":
                begun[key] = when
                continue
            if key not in begun:
                raise ValueError(f"the end of {key[1]!r} on {node} has no beginning")
            kind = _kind(about["Class"], about["Desc"])
            faults.append(Fault(node, begun.pop(key), end=when, kind=kind, what=key[1]))
    if not faults:
        raise ValueError("it holds no fault")
    named = sorted({fault.node for fault in faults})
    rest = (f"without-a-fault-{number:03d}" for number in range(SERVERS - len(named)))
    last = max(fault.end for fault in faults)
    return Trace(path.name, (*named, *rest), last, _in_order(faults))


def _kind(family: str, description: str) -> FaultSign:
    found = KINDS.get((family, description)) or KINDS.get((family, ""))
    return found or FaultSign.DEGRADED


# ----------------------------------------------------------------------------- Los Alamos
# Its columns, of which one says the cause. What ends a node's service ends what runs there.
LANL_KINDS: Mapping[str, FaultSign] = {
    "Facilities": FaultSign.LOSS,
    "Hardware": FaultSign.LOSS,
    "Human Error": FaultSign.LOSS,
    "Network": FaultSign.NETWORK,
    "Undetermined": FaultSign.CRASH,
    "Software": FaultSign.CRASH,
}
LEAST_NODES = 128
_MOMENT = "%m/%d/%Y %H:%M"


def _lanl(path: Path, reader: csv.DictReader[str], system: str) -> Trace:
    """Raises ValueError for what is no such list, WrongUsage for an unknown cluster."""
    rows: list[tuple[str, Mapping[str, str]]] = []
    sizes: dict[str, int] = {}
    for row in reader:
        line = f"line {reader.line_num}"
        with _reading(line):
            if None in row.values():
                raise ValueError("it has fewer columns than the first line")
            sizes[row["System"]] = int(row["nodes"] or 0)
        rows.append((line, row))
    if not sizes:
        raise ValueError("it holds no failure")
    counts = Counter(row["System"] for _, row in rows if sizes[row["System"]] >= LEAST_NODES)
    there = ", ".join(sorted(sizes, key=int))
    if not counts and not system:
        raise WrongUsage(
            f"{path}: no cluster has {LEAST_NODES} nodes; --system names one of {there}"
        )
    wanted = system or counts.most_common(1)[0][0]
    if wanted not in sizes:
        raise WrongUsage(f"--system {system}: {path} has {there}")
    faults: list[Fault] = []
    for line, failure in rows:
        if failure["System"] == wanted and failure["Prob Started"]:
            with _reading(line):
                faults.append(_lanl_fault(failure))
    first = min((fault.start for fault in faults), default=0.0)
    last = max((fault.end for fault in faults), default=0.0) - first
    faults = [replace(one, start=one.start - first, end=one.end - first) for one in faults]
    nodes = tuple(f"node-{number:04d}" for number in range(sizes[wanted]))
    return Trace(f"{path.name}, system {wanted}", nodes, last, _in_order(faults), is_in_order=True)


def _lanl_fault(row: Mapping[str, str]) -> Fault:
    """In seconds since the epoch."""
    start = datetime.strptime(row["Prob Started"], _MOMENT).replace(tzinfo=UTC).timestamp()
    said = next((name for name in LANL_KINDS if row[name]), "Undetermined")
    minutes = float(row["Down Time"] or 0)
    node = f"node-{int(row['nodenumz']):04d}"
    what = f"{said}: {row[said] or 'not said'}"
    return Fault(node, start, end=start + 60 * minutes, kind=LANL_KINDS[said], what=what)


def _in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=attrgetter("start", "node")))


# ----------------------------------------------------------------------------- windows
def window(trace: Trace, nodes: int, seconds: float, seed: int) -> Window:
    """A part of the trace, as long as `seconds`, on `nodes` of its nodes, both drawn by `seed`;
    neighbours, where the trace has any. They are named n001, n002, ... as a cluster would.

    Raises WrongUsage where the trace is too short or has too few nodes.
    """
    if nodes > len(trace.nodes):
        raise WrongUsage(
            f"{counted(nodes, 'node')} asked for: {trace.name} has {counted(len(trace.nodes), 'node')}"
        )
    if seconds > trace.seconds:
        raise WrongUsage(
            f"{duration(seconds)} asked for: {trace.name} covers {duration(trace.seconds)}"
        )
    draw = random.Random(seed)
    begin = draw.uniform(0.0, trace.seconds - seconds)
    if trace.is_in_order:
        first = draw.randrange(len(trace.nodes) - nodes + 1)
        chosen = trace.nodes[first : first + nodes]
    else:
        chosen = tuple(draw.sample(trace.nodes, nodes))
    names = {old: f"n{place:03d}" for place, old in enumerate(chosen, 1)}
    faults = tuple(_within(trace.faults, names, begin, begin + seconds))
    label = f"{trace.name}, seed {seed}: day {begin / DAY:.0f} to {(begin + seconds) / DAY:.0f}"
    return Window(tuple(names.values()), seconds, faults, label)


def _within(
    faults: Iterable[Fault], names: Mapping[str, str], begin: float, end: float
) -> Iterator[Fault]:
    for fault in faults:
        if fault.node in names and fault.end > begin and fault.start < end:
            start = max(0.0, fault.start - begin)
            yield replace(fault, node=names[fault.node], start=start, end=fault.end - begin)
