"""One round of one periodic job: claimed, on record before and after, ended in time, its output
kept.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import field
from msgspec.structs import replace

from tr11ops.base import deadline
from tr11ops.base.observed import Unknown, cause, known, observed
from tr11ops.base.stop_signals import StopEvent
from tr11ops.base.units import duration
from tr11ops.cluster.local_records import ProcessMark, is_alive, mark
from tr11ops.cluster.sbatch_options import code_root
from tr11ops.cron.jobs import PeriodicJob, due, is_due, next_due, wanted
from tr11ops.cron.output import RoundOutput, stamp
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.cron_records import (
    PeriodicJobState,
    cron_folder,
    fallback_round,
    job_file,
    later,
    read_job,
    write_job,
)
from tr11ops.rundir.fallback import fallback_of, write_or_fall_back
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.errors import UNOBSERVED
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

# One child process: it starts only when its claim names it, its output is taken as it comes, and it
# ends in time.

Ending: TypeAlias = Literal["by itself", "time", "asked"]
GRACE_SECONDS = 10.0  # between TERM and KILL
DRAIN_SECONDS = 5.0  # for output of what the child left behind
LOOK_SECONDS = 0.05

# The child waits for a line before it becomes the command. If who started it dies before the claim
# names the child, the line never comes, and the child leaves: no job can run that no claim knows
# of.
_GATE = 'read -r go || exit 125; exec "$@" </dev/null'


class Child:
    """A command in a process group of its own, not started before `go`. Raises OSError when it
    cannot be made.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        feed: Callable[[bytes], None],
    ):
        self._feed = feed
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GATE, "tr11-cron", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
        )
        self.mark = mark(self.pid)
        self._pump = threading.Thread(target=self._take_output, name="output", daemon=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def go(self) -> None:
        """Open the gate."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # killed already: the exit code says so
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()
        self._pump.start()

    def wait(self, seconds: float, must_end: Callable[[], bool]) -> tuple[int, Ending]:
        """Wait for the end, at most so long, or until `must_end`; it is then made to end.

        Returns the exit code, below 0 for a signal, and how it came to its end. Nothing of its
        group is left but what waits in the kernel, where no signal reaches: that could not be
        observed.
        """
        ending: Ending = "by itself"
        deadline = time.monotonic() + seconds
        while not self._has_ended():
            is_late = time.monotonic() >= deadline
            if is_late or must_end():
                ending = "time" if is_late else "asked"
                self._end()
            time.sleep(LOOK_SECONDS)
        # what it left behind; its number is free only when it is reaped
        _signal_group(self.pid, signal.SIGKILL)
        try:
            code = self._process.wait(DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            code = UNOBSERVED
        self._pump.join(DRAIN_SECONDS)
        return code, ending

    def discard(self) -> None:
        """End a child whose gate was not opened."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        _signal_group(self.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _has_ended(self) -> bool:
        return not is_alive(self.mark)

    def _end(self) -> None:
        _signal_group(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        _signal_group(self.pid, signal.SIGKILL)

    def _take_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while data := os.read(stream.fileno(), 65536):
                self._feed(data)


def end_orphan(child: ProcessMark | None) -> None:
    """End what a killed owner left running, and its group."""
    if child is None or not is_alive(child):
        return
    _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    if is_alive(child):
        _signal_group(child.pid, signal.SIGKILL)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


Result: TypeAlias = Literal["ran", "failed", "not due", "running", "no time", "not recorded"]
CLAIM_MARGIN_SECONDS = 120.0  # a claim outlives the time-out of its job by this
OWN_ERROR = "tr11: an error of tr11 itself"
TRACEBACK = "Traceback (most recent call last)"
SAID_BY_TR11 = "tr11: "
FILE_ERRORS = tuple(
    map(
        os.strerror,
        (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE),
    )
)
WAYS = ("slurm", "crontab", "scrontab")  # what `tr11 cron install` makes
BY_HAND = ("hand", "once")  # rounds in between, which do not change what runs the job regularly
SHOWN_LINES = 20
CUT_OFF = "what ran it was killed"
KEPT_CARD = "TR11_KEPT_CARD"  # the card as JSON, for where its own file does not answer
LONGEST_KEPT_CARD = 120_000  # Linux starts no process with a variable of 128 KiB
ENTRY = "from tr11ops.cli.main import run; run()"


class CronRound(Record):
    """What came of one start. `state` is what is on record after it, `why` explains all that is not
    "ran".

    `lines` are the last that the job wrote.
    """

    name: str
    result: Result
    why: str = ""
    state: PeriodicJobState | None = None
    lines: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The round in one line."""
        code = None
        if self.result == "ran" and self.state:
            code = self.state.exit_code
        shown = ""
        if code:
            shown = f" (exit code {code})"
        return f"{self.name}: {self.result}{shown}" + (f": {self.why}" if self.why else "")

    @property
    def exit_code(self) -> int:
        """That of a command that ran this alone: 1 for a failure. What a job found is in its own
        record.
        """
        if self.result in {"failed", "not recorded"}:
            return 1
        return 0


class CronContext(Record):
    """Where and how rounds run: `command` gives the whole command line of a job, `folder` is where
    it is typed.

    `must_end` turns true when a running job has to be ended, `seconds_left` is how long this
    process may go on. `fallback` is where claims and records go while the run directory cannot be
    written. `why_not_there` says why what is seen in its place is not it; "" where it is: nothing
    is made there then.
    """

    directory: RunDirectory
    way: str
    folder: Path
    environment: Mapping[str, str]
    command: Callable[[PeriodicJob], list[str]]
    clock: Callable[[], float] = time.time
    must_end: StopEvent = field(default_factory=StopEvent)
    seconds_left: Callable[[], float] = lambda: float("inf")
    fallback: RunDirectory | None = None
    why_not_there: Callable[[], str] = str

    @property
    def records(self) -> RunDirectory:
        """Where the claims and records of a round are kept."""
        return self.fallback or self.directory


def tr11_command(words: Iterable[str], card: Path, overrides: Iterable[str] = ()) -> list[str]:
    """A command line of this installation, whatever the folder holds that it is started in. Python
    is told on it to write at once, and in UTF-8: jobs that it submits would inherit variables.
    """
    command = [sys.executable, "-P", "-u", "-X", "utf8", "-c", ENTRY, *words, "--run", str(card)]
    for change in overrides:
        command += ["--set", change]
    return command


def child_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` so that Python finds this installation."""
    root = code_root()
    path = base.get("PYTHONPATH", "")
    found = dict(base)
    if root is not None and str(root) not in path.split(":"):
        if path:
            found["PYTHONPATH"] = f"{root}:{path}"
        else:
            found["PYTHONPATH"] = str(root)
    return found


def wait_for_rounds(threads: Iterable[threading.Thread], must_end: StopEvent) -> None:
    """Until they are over. After `must_end` those are left behind that wait for a file system which
    does not answer.
    """
    for thread in threads:
        while thread.is_alive() and not must_end.wait(LOOK_SECONDS):
            pass
    until = time.monotonic() + GRACE_SECONDS + DRAIN_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


# ----------------------------------------------------------------------------- which are due
def last_starts(directory: RunDirectory, jobs: Iterable[PeriodicJob]) -> dict[str, float]:
    """When each job last started. Raises OSError when a record cannot be read; one that is garbage
    counts as none.
    """
    found = {job.name: _read_last(directory, job.name) for job in jobs}
    return {name: state.started for name, state in found.items() if state is not None}


def run_due(
    context: CronContext, jobs: tuple[PeriodicJob, ...], forced: bool = False
) -> tuple[CronRound, ...]:
    """One round of each job that is due now, one after another; `forced`: of each, due or not."""
    if forced:
        return tuple(run_job(context, job, forced=True) for job in jobs)
    try:
        chosen = due(jobs, last_starts(context.directory, jobs), context.clock())
    except OSError:
        chosen = wanted(jobs)  # each one says, or finds its way around, what cannot be read
    rounds = []
    for job in chosen:
        if not context.must_end.is_set():
            rounds.append(run_job(context, job))
    return tuple(done for done in rounds if done.result != "not due")


def last_round(context: CronContext, name: str) -> PeriodicJobState | None:
    """The last round, wherever it is on record. Raises OSError, but not where the fallback stands
    in for it.
    """
    if context.fallback is None:
        return _read_last(context.directory, name)
    in_directory = known(observed(_read_last, context.directory, name), None)
    return later(in_directory, known(observed(fallback_round, context.directory, name), None))


def _read_last(directory: RunDirectory, name: str) -> PeriodicJobState | None:
    """The last round. Raises OSError, also where the file system does not answer. A file that holds
    no record is replaced by the next round, so it is as none.
    """
    deadline.require_answer(directory.root)
    state = read_job(directory, name)
    if not isinstance(state, Unknown):
        return state
    try:
        read_json(job_file(directory, name))
    except ValueError:
        return None
    return None


# ----------------------------------------------------------------------------- one round
def run_job(context: CronContext, job: PeriodicJob, forced: bool = False) -> CronRound:
    """Run a job if it is due (or `forced`), unless it runs already. Never raises for what the job
    does.

    A round is started at most once: anyone who is killed in the middle of it leaves a record that
    says so, and the next round is the next point of the schedule. Where that cannot be recorded in
    the run directory, what watches is claimed and recorded in this machine's fallback directory:
    once for each host.
    """
    try:
        deadline.require_answer(context.directory.root)
        lack = deadline.within(deadline.LOOK_SECONDS, context.why_not_there)
        if not lack:
            return _run_if_due(context, job, forced)
    except OSError as error:
        lack = f"the run directory cannot be written ({cause(error)})"
    return _run_elsewhere(context, job, forced, lack)


def _run_elsewhere(context: CronContext, job: PeriodicJob, forced: bool, lack: str) -> CronRound:
    """A round where the run directory takes no record, by reason of `lack`: what watches is
    recorded here.
    """
    why = f"nothing is run that cannot be recorded: {lack}"
    if not job.watches:
        return CronRound(job.name, "not recorded", why)
    try:
        with fallback_of(context.directory) as local:
            done = _run_if_due(replace(context, fallback=local), job, forced)
    except OSError as error:
        return CronRound(job.name, "not recorded", f"{why}; nor on this machine: {cause(error)}")
    kept = f"{lack}: recorded in {local.root}"
    return replace(done, why=f"{done.why}; {kept}" if done.why else kept)


def _run_if_due(context: CronContext, job: PeriodicJob, forced: bool) -> CronRound:
    """Raises OSError when it cannot be recorded; nothing was started then, or what was started is
    over and its end waits for the file system.
    """
    return deadline.within(
        job.timeout_seconds + CLAIM_MARGIN_SECONDS, partial(_run_in_time, context, job, forced)
    )


def _run_in_time(context: CronContext, job: PeriodicJob, forced: bool) -> CronRound:
    if not forced and not _is_due(context, job):
        return CronRound(job.name, "not due")
    seconds = min(job.timeout_seconds, context.seconds_left())
    if seconds < min(job.timeout_seconds, 60):
        return CronRound(
            job.name, "no time", f"{duration(seconds)} left here, left for the next round"
        )
    return _claimed(context, job, seconds, forced)


def _claimed(context: CronContext, job: PeriodicJob, seconds: float, forced: bool) -> CronRound:
    folder = ClaimFolder(context.records, job.name)
    before = folder.newest()
    if before is not None and before.is_living(context.clock()):
        return _skip(context, job, before)
    mine = folder.take(
        Claim.of_this_process(context.clock(), seconds + CLAIM_MARGIN_SECONDS), before
    )
    if mine is None:
        return _skip(context, job, folder.newest())
    try:
        if before is not None and before.held and before.is_of_this_host:
            end_orphan(before.child)
        if not forced and not _is_due(context, job):  # someone has run it since the first look
            return CronRound(job.name, "not due")
        return _run(context, job, seconds=seconds, folder=folder, mine=mine)
    finally:
        with suppress(OSError):  # then it is over when this process is, or its time
            deadline.require_answer(context.records.root)
            folder.release(mine)


def _is_due(context: CronContext, job: PeriodicJob) -> bool:
    state = last_round(context, job.name)
    return is_due(job.schedule, state.started if state else None, context.clock())


def _skip(context: CronContext, job: PeriodicJob, owner: Claim | None) -> CronRound:
    if owner:
        why = f"it runs already, by {owner}, since {stamp(owner.time)}"
    else:
        why = "someone else has just started it"
    output = RoundOutput(
        _log(context, job), f"{stamp(context.clock())} {job.name} not started by {context.way}"
    )
    output.close(why)
    return CronRound(job.name, "running", why)


def _run(
    context: CronContext, job: PeriodicJob, seconds: float, folder: ClaimFolder, mine: Claim
) -> CronRound:
    last = last_round(context, job.name)
    failures = last.failures_in_a_row if last else 0
    now = context.clock()
    began = PeriodicJobState(
        name=job.name,
        way=last.way if last is not None and context.way in BY_HAND else context.way,
        host=mine.host,
        started=now,
        ended=None,
        exit_code=None,
        message=CUT_OFF if last is not None and last.is_running else "",
        interval_seconds=job.schedule.period_seconds,
        runs=(last.runs if last else 0) + 1,
        failures_in_a_row=failures + (1 if last is not None and last.is_running else 0),
        next_due=next_due(job.schedule, now, now),
    )
    output = RoundOutput(
        _log(context, job), f"{stamp(now)} {job.name} by {context.way} on {mine.host}"
    )
    write_job(context.records, began)
    steady = time.monotonic()
    try:
        child = Child(context.command(job), context.environment, context.folder, output.feed)
    except (OSError, ValueError) as error:  # ValueError: a script that must not, or cannot, be run
        return _end(
            context,
            job,
            began=began,
            output=output,
            steady=steady,
            code=127,
            why=f"it cannot be started: {cause(error)}",
        )
    try:
        folder.write(replace(mine, child=child.mark))
    except BaseException:
        child.discard()
        raise
    child.go()
    code, ending = child.wait(seconds, context.must_end.is_set)
    deadline.require_answer(context.records.root)
    why = failure(job, code, ending=ending, lines=output.lines(), seconds=seconds)
    newest = known(observed(folder.newest), None)
    # this process was stopped for so long that others went on
    if newest is not None and newest.epoch > mine.epoch:
        return CronRound(job.name, "failed", f"it was taken over by {newest}")
    return _end(context, job, began=began, output=output, steady=steady, code=code, why=why)


def _end(
    context: CronContext,
    job: PeriodicJob,
    began: PeriodicJobState,
    output: RoundOutput,
    steady: float,
    code: int,
    why: str,
) -> CronRound:
    took = time.monotonic() - steady  # a clock that is set meanwhile does not make it negative
    ended = replace(
        began,
        ended=began.started + took,
        exit_code=code,
        message=why,
        failures_in_a_row=began.failures_in_a_row + 1 if why else 0,
    )
    output.close(f"{why or f'exit code {code}'} after {duration(took)}")
    result: Result = "ran"
    if why:
        result = "failed"
    kept = output.fault and f"its output was not kept: {output.fault}"
    try:
        kept = _record_end(context, ended) or kept
    except OSError as error:
        result = "not recorded"
        kept = f"its end is not recorded: {cause(error)}"
    notes = "; ".join(text for text in (why, kept) if text)
    return CronRound(
        job.name, result, why=notes, state=ended, lines=tuple(output.lines()[-SHOWN_LINES:])
    )


def _record_end(context: CronContext, ended: PeriodicJobState) -> str:
    """Put a round that has run on record, wherever that can be done; says where. Raises OSError."""
    if context.fallback is not None:
        write_job(context.fallback, ended)
        return ""
    _, elsewhere = write_or_fall_back(context.directory, lambda records: write_job(records, ended))
    if elsewhere:
        return f"the run directory cannot be written: its end is recorded in {elsewhere}"
    return ""


def failure(job: PeriodicJob, code: int, ending: Ending, lines: list[str], seconds: float) -> str:
    """Why a round counts as failed, in one line; "" when the job did its work, whatever it found.
    Pure.
    """
    said = ""
    if lines:
        said = f": {lines[-1]}"
        own = lines[-1].removeprefix(SAID_BY_TR11)
    else:
        own = "it said nothing"
    if ending == "time":
        return f"it was ended after its time-out of {duration(seconds)}{said}"
    if ending == "asked":
        return "it was ended with what ran it"
    if code < 0:
        return f"signal {-code} ended it{said}"
    if any(line.startswith(TRACEBACK) for line in lines):
        return f"it broke (exit code {code}){said}"
    if code == 1 and _is_refusal(lines):
        return f"exit code 1: {own}"
    if code in job.answers:
        return ""
    return f"exit code {code}{said}"


def _is_refusal(lines: list[str]) -> bool:
    """Whether 1 was not the job's answer: tr11 broke, the file system did, or there is not one word
    of an answer.
    """
    last = ""
    if lines:
        last = lines[-1]
    broke = last.startswith(OWN_ERROR) or (
        last.startswith(SAID_BY_TR11) and last.endswith(FILE_ERRORS)
    )
    return broke or all(line.startswith(SAID_BY_TR11) for line in lines)


def _log(context: CronContext, job: PeriodicJob) -> Path:
    return cron_folder(context.records) / f"{job.name}.log"
