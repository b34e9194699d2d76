"""What every health check shares: its result, what the run wants of a node, and what it reads of the
system.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from pathlib import Path

from tr11ops.base.units import counted
from trainer.contract.record import Record

EXIT_BAD_NODE = 75  # how the node agent ends when its node must not be used; no worker was started


class CheckOutcome(StrEnum):
    """What a check says. UNKNOWN is no verdict on the node: it is used, and the reason is kept."""

    FINE = "fine"
    WARNING = "warning"
    BAD = "bad"
    UNKNOWN = "unknown"


class CheckResult(Record):
    """One check's answer; `why` is one line."""

    name: str
    result: CheckOutcome
    why: str


Answer = tuple[CheckOutcome, str]  # what a check's function returns: the name is the registry's


class NodeRequirements(Record):
    """What a run asks of a node. Counts are per node, times seconds.

    `folder` is a folder of the run directory to write in (None: no such check), `controller_time`
    the moment at which the batch controller asked (seconds since the epoch; None: not told).
    `launch` is the number of the workers' launch. `ends_leftovers` allows to end processes of our
    own that an earlier job or launch left on this node, where a node belongs to one job at a time.
    `interfaces`: of the network, over which the ranks shall talk.
    """

    node: str
    job_id: str = ""
    launch: int = 0
    gpus: int = 0
    workers: int = 1
    folder: Path | None = None
    temporary: Path = Path("/tmp")
    controller_time: float | None = None
    ends_leftovers: bool = False
    seconds: float = 30.0
    interfaces: tuple[str, ...] = ()


class Space(Record):
    """Bytes of a file system; `free` is what this user may still write."""

    total: int
    free: int


class TrainerProcess(Record):
    """A process of this user that belongs to a training: of which job, launch and node, and whether
    anyone keeps it.

    `is_kept` is False when no step daemon or batch controller is among its ancestors. `state` is
    the kernel's letter (D: it waits in the kernel and cannot be ended). `label` is what people call
    its attempt.
    """

    pid: int
    name: str
    job_id: str
    launch: str
    node: str
    state: str
    is_kept: bool
    label: str = ""


class SharedMemoryFile(Record):
    """A file in /dev/shm that belongs to this user. `age` in seconds since its last change."""

    name: str
    bytes: int
    age: float


def worst(results: Iterable[CheckResult]) -> CheckOutcome:
    """One word for a node: bad or warning when a check says so; unknown only when no check could
    tell anything.
    """
    found = {entry.result for entry in results}
    for outcome in (CheckOutcome.BAD, CheckOutcome.WARNING, CheckOutcome.FINE):
        if outcome in found:
            return outcome
    return CheckOutcome.UNKNOWN


def summary(results: Sequence[CheckResult]) -> str:
    """One line: what made the node bad or doubtful; else how many checks were fine."""
    outcome = worst(results)
    if outcome in {CheckOutcome.BAD, CheckOutcome.WARNING}:
        return "; ".join(
            f"{entry.name}: {entry.why}" for entry in results if entry.result is outcome
        )
    unknown = [entry for entry in results if entry.result is CheckOutcome.UNKNOWN]
    if outcome is CheckOutcome.UNKNOWN:
        return "; ".join(f"{entry.name}: {entry.why}" for entry in unknown) or "no check was run"
    told = f"{counted(len(results) - len(unknown), 'check')} fine"
    if unknown:
        return f"{told}, {len(unknown)} unknown ({', '.join(entry.name for entry in unknown)})"
    return told


# Does a check fail for the nodes' sake, or does it fail everywhere? One that one node fails and the
# others pass tells something of that node. One that fails on node after node, and that hardly any
# node passes, tells something of itself (a script that is broken, a service that it asks) or of
# what all nodes share.

ENOUGH_NODES = 2  # nodes that fail a check, where none passes it
ENOUGH_BESIDE_OTHERS = 3  # nodes that fail it, where fewer pass it


def fails_everywhere(failed: Collection[str], passed: Collection[str]) -> bool:
    """Whether a check that these nodes failed and those passed tells nothing of the nodes that
    failed it.
    """
    needed = ENOUGH_BESIDE_OTHERS if passed else ENOUGH_NODES
    return len(failed) >= needed and len(failed) > len(passed)
