"""What the batch script was given: job, nodes, and which scheduler gave them, read from the
environment once; and a node's GPUs, where no scheduler gives any.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tr11ops.base.nvidia import uuids, visible
from tr11ops.base.units import counted
from tr11ops.cluster.arrays import expand
from tr11ops.cluster.local_machine import DEVICES_VARIABLE, claim_free, look_at_gpus
from trainer.contract.paths import attempt_label
from trainer.contract.record import Record

# ------------------------------------------------------------------ GPUs without a scheduler's word


def gpus_of_node(environment: Mapping[str, str], nodes: Sequence[str], name: str) -> dict[str, str]:
    """The variables of one of the nodes that this machine plays: its share of the attempt's GPUs.
    Pure.
    """
    devices = environment.get(DEVICES_VARIABLE, "").split(",")
    if len(nodes) < 2 or len(devices) % len(nodes):
        return {}
    each = len(devices) // len(nodes)
    place = list(nodes).index(name)
    return {DEVICES_VARIABLE: ",".join(devices[each * place : each * (place + 1)])}


def claim_gpus(
    count: int, environment: Mapping[str, str]
) -> tuple[dict[str, str], list[socket.socket]]:
    """The environment of a training in the foreground that works with `count` GPUs, and the claims
    on these.

    Of those that CUDA_VISIBLE_DEVICES names, the first that no other run of this machine has. Where
    the driver does not list as many, nothing is chosen: the health checks say what is there. Raises
    RuntimeError where others have them.
    """
    seen = visible(look_at_gpus().gpus, environment.get(DEVICES_VARIABLE))
    if not count or len(seen) < count:
        return dict(environment), []
    held = claim_free(uuids(seen))
    chosen = list(held)[:count]
    for uuid in set(held) - set(chosen):
        held[uuid].close()
    if len(chosen) < count:
        for uuid in chosen:
            held[uuid].close()
        needed = counted(count, "GPU is", "GPUs are")
        raise RuntimeError(
            f"{needed} needed, free of {len(seen)}: {len(chosen)}; other runs have the rest"
        )
    return {**environment, DEVICES_VARIABLE: ",".join(chosen)}, [held[uuid] for uuid in chosen]


ADDRESS_SECONDS = 30.0
FIRST_PORT, LAST_PORT = 10_000, 19_999  # above the daemons' own, Slurm's among them
PORTS_TRIED = 100
# from which Linux answers who asks for any port
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
SchedulerKind = Literal["slurm", "local", "foreground"]


class Allocation(Record):
    """One attempt's allocation. `job_id` is the scheduler's own number of this task, unique among
    attempts.
    """

    kind: SchedulerKind
    job_id: str
    array_id: str | None
    task_id: int | None
    nodes: tuple[str, ...]

    @property
    def label(self) -> str:
        """The attempt's number as people type it."""
        return attempt_label({"array_id": self.array_id, "task_id": self.task_id}, self.job_id)


def read_allocation(environment: Mapping[str, str], foreground_nodes: int | None) -> Allocation:
    """The allocation that `environment` describes; with `foreground_nodes`, this machine plays that
    many nodes.

    Raises RuntimeError when started outside a job.
    """
    if foreground_nodes is not None:
        names = tuple(f"{socket.gethostname()}-{number}" for number in range(foreground_nodes))
        return Allocation(
            "foreground",
            environment.get("TR11_JOB_ID") or f"foreground-{os.getpid()}",
            array_id=None,
            task_id=None,
            nodes=names,
        )
    job_id = environment.get("SLURM_JOB_ID")
    node_list = environment.get("SLURM_JOB_NODELIST")
    if not job_id or not node_list:
        raise RuntimeError(
            "this command runs inside a job: SLURM_JOB_ID or SLURM_JOB_NODELIST is not set"
        )
    task = environment.get("SLURM_ARRAY_TASK_ID")
    return Allocation(
        kind="local" if environment.get("TR11_SCHEDULER") == "local" else "slurm",
        job_id=job_id,
        array_id=environment.get("SLURM_ARRAY_JOB_ID"),
        task_id=int(task) if task else None,
        nodes=tuple(expand(node_list)),
    )


def master_address(allocation: Allocation) -> str:
    """Address of the first node for the workers' rendezvous.

    Slurm is asked for the node's address, because a node's name need not resolve (several nodes on
    one machine).
    """
    if allocation.kind != "slurm":
        return "127.0.0.1"
    first = allocation.nodes[0]
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", first],
            capture_output=True,
            text=True,
            timeout=ADDRESS_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return _without_scheduler(first)
    for word in shown.split():
        if word.startswith("NodeAddr="):
            return word.removeprefix("NodeAddr=")
    return first


def _without_scheduler(first: str) -> str:
    """The first node's name where it resolves; else that of this machine, which it is."""
    try:
        socket.getaddrinfo(first, None)
    except OSError:
        return socket.gethostname()
    return first


def free_port() -> int:
    """A TCP port that is free on this host now; the batch script runs on the first node, where rank
    0 listens.

    It is none that the kernel gives to a program that asks for any: `srun` asks for some at each
    step, between this answer and rank 0's listening. Where the kernel gives all of them away, one
    of those.
    """
    if _GIVEN_PORTS.exists():
        first_given = int(_GIVEN_PORTS.read_text().split()[0])
    else:
        first_given = FIRST_PORT
    kept = range(FIRST_PORT, min(first_given, LAST_PORT + 1))
    for port in (*random.sample(kept, min(len(kept), PORTS_TRIED)), 0):
        with (
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe,
            contextlib.suppress(OSError),
        ):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError(errno.EADDRINUSE, "no TCP port is free on this host")
