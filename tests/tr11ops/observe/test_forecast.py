"""What comes next: the range of the end, the next checkpoint, throughput against the best, whatever
the log's length; and what is queued or runs and covers none of the training that is left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    changed,
    checkpoints,
    ended,
    facts_with,
    idle,
    pending,
    record,
    running,
    snapshot,
    steps,
    with_facts,
    without_slow_node,
    wordless,
)
from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.cluster.base import Node
from tr11ops.detect.detector import Severity
from tr11ops.detect.queued_work import chain_end
from tr11ops.detect.site import nodes_short, waits_for_site
from tr11ops.handover.coming import coming_events
from tr11ops.launch.queue_checks import coverage_of
from tr11ops.observe.forecast import (
    NextCheckpoint,
    Throughput,
    end_of,
    next_checkpoint,
    no_cover,
    queue_coverage_seconds,
    speed_of,
)
from tr11ops.observe.look import facts_of
from tr11ops.observe.observations import Phase
from tr11ops.observe.snapshot import (
    Checkpoints,
    EqualSteps,
    Snapshot,
    Step,
    course_of,
    fits,
    steps_left,
    weight_at,
    work,
)
from tr11ops.queue.repair import plan_repair
from tr11ops.runcard.card import load_card, shipped_folder
from tr11ops.runcard.speed import RunHistory
from tr11ops.status.answer import answer
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import PLACE_BYTES, PLACES, ExtraObservations, best_rates
from tr11ops.status.prometheus import exposition
from tr11ops.status.rows import NO_SPEED, Screen, jobs, training
from tr11ops.watchdog.verdict import judge
from trainer.contract.metrics_record import format_step
from trainer.contract.paths import RunPaths

STRETCHES = st.lists(
    st.builds(EqualSteps, st.integers(1, 500), st.floats(0.01, 10.0), st.integers(1, 4096)),
    min_size=1,
    max_size=6,
)


# ----------------------------------------------------------------------------- the end
def test_the_earliest_end_is_what_is_left_at_todays_pace() -> None:
    end = end_of(snapshot())
    assert end is not None
    assert end.earliest == (115311 - 31219) * 105.0


def test_other_nodes_are_forecast_by_their_own_steps_alone() -> None:
    assert end_of(without_slow_node(0)) is None and end_of(without_slow_node(2)) is None
    end = end_of(without_slow_node(3))
    assert end is not None and end.earliest == (115311 - 31222) * 40.0
    same = without_slow_node(0)
    kept = tuple(replace(attempt, nodes=running().nodes) for attempt in known(same.attempts, ()))
    assert end_of(changed(same, attempts=kept)) is not None, "the same nodes go on as they did"
    shown = status_of(same, (), judge(same, ()), ExtraObservations())
    assert ("ETA", NO_SPEED, "") in list(training(shown, Screen(80, unicode=False)))


def test_the_likely_end_carries_the_waits_of_the_last_weeks() -> None:
    # ten days ago the training was at 26,400; at 105 s a step it could have come to 34,600 by now
    attempts = (ended("1006", age=10 * DAY, iteration=26400, checkpoint_step=26400),)
    end = end_of(snapshot(attempts=attempts))
    assert end is not None
    assert end.share is not None and end.likely is not None and end.window is not None
    trained = (31219 - 26400) * 105.0
    assert end.window == pytest.approx(10 * DAY - 30)
    assert end.share == pytest.approx(trained / end.window)
    assert end.likely == pytest.approx(end.earliest / end.share)


def test_what_is_too_little_to_learn_from_gives_no_likely_end() -> None:
    lone = snapshot(steps=steps(count=20), attempts=())  # half an hour
    old = snapshot(steps=steps(count=20), attempts=(ended("1006", age=40 * DAY),))
    ahead = snapshot(steps=steps(count=20), attempts=(ended("1006", age=-DAY, iteration=31000),))
    for given_snapshot in (lone, old, ahead):
        end = end_of(given_snapshot)
        assert end is not None and (end.likely, end.share) == (None, None)
    for nothing in (idle(steps=()), snapshot(steps=Unknown("away"))):
        assert end_of(nothing) is None


def test_a_batch_ramp_is_in_the_estimate() -> None:
    """At the ramp's first step the remaining steps are longer than today's: the pipeline's slots
    are counted.
    """
    card = load_card(
        shipped_folder() / "tr11-176B-ml.toml",
        (),
        {"six_ALL_CCFRSCRATCH": "/s"},
        keep_undefined=True,
    )
    course = course_of(card)
    total = card.total_iterations
    assert sum(stretch.iterations for stretch in course) == total
    assert course[-1].weight == pytest.approx(1.0)
    first = record(
        100,
        total_iterations=total,
        global_batch_size=course[0].batch_size,
        seconds_per_iteration=10.0,
    )
    early = with_facts(snapshot(steps=(Step(first, NOW - 5, "1007"),)), course=course)
    end = end_of(early)
    assert end is not None
    assert end.earliest == pytest.approx(work(course, 100, total) * 10.0 / course[0].weight)
    assert end.earliest > 2 * (total - 100) * 10.0
    # a card that tells of another training is not believed
    other = replace(first, global_batch_size=999)
    strange = with_facts(snapshot(steps=(Step(other, NOW - 5, "1007"),)), course=course)
    plain = end_of(strange)
    assert plain is not None
    assert plain.earliest == (total - 100) * 10.0


def test_every_word_of_what_is_left_is_the_same_one() -> None:
    """In the batch ramp, where the steps to come are longer than today's: on the screen and for
    programs alike.
    """
    card = load_card(
        shipped_folder() / "tr11-176B-ml.toml",
        (),
        {"six_ALL_CCFRSCRATCH": "/s"},
        keep_undefined=True,
    )
    facts = facts_of(card)
    total = card.total_iterations
    first = record(
        100,
        total_iterations=total,
        global_batch_size=facts.course[0].batch_size,
        seconds_per_iteration=10.0,
    )
    last = running(), pending((8,))
    seen = with_facts(
        snapshot(steps=(Step(first, NOW - 5, "1007"),), jobs=last), course=facts.course
    )
    left = steps_left(facts.course, 100, total) * 10.0
    assert left > 2 * (total - 100) * 10.0
    status = status_of(seen, (), judge(seen, ()))
    document = status.document()
    assert (
        document["remaining_seconds"]
        == document["finish"]["earliest_seconds"]
        == pytest.approx(left)
    )
    assert document["eta"] == document["finish"]["earliest"]
    (metric,) = (
        line
        for line in exposition(status).splitlines()
        if line.startswith("tr11_remaining_seconds{")
    )
    assert float(metric.split()[-1]) == pytest.approx(left)
    (finding,) = chain_end.detect(seen)
    assert finding.evidence[0].startswith(f"{duration(left)} of training are left")
    tasks = coverage_of(card, 10, RunHistory(step=10.0, step_iteration=100), 100)
    assert tasks.remaining == pytest.approx(left)


@given(STRETCHES, st.lists(st.integers(0, 4000), min_size=3, max_size=3).map(sorted))
def test_work_adds_up(course: list[EqualSteps], points: list[int]) -> None:
    first, middle, last = points
    whole = work(course, first, last)
    assert whole >= 0
    assert math.isclose(
        whole, work(course, first, middle) + work(course, middle, last), rel_tol=1e-9, abs_tol=1e-9
    )
    assert work(course, first, first) == 0
    if last > first:
        assert math.isclose(
            whole,
            sum(weight_at(course, step) for step in range(first + 1, last + 1)),
            rel_tol=1e-6,
            abs_tol=1e-6,
        )


def test_a_course_fits_only_its_own_batches() -> None:
    course = (EqualSteps(10, 0.5, 16), EqualSteps(5, 1.0, 32))
    assert fits(course, 10, 16) and fits(course, 11, 32)
    assert not fits(course, 10, 32) and not fits(course, 16, 32) and not fits((), 1, 16)


# ----------------------------------------------------------------------------- the next checkpoint
def test_the_next_checkpoint_is_the_one_that_comes_first() -> None:
    by_interval = next_checkpoint(snapshot())
    assert by_interval is not None
    assert (by_interval.step, by_interval.why) == (31300, "interval")
    assert by_interval.seconds == (31300 - 31219) * 105.0 - 30
    leaving = next_checkpoint(snapshot(jobs=(running(start_time=NOW - 359_400 + 600),)))
    assert leaving is not None
    assert (leaving.step, leaving.seconds, leaving.why) == (None, 600.0, "end of the task")
    minutes = with_facts(snapshot(), checkpoint_minutes=40.0)
    by_clock = next_checkpoint(minutes)
    assert by_clock is not None
    assert (by_clock.seconds, by_clock.why) == (400.0, "minutes")
    # a launch that has not saved yet counts from where it began to train
    phases = (
        Phase("1007", 2, "loading", 31200, NOW - 700),
        Phase("1007", 2, "training", 31200, NOW - 600),
    )
    for kept in (checkpoints(31200), Checkpoints((), None, ())):
        anew = changed(minutes, phases=phases, checkpoints=kept)
        assert next_checkpoint(anew) == NextCheckpoint(None, 1800.0, "minutes")
    assert (
        next_checkpoint(with_facts(snapshot(), checkpoint_interval=None, exit_plan=None))
        is not None
    )


def test_before_the_first_steps_the_next_checkpoint_is_iterations_away() -> None:
    """Not the end of the task, hours away: the card's interval comes first."""
    none = with_facts(
        snapshot(steps=(), attempts=(), checkpoints=checkpoints(25)), checkpoint_interval=25
    )
    following = next_checkpoint(none)
    assert following == NextCheckpoint(50, None, "interval", 25)
    fresh = replace(none, checkpoints=Checkpoints((), None, ()))
    assert next_checkpoint(fresh) == NextCheckpoint(25, None, "interval", 25)


