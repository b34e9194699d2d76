"""Which node is slow: by its ranks' own compute times, else by what else tells the nodes apart.

What to do: `tr11 nodes check NODE`; when it is bad, `tr11 nodes exclude NODE`, and the next start is without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_high

from tr11ops.base.observed import known
from tr11ops.base.units import counted
from tr11ops.cluster.base import JobState
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.slow import is_measured_still, slowdown
from tr11ops.detect.slow_ranks import SlowRank, slow_ranks, windows_to_last
from tr11ops.detect.without_node import exclude_command, start_again, why_no_other
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.observe.training import TRAINING_PHASES
from trainer.contract.heartbeat import Heartbeat

BOUND = (
    "`watch.slow_percent` (3 %) and 6 times the spread of ranks and steps, 100 % at most; below 25 % what lasts for 60"
    " steps and 10 minutes; 2 iterations, worth 4 s"
)
SEVERITIES = "WARNING; INFO where all nodes are one machine"
NAME = "slow-node"
NEEDS = ("jobs", "heartbeats", "steps", "training.phases", "training.node_warnings", "training.compute_times")

BEHIND_ITERATIONS = 2  # one is nothing: heartbeats of one moment are not read in one moment
BEHIND_SECONDS = 4.0  # worth of iterations; heartbeats are a second apart at least, however quick the steps


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """A node with a rank that computes for longer than its peers; one whose ranks are all iterations behind; or, in a
    slow training, one that a health check has warned of."""
    running = [job for job in snapshot.active_jobs if job.state is JobState.RUNNING]
    slow, pace = _may_be_suspected(snapshot), derived.seconds_per_iteration(snapshot)
    for job in running:
        beats = derived.beats_of(snapshot, job)
        sure: dict[str, list[str]] = {}
        for node, line in (*_computing(snapshot, {*job.nodes, *(beat.host for beat in beats)}), *_behind(beats, pace)):
            sure.setdefault(node, []).append(line)
        warned: dict[str, list[str]] = {}
        for node, line in _warned(snapshot, job.nodes) if slow else ():
            warned.setdefault(node, []).append(line)
        for node, lines in warned.items():
            sure.get(node, []).extend(lines)
        suspected = warned if len(warned) == 1 and not sure else {}  # of several none is told apart by a warning
        yield from (_finding(snapshot, node, "holds the others back", lines, True) for node, lines in sure.items())
        yield from (_finding(snapshot, node, "may be the slow node", lines, False) for node, lines in suspected.items())


def _may_be_suspected(snapshot: Snapshot) -> bool:
    """Whether the training is slow, and the ranks' own compute times have said what they can say of it."""
    found = slowdown(snapshot)
    return found is not None and not is_measured_still(snapshot, found)


def _finding(snapshot: Snapshot, node: str, what: str, evidence: list[str], is_sure: bool) -> Finding:
    """One that is only suspected is checked first. Of nodes that are one machine, none can be exchanged."""
    if snapshot.scheduler == "local":
        return Finding(
            NAME,
            Severity.INFO,
            f"some ranks, of {node}, are slower than their peers: all nodes are this one machine",
            subject=node,
            identity=(node,),
            evidence=(*evidence, "other work on this machine slows those that share a processor with it"),
        )
    check = derived.command(snapshot, f"nodes check {node}")
    why_not = why_no_other(snapshot, node) if is_sure else ""
    if why_not:
        evidence = [*evidence, why_not]
    can_leave = is_sure and not why_not
    return Finding(
        NAME,
        Severity.WARNING,
        f"{node} {what}",
        subject=node,
        identity=(node,),
        evidence=tuple(evidence),
        fix=exclude_command(snapshot, node, "it holds the others back") if can_leave else check,
        then=start_again(snapshot, node) if can_leave else (),
    )


def _computing(snapshot: Snapshot, nodes: set[str]) -> Iterator[tuple[str, str]]:
    """Nodes with slow ranks, and the slowest of them."""
    by_node: dict[str, list[SlowRank]] = {}
    windows = windows_to_last(derived.seconds_per_iteration(snapshot))
    for found in slow_ranks(known(snapshot.training.compute_times, ()), snapshot.run.training.slow_percent, windows):
        if found.times.host in nodes:
            by_node.setdefault(found.times.host, []).append(found)
    for node, found_here in by_node.items():
        worst = max(found_here, key=lambda found: found.factor)
        more = f" (and {len(found_here) - 1} more of its ranks)" if len(found_here) > 1 else ""
        than = "at first, and the others as long as ever" if worst.by_past else "its peers"
        yield node, f"its rank {worst.times.rank} computes {worst.factor:.2f} times as long as {than}{more}"
        seconds = f"{worst.seconds:.3g} s a step, {worst.usual:.3g} s is usual in stage {worst.times.stage}"
        yield node, f"{seconds} ({counted(worst.steps, 'step')} up to iteration {worst.times.iteration})"


def _behind(beats: tuple[Heartbeat, ...], pace: float | None) -> Iterator[tuple[str, str]]:
    if pace is None or any(beat.phase not in TRAINING_PHASES for beat in beats):
        return
    by_node: dict[str, list[int]] = {}
    for beat in beats:
        by_node.setdefault(beat.host, []).append(beat.iteration)
    usual = median_high(min(done) for done in by_node.values()) if by_node else 0
    for node, iterations in by_node.items():
        lag = usual - max(iterations)
        ranks = counted(len(iterations), "rank is", "ranks are")
        if lag >= BEHIND_ITERATIONS and lag * pace > BEHIND_SECONDS:
            yield node, f"its {ranks} at iteration {max(iterations)}, the others at {usual}"


def _warned(snapshot: Snapshot, nodes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for warning in known(snapshot.training.node_warnings, ()):
        if warning.node in nodes:
            yield warning.node, f"health check {warning.check} said at the start: {warning.why}"
