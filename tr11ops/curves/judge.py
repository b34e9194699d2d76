"""What looks wrong in the numbers of a log, by every rule, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tr11ops.curves.anomaly import NumberAnomaly, NumberRule
from tr11ops.curves.gaps import DroppedUpdates, LogGaps, MissingLosses, RepeatedNorms
from tr11ops.curves.seams import RestartSeams
from tr11ops.curves.spikes import Divergence, Spikes
from tr11ops.curves.steps import LoggedStep
from tr11ops.curves.throughput import ThroughputFalls
from trainer.contract.record import Record

RULES: tuple[Callable[[], NumberRule], ...] = (
    Spikes, Divergence, ThroughputFalls, RestartSeams, RepeatedNorms, MissingLosses, DroppedUpdates, LogGaps,
)  # fmt: skip


class CurveJudgement(Record):
    """`steps` lines were read, from iteration `first` to `last`, of `starts` starts. Anomalies by iteration."""

    steps: int
    first: int
    last: int
    starts: int
    anomalies: tuple[NumberAnomaly, ...]

    @property
    def wrong(self) -> tuple[NumberAnomaly, ...]:
        return tuple(anomaly for anomaly in self.anomalies if anomaly.is_wrong)


def judge(steps: Iterable[LoggedStep]) -> CurveJudgement:
    """Judge a whole course. Pure; holds no more than the rules remember."""
    rules = [make() for make in RULES]
    count, first, last, starts, start = 0, 0, 0, 0, None
    for step in steps:
        first = first if count else step.record.iteration
        last = max(last, step.record.iteration)
        count += 1
        starts += step.start != start
        start = step.start
        for rule in rules:
            rule.take(step)
    found = [anomaly for rule in rules for anomaly in rule.anomalies()]
    return CurveJudgement(count, first, last, starts, tuple(sorted(found, key=lambda one: (one.first, one.kind))))