@pytest.mark.parametrize(
    "given_snapshot",
    [
        idle(),
        snapshot(heartbeats=beats(age=5 * HOUR), steps=steps(age=5 * HOUR)),
        snapshot(jobs=Unknown("away"), heartbeats=(), steps=()),
    ],
    ids=["nothing runs", "stalled", "blind"],
)
def test_what_does_not_train_saves_nothing(given_snapshot: object) -> None:
    assert next_checkpoint(given_snapshot) is None  # type: ignore[arg-type]


def test_the_last_checkpoint_is_that_of_the_end() -> None:
    last = record(115300)
    following = next_checkpoint(snapshot(steps=(Step(last, NOW, "1007"),)))
    assert following is not None
    assert following.step == 115311


# ----------------------------------------------------------------------------- the speed
def at_speeds(*launches: tuple[str, Sequence[float]]) -> tuple[Step, ...]:
    """The lines of these launches, by their jobs and the seconds of their steps: one of 10 s does
    100 TFLOPs.
    """
    told = [(job, seconds) for job, row in launches for seconds in row]
    return tuple(
        Step(
            record(
                31219 - len(told) + index, seconds_per_iteration=seconds, tflops=1000.0 / seconds
            ),
            NOW - 30.0,
            job,
        )
        for index, (job, seconds) in enumerate(told, 1)
    )


