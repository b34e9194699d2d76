"""The edge to Slurm: its own commands, each with a time-out, none of them believed when it stays
silent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster import slurm_text
from tr11ops.cluster.arrays import covered, names_of, task_apart, task_numbers, tasks_apart
from tr11ops.cluster.base import BatchRequest, Job, JobState, Node, Partition, TestResult
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.cluster.sbatch_options import sbatch_options
from tr11ops.cluster.site import config_time
from tr11ops.cluster.slurm_command import (
    COMMAND_SECONDS,
    CommandResult,
    CommandRunner,
    client_environment,
    run_command,
)
from tr11ops.cluster.slurm_text import exit_pair, shell_exit_code

T = TypeVar("T")
_UNREACHABLE = re.compile(
    r"unable to (contact|connect)|timed out|connection (refused|reset|failure)|communication|zero bytes|"
    r"could not establish a configuration|unable to establish controller|transport endpoint|standby mode|munge|"
    r"authentication|temporarily unavailable|unexpected message|no route to host|"
    r"unable to resolve|network is unreachable|controller is not responding|try again in a bit",
    re.IGNORECASE,
)
# sbatch then tries again for minutes; it is stopped at these words: no job came of it
_QUEUE_FULL = "temporarily unable to accept job"
_MEANINGS = (  # what Slurm's words mean, and what to do
    (
        re.compile(_QUEUE_FULL),
        "the cluster's queue is full (MaxJobCount): try again when jobs have ended",
    ),
    (
        re.compile(r"violates accounting/QOS policy", re.IGNORECASE),
        "a limit of your account or QoS: `sacctmgr show assoc user=$USER` shows it",
    ),
    (
        re.compile(r"DB index is being set", re.IGNORECASE),
        "Slurm says so of a job that lost a node, for as long as it runs: that job cannot be changed",
    ),
    (
        re.compile(r"^scontrol: .*invalid node name", re.IGNORECASE),
        (
            "a name in the list is no node of the cluster; where the job has it already, Slurm 24.11 and newer "
            "change nothing of that job and give it any node: scancel --state=PENDING JOB, and launch again"
        ),
    ),
    (
        re.compile(r"slurm_load_node.*permission denied", re.IGNORECASE),
        "the site shows its nodes to administrators alone (PrivateData=nodes)",
    ),
    (
        re.compile(r"socket timed out", re.IGNORECASE),
        "slurmctld is there, but too busy to answer in time; a job may have come of it",
    ),
)
# what `sbatch --test-only` says where too few nodes can be used now, or others have reserved them:
# sbatch itself queues such a job, unless it can never start (22.05 has the same words for both)
_OF_THE_MOMENT = re.compile(
    r"node configuration is not available|partition configuration not available now|requested nodes are busy|"
    r"required node not available|not start due to maintenance|switch resources currently not available|"
    r"reservation is in use|licenses? .*(unavailable|not available)",
    re.IGNORECASE,
)
_NO_JOBS = "No jobs in the system"
_UNKNOWN_JOB = re.compile(r"invalid job id|job \S+ not found", re.IGNORECASE)
# answers for single tasks of an array which do not spoil what was done for the others
_HARMLESS = re.compile(
    r"no longer pending|already finished|already completing or completed", re.IGNORECASE
)
_PER_TASK = re.compile(r"^\d+(?:_\S+)?: (?P<answer>.+)$")
# squeue's own words for one reason have spaces or colons behind a comma
_MERGED = re.compile(r"\w+(,\w+)+")
# a task that lost a node and lives on has these said of itself and of its whole array for as long
# as it runs (22.05 without accounting); the array's waiting tasks are changed all the same, or can
# be when they are named
_NOT_NOW = re.compile(r"DB index is being set|unexpected message", re.IGNORECASE)
_RETRYING = "in transitional state, retrying"
# for questions only, so that no job inherits it: times as seconds since the epoch, array
# expressions never cut short
_READABLE = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


class _NothingWaits(SchedulerError):
    """Slurm names only tasks that wait no more. 24.11 says so, too, where one task runs and one waits,
    and nothing of the one that it changed.
    """


class SlurmScheduler:
    """The Scheduler protocol over Slurm's commands.

    `environment` is laid over this process's own, such as `Twin.environment`.
    """

    name = "slurm"

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        runner: CommandRunner = run_command,
        timeout_seconds: float = COMMAND_SECONDS,
    ) -> None:
        self._environment = client_environment({**os.environ, **(environment or {})})
        self._runner = runner
        self._timeout_seconds = timeout_seconds
        self._without_table: set[str] = set()  # commands whose table cannot be read here

    # -- what is
    # --------------------------------------------------------------------------------------------------

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        """All jobs the scheduler still knows, in one call; two only where the quick form of the
        answer will not do.

        With a name it is squeue's table, without the excluded nodes. The table shows an array's
        waiting tasks as one, whatever each waits for: where that differs, and without a name, it is
        scontrol's records, as Slurm keeps them.
        """
        found = None
        if name:
            columns = slurm_text.format_of(slurm_text.JOB_COLUMNS)
            found = self._table(
                ["squeue", "--noheader", "--states=all", f"--Format={columns}", f"--name={name}"],
                slurm_text.jobs_from_table,
            )
        if found is None or any(map(_is_merged, found)):
            found = tuple(self._records())
        return tasks_apart(job for job in found if name in (None, job.name))

    def _table(
        self, arguments: list[str], read: Callable[[str], tuple[T, ...] | None]
    ) -> tuple[T, ...] | None:
        """What a command prints as a table; None where this version prints it otherwise, and is not
        asked again.
        """
        command = arguments[0]
        if command in self._without_table:
            return None
        result = self._run(arguments)
        # a field that this version does not know is left out with a complaint, and exit status 0
        found = None
        if result.returncode == 0 and not result.stderr:
            found = read(result.stdout)
        if found is None and _UNREACHABLE.search(_message(result, command)):
            raise SchedulerUnreachable(_message(result, command))
        if found is None:
            self._without_table.add(command)
        return found

    def job(self, job_id: str) -> Job | None:
        """One job or array task, through `scontrol show job`; None if Slurm no longer knows it.

        For an array's id it is the record of the waiting tasks, or of the last task once all have
        started.
        """
        found = self._job(job_id)
        if found is None:
            return None
        return task_apart(found)

    def _job(self, job_id: str) -> Job | None:
        """As `job`, as Slurm has it."""
        wanted = _plain_id(job_id)
        base, _, task = wanted.partition("_")
        task_number = None
        if task.isdigit():
            task_number = int(task)
        found = self._records(wanted if task_number is not None else base)
        if task_number is None:
            return next((job for job in found if job.raw_id == base), found[0] if found else None)
        for job in found:
            if job.task_id == task_number:
                return job
            if task_number in task_numbers(job.job_id.partition("_")[2]):
                output = job.output.replace("%a", str(task_number))
                return replace(
                    job, job_id=wanted, task_id=task_number, pending_tasks=(), output=output
                )
        return None

    def step_code(self, job_id: str) -> int | None:
        """The highest exit status so far of the steps of a job, which may still run; 128 + n after
        signal n.

        None where Slurm does not say it, or knows the job no more.
        """
        number = _plain_id(job_id)
        told = slurm_text.records(
            self._ask(["scontrol", "--details", "show", "job", number]), "JobId"
        )
        own = next((record for record in told if record["JobId"] == number), {})
        return shell_exit_code(*exit_pair(own.get("DerivedExitCode", "")))

    def _records(self, *job_ids: str) -> list[Job]:
        """What `scontrol show job` tells of a job, a task, or all tasks of an array (nothing if it
        knows none); of all.

        An answer without a record is an empty queue only where it says so.
        """
        result = self._run(["scontrol", "--details", "show", "job", *job_ids])
        words = _message(result, "scontrol")
        if result.returncode == 0:
            found = [
                slurm_text.job_from_record(record)
                for record in slurm_text.records(result.stdout, "JobId")
            ]
            if not (found or job_ids or _NO_JOBS in result.stdout):
                raise SchedulerUnreachable(words)
            return found
        if _UNKNOWN_JOB.search(words):
            return []
        raise _failure(words)

    def nodes(self) -> tuple[Node, ...]:
        """All nodes that are in a partition, in one call, which tells also the partitions that
        start nothing.

        Where the table cannot be read `scontrol show nodes` is asked, which reads the same in every
        version, and tells no partition's state.
        """
        columns = slurm_text.format_of(slurm_text.NODE_COLUMNS)
        found = self._table(
            ["sinfo", "--all", "--noheader", "--Node", f"--Format={columns}"],
            slurm_text.nodes_from_table,
        )
        if found is None:
            found = slurm_text.nodes_from_scontrol(self._ask(["scontrol", "show", "nodes"]))
        return found

    def partitions(self) -> tuple[Partition, ...]:
        """All partitions, in one call."""
        return slurm_text.partitions_from_scontrol(
            self._ask(["scontrol", "--all", "show", "partitions"])
        )

    def clock(self) -> float:
        """The controller's time, in seconds since the epoch."""
        told = config_time(self._ask(["scontrol", "show", "config"]))
        if told is None:
            raise SchedulerError("scontrol show config does not say its time")
        return told

    # -- what is to be
    # ---------------------------------------------------------------------------------------------

    def submit(self, request: BatchRequest) -> str:
        """Submit, and return the job id.

        After SchedulerUnreachable the job may exist all the same: look for it by name and comment
        before trying again.
        """
        answer = _answer(self._sbatch("--parsable", request), "sbatch").strip()
        job_id = ""
        if answer:
            job_id = answer.splitlines()[-1].partition(";")[0]
        if not job_id.isdigit():
            raise SchedulerError(
                f"sbatch answered {answer!r}, not a job id: look with squeue before trying again"
            )
        return job_id

    def test(self, request: BatchRequest) -> TestResult:
        """`sbatch --test-only`: would this request be accepted, and could it start? Submits
        nothing.
        """
        result = self._sbatch("--test-only", request)
        words = _message(result, "sbatch")
        if result.returncode != 0 and _UNREACHABLE.search(words):
            raise SchedulerUnreachable(words)
        accepted = result.returncode == 0
        return TestResult(
            accepted, words, not accepted and _OF_THE_MOMENT.search(words) is not None
        )

    def cancel(self, job_id: str) -> None:
        """Cancel a job, an array, or one task. What has ended already, or was never there, stays as
        it is.

        A task that is named by its own number, and not as ARRAY_TASK, is not found by scancel,
        which then says so and ends with 0 (seen in 22.05): it gets its other name first.
        """
        wanted = _plain_id(job_id)
        found = None
        if wanted.isdecimal():
            found = self._job(wanted)
        self._ask(
            ["scancel", wanted if found is None or found.array_id == wanted else _task_name(found)]
        )

    def hold(self, job_id: str) -> None:
        """Keep a pending job or the pending tasks of an array from starting."""
        self._change(job_id, lambda name: ["hold", name], is_held)

    def release(self, job_id: str) -> None:
        """Undo `hold`. What has started, or is over, is held no more."""
        self._change(job_id, lambda name: ["release", name], _is_free, may_have_started=True)

    def signal(self, job_id: str, signal_name: str) -> None:
        """Send a signal to the batch script of what runs of a job. Raises SchedulerError when nothing of it runs.

        While tasks of an array wait, scancel is told "try again later" although the running ones
        got the signal (seen in 22.05), and repeats it for a minute and a half: it is stopped before
        the first repetition.
        """
        wanted = _plain_id(job_id)
        task = wanted.partition("_")[2]
        numbers = task_numbers(task)
        running = [
            job.job_id
            for job in self._records(wanted.partition("_")[0])
            if job.state is JobState.RUNNING and (not task or job.task_id in numbers)
        ]
        if not running:
            raise SchedulerError(f"job {job_id} is not running: no signal was sent")
        for target in running:
            command = ["scancel", "--verbose", f"--signal={signal_name}", "--batch", target]
            result = self._run(command, until=_RETRYING)
            if result.returncode:
                raise _failure(_message(result, "scancel"))

    def exclude(self, job_id: str, nodes: tuple[str, ...]) -> None:
        """Set the excluded nodes of pending work in place; an empty tuple takes the exclusion away."""
        wanted = frozenset(nodes)
        self._change(
            job_id,
            lambda name: ["update", f"JobId={name}", f"ExcNodeList={','.join(nodes)}"],
            lambda job: frozenset(job.excluded) == wanted,
        )

    def set_comment(self, job_id: str, comment: str) -> None:
        """Set the comment of pending work in place."""
        self._change(
            job_id,
            lambda name: ["update", f"JobId={name}", f"Comment={comment}"],
            lambda job: job.comment == comment,
        )

    def run_after(self, job_id: str, after: str) -> None:
        """Let pending work start only after the end of job `after` (its own number), however that
        ends.
        """
        number = _plain_id(after)
        self._change(
            job_id,
            lambda name: ["update", f"JobId={name}", f"Dependency=afterany:{number}"],
            lambda job: f"afterany:{number}(" in job.dependency,
        )

    def requeue(self, job_id: str, *, as_submitted: bool = False) -> None:
        """Put a running job back among the pending ones, whatever it was submitted with but
        `as_submitted`; its processes are ended.

        The last task of an array to begin has the array's own number, by which scontrol requeues
        every task that runs (seen in 22.05): a task is named as ARRAY_TASK.
        """
        name = _plain_id(job_id)
        found = self._job(name)
        if found is not None:
            name = _task_name(found)
        if not as_submitted:
            self._ask(["scontrol", "update", f"JobId={name}", "Requeue=1"])
        self._ask(["scontrol", "requeue", name])

    def withdraw_requeue(self, job_id: str) -> None:
        """Let a running job not be put back any more: one that is expedited, and ends with another
        status than 0, would be held in the queue.
        """
        found = self._job(_plain_id(job_id))
        if found is not None:
            self._ask(["scontrol", "update", f"JobId={_task_name(found)}", "Requeue=0"])

    # -- how
    # -------------------------------------------------------------------------------------------------------

    def _run(self, arguments: list[str], until: str | None = None) -> CommandResult:
        return self._runner(
            arguments,
            standard_input="",
            environment=self._environment | _READABLE,
            timeout_seconds=self._timeout_seconds,
            until=until,
        )

    def _sbatch(self, mode: str, request: BatchRequest) -> CommandResult:
        if not request.working_directory.is_dir():
            # Slurm would take the job, and start it in /tmp
            raise SchedulerError(
                f"the working directory {request.working_directory} does not exist: create it first"
            )
        arguments = ["sbatch", mode, *sbatch_options(request)]
        return self._runner(
            arguments,
            standard_input=request.script,
            environment=self._environment | request.environment,
            timeout_seconds=self._timeout_seconds,
            directory=request.working_directory,  # it becomes SLURM_SUBMIT_DIR
            until=_QUEUE_FULL,
        )

    def _ask(self, arguments: list[str]) -> str:
        return _answer(self._run(arguments), arguments[0])

    def _change(
        self,
        job_id: str,
        words: Callable[[str], list[str]],
        is_so: Callable[[Job], bool],
        may_have_started: bool = False,
    ) -> None:
        """Run scontrol with the `words` that change what is named so.

        Slurm refuses "at this moment" for one task of an array, for as long as that task lives, or
        names only the task that runs, and may have changed the others, or let them start: whether
        it `is_so` is asked of what waits. What is not is changed by name.
        """
        name = _plain_id(job_id)
        try:
            self._change_named(words(name))
        except SchedulerError as error:
            is_refused_now = _NOT_NOW.search(str(error)) is not None
            if not is_refused_now and not isinstance(error, _NothingWaits):
                raise
            waiting = self._waiting(name)
            left = tuple(job for job in waiting if not is_so(job))
            if not left and (waiting or (is_refused_now and may_have_started)):
                return
            names = names_of(left, left)
            if not names or names == (name,):
                raise
            for part in names:
                self._change_named(words(part))

    def _waiting(self, name: str) -> tuple[Job, ...]:
        """What a name covers and still waits."""
        records = self._records(name.partition("_")[0])
        return covered(name, (job for job in records if job.state is JobState.PENDING))

    def _change_named(self, words: list[str]) -> None:
        """A change of pending work; that some tasks of an array run or have ended does not spoil
        it. Raises _NothingWaits where Slurm names such tasks alone.
        """
        result = self._run(["scontrol", *words])
        if result.returncode == 0:
            return
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        answers = [match["answer"] for match in map(_PER_TASK.match, lines) if match]
        refusals = [answer for answer in answers if answer != "No error"]
        is_harmless = all(_HARMLESS.search(answer) for answer in refusals)
        if is_harmless and len(refusals) < len(answers):
            return
        message = _message(result, "scontrol")
        if is_harmless and lines and len(answers) == len(lines):
            raise _NothingWaits(message)
        raise _failure(message)


