"""When a rank's steps are longer than those of its peers by more than chance. Pure.

Each rank has a factor x: its seconds of a step in units of those of the usual rank of its place. It is an outlier where

    x - 1 > max(percent, SPREAD_FACTOR * s, NOISE_FACTOR * e + j), and always where x > 2

`s` is how far ranks differ: 1.4826 * median|x - 1| of the ranks of the other nodes, times 1 + 1/n for n of them, since
of few it is hardly known. (1.4826 * MAD: the standard deviation of a normal distribution; so is 1.2533, the error of a
median in units of that of a mean.) `e` is the error of the value itself, from r, the logarithms of single steps' ratios
to the usual rank's, less their median: what all ranks have in common is not in them.

- Of medians (of the ratios) e = 1.2533 * 1.4826 * median|r| / sqrt(steps), j = 0, and NOISE_FACTOR * e and percent add
  up as squares do: a rank that always is slow. Four steps of five must be above half of the bound, since MAD knows
  nothing of steps that are long now and then on every rank.
- Of means, e = sqrt(v / steps): a rank that is slow for a part of the time. v is the mean of r^2 over the ranks of
  other nodes, or twice that of the negative ones of all ranks where that is larger: a slow node's own long steps do not
  hide it, and long steps that come everywhere accuse no one. Long steps are rare and no normal distribution, so that
  two as long as the longest on other nodes are allowed besides, j = 2 * max(exp(r) - 1) / steps (as in Bernstein's
  inequality); and both halves of the steps must be above half of the bound: a burst is over, a slow node is not.

Simulated with steps that scatter by 0.5 to 10 %, ranks that differ by 0.3 to 0.5 %, and one step in 200 that takes 30 %
longer: less than one false alarm in 10,000 windows of 2 to 16 ranks (the soak test of `test_slow_ranks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from tr11ops.base.robust import error_of_median, robust_sigma
from trainer.contract.record import Record

NOISE_FACTOR = 6.0  # times the error: a run has hundreds of ranks, and the largest of many is far out by chance
SPREAD_FACTOR = 4.0  # times what ranks differ by: that is not chance, and who differs by less than percent is not slow
FEW = 4  # ranks whose spread is hardly known, where no other node has any
LONG_STEPS = 2  # that may be chance, beside the longest one of each ten
ALWAYS_SLOW = 2.0  # times its peers' time, however much the ranks differ anyway


class ComparedRank(Record):
    """A rank beside the usual one of its place: factor, r of single steps, and the factors of both halves of them."""

    host: str
    factor: float
    scatter: tuple[float, ...] = ()
    halves: tuple[float, ...] = ()


def is_outlier_of_records(found: Sequence[ComparedRank], percent: float) -> list[bool]:
    """Of means alone: the spread of all ranks is all that is known."""
    spread = _spread_of_all(found)
    return [each.factor > _bound(percent, NOISE_FACTOR * spread) for each in found]


def is_outlier_of_medians(found: Sequence[ComparedRank], percent: float) -> list[bool]:
    away = [ratio for each in found for ratio in each.scatter]
    steps = max((len(each.scatter) for each in found), default=1)
    error = error_of_median(robust_sigma(away), steps) if away else 0.0
    hosts = {each.host for each in found}
    chance = math.hypot(percent / 100.0, NOISE_FACTOR * error)
    bounds = {host: _bound(percent, max(SPREAD_FACTOR * _spread_beside(found, host), chance)) for host in hosts}
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
    """How many times as long this rank takes for the middle one of its steps; zero where none can be compared."""
    ratios = _logarithms(own, usual)
    return math.exp(median(ratios)) if ratios else 0.0


def scatter(own: Sequence[float], usual: Sequence[float]) -> tuple[float, ...]:
    """r of each step that both took any time for."""
    ratios = _logarithms(own, usual)
    middle = median(ratios) if ratios else 0.0
    return tuple(ratio - middle for ratio in ratios)


def _logarithms(own: Sequence[float], usual: Sequence[float]) -> list[float]:
    return [math.log(one / other) for one, other in zip(own, usual, strict=True) if one > 0 and other > 0]


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
        fmean(ratio * ratio for ratio in others) if others else 0.0, 2 * fmean(each * each for each in below)
    )
    longest = max([math.expm1(-min(below)), *(math.expm1(ratio) for ratio in others)])
    chance = NOISE_FACTOR * math.sqrt(variance / steps) + LONG_STEPS * longest / steps
    return _bound(percent, max(SPREAD_FACTOR * _spread_beside(found, host), chance))


def _spread_beside(found: Sequence[ComparedRank], host: str) -> float:
    """How far the ranks of other nodes are from the usual ones; where there are none, all ranks."""
    others = [each.factor - 1.0 for each in found if each.host != host]
    return robust_sigma(others) * (1 + 1 / len(others)) if others else _spread_of_all(found)


def _spread_of_all(found: Sequence[ComparedRank]) -> float:
    away = [each.factor - 1.0 for each in found]
    return robust_sigma(away) * (1 + FEW / len(away)) if away else 0.0
