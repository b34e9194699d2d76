"""How far each node of a running attempt is, and how long its ranks compute for a step beside others
that do the same work. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median, median_low
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.base.observed import known
from tr11ops.base.units import duration
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.nodes_left import is_spare
from tr11ops.detect.speed import is_measured_still, slowdown
from tr11ops.observe import derived
from tr11ops.observe.liveness import beats_of, ranks_of
from tr11ops.observe.snapshot import Snapshot
from trainer.contract.compute_record import EVERY_STEPS, MIN_STEPS, ComputeTimes
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.detect.slow_ranks import SlowRank
    from trainer.contract.attempt import Heartbeat

LAST_STEPS = 3  # of a record: all of them much longer than those of its peers makes a suspect
SHOWN = 5


class NodePace(Record):
    """Of the rank of a node that computes longest beside its peers: `seconds` of a step, waiting
    excluded, the median of its last steps; `times_usual`: so many times as long as the middle one of
    the ranks that do the same work, None without such ranks and before enough steps. `is_slow`: it
    is an outlier by the bounds of the detector `slow-node`. `suspect_times`: what makes it a suspect
    where it is none: an outlier that may not last, or its last steps alone, each so many times as long.
    """

    rank: int
    seconds: float
    times_usual: float | None
    iteration: int
    is_slow: bool
    suspect_times: float | None = None


class NodeProgress(Record):
    """A node of a running job. `ranks` tell of themselves; `iteration` and `phase` are those of the
    one that is furthest behind, `silent_seconds` how long the most silent one has said nothing: None
    where none has said anything. `pace` is None where no rank measures its steps. `is_spare`: the
    newest launch of the job does without it.
    """

    node: str
    job: str
    ranks: int = 0
    iteration: int | None = None
    phase: str = ""
    silent_seconds: float | None = None
    pace: NodePace | None = None
    is_spare: bool = False

    @property
    def is_slow(self) -> bool:
        return self.pace is not None and self.pace.is_slow


class SlowNodes(Record):
    """Which node is slow, as far as that is known. `state`: `named`; `suspected`, which is no verdict
    yet; `waiting`: the training is slow, and the ranks do not tell yet by which node; `unknown`: none
    has measured enough steps; `unmeasured`: none has measured any; `none`. `nodes`: those that are
    named or suspected, the slowest first. `text`: all of it in a sentence.
    """

    state: str
    nodes: tuple[str, ...]
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        """The same in a few words, for a line that says more; () where there is no more to say."""
        if self.nodes:
            return (f"{SHORT[self.state]}: {', '.join(self.nodes[:SHOWN])}",)
        return ("slow: not known",) if self.state in {"waiting", "unknown"} else ()


SHORT = {"named": "slow", "suspected": "may be slow"}


def slow_nodes(snapshot: Snapshot, progress: Sequence[NodeProgress]) -> SlowNodes | None:
    """The one answer to "which node is slow?"; None where nothing trains. A node that is suspected
    is named as that where the training is slow alone: two facts, and still no verdict.
    """
    paces = {one.node: one.pace for one in progress if one.pace is not None and not one.is_spare}
    if all(one.is_spare for one in progress):
        return None
    named = {node: pace.times_usual for node, pace in paces.items() if pace.is_slow}
    suspects = {node: pace.suspect_times for node, pace in paces.items() if pace.suspect_times}
    measured = {node: pace for node, pace in paces.items() if pace.times_usual is not None}
    newest = max((pace.iteration for pace in paces.values()), default=0)
    slowed, since = slowdown(snapshot), ""
    following = newest - newest % EVERY_STEPS + EVERY_STEPS
    if slowed is not None:
        since = f" since iteration {slowed.began:,}"
        if slowed.since is not None:
            since += f" ({duration(max(0.0, snapshot.time - slowed.since))})"
    if named:
        return _of("named", f"Slow{since}: {{}}, measured up to step {newest:,}.", named)
    if slowed is not None and suspects:
        more = f"May be slow{since}: {{}}. That is not certain: the ranks are compared again at"
        return _of("suspected", f"{more} iteration {following:,}.", suspects)
    if slowed is not None and is_measured_still(snapshot, slowed):
        more = (
            f"Not known yet: the training is slow{since}; the ranks' own times tell by which node"
        )
        return _of("waiting", f"{more} from iteration {slowed.began + EVERY_STEPS:,} on.")
    if not measured:
        more = "Not known yet: no rank has measured enough steps beside others"
        if newest:
            enough = -(-(newest + MIN_STEPS - 1) // EVERY_STEPS) * EVERY_STEPS
            more += f"; from iteration {enough:,} on they can be compared"
        return _of("unknown" if newest else "unmeasured", f"{more}.")
    if slowed is not None:
        more = f"None is named, measured up to step {newest:,}, though the training is slow{since}"
        return _of("none", f"{more}: all compute for longer, or wait for network, files or data.")
    slowest = max(measured, key=lambda node: measured[node].times_usual or 0.0)
    times = measured[slowest].times_usual or 0.0
    more = ""
    if round(times, 2) > 1:
        more = f"; the slowest, {slowest}, takes {times:.2f} times as long as usual"
    return _of("none", f"None is slow, measured up to step {newest:,}{more}.")


def _of(state: str, text: str, times: Mapping[str, float | None] = {}) -> SlowNodes:
    """`times`: how many times as long as usual a step takes on the nodes that `text` names."""
    given = {node: known_times or 0.0 for node, known_times in times.items()}
    nodes = sorted(given, key=given.__getitem__, reverse=True)
    shown = ", ".join(f"{node} ({given[node]:.2f} times the usual)" for node in nodes[:SHOWN])
    return SlowNodes(state, tuple(nodes), text.format(shown))


def node_progress(snapshot: Snapshot) -> tuple[NodeProgress, ...]:
    """Of each node of the jobs that run, by job and node; none where the jobs are unknown."""
    running = [job for job in snapshot.active_jobs if job.state is JobState.RUNNING]
    paces = node_paces(snapshot)
    return tuple(found for job in running for found in _of_job(snapshot, job, paces))


def short_name(host: str) -> str:
    """A host's name without its domain: what heartbeats and schedulers call a node may differ by it."""
    return host.partition(".")[0]


