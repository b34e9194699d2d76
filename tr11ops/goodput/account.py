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
from contextlib import suppress
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
from trainer.contract.attempt import EndMarker
from trainer.contract.record import Record

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
    spare: int = 0
    held: bool = False
    job_id: str = NO_ATTEMPT
    launch: int = 0
    cause: str = ""
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
    exact. Where it is not known what was saved (`kept_is_known`), all that was trained counts as useful.
    """

    begin: float
    end: float
    spans: tuple[AccountSpan, ...]
    faults: tuple[Interruption, ...]
    read_errors: tuple[str, ...] = ()
    kept_is_known: bool = True

    @property
    def useful_did(self) -> str:
        """What the useful share of the time did, in words."""
        if self.kept_is_known:
            return "trained what was kept"
        return "trained (kept: not known)"

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
        first = micro(max(begin, self.begin))
        last = micro(min(end, self.end))
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
        start = max(span.start, first)
        end = min(span.end, last)
        if start < end:
            yield span._replace(start=start, end=end)


# ----------------------------------------------------------------------------- the account
def account(history: History, now: float) -> Goodput:
    """Put every node-second from the first submission to `now` into its bucket.

    An attempt of which no one recorded the end, and which gave no sign of life for two minutes, is
    unknown from its last sign on until the next attempt began or its time limit passed.
    """
    settled = settle(known(history.attempts, ()), now)
    moment = micro(now)
    if history.ends_with_its_jobs:
        moment = max((one.end for one in settled), default=moment)
    steps: dict[str, list[StepMark]] = defaultdict(list)
    for step in known(history.steps, ()):
        steps[step.job_id].append(step)
    usual = _usual(known(history.steps, ()))
    pieces: list[list[AttemptSegment]] = []
    starts: list[list[Start]] = []
    for one in settled:
        own = steps[one.attempt.logged_as]
        marks = marks_of(one.attempt, own, one.unseen)
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
    spans += _Idle(history, chain).spans(moment)
    spans = sorted(span for span in spans if span.start < span.end and span.nodes)
    begin = min((span.start for span in spans), default=moment)
    end = max((span.end for span in spans), default=moment)
    return Goodput(
        begin / 1e6,
        end / 1e6,
        spans=tuple(spans),
        faults=tuple(chain.faults()),
        read_errors=history.read_errors,
        kept_is_known=not isinstance(history.checkpoints, Unknown),
    )


def held_micros(attempts: Sequence[AttemptHistory], now: float) -> int:
    """The node-microseconds that attempts have held until `now`, as `account` sums them up."""
    settled = settle(attempts, now)
    return sum((one.end - one.begin) * len(set(one.attempt.nodes)) for one in settled)


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
    if _reason(last) == "finished" or (last.ended is None and last.is_running is not False):
        return FAR
    found = [mark.step for mark in history.checkpoints]
    for one in settled:
        for word in (one.attempt.verdict, one.attempt.marker):
            if isinstance(word, AttemptVerdict | EndMarker) and word.checkpoint_step is not None:
                found.append(word.checkpoint_step)
    return max(found, default=0)


def _reason(attempt: AttemptHistory) -> str:
    """The trainer's own word on the end, "" where there is none."""
    if isinstance(attempt.marker, EndMarker):
        return attempt.marker.reason
    return ""


# ----------------------------------------------------------------------------- nodes that were held
def _spread(
    one: Settled, pieces: Sequence[AttemptSegment], history: History
) -> Iterator[AccountSpan]:
    """An attempt's pieces times its nodes."""
    usages = _node_usage(one, history.exclusions)
    place = 0
    for piece in pieces:
        while place < len(usages) and usages[place].end <= piece.start:
            place += 1
        for usage in usages[place:]:
            if usage.start >= piece.end:
                break
            span = AccountSpan(
                max(piece.start, usage.start),
                min(piece.end, usage.end),
                bucket=piece.bucket,
                nodes=usage.busy,
                spare=usage.spare,
                held=True,
                job_id=one.attempt.job_id,
                launch=piece.launch,
                cause=piece.cause,
            )
            if usage.busy:
                yield span
            if usage.lost:
                yield span._replace(
                    bucket=Bucket.NODE_LOST,
                    nodes=usage.lost,
                    spare=0,
                    cause=NODE,
                    is_wall=not usage.busy,
                )


class NodeUsage(NamedTuple):
    """From `start` to `end` (microseconds): nodes that are not lost, how many of them are held in
    reserve, and nodes lost.
    """

    start: int
    end: int
    busy: int
    spare: int
    lost: int


def _node_usage(one: Settled, exclusions: Sequence[Period]) -> list[NodeUsage]:
    """The attempt's nodes from its begin to its end, without a gap; the numbers always add up to
    all nodes.

    Between two launches the nodes of the next one count as working. Lost is a node that a launch's
    end was blamed on, or that was excluded, unless a later launch uses it.
    """
    nodes = frozenset(one.attempt.nodes)
    launches = launches_of(one.attempt)
    near = [
        period for period in exclusions if period.what in nodes and micro(period.start) < one.end
    ]
    moments = {one.begin, one.end} | edges(launches) | edges(near)
    found: list[NodeUsage] = []
    for start, until in pairwise(sorted(at for at in moments if one.begin <= at <= one.end)):
        excluded = {period.what for period in near if period.holds_at(start)}
        working, lost = _working_and_lost(start, nodes, launches, excluded)
        counts = (len(nodes - lost), len(nodes - lost - working), len(lost))
        if found and found[-1][2:] == counts:
            found[-1] = found[-1]._replace(end=until)
        else:
            found.append(NodeUsage(start, until, *counts))
    return found


