"""One array for many runs: each cell is checked, planned and recorded as `tr11 launch` does it; all
are sent at once.

The launch path is used, and not submitit: that writes its own script around a pickled function,
takes the early signal for itself (`--signal=USR2`, and requeues), and knows neither the card's
set-up lines nor the embedded scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError, SchedulerUnreachable, SubmissionUnknown, SweepError
from tr11ops.base.observed import known
from tr11ops.base.shipped import read_shipped
from tr11ops.cluster.arrays import LONGEST_COMMENT, array_comment, format_ranges
from tr11ops.cluster.base import BatchRequest, Scheduler
from tr11ops.cluster.sbatch_options import script_engine, script_options
from tr11ops.cluster.site import keep_site
from tr11ops.launch.plan import LaunchPlan
from tr11ops.launch.session import LaunchJob, LaunchView, check_launch
from tr11ops.launch.submit import (
    launch_lock,
    look_up,
    record_before,
    record_lost,
    record_refused,
    record_taken,
    settle,
)
from tr11ops.rundir.paths import Submission, job_of_tag
from tr11ops.rundir.state_files import set_damage_aside
from trainer.contract.record import Record

TEMPLATE = ("slurm", "sweep.sbatch.j2")
_OF_THE_CELL = ("script", "name", "output", "working_directory", "comment", "exclude")


class SentArray(Record):
    """What came of an array: its number and each cell's record; or the cells' checks, of which one
    refuses.
    """

    job_id: str
    records: Mapping[int, Submission]
    views: Mapping[int, LaunchView]

    @property
    def exit_code(self) -> int:
        return exit_code_of(self.views.values())


def exit_code_of(views: Iterable[LaunchView]) -> int:
    """The gravest of the cells' checks: 2 wrong card, 1 in the way, 3 not observed, 0 none."""
    codes = {view.exit_code for view in views}
    return next((code for code in (2, 1, 3) if code in codes), 0)


def check_cells(jobs: Mapping[int, LaunchJob]) -> dict[int, LaunchView]:
    """Check each cell as a launch of its own. Changes nothing, leaves nothing."""
    return {number: check_launch(job) for number, job in jobs.items()}


def submit_cells(
    folder: Path,
    name: str,
    jobs: Mapping[int, LaunchJob],
    scheduler: Scheduler,
    at_once: int,
    why: str,
) -> SentArray:
    """Look once more under every cell's launch lock, settle what is in doubt, and submit them as
    one array.

    Nothing is sent where one cell is refused. Raises LaunchBusy, SchedulerError with the
    scheduler's reason, SubmissionUnknown when its answer was lost, SweepError when the cells cannot
    be one array, OSError.
    """
    with ExitStack() as locks:
        for job in jobs.values():
            locks.enter_context(launch_lock(job.directory.launch_lock))
        views = check_cells(jobs)
        plans = {number: view.plan for number, view in views.items() if view.plan is not None}
        if exit_code_of(views.values()) or len(plans) < len(jobs):
            return SentArray("", {}, views)
        request = array_request(folder, name, plans, at_once)
        _require_accepted(request, scheduler)
        records = {}
        for number, plan in plans.items():
            job, view = jobs[number], views[number]
            set_damage_aside(job.directory, job.user)
            settle(job.directory, view.facts, scheduler, plan.tag)
            site = known(view.facts.site, None)
            if site is not None:
                keep_site(job.directory.site, site)
            records[number] = record_before(
                plan, scheduler.name, card_toml=job.card_toml, user=job.user, why=why
            )
        job_id, found = _send(request, plans, records, scheduler)
        done = {
            number: record_taken(
                plans[number].directory, record, found.get(number, f"{job_id}_{number}"), why
            )
            for number, record in records.items()
        }
        return SentArray(job_id, done, views)


def _send(
    request: BatchRequest,
    plans: Mapping[int, LaunchPlan],
    records: Mapping[int, Submission],
    scheduler: Scheduler,
) -> tuple[str, dict[int, str]]:
    """The array's number; where the answer was lost, that of the first cell's task, and of each by
    its tag.
    """
    try:
        return scheduler.submit(request), {}
    except SchedulerUnreachable as error:
        first = min(records)
        if look_up(records[first].tag, scheduler) is None:
            for number, record in records.items():
                record_lost(plans[number].directory, record, error)
            raise SubmissionUnknown(records[first].tag, str(error)) from None
        jobs = scheduler.jobs()
        found = {number: job_of_tag(record.tag, jobs, {}) for number, record in records.items()}
        ids = {number: job_id for number, job_id in found.items() if job_id is not None}
        return ids[first].partition("_")[0], ids
    except SchedulerError as error:
        for number, record in records.items():
            record_refused(plans[number].directory, record, error)
        raise


def _require_accepted(request: BatchRequest, scheduler: Scheduler) -> None:
    """Raises SchedulerError when the scheduler would not take the array, whose cells it would take
    one by one.

    A refusal of this moment is no verdict: each cell's own checks have found that it can start when
    the nodes are well.
    """
    result = scheduler.test(request)
    if not result.accepted and not result.is_of_the_moment:
        raise SchedulerError(f"the array {request.array}: {result.message}")


def array_request(
    folder: Path, name: str, plans: Mapping[int, LaunchPlan], at_once: int
) -> BatchRequest:
    """The one request for all cells: task N runs the script of cell N. Pure.

    `at_once`: so many may run at the same time, 0 for no limit. Raises SweepError where cells ask
    for different nodes, or their marks do not fit in a comment.
    """
    first = next(iter(plans.values())).request
    _require_same(plans)
    marks = {number: f"{plan.tag}@{plan.directory.mark}" for number, plan in plans.items()}
    comment = array_comment(marks, first.comment.partition(" ")[2])
    if len(comment) > LONGEST_COMMENT:
        raise SweepError(
            f"the marks of {len(plans)} cells and slurm.comment take {len(comment)} characters of the array's comment,"
            f" which holds {LONGEST_COMMENT}: make it two sweeps, or shorten slurm.comment"
        )
    request = replace(
        first,
        script="",
        name=name,
        array=format_ranges(sorted(plans)) + (f"%{at_once}" if at_once else ""),
        working_directory=folder / "arrays",
        comment=comment,
        exclude=tuple(
            dict.fromkeys(node for plan in plans.values() for node in plan.request.exclude)
        ),
    )
    return replace(request, script=_script(request, name, plans))


def _require_same(plans: Mapping[int, LaunchPlan]) -> None:
    """Raises SweepError for options that differ between cells."""
    requests = [plan.request for plan in plans.values()]
    shared = (name for name in BatchRequest.__struct_fields__ if name not in _OF_THE_CELL)
    differ = [
        name
        for name in shared
        if any(getattr(one, name) != getattr(requests[0], name) for one in requests)
    ]
    if differ:
        raise SweepError(
            f"the cells differ in {', '.join(differ)}: the tasks of one array share them; make it two sweeps"
        )


def _script(request: BatchRequest, name: str, plans: Mapping[int, LaunchPlan]) -> str:
    cells = [
        {
            "number": number,
            "root": str(plan.directory.root),
            "script": str(plan.directory.submission(plan.tag).script),
        }
        for number, plan in sorted(plans.items())
    ]
    engine = script_engine().from_string(read_shipped(*TEMPLATE))
    folder = str(request.working_directory)
    return str(
        engine.render(sweep=name, options=script_options(request), cells=cells, folder=folder)
    )
