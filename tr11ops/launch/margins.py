"""Whether there is time enough: what the run's records say of its speed, what each attempt's end
leaves for a step, an evaluation and a save, how often the next launch saves, and whether reservation
and hours last. Pure but for the records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

from tr11ops.base.observed import Observed, Unknown, known
from tr11ops.base.robust import usual_step_seconds
from tr11ops.base.units import counted, duration
from tr11ops.cluster.base import Node
from tr11ops.cluster.site import Grants, Reservation, ResourceBudget, ResourceLimit
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.diagnose.attribution.records import read_objects
from tr11ops.observe.files import read_details
from tr11ops.observe.operation_files import read_save_room
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, warning
from tr11ops.runcard.rules import SIGNAL_SLACK_SECONDS
from tr11ops.runcard.save_interval import FaultRecord, SaveInterval, adapts, chosen_interval
from tr11ops.runcard.speed import RunHistory
from tr11ops.rundir.attempts import LaunchRecord, attempts_before
from trainer.contract.files import now
from trainer.contract.metrics_record import STEP, VALIDATION, MetricsRecord, parse_record
from trainer.contract.paths import RunPaths
from trainer.contract.state_file import tail_lines

# Whether what the site grants lasts for what is launched: the reservation's end, the hours that
# are left. Pure.


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
        yield _budget_check(card, tasks, budget=budget, is_safe=grants.is_safe, nodes=nodes)


def _reservation_check(
    card: RunCard, tasks: int, found: Reservation | None, now: float
) -> PreflightCheck:
    name = card.slurm.reservation
    limit = card.time_limit_seconds
    key = "slurm.reservation"
    fix = "name the new one in the card, or take it out"
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
    slurm = card.slurm
    nodes = card.slurm.allocated_nodes
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
    slurm = card.slurm
    minutes = card.time_limit_seconds / 60
    # a node is taken whole
    fewest_cpus = min((node.cpus for node in nodes if node.cpus), default=slurm.cpus_per_task)
    counted = {"node": 1, "gres/gpu": slurm.gpus_per_node, "cpu": fewest_cpus}.get(resource)
    if counted is None:
        return None
    return minutes * slurm.allocated_nodes * counted


def _budget_check(
    card: RunCard, tasks: int, budget: ResourceBudget, is_safe: bool, nodes: tuple[Node, ...]
) -> PreflightCheck:
    left = max(0.0, budget.left) / 60
    granted = budget.limit / 60
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


# What a run's own records say of its speed: seconds of a step, its longest save and evaluation,
# its shortest start.

STARTS_LOOKED_AT = 10  # of attempts, the newest
TAIL_BYTES = 4 << 20  # some weeks of the largest run's log, whose steps take minutes
_SAVE = re.compile(
    r"time \(ms\) \| save-checkpoint: (?P<milliseconds>\d+(?:\.\d+)?)"
    r"(?: \(the training stood still for (?P<stall>\d+(?:\.\d+)?)\))?"
)


def read_history(paths: RunPaths) -> RunHistory:
    """Read the ends of both logs; what is not there was not measured. Raises OSError as the file
    system does.
    """
    told = [match for line in _tail(paths.main_log) if (match := _SAVE.search(line))]
    saves = [float(match["milliseconds"]) / 1000 for match in told]
    stalls = [float(match["stall"] or match["milliseconds"]) / 1000 for match in told]
    records = [
        record for line in _tail(paths.metrics) if (record := parse_record(line)) is not None
    ]
    steps = [record for record in records if record.is_step]
    return RunHistory(
        step=usual_step_seconds(record.number("seconds_per_iteration") for record in steps),
        step_iteration=steps[-1].iteration if steps else None,
        save=max(saves, default=None),
        usual_save=median(saves) if saves else None,
        stall=median(stalls) if stalls else None,
        evaluation=_longest_evaluation(records),
        start=_shortest_start(paths, steps),
    )


def _shortest_start(paths: RunPaths, steps: list[MetricsRecord]) -> float | None:
    """From the begin of an attempt to the end of its first step, of the newest attempts whose first
    step is there.
    """
    firsts = [record for before, record in pairwise(steps) if record.job_id != before.job_id][
        -STARTS_LOOKED_AT:
    ]
    if not firsts and steps and steps[0].iteration == 1:
        firsts = steps[:1]
    taken = []
    for record in firsts:
        began = read_details(paths.attempt(record.job_id) / "attempt.json").get("start")
        if isinstance(began, float) and record.time is not None and record.time > began:
            taken.append(record.time - began)
    return min(taken, default=None)


def _longest_evaluation(records: list[MetricsRecord]) -> float | None:
    """From the record of a step to the last of the validation records that follow it at once, in
    the same job.

    A save comes before the evaluation; where it does not run beside the training, it is counted in.
    """
    longest: float | None = None
    began: float | None = None
    for before, record in pairwise(records):
        if record.kind != VALIDATION or record.job_id != before.job_id:
            continue
        if before.kind != VALIDATION:
            began = before.time if before.kind == STEP else None
        if began is not None and record.time is not None:
            longest = max(longest or 0.0, record.time - began)
    return longest


def _tail(path: Path) -> list[str]:
    try:
        return tail_lines(path, TAIL_BYTES)[0]
    except FileNotFoundError:
        return []


def room_before_limit(card: RunCard) -> tuple[float, float] | None:
    """Seconds from the trainer's leave to Slurm's end of the attempt, by exit duration or early
    signal, whichever is the earlier: those that are sure, and those that are likely, which are more
    where the early signal alone makes the trainer leave, for it may come late. None when neither is
    set.
    """
    rooms = []
    if card.run.exit_duration_minutes is not None:
        left = card.time_limit_seconds - 60 * card.run.exit_duration_minutes
        rooms.append((left, left))
    early = card.slurm.signal_seconds_before_limit
    if early is not None:
        rooms.append((max(0.0, early - SIGNAL_SLACK_SECONDS), early))
    return max(rooms, default=None)


def read_launches(folders: Iterable[Path]) -> tuple[LaunchRecord, ...]:
    """The launches in these attempts' folders, the last one of a folder first; what is no record is
    left out.
    """
    return tuple(launch for folder in folders for launch in launches_in(folder))


def launches_in(folder: Path) -> list[LaunchRecord]:
    """The launches in an attempt's folder, the last one first."""
    found = []
    for value in read_objects(folder / "launches"):
        with suppress(ValueError):
            found.append(LaunchRecord.of(value))
    return sorted(found, key=lambda launch: -launch.launch)


