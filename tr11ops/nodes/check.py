"""Health checks fanned out over nodes: one small job a node, so that a node that never answers
delays no other.

A node on which a job of ours runs is checked inside that job; one that the scheduler gives to no
one is not checked. Where this machine plays the nodes, each check is a process here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore
from typing import Any, TypeAlias

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import cause
from tr11ops.base.units import counted
from tr11ops.cluster.base import Job, JobState, Node, Scheduler
from tr11ops.cluster.sbatch_options import code_root, of_chosen_nodes, options_of, with_gpus
from tr11ops.cluster.slurm_command import client_environment
from tr11ops.health.base import CheckOutcome, CheckResult, fails_everywhere, summary, worst
from tr11ops.nodes.health_job import MARK, HealthRequest, check_here, results_of
from tr11ops.nodes.view import holders_of
from tr11ops.runcard.sections import SlurmSection
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document
from trainer.contract.record import Record
from trainer.contract.state_file import read_json
from trainer.contract.units import shortened

JOB_NAME = "tr11-health"
POLL_SECONDS = 0.1
LOOK_SECONDS = 5.0  # between two questions to the scheduler
PROCESSES_AT_ONCE = 16  # so that neither this machine nor the scheduler is flooded
# a shared file system shows a result this much later than the scheduler shows the end
SETTLE_SECONDS = 3.0


class NodeCheck(Record):
    """What came out for one node."""

    node: str
    result: CheckOutcome
    why: str
    checks: tuple[CheckResult, ...] = ()

    @property
    def is_judged(self) -> bool:
        """Whether every check that the card asks for could be made, or one of them found the node
        bad.
        """
        if self.result in {CheckOutcome.BAD, CheckOutcome.UNKNOWN}:
            return self.result is CheckOutcome.BAD
        return all(entry.result is not CheckOutcome.UNKNOWN for entry in self.checks)


class Way(Record):
    """How a node is to be checked: in a job of its own, `inside` a job of ours, or not at all
    (`never` says why).
    """

    node: str
    inside: str = ""
    never: str = ""


class JobSettings(Record):
    """How health jobs are submitted: a folder that the nodes see, the card's [slurm], and what of
    it these nodes have: `gpus` of each, and their partition.
    """

    folder: Path
    slurm: SlurmSection
    gpus: int = 0
    partition: str | None = None


def ways(
    names: Iterable[str], nodes: Iterable[Node], jobs: Iterable[Job], user: str
) -> tuple[Way, ...]:
    """How each node can be checked, by what the scheduler says of it. Pure."""
    by_name = {node.name: node for node in nodes}
    # an earlier check is about to leave
    holders = holders_of(job for job in jobs if job.name != JOB_NAME)
    found = []
    for name in names:
        node = by_name.get(name)
        held = holders.get(name, ())
        mine = [job for job in held if job.user == user and job.state is JobState.RUNNING]
        if node is None:
            found.append(Way(name, never="the scheduler does not know it"))
        elif mine:
            found.append(Way(name, inside=mine[0].raw_id))
        elif not node.is_usable:
            reason = ""
            if node.reason:
                reason = f" ({node.reason})"
            found.append(
                Way(
                    name,
                    never=f"the scheduler gives it to no one: {'+'.join(sorted(node.states))}{reason}",
                )
            )
        elif held:
            found.append(Way(name, never=f"busy with job {held[0].job_id} of {held[0].user}"))
        else:
            found.append(Way(name))
    return tuple(found)


def check_nodes(
    ways: Sequence[Way],
    start: Callable[[Way], Answering | NodeCheck],
    timeout: float,
    progress: Callable[[NodeCheck], None],
    are_machines: bool = True,
) -> tuple[NodeCheck, ...]:
    """Check all nodes at once, in the order of `ways`; `progress` gets each result as it comes.

    A node that does not answer within `timeout` seconds is unknown. A health job that died on one
    node although it ran on others makes that node bad; where it died everywhere, it is not the
    nodes. Nor is it where one check fails on all of them, if the nodes are machines of their own
    (`are_machines`).
    """
    results = judge(ask_nodes(ways, start, timeout, progress))
    if are_machines:
        return without_failing_checks(results)
    return results


def ask_nodes(
    ways: Sequence[Way],
    start: Callable[[Way], Answering | NodeCheck],
    timeout: float,
    progress: Callable[[NodeCheck], None],
) -> tuple[NodeCheck, ...]:
    """What each node answers by itself, in the order of `ways`; nothing is left running. One that
    does not answer within `timeout` seconds is unknown.
    """
    done: dict[str, NodeCheck] = {}
    under_way: dict[str, Answering] = {}

    def finish(result: NodeCheck) -> None:
        done[result.node] = result
        progress(result)

    try:
        for way in ways:
            if way.never:
                finish(NodeCheck(way.node, CheckOutcome.UNKNOWN, way.never))
                continue
            begun = start(way)
            if isinstance(begun, NodeCheck):
                finish(begun)
            else:
                under_way[way.node] = begun
        deadline = time.monotonic() + timeout
        while under_way and time.monotonic() < deadline:
            for name, check in list(under_way.items()):
                result = check.answer()
                if result is not None:
                    del under_way[name]
                    finish(result)
            time.sleep(POLL_SECONDS if under_way else 0)
        for name in list(under_way):
            finish(NodeCheck(name, CheckOutcome.UNKNOWN, f"no answer within {timeout:g} s"))
    finally:
        for check in under_way.values():
            check.stop()
    return tuple(done[way.node] for way in ways)


DIED = "the health job died there"


def judge(results: tuple[NodeCheck, ...]) -> tuple[NodeCheck, ...]:
    """A health job that died is evidence against its node only where the same job ran elsewhere.
    Pure.
    """
    if not any(entry.checks for entry in results):
        return results
    return tuple(
        replace(entry, result=CheckOutcome.BAD)
        if entry.result is CheckOutcome.UNKNOWN and entry.why.startswith(DIED)
        else entry
        for entry in results
    )


def without_failing_checks(results: tuple[NodeCheck, ...]) -> tuple[NodeCheck, ...]:
    """A check that fails everywhere is no evidence against the nodes: it could not be made. Pure."""
    failed: dict[str, list[str]] = {}
    passed: dict[str, list[str]] = {}
    for entry in results:
        for one in entry.checks:
            if one.result is CheckOutcome.BAD:
                failed.setdefault(one.name, []).append(entry.node)
            elif one.result is not CheckOutcome.UNKNOWN:
                passed.setdefault(one.name, []).append(entry.node)
    failing = {
        name for name, nodes in failed.items() if fails_everywhere(nodes, passed.get(name, ()))
    }
    if not failing:
        return results
    judged = []
    for entry in results:
        checks = tuple(
            _unmade(one, len(failed[one.name]))
            if one.name in failing and one.result is CheckOutcome.BAD
            else one
            for one in entry.checks
        )
        judged.append(entry if checks == entry.checks else told(entry.node, checks))
    return tuple(judged)


def _unmade(one: CheckResult, count: int) -> CheckResult:
    why = f"it failed on {counted(count, 'node')}, so that it is not the nodes: {one.why}"
    return replace(one, result=CheckOutcome.UNKNOWN, why=why)


def told(node: str, checks: tuple[CheckResult, ...]) -> NodeCheck:
    """One node's result from its checks. A node is fine when all were made: what one of them would
    have found is not known. (The node agent uses such a node, because it must not empty a cluster.)
    """
    outcome = worst(checks)
    unmade = [entry for entry in checks if entry.result is CheckOutcome.UNKNOWN]
    if not unmade or outcome in {CheckOutcome.BAD, CheckOutcome.UNKNOWN}:
        return NodeCheck(node, outcome, summary(checks), checks)
    names = ", ".join(entry.name for entry in unmade)
    could_not = f"{len(unmade)} of {counted(len(checks), 'check')} could not be made ({names}): {unmade[0].why}"
    if outcome is CheckOutcome.WARNING:
        return NodeCheck(node, outcome, f"{summary(checks)}; {could_not}", checks)
    return NodeCheck(node, CheckOutcome.UNKNOWN, could_not, checks)


# ----------------------------------------------------------------------------- checks that a site
# cannot make: what no node that trained could be asked is held against none of them.
#
# A check that could not be made tells nothing. Where the other nodes of the newest attempt could
# not be asked either (no nvidia-smi on any of them, say), the run uses them all the same, and an
# excluded one may come back likewise. Where they could, this node differs from them, and stays
# excluded until it is asked, or a person forces it.
Outcomes = Mapping[str, str]  # of one node: the check and what it said


def read_outcomes(directory: RunDirectory) -> dict[str, Outcomes]:
    """What each node of the newest attempt that has any on record said at its start, by node.

    Raises OSError or ValueError.
    """
    for job_id in reversed(directory.attempt_ids()):
        found: dict[str, Outcomes] = {}
        for path in sorted((directory.paths.attempt(job_id) / "nodes").glob("*.json")):
            checks = (read_json(path) or {}).get("checks") or ()
            found[path.stem] = {str(check["name"]): str(check["result"]) for check in checks}
        if found:
            return found
    return {}


def never_made(outcomes: Mapping[str, Outcomes], but: str) -> frozenset[str]:
    """The checks that no other node than `but` could make, where there is one that was asked."""
    others = [checks for node, checks in outcomes.items() if node != but and checks]
    made = {
        name
        for checks in others
        for name, result in checks.items()
        if result != CheckOutcome.UNKNOWN
    }
    return frozenset({name for checks in others for name in checks} - made)


def let_in_without(
    entry: NodeCheck, nowhere: Collection[str], exclusion: Exclusion | None
) -> tuple[str, ...] | None:
    """Without which checks a node may be used again: none of them was made `nowhere` else, all
    others were passed.

    None where it may not: it failed, nothing could be asked there, or what it was excluded for is
    among them.
    """
    unmade = [one.name for one in entry.checks if one.result is CheckOutcome.UNKNOWN]
    if entry.result is CheckOutcome.BAD or len(unmade) == len(entry.checks):
        return None
    if exclusion is None:
        told = ""
    else:
        told = "\n".join((exclusion.why, *exclusion.evidence))
    if any(name not in nowhere or name in told for name in unmade):
        return None
    return tuple(unmade)


# ----------------------------------------------------------------------------- a job of its own,
# through submitit
@dataclass
class SubmittedCheck:
    """A health job of submitit's, on the very node."""

    job: Any
    node: str
    scheduler: Scheduler
    ends: EndedJobs

    def answer(self) -> NodeCheck | None:
        """What came out, or None while it runs."""
        if self.job.paths.result_pickle.exists():
            return self._read()
        ended = self.ends.of(self.job.job_id)
        if ended is None:
            return None
        return NodeCheck(self.node, CheckOutcome.UNKNOWN, f"{DIED}: {ended}{self._last_line()}")

    def _read(self) -> NodeCheck:
        try:
            return told(self.node, results_of(self.job.result()))
        except Exception as error:  # whatever broke the job comes back as submitit's own kind
            why = f"the health job failed: {last_line(error)}"
            return NodeCheck(self.node, CheckOutcome.UNKNOWN, why)

    def _last_line(self) -> str:
        with suppress(OSError):
            lines = self.job.paths.stdout.read_text(encoding="utf-8", errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip()]
            if said:
                return f"; it said: {shortened(said[-1], 160)}"
            return ""
        return ""

    def stop(self) -> None:
        """End it; harmless when it has ended."""
        with suppress(SchedulerError):  # it has a short time limit of its own
            self.scheduler.cancel(self.job.job_id)


