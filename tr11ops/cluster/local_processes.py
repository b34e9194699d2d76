"""Processes of the embedded scheduler: who descends from whom, ending all of a task; starting
supervisors, and cleaning up after those that died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil
from msgspec.structs import replace

import tr11ops
from tr11ops.base.errors import SchedulerError
from tr11ops.base.processes import is_living
from tr11ops.cluster.base import JobState
from tr11ops.cluster.local_records import (
    SUPERVISOR_MODULE,
    ProcessMark,
    TaskRecord,
    boot_mark,
    is_alive,
)
from tr11ops.cluster.local_store import LocalStore

KILL_SECONDS = 10.0  # what is still there after so many has hung in the kernel


def is_supervisor(process: psutil.Process) -> bool:
    """Is it a supervisor? A job may submit jobs; their supervisors then run below it, and do not
    end with it.
    """
    with contextlib.suppress(psutil.AccessDenied):  # of another user, so not one of ours
        return process.cmdline()[1:3] == ["-m", SUPERVISOR_MODULE]
    return False


def descendants(pid: int) -> list[psutil.Process]:
    """All living descendants of a process, but no supervisor and nothing below one."""
    parents: dict[int, int] = {}
    found: list[psutil.Process] = []
    spared: set[int] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                parents[child.pid] = child.ppid()
                if not is_living(child):
                    continue
                if is_supervisor(child):
                    spared.add(child.pid)
                found.append(child)

    def lineage(process: psutil.Process) -> set[int]:
        line = set()
        current = process.pid
        while current in parents and current not in line:
            line.add(current)
            current = parents[current]
        return line

    return [process for process in found if not (spared and lineage(process) & spared)]


def with_environment(wanted: dict[str, str]) -> list[psutil.Process]:
    """All living processes that were started with exactly these variables; never the caller."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if process.pid != os.getpid() and all(
                environment.get(key) == value for key, value in wanted.items()
            ):
                found.append(process)
    return found


def send(processes: Collection[psutil.Process], number: int) -> None:
    """Signal each that is still there and is ours to signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def kill_task_leftovers(wanted: dict[str, str], step: ProcessMark | None) -> int:
    """KILL everything that a task left behind, by its keeper's tree and by its environment. Returns
    what remains.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        left = with_environment(wanted)
        if step is not None and is_alive(step):
            left += [*descendants(step.pid), psutil.Process(step.pid)]
        send(left, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            return len(left)
        time.sleep(0.02)


# ----------------------------------------------------------------------------- supervisors
# Starting supervisors, and cleaning up after those that died (kill -9, a reboot).
START_PATIENCE_SECONDS = 120.0


def launch_supervisor(store: LocalStore, job_id: int, lock: int) -> None:
    """Start a submission's supervisor, which takes over `lock`, and return when it is at work.

    Raises SchedulerError when it does not come up.
    """
    log = store.job_folder(job_id) / "supervisor.log"
    packages = str(Path(tr11ops.__file__).parent.parent)
    search = [packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    # Not the variables of a job that may be submitting this one: a job's processes are known by
    # them.
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "TR11_"))
    }
    command = [sys.executable, "-m", SUPERVISOR_MODULE, str(store.folder), str(job_id), str(lock)]
    with log.open("ab") as stream:
        try:
            outcome = subprocess.run(
                command,
                env={**environment, "PYTHONPATH": os.pathsep.join(search)},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=[lock],
                start_new_session=True,
                timeout=START_PATIENCE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SchedulerError(f"the supervisor of job {job_id} did not start: {error}") from None
    if outcome.returncode != 0:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise SchedulerError(f"the supervisor of job {job_id} did not start: {last}")


def recover(store: LocalStore) -> None:
    """Find submissions without a supervisor: their running tasks end as NODE_FAIL, their waiting
    ones get a new one.
    """
    for job_id in store.active_ids():
        lock = store.supervisor_lock(job_id)
        if lock is None:
            continue
        try:
            _recover_one(store, job_id, lock)
        finally:
            os.close(lock)


def _recover_one(store: LocalStore, job_id: int, lock: int) -> None:
    submission = store.load(job_id)
    lost = submission.running if submission else ()
    if lost:
        # with psutil, which few commands need
        from tr11ops.cluster.local_processes import kill_task_leftovers

    for task in lost:
        kill_task_leftovers(task_variables(store, task), task.step)
    with store.changing():
        submission = store.load(job_id)
        if submission is None:
            return
        for task in submission.running:
            submission = submission.with_task(
                replace(
                    task, state=JobState.NODE_FAIL, reason="SupervisorDied", end_time=_end_of(task)
                )
            )
        store.save(submission)
    if submission.waiting:
        launch_supervisor(store, job_id, lock)
    if lost:
        store.wake()


def task_variables(store: LocalStore, task: TaskRecord) -> dict[str, str]:
    """The variables that tell a task's processes from all others."""
    return {"TR11_LOCAL_SCHEDULER": str(store.folder), "SLURM_JOB_ID": str(task.raw_id)}


def _end_of(task: TaskRecord) -> float:
    """When a task whose supervisor died has ended: now, or, after a reboot, not later than that."""
    rebooted = task.step is not None and task.step.boot != boot_mark()
    if not rebooted:
        return time.time()
    import psutil

    return max(task.start_time, min(time.time(), psutil.boot_time()))
