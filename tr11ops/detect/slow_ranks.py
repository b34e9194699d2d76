"""Which ranks compute for longer than others that do the same work, by their own records. Pure.

Ranks of one pipeline stage and tensor position do equal work, one in each replica; ranks of other places do not. Where
there is one replica alone, each is compared with its own first steps, and the change with that of all others. A
record leaves waiting out, so that those who wait for a slow rank are never taken for it. From when on a value is an
outlier is in `step_statistics`. One that is slower by less than a quarter is named only where it lasts: in each of the
last windows it was slower than 95 of 100 windows of other nodes' ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median, median_low

from msgspec.structs import replace

from tr11ops.detect.step_statistics import (
    ALWAYS_SLOW,
    ComparedRank,
    is_outlier_of_means,
    is_outlier_of_medians,
    is_outlier_of_records,
    scatter,
    step_ratio,
    without_longest,
)
from trainer.contract.compute_record import EVERY_STEPS, RECENT_STEPS, WINDOWS, ComputeTimes
from trainer.contract.record import Record

MIN_STEPS = 5  # of a record: fewer may be the first ones, in which kernels are chosen and compiled
CLEAR_FACTOR = 1.25  # what is slower than its peers by less must have been so in all of the last windows
MIN_WINDOWS = 6  # of ten steps
MIN_SECONDS = 600.0  # that they last: a machine that others use too is slow for minutes, now here, now there
USUAL_SHARE = 0.95  # of the windows of other nodes' ranks: so much slower than usual is nothing
PAST_PERCENT = 25.0  # of a rank without peers: stages do unlike work, and need not become longer alike
MAX_BEHIND = 20  # iterations of a record: who is further behind the newest has written none since

_Seconds = Callable[[ComputeTimes], float]  # of a step, from a record
_Judge = Callable[[Sequence[ComparedRank], float], list[bool]]


class SlowRank(Record):
    """A rank that takes `factor` times as long as is usual among `peers` ranks (itself included) of its place.

    `by_past`: it has no peers, and takes so many times as long as at first, by which the other ranks did not change.
    """

    times: ComputeTimes
    seconds: float  # of a step, over the last `steps`
    usual: float
    peers: int
    steps: int
    by_past: bool = False

    @property
    def factor(self) -> float:
        return self.seconds / self.usual


def windows_to_last(pace: float | None) -> int:
    """In how many windows of ten steps a small slowness must show, where a step takes `pace` seconds."""
    if not pace:
        return MIN_WINDOWS
    return max(MIN_WINDOWS, min(WINDOWS, math.ceil(MIN_SECONDS / (EVERY_STEPS * pace))))


def slow_ranks(records: Sequence[ComputeTimes], percent: float, windows: int = MIN_WINDOWS) -> tuple[SlowRank, ...]:
    """The ranks of one launch that are an outlier above their peers, by rank. `percent`: less than that is not slow.
    `windows`: see `windows_to_last`.

    The spread is that of all ranks around the median of their place: with two replicas a place alone tells none. Of
    two ranks the quicker one is what is usual.
    """
    newest = max((times.iteration for times in records), default=0)
    by_place: dict[tuple[int, int, int, int, int], list[ComputeTimes]] = {}  # and of the same steps: equal work
    for times in records:
        if times.stage is None or times.part is None or times.steps < MIN_STEPS or times.without_longest <= 0:
            continue  # no time in any step but one: there is nothing to compare
        if newest - times.iteration <= MAX_BEHIND:
            place = (times.stage, times.part, times.iteration, times.steps, len(times.recent))
            by_place.setdefault(place, []).append(times)
    found: dict[int, SlowRank] = {}
    alone = [peers[0] for peers in by_place.values() if len(peers) == 1]
    slow = _slow([peers for peers in by_place.values() if len(peers) > 1], percent)
    for entry in (*slow, *_slower_than_before(alone, max(percent, PAST_PERCENT))):
        known = found.get(entry.times.rank)
        found[entry.times.rank] = entry if known is None else max(known, entry, key=lambda each: each.factor)
    factors = {times.rank: _window_factors(times, peers) for peers in by_place.values() for times in peers}
    hosts = {times.rank: times.host for times in records}
    return tuple(found[rank] for rank in sorted(found) if _lasts(found[rank], factors, hosts, windows))


def _window_factors(own: ComputeTimes, peers: Sequence[ComputeTimes]) -> list[float]:
    """How many times as long as the usual one of its peers a rank took in each window that all have, newest first."""
    found = []
    for seconds, *others in zip(reversed(own.windows), *(reversed(peer.windows) for peer in peers), strict=False):
        usual = median_low(others)
        found.append(seconds / usual if usual > 0 else 1.0)
    return found


def _lasts(found: SlowRank, factors: dict[int, list[float]], hosts: dict[int, str], windows: int) -> bool:
    """Whether a rank is slow by much, or was so in each of the last windows. An earlier trainer's records have none."""
    if found.by_past or found.factor > CLEAR_FACTOR or not any(factors.values()):
        return True
    own = factors[found.times.rank][:windows]
    others = [each for rank, every in factors.items() if hosts[rank] != found.times.host for each in every]
    usual = sorted(others)[int(USUAL_SHARE * (len(others) - 1))] if others else 1.0
    return len(own) == windows and min(own) > usual


