"""The training is slower than it was, without a restart in between: one slow GPU holds all the
others back.

What to do: stop, `tr11 nodes bench`, go on; when no node is found, leave nodes out at the next
restart, a few at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, median

from tr11ops.base.observed import known
from tr11ops.base.robust import robust_sigma
from tr11ops.cluster.hostlist import compress
from tr11ops.detect import series
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived, normal_silence
from tr11ops.observe.forecast import LAST_LINES, last_lines
from tr11ops.observe.snapshot import Snapshot, Step
from trainer.contract.compute_record import EVERY_STEPS
from trainer.contract.metrics_record import StepRecord
from trainer.contract.record import Record

BOUND = "`watch.slow_percent` (3 %), and 4 times the spread of the lines"
SEVERITIES = "WARNING; INFO until the ranks' own compute times cover the slow steps"
NAME = "slow"
NEEDS = ("jobs", "steps", "training.phases", "training.compute_times")

HISTORY_LINES = 100
LEAST_HISTORY = 20  # lines of the same launch before its speed is known
NOISE_FACTOR = 4.0  # times the spread of single lines: a machine shared with others is never steady


class Slowdown(Record):
    """The speed of the last lines and the usual one, in `unit`; `bound` is the least that counts as
    usual.
    """

    last: tuple[float, ...]
    usual: float
    bound: float
    unit: str
    lines: int
    first: int  # iterations
    final: int
    began: int  # the first iteration of the row of slow lines

    @property
    def percent(self) -> float:
        return 100.0 * (1.0 - fmean(self.last) / self.usual)


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """Mean and median of the last 3 lines, or half minute, against 100 lines of the same launch,
    batch and length.
    """
    if not snapshot.active_jobs:
        return
    found = slowdown(snapshot)
    if found is None:
        return
    nodes = [node for job in snapshot.active_jobs for node in job.nodes]
    each = ", ".join(f"{value:.4g}" for value in found.last)
    if len(found.last) <= LAST_LINES:
        shown = each
    else:
        shown = f"{fmean(found.last):.4g} on average"
    fix, *then = _what_finds_it(snapshot, nodes)
    yield Finding(
        NAME,
        Severity.INFO if is_measured_still(snapshot, found) else Severity.WARNING,
        f"the training is {found.percent:.1f} % slower than it was",
        evidence=(
            f"{found.unit} of iterations {found.first} to {found.final}: {shown}",
            f"the median of {found.lines} lines before them was {found.usual:.4g}; below {found.bound:.4g} is slow",
            *_what_ranks_say(snapshot, found),
            *_togetherness(snapshot),
        ),
        fix=fix,
        then=tuple(then),
    )


def is_measured_still(snapshot: Snapshot, found: Slowdown) -> bool:
    """Whether the ranks' own compute times do not cover the slow steps yet: they may name a node in
    a few more.

    They are written every ten steps; what has none after twenty is not waited for.
    """
    newest = max(
        (times.iteration for times in known(snapshot.training.compute_times, ())), default=None
    )
    if newest is None or found.final >= found.began + 2 * EVERY_STEPS:
        return False
    return newest < found.began + EVERY_STEPS


def _what_ranks_say(snapshot: Snapshot, found: Slowdown) -> Iterator[str]:
    if not known(snapshot.training.compute_times, ()):
        return
    if is_measured_still(snapshot, found):
        yield f"whether it is one node, the ranks' own compute times say from iteration {found.began + EVERY_STEPS} on"
    else:
        yield "the ranks' own compute times name no node: all compute for longer, or wait for network, files or data"


def _what_finds_it(snapshot: Snapshot, nodes: list[str]) -> tuple[str, ...]:
    """What to type: with Slurm the nodes are measured against each other while none of them trains;
    `nodes bench` has the command that leaves out a slow one.
    """
    if snapshot.scheduler != "slurm" or not nodes:
        return (derived.command(snapshot, f"nodes check {compress(nodes)}" if nodes else "logs"),)
    stop = derived.command(snapshot, "kill --wait --reason 'to measure the nodes'")
    return stop, derived.command(snapshot, "nodes bench"), *derived.go_on(snapshot)


def _togetherness(snapshot: Snapshot) -> Iterator[str]:
    """Every iteration ends with all ranks waiting for the slowest, so that their heartbeats rarely
    tell it apart.
    """
    for job in snapshot.active_jobs:
        beats = derived.beats_of(snapshot, job)
        if len(beats) > 1 and len({beat.iteration for beat in beats}) == 1:
            yield f"which node it is cannot be told from the heartbeats: all {len(beats)} ranks keep step"


def slowdown(snapshot: Snapshot) -> Slowdown | None:
    """The slowdown of the last lines, or None. Lines beside a save in the background do not count."""
    steps = _beside_no_save(snapshot, series.comparable(snapshot))
    pairs = [(step, value) for step in steps if (value := _speed(step.record)[0]) is not None]
    pace = derived.seconds_per_iteration(snapshot)
    if pace is None:
        return None
    count = last_lines(snapshot, pace)
    if len(pairs) < LEAST_HISTORY + count:
        return None
    last, before = pairs[-count:], [value for _, value in pairs[:-count]]
    values = tuple(value for _, value in last)
    # older windows too, or a lasting loss would become the usual
    for end in range(len(before), 0, -HISTORY_LINES):
        window = before[max(0, end - HISTORY_LINES) : end]
        if len(window) < LEAST_HISTORY:
            break
        usual = median(window)
        bound = _bound(snapshot, window, usual)
        if max(fmean(values), median(values)) < bound:
            first, final = last[0][0].record.iteration, last[-1][0].record.iteration
            began = _row_began(pairs, bound, first)
            return Slowdown(
                values,
                usual,
                bound,
                _speed(last[-1][0].record)[1],
                len(window),
                first,
                final,
                began,
            )
    return None


def _row_began(pairs: list[tuple[Step, float]], bound: float, otherwise: int) -> int:
    """The iteration of the first of the last lines that are all below a bound."""
    began = otherwise
    for step, value in reversed(pairs):
        if value >= bound:
            break
        began = min(began, step.record.iteration)
    return began


def _bound(snapshot: Snapshot, window: list[float], usual: float) -> float:
    """The least speed that is no slowdown: by the card, and by how much the lines differ anyway."""
    spread = robust_sigma(value - usual for value in window)
    return usual - max(snapshot.run.watch.slow_percent / 100.0 * usual, NOISE_FACTOR * spread)


def _speed(record: StepRecord) -> tuple[float | None, str]:
    """TFLOPs as logged, or samples per second where the log has none."""
    if math.isfinite(record.tflops) and record.tflops > 0:
        return record.tflops, "TFLOPs"
    known_speed = math.isfinite(record.samples_per_second) and record.samples_per_second > 0
    return (record.samples_per_second if known_speed else None), "samples per second"


def _beside_no_save(snapshot: Snapshot, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Without the lines since the last save began, as long as its checkpoint is not there (and the
    line after it).
    """
    saves = [span.began for span in known(snapshot.training.phases, ()) if span.phase == "saving"]
    if not saves or not steps:
        return steps
    began, pace = max(saves), derived.seconds_per_iteration(snapshot) or 0.0
    end = began + normal_silence.phase_patience(snapshot, "saving")
    for entry in snapshot.examined:
        if entry.created is not None and entry.created >= began:
            end = entry.created + pace
    return tuple(step for step in steps if step.time is None or not began < step.time <= end)
