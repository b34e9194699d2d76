"""Which nodes are slower than nodes of the same hardware, by the medians of their samples. Pure.

Of each measurement every node has one value, the median of its samples: one noisy sample tells
nothing. With d_i = ln(value_i / median of all values), a node is slow where

    d_i < -(1 + FEW / n) * max(FLOOR, NOISE_FACTOR * s_i),   s_i = max(1.4826 * median|d|, e_i, median e)
    e_i = 1.2533 * 1.4826 * MAD of the node's own samples / sqrt(r)

1.4826 * MAD estimates the standard deviation of a normal distribution without the outliers that are
looked for (Hampel, "The influence curve and its role in robust estimation", JASA 1974; Iglewicz and
Hoaglin, "How to detect and handle outliers", 1993, take 3.5 of it for a single value). Here one
fleet has hundreds of values, and of few nodes the MAD itself is hardly known: hence the larger
factor, and the growth for small n. `e_i` is the standard error of a median of r samples (1.2533 is
sqrt(pi / 2)): a node whose samples scatter is not known well, and two nodes that agree by chance
must not make a third an outlier. FLOOR: nodes that differ by less are equal, however little they
scatter.

Of three or four nodes this bound lies so low that hardly a node can be below it. So a node that is
far below, at less than FAR of the median, is looked at without it: its best sample is worse than
the worst of every peer (APART), in two measurements, or in one by half (WIDE_APART): then it is
slow. Otherwise its result is unknown: far below is not fine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from msgspec.structs import replace

from tr11ops.base.robust import error_of_median, robust_sigma
from trainer.contract.record import Record
from trainer.contract.units import shortened

# ----------------------------------------------------------------------------- what one node said
# Its samples, read from the lines `NAME VALUE UNIT` of a probe.

_SAMPLE = re.compile(
    r"(?P<name>[a-z][a-z0-9-]{0,23})(?:@(?P<part>[\w.-]{1,40}))? (?P<value>\S+)(?: (?P<unit>[\w/%]{1,12}))?"
)
HARDWARE = "hardware "
# of a pair, and one partner that is well says that this node is; else the worst
BEST_PART_COUNTS = ("all-reduce",)
LONGEST_WHY = 200
MOST_SAMPLES = 1000  # of one part


class NodeAnswer(Record):
    """A node's samples: measurement -> part -> values, larger is faster. `why`: what kept it from
    measuring all.
    """

    node: str
    hardware: str = ""
    samples: Mapping[str, Mapping[str, tuple[float, ...]]] = {}
    units: Mapping[str, str] = {}
    why: str = ""

    def value(self, name: str) -> float | None:
        """The speed of one measurement: the median of the samples, of the part that counts. None:
        not measured.
        """
        parts = [median(values) for values in self.samples.get(name, {}).values()]
        if not parts:
            return None
        if name in BEST_PART_COUNTS:
            return max(parts)
        return min(parts)

    def counted_samples(self, name: str) -> tuple[float, ...]:
        """The samples of the part that counts."""
        found = self.value(name)
        return next(
            (own for own in self.samples.get(name, {}).values() if median(own) == found), ()
        )


def read_answer(node: str, lines: Iterable[str], why: str = "") -> NodeAnswer:
    """The answer in a probe's lines. What is no sample is skipped; values must be finite and above
    zero.
    """
    hardware = ""
    units = dict[str, str]()
    samples: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        text = line.strip()
        if text.startswith(HARDWARE):
            hardware = text.removeprefix(HARDWARE)[:LONGEST_WHY]
        elif (sample := _sample(text)) is not None:
            name, part, value, unit = sample
            own = samples.setdefault(name, {}).setdefault(part, [])
            own += [value] if len(own) < MOST_SAMPLES else []
            units[name] = unit
    frozen = {
        name: {part: tuple(own) for part, own in parts.items()} for name, parts in samples.items()
    }
    return NodeAnswer(node, hardware, samples=frozen, units=units, why=shortened(why, LONGEST_WHY))


def is_sample(line: str) -> bool:
    """Whether a line is part of an answer, not a program's other words."""
    return line.startswith(HARDWARE) or _sample(line.strip()) is not None


def _sample(text: str) -> tuple[str, str, float, str] | None:
    """Name, part, value and unit; None for what is no sample."""
    found = _SAMPLE.fullmatch(text)
    try:
        if found:
            value = float(found["value"])
        else:
            value = math.nan
    except ValueError:
        return None
    if found is None or not math.isfinite(value) or value <= 0:
        return None
    return found["name"], found["part"] or "", value, found["unit"] or ""


