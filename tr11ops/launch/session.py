"""One launch from its card to its submissions: observe, check, plan, try, and carry out; and a
change of the run's queue that a person has agreed to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.alerts.service import AlertOutcome, process_some
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import Observed, Unknown, cause, known
from tr11ops.cluster.arrays import ArraySpec
from tr11ops.cluster.base import Scheduler
from tr11ops.cluster.site import Grants, SiteRules, keep_site, read_grants, read_site
from tr11ops.detect.site import nodes_short
from tr11ops.detect.watch import watchdog_fault
from tr11ops.launch.directory_checks import base_checks
from tr11ops.launch.facts import LaunchFacts, LaunchRequest, observe_launch
from tr11ops.launch.plan import LaunchPlan, plan_launch, plan_lines
from tr11ops.launch.preflight import excluded_nodes, preflight
from tr11ops.launch.queue_checks import QueueChain, choose_chain
from tr11ops.launch.submit import launch_lock, settle, submit
from tr11ops.nodes.queue_exclusions import RunQueue, exclude_nodes
from tr11ops.observe.jobs import own_jobs_now
from tr11ops.observe.look import facts_of, observe
from tr11ops.queue.held_jobs import release
from tr11ops.queue.repair import Repair, RepairStep
from tr11ops.runcard.card import PathBase, RunCard, parse_attempts
from tr11ops.runcard.check import Level, PreflightCheck, ok, refused, unknown, verdict, warning
from tr11ops.rundir.exclusion import Exclusion, ExclusionLimit
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag
from tr11ops.rundir.state_files import set_damage_aside
from trainer.contract.record import JsonObject, Record

if TYPE_CHECKING:
    from tr11ops.rundir.cron_records import PeriodicJobState

# A launch that waits for nodes which only the site can give raises the alert at once, and not at
# the next look.


def is_short(view: LaunchView) -> bool:
    """Whether the partition has nodes enough, of which too few can be used now."""
    return any(check.name == "nodes" and check.level is Level.WARNING for check in view.checks)


def report_shortage(job: LaunchJob, now: float, typed: str) -> AlertOutcome | None:
    """Hand it to the alerts, who tell those on duty and the site's support; None where a second
    look finds enough.
    """
    from tr11ops.alerts.sending import Sender

    findings = tuple(
        nodes_short.detect(observe(job.directory, facts_of(job.card, typed), job.scheduler, now))
    )
    if findings:
        return process_some(Sender.of(job.directory, job.card, now, typed), findings)
    return None


# Whether a launched run is watched: someone is told of trouble, and something looks. Pure; it only
# warns.


def watching_checks(
    card: RunCard,
    periodic_jobs: Observed[tuple[PeriodicJobState, ...]],
    now: float,
    start: str = "cron install",
) -> Iterator[PreflightCheck]:
    """Who would be told, and by what. `periodic_jobs` are those on record, `now` is in seconds
    since the epoch.

    `start`: the words of tr11 that start a watchdog on this machine.
    """
    alerts = card.alerts
    if alerts.has_recipients:
        people = len({*alerts.recipients, *alerts.rota})
        if alerts.urls_file:
            urls = ["delivery URLs"]
        else:
            urls = []
        yield ok(
            "alerts",
            "trouble is told to "
            + " and ".join([*([f"{people} by mail"] if people else []), *urls]),
        )
    else:
        rule = "no one would be told of trouble"
        yield warning(
            "alerts", rule, "set alerts.recipients, alerts.rota or alerts.urls_file in the card"
        )
    if isinstance(periodic_jobs, Unknown):
        yield warning("watchdog", f"whether one runs cannot be seen ({periodic_jobs.why})")
        return
    fault = watchdog_fault(periodic_jobs, now)
    if fault:
        where = "" if start == "cron install" else ", in a terminal that stays open,"
        yield warning("watchdog", fault, f"`tr11 {start}`{where} starts one")
    else:
        yield ok("watchdog", "it looks at the run")


class LaunchJob(Record):
    """A launch as the command line means it. `array` are the attempts asked for, however they will
    be queued.

    `base` says where the card's relative paths were taken from.
    """

    card: RunCard
    card_toml: str
    directory: RunDirectory
    array: ArraySpec | None
    request: LaunchRequest
    scheduler: Scheduler
    other_scheduler: Callable[[str], Scheduler]
    user: str
    base: PathBase

    def site(self) -> SiteRules:
        return read_site(self.user)

    def grants(self, rules: SiteRules) -> Grants:
        slurm = self.card.slurm
        # sbatch takes these from the environment where no option says another
        account = slurm.account or os.environ.get("SBATCH_ACCOUNT")
        quality = slurm.quality_of_service or os.environ.get("SBATCH_QOS")
        partition = slurm.partition or os.environ.get("SBATCH_PARTITION")
        return read_grants(
            rules,
            self.user,
            account=account,
            quality=quality,
            reservation=slurm.reservation,
            partition=partition,
        )


class LaunchView(Record):
    """What the checks said, and the plan where they let one be made."""

    checks: tuple[PreflightCheck, ...]
    plan: LaunchPlan | None
    rows: tuple[tuple[str, str], ...]
    exit_code: int
    chain: QueueChain
    facts: LaunchFacts

    @property
    def faults(self) -> tuple[PreflightCheck, ...]:
        return tuple(
            check for check in self.checks if check.level in {Level.REFUSED, Level.UNKNOWN}
        )


def check_launch(job: LaunchJob, tag: str | None = None) -> LaunchView:
    """Observe, check, plan, and try the plan on the scheduler. Changes nothing, leaves nothing."""
    facts = observe_launch(
        job.card,
        job.directory,
        job.request,
        scheduler=job.scheduler,
        other_scheduler=job.other_scheduler,
        user=job.user,
        site=job.site if job.scheduler.name == "slurm" else None,
        grants=job.grants if job.scheduler.name == "slurm" else None,
    )
    chain = choose_chain(job.card.slurm.chain, job.array, known(facts.site, None))
    request = replace(
        job.request,
        array=str(job.array) if chain.kind == "array" else None,
        tasks=chain.tasks,
        chain=chain,
    )
    checks = [
        *base_checks(job.base, job.directory),
        *preflight(job.card, job.directory, request, facts),
    ]
    if not job.card.trains_nothing:
        checks += watching_checks(
            job.card, facts.periodic_jobs, facts.time, facts.start_of_watchdog
        )
    plan: LaunchPlan | None = None
    rows: tuple[tuple[str, str], ...] = ()
    if not verdict(checks):
        plan, tried = _try(job, request, facts, tag or new_tag())
        checks.append(tried)
        if plan is not None:
            rows = tuple(_rows(plan, job, chain, facts))
    return LaunchView(
        tuple(checks), plan, rows=rows, exit_code=verdict(checks), chain=chain, facts=facts
    )


def _try(
    job: LaunchJob, request: LaunchRequest, facts: LaunchFacts, tag: str
) -> tuple[LaunchPlan | None, PreflightCheck]:
    """Plan it, and let the scheduler say whether it would take it; no plan where it would not.

    A refusal of this moment is no verdict: the checks before have found that the partition could
    serve it when all its nodes are well, and what the scheduler can never start it refuses when it
    is submitted.
    """
    name = job.scheduler.name
    try:
        plan = _plan(job, request, facts, tag)
        result = job.scheduler.test(plan.test_request)
    except SchedulerUnreachable as error:
        return None, unknown("scheduler", f"it did not answer the trial ({error})")
    except SchedulerError as error:
        return None, refused("scheduler", str(error), "change the card or the options")
    except ValueError as error:  # a path that cannot stand in a batch script
        return None, refused("run.directory", str(error), "choose another path", 2)
    if result.accepted:
        return plan, ok("scheduler", f"{name} would take it ({result.message})")
    if result.is_of_the_moment:
        rule = f"{name} cannot place it at this moment ({result.message}): it is queued, and waits for its nodes"
        return plan, warning("scheduler", rule)
    return None, refused_by_scheduler(job.card, name, result.message)


def _plan(job: LaunchJob, request: LaunchRequest, facts: LaunchFacts, tag: str) -> LaunchPlan:
    site = known(facts.site, None)
    return plan_launch(
        job.card,
        job.directory,
        request=request,
        excluded=excluded_nodes(request, facts)[0],
        tag=tag,
        history=known(facts.history, None),
        expedites=request.may_expedite and site is not None and site.expedites,
    )


# What the scheduler says of a request, and the key of the card that it is about.
_KEYS = (
    (re.compile(r"reservation", re.I), "reservation"),
    (re.compile(r"feature", re.I), "constraint"),
    (re.compile(r"\baccount", re.I), "account"),
    (re.compile(r"\bqos\b", re.I), "quality_of_service"),
)


def refused_by_scheduler(card: RunCard, scheduler: str, message: str) -> PreflightCheck:
    """The refusal of a trial: under the card's key that it is about, where the scheduler's words
    tell.
    """
    for pattern, key in _KEYS:
        value = getattr(card.slurm, key)
        if value and pattern.search(message):
            rule = f"{value!r} is refused by {scheduler}: {message}"
            return refused(
                f"slurm.{key}",
                rule,
                "the site has ended, renamed or closed it: correct the card",
                2,
            )
    for name in card.slurm.options:
        if name.rstrip("s") in message.lower():
            rule = f"{card.slurm.options[name]!r} is refused by {scheduler}: {message}"
            return refused(
                f"slurm.options.{name}",
                rule,
                "the site takes it otherwise, or not: correct the card",
                2,
            )
    return refused(
        "scheduler", f"{scheduler} refuses it: {message}", "change the card or the options"
    )


def _rows(
    plan: LaunchPlan, job: LaunchJob, chain: QueueChain, facts: LaunchFacts
) -> list[tuple[str, str]]:
    rows = plan_lines(
        plan,
        job.card,
        scheduler=job.scheduler.name,
        base=job.base,
        missing_parents=facts.directory.missing_parents,
    )
    if chain.kind in {"afterany", "self"}:
        rows = [(name, str(chain) if name == "job" else value) for name, value in rows]
    return rows


def carry_out(
    job: LaunchJob, view: LaunchView, why: str
) -> tuple[LaunchView, tuple[Submission, ...]]:
    """Look once more under the launch lock, settle what is in doubt, and submit.

    Returns the second view, which says what is in the way where nothing was submitted, and the
    records of what was. Raises LaunchBusy, SchedulerError and OSError as `submit` and `settle` do.
    """
    with launch_lock(job.directory.launch_lock):
        return carry_out_locked(job, view, why)


def carry_out_locked(
    job: LaunchJob, view: LaunchView, why: str
) -> tuple[LaunchView, tuple[Submission, ...]]:
    """As `carry_out`, by a caller that holds the launch lock."""
    again = check_launch(job, view.plan.tag if view.plan else None)
    if again.exit_code or again.plan is None:
        return again, ()
    set_damage_aside(job.directory, job.user)
    settle(job.directory, again.facts, job.scheduler, again.plan.tag)
    site = known(again.facts.site, None)
    if site is not None:
        keep_site(job.directory.site, site)
    return again, _submit_chain(job, again, again.plan, why)


def _submit_chain(
    job: LaunchJob, view: LaunchView, plan: LaunchPlan, why: str
) -> tuple[Submission, ...]:
    chain = view.chain
    left = 0
    if chain.kind == "self":
        left = chain.tasks - 1
    send = partial(
        submit,
        scheduler=job.scheduler,
        card_toml=job.card_toml,
        user=job.user,
        why=why,
        chain="" if chain.kind == "single" else chain.kind,
    )
    done = [send(plan, left=left)]
    for _ in range(chain.tasks - 1 if chain.kind == "afterany" else 0):
        request = replace(
            job.request, array=None, tasks=1, after=done[-1].job_id, chain=chain, replaces=()
        )
        done.append(send(_plan(job, request, view.facts, new_tag())))
    return tuple(done)


# Carrying out a change of the run's queue that a person has agreed to: launch first, then cancel
# and release.
#
# `queue/repair.py` plans it. What is cancelled comes again: those attempts are launched before the
# old ones go.


def relaunch_of(job: LaunchJob, change: Repair) -> LaunchJob | None:
    """The launch that puts new attempts in the place of the cancelled ones; None where there is
    nothing to launch.
    """
    if not change.resubmit:
        return None
    request = replace(job.request, after=change.after, replaces=change.cancelled)
    return replace(job, array=job.array or parse_attempts(f"1-{change.resubmit}"), request=request)


def carry_out_repair(
    job: LaunchJob,
    change: Repair,
    view: LaunchView | None,
    plan_again: Callable[[], Repair],
    why: str,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Launch what is to be launched, then do the steps, all under the launch lock and in the
    journal. Returns the new jobs, and what could not be done, in words.

    `view` is the launch that was shown. Nothing is done where the queue is not as it was planned
    for any more (`plan_again`), nor where the launch is refused. What is cancelled has its
    successor in the queue by then, which waits for it. Raises LaunchBusy, SchedulerError and
    OSError as a launch does.
    """
    journal = Journal(job.directory.journal)
    records: tuple[Submission, ...] = ()
    with launch_lock(job.directory.launch_lock):
        if not plan_again().is_as(change):
            return (), ("the queue has changed meanwhile, and nothing was done: look again",)
        again = relaunch_of(job, change)
        if again is not None and view is not None:
            checked, records = carry_out_locked(again, view, why or change.kind)
            if not records:
                return (), tuple(str(check) for check in checked.faults)
        submitted = tuple(str(record.job_id) for record in records)
        failed = []
        for step in change.steps:
            data: JsonObject = {
                "action": step.action,
                "job_id": step.job,
                "why": step.why,
                "submitted": list(submitted),
            }
            if step.node:
                data["node"] = step.node
            refused = _carry_out_repair_step(step, job, change.limit)
            if refused:
                failed.append(f"{step.action} {step.node or step.job}: {refused}")
            else:
                journal.write(change.kind, why or step.why, data, job.user)
    return submitted, tuple(failed)