def _working_and_lost(
    moment: int, nodes: frozenset[str], launches: Sequence[LaunchRecord], excluded: set[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes that worked and those that were lost at one moment."""
    active = chosen = None
    gone = set(excluded)
    for launch in launches:
        begun = micro(launch.start) <= moment
        over = launch.end is not None and micro(launch.end) <= moment
        if begun and not over:
            active = launch
        if begun or chosen is None or micro(chosen.start) <= moment:
            chosen = launch  # the one that runs, else the next, else the last
        if begun and over:
            gone.update(launch.blamed or (launch.suspects if launch.cause == "node" else ()))
    if active is not None:
        chosen = active
        gone.difference_update(active.nodes)
    lost = nodes & gone
    if chosen is None:
        return nodes - lost, lost
    return (nodes & set(chosen.nodes)) - lost, lost


# ----------------------------------------------------------------------------- none were held
STOPPED = frozenset({"kill-switch", "pause"})


class _Idle:
    """The time in which a run held no nodes: did it wait for them, did someone stop it, or could
    nothing start?
    """

    def __init__(self, history: History, chain: LaunchChain) -> None:
        self._history = history
        self._chain = chain
        self._submissions = known(history.submissions, ())
        self._attempts = [one.attempt for one in chain.settled]

    def spans(self, now: int) -> Iterator[AccountSpan]:
        """All time from the first submission to `now` in which no attempt held nodes.

        A run whose last attempt has finished the training is over then, unless more was submitted
        since.
        """
        submitted = [micro(entry.time) for entry in self._submissions]
        moments = [*submitted, *(one.begin for one in self._chain.settled)]
        if not moments:
            return
        at = min(moments)
        last = -1
        for index, one in enumerate(self._chain.settled):
            if one.begin > at:
                yield from self._cut(at, one.begin, last)
            if one.end >= at or last < 0:
                last = index
            at = max(at, one.end)
        if at < now and last >= 0 and _reason(self._attempts[last]) == "finished":
            at = min((moment for moment in submitted if moment > at), default=now)
        nothing_waits = self._history.waits is False and bool(self._attempts)
        for span in self._cut(at, now, last) if at < now else ():
            if span.bucket is Bucket.QUEUE and nothing_waits:
                yield span._replace(bucket=Bucket.RESTART_GAP)
            else:
                yield span

    def _cut(self, start: int, end: int, last: int) -> Iterator[AccountSpan]:
        """One idle stretch behind the attempt at place `last` (-1: none), cut where a submission, a
        stop or a hold begins or ends.
        """
        history = self._history
        moments = {start, end, *edges((*history.pauses, *history.holds))}
        moments |= {micro(entry.time) for entry in self._submissions}
        for begin, until in pairwise(sorted(at for at in moments if start <= at <= end)):
            bucket = self._bucket(begin, last)
            cause = self._chain.last_cause(last)
            if bucket is Bucket.OPERATOR_PAUSE:
                cause = OPERATOR
            elif bucket is Bucket.UNKNOWN:
                cause = UNSEEN
            yield AccountSpan(begin, until, bucket, self._wanted(begin, last), cause=cause)

    def _bucket(self, moment: int, last: int) -> Bucket:
        history = self._history
        if isinstance(history.attempts, Unknown):
            return Bucket.UNKNOWN
        if any(period.holds_at(moment) for period in history.pauses):
            return Bucket.OPERATOR_PAUSE
        stops = (*history.pauses, *history.holds)
        let_go = [micro(entry.time) for entry in self._submissions]
        let_go += [micro(period.end) for period in stops if period.end is not None]
        let_go_last = max((at for at in let_go if at <= moment), default=-1)
        if last >= 0 and let_go_last < micro(self._attempts[last].last_sign):
            before = self._attempts[last]
            by_hand = before.kind == "foreground" and _reason(before) == "signal"
            if _reason(before) in STOPPED or by_hand:
                return (
                    Bucket.OPERATOR_PAUSE
                )  # anyone who set the switch by hand left no other trace
        if any(period.holds_at(moment) for period in history.holds):
            return Bucket.RESTART_GAP
        begun = self._attempts[: last + 1]
        if any(
            micro(entry.time) <= moment and _left(entry, begun) > 0 for entry in self._submissions
        ):
            return Bucket.QUEUE
        return Bucket.RESTART_GAP

    def _wanted(self, moment: int, last: int) -> int:
        """The nodes that the newest submission asked for; without one, those of the attempt before."""
        asked = [entry.nodes for entry in self._submissions if micro(entry.time) <= moment]
        if asked:
            return asked[-1]
        if self._attempts:
            return len(set(self._attempts[max(last, 0)].nodes))
        return 0


def _left(entry: Submission, begun: Sequence[AttemptHistory]) -> int:
    """Tasks of a submission that have not started."""
    tasks = 1
    if entry.array:
        with suppress(CardError):
            tasks = len(parse_attempts(entry.array))
    return tasks - sum(attempt.submission == entry.tag for attempt in begun)