FLOOR = 0.05  # of the logarithm: about 5 %
NOISE_FACTOR = 6.0
FEW = 4  # nodes whose spread is hardly known
FAR = 0.6  # of the median of all
APART, WIDE_APART = 1.0, 0.5  # at most, its best sample divided by the worst of its peers
FAR_MEASUREMENTS = 2  # one alone may be chance where samples scatter widely
MIN_FAR_SAMPLES = 3
MIN_PEERS = 3  # of two nodes no one knows which is the usual one
FINE = "fine"
SLOW = "slow"
UNKNOWN = "unknown"


class Measurement(Record):
    """One node's speed in one measurement beside its peers'. Speeds in the measurement's unit per
    second.
    """

    value: float
    usual: float  # the median of the peers, this node included
    bound: float  # below it a node is slow
    peers: int
    # its best sample divided by the worst one of its peers; infinite: too few samples to say
    reach: float = math.inf

    @property
    def ratio(self) -> float:
        return self.value / self.usual

    @property
    def is_slow(self) -> bool:
        return self.value < self.bound

    @property
    def is_far_below(self) -> bool:
        return self.ratio < FAR


class NodeSpeed(Record):
    """One node's measurements, those that it made and that could be compared, and what follows."""

    answer: NodeAnswer
    measured: Mapping[str, Measurement]

    @property
    def node(self) -> str:
        return self.answer.node

    @property
    def slow(self) -> tuple[str, ...]:
        """In which measurements it is slow, the slowest first."""
        return tuple(name for name in self._by_ratio if self.measured[name].is_slow)

    @property
    def far_below(self) -> tuple[str, ...]:
        """In which measurements it is far below the others, slow or not, the slowest first."""
        return tuple(name for name in self._by_ratio if self.measured[name].is_far_below)

    @property
    def _by_ratio(self) -> list[str]:
        return sorted(self.measured, key=lambda name: self.measured[name].ratio)

    @property
    def outcome(self) -> str:
        if self.slow:
            return SLOW
        if self.answer.why or not self.measured or self.far_below:
            return UNKNOWN
        return FINE


def judge_speeds(answers: Sequence[NodeAnswer]) -> tuple[NodeSpeed, ...]:
    """Every node beside those of the same hardware, in the order given. Fewer than three of a kind
    are not compared.
    """
    kinds: dict[str, list[NodeAnswer]] = {}
    for answer in answers:
        kinds.setdefault(answer.hardware, []).append(answer)
    measured: dict[str, dict[str, Measurement]] = {answer.node: {} for answer in answers}
    for peers in kinds.values():
        for name in dict.fromkeys(name for answer in peers for name in answer.samples):
            for node, found in _compared(name, peers).items():
                measured[node][name] = found
    return tuple(NodeSpeed(answer, _with_far_ones(measured[answer.node])) for answer in answers)


def _with_far_ones(measured: Mapping[str, Measurement]) -> dict[str, Measurement]:
    """The same, with the bound raised where the node is certainly far below, however few its peers
    are.
    """
    apart = [name for name, own in measured.items() if own.is_far_below and own.reach < APART]
    wide = [name for name in apart if measured[name].reach < WIDE_APART]
    certain = apart if len(apart) >= FAR_MEASUREMENTS else wide
    found = dict(measured)
    for name in certain:
        own = measured[name]
        found[name] = replace(own, bound=max(own.bound, FAR * own.usual))
    return found


def _compared(name: str, peers: Sequence[NodeAnswer]) -> dict[str, Measurement]:
    samples = {answer.node: own for answer in peers if (own := answer.counted_samples(name))}
    values = {node: median(own) for node, own in samples.items()}
    if len(values) < MIN_PEERS:
        return {}
    usual = median(values.values())
    away = robust_sigma(math.log(value / usual) for value in values.values())
    errors = {node: _error_of_median(own) for node, own in samples.items()}
    typical = median(errors.values())
    few = 1 + FEW / len(values)
    worst = {node: min(own) for node, own in samples.items()}
    lowest, second = sorted(worst, key=worst.__getitem__)[:2]
    found = {}
    for node, value in values.items():
        spread = max(away, typical, errors[node])
        bound = usual * math.exp(-few * max(FLOOR, NOISE_FACTOR * spread))
        other = second if node == lowest else lowest
        found[node] = Measurement(
            value, usual, bound=bound, peers=len(values), reach=_reach(samples[node], worst[other])
        )
    return found


def _reach(samples: Sequence[float], worst_of_others: float) -> float:
    """A node's best sample divided by the worst one of the others; infinite where it has too few
    samples to say.
    """
    if len(samples) < MIN_FAR_SAMPLES:
        return math.inf
    return max(samples) / worst_of_others


def _error_of_median(samples: Sequence[float]) -> float:
    """The standard error of a node's value, as a share of it; zero where one sample tells none."""
    if len(samples) < 2:
        return 0.0
    middle = median(samples)
    return error_of_median(
        robust_sigma(math.log(value / middle) for value in samples), len(samples)
    )
