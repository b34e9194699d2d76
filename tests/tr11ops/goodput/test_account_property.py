"""Whatever a past looks like, torn, out of order or absurd: each second of each node is in exactly
one bucket.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings, strategies as st

from tr11ops.base.observed import Unknown
from tr11ops.goodput.account import account, held_micros
from tr11ops.goodput.history_values import (
    AttemptHistory,
    CheckpointMark,
    History,
    Period,
    StepMark,
    micro,
)
from tr11ops.goodput.timeline import Bucket
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord
from tr11ops.rundir.paths import Submission
from trainer.contract.attempt import END_REASONS, PHASES, EndMarker, PhaseRecord

NOW = 1000.0
NODES = ("a", "b", "c", "d", "e")
moments = st.one_of(st.integers(0, 1200).map(float), st.floats(0, 1200, allow_nan=False))
maybe = st.none() | moments
nodes = st.lists(st.sampled_from(NODES), min_size=1, max_size=5).map(tuple)
periods = st.builds(Period, moments, maybe, st.sampled_from((*NODES, "kill switch", "array-held")))
submissions = st.builds(
    Submission, tag=st.sampled_from(("s", "t")), job_id=st.just("1"), scheduler=st.just("slurm"), time=moments,
    user=st.just("me"), host=st.just("h"), run=st.just("run"), variant=st.just("main"),
    array=st.none() | st.sampled_from(("1-3%1", "nonsense")), nodes=st.integers(1, 6), card_hash=st.just(""),
)  # fmt: skip
launches = st.builds(
    LaunchRecord, st.integers(1, 3), nodes, moments, maybe, maybe,
    cause=st.sampled_from(("", "node", "operator", "storage")), blamed=st.just(()) | nodes,
)  # fmt: skip
phases = st.builds(
    PhaseRecord,
    moments,
    st.sampled_from((*PHASES, "nonsense")),
    st.integers(0, 30),
    st.integers(1, 3),
)
markers = st.builds(
    EndMarker, st.sampled_from(sorted(END_REASONS)), st.integers(0, 30), st.none() | st.integers(0, 30),
    st.booleans(), st.just(""), moments, st.just("a"), st.just("1"), st.integers(0, 3),
)  # fmt: skip
verdicts = st.builds(
    AttemptVerdict, st.sampled_from(("error", "signal")), st.just(3), st.none() | st.integers(0, 30),
    st.just(1), st.just(""), time=moments,
)  # fmt: skip
unreadable = st.just(Unknown("no right"))


@st.composite
def attempts(draw, number):
    start = draw(moments)
    return AttemptHistory(
        job_id=str(number), label=str(number), kind=draw(st.sampled_from(("slurm", "foreground"))),
        submission=draw(st.sampled_from(("s", "t", ""))), start=start, ended=draw(maybe),
        is_running=draw(st.none() | st.booleans()), last_sign=draw(moments), nodes=draw(nodes),
        launches=tuple(draw(st.lists(launches, max_size=3, unique_by=lambda launch: launch.launch))),
        phases=tuple(draw(st.lists(phases, max_size=8))),
        marker=draw(st.none() | markers | unreadable), verdict=draw(st.none() | verdicts | unreadable),
        limit=draw(st.none() | st.floats(1, 500)), logged_as=str(number),
    )  # fmt: skip


@st.composite
def histories(draw):
    count = draw(st.integers(0, 4))
    made = sorted(
        (draw(attempts(number)) for number in range(count)), key=lambda attempt: attempt.start
    )
    steps = st.builds(
        StepMark, moments, st.integers(0, 30), st.none() | st.floats(0, 60), st.sampled_from("0123")
    )  # fmt: skip
    return History(
        "run", "main",
        submissions=draw(st.lists(submissions, max_size=3).map(tuple) | unreadable),
        attempts=tuple(made),
        steps=draw(st.lists(steps, max_size=30).map(tuple) | unreadable),
        checkpoints=draw(
            st.lists(st.builds(CheckpointMark, st.integers(0, 30), moments), max_size=3).map(tuple) | unreadable
        ),
        pauses=tuple(draw(st.lists(periods, max_size=2))), holds=tuple(draw(st.lists(periods, max_size=2))),
        exclusions=tuple(draw(st.lists(periods, max_size=3))),
    )  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(histories())
def test_every_second_of_every_node_is_in_one_bucket(history):
    goodput = account(history, NOW)
    buckets = goodput.buckets
    assert set(buckets) == set(Bucket)
    assert sum(amount.node_micros for amount in buckets.values()) == goodput.total.node_micros
    assert held_micros(history.attempts, NOW) == goodput.total.held_micros
    for amount in buckets.values():
        assert 0 <= amount.spare_micros <= amount.held_micros <= amount.node_micros
        assert amount.wall_micros >= 0
    assert all(span.end > span.start and span.nodes > 0 for span in goodput.spans)
    by_attempt = goodput.by(lambda span: span.job_id)
    assert sum(amount.node_micros for amount in by_attempt.values()) == goodput.total.node_micros
    assert (
        sum(a.node_micros for a in goodput.by(lambda span: span.cause).values())
        == goodput.total.node_micros
    )

    extents = {}
    for attempt in history.attempts:
        own = [span for span in goodput.spans if span.job_id == attempt.job_id]
        if not own:
            continue
        first, last = min(span.start for span in own), max(span.end for span in own)
        extents[attempt.job_id] = (first, last, set(attempt.nodes))
        assert first == micro(attempt.start)
        assert last <= micro(NOW)
        # Exactly its nodes, at every moment from its first to its last.
        for begin, end in pairwise(sorted({edge for span in own for edge in span[:2]})):
            assert sum(
                span.nodes for span in own if span.start <= begin and end <= span.end
            ) == len(set(attempt.nodes))
            assert sum(span.is_wall for span in own if span.start <= begin and end <= span.end) == 1
    values = list(extents.values())
    for place, one in enumerate(values):  # no node in two attempts at once
        for other in values[place + 1 :]:
            assert not (one[2] & other[2]) or one[1] <= other[0] or other[1] <= one[0]

    idle = sorted((span.start, span.end) for span in goodput.spans if not span.held)
    held = sorted((first, last) for first, last, _ in extents.values())
    for begin, end in idle:
        assert all(end <= first or last <= begin for first, last in held)
    covered = sorted([*idle, *held])
    reached = covered[0][0] if covered else 0
    gaps = 0
    for begin, end in covered:
        gaps += begin > reached
        reached = max(reached, end)
    finished = any(
        isinstance(a.marker, EndMarker) and a.marker.reason == "finished" for a in history.attempts
    )
    assert gaps <= finished  # what comes after the end of the training belongs to no one


@settings(max_examples=40, deadline=None)
@given(histories(), st.lists(moments, max_size=4))
def test_cut_into_periods_the_sums_are_the_same(history, cuts):
    goodput = account(history, NOW)
    edges = sorted(
        {goodput.begin, goodput.end, *(cut for cut in cuts if goodput.begin < cut < goodput.end)}
    )
    parts = [goodput.between(begin, end) for begin, end in pairwise(edges)]
    for bucket, amount in goodput.buckets.items():
        assert sum(part.buckets[bucket].node_micros for part in parts) == amount.node_micros
    assert sum(len(part.faults) for part in parts) <= len(goodput.faults)
