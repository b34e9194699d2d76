"""What a run's own past calls for: save interval, spares, array length, margin before the time
limit. Pure.

Each advice says what it would have saved: the recorded launches are gone through again with the
other number, each with the training time it had, and with the faults where they were.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median

from tr11ops.base.observed import known
from tr11ops.base.units import counted, duration
from tr11ops.goodput.account import AccountSpan, Goodput
from tr11ops.goodput.history_values import History
from tr11ops.goodput.timeline import Bucket
from trainer.contract.record import Record

# How often a run is interrupted, and what follows for saves and spares. Pure formulas; times in
# seconds.
#
# Young: A first order approximation to the optimum checkpoint interval, CACM 17 (1974). Daly: A
# higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006),
# equation 37.

PRIOR_GPU_HOURS = 64_500.0  # between failures: BLOOM lost about one of 384 GPUs a week
FEWEST_FAULTS = 5  # below this a run's own count says too little
CONFIDENCE = 0.9


class FaultRate(Record):
    """Mean time between faults. `low` and `high` bound it with 90 % confidence; `high` is infinite
    without a fault.

    `source` says whether it was measured, assumed or given, in words.
    """

    mtbf: float
    low: float
    high: float
    faults: int
    source: str


def young_interval(mtbf: float, save: float) -> float:
    """Time of training between two saves at which saves and redone work cost least, to first order."""
    return math.sqrt(2 * mtbf * save)


def daly_interval(mtbf: float, save: float) -> float:
    """Young's interval refined for saves that are not short against the time between faults; `mtbf`
    at most.
    """
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def share_for_saves(interval: float, save: float) -> float:
    """Share of the training time that saves cost."""
    return save / interval


def share_redone(interval: float, mtbf: float) -> float:
    """Share of the training time that is trained again: half an interval a fault, in the mean."""
    return interval / 2 / mtbf


def bounds_of_mtbf(observed: float, faults: int) -> tuple[float, float]:
    """The exact interval for the mean time between faults that come independently, `faults` in
    `observed` seconds.
    """
    tail = (1 - CONFIDENCE) / 2
    most = _mean_with_tail(faults, tail)
    fewest = 0.0
    if faults:
        fewest = _mean_with_tail(faults - 1, 1 - tail)
    return observed / most, observed / fewest if fewest else math.inf


def _mean_with_tail(count: int, tail: float) -> float:
    """The mean of the Poisson distribution that gives at most `count` with probability `tail`."""
    low = 0.0
    high = 2.0 * count + 20.0
    while 1 - more_than(count, high) > tail:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if 1 - more_than(count, middle) > tail:
            low = middle
        else:
            high = middle
    return high


def more_than(count: int, mean: float) -> float:
    """Probability of more than `count` events where `mean` are expected (Poisson)."""
    if mean <= 0:
        return 0.0
    terms = [index * math.log(mean) - mean - math.lgamma(index + 1) for index in range(count + 1)]
    return max(0.0, 1 - math.fsum(map(math.exp, terms)))


def fault_rate(observed: float, faults: int, gpus: int, given: float | None = None) -> FaultRate:
    """The rate to plan with: `given` by a person, else the run's own; where that is too few, what
    BLOOM met.

    A few faults are enough to rule BLOOM's rate out: where it lies outside of what they allow,
    their own is taken.
    """
    if observed > 0:
        low, high = bounds_of_mtbf(observed, faults)
    else:
        low = 0.0
        high = math.inf
    if given is not None:
        return FaultRate(given, low, high=high, faults=faults, source="as given")
    if faults >= FEWEST_FAULTS and observed > 0:
        return FaultRate(observed / faults, low, high=high, faults=faults, source="measured")
    prior = PRIOR_GPU_HOURS * 3600 / max(1, gpus)
    if faults and observed > 0 and not low <= prior <= high:
        times = counted(faults, "fault")
        return FaultRate(
            observed / faults,
            low,
            high=high,
            faults=faults,
            source=f"measured from {times} alone, which rule out BLOOM's rate",
        )
    if not faults:
        few = "no fault"
    else:
        few = f"only {counted(faults, 'fault')}"
    source = (
        f"assumed: {few} yet, so BLOOM's {PRIOR_GPU_HOURS:,.0f} GPU-hours per failure are taken"
    )
    return FaultRate(prior, low, high=high, faults=faults, source=source)


MOST_SPARES = 64
SMALL_GAIN = 0.002  # of all node-hours: what is gained by less is not worth a change
RECENT_STEPS = 1000
LEAST_HELD_SECONDS = 24 * 3600.0  # with nodes: less of a past, and nothing is advised from it
LEAST_SAVES = 3


class CardSettings(Record):
    """What the card says today. Times in seconds; None where it does not say.

    `room` is the time before the limit that exit duration or early signal leave; `remaining`:
    iterations to the end, and `recent_steps_left` the same in steps as long as the recent ones,
    None: they are alike.
    """

    nodes: int
    spares: int
    gpus_per_node: int
    task_seconds: float
    time_limit: float
    save_every: int | None
    room: float | None
    evaluates: bool
    remaining: int | None
    given_mtbf: float | None = None
    recent_steps_left: float | None = None


class MeasuredCosts(Record):
    """What the run's past says, in seconds; None where it has no record of it. Saves: as the
    training felt them.
    """

    step: float | None
    save: float | None
    longest_save: float | None
    saves: int
    longest_evaluation: float | None
    start: float
    queue: float | None
    faults: FaultRate
    node_faults: FaultRate
    useful_rate: float | None


class Advice(Record):
    """One number of the card: what it is, what it should be, why, and the node-hours that it would
    have saved.

    `change` is the card's line, or a command; `option` the same as it is typed behind `tr11 launch`
    for one launch.
    """

    topic: str
    now: str
    better: str
    why: tuple[str, ...]
    change: str = ""
    saved_node_hours: float | None = None
    numbers: Mapping[str, float | None] = {}

    @property
    def option(self) -> str:
        key, equals, value = self.change.partition(" = ")
        if equals:
            return f"--set {key}={shlex.quote(value)}"
        return self.change


class ReplayedLaunch(Record):
    """A launch as the replay needs it: its training time, nodes, and whether a fault ended it."""

    seconds: float
    nodes: float
    failed: bool


def measure(history: History, goodput: Goodput, situation: CardSettings) -> MeasuredCosts:
    """The run's own figures."""
    told = [
        step.seconds
        for step in known(history.steps, ())[-RECENT_STEPS:]
        if step.seconds is not None
    ]
    saves = stretches(goodput.spans, (Bucket.SAVE,))
    evaluations = stretches(goodput.spans, (Bucket.EVALUATION,))
    waits = stretches(goodput.spans, (Bucket.QUEUE,))
    starts = stretches(goodput.spans, (Bucket.START_UP, Bucket.LOAD))
    held = goodput.held_wall_seconds
    useful = goodput.buckets[Bucket.USEFUL].wall_micros / 1e6
    gpus = max(1, situation.gpus_per_node)
    given = situation.given_mtbf
    of_nodes = sum(fault.cause == "node" for fault in goodput.faults)
    node_seconds = goodput.total.held_micros / 1e6
    return MeasuredCosts(
        step=median(told) if told else None,
        # the last of a task may take far longer than one beside the training
        save=median(saves) if saves else None,
        longest_save=max(saves, default=None),
        saves=len(saves),
        longest_evaluation=max(evaluations, default=None),
        start=mean(starts) if starts else 0.0,
        queue=mean(waits) if waits else None,
        faults=fault_rate(held, len(goodput.faults), gpus * situation.nodes, given),
        node_faults=fault_rate(
            node_seconds, of_nodes, gpus, None if given is None else given * situation.nodes
        ),
        useful_rate=useful / held if held else None,
    )


