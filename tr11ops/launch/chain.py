"""How the next attempt is queued: a job array, dependent jobs, or each job by the one before. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from tr11ops.base.units import counted, duration
from tr11ops.cluster.arrays import ArraySpec
from tr11ops.cluster.site import SiteRules
from tr11ops.observe.snapshot import course_of, weight_at, work
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, warning
from tr11ops.runcard.estimate import attempt_seconds
from tr11ops.runcard.speed import RunHistory, assumed_rate, seconds_at
from trainer.contract.record import Record

ChainKind: TypeAlias = Literal["single", "array", "afterany", "self"]
WORDS: dict[ChainKind, str] = {
    "single": "one job",
    "array": "a job array, one task at a time",
    "afterany": "jobs that each wait for the one before (afterany)",
    "self": "each job queues the next one when it starts",
}


class QueueChain(Record):
    """The chosen way of queueing `tasks` attempts, and why. `fault` says why none will do; it is
    then not used.
    """

    kind: ChainKind
    tasks: int
    why: str = ""
    fault: str = ""

    def __str__(self) -> str:
        if self.kind == "single":
            text = WORDS[self.kind]
        else:
            text = f"{counted(self.tasks, 'attempt')}: {WORDS[self.kind]}"
        if self.why:
            return f"{text} ({self.why})"
        return text


def choose_chain(wanted: str, array: ArraySpec | None, site: SiteRules | None) -> QueueChain:
    """The way that `slurm.chain` (`wanted`) and the site's rules leave.

    `site` is None where the scheduler has no rules (the embedded one). An array is the first
    choice: its tasks keep their places in the queue, and are held or barred from a node with one
    command.
    """
    if array is None:
        return QueueChain("single", 1)
    tasks = len(array)
    rules = site or SiteRules()
    few = min(2, tasks)
    array_fault = _array_fault(array, rules)
    crowd_fault = _crowd_fault(tasks, rules)
    faults: dict[ChainKind, str] = {
        "array": array_fault or crowd_fault,
        "afterany": crowd_fault,
        "self": _crowd_fault(few, rules),
    }
    if wanted != "auto":
        kind = next(kind for kind in faults if kind == wanted)
        return QueueChain(kind, tasks, "slurm.chain", faults[kind])
    kind = next((kind for kind, fault in faults.items() if not fault), "self")
    return QueueChain(
        kind, tasks, {"array": "", "afterany": array_fault, "self": crowd_fault}[kind], faults[kind]
    )


def _array_fault(array: ArraySpec, rules: SiteRules) -> str:
    if not rules.has_arrays:
        return "the site has no job arrays (MaxArraySize)"
    largest = rules.largest_array_size
    if largest is not None and array.indices[-1] >= largest:
        return f"task numbers must stay below {largest} (MaxArraySize)"
    return ""


def _crowd_fault(jobs: int, rules: SiteRules) -> str:
    for limit, name in ((rules.submitted_jobs, "MaxSubmitJobs"), (rules.jobs, "MaxJobCount")):
        if limit is not None and jobs > limit:
            return f"{counted(jobs, 'queued job is', 'queued jobs are')} above the site's limit of {limit} ({name})"
    return ""


def chain_checks(chain: QueueChain) -> Iterator[PreflightCheck]:
    """Whether the site takes the chain, in words."""
    if chain.fault:
        yield refused(
            "slurm.chain", chain.fault, 'ask for fewer tasks, or set slurm.chain = "auto"', 2
        )
    elif chain.kind != "single":
        yield ok("chain", str(chain))


def site_checks(site: SiteRules) -> Iterator[PreflightCheck]:
    """That a part of the site's rules could not be asked."""
    if site.untold:
        rule = f"unknown: {site.untold}; how many jobs you may queue is not looked at"
        yield warning(
            "account",
            rule,
            "ask the site for its accounting database (slurmdbd); the launch goes on",
        )


# ----------------------------------------------------------------------------- how far it goes
class Coverage(Record):
    """How far a chain goes. Seconds of pure training; waits, saves, evaluations and faults are not
    in it.

    `remaining` is None where nothing says how fast the run is; `basis` says what it rests on.
    """

    tasks: int
    task: float
    remaining: float | None
    basis: str = ""
    is_measured: bool = False

    @property
    def tasks_needed(self) -> int | None:
        if self.remaining is None:
            return None
        return max(1, -int(-self.remaining // self.task))

    @property
    def is_enough(self) -> bool:
        return self.remaining is None or self.remaining <= self.tasks * self.task

    def __str__(self) -> str:
        count = f"{self.tasks} x {duration(self.task)} = {duration(self.tasks * self.task)}"
        if self.remaining is None:
            return f"{count}; how long the run needs is not known before its first steps"
        return f"{count}, the run needs {duration(self.remaining)} ({self.basis})"


def coverage_of(card: RunCard, tasks: int, history: RunHistory, resumed_iteration: int) -> Coverage:
    """How far `tasks` attempts carry a run that resumes after `resumed_iteration`.

    The run's own measured step, else an assumed speed of its GPUs; other steps are scaled as `tr11
    estimate` does.
    """
    task = attempt_seconds(card)
    course = course_of(card)
    basis = ""
    full: float | None = None
    if history.step is not None and history.step_iteration is not None:
        full = history.step / weight_at(course, history.step_iteration)
        basis = f"measured: {history.step:.4g} s a step"
    elif (rate := assumed_rate(card)) is not None:
        full = seconds_at(card, rate[0])
        basis = f"assumed: {rate[0]:g} TFLOPs a GPU"
    if full is None:
        return Coverage(tasks, task, None)
    remaining = full * work(
        course, resumed_iteration, max(resumed_iteration, card.total_iterations)
    )
    return Coverage(tasks, task, remaining, basis, is_measured=history.step is not None)


def coverage_checks(coverage: Coverage) -> Iterator[PreflightCheck]:
    """Whether the chain covers the run: a warning where the run's own speed says that it does not."""
    if coverage.is_enough or not coverage.is_measured:
        yield ok("coverage", str(coverage))
    else:
        yield warning(
            "coverage", str(coverage), f"the whole run takes --array 1-{coverage.tasks_needed}"
        )