def last_line(error: Exception) -> str:
    """What a job's own error says at its end, below the traceback that comes with it."""
    lines = reversed(str(error).splitlines())
    return next((line for line in lines if line.strip()), repr(error))


class EndedJobs:
    """Which health jobs are over, asked of the scheduler for all of them at once, and not often."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._ends: dict[str, tuple[str, float]] = {}
        self._next = time.monotonic() + LOOK_SECONDS

    def of(self, job_id: str) -> str | None:
        """How the job ended, in words, once its result has had time to be seen; None before."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK_SECONDS
            with suppress(SchedulerError):  # silent for now; the time-out counts
                for job in self._scheduler.jobs(name=JOB_NAME):
                    if job.state.is_final:
                        code = ""
                        if job.exit_code:
                            code = f", exit code {job.exit_code}"
                        end = (f"{job.state}{code}", time.monotonic())
                        self._ends.setdefault(job.raw_id, end)
        how, since = self._ends.get(job_id, ("", math.inf))
        if time.monotonic() - since < SETTLE_SECONDS:
            return None
        return how


def submit_check(
    way: Way, request: HealthRequest, settings: JobSettings, scheduler: Scheduler, ends: EndedJobs
) -> Answering | NodeCheck:
    """Start the check of one node in a job of its own, under Slurm."""
    try:
        job = submit_to(settings, (way.node,), 5, check_here, document(request))
    except Exception as error:  # a refusal of sbatch comes as submitit's own kind of error
        why = f"no health job could be started: {cause(error)}"
        return NodeCheck(way.node, CheckOutcome.UNKNOWN, why)
    return SubmittedCheck(job, way.node, scheduler, ends)