def stretches(spans: Sequence[AccountSpan], buckets: Sequence[Bucket]) -> list[float]:
    """Seconds of each time that the run was in one of these buckets without a break."""
    found: list[list[int]] = []
    last: tuple[str, int] | None = None
    for span in sorted(
        (span for span in spans if span.bucket in buckets and span.is_wall),
        key=lambda span: span.start,
    ):
        if found and last == (span.job_id, found[-1][1]) and span.start == found[-1][1]:
            found[-1][1] = span.end
        else:
            found.append([span.start, span.end])
        last = (span.job_id, span.end)
    return [(end - start) / 1e6 for start, end in found]


def advise(history: History, goodput: Goodput, situation: CardSettings) -> tuple[Advice, ...]:
    """Everything that the past allows to be said."""
    found = measure(history, goodput, situation)
    lack = too_little(goodput)
    rates = (
        _interval(found, goodput, situation),
        _spares(found, goodput, situation),
        _array(found, situation),
    )
    told = [advice for part in rates for advice in part]
    if lack:
        told = [Advice(advice.topic, advice.now, "cannot tell", (lack,)) for advice in told]
    return (*told, *_margin(found, situation))


def too_little(goodput: Goodput) -> str:
    """Why nothing is advised about rates yet: so short a past says nothing of weeks. "" where it is
    long enough, or has seen enough faults all the same.
    """
    held = goodput.held_wall_seconds
    if held >= LEAST_HELD_SECONDS or len(goodput.faults) >= FEWEST_FAULTS:
        return ""
    hours = LEAST_HELD_SECONDS / 3600
    faults = len(goodput.faults)
    if faults:
        count = counted(faults, "fault")
    else:
        count = "no fault"
    return f"{duration(held)} with nodes and {count} are too little: {hours:g} h or {FEWEST_FAULTS} faults are needed"


