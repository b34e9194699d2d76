"""Which ranks compute for longer than others that do the same work, by their own records. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median, median_low

from msgspec.structs import replace

from tr11ops.base.robust import error_of_median, robust_sigma
from trainer.contract.compute_record import (
    EVERY_STEPS,
    MIN_STEPS,
    RECENT_STEPS,
    WINDOWS,
    ComputeTimes,
)
from trainer.contract.record import Record

# Which ranks compute for longer than others that do the same work, by their own records. Pure.
#
# Ranks of one pipeline stage and tensor position do equal work, one in each replica; ranks of other
# places do not. Where there is one replica alone, each is compared with its own first steps, and
# the change with that of all others. A record leaves waiting out, so that those who wait for a slow
# rank are never taken for it. From when on a value is an outlier is in `step_statistics`. One that
# is slower by less than a quarter is named only where it lasts: in each of the last windows it was
# slower than 95 of 100 windows of other nodes' ranks.

# When a rank's steps are longer than those of its peers by more than chance. Pure.
#
# Each rank has a factor x: its seconds of a step in units of those of the usual rank of its place.
# It is an outlier where
#
#     x - 1 > max(percent, SPREAD_FACTOR * s, NOISE_FACTOR * e + j), and always where x > 2
#
# `s` is how far ranks differ: 1.4826 * median|x - 1| of the ranks of the other nodes, times 1 + 1/n
# for n of them, since of few it is hardly known. (1.4826 * MAD: the standard deviation of a normal
# distribution; so is 1.2533, the error of a median in units of that of a mean.) `e` is the error of
# the value itself, from r, the logarithms of single steps' ratios to the usual rank's, less their
# median: what all ranks have in common is not in them.
#
# - Of medians (of the ratios) e = 1.2533 * 1.4826 * median|r| / sqrt(steps), j = 0, and
#   NOISE_FACTOR * e and percent add up as squares do: a rank that always is slow. Four steps of
#   five must be above half of the bound, since MAD knows nothing of steps that are long now and
#   then on every rank.
# - Of means, e = sqrt(v / steps): a rank that is slow for a part of the time. v is the mean of r^2
#   over the ranks of other nodes, or twice that of the negative ones of all ranks where that is
#   larger: a slow node's own long steps do not hide it, and long steps that come everywhere accuse
#   no one. Long steps are rare and no normal distribution, so that two as long as the longest on
#   other nodes are allowed besides, j = 2 * max(exp(r) - 1) / steps (as in Bernstein's inequality);
#   and both halves of the steps must be above half of the bound: a burst is over, a slow node is
#   not.
#
# Simulated with steps that scatter by 0.5 to 10 %, ranks that differ by 0.3 to 0.5 %, and one step
# in 200 that takes 30 % longer: less than one false alarm in 10,000 windows of 2 to 16 ranks (the
# soak test of `test_slow_ranks`).

# times the error: a run has hundreds of ranks, and the largest of many is far out by chance
NOISE_FACTOR = 6.0
# times what ranks differ by: that is not chance, and who differs by less than percent is not slow
SPREAD_FACTOR = 4.0
FEW = 4  # ranks whose spread is hardly known, where no other node has any
LONG_STEPS = 2  # that may be chance, beside the longest one of each ten
ALWAYS_SLOW = 2.0  # times its peers' time, however much the ranks differ anyway


class ComparedRank(Record):
    """A rank beside the usual one of its place: factor, r of single steps, and the factors of both
    halves of them.
    """

    host: str
    factor: float
    scatter: tuple[float, ...] = ()
    halves: tuple[float, ...] = ()


def is_outlier_of_records(found: Sequence[ComparedRank], percent: float) -> list[bool]:
    """Of means alone: the spread of all ranks is all that is known."""
    spread = _spread_of_all(found)
    return [each.factor > _bound(percent, NOISE_FACTOR * spread) for each in found]


def is_twice_as_slow(found: Sequence[ComparedRank], _percent: float) -> list[bool]:
    """Of the mean of few steps: what is an outlier however much the ranks differ."""
    return [each.factor > ALWAYS_SLOW for each in found]


def is_outlier_of_medians(found: Sequence[ComparedRank], percent: float) -> list[bool]:
    away = [ratio for each in found for ratio in each.scatter]
    steps = max((len(each.scatter) for each in found), default=1)
    error = 0.0
    if away:
        error = error_of_median(robust_sigma(away), steps)
    hosts = {each.host for each in found}
    chance = math.hypot(percent / 100.0, NOISE_FACTOR * error)
    bounds = {
        host: _bound(percent, max(SPREAD_FACTOR * _spread_beside(found, host), chance))
        for host in hosts
    }
    return [
        each.factor > ALWAYS_SLOW
        or (each.factor > bounds[each.host] and _most_steps(each) - 1 > (bounds[each.host] - 1) / 2)
        for each in found
    ]


def is_outlier_of_means(found: Sequence[ComparedRank], percent: float) -> list[bool]:
    bounds = {host: _bound_of_means(found, host, percent) for host in {each.host for each in found}}
    return [
        each.factor > ALWAYS_SLOW
        or (
            each.factor > bounds[each.host]
            and len(each.halves) == 2
            and min(each.halves) - 1 > (bounds[each.host] - 1) / 2
        )
        for each in found
    ]


def without_longest(steps: Sequence[float]) -> float:
    """The mean of all but the longest: a single hiccup is no slowness. At least two steps."""
    return (math.fsum(steps) - max(steps)) / (len(steps) - 1)


def step_ratio(own: Sequence[float], usual: Sequence[float]) -> float:
    """How many times as long this rank takes for the middle one of its steps; zero where none can
    be compared.
    """
    ratios = _logarithms(own, usual)
    if ratios:
        return math.exp(median(ratios))
    return 0.0


def scatter(own: Sequence[float], usual: Sequence[float]) -> tuple[float, ...]:
    """r of each step that both took any time for."""
    ratios = _logarithms(own, usual)
    middle = 0.0
    if ratios:
        middle = median(ratios)
    return tuple(ratio - middle for ratio in ratios)


def _logarithms(own: Sequence[float], usual: Sequence[float]) -> list[float]:
    return [
        math.log(one / other)
        for one, other in zip(own, usual, strict=True)
        if one > 0 and other > 0
    ]


def _most_steps(found: ComparedRank) -> float:
    """The factor that four of five single steps reach. `found.factor` is that of the middle one."""
    return found.factor * math.exp(sorted(found.scatter)[len(found.scatter) // 5])


def _bound(percent: float, uncertainty: float) -> float:
    return min(1.0 + max(percent / 100.0, uncertainty), ALWAYS_SLOW)


def _bound_of_means(found: Sequence[ComparedRank], host: str, percent: float) -> float:
    others = [ratio for each in found if each.host != host for ratio in each.scatter]
    below = [min(ratio, 0.0) for each in found for ratio in each.scatter]
    steps = max((len(each.scatter) for each in found), default=1)
    variance = max(
        fmean(ratio * ratio for ratio in others) if others else 0.0,
        2 * fmean(each * each for each in below),
    )
    longest = max([math.expm1(-min(below)), *(math.expm1(ratio) for ratio in others)])
    chance = NOISE_FACTOR * math.sqrt(variance / steps) + LONG_STEPS * longest / steps
    return _bound(percent, max(SPREAD_FACTOR * _spread_beside(found, host), chance))


def _spread_beside(found: Sequence[ComparedRank], host: str) -> float:
    """How far the ranks of other nodes are from the usual ones; where there are none, all ranks."""
    others = [each.factor - 1.0 for each in found if each.host != host]
    if others:
        return robust_sigma(others) * (1 + 1 / len(others))
    return _spread_of_all(found)


def _spread_of_all(found: Sequence[ComparedRank]) -> float:
    away = [each.factor - 1.0 for each in found]
    if away:
        return robust_sigma(away) * (1 + FEW / len(away))
    return 0.0


# what is slower than its peers by less must have been so in all of the last windows
CLEAR_FACTOR = 1.25
MIN_WINDOWS = 6  # of ten steps
# that they last: a machine that others use too is slow for minutes, now here, now there
MIN_SECONDS = 600.0
USUAL_SHARE = 0.95  # of the windows of other nodes' ranks: so much slower than usual is nothing
# of a rank without peers: stages do unlike work, and need not become longer alike
PAST_PERCENT = 25.0
MAX_BEHIND = 20  # iterations of a record: who is further behind the newest has written none since

_Seconds = Callable[[ComputeTimes], float]  # of a step, from a record
_Judge = Callable[[Sequence[ComparedRank], float], list[bool]]


class SlowRank(Record):
    """A rank that takes `factor` times as long as is usual among `peers` ranks (itself included) of
    its place.

    `by_past`: it has no peers, and takes so many times as long as at first, by which the other
    ranks did not change. `lasts`: by much, or in each of the last windows; else it is no verdict.
    """

    times: ComputeTimes
    seconds: float  # of a step, over the last `steps`
    usual: float
    peers: int
    steps: int
    by_past: bool = False
    lasts: bool = True

    @property
    def factor(self) -> float:
        return self.seconds / self.usual


def windows_to_last(pace: float | None) -> int:
    """In how many windows of ten steps a small slowness must show, where a step takes `pace`
    seconds.
    """
    if not pace:
        return MIN_WINDOWS
    return max(MIN_WINDOWS, min(WINDOWS, math.ceil(MIN_SECONDS / (EVERY_STEPS * pace))))


def slow_ranks(
    records: Sequence[ComputeTimes], percent: float, windows: int = MIN_WINDOWS
) -> tuple[SlowRank, ...]:
    """The ranks of one launch that are an outlier above their peers, and last, by rank. `percent`:
    less than that is not slow. `windows`: see `windows_to_last`.
    """
    return tuple(found for found in outlying_ranks(records, percent, windows) if found.lasts)


def outlying_ranks(
    records: Sequence[ComputeTimes], percent: float, windows: int = MIN_WINDOWS
) -> tuple[SlowRank, ...]:
    """As `slow_ranks`, with those of which no one knows whether they last.

    The spread is that of all ranks around the median of their place: with two replicas a place
    alone tells none. Of two ranks the quicker one is what is usual.
    """
    newest = max((times.iteration for times in records), default=0)
    # and of the same steps: equal work
    by_place: dict[tuple[int, int, int, int, int], list[ComputeTimes]] = {}
    for times in records:
        if (
            times.stage is None
            or times.part is None
            or not times.can_be_judged
            or times.without_longest <= 0
        ):
            continue  # no time in any step but one: there is nothing to compare
        if newest - times.iteration <= MAX_BEHIND:
            place = (times.stage, times.part, times.iteration, times.steps, len(times.recent))
            by_place.setdefault(place, []).append(times)
    found: dict[int, SlowRank] = {}
    alone = [peers[0] for peers in by_place.values() if len(peers) == 1]
    slow = _slow([peers for peers in by_place.values() if len(peers) > 1], percent)
    for entry in (*slow, *_slower_than_before(alone, max(percent, PAST_PERCENT))):
        known = found.get(entry.times.rank)
        if known is None:
            found[entry.times.rank] = entry
        else:
            found[entry.times.rank] = max(known, entry, key=lambda each: each.factor)
    factors = {
        times.rank: _window_factors(times, peers) for peers in by_place.values() for times in peers
    }
    hosts = {times.rank: times.host for times in records}
    return tuple(
        replace(found[rank], lasts=_lasts(found[rank], factors, hosts, windows))
        for rank in sorted(found)
    )


def _window_factors(own: ComputeTimes, peers: Sequence[ComputeTimes]) -> list[float]:
    """How many times as long as the usual one of its peers a rank took in each window that all
    have, newest first.
    """
    found = []
    for seconds, *others in zip(
        reversed(own.windows), *(reversed(peer.windows) for peer in peers), strict=False
    ):
        usual = median_low(others)
        found.append(seconds / usual if usual > 0 else 1.0)
    return found


def _lasts(
    found: SlowRank, factors: dict[int, list[float]], hosts: dict[int, str], windows: int
) -> bool:
    """Whether a rank is slow by much, or was so in each of the last windows. An earlier trainer's
    records have none.
    """
    if found.by_past or found.factor > CLEAR_FACTOR or not any(factors.values()):
        return True
    own = factors[found.times.rank][:windows]
    others = [
        each for rank, every in factors.items() if hosts[rank] != found.times.host for each in every
    ]
    if others:
        usual = sorted(others)[int(USUAL_SHARE * (len(others) - 1))]
    else:
        usual = 1.0
    return len(own) == windows and min(own) > usual


def _slower_than_before(alone: Sequence[ComputeTimes], percent: float) -> Iterator[SlowRank]:
    """Ranks without peers, in units of what was usual on each at first: in these all of them are
    peers.
    """
    by_steps: dict[tuple[int, int], list[ComputeTimes]] = {}
    given = {times.rank: times for times in alone}
    for times in alone:
        if times.usual and len(times.recent) >= MIN_STEPS:
            relative = replace(
                times, recent=tuple(seconds / times.usual for seconds in times.recent)
            )
            by_steps.setdefault((times.iteration, len(times.recent)), []).append(relative)
    for found in _slow([peers for peers in by_steps.values() if len(peers) > 1], percent):
        times = given[found.times.rank]
        usual = times.usual or 0.0
        yield replace(
            found,
            times=times,
            seconds=found.seconds * usual,
            usual=found.usual * usual,
            by_past=True,
        )


def _slow(places: Sequence[Sequence[ComputeTimes]], percent: float) -> Iterator[SlowRank]:
    """By every way to compare them. Records of an earlier version have no single steps: their mean
    alone counts.
    """
    old = [peers for peers in places if len(peers[0].recent) < MIN_STEPS]
    new = [peers for peers in places if len(peers[0].recent) >= MIN_STEPS]
    long = [peers for peers in new if len(peers[0].recent) >= EVERY_STEPS + MIN_STEPS]
    yield from _judged(
        old,
        0,
        seconds=lambda times: times.without_longest,
        judge=is_outlier_of_records,
        percent=percent,
    )
    yield from _judged(
        new,
        EVERY_STEPS,
        seconds=_last_mean,
        judge=is_twice_as_slow,
        percent=percent,
    )
    yield from _judged(
        long, RECENT_STEPS, seconds=_mean_of_halves, judge=is_outlier_of_means, percent=percent
    )
    for steps in (EVERY_STEPS, RECENT_STEPS):
        middle = _median_of(steps)
        yield from _judged(new, steps, seconds=middle, judge=is_outlier_of_medians, percent=percent)


def _judged(
    places: Sequence[Sequence[ComputeTimes]],
    steps: int,
    seconds: _Seconds,
    judge: _Judge,
    percent: float,
) -> Iterator[SlowRank]:
    ranks, beside = list[SlowRank](), list[ComparedRank]()
    for peers in places:
        values = {times.rank: seconds(times) for times in peers}
        ordered = sorted(
            (times for times in peers if values[times.rank] > 0),
            key=lambda times: values[times.rank],
        )
        middle = (len(ordered) - 1) // 2
        for index, times in enumerate(ordered):
            # it is the usual itself: its distance of zero says nothing of the spread
            if index == middle:
                continue
            usual, own = ordered[middle], times.recent[-steps:] if steps else ()
            if steps:
                others = usual.recent[-steps:]
            else:
                others = ()
            took, least = values[times.rank], values[usual.rank]
            # step by step: what is long for all at once is long for no one
            if judge is is_outlier_of_medians:
                took = least * step_ratio(own, others)
            found = SlowRank(
                times, took, usual=least, peers=len(ordered), steps=len(own) or times.steps
            )
            ranks.append(found)
            beside.append(
                ComparedRank(times.host, found.factor, scatter(own, others), _halves(own, others))
            )
    yield from (
        rank for rank, is_slow in zip(ranks, judge(beside, percent), strict=True) if is_slow
    )


def _last_mean(times: ComputeTimes) -> float:
    return without_longest(times.recent[-EVERY_STEPS:])


def _mean_of_halves(times: ComputeTimes) -> float:
    """Of the last 20 steps, the longest of each ten left out."""
    before, last = times.recent[:-EVERY_STEPS], times.recent[-EVERY_STEPS:]
    count = len(before) + len(last) - 2
    return (
        without_longest(before) * (len(before) - 1) + without_longest(last) * (len(last) - 1)
    ) / count


def _median_of(steps: int) -> _Seconds:
    return lambda times: median(times.recent[-steps:])


def _halves(own: Sequence[float], usual: Sequence[float]) -> tuple[float, ...]:
    """How many times as long in the last ten steps, and in those before them."""
    found = []
    for part in (slice(-EVERY_STEPS), slice(-EVERY_STEPS, None)):
        if len(own[part]) >= MIN_STEPS and (seconds := without_longest(usual[part])) > 0:
            found.append(without_longest(own[part]) / seconds)
    return tuple(found)
