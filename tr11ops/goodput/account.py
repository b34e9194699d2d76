"""Where every node-second of a run went, since its first submission. Pure, and exact: sums are of
whole microseconds.

What counts how, where the bucket's name does not say it:

- While the run holds nodes, each node that it holds counts. Spares count where the rest does; `spare` says how much of
  a bucket they are. A node that was blamed or excluded counts in `node lost` until its attempt ends.
- While it holds none, as many nodes count as its newest submission asked for: in `queue` where work waits, in
  `operator pause` where someone stopped it, in `restart gap` where nothing waits that could start.
- `redone` is the first, lost pass over iterations that a resume from an older checkpoint trained again, and the
  iteration that an end cut short.
- `hang`: what an iteration took beyond its usual time where it took ten times that, what passed after the last
  iteration until the first sign of a failure, and waits for data. A step that compiles (phase `compiling`) is start-up
  but for the time that a step usually takes.
- `restart gap`: from the first sign of a failure, or from the end of the training, to the next launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known
from tr11ops.goodput.causes import (
    FAR,
    NODE,
    OPERATOR,
    UNSEEN,
    ClassifiedSegment,
    Interruption,
    LaunchChain,
    Settled,
    judged,
    settle,
)
from tr11ops.goodput.history_values import AttemptHistory, History, Period, StepMark, edges, micro
from tr11ops.goodput.timeline import (
    AttemptSegment,
    Bucket,
    Start,
    launches_of,
    marks_of,
    pieces_of,
    starts_of,
)
from tr11ops.runcard.sections import parse_attempts
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord
from tr11ops.rundir.paths import Submission
from trainer.config.card import CardError
from trainer.contract.end_marker import EndMarker
from trainer.contract.record import Record

# The time in which a run held no nodes: did it wait for them, did someone stop it, or could nothing
# start? Pure.

STOPPED = frozenset({"kill-switch", "pause"})


class Idle(NamedTuple):
    """From `start` to `end` (microseconds) nothing was held. `after`: the place of the attempt
    before, -1 for none.
    """

    start: int
    end: int
    bucket: Bucket
    nodes: int
    after: int


def idle_of(
    history: History, attempts: Sequence[AttemptHistory], ends: Sequence[int], now: int
) -> Iterator[Idle]:
    """All time from the first submission to `now` in which none of `attempts` (with these ends)
    held nodes.

    A run whose last attempt has finished the training is over then, unless more was submitted
    since.
    """
    submissions = known(history.submissions, ())
    begins = [micro(attempt.start) for attempt in attempts]
    moments = [*(micro(entry.time) for entry in submissions), *begins]
    if not moments:
        return
    at, last = min(moments), -1
    for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if begin > at:
            yield from _cut(at, min(begin, now), last=last, history=history, attempts=attempts)
        if end >= at or last < 0:
            last = index
        at = max(at, end)
    if at >= now:
        return
    newer = [micro(entry.time) for entry in submissions if micro(entry.time) > at]
    if last >= 0 and _reason(attempts[last]) == "finished":
        if not newer:
            return
        at = min(newer)
    for idle in _cut(at, now, last=last, history=history, attempts=attempts):
        nothing_waits = idle.bucket is Bucket.QUEUE and history.waits is False and bool(attempts)
        yield idle._replace(bucket=Bucket.RESTART_GAP) if nothing_waits else idle


def _cut(
    start: int, end: int, last: int, history: History, attempts: Sequence[AttemptHistory]
) -> Iterator[Idle]:
    """One idle stretch, cut where a submission, a stop or a hold begins or ends."""
    submissions = known(history.submissions, ())
    moments = {
        start,
        end,
        *(micro(entry.time) for entry in submissions),
        *edges((*history.pauses, *history.holds)),
    }
    for begin, until in pairwise(sorted(moment for moment in moments if start <= moment <= end)):
        bucket = _bucket(begin, last, history, attempts)
        yield Idle(
            begin,
            until,
            bucket=bucket,
            nodes=_wanted(begin, last, submissions, attempts),
            after=last,
        )


def _bucket(moment: int, last: int, history: History, attempts: Sequence[AttemptHistory]) -> Bucket:
    if any(period.holds_at(moment) for period in history.pauses):
        return Bucket.OPERATOR_PAUSE
    submissions = known(history.submissions, ())
    before = None
    if last >= 0:
        before = attempts[last]
    let_go = max(
        [micro(entry.time) for entry in submissions if micro(entry.time) <= moment]
        + [
            micro(period.end)
            for period in (*history.pauses, *history.holds)
            if period.end is not None and micro(period.end) <= moment
        ],
        default=-1,
    )
    if before is not None and let_go < micro(before.last_sign):
        by_hand = before.kind == "foreground" and _reason(before) == "signal"
        if _reason(before) in STOPPED or by_hand:
            return Bucket.OPERATOR_PAUSE  # anyone who set the switch by hand left no other trace
    if any(period.holds_at(moment) for period in history.holds):
        return Bucket.RESTART_GAP
    begun = attempts[: last + 1]
    waits = any(micro(entry.time) <= moment and _left(entry, begun) > 0 for entry in submissions)
    if waits:
        return Bucket.QUEUE
    return Bucket.RESTART_GAP


def _left(entry: Submission, begun: Sequence[AttemptHistory]) -> int:
    """Tasks of a submission that have not started."""
    try:
        if entry.array:
            tasks = len(parse_attempts(entry.array))
        else:
            tasks = 1
    except CardError:
        tasks = 1
    return tasks - sum(attempt.submission == entry.tag for attempt in begun)


def _wanted(
    moment: int, last: int, submissions: Sequence[Submission], attempts: Sequence[AttemptHistory]
) -> int:
    """The nodes that the newest submission asked for; without one, those of the attempt before."""
    asked = [entry.nodes for entry in submissions if micro(entry.time) <= moment]
    if asked:
        return asked[-1]
    if attempts:
        return len(set(attempts[max(last, 0)].nodes))
    return 0


def _reason(attempt: AttemptHistory) -> str:
    """The trainer's own word on the end, "" where there is none."""
    if isinstance(attempt.marker, EndMarker):
        return attempt.marker.reason
    return ""