# ----------------------------------------------------------------------------- save interval
def _interval(found: MeasuredCosts, goodput: Goodput, situation: CardSettings) -> Iterator[Advice]:
    rate = found.faults
    if found.save is None or found.step is None or not found.save or found.saves < LEAST_SAVES:
        seen = f"{counted(found.saves, 'save') if found.saves else 'no saves'}"
        yield Advice(
            "save interval",
            _now(situation),
            "cannot tell",
            (f"{seen} on record, {LEAST_SAVES} are needed",),
        )
        return
    best = daly_interval(rate.mtbf, found.save)
    # each task saves at its end
    every = max(1, round(min(best, situation.task_seconds) / found.step))
    why = [
        f"a save stops the training for {found.save:,.1f} s (median of {found.saves})",
        f"one fault in {duration(rate.mtbf)} ({rate.source})",
        f"Young {young_interval(rate.mtbf, found.save):,.0f} s, Daly {best:,.0f} s of training between two saves",
    ]
    if rate.faults and math.isfinite(rate.high):
        why.append(
            f"the run's own count, {rate.faults}: between {duration(rate.low)} and {duration(rate.high)} (90 %)"
        )
    saved = None
    if situation.save_every is not None:
        present = situation.save_every * found.step
        shares = [
            f"{100 * share_for_saves(each, found.save):.1f} % for saves and {100 * share_redone(each, rate.mtbf):.1f} %"
            for each in (present, every * found.step)
        ]
        why.append(f"expected: {shares[0]} for redone work now, {shares[1]} then")
        launches = list(recorded_launches(goodput))
        saved = replay(launches, present, found.save) - replay(
            launches, every * found.step, found.save
        )
    yield Advice(
        "save interval",
        _now(situation),
        better=f"{every} iterations ({duration(every * found.step)})",
        why=tuple(why),
        change=f"checkpoint.interval = {every}",
        saved_node_hours=saved,
        numbers={
            "young_seconds": young_interval(rate.mtbf, found.save),
            "daly_seconds": best,
            "save_seconds": found.save,
            "mtbf_seconds": rate.mtbf,
            "mtbf_low": rate.low,
            "mtbf_high": rate.high if math.isfinite(rate.high) else None,
            "iterations": every,
        },
    )


def _now(situation: CardSettings) -> str:
    if situation.save_every is None:
        return "none"
    return f"{situation.save_every} iterations"


def recorded_launches(goodput: Goodput) -> Iterator[ReplayedLaunch]:
    """Every launch that trained."""
    failed = {(fault.job_id, fault.launch) for fault in goodput.faults}
    seconds: dict[tuple[str, int], float] = {}
    work: dict[tuple[str, int], float] = {}
    for span in goodput.spans:
        if span.bucket in {Bucket.USEFUL, Bucket.REDONE}:
            key = (span.job_id, span.launch)
            seconds[key] = seconds.get(key, 0.0) + (span.end - span.start) / 1e6
            work[key] = work.get(key, 0.0) + span.node_micros / 1e6
    for key, length in seconds.items():
        yield ReplayedLaunch(length, work[key] / length, key in failed)


def replay(launches: Sequence[ReplayedLaunch], interval: float, save: float) -> float:
    """Node-hours that saves and lost work would have cost with a save after every `interval`
    seconds of training.

    Each launch starts at a save; one that ends as it should saves once more at its end.
    """
    cost = 0.0
    for launch in launches:
        saves = math.floor(launch.seconds / interval)
        lost = 0.0
        if launch.failed:
            lost = launch.seconds - saves * interval
        cost += (saves * save + (0.0 if launch.failed else save) + lost) * launch.nodes / 3600
    return cost


