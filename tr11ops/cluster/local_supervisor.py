"""One submission's supervisor: `python -m tr11ops.cluster.local_supervisor FOLDER JOB LOCK`.

A detached process that waits for dependency, hold, throttle and nodes, runs the submission's tasks,
enforces time limits and cancellations, writes down how each task ended, and goes when there is
nothing left to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.base.nvidia import uuids
from tr11ops.base.processes import adopt_orphans, is_living, leave, show_as
from tr11ops.cluster.base import JobState
from tr11ops.cluster.local_machine import (
    DEVICES_VARIABLE,
    GpuList,
    LocalNode,
    claim_free,
    interpreter,
    local_nodes,
    look_at_gpus,
    open_to,
    task_environment,
)
from tr11ops.cluster.local_processes import (
    descendants,
    is_supervisor,
    kill_task_leftovers,
    send,
)
from tr11ops.cluster.local_records import (
    LocalSettings,
    LocalSubmission,
    TaskRecord,
    WaitingTask,
    mark,
)
from tr11ops.cluster.local_rules import (
    Placement,
    choose_nodes,
    has_ended,
    output_path,
    parse_dependency,
)
from tr11ops.cluster.local_step import BatchCommand, RunningTask, start_step
from tr11ops.cluster.local_store import LocalStore, recover, task_variables

# wake-ups come through the FIFO and the pipes; this is for what has neither, a dead peer
IDLE_SECONDS = 5.0
TROUBLE_SECONDS = 0.5
CLOSE_SECONDS = 0.05  # while a task is being ended
LEFTOVER_SECONDS = 2.0  # between TERM and KILL for what a finished batch script left running


class LocalSupervisor:
    """The loop. `run` returns when the submission is over or gone."""

    def __init__(self, store: LocalStore, job_id: int) -> None:
        self.store = store
        self.job_id = job_id
        self.running: dict[int, RunningTask] = {}
        self.recovered_at = time.monotonic()
        self.settings = LocalSettings()
        self.trouble = ""
        self.wake = os.open(
            store.job_folder(job_id) / "wake", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        )

    def run(self) -> None:
        is_over = False
        while not is_over:
            try:
                is_over = self._look()
            except (OSError, SchedulerError, psutil.Error) as error:
                # A full disk or a bad settings file must not end a training: say it, and try again.
                self._complain(f"{type(error).__name__}: {error}")
                self._wait(TROUBLE_SECONDS)
            else:
                self.trouble = ""
                if not is_over:
                    self._wait(IDLE_SECONDS)

    def _look(self) -> bool:
        """Do all that can be done now. True when nothing is left to do, ever."""
        # a file with a fault: the last good settings stay in force
        with contextlib.suppress(SchedulerError):
            self.settings = self.store.settings()
        self._listen()
        submission = self.store.load(self.job_id)
        if submission is not None:
            self._fail_unstarted(submission)
            self._enforce(submission)
        self._record()
        submission = self.store.load(self.job_id)
        if not self.running and (submission is None or not submission.waiting):
            return True
        self._start_ready()
        self._help_dead_peers()
        return False

    def _complain(self, words: str) -> None:
        if words != self.trouble:
            self.trouble = words
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}", file=sys.stderr, flush=True)

    def _fail_unstarted(self, submission: LocalSubmission) -> None:
        """A task that is running on disk, and not here, is one whose start went wrong."""
        for record in submission.running:
            if record.raw_id not in self.running:
                change = {
                    "state": JobState.FAILED,
                    "reason": self.trouble or "NotStarted",
                    "end_time": time.time(),
                }
                self._change_task(record.raw_id, exit_code=1, **change)

    # ------------------------------------------------------------------------- running tasks
    def _listen(self) -> None:
        """Read what the keepers say."""
        for task in self.running.values():
            while not task.is_lost:
                try:
                    data = os.read(task.step.status, 4096)
                except BlockingIOError:
                    break
                task.is_lost = not data
                task.buffer += data
            *lines, task.buffer = task.buffer.split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "batch" in message:
                    task.batch = mark(message["batch"])
                elif "error" in message:
                    task.error = message["error"]
                    task.outcome = (1, None)
                else:
                    task.outcome = (message.get("code", 0), message.get("signal"))
            if task.batch is not None:
                self._change_task(task.raw_id, step=task.step.mark, batch=task.batch)
                task.batch = None

    def _enforce(self, submission: LocalSubmission) -> None:
        """Early signal, time limit, cancellation, and the end of what a finished script left
        behind.
        """
        cancelled = {task.raw_id for task in submission.running if task.cancel}
        for task in self.running.values():
            now = time.monotonic()
            if task.outcome is None and not task.is_lost:
                if task.warn_at is not None and now >= task.warn_at:
                    task.warn_at = None
                    with contextlib.suppress(BrokenPipeError):
                        os.write(task.step.control, b"SIGUSR1\n")
                if task.ending is None and (now >= task.limit_at or task.raw_id in cancelled):
                    if task.raw_id in cancelled:
                        task.ending = JobState.CANCELLED
                    else:
                        task.ending = JobState.TIMEOUT
                    self._begin_end(task, now + self.settings.kill_wait_seconds)
                elif task.kill_at is not None and now >= task.kill_at:
                    send(self._processes(task), signal.SIGKILL)
            elif not task.is_closed:
                left = self._processes(task)
                if left and task.kill_at is None:
                    self._begin_end(
                        task, now + min(self.settings.kill_wait_seconds, LEFTOVER_SECONDS)
                    )
                elif left and task.kill_at is not None and now >= task.kill_at:
                    send(left, signal.SIGKILL)
                elif not left or task.is_lost:
                    task.is_closed = True
                    os.close(task.step.control)

    def _begin_end(self, task: RunningTask, kill_at: float) -> None:
        self._change_task(task.raw_id, state=JobState.COMPLETING)
        task.kill_at = kill_at
        processes = self._processes(task)
        send(processes, signal.SIGTERM)
        send(processes, signal.SIGCONT)  # what is stopped would not hear the TERM

    def _processes(self, task: RunningTask) -> list[psutil.Process]:
        return descendants(task.step.pid)

    def _record(self) -> None:
        """Write down the end of tasks whose keeper has gone."""
        self._reap_orphans()
        for raw_id, task in list(self.running.items()):
            task.has_exited = task.has_exited or (task.is_closed and _has_exited(task.step.pid))
            if not task.has_exited:
                continue
            submission = self.store.load(self.job_id)
            record = None
            if submission:
                record = next((one for one in submission.tasks if one.raw_id == raw_id), None)
            if record is not None:
                kill_task_leftovers(task_variables(self.store, record), None)
                self._change_task(raw_id, **task.verdict())
            for held in task.claims:
                held.close()
            os.close(task.step.status)
            del self.running[raw_id]
            self.store.wake()

    def _reap_orphans(self) -> None:
        """End what a dead keeper left to us, and collect the dead who are no one's task."""
        keepers = {task.step.pid for task in self.running.values()}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if child.pid in keepers:
                    continue
                if is_living(child) and not is_supervisor(child):
                    child.kill()
                os.waitpid(child.pid, os.WNOHANG)

    # ------------------------------------------------------------------------- waiting tasks
    def _start_ready(self) -> None:
        while self._start_next():
            self.store.wake(*(set(self.store.active_ids()) - {self.job_id}))

    def _start_next(self) -> bool:
        """Start the next task if it may start now; else write down what it waits for."""
        nodes = self._nodes()
        with ExitStack() as claims:
            with self.store.changing():
                submission = self.store.load(self.job_id)
                if submission is None or not submission.waiting:
                    return False
                chosen, reason = self._next_task(submission)
                held: dict[str, socket.socket] = {}
                placement = Placement(reason=reason)
                if chosen is not None:
                    gpus = {gpu for node in nodes for gpu in uuids(node.gpus)}
                    held = claim_free(sorted(gpus))
                    for claim in held.values():
                        claims.enter_context(claim)
                    placement = choose_nodes(
                        submission,
                        chosen,
                        others=self.store.active(),
                        nodes=nodes,
                        taken=gpus - set(held),
                    )
                if chosen is None or not placement.nodes:
                    if placement.reason != submission.reason:
                        self.store.save(replace(submission, reason=placement.reason))
                    return False
                # As in Slurm: each task gets a number of its own, the array's last one the array's.
                own_number = submission.is_array and len(submission.waiting) > 1
                record = TaskRecord(
                    raw_id=self.store.next_id() if own_number else self.job_id,
                    task_id=chosen.task_id,
                    nodes=placement.nodes,
                    start_time=time.time(),
                    gpus=placement.gpus,
                )
                waiting = tuple(
                    task for task in submission.waiting if task.task_id != chosen.task_id
                )
                submission = replace(submission, waiting=waiting, reason="").with_task(record)
                self.store.save(submission)
            for uuid in set(held) - set(placement.gpus):
                held[uuid].close()
            self._start(submission, record, tuple(held[uuid] for uuid in placement.gpus))
            claims.pop_all()  # they are the task's now
        return True

    def _nodes(self) -> tuple[LocalNode, ...]:
        """The nodes. The driver is asked for GPUs only where the next task wants some and could
        start now.
        """
        submission = self.store.load(self.job_id)
        found = GpuList()
        if (
            submission is None
            or not submission.request.gpus_per_node
            or self._next_task(submission)[0] is None
        ):
            return local_nodes(self.settings, found)
        found = look_at_gpus()
        if found.fault:
            self._complain(f"the GPUs are not known: {found.fault}")
        return open_to(local_nodes(self.settings, found), self._environment().get(DEVICES_VARIABLE))

    def _next_task(self, submission: LocalSubmission) -> tuple[WaitingTask | None, str]:
        """The task that starts next where there is room for it, or None and the reason to wait."""
        ready = next((task for task in submission.waiting if not task.held), None)
        if ready is None:
            return None, "JobHeldUser"
        for awaited in parse_dependency(submission.request.dependency):
            if not has_ended(awaited, self.store.load(awaited.number)):
                return None, "Dependency"
        if submission.throttle is not None and len(submission.running) >= submission.throttle:
            return None, "JobArrayTaskLimit"
        return ready, ""

    def _environment(self) -> dict[str, str]:
        """What the submission was given of its submitter's variables."""
        kept = self.store.job_folder(self.job_id) / "environment.json"
        found: dict[str, str] = json.loads(
            kept.read_text(encoding="utf-8", errors="surrogateescape")
        )
        return found

    def _start(
        self, submission: LocalSubmission, record: TaskRecord, claims: tuple[socket.socket, ...]
    ) -> None:
        request = submission.request
        step = start_step(
            BatchCommand(
                arguments=interpreter(self.store.job_folder(self.job_id) / "script"),
                environment=task_environment(
                    submission, record, self._environment(), self.store.folder
                ),
                working_directory=request.working_directory,
                output=Path(output_path(submission, record)),
                claims=tuple(claim.fileno() for claim in claims),
            )
        )
        limit_at = time.monotonic() + request.time_limit_seconds
        early = request.signal_seconds_before_limit
        if early is None:
            warn_at = None
        else:
            warn_at = limit_at - early
        self.running[record.raw_id] = RunningTask(
            record.raw_id, step, limit_at, warn_at, claims=claims
        )

    def _change_task(self, raw_id: int, **changes: object) -> None:
        """Change one task's record on disk, if it is still there."""
        with self.store.changing():
            submission = self.store.load(self.job_id)
            for record in submission.tasks if submission else ():
                if submission is not None and record.raw_id == raw_id:
                    self.store.save(submission.with_task(replace(record, **changes)))

    # ------------------------------------------------------------------------- waiting
    def _help_dead_peers(self) -> None:
        """A peer that died may hold nodes, or be what we depend on."""
        if time.monotonic() - self.recovered_at >= IDLE_SECONDS:
            self.recovered_at = time.monotonic()
            recover(self.store)

    def _wait(self, timeout: float) -> None:
        now = time.monotonic()
        watched = [self.wake]
        for task in self.running.values():
            if task.ending or task.outcome or task.is_lost:
                timeout = min(timeout, CLOSE_SECONDS)
            else:
                due = [task.limit_at, *([task.warn_at] if task.warn_at is not None else [])]
                timeout = min(timeout, max(0.0, min(due) - now))
                watched.append(task.step.status)
        ready, _, _ = select.select(watched, [], [], timeout)
        if self.wake in ready:
            os.read(self.wake, 4096)


def _has_exited(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def main(arguments: list[str]) -> int:
    """Detach, take over the submission, say so to the starter by exit status 0, and work."""
    folder = Path(arguments[0])
    job_id = int(arguments[1])
    lock = int(arguments[2])
    os.set_inheritable(lock, False)  # held until this process ends, and by no other
    ready_read, ready_write = os.pipe()
    if os.fork():
        os.close(ready_write)
        if os.read(ready_read, 1):
            return 0
        return 1
    os.close(ready_read)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    show_as("tr11-supervisor")
    store = LocalStore(folder)
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    supervisor = LocalSupervisor(store, job_id)
    os.write(ready_write, b"!")
    os.close(ready_write)
    supervisor.run()
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