@pytest.mark.parametrize(
    "steps_of",
    [
        at_speeds(("1007", [10.0] * 40 + [80.0] * 2)),  # one node has just become slow
        at_speeds(("1007", [10.0] * 40 + [80.0] * 9)),
        at_speeds(("1007", [10.0] * 40 + [80.0] * 60)),
        at_speeds(("1007", [1.0] * 50 + [8.0] * 15)),  # half of what is "now" is slow
        at_speeds(("1006", [10.0] * 40 + [80.0] * 40), ("1007", [10.0] * 4)),  # a resume without it
        at_speeds(("1006", [80.0] * 40), ("1007", [10.0] * 2)),
        at_speeds(("1007", [10.0, 80.0] * 30)),
    ],
)
def test_no_two_figures_of_the_speed_are_of_different_steps(steps_of: tuple[Step, ...]) -> None:
    """The seconds of a step, its share of the best, and what is left of the training."""
    seen = snapshot(steps=steps_of, attempts=())
    speed, end = speed_of(seen, (1000.0, 25.0)), end_of(seen)
    assert speed is not None and speed.throughput is not None and end is not None
    assert speed.throughput.percent == pytest.approx(100.0 / speed.seconds)
    assert end.earliest == pytest.approx((115311 - 31219) * speed.seconds)
    shown = status_of(seen, (), judge(seen, ()), ExtraObservations(best=(1000.0, 25.0)))
    assert shown.seconds_per_iteration == speed.seconds
    assert shown.throughput == speed.throughput and shown.remaining_seconds == end.earliest