# ----------------------------------------------------------------------------- spares
def _spares(found: MeasuredCosts, goodput: Goodput, situation: CardSettings) -> Iterator[Advice]:
    """As many as cost least: what they cost by standing by, against an end for want of nodes."""
    rate = found.node_faults
    expected = situation.nodes * situation.task_seconds / rate.mtbf
    exchange = (found.queue or 0.0) + found.start
    # one that ended early, or runs yet, is a part
    tasks = goodput.held_wall_seconds / situation.task_seconds

    def cost(spares: int) -> float:
        idle = spares * situation.task_seconds / 3600
        return idle + more_than(spares, expected) * exchange * (situation.nodes + spares) / 3600

    best = min(range(MOST_SPARES + 1), key=cost)
    now = situation.spares
    out_now = more_than(now, expected)
    out_then = more_than(best, expected)
    task = duration(situation.task_seconds)
    each = f"one in {rate.mtbf / 3600:,.0f} node-hours ({rate.source})"
    why = (
        f"{expected:.2f} nodes are lost in a task of {task}: {each}",
        f"a task runs out of nodes with probability {100 * out_now:.1f} % now, {100 * out_then:.1f} % then",
        f"the next task trains {duration(exchange)} later: its wait in the queue, start-up and load",
    )
    saved = tasks * (cost(now) - cost(best))
    numbers: dict[str, float | None] = {
        "expected_losses": expected,
        "runs_out_now": out_now,
        "runs_out_then": out_then,
        "exchange_seconds": exchange,
        "node_mtbf_seconds": rate.mtbf,
    }
    yield Advice(
        "spares",
        f"{now}",
        better=f"{best}",
        why=why,
        change=f"slurm.spare_nodes = {best}",
        saved_node_hours=saved,
        numbers=numbers,
    )


# ----------------------------------------------------------------------------- array and margin
def _array(found: MeasuredCosts, situation: CardSettings) -> Iterator[Advice]:
    if situation.remaining is None or found.step is None or not found.useful_rate:
        yield Advice(
            "array",
            "",
            "cannot tell",
            ("no step was recorded yet, or the card does not say how many remain",),
        )
        return
    left = situation.recent_steps_left
    training = found.step * (situation.remaining if left is None else left)
    tasks = math.ceil(training / found.useful_rate / situation.task_seconds)
    per_100 = math.ceil(training / found.useful_rate / 360_000)
    rate = f"{100 * found.useful_rate:.1f} % of the time with nodes trains what is kept"
    why = [
        f"{situation.remaining:,} iterations remain, {duration(training)} by the recent {found.step:,.1f} s; {rate}",
        f"that makes {tasks} tasks of {duration(situation.task_seconds)}, or {per_100} of 100 h",
    ]
    if found.queue is not None:
        share = found.queue / (found.queue + situation.task_seconds)
        why.append(
            f"a task waits {duration(found.queue)} in the queue, {100 * share:.1f} % of the time: longer ones less"
        )
    if not tasks:
        better = "nothing remains"
    elif tasks > 1:
        better = f"{tasks} more tasks"
    else:
        better = "1 more task"
    change = ""
    if tasks:
        change = f"tr11 launch --array 1-{tasks}"
    yield Advice(
        "array",
        "",
        better=better,
        why=tuple(why),
        change=change,
        saved_node_hours=None,
        numbers={"tasks": tasks, "tasks_of_100_hours": per_100},
    )


def _margin(found: MeasuredCosts, situation: CardSettings) -> Iterator[Advice]:
    if found.longest_save is None:
        return
    evaluation = 0.0
    if situation.evaluates:
        evaluation = found.longest_evaluation or 0.0
    need = (found.step or 0.0) + found.longest_save + evaluation
    parts = f"a step {found.step or 0.0:,.1f} s, the longest save {found.longest_save:,.1f} s"
    parts += f", the longest evaluation {evaluation:,.1f} s" if evaluation else ""
    minutes = math.floor((situation.time_limit - need) / 60) - 1
    longer = math.ceil((situation.task_seconds + need) / 60) + 1
    change = f"run.exit_duration_minutes = {minutes}"
    if minutes <= 0:
        change = f"slurm.time_limit = {longer // 60:02d}:{longer % 60:02d}:00"
    if situation.room is None:
        now = "none"
    else:
        now = duration(situation.room)
    enough = situation.room is not None and situation.room >= need
    numbers: dict[str, float | None] = {"needed_seconds": need, "room_seconds": situation.room}
    yield Advice(
        "exit margin",
        now,
        better=now if enough else f"{duration(math.ceil(need))} and more",
        why=(f"it must hold {parts}",),
        change="" if enough else change,
        saved_node_hours=None,
        numbers=numbers,
    )


def is_worth_it(advice: Advice, goodput: Goodput) -> bool:
    """Would it have saved so much that a change is worth while?"""
    if advice.saved_node_hours is None:
        return bool(advice.change)
    return advice.saved_node_hours > SMALL_GAIN * goodput.total.node_hours
