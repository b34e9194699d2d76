"""A run's own record as a replay takes it: its faults, its nodes, its times, and what its card says of
resilience. Pure.

What only a person could end (a stop, a hold, a queue in which nothing waited) is left out of both
the record and its replay: it depends on none of the settings that are tried. An evaluation counts as
a part of the steps between two, for it is the same under all of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from statistics import mean

from msgspec.structs import replace

from tr11ops.base.observed import Observed, Unknown, known
from tr11ops.base.units import counted, duration
from tr11ops.diagnose.attribution.evidence import MAY_BE_A_NODES
from tr11ops.goodput.account import AccountSpan, Goodput
from tr11ops.goodput.advise import (
    FEWEST_FAULTS,
    LEAST_SAVES,
    CardSettings,
    MeasuredCosts,
    stretches,
)
from tr11ops.goodput.history_values import AttemptHistory, History, micro
from tr11ops.goodput.timeline import Bucket
from tr11ops.replay.parameters import Layout, Parameters
from tr11ops.replay.traces import DAY, Fault, FaultSign, Window
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.rundir.exclusion import is_broad
from trainer.contract.record import Record

PERSON_SECONDS = 60.0  # no one is waited for: that is left out of the record, too
QUIET_LOOKS = 24  # once a day: many replays are made of one record
INSTANT = 1.0  # a fault that was over when its launch had ended
SHORTEST = {FaultSign.HARDWARE: 600.0, FaultSign.LOSS: 600.0}  # a repair, or a start of the node
JITTER = DAY / 2  # a resampled node's faults come earlier or later by up to this
NO_SUCH_LOSS = 1e9
LEFT_OUT = frozenset({Bucket.OPERATOR_PAUSE, Bucket.RESTART_GAP, Bucket.UNKNOWN})
NODE_FAILURE = "ode failure"  # of srun: "Node failure on n1"


class RecordedFault(Record):
    """A fault of the record. It was over when its launch had ended at the earliest (`fault.end`), and
    at the `latest` when its node was seen to train again; seconds since the record's beginning.
    """

    fault: Fault
    latest: float

    def lasting(self, share: float) -> float:
        """Seconds from its start to the repair, at a share of the way between the shortest and the
        longest that it may have been; by their logarithms, for most repairs are short.
        """
        shortest = self.fault.end - self.fault.start
        longest = self.latest - self.fault.start
        return shortest * math.exp(share * math.log(longest / shortest))


class RecordedRun(Record):
    """What a replay takes of a run's record, of the time since it trains on as many nodes as today.

    `nodes` are all that it held; `days`: of exclusion. `trained` is the share of its `seconds` in
    which it trained (or evaluated) what was kept. `left_out`: seconds in which it waited for a
    person. `least_spares`: with how many an attempt starts, None: all that it asks for. `overrides`
    of a replay's card, as `--set` takes them.
    """

    nodes: tuple[str, ...]
    seconds: float
    faults: tuple[RecordedFault, ...]
    layout: Layout
    parameters: Parameters
    trained: float
    left_out: float
    days: float
    least_spares: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def card_overrides(self) -> tuple[str, ...]:
        """All that a replay's card has otherwise."""
        least = self.layout.held
        if self.least_spares is not None:
            least = min(least, self.least_spares)
        return (
            *self.overrides,
            f"slurm.least_spare_nodes={least}",
            f"resilience.exclusion_days={self.days:g}",
            "alerts.recipients=[]",
        )

    @property
    def all_nodes(self) -> tuple[str, ...]:
        """Those it held, and as many more as its layout asks for: nothing is known of these."""
        more = range(1, self.layout.allocated - len(self.nodes) + 1)
        return (*self.nodes, *(f"never-held-{number}" for number in more))

    def as_recorded(self) -> Window:
        """The faults at their moments, each repaired after as long as is likely."""
        faults = (replace(one.fault, end=one.fault.start + one.lasting(0.5)) for one in self.faults)
        return Window(self.all_nodes, self.seconds, tuple(faults), "the run's own record")

    def resampled(self, seed: int, mtbf: float | None = None) -> Window:
        """The same run with another chance: each node has the faults of nodes that are drawn from
        the record, up to half a day earlier or later, repaired at any moment that the record
        allows. With `mtbf` (seconds) faults come so often, else about as often as they did.
        """
        draw = random.Random(seed)
        often = 1.0
        if mtbf is not None:
            often = self.seconds / mtbf / len(self.faults)
        histories: dict[str, list[RecordedFault]] = {node: [] for node in self.nodes}
        for one in self.faults:
            if one.fault.kind is not FaultSign.SHARED:
                histories[one.fault.node].append(one)
        shared = (one for one in self.faults if one.fault.kind is FaultSign.SHARED)
        faults = [moved for one in shared for moved in self._copies([one], "", often, draw)]
        for node in self.all_nodes:
            drawn = histories[draw.choice(self.nodes)]
            faults += self._copies(drawn, node, often, draw)
        faults.sort(key=_start)
        return Window(self.all_nodes, self.seconds, tuple(faults), f"resampled, seed {seed}")

    def _copies(
        self, history: Sequence[RecordedFault], node: str, often: float, draw: random.Random
    ) -> Iterator[Fault]:
        """A node's faults, as many times over as is drawn: `often`, in the mean."""
        for _ in range(_poisson(often, draw)):
            shift = draw.uniform(-JITTER, JITTER)
            for one in history:
                start = (one.fault.start + shift) % self.seconds
                end = start + one.lasting(draw.random())
                yield replace(one.fault, node=node, start=start, end=end)