def test_a_forecast_at_another_speed_than_the_usual_says_so() -> None:
    slow = snapshot(steps=at_speeds(("1007", [10.0] * 40 + [80.0] * 300)), attempts=())
    end = end_of(slow)
    assert end is not None
    assert (end.earliest, end.usual) == ((115311 - 31219) * 80.0, (115311 - 31219) * 10.0)
    shown = status_of(slow, (), judge(slow, ()), ExtraObservations())
    (eta,) = [text for label, text, _ in training(shown, Screen(80, False)) if label == "ETA"]
    assert eta.startswith("at this speed ") and eta.endswith("; 9 d 17 h at its usual speed")
    for row in ([10.0] * 60, [10.0] * 40 + [12.0] * 5, [80.0] * 5, [80.0] * 40 + [10.0] * 40):
        alike = end_of(snapshot(steps=at_speeds(("1007", row)), attempts=()))
        assert alike is not None and alike.usual is None, row
    after = end_of(snapshot(steps=at_speeds(("1006", [80.0] * 60), ("1007", [10.0] * 5))))
    assert after is not None and after.usual is None, (
        "another launch, of which no usual speed is known"
    )


def throughput(seen: Snapshot, best: tuple[float, float] | None) -> Throughput | None:
    speed = speed_of(seen, best)
    return None if speed is None else speed.throughput


def test_throughput_is_against_the_best_and_never_above_it() -> None:
    now = throughput(snapshot(), (160.0, 25.0))
    assert now is not None
    assert (now.current, now.best, now.unit, round(now.percent or 0)) == (
        149.5,
        160.0,
        "TFLOPs",
        93,
    )
    better = throughput(snapshot(), (140.0, 25.0))
    assert better is not None
    assert (better.best, better.percent) == (149.5, 100.0)
    unseen = throughput(snapshot(), None)
    assert unseen is not None
    assert (unseen.best, unseen.percent) == (None, None)


def test_a_node_that_becomes_slow_shows_in_the_speed_at_once(tmp_path: Path) -> None:
    """While a slow node holds the others back: in three steps, in a short log, and where most of it
    was slow.
    """
    for quick, slow in ((57, 3), (12, 40), (30, 3)):
        rows = [record(n, tflops=150.0 if n <= quick else 75.0) for n in range(1, quick + slow + 1)]
        paths = RunPaths(tmp_path / f"{quick}-{slow}", "r", "main")
        paths.logs.mkdir(parents=True)
        paths.main_log.write_text("".join(format_step(row) + "\n" for row in rows))
        seen = snapshot(
            steps=tuple(
                Step(row, NOW - 105 * (quick + slow - row.iteration), "1007") for row in rows
            )
        )
        now = throughput(seen, known(best_rates(paths), None))
        assert now is not None and (now.current, now.best, now.percent) == (75.0, 150.0, 50.0), (
            quick,
            slow,
        )


def test_without_flops_it_is_samples() -> None:
    given_steps = tuple(Step(record(n, tflops=math.nan), NOW - n, "1007") for n in range(1, 9))
    now = throughput(snapshot(steps=given_steps), (0.0, 39.0))
    assert now is not None
    assert (now.current, now.best, now.unit) == (19.5, 39.0, "samples/s")
    assert throughput(snapshot(steps=()), None) is None


