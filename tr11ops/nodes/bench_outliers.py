"""Which nodes are slower than nodes of the same hardware, by the medians of their samples. Pure.

Of each measurement every node has one value, the median of its samples: one noisy sample tells nothing. With d_i =
ln(value_i / median of all values), a node is slow where

    d_i < -(1 + FEW / n) * max(FLOOR, NOISE_FACTOR * s_i),   s_i = max(1.4826 * median|d|, e_i, median e)
    e_i = 1.2533 * 1.4826 * MAD of the node's own samples / sqrt(r)

1.4826 * MAD estimates the standard deviation of a normal distribution without the outliers that are looked for (Hampel,
"The influence curve and its role in robust estimation", JASA 1974; Iglewicz and Hoaglin, "How to detect and handle
outliers", 1993, take 3.5 of it for a single value). Here one fleet has hundreds of values, and of few nodes the MAD
itself is hardly known: hence the larger factor, and the growth for small n. `e_i` is the standard error of a median of
r samples (1.2533 is sqrt(pi / 2)): a node whose samples scatter is not known well, and two nodes that agree by chance
must not make a third an outlier. FLOOR: nodes that differ by less are equal, however little they scatter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tr11ops.base.robust import error_of_median, robust_sigma
from tr11ops.nodes.bench_answer import NodeAnswer

FLOOR = 0.05  # of the logarithm: about 5 %
NOISE_FACTOR = 6.0
FEW = 4  # nodes whose spread is hardly known
MIN_PEERS = 3  # of two nodes no one knows which is the usual one
FINE, SLOW, UNKNOWN = "fine", "slow", "unknown"


@dataclass(frozen=True)
class Measurement:
    """One node's speed in one measurement beside its peers'. Speeds in the measurement's unit per second."""

    value: float
    usual: float  # the median of the peers, this node included
    bound: float  # below it a node is slow
    peers: int

    @property
    def ratio(self) -> float:
        return self.value / self.usual

    @property
    def is_slow(self) -> bool:
        return self.value < self.bound


@dataclass(frozen=True)
class NodeSpeed:
    """One node's measurements, those that it made and that could be compared, and what follows."""

    answer: NodeAnswer
    measured: Mapping[str, Measurement]

    @property
    def node(self) -> str:
        return self.answer.node

    @property
    def slow(self) -> tuple[str, ...]:
        """In which measurements it is slow, the slowest first."""
        found = [name for name, own in self.measured.items() if own.is_slow]
        return tuple(sorted(found, key=lambda name: self.measured[name].ratio))

    @property
    def outcome(self) -> str:
        if self.slow:
            return SLOW
        return FINE if self.measured and not self.answer.why else UNKNOWN


def judge_speeds(answers: Sequence[NodeAnswer]) -> tuple[NodeSpeed, ...]:
    """Every node beside those of the same hardware, in the order given. Fewer than three of a kind are not compared."""
    kinds: dict[str, list[NodeAnswer]] = {}
    for answer in answers:
        kinds.setdefault(answer.hardware, []).append(answer)
    measured: dict[str, dict[str, Measurement]] = {answer.node: {} for answer in answers}
    for peers in kinds.values():
        for name in dict.fromkeys(name for answer in peers for name in answer.samples):
            for node, found in _compared(name, peers).items():
                measured[node][name] = found
    return tuple(NodeSpeed(answer, measured[answer.node]) for answer in answers)


def _compared(name: str, peers: Sequence[NodeAnswer]) -> dict[str, Measurement]:
    values = {answer.node: value for answer in peers if (value := answer.value(name)) is not None}
    if len(values) < MIN_PEERS:
        return {}
    usual = median(values.values())
    away = robust_sigma(math.log(value / usual) for value in values.values())
    errors = {answer.node: _error_of_median(answer.counted_samples(name)) for answer in peers if answer.node in values}
    typical, few = median(errors.values()), 1 + FEW / len(values)
    found = {}
    for node, value in values.items():
        spread = max(away, typical, errors[node])
        bound = usual * math.exp(-few * max(FLOOR, NOISE_FACTOR * spread))
        found[node] = Measurement(value, usual, bound, len(values))
    return found


def _error_of_median(samples: Sequence[float]) -> float:
    """The standard error of a node's value, as a share of it; zero where one sample tells none."""
    if len(samples) < 2:
        return 0.0
    middle = median(samples)
    return error_of_median(robust_sigma(math.log(value / middle) for value in samples), len(samples))
