"""The embedded scheduler's state folder: JSON files replaced atomically, changes under one lock; and
the supervisors of what it holds, started, and replaced where one died (kill -9, a reboot).

settings.json           nodes and limits (`LocalSettings`)
lock                    held (flock) for every change
last_id                 the newest job number given out
active/ID               present while submission ID is not over
jobs/ID/state.json      the submission and its tasks
jobs/ID/script          the batch script
jobs/ID/environment.json  the job's environment, readable by its owner alone, removed when the submission is over
jobs/ID/supervisor.lock held (flock) by the supervisor for as long as it lives, so a dead one is known for sure;
                        the number in it, its process id, is for people
jobs/ID/supervisor.log  what the supervisor had to say
jobs/ID/wake            a FIFO: a byte there tells the supervisor to look at its state again
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import tr11ops
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.base import JobState
from tr11ops.cluster.local_records import (
    SUPERVISOR_MODULE,
    LocalSettings,
    LocalSubmission,
    TaskRecord,
    boot_mark,
    simulated_nodes,
)
from tr11ops.cluster.local_rules import parse_dependency
from trainer.contract.documents import document

LOCK_PATIENCE_SECONDS = 30.0
FOLDER_VARIABLE = "TR11_LOCAL_SCHEDULER"
NODES_VARIABLE = "TR11_LOCAL_NODES"
THE_MACHINE = "machine"


def default_folder(environment: Mapping[str, str]) -> Path:
    """$TR11_LOCAL_SCHEDULER, else tr11/local in the user's state folder."""
    if environment.get(FOLDER_VARIABLE):
        return Path(environment[FOLDER_VARIABLE]).absolute()
    state = environment.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "tr11" / "local"


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step, on disk before it is visible, for its owner alone."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # The kernel's own stamps are milliseconds apart; two versions of a file must never share
        # one.
        os.utime(temporary, ns=(time.time_ns(), time.time_ns()))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class LocalStore:
    """The state folder. Reading needs no lock; every change happens inside `changing()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cache: dict[int, tuple[tuple[int, int, int], LocalSubmission]] = {}

    def prepare(self) -> None:
        """Create the folder. Raises SchedulerError where that is not possible."""
        try:
            for folder in (self.folder, self.folder / "jobs", self.folder / "active"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SchedulerError(
                f"cannot keep the embedded scheduler's state in {str(self.folder)!r}: {error.strerror}; "
                f"set {FOLDER_VARIABLE} to a folder that you may write"
            ) from None

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock. Raises SchedulerUnreachable when another process does not give it up."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
            while not try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise SchedulerUnreachable(
                        f"another process has held {str(self.folder / 'lock')!r} for {LOCK_PATIENCE_SECONDS:.0f} s"
                    )
                time.sleep(0.005)
            yield
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------------------- settings
    def settings(self) -> LocalSettings:
        """The settings on disk, or the defaults. Raises SchedulerError for a file with a fault."""
        value = self._read(self.folder / "settings.json")
        try:
            return LocalSettings.from_json(value or {})
        except ValueError as error:
            raise SchedulerError(f"{str(self.folder / 'settings.json')!r}: {error}") from None

    def save_settings(self, settings: LocalSettings) -> None:
        if settings != self.settings():
            write_file(self.folder / "settings.json", json.dumps(document(settings)))

    # ------------------------------------------------------------------------- submissions
    def job_folder(self, job_id: int) -> Path:
        return self.folder / "jobs" / str(job_id)

    def next_id(self) -> int:
        """A job number that was never given out before. Call it inside `changing()`."""
        number = max(self.last_id(), *self._numbers("jobs"), 0) + 1
        write_file(self.folder / "last_id", f"{number}\n")
        return number

    def last_id(self) -> int:
        try:
            return int((self.folder / "last_id").read_text())
        except FileNotFoundError:
            return 0

    def create(self, submission: LocalSubmission, environment: Mapping[str, str]) -> int:
        """Write a new submission; it is visible when its state file, the last one, is there.

        Returns its supervisor's lock, taken, so that at no moment it looks abandoned.
        """
        folder = self.job_folder(submission.job_id)
        folder.mkdir(mode=0o700)
        lock = self.supervisor_lock(submission.job_id)
        if lock is None:
            raise SchedulerError(f"{str(folder)!r} is in use by another process")
        write_file(folder / "script", submission.request.script)
        write_file(folder / "environment.json", json.dumps(dict(environment)))
        os.mkfifo(folder / "wake", 0o600)
        (self.folder / "active" / str(submission.job_id)).touch()
        self.save(submission)
        return lock

    def discard(self, job_id: int) -> None:
        """Take back a submission that could not be started. Call it inside `changing()`."""
        (self.folder / "active" / str(job_id)).unlink(missing_ok=True)
        shutil.rmtree(self.job_folder(job_id), ignore_errors=True)

    def save(self, submission: LocalSubmission) -> None:
        folder = self.job_folder(submission.job_id)
        write_file(folder / "state.json", json.dumps(submission.to_json()))
        if submission.is_over:
            (folder / "environment.json").unlink(missing_ok=True)
            (self.folder / "active" / str(submission.job_id)).unlink(missing_ok=True)

    def load(self, job_id: int) -> LocalSubmission | None:
        """One submission; None if it is not, or no longer, known."""
        path = self.job_folder(job_id) / "state.json"
        try:
            found = path.stat()
        except FileNotFoundError:
            self._cache.pop(job_id, None)
            return None
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        cached = self._cache.get(job_id)
        if cached is None or cached[0] != stamp:
            value = self._read(path)
            if value is None:
                return None
            # A newer file than the one that was looked at only makes the next call read again.
            cached = self._cache[job_id] = (stamp, LocalSubmission.from_json(value))
        return cached[1]

    def active(self) -> tuple[LocalSubmission, ...]:
        """Every submission that is not over, oldest first."""
        found = (self.load(job_id) for job_id in self._numbers("active"))
        return tuple(
            submission for submission in found if submission is not None and not submission.is_over
        )

    def active_ids(self) -> tuple[int, ...]:
        return self._numbers("active")

    def everything(self) -> tuple[LocalSubmission, ...]:
        """Every submission that is still known, oldest first."""
        found = (self.load(job_id) for job_id in self._numbers("jobs"))
        return tuple(submission for submission in found if submission is not None)

    def find_raw(self, raw_id: int) -> tuple[LocalSubmission, int | None] | None:
        """The submission and array index of a task by its raw number, which is never below its
        submission's.
        """
        for job_id in reversed(self._numbers("jobs")):
            submission = None
            if job_id <= raw_id:
                submission = self.load(job_id)
            for task in submission.tasks if submission else ():
                if submission is not None and task.raw_id == raw_id:
                    return submission, task.task_id
        return None

    def prune(self, now: float, keep_seconds: float) -> None:
        """Forget what ended long ago, unless something that waits depends on it. Call it inside
        `changing()`.
        """
        active = set(self._numbers("active"))
        needed = {
            awaited.number
            for submission in self.active()
            if submission.waiting
            for awaited in parse_dependency(submission.request.dependency)
        }
        for job_id in set(self._numbers("jobs")) - active - needed:
            folder = self.job_folder(job_id)
            try:
                is_old = (folder / "state.json").stat().st_mtime < now - keep_seconds
            except FileNotFoundError:
                is_old = folder.stat().st_mtime < now - keep_seconds
            if is_old:
                shutil.rmtree(folder, ignore_errors=True)

    def wake(self, *job_ids: int) -> None:
        """Have these supervisors look at the state again; without ids, all of them."""
        for job_id in job_ids or self._numbers("active"):
            # No reader means no supervisor: recovery, not a byte in a FIFO, is what helps then.
            with contextlib.suppress(OSError):
                descriptor = os.open(
                    self.job_folder(job_id) / "wake", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
                )
                try:
                    os.write(descriptor, b"!")
                finally:
                    os.close(descriptor)

    def supervisor_lock(self, job_id: int) -> int | None:
        """The supervisor's lock, taken: a descriptor to keep or to close. None while a supervisor
        lives.
        """
        try:
            descriptor = os.open(
                self.job_folder(job_id) / "supervisor.lock",
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o600,
            )
        except FileNotFoundError:  # pruned between listing and looking
            return None
        if try_lock(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    # ------------------------------------------------------------------------- helpers
    def _numbers(self, name: str) -> tuple[int, ...]:
        try:
            return tuple(
                sorted(
                    int(entry.name)
                    for entry in (self.folder / name).iterdir()
                    if entry.name.isdecimal()
                )
            )
        except FileNotFoundError:
            return ()

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            value = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise SchedulerUnreachable(f"cannot read {str(path)!r}: {error}") from None
        if not isinstance(value, dict):
            raise SchedulerUnreachable(f"{str(path)!r} is not a JSON object")
        return value


def try_lock(descriptor: int) -> bool:
    """Take an exclusive flock without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def nodes_of(text: str) -> tuple[str, ...] | None:
    """$TR11_LOCAL_NODES: a number of simulated nodes, their names with commas, or `machine` (None).

    Raises SchedulerError for anything else.
    """
    if text == THE_MACHINE:
        return None
    if text.isdecimal():
        if not 1 <= int(text) <= 10_000:
            raise SchedulerError(
                f"{NODES_VARIABLE}={text}: the number of nodes must be between 1 and 10000"
            )
        return simulated_nodes(int(text))
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) != len(names) or not all(
        name.replace("-", "").replace("_", "").isalnum() for name in names
    ):
        raise SchedulerError(
            f"{NODES_VARIABLE}={text!r}: give a number, or distinct node names with commas between"
        )
    return names


# ----------------------------------------------------------------------------- supervisors
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