def submit_to(
    settings: JobSettings,
    nodes: Sequence[str],
    minutes: int,
    function: Callable[..., Any],
    *values: Any,
    is_alone: bool = False,
) -> Any:
    """submitit's job that calls `function` on the first of exactly these nodes, all of which it
    holds.

    `is_alone`: no other job may use them meanwhile. Raises whatever submitit makes of a refusal.
    """
    executor = _executor(settings, nodes, minutes, is_alone)
    with _submitting():
        return executor.submit(function, *values)


def job_script(
    settings: JobSettings, nodes: Sequence[str], minutes: int, is_alone: bool = False
) -> str:
    """The batch script that `submit_to` would give to sbatch. Nothing is written, nothing
    submitted.
    """
    executor = _executor(settings, nodes, minutes, is_alone)
    return str(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))


def _executor(settings: JobSettings, nodes: Sequence[str], minutes: int, is_alone: bool) -> Any:
    import submitit

    executor = submitit.SlurmExecutor(folder=settings.folder)
    executor.update_parameters(
        job_name=JOB_NAME,
        time=minutes,
        nodes=len(nodes),
        ntasks_per_node=1,
        cpus_per_task=1,
        nodelist=",".join(nodes),
        partition=settings.partition,
        account=settings.slurm.account,
        qos=settings.slurm.quality_of_service,
        constraint=settings.slurm.constraint,
        exclusive=is_alone or None,
        stderr_to_stdout=True,
        use_srun=False,
        additional_parameters=_further_options(settings, is_alone),
    )
    return executor