# How many of an attempt's nodes worked, were spare, or were lost, from moment to moment. Pure.


class NodeUsage(NamedTuple):
    """From `start` to `end` (microseconds): nodes in use, or about to be; nodes held in reserve;
    nodes lost.
    """

    start: int
    end: int
    working: int
    spare: int
    lost: int


def node_usage_of(
    attempt: AttemptHistory, exclusions: Sequence[Period], begin: int, end: int
) -> list[NodeUsage]:
    """The attempt's nodes from `begin` to `end`, without a gap; the numbers always add up to all
    nodes.

    Between two launches the nodes of the next one count as working. Lost is a node that a launch's
    end was blamed on, or that was excluded, unless a later launch uses it.
    """
    nodes = frozenset(attempt.nodes)
    launches = launches_of(attempt)
    near = [period for period in exclusions if period.what in nodes and micro(period.start) < end]
    moments = {begin, end} | edges(launches) | edges(near)
    crews: list[NodeUsage] = []
    for start, until in pairwise(sorted(moment for moment in moments if begin <= moment <= end)):
        working, lost = _at(start, nodes, launches, near)
        counts = (len(working), len(nodes) - len(working) - len(lost), len(lost))
        if crews and crews[-1][2:] == counts:
            crews[-1] = crews[-1]._replace(end=until)
        else:
            crews.append(NodeUsage(start, until, *counts))
    return crews