def _slower_than_before(alone: Sequence[ComputeTimes], percent: float) -> Iterator[SlowRank]:
    """Ranks without peers, in units of what was usual on each at first: in these all of them are peers."""
    by_steps: dict[tuple[int, int], list[ComputeTimes]] = {}
    given = {times.rank: times for times in alone}
    for times in alone:
        if times.usual and len(times.recent) >= MIN_STEPS:
            relative = replace(times, recent=tuple(seconds / times.usual for seconds in times.recent))
            by_steps.setdefault((times.iteration, len(times.recent)), []).append(relative)
    for found in _slow([peers for peers in by_steps.values() if len(peers) > 1], percent):
        times = given[found.times.rank]
        usual = times.usual or 0.0
        yield replace(found, times=times, seconds=found.seconds * usual, usual=found.usual * usual, by_past=True)


def _slow(places: Sequence[Sequence[ComputeTimes]], percent: float) -> Iterator[SlowRank]:
    """By every way to compare them. Records of an earlier version have no single steps: their mean alone counts."""
    old = [peers for peers in places if len(peers[0].recent) < MIN_STEPS]
    new = [peers for peers in places if len(peers[0].recent) >= MIN_STEPS]
    long = [peers for peers in new if len(peers[0].recent) >= EVERY_STEPS + MIN_STEPS]
    yield from _judged(old, 0, lambda times: times.without_longest, is_outlier_of_records, percent)
    yield from _judged(new, EVERY_STEPS, _last_mean, lambda found, _: [each.factor > ALWAYS_SLOW for each in found], 0)
    yield from _judged(long, RECENT_STEPS, _mean_of_halves, is_outlier_of_means, percent)
    for steps in (EVERY_STEPS, RECENT_STEPS):
        middle = _median_of(steps)
        yield from _judged(new, steps, middle, is_outlier_of_medians, percent)


def _judged(
    places: Sequence[Sequence[ComputeTimes]], steps: int, seconds: _Seconds, judge: _Judge, percent: float
) -> Iterator[SlowRank]:
    ranks, beside = list[SlowRank](), list[ComparedRank]()
    for peers in places:
        values = {times.rank: seconds(times) for times in peers}
        ordered = sorted((times for times in peers if values[times.rank] > 0), key=lambda times: values[times.rank])
        middle = (len(ordered) - 1) // 2
        for index, times in enumerate(ordered):
            if index == middle:  # it is the usual itself: its distance of zero says nothing of the spread
                continue
            usual, own = ordered[middle], times.recent[-steps:] if steps else ()
            others = usual.recent[-steps:] if steps else ()
            took, least = values[times.rank], values[usual.rank]
            if judge is is_outlier_of_medians:  # step by step: what is long for all at once is long for no one
                took = least * step_ratio(own, others)
            found = SlowRank(times, took, least, len(ordered), len(own) or times.steps)
            ranks.append(found)
            beside.append(ComparedRank(times.host, found.factor, scatter(own, others), _halves(own, others)))
    yield from (rank for rank, is_slow in zip(ranks, judge(beside, percent), strict=True) if is_slow)


def _last_mean(times: ComputeTimes) -> float:
    return without_longest(times.recent[-EVERY_STEPS:])


def _mean_of_halves(times: ComputeTimes) -> float:
    """Of the last 20 steps, the longest of each ten left out."""
    before, last = times.recent[:-EVERY_STEPS], times.recent[-EVERY_STEPS:]
    count = len(before) + len(last) - 2
    return (without_longest(before) * (len(before) - 1) + without_longest(last) * (len(last) - 1)) / count


def _median_of(steps: int) -> _Seconds:
    return lambda times: median(times.recent[-steps:])


def _halves(own: Sequence[float], usual: Sequence[float]) -> tuple[float, ...]:
    """How many times as long in the last ten steps, and in those before them."""
    found = []
    for part in (slice(-EVERY_STEPS), slice(-EVERY_STEPS, None)):
        if len(own[part]) >= MIN_STEPS and (seconds := without_longest(usual[part])) > 0:
            found.append(without_longest(own[part]) / seconds)
    return tuple(found)
