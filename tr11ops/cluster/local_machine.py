"""The nodes of the embedded scheduler: this machine as it is, or the nodes that it is asked to
play; who has which GPU of it, and what a task there is started with.

The machine is one node. Its jobs share it: each has the GPUs and cores that it asks for, to itself.
A simulated node belongs to one job; the machine's GPUs are shared out evenly among such nodes.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.base.errors import Unanswered
from tr11ops.cluster.arrays import compress
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.local_records import PARTITION, LocalSettings, LocalSubmission, TaskRecord
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.base.nvidia import Gpu

# Who has which GPU of this machine: a claim that lives as long as a process holds it, seen by
# every user.
#
# A claim is the name of a socket in the kernel's own list (Linux' abstract names): a name is had
# once, dies with the last process that has the descriptor, and leaves no file. It stands between all
# schedulers' folders, users and foreground trainings of one machine (network namespace).


def claim(uuid: str) -> socket.socket | None:
    """The claim on a GPU, to be kept open; None where another process has it. Raises OSError for
    anything else.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0tr11-gpu-{uuid}")
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return held


def claim_free(uuids: Iterable[str]) -> dict[str, socket.socket]:
    """Claims on those that no process has, by UUID. The caller closes what it does not need."""
    with ExitStack() as stack:
        found = {}
        for uuid in uuids:
            held = claim(uuid)
            if held is not None:
                found[uuid] = stack.enter_context(held)
        stack.pop_all()
        return found


# What a task of the embedded scheduler is started with: its environment and interpreter.

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def task_environment(
    submission: LocalSubmission, task: TaskRecord, base: dict[str, str], folder: Path
) -> dict[str, str]:
    """What the batch script finds in its environment: the submitter's variables, and Slurm's for
    this task.
    """
    request = submission.request
    limit_end = int(task.start_time) + request.time_limit_seconds
    values: dict[str, str | int] = {
        "TR11_SCHEDULER": "local",
        "TR11_LOCAL_SCHEDULER": str(folder),
        "SLURM_JOB_ID": task.raw_id,
        "SLURM_JOBID": task.raw_id,
        "SLURM_JOB_NAME": request.name,
        "SLURM_JOB_USER": submission.user,
        "SLURM_JOB_PARTITION": PARTITION,
        "SLURM_JOB_START_TIME": int(task.start_time),
        "SLURM_JOB_END_TIME": limit_end,
        "SLURM_CLUSTER_NAME": "local",
        "SLURM_NNODES": len(task.nodes),
        "SLURM_JOB_NUM_NODES": len(task.nodes),
        "SLURM_NODELIST": compress(task.nodes),
        "SLURM_JOB_NODELIST": compress(task.nodes),
        "SLURMD_NODENAME": task.nodes[0],
        "SLURM_SUBMIT_DIR": str(request.working_directory),
        "SLURM_SUBMIT_HOST": socket.gethostname(),
        "SLURM_CPUS_PER_TASK": request.cpus_per_task,
        "SLURM_NODEID": 0,
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
    }
    if request.gpus_per_node:
        values["SLURM_GPUS_ON_NODE"] = request.gpus_per_node
    # of GPUs that are only pretended there are no devices
    if task.gpus or not request.gpus_per_node:
        values[DEVICES_VARIABLE] = ",".join(task.gpus)
    if task.task_id is not None:
        smallest, largest, step, count = submission.array_bounds
        values |= {
            "SLURM_ARRAY_JOB_ID": submission.job_id,
            "SLURM_ARRAY_TASK_ID": task.task_id,
            "SLURM_ARRAY_TASK_COUNT": count,
            "SLURM_ARRAY_TASK_MIN": smallest,
            "SLURM_ARRAY_TASK_MAX": largest,
            "SLURM_ARRAY_TASK_STEP": step,
        }
    return {**base, **{key: str(value) for key, value in values.items()}}


