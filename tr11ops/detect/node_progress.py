"""How far each node of a running attempt is, and how long its ranks compute for a step beside others
that do the same work. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median, median_low
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.base.observed import known
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.nodes_left import is_spare
from tr11ops.observe import derived
from tr11ops.observe.liveness import beats_of, ranks_of
from tr11ops.observe.snapshot import Snapshot
from trainer.contract.record import Record

if TYPE_CHECKING:
    from trainer.contract.attempt import Heartbeat
    from trainer.contract.compute_record import ComputeTimes


class NodePace(Record):
    """Of the rank of a node that computes longest beside its peers: `seconds` of a step, waiting
    excluded, the median of its last steps; `times_usual`: so many times as long as the middle one of
    the ranks that do the same work, None without such ranks. `is_slow`: it is an outlier by the
    bounds of the detector `slow-node`.
    """

    rank: int
    seconds: float
    times_usual: float | None
    iteration: int
    is_slow: bool


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
    from tr11ops.detect.slow_ranks import slow_ranks, windows_to_last

    windows = windows_to_last(derived.seconds_per_iteration(snapshot))
    slow = {
        found.times.rank: found.factor
        for found in slow_ranks(measured, snapshot.run.watch.slow_percent, windows)
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
    peers: Sequence[ComputeTimes], slow: dict[int, float]
) -> Iterator[tuple[NodePace, str]]:
    """Each rank of one place, and its host."""
    seconds = {times.rank: _seconds(times) for times in peers}
    usual = median_low(seconds.values())
    for times in peers:
        own = seconds[times.rank]
        factor = slow.get(times.rank)
        if factor is None and len(peers) > 1 and usual > 0:
            factor = own / usual
        is_slow = times.rank in slow
        yield (
            NodePace(times.rank, own, factor, iteration=times.iteration, is_slow=is_slow),
            times.host,
        )


def _seconds(times: ComputeTimes) -> float:
    if times.recent:
        return median(times.recent)
    return times.without_longest


def _slowness(pace: NodePace) -> tuple[bool, float, float]:
    return pace.is_slow, pace.times_usual or 0.0, pace.seconds


def _progress(beat: Heartbeat) -> tuple[int, float]:
    return beat.iteration, beat.time