def test_the_best_is_found_in_a_log_of_any_length(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "r", "main")
    assert best_rates(paths) is None
    paths.logs.mkdir(parents=True)
    rows = [
        to_builtins(record(n, tflops=120.0 if n < 6000 else 150.0, samples_per_second=19.0))
        for n in range(1, 12001)
    ]
    rows[2000]["tflops"] = 900.0  # one step is no throughput
    text = "".join(
        json.dumps({"kind": "step", **row, "time": 1.0, "job_id": "1"}) + "\n" for row in rows
    )
    paths.metrics.write_text(text)
    assert len(text) > 4 * PLACES * PLACE_BYTES
    assert best_rates(paths) == (150.0, 19.0)
    paths.metrics.unlink()
    paths.main_log.write_text(
        "".join("worker words\n" + format_step(record(n)) + "\n" for n in range(1, 2000))
    )
    assert best_rates(paths) == (149.5, 19.5)
    paths.metrics.mkdir()
    assert isinstance(best_rates(paths), Unknown)


@given(st.binary(max_size=3000))
def test_garbage_has_no_throughput(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder), "r", "main")
        paths.logs.mkdir(parents=True)
        paths.metrics.write_bytes(content)
        assert best_rates(paths) is None


NODES = tuple(
    Node(f"n{number:02d}", frozenset({"mixed"}), partitions=("gpu",)) for number in range(1, 49)
)
HOST = replace(wordless("1007"), nodes=tuple(node.name for node in NODES))
SHORT = running(time_limit_seconds=2400, start_time=NOW - 1000)
QUEUED: dict[str, Any] = {"partition": "gpu", "time_limit_seconds": 2400}


def first(*words: str) -> tuple[Node, ...]:
    """The nodes, the first of them in this state."""
    return (replace(NODES[0], states=frozenset(words)), *NODES[1:])


def seen(nodes: tuple[Node, ...] = NODES, **changes: Any) -> Snapshot:
    queued = pending(**{**QUEUED, **changes})
    return with_facts(snapshot(jobs=(SHORT, queued), nodes=nodes, attempts=(HOST,)), exit_plan=None)