def _at(
    moment: int,
    nodes: frozenset[str],
    launches: Sequence[LaunchRecord],
    exclusions: Sequence[Period],
) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes that worked and those that were lost at one moment."""
    active = chosen = None
    blamed: set[str] = set()
    for launch in launches:
        begun = micro(launch.start) <= moment
        over = launch.end is not None and micro(launch.end) <= moment
        if begun and not over:
            active = launch
        if begun or chosen is None or micro(chosen.start) <= moment:
            chosen = launch  # the one that runs, else the next, else the last
        if begun and over:
            blamed.update(launch.blamed or (launch.suspects if launch.cause == "node" else ()))
    if active is not None:
        chosen = active
        used = frozenset(active.nodes) & nodes
    else:
        used = frozenset[str]()
    excluded = {period.what for period in exclusions if period.holds_at(moment)}
    lost = (nodes & (blamed | excluded)) - used
    if chosen is not None:
        meant = frozenset(chosen.nodes) & nodes
    else:
        meant = nodes
    return meant - lost, lost


Key = TypeVar("Key")
NO_ATTEMPT = ""  # the job's number of spans in which nothing was held


class AccountSpan(NamedTuple):
    """A stretch of time and the nodes that it counts for. Microseconds; `cause` is "" where nothing
    was lost.

    `held`: the nodes were the run's own then; else it would have wanted them. `is_wall`: False
    where another span of the same attempt counts the same time, for its other nodes.
    """

    start: int
    end: int
    bucket: Bucket
    nodes: int
    spare: int
    held: bool
    job_id: str
    launch: int
    cause: str
    is_wall: bool = True

    @property
    def node_micros(self) -> int:
        return (self.end - self.start) * self.nodes


class Amount(Record):
    """Node-microseconds of a bucket, how many of them were spares', how many were held, and
    wall-clock microseconds.
    """

    node_micros: int = 0
    spare_micros: int = 0
    held_micros: int = 0
    wall_micros: int = 0

    @property
    def node_hours(self) -> float:
        return self.node_micros / 3.6e9

    @property
    def held_hours(self) -> float:
        return self.held_micros / 3.6e9

    def plus(self, span: AccountSpan) -> Amount:
        """With one more span."""
        length = span.end - span.start
        return Amount(
            self.node_micros + span.node_micros,
            self.spare_micros + length * span.spare,
            self.held_micros + (span.node_micros if span.held else 0),
            self.wall_micros + (length if span.is_wall else 0),
        )


class Goodput(Record):
    """The account of a run from `begin` to `end`, in seconds since the epoch. Sums of `spans` are
    exact.
    """

    begin: float
    end: float
    spans: tuple[AccountSpan, ...]
    faults: tuple[Interruption, ...]
    read_errors: tuple[str, ...] = ()

    @property
    def total(self) -> Amount:
        return _sum(self.spans)

    @property
    def buckets(self) -> Mapping[Bucket, Amount]:
        """Every bucket, also those that are empty."""
        return {**{bucket: Amount() for bucket in Bucket}, **self.by(lambda span: span.bucket)}

    def by(self, key: Callable[[AccountSpan], Key]) -> Mapping[Key, Amount]:
        """The spans' sums by anything that they say, in the order of first appearance."""
        return {name: _sum(spans) for name, spans in self.grouped(key).items()}

    def grouped(self, key: Callable[[AccountSpan], Key]) -> Mapping[Key, list[AccountSpan]]:
        """The spans themselves, grouped."""
        groups: dict[Key, list[AccountSpan]] = defaultdict(list)
        for span in self.spans:
            groups[key(span)].append(span)
        return groups

    @property
    def useful_of_held(self) -> float | None:
        """Share of the held node-seconds that trained what was kept; None where nothing was held."""
        held = self.total.held_micros
        if held:
            return self.buckets[Bucket.USEFUL].held_micros / held
        return None

    @property
    def effective_time_ratio(self) -> float | None:
        """ETTR: wall-clock time that trained what was kept, over all wall-clock time since the
        first submission.
        """
        wall = micro(self.end) - micro(self.begin)
        if wall > 0:
            return min(1.0, self.buckets[Bucket.USEFUL].wall_micros / wall)
        return None

    @property
    def held_wall_seconds(self) -> float:
        """Wall-clock time in which nodes were held."""
        return sum(span.end - span.start for span in self.spans if span.held and span.is_wall) / 1e6

    @property
    def seconds_between_faults(self) -> float | None:
        """MTBF: wall-clock time with nodes held, over the number of faults; None where there was
        none.
        """
        if self.faults:
            return self.held_wall_seconds / len(self.faults)
        return None

    @property
    def node_hours_between_faults(self) -> float | None:
        """MTBF in node-hours held."""
        if self.faults:
            return self.total.held_hours / len(self.faults)
        return None

    @property
    def seconds_to_recover(self) -> float | None:
        """Mean time from the first sign of a fault until the training went on, over the faults
        where it did.
        """
        times = [
            fault.recovered - fault.time for fault in self.faults if fault.recovered is not None
        ]
        if times:
            return sum(times) / len(times)
        return None

    def since(self, moment: float) -> Goodput:
        """The account of what came after `moment` alone; what was lost is still known from the
        whole.
        """
        return self.between(moment, self.end)

    def between(self, begin: float, end: float) -> Goodput:
        """The part of the account from `begin` to `end`."""
        first, last = micro(max(begin, self.begin)), micro(min(end, self.end))
        return replace(
            self,
            begin=first / 1e6,
            end=max(first, last) / 1e6,
            spans=tuple(_clipped(self.spans, first, last)),
            faults=tuple(fault for fault in self.faults if first <= micro(fault.time) < last),
        )


def _sum(spans: Iterable[AccountSpan]) -> Amount:
    amount = Amount()
    for span in spans:
        amount = amount.plus(span)
    return amount


def _clipped(spans: Iterable[AccountSpan], first: int, last: int) -> Iterator[AccountSpan]:
    for span in spans:
        start, end = max(span.start, first), min(span.end, last)
        if start < end:
            yield span._replace(start=start, end=end)