def submitted_environment(request: BatchRequest, environment: dict[str, str]) -> dict[str, str]:
    """The submitter's variables without those of a job it may itself be in, and the request's on
    top.
    """
    inherited = {
        key: value
        for key, value in environment.items()
        if not key.startswith(("SLURM_", "SLURMD_", "SBATCH_")) or key == "SLURM_CONF"
    }
    if environment.get("TR11_SCHEDULER") == "local":
        inherited.pop(DEVICES_VARIABLE, None)  # the GPUs of that job
    return {**inherited, **request.environment}


def interpreter(script: Path) -> list[str]:
    """The command that runs a script: its first line's interpreter, with one argument at most, as
    the kernel does.
    """
    with script.open(encoding="utf-8", errors="surrogateescape") as stream:
        words = stream.readline()[2:].strip().split(None, 1)
    return [*(words or ["/bin/sh"]), str(script)]


GPU_SECONDS = 20.0  # a driver without its persistence daemon starts each GPU first


class LocalNode(Record):
    """One node, and what its jobs can have. Memory in MiB.

    `gpus`: real ones. `pretended_gpus`: that it has by the settings in place of these; nothing
    stands behind them. `gpu_fault`: why it is not known which GPUs there are, "" where it is.
    """

    name: str
    cpus: int
    memory_megabytes: int
    gpus: tuple[Gpu, ...] = ()
    pretended_gpus: int | None = None
    gpu_fault: str = ""
    is_simulated: bool = False

    @property
    def gpu_count(self) -> int:
        if self.pretended_gpus is None:
            return len(self.gpus)
        return self.pretended_gpus


class GpuList(Record):
    """The machine's GPUs as its driver lists them, or why that is not known."""

    gpus: tuple[Gpu, ...] = ()
    fault: str = ""


def machine_name() -> str:
    """The node's name where it is this machine."""
    return socket.gethostname().partition(".")[0]


def node_names(settings: LocalSettings) -> tuple[str, ...]:
    """The names of the nodes, without a look at the machine."""
    if settings.nodes is None:
        return (machine_name(),)
    return settings.nodes


def look_at_gpus() -> GpuList:
    """The GPUs of this machine now. Without nvidia-smi there are none."""
    if shutil.which("nvidia-smi") is None:
        return GpuList()
    from tr11ops.base.nvidia import list_gpus
    from tr11ops.base.processes import LocalCommands

    try:
        return GpuList(list_gpus(LocalCommands(), GPU_SECONDS))
    except Unanswered as error:
        return GpuList(fault=str(error))


def local_nodes(settings: LocalSettings, found: GpuList) -> tuple[LocalNode, ...]:
    """The nodes, with the GPUs that were found."""
    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    names = node_names(settings)
    shares = _shares(found.gpus, len(names), settings.gpus_per_node)
    return tuple(
        LocalNode(
            name=name,
            cpus=cpus,
            memory_megabytes=memory,
            gpus=share,
            pretended_gpus=None if settings.gpus_per_node == len(share) else settings.gpus_per_node,
            gpu_fault=found.fault,
            is_simulated=settings.nodes is not None,
        )
        for name, share in zip(names, shares, strict=True)
    )


def open_to(nodes: Sequence[LocalNode], visible_devices: str | None) -> tuple[LocalNode, ...]:
    """The nodes with those of their GPUs that a submitter's CUDA_VISIBLE_DEVICES lets them have;
    None: all.
    """
    from tr11ops.base.nvidia import visible

    seen = set(visible([gpu for node in nodes for gpu in node.gpus], visible_devices))
    return tuple(
        replace(node, gpus=tuple(gpu for gpu in node.gpus if gpu in seen)) for node in nodes
    )


def _shares(gpus: Sequence[Gpu], nodes: int, each: int | None) -> list[tuple[Gpu, ...]]:
    """The GPUs of each node: as many as the settings say where there are enough for that, else
    equally many.
    """
    if each is None:
        count = len(gpus) // nodes
    else:
        count = each
    if count * nodes > len(gpus):
        count = 0
    return [tuple(gpus[count * place : count * (place + 1)]) for place in range(nodes)]