def _start(fault: Fault) -> float:
    return fault.start


def _poisson(expected: float, draw: random.Random) -> int:
    """How many of what comes `expected` times in the mean (Knuth)."""
    count = 0
    left = draw.expovariate(1.0)
    while left < expected:
        count += 1
        left += draw.expovariate(1.0)
    return count


# ----------------------------------------------------------------------------- reading the record
def recorded_run(
    history: History,
    goodput: Goodput,
    situation: CardSettings,
    found: MeasuredCosts,
) -> Observed[RecordedRun]:
    """The record for a replay; Unknown, with the reason, where it says too little for one.

    `found` are its costs as `measure` has them.
    """
    attempts = known(history.attempts, ())
    begin = _begin(attempts, situation.nodes)
    lack = _lack(history, goodput, situation, found)
    if begin is None:
        lack = lack or f"no launch has trained on {counted(situation.nodes, 'node')} yet"
    if lack or begin is None or found.step is None or situation.save_every is None:
        return Unknown(lack)
    held = (span.end / 1e6 for span in goodput.spans if span.held)
    part = goodput.between(begin, max(held))  # a wait that goes on is no task's yet
    clock = ReplayClock(part)
    used = [one for one in attempts if micro(one.start) >= micro(begin)]
    faults = tuple(_faults(part, used, clock))
    few = _too_few(len(faults), clock.seconds, situation)
    if few:
        return Unknown(few)
    nodes = tuple(sorted({node for one in used for node in one.nodes}))
    trained = sum(_wall(part, bucket) for bucket in (Bucket.USEFUL, Bucket.EVALUATION))
    spares = max(len(nodes) - situation.nodes, situation.spares)
    return RecordedRun(
        nodes,
        clock.seconds,
        faults,
        layout=Layout(situation.nodes, spares, situation.spares),
        parameters=_times(part, used, situation, found),
        trained=trained / clock.seconds,
        left_out=clock.left_out,
        days=situation.exclusion_days,
        least_spares=situation.least_spares,
        overrides=situation.resilience,
    )


def _too_few(faults: int, seconds: float, situation: CardSettings) -> str:
    """Why so many faults are too few to replay; "" where they are enough."""
    least = FEWEST_FAULTS
    if situation.given_mtbf is not None:
        least = 1
    if faults >= least:
        return ""
    needed = counted(least, "is", "are")
    return f"the run has seen {counted(faults, 'fault')} in {duration(seconds)}, {needed} needed"


def _lack(history: History, goodput: Goodput, situation: CardSettings, found: MeasuredCosts) -> str:
    """What the record does not say at all; "" where it says enough."""
    if isinstance(history.checkpoints, Unknown):
        return f"what was saved is not known: {history.checkpoints.why}"
    few = _too_few(len(goodput.faults), goodput.held_wall_seconds, situation)
    if few:
        return few
    if found.step is None:
        return "no step was recorded yet"
    if situation.save_every is None:
        return "the card does not say how often the training saves"
    if found.save is None or found.saves < LEAST_SAVES:
        return f"{counted(found.saves, 'save')} on record, {LEAST_SAVES} are needed"
    return ""


def _begin(attempts: Sequence[AttemptHistory], nodes: int) -> float | None:
    """When the first of the attempts began that train on so many nodes, and no other number since."""
    begin = None
    for attempt in attempts:
        sizes = {len(launch.nodes) for launch in attempt.launches}
        if sizes and sizes != {nodes}:
            begin = None
        elif sizes and begin is None:
            begin = attempt.start
    return begin


class ReplayClock:
    """Moments of the record (seconds since the epoch) as seconds of its replay: what is left out does
    not count. `seconds`: of all; `left_out`: the others.
    """

    def __init__(self, part: Goodput) -> None:
        self._begin = part.begin
        idle = (span for span in part.spans if not span.held and span.bucket in LEFT_OUT)
        self._cuts = sorted((span.start / 1e6, span.end / 1e6) for span in idle)
        self.left_out = sum(end - start for start, end in self._cuts)
        self.seconds = part.end - part.begin - self.left_out

    def at(self, moment: float) -> float:
        """Seconds of the replay until then."""
        cut = sum(max(0.0, min(end, moment) - start) for start, end in self._cuts)
        return min(self.seconds, max(0.0, moment - self._begin - cut))


