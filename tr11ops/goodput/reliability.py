"""How often a run is interrupted, and what follows for saves and spares. Pure formulas; times in seconds.

Young: A first order approximation to the optimum checkpoint interval, CACM 17 (1974). Daly: A higher order estimate of
the optimum checkpoint interval for restart dumps, FGCS 22 (2006), equation 37.
"""

from __future__ import annotations

import math

from tr11ops.base.units import counted
from trainer.contract.record import Record

PRIOR_GPU_HOURS = 64_500.0  # between failures: BLOOM lost about one of 384 GPUs a week
FEWEST_FAULTS = 5  # below this a run's own count says too little
CONFIDENCE = 0.9


class FaultRate(Record):
    """Mean time between faults. `low` and `high` bound it with 90 % confidence; `high` is infinite without a fault.

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
    """Young's interval refined for saves that are not short against the time between faults; `mtbf` at most."""
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
    """The exact interval for the mean time between faults that come independently, `faults` in `observed` seconds."""
    tail = (1 - CONFIDENCE) / 2
    most = _mean_with_tail(faults, tail)
    fewest = _mean_with_tail(faults - 1, 1 - tail) if faults else 0.0
    return observed / most, observed / fewest if fewest else math.inf


def _mean_with_tail(count: int, tail: float) -> float:
    """The mean of the Poisson distribution that gives at most `count` with probability `tail`."""
    low, high = 0.0, 2.0 * count + 20.0
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
    """The rate to plan with: `given` by a person, else the run's own; where that is too few, what BLOOM met.

    A few faults are enough to rule BLOOM's rate out: where it lies outside of what they allow, their own is taken.
    """
    low, high = bounds_of_mtbf(observed, faults) if observed > 0 else (0.0, math.inf)
    if given is not None:
        return FaultRate(given, low, high, faults, "as given")
    if faults >= FEWEST_FAULTS and observed > 0:
        return FaultRate(observed / faults, low, high, faults, "measured")
    prior = PRIOR_GPU_HOURS * 3600 / max(1, gpus)
    if faults and observed > 0 and not low <= prior <= high:
        times = counted(faults, "fault")
        return FaultRate(
            observed / faults, low, high, faults, f"measured from {times} alone, which rule out BLOOM's rate"
        )
    few = "no fault" if not faults else f"only {counted(faults, 'fault')}"
    source = f"assumed: {few} yet, so BLOOM's {PRIOR_GPU_HOURS:,.0f} GPU-hours per failure are taken"
    return FaultRate(prior, low, high, faults, source)
