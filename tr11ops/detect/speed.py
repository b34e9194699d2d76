"""Whether the training is as quick as it was, and which node is slow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from operator import attrgetter
from statistics import fmean, median, median_high
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known
from tr11ops.base.robust import robust_sigma
from tr11ops.base.units import counted, duration
from tr11ops.cluster.arrays import compress
from tr11ops.cluster.base import JobState
from tr11ops.detect.detector import Finding, Severity, detector
from tr11ops.detect.nodes_left import (
    blame_stands,
    exclude_command,
    excluded_nodes,
    held_nodes,
    let_in_since,
    start_again,
    why_no_other,
)
from tr11ops.observe import derived
from tr11ops.observe.forecast import LAST_LINES, LEAST_HISTORY, last_lines, rate_of, windows_before
from tr11ops.observe.liveness import beats_of, phase_patience
from tr11ops.observe.observations import TRAINING_PHASES
from tr11ops.observe.snapshot import Snapshot, Step
from trainer.contract.attempt import Heartbeat
from trainer.contract.compute_record import EVERY_STEPS, ComputeTimes
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.detect.slow_ranks import SlowRank

T = TypeVar("T")

SMALL_SHARE = 0.5  # of the time: a run that loses no more may wait for the morning
STOP_SECONDS = 900.0  # what a stop, a look at the nodes and a start cost
NOISE_FACTOR = 4.0  # times the spread of single lines: a machine shared with others is never steady


class Slowdown(Record):
    """The speed of the last lines and the usual one, in `unit`; `bound` is the least that counts as
    usual. `since`: when the slow lines began, seconds since the epoch; None where they have no time.
    """

    last: tuple[float, ...]
    usual: float
    bound: float
    unit: str
    lines: int
    first: int  # iterations
    final: int
    began: int  # the first iteration of the row of slow lines
    since: float | None = None

    @property
    def factor(self) -> float:
        """How many times as long a step takes as before: the usual speed over that of now."""
        return self.usual / fmean(self.last)

    @property
    def share(self) -> float:
        """The share of the time that is lost, 0 to 1."""
        return 1.0 - 1.0 / self.factor

    def lost_seconds(self, now: float) -> float:
        """What it has cost since it began."""
        if self.since is None:
            return 0.0
        return self.share * max(0.0, now - self.since)


SLOWER = "The training goes on, slower."


@detector(
    "slow",
    needs=("jobs", "steps"),
    uses=("training.phases", "training.compute_times"),
    bound="`watch.slow_percent` (3 %), and 4 times the spread of the lines",
    severities="WARNING; CRITICAL once much is lost; INFO until the ranks' own compute times cover the slow steps",
)
def slow(snapshot: Snapshot) -> Iterator[Finding]:
    """The training is slower than it was, without a restart in between: one slow GPU holds all the
    others back.

    What to do: look; once it has cost as much as a stop does, stop, `tr11 nodes bench`, go on. When
    no node is found, leave nodes out at the next restart, a few at a time.

    Mean and median of the last 3 lines, or half minute, against 100 lines of the same launch,
    batch and length.

    CRITICAL when a step takes more than twice as long, and a quarter of an hour is lost by it: what a
    stop, a look at the nodes and a start cost. Until morning it would lose more than half of the
    night, and nothing ends it but a person.
    """
    if not snapshot.active_jobs:
        return
    found = slowdown(snapshot)
    if found is None:
        return
    nodes = [node for job in snapshot.active_jobs for node in job.nodes]
    shown = f"{fmean(found.last):.4g} on average"
    if len(found.last) <= LAST_LINES:
        shown = ", ".join(f"{value:.4g}" for value in found.last)
    fix, *then = _what_finds_it(snapshot, found, nodes)
    cost = duration(found.lost_seconds(snapshot.time))
    stop = duration(STOP_SECONDS)
    yield Finding(
        slow.name,
        _severity(snapshot, found),
        f"the training is slow: a step takes {found.factor:.2f} times as long as before",
        evidence=(
            f"{found.unit} of iterations {found.first} to {found.final}: {shown}",
            f"the median of {found.lines} lines before them was {found.usual:.4g}; below {found.bound:.4g} is slow",
            *_which_node(snapshot, found),
            f"it has cost {cost} so far; to stop, measure the nodes and start again takes some {stop}",
        ),
        fix=fix,
        then=tuple(then),
        since=found.since,
        by_itself=SLOWER,
    )


def _which_node(snapshot: Snapshot, found: Slowdown) -> Iterator[str]:
    """The nodes that the ranks' own compute times name; where they name none, why not."""
    nodes = held_nodes(snapshot) | {
        beat.host for job in snapshot.active_jobs for beat in beats_of(snapshot, job)
    }
    measured = known(snapshot.training.compute_times, ())
    named = sorted(_computing(snapshot, measured, nodes))
    if named:
        yield f"the ranks' own compute times name {', '.join(named)}"
        return
    yield from _what_ranks_say(snapshot, found)
    yield from _togetherness(snapshot)