def _wall(part: Goodput, bucket: Bucket) -> float:
    return part.buckets[bucket].wall_micros / 1e6


def _times(
    part: Goodput, used: Sequence[AttemptHistory], situation: CardSettings, found: MeasuredCosts
) -> Parameters:
    """The run's own times, in the mean where a total is made of them."""
    step = found.step or 0.0
    training = sum(_wall(part, bucket) for bucket in (Bucket.USEFUL, Bucket.REDONE))
    evaluating = 0.0
    if training:
        evaluating = step * _wall(part, Bucket.EVALUATION) / training
    gaps = stretches([span for span in part.spans if span.held], (Bucket.RESTART_GAP,))
    return Parameters(
        step=step + evaluating,
        save=found.save or 0.0,
        written=situation.written,
        adapts=situation.adapts,
        free_checkpoints=situation.free_checkpoints,
        interval=situation.save_every or 1,
        evaluation=0.0,
        evaluation_interval=int(NO_SUCH_LOSS),
        start_up=found.start,
        load=0.0,
        next_task=_wall(part, Bucket.QUEUE) / max(1, len(used) - 1),
        relaunch=0.0,
        time_limit=situation.time_limit,
        leaves_before=situation.room or 0.0,
        ends_within=mean(gaps) if gaps else 0.0,
        person=PERSON_SECONDS,
        quiet_looks=QUIET_LOOKS,
    )


def _faults(
    part: Goodput, used: Sequence[AttemptHistory], clock: ReplayClock
) -> Iterator[RecordedFault]:
    """Every end that no one meant, on each node that it was blamed on."""
    by_job = {attempt.job_id: attempt for attempt in used}
    for fault in part.faults:
        attempt = by_job.get(fault.job_id)
        if attempt is None:
            continue
        launch = next((one for one in attempt.launches if one.launch == fault.launch), None)
        unseen = _unseen(part.spans, fault.job_id, fault.launch, fault.time)
        start = clock.at(fault.time) - unseen
        what = f"{fault.cause} at {fault.time:.0f}"
        kind, nodes = _shown(attempt, launch)
        for node in nodes:
            again = _seen_well(used, node, fault.time)
            latest = clock.seconds if again is None else clock.at(again)
            if kind is FaultSign.SHARED:
                latest = 0.0
            end = start + SHORTEST.get(kind, INSTANT)
            yield RecordedFault(
                Fault(node, start, end=end, kind=kind, what=what, unseen=unseen), max(end, latest)
            )


def _shown(
    attempt: AttemptHistory, launch: LaunchRecord | None
) -> tuple[FaultSign, tuple[str, ...]]:
    """How a fault showed itself, and on which nodes; "" where it is no one node's."""
    if attempt.lost_its_host and (launch is None or launch.end is None):
        return FaultSign.LOSS, attempt.nodes[:1]
    if launch is None:
        return FaultSign.SHARED, ("",)
    blamed = tuple(node for node in launch.blamed if node in attempt.nodes)
    if blamed and any(NODE_FAILURE in line for line in launch.srun_lines):
        return FaultSign.LOSS, blamed
    if blamed:
        return FaultSign.HARDWARE, blamed
    suspects = tuple(node for node in launch.suspects if node in attempt.nodes)
    if (
        suspects
        and launch.cause in MAY_BE_A_NODES
        and not is_broad(len(suspects), len(launch.nodes))
    ):
        return FaultSign.CRASH, suspects[:1]
    return FaultSign.SHARED, ("",)


def _unseen(spans: Sequence[AccountSpan], job_id: str, launch: int, moment: float) -> float:
    """How long nothing had come when a fault gave its first sign."""
    return sum(
        (span.end - span.start) / 1e6
        for span in spans
        if (span.job_id, span.launch, span.bucket) == (job_id, launch, Bucket.HANG)
        and span.is_wall
        and math.isclose(span.end / 1e6, moment, abs_tol=INSTANT)
    )


def _seen_well(used: Sequence[AttemptHistory], node: str, moment: float) -> float | None:
    """When a launch that began after a moment first trained on a node without its being blamed or
    suspected; None: never.
    """
    return next(
        (
            launch.start
            for attempt in used
            for launch in attempt.launches
            if launch.start > moment
            and node in launch.nodes
            and node not in (*launch.blamed, *launch.suspects)
            and launch.has_progress
        ),
        None,
    )
