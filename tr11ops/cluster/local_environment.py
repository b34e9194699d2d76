"""What a task of the embedded scheduler is started with: its environment and interpreter."""

from __future__ import annotations

import socket
from pathlib import Path

from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.hostlist import compress
from tr11ops.cluster.local_records import PARTITION, LocalSubmission, TaskRecord

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
