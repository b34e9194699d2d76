"""What a run's own past calls for in array length and in the margin before the time limit. Pure.

Save interval, spares and days of exclusion are advised by replaying it (`replay.advice`).
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

FEWEST_FAULTS = 5  # below this a run's own count says too little
RECENT_STEPS = 1000
LEAST_HELD_SECONDS = 24 * 3600.0  # with nodes: less of a past, and nothing is advised from it
LEAST_SAVES = 3


class CardSettings(Record):
    """What the card says today. Times in seconds; None where it does not say.

    `room` is the time before the limit that exit duration or early signal leave; `remaining`:
    iterations to the end, and `recent_steps_left` the same in steps as long as the recent ones,
    None: they are alike. `exclusion_days` and `least_spares` are the card's; `resilience`, as `--set` takes it, what
    else of it decides after a fault. `adapts`: launches choose how often they save; then `written`
    are a save's seconds from begin to end, and `free_checkpoints` fit where they lie.
    """

    nodes: int
    spares: int
    task_seconds: float
    time_limit: float
    save_every: int | None
    room: float | None
    evaluates: bool
    remaining: int | None
    given_mtbf: float | None = None
    recent_steps_left: float | None = None
    exclusion_days: float = 14.0
    least_spares: int | None = None
    resilience: tuple[str, ...] = ()
    adapts: bool = False
    written: float | None = None
    free_checkpoints: float = 0.0


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


def measure(history: History, goodput: Goodput) -> MeasuredCosts:
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
    return MeasuredCosts(
        step=median(told) if told else None,
        # the last of a task may take far longer than one beside the training
        save=median(saves) if saves else None,
        longest_save=max(saves, default=None),
        saves=len(saves),
        longest_evaluation=max(evaluations, default=None),
        start=mean(starts) if starts else 0.0,
        queue=mean(waits) if waits else None,
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


def advise(found: MeasuredCosts, goodput: Goodput, situation: CardSettings) -> tuple[Advice, ...]:
    """How many tasks the rest takes, and whether the margin before the limit holds."""
    told = tuple(_array(found, situation))
    lack = too_little(goodput)
    if lack:
        told = tuple(Advice(one.topic, one.now, "cannot tell", (lack,)) for one in told)
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
    count = "no fault"
    if faults:
        count = counted(faults, "fault")
    return f"{duration(held)} with nodes and {count} are too little: {hours:g} h or {FEWEST_FAULTS} faults are needed"


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
    now = "none"
    if situation.room is not None:
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