def _task_name(job: Job) -> str:
    """A job by the name that means it alone: ARRAY_TASK for a task of an array."""
    if job.array_id is None or job.task_id is None:
        return job.raw_id
    return f"{job.array_id}_{job.task_id}"


def _is_free(job: Job) -> bool:
    return not is_held(job)


def _is_merged(job: Job) -> bool:
    """Whether a row stands for waiting tasks that wait for different reasons: "None,JobHeldUser"."""
    return bool(job.pending_tasks) and _MERGED.fullmatch(job.reason) is not None


def _plain_id(job_id: str) -> str:
    """An id as the commands take it: without the throttle that squeue shows in "12_[4-10%1]"."""
    plain = re.sub(r"%\d+", "", job_id.strip())
    if not re.fullmatch(r"\d+(_(\d+|\[[\d,:-]+\]))?", plain):
        raise SchedulerError(f"{job_id!r} is no job id: write 1234, 1234_7 or 1234_[4-10]")
    return plain


def _answer(result: CommandResult, command: str) -> str:
    if result.returncode != 0:
        raise _failure(_message(result, command))
    return result.stdout


def _failure(words: str) -> SchedulerError:
    meaning = next((f" ({meaning})" for pattern, meaning in _MEANINGS if pattern.search(words)), "")
    kind = SchedulerUnreachable if _UNREACHABLE.search(words) else SchedulerError
    return kind(words + meaning)


def _message(result: CommandResult, command: str) -> str:
    """What the command said of its failure, in one line, without its own name before each sentence."""
    lines = [
        line.strip()
        for line in (result.stderr.strip() or result.stdout).splitlines()
        if line.strip()
    ]
    refused = [line for line in lines if not line.endswith(": No error")] or lines
    errors = [line for line in refused if re.search("error|fatal", line, re.IGNORECASE)] or refused
    said = [re.sub(rf"^{command}: (error: )?", "", line) for line in errors]
    unique = "; ".join(dict.fromkeys(said))
    return f"{command}: {unique or f'no message, exit code {result.returncode}'}"