def _severity(snapshot: Snapshot, found: Slowdown) -> Severity:
    if is_measured_still(snapshot, found):
        return Severity.INFO
    if _costs_the_night(found.share, found.lost_seconds(snapshot.time)):
        return Severity.CRITICAL
    return Severity.WARNING


def _costs_the_night(share: float, lost_seconds: float) -> bool:
    """Whether to wait until morning costs more than to stop now."""
    return share > SMALL_SHARE and lost_seconds > STOP_SECONDS


def is_measured_still(snapshot: Snapshot, found: Slowdown) -> bool:
    """Whether the ranks' own compute times do not cover the slow steps yet: they may name a node in
    a few more.

    They are written every ten steps; what has none after twenty is not waited for.
    """
    times = known(snapshot.training.compute_times, ())
    if not times:
        return False

    if found.final >= found.began + 2 * EVERY_STEPS:
        return False
    return max(one.iteration for one in times) < found.began + EVERY_STEPS


def _what_ranks_say(snapshot: Snapshot, found: Slowdown) -> Iterator[str]:
    if not known(snapshot.training.compute_times, ()):
        return

    if is_measured_still(snapshot, found):
        yield f"whether it is one node, the ranks' own compute times say from iteration {found.began + EVERY_STEPS} on"
    else:
        yield "the ranks' own compute times name no node: all compute for longer, or wait for network, files or data"


def _what_finds_it(snapshot: Snapshot, found: Slowdown, nodes: list[str]) -> tuple[str, ...]:
    """What to type. It may pass by itself, so until it has cost what a stop costs: a look. Then,
    with Slurm, the nodes are measured against each other while none of them trains; `nodes bench`
    has the command that leaves out a slow one.
    """
    if not nodes:
        return (derived.command(snapshot, "logs"),)
    if snapshot.scheduler != "slurm":
        return (derived.command(snapshot, f"nodes check {compress(nodes)}"),)
    if found.lost_seconds(snapshot.time) < STOP_SECONDS:
        return (derived.command(snapshot, "nodes history"),)
    stop = derived.command(snapshot, "kill --wait --reason 'to measure the nodes'")
    return stop, derived.command(snapshot, "nodes bench"), *derived.go_on(snapshot)


def _togetherness(snapshot: Snapshot) -> Iterator[str]:
    """Every iteration ends with all ranks waiting for the slowest, so that their heartbeats rarely
    tell it apart.
    """
    for job in snapshot.active_jobs:
        beats = beats_of(snapshot, job)
        if not all(beat.is_own for beat in beats):
            yield "which node it is cannot be told from the heartbeats: no rank writes its own"
        elif len(beats) > 1 and len({beat.iteration for beat in beats}) == 1:
            yield f"which node it is cannot be told from the heartbeats: all {len(beats)} ranks keep step"


