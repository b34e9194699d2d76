"""The checks of a node itself: run directory, disk, memory, processes and clock."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tr11ops.base.errors import Unanswered
from tr11ops.base.units import counted, first_few, size
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System, TrainerProcess

# ----------------------------------------------------------------------------- run directory
SLOW_SECONDS = 5.0
# what one node has alone; a full disk or a missing right is everyone's trouble, and no fault of the
# node
_OF_THE_NODE = {
    errno.EROFS,
    errno.ESTALE,
    errno.EIO,
    errno.ENOENT,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.ENODEV,
    errno.ESHUTDOWN,
}


def check_run_directory(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when the node has lost the file system; a warning when it is full, not ours, or slow."""
    if wanted.folder is None:
        raise Unanswered("no folder of the run directory was given")
    try:
        took = system.write_probe(str(wanted.folder))
    except OSError as error:
        said = f"{error.filename or wanted.folder}: {error.strerror or error}"
        return CheckOutcome.BAD if error.errno in _OF_THE_NODE else CheckOutcome.WARNING, said
    if took > SLOW_SECONDS:
        return CheckOutcome.WARNING, f"a small file took {took:.0f} s to write"
    return CheckOutcome.FINE, f"written in {1000 * took:.0f} ms"


# ----------------------------------------------------------------------------- temporary files
LEAST_DISK_BYTES = 64 << 20
COMFORTABLE_DISK_BYTES = 1 << 30


def exported_folder(environment: Mapping[str, str]) -> Path:
    """Where the job's environment wants temporary files (TMPDIR), be it usable or not; else the
    system's own place.

    Python's `tempfile` goes to another place, and says nothing, where that folder is broken: just
    what is asked here.
    """
    named = next(
        (environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), ""
    )
    if named:
        return Path(named)
    return Path(tempfile.gettempdir())


