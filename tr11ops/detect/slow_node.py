"""Which node is behind while the training is slow, where anything tells the nodes apart.

What to do: `tr11 nodes check NODE`; when it is bad, `tr11 nodes exclude NODE`, and the next start is without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_high

from tr11ops.cluster.base import JobState
from tr11ops.detect import signs
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.slow import slowdown
from tr11ops.snapshot import Snapshot, known
from tr11ops.training import TRAINING_PHASES
from trainer.contract import Heartbeat

NAME = "slow-node"
NEEDS = ("jobs", "heartbeats", "steps", "phases", "node_warnings")

BEHIND_ITERATIONS = 2  # one is nothing: heartbeats of one moment are not read in one moment
BEHIND_SECONDS = 4.0  # worth of iterations; heartbeats are a second apart at least, however quick the steps


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """A node whose ranks are all iterations behind; or, in a slow training, one that a health check has warned of."""
    running = [job for job in signs.active_jobs(snapshot) if job.state is JobState.RUNNING]
    slow, pace = slowdown(snapshot) is not None, signs.seconds_per_iteration(snapshot)
    for job in running:
        beats = signs.beats_of(snapshot, job)
        for node, evidence in (*_behind(beats, pace), *(_warned(snapshot, job.nodes) if slow else ())):
            yield Finding(
                NAME,
                Severity.WARNING,
                f"{node} holds the others back" if evidence.startswith("its") else f"{node} may be the slow node",
                subject=node,
                identity=(node,),
                evidence=(evidence,),
                fix=signs.command(snapshot, f"nodes check {node}"),
            )


def _behind(beats: tuple[Heartbeat, ...], pace: float | None) -> Iterator[tuple[str, str]]:
    if pace is None or any(beat.phase not in TRAINING_PHASES for beat in beats):
        return
    by_node: dict[str, list[int]] = {}
    for beat in beats:
        by_node.setdefault(beat.host, []).append(beat.iteration)
    usual = median_high(min(done) for done in by_node.values()) if by_node else 0
    for node, iterations in by_node.items():
        lag = usual - max(iterations)
        if lag >= BEHIND_ITERATIONS and lag * pace > BEHIND_SECONDS:
            yield node, f"its {len(iterations)} ranks are at iteration {max(iterations)}, the others at {usual}"


def _warned(snapshot: Snapshot, nodes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for warning in known(snapshot.node_warnings, ()):
        if warning.node in nodes:
            yield warning.node, f"health check {warning.check} said at the start: {warning.why}"