def _carry_out_repair_step(step: RepairStep, job: LaunchJob, limit: ExclusionLimit | None) -> str:
    """Why it could not be done; "" when it is."""
    if step.action == "exclude":
        return _exclude_lost_host(step, job, limit)
    if step.action == "release":
        return "; ".join(
            why for _, why in release(job.directory, [step.job], job.scheduler).refused
        )
    try:
        job.scheduler.cancel(step.job)
    except SchedulerError as error:
        return str(error)
    return ""


def _exclude_lost_host(step: RepairStep, job: LaunchJob, limit: ExclusionLimit | None) -> str:
    """Why the node is not on the run's list, or not on that of a queued job; "" where it is."""

    def known_nodes() -> frozenset[str]:
        return frozenset(node.name for node in job.scheduler.nodes())

    queue = RunQueue(
        job.scheduler,
        partial(own_jobs_now, job.directory, job.scheduler),
        known_nodes,
        kept=job.card.slurm.excluded_nodes,
        user=job.user,
    )
    asked = Exclusion(
        step.node,
        step.why,
        owner=AUTOMATIC_OWNER,
        evidence=tuple(f"job {one.job_id}: {one.state.value}" for one in step.jobs),
        job_id=step.jobs[0].raw_id,
    )
    days = job.card.resilience.exclusion_days
    done = exclude_nodes(job.directory, [asked], queue, days=days, limit=limit)
    try:
        return "; ".join(done.failures)
    except (SchedulerError, OSError, ValueError) as error:
        return f"excluded, and whether queued jobs avoid it is not known: {cause(error)}"