SILENT = "job 1000_7: n01, which runs its batch script, does not answer the scheduler"
FEW = "47 of 48 nodes of gpu can be used, it asks for 48"
CLOSED = tuple(replace(node, shut_partitions=("gpu",)) for node in NODES)
CASES = {
    "its partition is down": (seen(CLOSED), ["job 1000_[8-10%1] (3 tasks): the site has closed its partition"], 1400.0),
    "it says so": (
        seen(reason="PartitionDown"),
        ["job 1000_[8-10%1] (3 tasks): the site has closed its partition (PartitionDown)"],
        1400.0,
    ),
    "a node is drained": (seen(first("mixed", "drain")), [f"job 1000_[8-10%1] (3 tasks): {FEW}"], 1400.0),
    "the batch host is silent": (
        seen(first("mixed", "not_responding")), [SILENT, f"job 1000_[8-10%1] (3 tasks): {FEW}"], 0.0,
    ),
    "the batch host is down": (
        seen(first("down", "not_responding")),
        ["job 1000_7: it has lost n01, which ran its batch script", f"job 1000_[8-10%1] (3 tasks): {FEW}"],
        0.0,
    ),
    "it is held": (seen(reason="JobHeldUser"), ["job 1000_[8-10%1] (3 tasks): it is held (JobHeldUser)"], 1400.0),
    "it may not start for days": (
        seen(eligible_time=NOW + 3 * 24 * HOUR),
        ["job 1000_[8-10%1] (3 tasks): it may not start before 2022-05-04 12:00 UTC"],
        1400.0,
    ),
    "it may start when this one ends": (seen(eligible_time=NOW + 1000.0), [], 1400.0 + 3 * 2400.0),
    "all is well": (seen(), [], 1400.0 + 3 * 2400.0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_go_on_covers_nothing_and_is_named_with_its_reason(case: str) -> None:
    given, words, seconds = CASES[case]
    assert [str(one) for one in no_cover(given)] == words
    assert queue_coverage_seconds(given, only_sure=True) == seconds
    verdict = judge(given, ())
    document = status_of(given, (), verdict).document()
    assert document["queue_sure_seconds"] == seconds
    assert [(one["job"], one["why"]) for one in document["no_cover"]] == [
        (line.split(" ")[1].rstrip(":"), line.split(": ", 1)[1]) for line in words
    ]
    rows = " / ".join(text for _, text, _ in jobs(status_of(given, (), verdict)))
    assert all(line in rows for line in words), rows
    assert ("covers nothing" in rows) is (seconds == 0)
    said = answer(given, (), verdict, ExtraObservations()).text
    card = load_card(
        shipped_folder() / "tr11-176B-ml.toml",
        (),
        {"six_ALL_CCFRSCRATCH": "/s"},
        keep_undefined=True,
    )
    coming = " / ".join(
        event.text for event in coming_events(given, ExtraObservations(), card, 12 * HOUR)
    )
    if words:
        assert words[0] in said or verdict.exit_code == 1, said
        assert all(line in coming for line in words), coming
    else:
        assert "no cover" not in rows and "cannot start" not in coming


def test_a_task_whose_host_is_silent_is_not_counted_as_the_next_one() -> None:
    """One task is left behind it, where the night was thought to hold two."""
    one = pending((8,), **QUEUED, node_count=40)
    silent = with_facts(
        snapshot(jobs=(SHORT, one), nodes=first("mixed", "not_responding"), attempts=(HOST,))
    )
    (finding,) = chain_end.detect(silent)
    assert finding.title == "the last task of the queue is waiting"
    assert f"no cover is {SILENT}" in finding.evidence


def test_thousands_of_single_tasks_with_one_reason_are_one() -> None:
    queued = tuple(
        pending((task,), **QUEUED, reason="JobHeldUser", raw_id=str(5000 + task), task_id=task)
        for task in range(3000)
    )
    (one,) = no_cover(snapshot(jobs=queued, nodes=NODES))
    assert (one.job, one.tasks, one.why) == ("1000", 3000, "it is held (JobHeldUser)")


@pytest.mark.parametrize(
    ("nodes", "allocated", "fix"),
    [
        (first("down"), 47, ""),  # what is queued needs no more, whatever the card says now
        (
            first("down"),
            48,
            "tr11 launch --replace --set slurm.spare_nodes=3",
        ),  # 44 train, 47 are left
        (
            tuple(replace(node, states=frozenset({"down"})) for node in NODES[:5]) + NODES[5:],
            48,
            "tr11 nodes list",
        ),
    ],
)
def test_where_those_that_train_fit_the_cure_is_fewer_spares(
    nodes: tuple[Node, ...], allocated: int, fix: str
) -> None:
    """The site alone mends nodes; without its spares the run goes on now."""
    queued = pending(**QUEUED, node_count=allocated)
    given = with_facts(snapshot(jobs=(queued,), nodes=nodes), nodes=44)
    given = replace(
        given,
        run=facts_with(given.run, allocated_nodes=48),
    )
    assert [one.fix for one in nodes_short.detect(given)] == ([fix] if fix else [])


def test_a_repair_says_why_what_is_queued_cannot_start() -> None:
    given = snapshot(jobs=(pending(**QUEUED),), nodes=first("down"))
    assert plan_repair(given, ()).left_alone == (f"job 1000 cannot start as things are: {FEW}",)


@pytest.mark.parametrize("left", [400.0, 20 * HOUR])
def test_a_closed_partition_is_told_before_the_running_task_ends(left: float) -> None:
    now_ends = replace(SHORT, time_limit_seconds=int(1000 + left))
    given = with_facts(
        snapshot(jobs=(now_ends, pending(**QUEUED)), nodes=CLOSED, attempts=(HOST,)),
        exit_plan=None,
    )
    (finding,) = waits_for_site.detect(given)
    assert finding.severity is Severity.WARNING
    assert "only the site can change that" in finding.evidence[1]
