"""Whether what the site grants lasts for what is launched: the reservation's end, the hours that
are left. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Observed, Unknown
from tr11ops.base.units import counted, duration
from tr11ops.cluster.base import Node
from tr11ops.cluster.grants import Grants, Reservation, ResourceBudget, ResourceLimit
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, warning


def grant_checks(
    card: RunCard, tasks: int, grants: Observed[Grants | None], nodes: tuple[Node, ...], now: float
) -> Iterator[PreflightCheck]:
    """Checks of `tasks` attempts that run one after another from `now` on. What cannot be asked is
    a warning.
    """
    if isinstance(grants, Unknown):
        yield warning("account", f"unknown: what the site grants could not be asked ({grants.why})")
        return
    if grants is None:
        return
    if card.slurm.reservation is not None:
        yield _reservation_check(card, tasks, grants.reservation, now)
    if grants.longest_job is not None and card.time_limit_seconds > grants.longest_job:
        rule = f"{card.slurm.time_limit} is above {duration(grants.longest_job)}, the most that the account gives a job"
        yield refused(
            "slurm.time_limit", rule, "lower it, and run.exit_duration_minutes with it", 2
        )
    for limit in grants.limits:
        yield from _limit_checks(card, tasks, limit)
    for budget in grants.budgets:
        yield _budget_check(card, tasks, budget, grants.is_safe, nodes)


def _reservation_check(
    card: RunCard, tasks: int, found: Reservation | None, now: float
) -> PreflightCheck:
    name, limit = card.slurm.reservation, card.time_limit_seconds
    key, fix = "slurm.reservation", "name the new one in the card, or take it out"
    if found is None:
        return refused(key, f"{name!r} is no reservation here (any more)", fix, 2)
    if found.end is None:
        return ok("reservation", f"{name}, without an end")
    left = found.end - max(now, found.start or now)
    fits = int(max(0.0, left) // limit)
    if fits == 0:
        rule = f"{name} ends in {duration(max(0.0, left))}, one task asks for {duration(limit)}: none would start"
        return refused(key, rule, fix)
    if fits < tasks:
        fitting = counted(fits, "task fits", "tasks fit")
        others = counted(tasks - fits, "other", "others")
        rule = f"{name} ends in {duration(left)}: {fitting}, the {others} would be held at its end"
        return warning(key, rule, f"launch --array 1-{fits}, or have it extended")
    return ok("reservation", f"{name} ends in {duration(left)}, {tasks} x {duration(limit)} fit")


_NAMES = {
    "node": "node",
    "gres/gpu": "GPU",
    "cpu": "core",
    "job": "running job",
    "queued job": "queued job",
}


def _limit_checks(card: RunCard, tasks: int, limit: ResourceLimit) -> Iterator[PreflightCheck]:
    """A limit below what one task asks for, which the scheduler tells as if other jobs used it up;
    or below what all of them are, so that it would not take them.
    """
    slurm, nodes = card.slurm, card.slurm.allocated_nodes
    needs = {
        "node": nodes,
        "gres/gpu": nodes * slurm.gpus_per_node,
        "cpu": nodes * slurm.cpus_per_task,
        "job": 1,
        "queued job": tasks,
    }
    need = needs.get(limit.resource, 0)
    if need <= limit.limit:
        return
    most = f"{limit.owner} gives {_whose(limit)} {counted(limit.limit, _NAMES[limit.resource])} at most"
    if limit.resource == "queued job":
        rule = f"{most}, and these are {need}: the site would not take them"
    else:
        rule = f"{most}, one task takes {need}: none would start"
    yield refused(
        "account", rule, "ask for fewer, set another slurm.account or QoS, or ask the site for more"
    )


def _whose(limit: ResourceLimit) -> str:
    if limit.is_of_one_job:
        return "one job"
    if limit.of_each:
        return f"all jobs of one {limit.of_each} together"
    return "all jobs together"


def minutes_of_task(card: RunCard, resource: str, nodes: tuple[Node, ...]) -> float | None:
    """Minutes of a resource that one task takes at most; None for one that tr11 cannot count, such
    as billing.
    """
    slurm, minutes = card.slurm, card.time_limit_seconds / 60
    # a node is taken whole
    fewest_cpus = min((node.cpus for node in nodes if node.cpus), default=slurm.cpus_per_task)
    counted = {"node": 1, "gres/gpu": slurm.gpus_per_node, "cpu": fewest_cpus}.get(resource)
    if counted is None:
        return None
    return minutes * slurm.allocated_nodes * counted


def _budget_check(
    card: RunCard, tasks: int, budget: ResourceBudget, is_safe: bool, nodes: tuple[Node, ...]
) -> PreflightCheck:
    left, granted = max(0.0, budget.left) / 60, budget.limit / 60
    what = f"{budget.owner} has {left:,.0f} of {granted:,.0f} {budget.resource} hours left"
    fix = "ask the site for more, or set another slurm.account or slurm.quality_of_service"
    need = minutes_of_task(card, budget.resource, nodes)
    if budget.left <= 0:
        return refused("account", f"{what}: no task would start", fix)
    if need is None or need <= 0:
        return ok("account", what)
    fits = int(budget.left // need)
    if fits == 0:
        text = f"{what}, one task takes {need / 60:,.0f}"
        if is_safe:
            return refused("account", f"{text}: none would start", fix)
        return warning("account", text, fix)
    if fits < tasks:
        return warning(
            "account",
            f"{what}, enough for {fits} of {counted(tasks, 'task')} ({need / 60:,.0f} each)",
            fix,
        )
    return ok(
        "account", f"{what}, {counted(tasks, 'task takes', 'tasks take')} {tasks * need / 60:,.0f}"
    )