# ----------------------------------------------------------------------------- the account
def account(history: History, now: float) -> Goodput:
    """Put every node-second from the first submission to `now` into its bucket.

    An attempt of which no one recorded the end, and which gave no sign of life for two minutes, is
    unknown from its last sign on until the next attempt began or its time limit passed.
    """
    moment = micro(now)
    settled = settle(known(history.attempts, ()), now)
    steps: dict[str, list[StepMark]] = defaultdict(list)
    for step in known(history.steps, ()):
        steps[step.job_id].append(step)
    usual = _usual(known(history.steps, ()))
    saved = sorted(micro(mark.created) for mark in known(history.checkpoints, ()))
    evaluated = sorted(map(micro, history.validations))
    pieces: list[list[AttemptSegment]] = []
    starts: list[list[Start]] = []
    for one in settled:
        own = steps[one.attempt.logged_as]
        marks = marks_of(one.attempt, own, saved=saved, validations=evaluated, end=one.unseen)
        starts.append(list(starts_of(marks)))
        found = list(pieces_of(one.attempt, marks, steps=own, end=one.unseen, usual=usual))
        if one.unseen < one.end:
            found.append(AttemptSegment(one.unseen, one.end, Bucket.UNKNOWN, 0))
        pieces.append(found)
    chain = LaunchChain(settled, starts)
    kept = _newest_step(history, settled)
    spans: list[AccountSpan] = []
    for index, told in enumerate(judged(pieces, chain, kept)):
        spans += _spread(settled[index], chain.named(index, told), history)
    idle = idle_of(history, [one.attempt for one in settled], [one.end for one in settled], moment)
    for gap in idle:
        if gap.bucket is Bucket.OPERATOR_PAUSE:
            cause = OPERATOR
        else:
            cause = chain.last_cause(gap.after)
        bucket = gap.bucket
        if isinstance(history.attempts, Unknown):
            bucket, cause = Bucket.UNKNOWN, UNSEEN
        spans.append(
            AccountSpan(
                gap.start,
                gap.end,
                bucket=bucket,
                nodes=gap.nodes,
                spare=0,
                held=False,
                job_id=NO_ATTEMPT,
                launch=0,
                cause=cause,
            )
        )
    spans = sorted(span for span in spans if span.start < span.end and span.nodes)
    begin = min((span.start for span in spans), default=moment)
    end = max((span.end for span in spans), default=moment)
    return Goodput(
        begin / 1e6,
        end / 1e6,
        spans=tuple(spans),
        faults=tuple(chain.faults()),
        read_errors=history.read_errors,
    )


def _usual(steps: Sequence[StepMark]) -> int | None:
    """The median time of an iteration, in microseconds: of the recent ones, for batches grow."""
    told = [step.seconds for step in steps[-1000:] if step.seconds is not None]
    if told:
        return micro(median(told))
    return None


def _newest_step(history: History, settled: Sequence[Settled]) -> int:
    """The step from which a training would go on: what is beyond it is lost. Far beyond all while
    something runs.
    """
    if not settled or isinstance(history.checkpoints, Unknown):
        return FAR
    last = settled[-1].attempt
    finished = isinstance(last.marker, EndMarker) and last.marker.reason == "finished"
    if finished or (last.ended is None and last.is_running is not False):
        return FAR
    found = [mark.step for mark in history.checkpoints]
    for one in settled:
        for word in (one.attempt.verdict, one.attempt.marker):
            if isinstance(word, AttemptVerdict | EndMarker) and word.checkpoint_step is not None:
                found.append(word.checkpoint_step)
    return max(found, default=0)


def _spread(
    one: Settled, pieces: Sequence[ClassifiedSegment], history: History
) -> Iterator[AccountSpan]:
    """An attempt's pieces times its nodes."""
    usages = node_usage_of(one.attempt, history.exclusions, one.begin, one.end)
    place = 0
    for piece in pieces:
        while place < len(usages) and usages[place].end <= piece.start:
            place += 1
        for usage in usages[place:]:
            if usage.start >= piece.end:
                break
            start, end = max(piece.start, usage.start), min(piece.end, usage.end)
            busy = usage.working + usage.spare
            job_id = one.attempt.job_id
            if busy:
                yield AccountSpan(
                    start,
                    end,
                    bucket=piece.bucket,
                    nodes=busy,
                    spare=usage.spare,
                    held=True,
                    job_id=job_id,
                    launch=piece.launch,
                    cause=piece.cause,
                )
            if usage.lost:
                yield AccountSpan(
                    start,
                    end,
                    bucket=Bucket.NODE_LOST,
                    nodes=usage.lost,
                    spare=0,
                    held=True,
                    job_id=job_id,
                    launch=piece.launch,
                    cause=NODE,
                    is_wall=not busy,
                )
