"""The time in which a run held no nodes: did it wait for them, did someone stop it, or could nothing start? Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tr11ops.base.observed import known
from tr11ops.goodput.history_values import AttemptHistory, History, edges, micro
from tr11ops.goodput.timeline import Bucket
from tr11ops.runcard.slurm_syntax import parse_attempts
from tr11ops.rundir.paths import Submission
from trainer.config.card import CardError
from trainer.contract.end_marker import EndMarker

STOPPED = frozenset({"kill-switch", "pause"})


class Idle(NamedTuple):
    """From `start` to `end` (microseconds) nothing was held. `after`: the place of the attempt before, -1 for none."""

    start: int
    end: int
    bucket: Bucket
    nodes: int
    after: int


def idle_of(history: History, attempts: Sequence[AttemptHistory], ends: Sequence[int], now: int) -> Iterator[Idle]:
    """All time from the first submission to `now` in which none of `attempts` (with these ends) held nodes.

    A run whose last attempt has finished the training is over then, unless more was submitted since.
    """
    submissions = known(history.submissions, ())
    begins = [micro(attempt.start) for attempt in attempts]
    moments = [*(micro(entry.time) for entry in submissions), *begins]
    if not moments:
        return
    at, last = min(moments), -1
    for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if begin > at:
            yield from _cut(at, min(begin, now), last, history, attempts)
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
    for idle in _cut(at, now, last, history, attempts):
        nothing_waits = idle.bucket is Bucket.QUEUE and history.waits is False and bool(attempts)
        yield idle._replace(bucket=Bucket.RESTART_GAP) if nothing_waits else idle


def _cut(start: int, end: int, last: int, history: History, attempts: Sequence[AttemptHistory]) -> Iterator[Idle]:
    """One idle stretch, cut where a submission, a stop or a hold begins or ends."""
    submissions = known(history.submissions, ())
    moments = {start, end, *(micro(entry.time) for entry in submissions), *edges((*history.pauses, *history.holds))}
    for begin, until in pairwise(sorted(moment for moment in moments if start <= moment <= end)):
        bucket = _bucket(begin, last, history, attempts)
        yield Idle(begin, until, bucket, _wanted(begin, last, submissions, attempts), last)


def _bucket(moment: int, last: int, history: History, attempts: Sequence[AttemptHistory]) -> Bucket:
    if any(period.holds_at(moment) for period in history.pauses):
        return Bucket.OPERATOR_PAUSE
    submissions = known(history.submissions, ())
    before = attempts[last] if last >= 0 else None
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
    return Bucket.QUEUE if waits else Bucket.RESTART_GAP


def _left(entry: Submission, begun: Sequence[AttemptHistory]) -> int:
    """Tasks of a submission that have not started."""
    try:
        tasks = len(parse_attempts(entry.array)) if entry.array else 1
    except CardError:
        tasks = 1
    return tasks - sum(attempt.submission == entry.tag for attempt in begun)


def _wanted(moment: int, last: int, submissions: Sequence[Submission], attempts: Sequence[AttemptHistory]) -> int:
    """The nodes that the newest submission asked for; without one, those of the attempt before."""
    asked = [entry.nodes for entry in submissions if micro(entry.time) <= moment]
    if asked:
        return asked[-1]
    return len(set(attempts[max(last, 0)].nodes)) if attempts else 0


def _reason(attempt: AttemptHistory) -> str:
    """The trainer's own word on the end, "" where there is none."""
    return attempt.marker.reason if isinstance(attempt.marker, EndMarker) else ""