def slowdown(snapshot: Snapshot) -> Slowdown | None:
    """The slowdown of the last lines, or None. Lines beside a save in the background do not count, nor
    do those of an attempt that is over where another one runs.
    """
    steps = _beside_no_save(snapshot, derived.comparable(snapshot))
    running = derived.identifiers_of(snapshot.active_jobs)
    if running and steps and steps[-1].job_id not in {"", *running}:
        return None
    pairs = [(step, value) for step in steps if (value := rate_of(step.record)[0]) is not None]
    pace = derived.seconds_per_iteration(snapshot)
    if pace is None:
        return None
    count = last_lines(snapshot, pace)
    if len(pairs) < LEAST_HISTORY + count:
        return None
    last, before = pairs[-count:], [value for _, value in pairs[:-count]]
    values = tuple(value for _, value in last)
    for window in windows_before(before):
        usual = median(window)
        bound = _bound(snapshot, window, usual)
        if max(fmean(values), median(values)) < bound:
            first, final = last[0][0].record.iteration, last[-1][0].record.iteration
            began = _where_it_began(pairs, count, usual, bound)
            return Slowdown(
                values,
                usual,
                bound=bound,
                unit=rate_of(last[-1][0].record)[1],
                lines=len(window),
                first=first,
                final=final,
                began=pairs[began][0].record.iteration,
                # a line is written when its step has ended: it began with the line before it
                since=pairs[began - 1][0].time,
            )
    return None


def _where_it_began(pairs: list[tuple[Step, float]], count: int, usual: float, bound: float) -> int:
    """The first slow line, by its place in `pairs`, of which the last `count` are slow on the whole,
    and those before them as far as each is below the bound. Slow is what is nearer to the slowest
    than to the usual: others on the machine make lines a little slower at any time.
    """
    start = len(pairs)
    while start > 1 and pairs[start - 1][1] < bound:
        start -= 1
    places = range(min(start, len(pairs) - count), len(pairs))
    middle = (usual + min(pairs[place][1] for place in places)) / 2.0
    return next(place for place in places if pairs[place][1] <= middle)


def _bound(snapshot: Snapshot, window: Sequence[float], usual: float) -> float:
    """The least speed that is no slowdown: by the card, and by how much the lines differ anyway."""
    spread = robust_sigma(value - usual for value in window)
    return usual - max(snapshot.run.watch.slow_percent / 100.0 * usual, NOISE_FACTOR * spread)