def check_local_disk(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when it is read-only, broken or full; a warning when less than 1 GiB is free."""
    place = str(wanted.temporary)
    try:
        space = system.space(place)
    except FileNotFoundError:
        return (
            CheckOutcome.WARNING,
            f"{place} (TMPDIR) is not there: programs put temporary files elsewhere",
        )
    if space.free < LEAST_DISK_BYTES:
        return CheckOutcome.BAD, f"{place} is full: {size(space.free)} free of {size(space.total)}"
    try:
        system.write_probe(place)
    except OSError as error:
        broken = error.errno in {errno.EROFS, errno.EIO, errno.ENOSPC}
        return (
            CheckOutcome.BAD if broken else CheckOutcome.WARNING,
            f"{place} cannot be written: {error.strerror or error}",
        )
    if space.free < COMFORTABLE_DISK_BYTES:
        return CheckOutcome.WARNING, f"{place}: {size(space.free)} free of {size(space.total)}"
    return CheckOutcome.FINE, f"{place}: {size(space.free)} free"


# ----------------------------------------------------------------------------- shared memory
SHARED_MEMORY_FOLDER = "/dev/shm"
LEAST_SHARED_BYTES = 64 << 20
BYTES_PER_WORKER = 128 << 20
SETTLED_SECONDS = 60.0  # a younger file may be one that its maker is about to map
# the files that torch, NCCL, DeepSpeed and Python's multiprocessing make there
OURS = re.compile(
    r"torch_\d+_\d+_\d+|nccl-[A-Za-z0-9]{6}|shm_(allreduce|gather|reduce)\w*|\d+_shm_\w+"
    r"|psm_[0-9a-f]+|sem\.mp-[\w-]+|pymp-[\w-]+|__KMP_REGISTERED_LIB_\d+(_\d+)?"
)


def check_shared_memory(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when others have filled it; a warning when the workers may not have enough. Sweeps our
    own stale files.
    """
    swept = sweep(system) if wanted.sweeps else 0
    space = system.space(SHARED_MEMORY_FOLDER)
    cleaned = ""
    if swept:
        cleaned = f"; {swept} stale files of ours removed"
    told = f"{size(space.free)} free of {size(space.total)}{cleaned}"
    if space.free < LEAST_SHARED_BYTES and space.free < space.total // 10:
        return CheckOutcome.BAD, f"{SHARED_MEMORY_FOLDER} is full: {told}"
    if space.free < wanted.workers * BYTES_PER_WORKER:
        return (
            CheckOutcome.WARNING,
            f"{SHARED_MEMORY_FOLDER} is small for {counted(wanted.workers, 'worker')}: {told}",
        )
    return CheckOutcome.FINE, told


def sweep(system: System) -> int:
    """Remove this user's files of known makers that no process uses; returns how many."""
    removed = 0
    for segment in system.segments(OURS):
        if segment.age >= SETTLED_SECONDS:
            with suppress(FileNotFoundError):  # another agent on the same machine was faster
                system.remove_segment(segment.name)
                removed += 1
    return removed


# ----------------------------------------------------------------------------- memory
BAD_MEMORY_SHARE = 0.05
DOUBTFUL_MEMORY_SHARE = 0.25


def available(meminfo: str) -> tuple[int, int]:
    """(available, total) bytes, from the text of /proc/meminfo. Raises KeyError when it says
    neither.
    """
    values = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values["MemAvailable"], values["MemTotal"]


def check_memory(system: System, wanted: NodeRequirements) -> Answer:
    """Bad below 5 % of the memory, a warning below 25 %: something else lives here."""
    del wanted
    free, total = available(system.read("/proc/meminfo"))
    told = f"{size(free)} of {size(total)} available"
    if free < BAD_MEMORY_SHARE * total:
        return CheckOutcome.BAD, told
    return (
        CheckOutcome.WARNING if free < DOUBTFUL_MEMORY_SHARE * total else CheckOutcome.FINE
    ), told


# ----------------------------------------------------------------------------- leftover processes
def check_leftovers(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when a leftover process cannot be ended; a warning when it was, or when someone still
    looks after it.

    Only this user's processes of trainings are looked at, and only those that were started on this
    very node: one machine may play several.
    """
    others = [
        process
        for process in system.trainer_processes()
        if process.node == wanted.node
        and (process.job_id, process.launch) != (wanted.job_id, str(wanted.launch))
    ]
    if not others:
        return CheckOutcome.FINE, "none"
    abandoned = [process for process in others if not process.is_kept]
    if not abandoned or not wanted.ends_leftovers:
        return CheckOutcome.WARNING, f"trainings of ours live here too: {_named(others)}"
    left = set(system.end(process.pid for process in abandoned))
    stuck = [process for process in abandoned if process.pid in left]
    if stuck:
        return CheckOutcome.BAD, f"earlier processes of ours cannot be ended: {_named(stuck)}"
    return CheckOutcome.WARNING, f"earlier processes of ours were ended: {_named(abandoned)}"


def _named(processes: list[TrainerProcess]) -> str:
    return first_few(
        f"{one.name} {one.pid} of job {one.label or one.job_id}, launch {one.launch}"
        for one in processes
    )


# ----------------------------------------------------------------------------- clock
BEHIND_DOUBTFUL = 2.0
BEHIND_BAD = 60.0
# starting the agent takes its time too, on a loaded cluster minutes
AHEAD_DOUBTFUL = 300.0
AHEAD_BAD = 3600.0


def check_clock(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when the clock is a minute behind, or an hour ahead: what lies between asking and
    answering looks ahead.
    """
    if wanted.controller_time is None:
        raise Unanswered("the controller's time was not given")
    ahead = system.now() - wanted.controller_time
    told = f"{abs(ahead):.1f} s {'ahead of' if ahead >= 0 else 'behind'} the controller"
    if ahead < -BEHIND_BAD or ahead > AHEAD_BAD:
        return CheckOutcome.BAD, told
    if ahead < -BEHIND_DOUBTFUL or ahead > AHEAD_DOUBTFUL:
        return CheckOutcome.WARNING, told
    return CheckOutcome.FINE, f"{told} (starting included)" if ahead > 1 else told


# ---------------------------------------------------------------------------
# Is the network up: an interface at all, and every InfiniBand port that has a cable in it?

_INTERFACES = "/sys/class/net"
_DEVICES = "/sys/class/infiniband"


def check_network(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when no interface is up, or a cabled port is not active; a warning when a port is slower
    than its peers.

    A warning too where an interface that the ranks shall use is not there.
    """
    states = {name: _state(system, name) for name in system.names(_INTERFACES) if name != "lo"}
    known = {name: state for name, state in states.items() if state}
    # unknown: the driver does not tell
    up = [name for name, state in known.items() if state in {"up", "unknown"}]
    ports = _ports(system)
    active = [name for name, (state, _, _) in ports.items() if state == "ACTIVE"]
    dead = [
        f"{name} is {state}"
        for name, (state, link, _) in ports.items()
        if state != "ACTIVE" and link == "LinkUp"
    ]
    if ports and not active:
        return (
            CheckOutcome.BAD,
            f"no InfiniBand port is active: {first_few(f'{name} is {ports[name][0]}' for name in ports)}",
        )
    if dead:
        return CheckOutcome.BAD, f"cabled InfiniBand ports are not active: {first_few(dead)}"
    if known and not up and not active:
        return (
            CheckOutcome.BAD,
            f"no network interface is up: {first_few(f'{name} is {known[name]}' for name in known)}",
        )
    if not known and not ports:
        raise Unanswered("no network interface can be seen")
    rates = {name: ports[name][2] for name in active if ports[name][2] > 0}
    absent = [name for name in wanted.interfaces if name not in states and name != "lo"]
    if absent:  # the card may be wrong, so it does not condemn the node
        return (
            CheckOutcome.WARNING,
            f"GLOO_SOCKET_IFNAME: no interface {first_few(absent)} here, there are {first_few(states)}",
        )
    slow = [f"{name}: {rate:g} Gb/s" for name, rate in rates.items() if rate < max(rates.values())]
    if slow:
        return (
            CheckOutcome.WARNING,
            f"InfiniBand ports slower than {max(rates.values()):g} Gb/s: {first_few(slow)}",
        )
    return CheckOutcome.FINE, f"up: {first_few([*up, *active], 6)}"


def _state(system: System, name: str) -> str:
    try:
        return system.read(f"{_INTERFACES}/{name}/operstate").strip()
    except OSError:
        return ""  # such as bonding_masters, which is a file and no interface


def _ports(system: System) -> dict[str, tuple[str, str, float]]:
    """State, physical state and rate (Gb/s) of every port, such as {"mlx5_0/1": ("ACTIVE",
    "LinkUp", 100.0)}.
    """
    found = {}
    for device in system.names(_DEVICES):
        for port in system.names(f"{_DEVICES}/{device}/ports"):
            folder = f"{_DEVICES}/{device}/ports/{port}"
            state, link = (
                system.read(f"{folder}/{name}").strip().rpartition(": ")[2]
                for name in ("state", "phys_state")
            )
            rate = system.read(f"{folder}/rate").split()
            found[f"{device}/{port}"] = (state, link, float(rate[0]) if rate else 0.0)
    return found