def met_faults(launches: Iterable[LaunchRecord], now: float) -> FaultRecord:
    """What launches have met that are over: a fault counts where the launch had trained, and so lost
    work. One that no one saw end died with its batch script's node.
    """
    seconds, faults = 0.0, []
    for launch in launches:
        end = launch.end or launch.start
        seconds += end - launch.start
        is_fault = launch.end is None or launch.cause not in {"", Kind.OPERATOR}
        if is_fault and (launch.end is None or launch.reached is not None):
            faults.append(end)
    return FaultRecord(seconds, tuple(moment for moment in faults if moment <= now))


def next_interval(
    card: RunCard, paths: RunPaths, history: RunHistory, free_bytes: int | None = None
) -> SaveInterval | None:
    """How often a launch that begins now saves, and why, by all that the run has met; None where its
    card does not have it choose. `history` is what was measured, `free_bytes` what is free where
    checkpoints lie: None, as the file system says.
    """
    if not adapts(card):
        return None
    if free_bytes is None:
        room = known(read_save_room(paths), None)
        free_bytes = None if room is None else room.free_bytes
    folders = (folder for folder, _ in attempts_before(paths, None))
    met = met_faults(read_launches(folders), now())
    return chosen_interval(card, history, met, free_bytes=free_bytes, now=now())


def is_measured(history: RunHistory) -> bool:
    """Has the run saved before, so that its own times can be used in place of a rule of thumb?"""
    return history.save is not None


def margin_checks(card: RunCard, history: RunHistory) -> Iterator[PreflightCheck]:
    """Compare the room with the run's own longest times. Nothing is said of a run that never saved."""
    room = room_before_limit(card)
    if room is None or history.save is None:
        return
    sure, likely = room
    must = (history.step or 0.0) + history.save
    evaluation = 0.0
    if isinstance(card, OwnCard) and card.evaluation.iterations > 0:
        evaluation = history.evaluation or 0.0
    wanted = must + evaluation
    parts = [
        ("a step", history.step),
        ("an evaluation", evaluation or None),
        ("a save", history.save),
    ]
    measured = ", ".join(
        f"{name} {duration(seconds)}" for name, seconds in parts if seconds is not None
    )
    late = ", and Slurm's signal may come a minute late" if sure < likely else ""
    left = (
        f"{duration(likely)} are left before the time limit{late}; measured in this run: {measured}"
    )
    key, fix = _fix(card, wanted)
    if sure >= wanted:
        yield ok("margin", left)
    elif likely < must:
        yield refused(key, f"the last checkpoint of each attempt would be lost: {left}", fix, 2)
    elif sure < must:
        yield warning(key, f"a late signal may cost the last checkpoint of an attempt: {left}", fix)
    else:
        yield warning(
            key, f"an evaluation at the end of an attempt may cost its last checkpoint: {left}", fix
        )


def _fix(card: RunCard, wanted: float) -> tuple[str, str]:
    """The key that decides, and its value for `wanted` seconds of room."""
    most = (card.time_limit_seconds - wanted) / 60
    if most >= 1:
        return "run.exit_duration_minutes", f"use {int(most)} or less"
    return (
        "slurm.time_limit",
        f"use {duration(wanted)} and more, and leave run.exit_duration_minutes as much below it",
    )
