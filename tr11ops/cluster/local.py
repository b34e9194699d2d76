"""The embedded scheduler: Slurm's manners on one machine, with no daemon to install or start.

Each submission has a supervisor process of its own (`local_supervisor`), which outlives the shell
that submitted; state lies in a folder (`local_store`), so that any later process sees and steers
it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from signal import Signals

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.arrays import task_apart, tasks_apart
from tr11ops.cluster.base import BatchRequest, Job, Node, Partition, TestResult
from tr11ops.cluster.local_machine import (
    DEVICES_VARIABLE,
    GpuList,
    local_nodes,
    look_at_gpus,
    node_names,
    open_to,
    submitted_environment,
)
from tr11ops.cluster.local_records import (
    PARTITION,
    Dropped,
    LocalSettings,
    LocalSubmission,
    TaskRecord,
    WaitingTask,
    is_alive,
)
from tr11ops.cluster.local_rules import (
    JobReference,
    array_of,
    find_job,
    node_view,
    parse_dependency,
    parse_job_id,
    placement_fault,
    request_fault,
    submission_jobs,
)
from tr11ops.cluster.local_store import (
    NODES_VARIABLE,
    LocalStore,
    default_folder,
    launch_supervisor,
    nodes_of,
    recover,
)
from trainer.contract.files import login_name

START_PATIENCE_SECONDS = 10.0


class LocalScheduler:
    """`Scheduler` on this machine, which is its one node, or plays several (see `local_machine`).

    `folder` keeps the state (default: $TR11_LOCAL_SCHEDULER, else tr11/local in the user's state
    folder). `settings`, when given, replace those in the folder; $TR11_LOCAL_NODES, when set,
    replaces the nodes.
    """

    name = "local"

    def __init__(self, folder: Path | None = None, settings: LocalSettings | None = None) -> None:
        self.store = LocalStore(folder.absolute() if folder else default_folder(os.environ))
        self.store.prepare()
        asked = os.environ.get(NODES_VARIABLE, "").strip()
        if settings is None and asked:
            nodes = nodes_of(asked)
            settings = replace(self.store.settings(), nodes=nodes)
        if settings is not None and settings != self.store.settings():
            with self.store.changing():
                self.store.save_settings(settings)

    # ------------------------------------------------------------------------- submitting
    def submit(self, request: BatchRequest) -> str:
        """Submit, and return the job id. Raises SchedulerError with the reason."""
        recover(self.store)
        settings = self.store.settings()
        fault = self._fault(request, settings)
        if fault:
            raise SchedulerError(fault)
        array = None
        if request.array is not None:
            array = array_of(request.array)
        indices = array.indices if array else (None,)
        environment = submitted_environment(request, dict(os.environ))
        with self.store.changing():
            self.store.prune(time.time(), settings.keep_seconds)
            job_id = self.store.next_id()
            submission = LocalSubmission(
                job_id=job_id,
                request=request,
                user=login_name(),
                submit_time=time.time(),
                is_array=array is not None,
                throttle=array.throttle if array else None,
                waiting=tuple(
                    WaitingTask(index, request.hold, request.exclude) for index in indices
                ),
                array_bounds=(array.indices[0], array.indices[-1], array.step, len(array.indices))
                if array
                else (0, 0, 0, 0),
            )
            lock = self.store.create(submission, environment)
        try:
            launch_supervisor(self.store, job_id, lock)
        except SchedulerError:
            with self.store.changing():
                self.store.discard(job_id)
            raise
        finally:
            os.close(lock)
        return str(job_id)

    def test(self, request: BatchRequest) -> TestResult:
        """Would this request be accepted? Submits nothing."""
        settings = self.store.settings()
        fault = self._fault(request, settings)
        if settings.nodes is None:
            where = "this machine"
        else:
            where = f"{request.nodes} of the simulated nodes"
        return TestResult(fault is None, fault or f"can run on {where}")

    def _fault(self, request: BatchRequest, settings: LocalSettings) -> str | None:
        try:
            if request.array is not None:
                array_of(request.array)
            if not all(map(self._is_known, parse_dependency(request.dependency))):
                return f"invalid dependency {request.dependency!r}: such a job is not known"
        except SchedulerError as error:
            return str(error)
        if request.gpus_per_node:
            found = look_at_gpus()
        else:
            found = GpuList()
        devices = submitted_environment(request, dict(os.environ)).get(DEVICES_VARIABLE)
        return request_fault(request, settings, open_to(local_nodes(settings, found), devices))

    def _is_known(self, awaited: JobReference) -> bool:
        """Whether there is such a job or task, or was one that is forgotten."""
        submission = self.store.load(awaited.number)
        if submission is None:
            return 0 < awaited.number <= self.store.last_id()
        return all(find_job(submission, task) is not None for task in awaited.tasks or ())

    # ------------------------------------------------------------------------- looking
    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        """All jobs of the folder, those that ended within `keep_seconds` too."""
        recover(self.store)
        oldest = time.time() - self.store.settings().keep_seconds
        return tasks_apart(
            job
            for submission in self.store.everything()
            if name in {None, submission.request.name}
            if not (submission.is_over and submission.end_time < oldest)
            for job in submission_jobs(submission)
        )

    def job(self, job_id: str) -> Job | None:
        """One job or array task by id (`12`, `12_3`, or a task's own number); None if it is not
        known.

        For several tasks or a whole array: its waiting tasks, else its newest task. Raises
        SchedulerError for an id that no job can have.
        """
        recover(self.store)
        found = self._find(parse_job_id(job_id))
        if found is None:
            return None
        submission, reference = found
        if (
            submission.is_over
            and submission.end_time < time.time() - self.store.settings().keep_seconds
        ):
            return None
        one_task = None
        if reference.tasks is not None and len(reference.tasks) == 1:
            one_task = next(iter(reference.tasks))
        job = find_job(submission, one_task)
        if job is None:
            return None
        return task_apart(job)

    def nodes(self) -> tuple[Node, ...]:
        """The nodes; a simulated one shows the whole machine's cores and memory, and its share of
        the GPUs.
        """
        recover(self.store)
        active = self.store.active()
        return tuple(
            node_view(node, active) for node in local_nodes(self.store.settings(), look_at_gpus())
        )

    def partitions(self) -> tuple[Partition, ...]:
        """The one partition, `local`."""
        settings = self.store.settings()
        return (
            Partition(PARTITION, settings.max_time_seconds, node_names(settings), is_default=True),
        )

    # ------------------------------------------------------------------------- steering
    def cancel(self, job_id: str) -> None:
        """Cancel a job, an array, or one task (`ID_k`). What has ended, or was never there, stays
        as it is.
        """

        def change(submission: LocalSubmission, reference: JobReference) -> LocalSubmission:
            dropped = tuple(
                task.task_id for task in submission.waiting if reference.names(task.task_id)
            )
            return replace(
                submission,
                tasks=tuple(
                    replace(task, cancel=True)
                    if not task.state.is_final and reference.names(task.task_id)
                    else task
                    for task in submission.tasks
                ),
                waiting=tuple(
                    task for task in submission.waiting if not reference.names(task.task_id)
                ),
                dropped=(*submission.dropped, Dropped(dropped, time.time()))
                if dropped
                else submission.dropped,
            )

        recover(self.store)
        if self._find(parse_job_id(job_id)) is not None:
            self._change(job_id, change)

    def hold(self, job_id: str) -> None:
        """Keep the pending job, tasks or task from starting. Raises SchedulerError when nothing is
        pending.
        """
        self._change_waiting(job_id, lambda task: replace(task, held=True))

    def release(self, job_id: str) -> None:
        """Undo `hold`. Raises SchedulerError when nothing is pending."""
        self._change_waiting(job_id, lambda task: replace(task, held=False))

    def exclude(self, job_id: str, nodes: tuple[str, ...]) -> None:
        """Set the excluded nodes of pending work in place. Raises SchedulerError when too few nodes
        would remain.
        """

        def change(task: WaitingTask) -> WaitingTask:
            return replace(task, excluded=tuple(dict.fromkeys(nodes)))

        submission, _ = self._resolve(job_id)
        fault = placement_fault(submission.request.least, nodes, node_names(self.store.settings()))
        if fault:
            raise SchedulerError(f"job {job_id}: {fault}")
        self._change_waiting(job_id, change)

    def set_comment(self, job_id: str, comment: str) -> None:
        """Set the comment of pending work in place; an array has one for all its tasks, also for
        those that run.
        """

        def change(submission: LocalSubmission, reference: JobReference) -> LocalSubmission:
            _must_wait(submission, reference, job_id)
            return replace(submission, request=replace(submission.request, comment=comment))

        self._change(job_id, change)

    def signal(self, job_id: str, signal_name: str) -> None:
        """Send a signal (`USR1`, ...) to the running batch scripts."""
        try:
            number = Signals["SIG" + signal_name.upper().removeprefix("SIG")]
        except KeyError:
            raise SchedulerError(
                f"invalid signal {signal_name!r}: use a name such as USR1 or TERM"
            ) from None
        recover(self.store)
        submission, reference = self._resolve(job_id)
        tasks = [task for task in submission.running if reference.names(task.task_id)]
        if not tasks:
            raise SchedulerError(f"job {job_id} is not running: no process to signal")
        import psutil  # which takes longer to import than all that a look at the queue needs

        from tr11ops.cluster.local_processes import send

        for task in tasks:
            started = self._wait_for_batch(submission.job_id, task)
            if started is None or started.batch is None or not is_alive(started.batch):
                continue  # it ended a moment ago
            send([psutil.Process(started.batch.pid)], number)

    def _wait_for_batch(self, job_id: int, task: TaskRecord) -> TaskRecord | None:
        """The task's record once its batch script is known; None if it ended before."""
        deadline = time.monotonic() + START_PATIENCE_SECONDS
        while time.monotonic() < deadline:
            submission = self.store.load(job_id)
            record = None
            if submission:
                record = next(
                    (one for one in submission.running if one.raw_id == task.raw_id), None
                )
            if record is None or record.batch is not None:
                return record
            time.sleep(0.02)
        raise SchedulerError(f"task {task.raw_id} has not started its batch script yet; try again")

    # ------------------------------------------------------------------------- helpers
    def _find(self, reference: JobReference) -> tuple[LocalSubmission, JobReference] | None:
        """The submission that is meant, and which of its tasks; None if it is not, or no longer,
        known.
        """
        submission = self.store.load(reference.number)
        if submission is None and reference.tasks is None:
            by_number = self.store.find_raw(reference.number)
            if by_number is None:
                return None
            submission, task_id = by_number
            return submission, JobReference(
                submission.job_id, None if task_id is None else frozenset({task_id})
            )
        if submission is None or not any(
            find_job(submission, task) for task in reference.tasks or {None}
        ):
            return None
        return submission, reference

    def _resolve(self, job_id: str) -> tuple[LocalSubmission, JobReference]:
        """As `_find`, by the text of an id. Raises SchedulerError for one that is not known."""
        found = self._find(parse_job_id(job_id))
        if found is None:
            raise SchedulerError(f"invalid job id {job_id}: no such job is known")
        return found

    def _change(
        self, job_id: str, change: Callable[[LocalSubmission, JobReference], LocalSubmission]
    ) -> None:
        recover(self.store)
        with self.store.changing():
            submission, reference = self._resolve(job_id)
            changed = change(submission, reference)
            if changed != submission:
                self.store.save(changed)
        self.store.wake(submission.job_id)
        self.store.wake()

    def _change_waiting(self, job_id: str, change: Callable[[WaitingTask], WaitingTask]) -> None:
        def change_all(submission: LocalSubmission, reference: JobReference) -> LocalSubmission:
            _must_wait(submission, reference, job_id)
            waiting = tuple(
                change(task) if reference.names(task.task_id) else task
                for task in submission.waiting
            )
            return replace(submission, waiting=waiting)

        self._change(job_id, change_all)


def _must_wait(submission: LocalSubmission, reference: JobReference, job_id: str) -> None:
    """Raises SchedulerError where none of the tasks that are meant is pending any more."""
    if not any(reference.names(task.task_id) for task in submission.waiting):
        raise SchedulerError(f"job {job_id} is no longer pending")