def _further_options(settings: JobSettings, is_alone: bool) -> dict[str, str | bool]:
    """What submitit has no word for, as it takes it: `True` for an option without a value."""
    options = of_chosen_nodes(options_of(settings.slurm.options))
    passed = dict(with_gpus(options, settings.gpus))
    if is_alone:
        passed.pop("exclusive", None)  # asked for already
    found: dict[str, str | bool] = {name: value or True for name, value in passed.items()}
    if settings.slurm.reservation:
        found["reservation"] = settings.slurm.reservation
    return found


@contextmanager
def _submitting() -> Iterator[None]:
    """The environment of a submission: no options inherited from a job around us, and our code
    found on the node.
    """
    before = dict(os.environ)
    _replace_environment(with_code(client_environment(before)))
    try:
        yield
    finally:
        _replace_environment(before)


def with_code(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a process, here or on a node, finds this code. None: where it is
    installed.
    """
    paths = (str(code_root() or ""), environment.get("PYTHONPATH", ""))
    return {
        **environment,
        **({"PYTHONPATH": os.pathsep.join(filter(None, paths))} if any(paths) else {}),
    }


def _replace_environment(values: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


# ----------------------------------------------------------------------------- a process of ours
class ProcessCheck:
    """A process that prints the results: a step of a running job, beside the training, or one on
    this machine.
    """

    def __init__(self, way: Way, request: HealthRequest, slots: Semaphore):
        self._node = way.node
        self._slots = slots
        self._environment = with_code(client_environment(dict(os.environ)))
        self._command = [
            sys.executable,
            "-m",
            "tr11ops.nodes.health_job",
            json.dumps(document(request)),
        ]
        if way.inside:
            step = [
                "srun",
                "--jobid",
                way.inside,
                "--overlap",
                "--nodes=1",
                "--ntasks=1",
                "--nodelist",
                way.node,
            ]
            self._command = [*step, *self._command]
        self._process: subprocess.Popen[str] | None = None

    def answer(self) -> NodeCheck | None:
        """What came out, or None while it runs."""
        if self._process is None:
            if self._slots.acquire(blocking=False):
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=self._environment,
                )
            return None
        if self._process.poll() is None:
            return None
        out, err = self._process.communicate()
        self._slots.release()
        for line in out.splitlines():
            if line.startswith(MARK):
                return told(self._node, results_of(json.loads(line.removeprefix(MARK))))
        words = " ".join(err.split())[-200:] or f"exit status {self._process.returncode}"
        return NodeCheck(self._node, CheckOutcome.UNKNOWN, f"{DIED}: {words}")

    def stop(self) -> None:
        """End it; harmless when it has ended."""
        if self._process is None:
            return
        for ask in (self._process.terminate, self._process.kill):
            with suppress(subprocess.TimeoutExpired):
                if self._process.poll() is None:
                    ask()
                    self._process.communicate(timeout=5)


Answering: TypeAlias = SubmittedCheck | ProcessCheck
"""A check under way on one node."""