def _beside_no_save(snapshot: Snapshot, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Without the lines since the last save began, as long as its checkpoint is not there (and the
    line after it).
    """
    saves = [span.began for span in known(snapshot.training.phases, ()) if span.phase == "saving"]
    if not saves or not steps:
        return steps
    began, pace = max(saves), derived.seconds_per_iteration(snapshot) or 0.0
    end = began + phase_patience(snapshot, "saving")
    for entry in snapshot.examined:
        if entry.created is not None and entry.created >= began:
            end = entry.created + pace
    return tuple(step for step in steps if step.time is None or not began < step.time <= end)


BEHIND_ITERATIONS = 2  # one is nothing: heartbeats of one moment are not read in one moment
# worth of iterations; heartbeats are a second apart at least, however quick the steps
BEHIND_SECONDS = 4.0


@detector(
    "slow-node",
    needs=("jobs",),
    uses=(
        "heartbeats",
        "steps",
        "training.phases",
        "training.node_warnings",
        "training.compute_times",
        "training.compute_before",
        "readmissions",
    ),
    bound="`watch.slow_percent` (3 %) and 6 times the spread of ranks and steps, 100 % at most; below 25 %"
    " what lasts for 60 steps and 10 minutes; 2 iterations, worth 4 s",
    severities="WARNING; CRITICAL once much is lost by a node that was slow from the first step on; INFO where"
    " all nodes are one machine, and of a node that the running attempt does without",
)
def slow_node(snapshot: Snapshot) -> Iterator[Finding]:
    """Which node is slow: by its ranks' own compute times, else by what else tells the nodes apart.

    What to do: `tr11 nodes check NODE`; when it is bad, `tr11 nodes exclude NODE`, and the next start
    is without it.

    A node with a rank that computes for longer than its peers; one whose ranks are all
    iterations behind; or, in a slow training, one that a health check has warned of. What the ranks of the
    last attempt measured stands after its end, until the node is excluded, taken back, or measured again, by
    an attempt or to be as quick as others by `tr11 nodes bench`.

    A training that was never quicker has no `slow`: then the node's own finding is CRITICAL by the same
    rule, what it costs being what its rank computes longer than its peers.
    """
    running = [job for job in snapshot.active_jobs if job.state is JobState.RUNNING]
    slow, pace = _may_be_suspected(snapshot), derived.seconds_per_iteration(snapshot)
    slowed = slowdown(snapshot)
    since = None if slowed is None else slowed.since
    measured = known(snapshot.training.compute_times, ())
    for job in running:
        beats = beats_of(snapshot, job)
        computing = _computing(snapshot, measured, {*job.nodes, *(beat.host for beat in beats)})
        sure = _by_node((*_numbers(computing), *_behind(beats, pace)))
        warned = _by_node(_warned(snapshot, job.nodes) if slow else ())
        for node, lines in warned.items():
            sure.get(node, []).extend(lines)
        found = sure
        if not sure and len(warned) == 1:  # of several none is told apart by a warning
            found = warned
        for node, lines in found.items():
            severity = Severity.WARNING
            if slowed is None and node in computing:
                share, lost = _cost_since_the_start(snapshot, computing[node][0])
                if lost > 0.0:
                    of = f"{share * 100.0:.0f} % of each step"
                    lines.append(f"it may have cost {duration(lost)} since the first step: {of}")
                if _costs_the_night(share, lost):
                    severity = Severity.CRITICAL
            one = _finding(snapshot, node, evidence=lines, is_sure=bool(sure))
            if one.severity is Severity.WARNING:
                one = replace(one, severity=severity)
            yield replace(one, since=since)
    yield from held_back_before(snapshot)


def _cost_since_the_start(snapshot: Snapshot, slowest: SlowRank) -> tuple[float, float]:
    """What all others have waited for it since the first step of the launch: the share of each step,
    0 to 1, and the seconds in all; zeros where it was not slow from there on, or that is not known.
    """
    steps, pace = derived.comparable(snapshot), derived.seconds_per_iteration(snapshot)
    if slowest.by_past or not steps or steps[0].time is None or not pace:
        return 0.0, 0.0
    share = min(1.0, (slowest.seconds - slowest.usual) / pace)
    return share, share * max(0.0, snapshot.time - steps[0].time)


def held_back_before(snapshot: Snapshot) -> Iterator[Finding]:
    """Nodes that were slow when an attempt last measured them, and that the next one may have again."""
    if snapshot.scheduler == "local" or isinstance(snapshot.exclusions, Unknown):
        return
    training, newest = snapshot.training, derived.last_attempt(snapshot)
    names = derived.identifiers_of(snapshot.active_jobs)
    now = tuple(times for times in known(training.compute_times, ()) if times.can_be_judged)
    before = known(training.compute_before, ())
    if now and newest is not None and newest.job_id not in names:
        now, before = (), now
    if not before:
        return
    measured = {times.host for times in now}
    when = {times.host: times.time for times in before}
    off = excluded_nodes(snapshot) | snapshot.run.excluded_nodes | measured
    computing = _computing(snapshot, before, when.keys() - off)
    for node, lines in _by_node(_numbers(computing)).items():
        is_cleared = let_in_since(snapshot, node, when[node], of_speed=True)
        if not is_cleared and blame_stands(snapshot, node, when[node], ""):
            yield _before(snapshot, node, lines)


def _before(snapshot: Snapshot, node: str, lines: list[str]) -> Finding:
    has_it = any(node in job.nodes for job in snapshot.active_jobs)
    one = _finding(snapshot, node, evidence=lines, is_sure=True)
    then, severity = one.then, one.severity
    if not has_it and derived.stop_of(snapshot) is not None:
        then = derived.go_on(snapshot)
    if snapshot.active_jobs and not has_it:
        severity = Severity.INFO
    return replace(
        one,
        severity=severity,
        title=f"{node} held the others back in the last attempt",
        evidence=(*one.evidence, "it is not excluded"),
        then=then,
        by_itself=SLOWER if has_it else "",
    )


def _by_node(told: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """What is told of each node, in the order in which it is told."""
    found: dict[str, list[T]] = {}
    for node, each in told:
        found.setdefault(node, []).append(each)
    return found


def _may_be_suspected(snapshot: Snapshot) -> bool:
    """Whether the training is slow, and the ranks' own compute times have said what they can say of
    it.
    """
    found = slowdown(snapshot)
    return found is not None and not is_measured_still(snapshot, found)


def _finding(snapshot: Snapshot, node: str, evidence: list[str], is_sure: bool) -> Finding:
    """One that is only suspected is checked first. Of nodes that are one machine, none can be
    exchanged.
    """
    if snapshot.scheduler == "local":
        return Finding(
            slow_node.name,
            Severity.INFO,
            f"some ranks, of {node}, are slower than their peers: all nodes are this one machine",
            subject=node,
            identity=(node,),
            evidence=(
                *evidence,
                "other work on this machine slows those that share a processor with it",
            ),
        )
    check = derived.command(snapshot, f"nodes check {node}")
    why_not = ""
    if is_sure:
        why_not = why_no_other(snapshot, node)
    if why_not:
        evidence = [*evidence, why_not]
    can_leave = is_sure and not why_not
    return Finding(
        slow_node.name,
        Severity.WARNING,
        f"{node} holds the others back" if is_sure else f"{node} may be the slow node",
        subject=node,
        identity=(node,),
        evidence=tuple(evidence),
        fix=exclude_command(snapshot, node, "it holds the others back") if can_leave else check,
        then=start_again(snapshot, node) if can_leave else (),
        by_itself=SLOWER,
    )


def _computing(
    snapshot: Snapshot, measured: tuple[ComputeTimes, ...], nodes: AbstractSet[str]
) -> dict[str, list[SlowRank]]:
    """Those of these nodes that have slow ranks, by what the ranks of one attempt measured, each with
    these, the slowest first.
    """
    if not measured:
        return {}
    from tr11ops.detect.slow_ranks import slow_ranks, windows_to_last

    windows = windows_to_last(derived.seconds_per_iteration(snapshot))
    slow = slow_ranks(measured, snapshot.run.watch.slow_percent, windows)
    by_node = _by_node((one.times.host, one) for one in slow if one.times.host in nodes)
    for found_here in by_node.values():
        found_here.sort(key=attrgetter("factor"), reverse=True)
    return by_node


def _numbers(computing: Mapping[str, list[SlowRank]]) -> Iterator[tuple[str, str]]:
    for node, found_here in computing.items():
        worst = found_here[0]
        more = ""
        if len(found_here) > 1:
            more = f" (and {len(found_here) - 1} more of its ranks)"
        than = "at first, and the others as long as ever" if worst.by_past else "its peers"
        yield (
            node,
            f"its rank {worst.times.rank} computes {worst.factor:.2f} times as long as {than}{more}",
        )
        seconds = f"{worst.seconds:.3g} s a step, {worst.usual:.3g} s is usual in stage {worst.times.stage}"
        yield (
            node,
            f"{seconds} ({counted(worst.steps, 'step')} up to iteration {worst.times.iteration})",
        )


def _behind(beats: tuple[Heartbeat, ...], pace: float | None) -> Iterator[tuple[str, str]]:
    """Nodes that are behind what other nodes had done by an earlier moment. A heartbeat that is older
    than the others' tells of no lag: its node may have done as much since.
    """
    if pace is None or not all(beat.is_own and beat.phase in TRAINING_PHASES for beat in beats):
        return
    by_node = _by_node((beat.host, beat) for beat in beats)
    last_words = {node: max(beat.time for beat in own) for node, own in by_node.items()}
    least = {node: min(beat.iteration for beat in own) for node, own in by_node.items()}
    for node, own in by_node.items():
        furthest = max(beat.iteration for beat in own)
        done = [
            least[other]
            for other, time in last_words.items()
            if other != node and time <= last_words[node]
        ]
        if not done:
            continue
        usual = median_high(done)
        lag = usual - furthest
        if lag >= BEHIND_ITERATIONS and lag * pace > BEHIND_SECONDS:
            ranks = counted(len(own), "rank is", "ranks are")
            yield node, f"its {ranks} at iteration {furthest}, the others at {usual}"


def _warned(snapshot: Snapshot, nodes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for warning in known(snapshot.training.node_warnings, ()):
        if warning.node in nodes:
            yield warning.node, f"health check {warning.check} said at the start: {warning.why}"