def _of_job(snapshot: Snapshot, job: Job, paces: dict[str, NodePace]) -> Iterator[NodeProgress]:
    by_node: dict[str, list[Heartbeat]] = {}
    for beat in beats_of(snapshot, job):
        by_node.setdefault(short_name(beat.host), []).append(beat)
    for node in job.nodes:
        beats = by_node.get(short_name(node), [])
        found = NodeProgress(
            node,
            job.job_id,
            pace=paces.get(short_name(node)),
            is_spare=not beats and is_spare(snapshot, job, node),
        )
        if not beats:
            yield found
            continue
        behind = min(beats, key=_progress)
        oldest = min(beat.time for beat in beats)
        yield replace(
            found,
            ranks=ranks_of(beats),
            iteration=behind.iteration,
            phase=behind.phase,
            silent_seconds=max(0.0, snapshot.time - oldest),
        )


def node_paces(snapshot: Snapshot) -> dict[str, NodePace]:
    """By short name, of the nodes whose ranks measure their steps, in the newest launch."""
    measured = known(snapshot.training.compute_times, ())
    if not measured:
        return {}
    from tr11ops.detect.slow_ranks import outlying_ranks, windows_to_last

    windows = windows_to_last(derived.seconds_per_iteration(snapshot))
    slow = {
        found.times.rank: found
        for found in outlying_ranks(measured, snapshot.run.watch.slow_percent, windows)
    }
    by_place: dict[tuple[object, ...], list[ComputeTimes]] = {}
    for times in measured:
        place = (times.stage, times.part, times.iteration, times.steps)
        by_place.setdefault(place, []).append(times)
    paces: dict[str, NodePace] = {}
    for peers in by_place.values():
        for found, host in _of_peers(peers, slow):
            node = short_name(host)
            paces[node] = max(paces.get(node, found), found, key=_slowness)
    return paces


def _of_peers(
    peers: Sequence[ComputeTimes], slow: dict[int, SlowRank]
) -> Iterator[tuple[NodePace, str]]:
    """Each rank of one place, and its host."""
    from tr11ops.detect.slow_ranks import CLEAR_FACTOR

    seconds = {times.rank: _seconds(times) for times in peers}
    usual = median_low(seconds.values())
    for times in peers:
        own, outlier, factor, suspect = seconds[times.rank], slow.get(times.rank), None, None
        if outlier is not None:
            factor = outlier.factor
        elif len(peers) > 1 and usual > 0 and times.can_be_judged:
            factor = own / usual
            suspect = _least_ratio(times, peers)
        is_slow = outlier is not None and outlier.lasts
        if not is_slow and outlier is not None:
            suspect = outlier.factor
        elif suspect is not None and suspect <= CLEAR_FACTOR:
            suspect = None
        pace = NodePace(
            times.rank,
            own,
            factor,
            iteration=times.iteration,
            is_slow=is_slow,
            suspect_times=suspect,
        )
        yield pace, times.host


def _least_ratio(own: ComputeTimes, peers: Sequence[ComputeTimes]) -> float | None:
    """How many times as long as its peers it took in each of the last steps at least; None for too
    few.
    """
    others = zip(*(peer.recent[-LAST_STEPS:] for peer in peers if peer is not own), strict=False)
    usual: list[float] = [median_low(step) for step in others]
    if len(own.recent) < LAST_STEPS or len(usual) < LAST_STEPS or min(usual) <= 0:
        return None
    return min(one / other for one, other in zip(own.recent[-LAST_STEPS:], usual, strict=True))


def _seconds(times: ComputeTimes) -> float:
    if times.recent:
        return median(times.recent)
    return times.without_longest


def _slowness(pace: NodePace) -> tuple[bool, float, float, float]:
    return pace.is_slow, pace.suspect_times or 0.0, pace.times_usual or 0.0, pace.seconds


def _progress(beat: Heartbeat) -> tuple[int, float]:
    return beat.iteration, beat.time
