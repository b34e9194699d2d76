"""One task's keeper: a small process between the supervisor and the batch script.

It is the parent of everything the script starts, whatever that does to get away, so that nothing survives the task:
when the supervisor closes the control pipe, or dies, the keeper kills what is left and goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.local_processes import adopt_orphans, descendants, mark, send
from tr11ops.cluster.local_records import PARTITION, ProcessMark, Submission, TaskRecord


def task_environment(submission: Submission, task: TaskRecord, base: dict[str, str], folder: Path) -> dict[str, str]:
    """What the batch script finds in its environment: the submitter's variables, and Slurm's for this task."""
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
        "SLURM_NODELIST": compress_nodes(task.nodes),
        "SLURM_JOB_NODELIST": compress_nodes(task.nodes),
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
    """The submitter's variables without those of a job it may itself be in, and the request's on top."""
    inherited = {
        key: value
        for key, value in environment.items()
        if not key.startswith(("SLURM_", "SLURMD_", "SBATCH_")) or key == "SLURM_CONF"
    }
    return {**inherited, **request.environment}


def output_path(submission: Submission, task: TaskRecord) -> Path:
    """The output file with Slurm's patterns (%x %j %A %a %N %u %%, with a width as in %5a) replaced."""
    array_task = 4294967294 if task.task_id is None else task.task_id  # what Slurm prints for "no task"
    values: dict[str, str | int] = {
        "x": submission.request.name,
        "j": task.raw_id,
        "A": submission.job_id,
        "a": array_task,
        "N": task.nodes[0],
        "u": submission.user,
        "%": "%",
    }
    text = submission.request.output
    result, position = "", 0
    while position < len(text):
        end = position + 1
        if text[position] == "%":
            while end < len(text) and text[end].isdecimal():
                end += 1
        letter = text[end : end + 1]
        if text[position] != "%" or letter not in values or not letter:
            result += text[position]
            position += 1
            continue
        width, value = text[position + 1 : end], values[letter]
        result += str(value).zfill(min(int(width), 10)) if width and isinstance(value, int) else str(value)
        position = end + 1
    return submission.request.working_directory / result


def interpreter(script: Path) -> list[str]:
    """The command that runs a script: its first line's interpreter, with one argument at most, as the kernel does."""
    with script.open(encoding="utf-8", errors="surrogateescape") as stream:
        words = stream.readline()[2:].strip().split(None, 1)
    return [*(words or ["/bin/sh"]), str(script)]


@dataclass(frozen=True)
class Step:
    """The supervisor's handle on a keeper. `status` gives JSON lines, `control` takes signal names."""

    pid: int
    mark: ProcessMark
    status: int
    control: int


def start_step(
    command: list[str],
    environment: dict[str, str],
    working_directory: Path,
    output: Path,
    spared: Callable[[], Collection[ProcessMark]],
) -> Step:
    """Start a task's keeper and, in it, the batch script.

    Its first status line is `{"batch": PID}` or `{"error": why}`, its last `{"code": N}` or `{"signal": N}`.
    """
    status_read, status_write = os.pipe()
    control_read, control_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _close_all_but({status_write, control_read})
            _keep(command, environment, working_directory, output, status_write, control_read, spared)
            code = 0
        except BaseException as error:  # the child must never run on into the supervisor's loop
            print(f"keeper: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(status_write)
    os.close(control_read)
    os.set_blocking(status_read, False)
    return Step(pid, mark(pid), status_read, control_write)


def _close_all_but(kept: set[int]) -> None:
    """Other tasks' pipes and the supervisor's lock must not live on in this process."""
    for name in os.listdir("/dev/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _keep(
    command: list[str],
    environment: dict[str, str],
    working_directory: Path,
    output: Path,
    status: int,
    control: int,
    spared: Callable[[], Collection[ProcessMark]],
) -> None:
    os.setsid()
    adopt_orphans("tr11-task")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def tell(message: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is dead: the control pipe says so next
            os.write(status, json.dumps(message).encode() + b"\n")

    try:
        with output.open("wb") as stream:
            batch = subprocess.Popen(
                command,
                env=environment,
                cwd=working_directory,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        tell({"error": f"{error.strerror}: {error.filename or output}"})
        return
    tell({"batch": batch.pid})
    is_running = True
    while True:
        ready, _, _ = select.select([control, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            for pid, wait_status in _reap():
                if pid == batch.pid:
                    is_running = False
                    code = os.waitstatus_to_exitcode(wait_status)
                    tell({"code": code} if code >= 0 else {"signal": -code})
        if control in ready:
            message = os.read(control, 4096)
            if not message:
                break
            for name in message.decode().split():
                if is_running:
                    os.kill(batch.pid, signal.Signals[name])
    while left := descendants(os.getpid(), spared()):
        send(left, signal.SIGKILL)
        select.select([wake_read], [], [], 0.02)
        _reap()


def _reap() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, wait_status))
    return ended
