"""What a training's numbers tell, on realistic courses: slowness, spikes, counters, logs,
checkpoints by the clock.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.training_course import (
    Course,
    Over,
    at,
    findings,
    later,
    moved,
    names,
    only,
)
from tests.tr11ops.status_cases import (
    NOW,
    beats,
    changed,
    facts_with,
    record,
    running,
    snapshot,
    steps,
)
from tr11ops.detect import registry
from tr11ops.detect.detector import Severity
from tr11ops.detect.speed import is_measured_still, slowdown
from tr11ops.observe.observations import LaunchEnd, LogFile, NodeWarning, Phase, TrainingEvent
from tr11ops.observe.snapshot import Checkpoint, Snapshot, Step
from tr11ops.watchdog.verdict import VerdictWord, judge
from trainer.config.card import RecoverySection
from trainer.contract.compute_record import ComputeTimes
from trainer.contract.metrics_record import StepRecord


# ----------------------------------------------------------------------------- slow
def slower(first: int, factor: float, upto: int = 10**9) -> Any:
    def change(line: StepRecord) -> StepRecord:
        if not first <= line.iteration < upto:
            return line
        return replace(
            line, tflops=line.tflops * factor, seconds_per_iteration=line.seconds_per_iteration / factor,
            samples_per_second=line.samples_per_second * factor,
        )  # fmt: skip

    return change


def test_the_slow_gpu_of_april_is_seen() -> None:
    """28 April 2022: 149 -> 141-142 TFLOPs at iterations 42782 to 42784, in the middle of a run,
    for good.
    """

    def look(iteration: int) -> Snapshot:
        return at(iteration, begin=42_501, last=50_000, change=slower(42_782, 141.5 / 149.5)).see()

    assert findings(look(42_782)) == []
    finding = only(look(42_784), "slow")
    # 149.5 TFLOPs of a GPU are 141.5: so many times as long for the same work
    assert finding.title == "the training is slow: a step takes 1.06 times as long as before"
    (before,) = (step for step in look(42_784).steps if step.record.iteration == 42_781)
    assert finding.since == before.time
    assert finding.evidence[0].startswith("TFLOPs of iterations 42782 to 42784: 14")
    assert finding.evidence[1].startswith("the median of 100 lines before them was 14")
    assert (finding.fix, finding.then) == ("tr11 nodes history", ()), "it may pass by itself"
    assert finding.evidence[-1].startswith("it has cost 16 s so far; ")
    lasting = only(look(42_950), "slow")  # it does not become the new normal within a day
    assert lasting.evidence[-1] == (
        "it has cost 16 min so far; to stop, measure the nodes and start again takes some 15 min"
    )
    assert lasting.fix == "tr11 kill --wait --reason 'to measure the nodes'"
    assert lasting.then == ("tr11 nodes bench", "tr11 resume"), (
        "it names the slow one, with the command"
    )


def test_a_single_slow_iteration_is_not_a_slow_training() -> None:
    assert findings(at(700, begin=401, change=slower(700, 0.5)).see()) == []
    slow = at(700, begin=401, change=slower(699, 0.5)).see()
    assert names(slow) != [], "two of three are"
    next_one = replace(slow.active_jobs[0], job_id="1000_8", raw_id="1008", task_id=8)
    assert "slow" not in names(changed(slow, jobs=(next_one,))), "the next attempt has no step yet"


def test_iterations_are_slow_only_after_half_a_minute() -> None:
    assert findings(at(700, begin=401, pace=1.0, change=slower(688, 0.8)).see()) == []
    finding = only(at(700, begin=401, pace=1.0, change=slower(660, 0.8)).see(), "slow")
    assert finding.evidence[0].startswith("TFLOPs of iterations 671 to 700: 11")
    assert finding.evidence[0].endswith(" on average")


def test_a_machine_shared_with_others_is_never_steady() -> None:
    """Where lines differ by 15 % anyway, 10 % less is noise."""
    course = at(700, begin=401, noise=0.15, change=slower(690, 0.9))
    assert findings(course.see()) == []


def test_lines_beside_a_save_in_the_background_do_not_count() -> None:
    course = at(705, begin=401, save_seconds=0.5, change=slower(701, 0.8))
    saved = course.saved.pop()
    assert saved[0] == 700
    assert findings(course.see()) == [], "its checkpoint is not there yet"
    course.saved.append(saved)
    assert names(course.see()) == ["slow"]


def test_speed_is_told_in_samples_where_the_log_has_no_tflops() -> None:
    change = slower(690, 0.8)
    course = at(700, begin=401, change=lambda line: replace(change(line), tflops=float("nan")))
    assert only(course.see(), "slow").evidence[0].startswith("samples/s of iterations 698 to 700")


def test_a_node_that_is_behind_is_named() -> None:
    course = at(700, begin=401, ranks=12)
    finding = only(course.see(heartbeats=moved(course, {4, 5, 6, 7}, iteration=697)), "slow-node")
    on_one = course.see(heartbeats=moved(course, {4, 5, 6, 7}, iteration=697), scheduler="local")
    one_machine = only(on_one, "slow-node")
    assert (one_machine.severity, one_machine.fix) == (Severity.INFO, ""), (
        "no node can be exchanged there"
    )
    assert "all nodes are this one machine" in one_machine.title
    assert finding.subject == "n02" and finding.fix.startswith("tr11 nodes exclude n02 ")
    assert finding.evidence == ("its 4 ranks are at iteration 697, the others at 700",)
    of_two = at(700, begin=401)
    assert (
        only(of_two.see(heartbeats=moved(of_two, {4, 5, 6, 7}, iteration=697)), "slow-node").subject
        == "n02"
    )
    assert findings(course.see(heartbeats=moved(course, {4, 5, 6, 7}, iteration=699))) == []
    assert findings(course.see(heartbeats=moved(course, {4}, iteration=690))) == [], (
        "one rank is not a node"
    )


def test_an_older_heartbeat_is_no_lag() -> None:
    """Heartbeats are a second apart, and a shared file system shows some of them late: by then the
    node may have done what the others have.
    """
    course = at(700, begin=401, ranks=12)
    beats = course.see().heartbeats
    assert isinstance(beats, tuple)
    before = min(beat.time for beat in beats) - 1.0
    for ranks in ({4, 5, 6, 7}, {0, 1, 2, 3}):
        late = moved(course, ranks, iteration=690, time=before)
        assert findings(course.see(heartbeats=late)) == []
        spoken = moved(course, ranks, iteration=690, time=before + 2.0)
        assert names(course.see(heartbeats=spoken)) == ["slow-node"]


def test_a_node_with_a_warning_is_suspected_only_while_slow() -> None:
    warned = (NodeWarning("n02", "throttling", "warning", "GPU 3 runs at 900 MHz"),)
    slow = at(700, begin=401, change=slower(690, 0.8)).see(node_warnings=warned)
    assert only(slow, "slow-node").evidence == (
        "health check throttling said at the start: GPU 3 runs at 900 MHz",
    )
    assert findings(at(700, begin=401).see(node_warnings=warned)) == []
    both = (*warned, NodeWarning("n01", "throttling", "warning", "GPU 3 runs at 900 MHz"))
    assert names(changed(slow, node_warnings=both)) == ["slow"], "what both have tells neither"


@pytest.mark.parametrize(
    ("written", "severity", "said"),
    [
        (680, "INFO", "compute times say from iteration 700 on"),
        (700, "WARNING", "compute times name no node"),
    ],
)
def test_a_slow_training_waits_for_the_ranks_own_times(
    written: int, severity: str, said: str
) -> None:
    """They are written every ten steps: people hear of the node, and not first that none is known."""
    times = ComputeTimes(0, "n01", 1, 0.0, written, 10, {"forward": 1.0}, 1.0, 0, 0)
    slow = at(700, begin=401, change=slower(690, 0.8)).see(compute_times=(times,))
    finding = only(slow, "slow")
    assert finding.severity.name == severity and any(said in line for line in finding.evidence)
    late = at(711, begin=401, change=slower(690, 0.8)).see(compute_times=(times,))
    assert only(late, "slow").severity is Severity.WARNING, (
        "records that do not come are not waited for"
    )
    warned = changed(slow, node_warnings=(NodeWarning("n02", "throttling", "warning", "hot"),))
    assert ("slow-node" in names(warned)) is (severity == "WARNING"), (
        "no one is suspected while the times are to come"
    )


def test_a_sudden_slowness_begins_with_its_own_lines() -> None:
    """Half a minute is looked at: where steps are short, lines a little below what is usual stand
    before those that are eight times as long, and the ranks' times are of before these.
    """

    def change(line: StepRecord) -> StepRecord:
        slightly = slower(671, 0.95)(line)
        return slower(695, 0.125)(slightly)

    times = ComputeTimes(0, "n01", 1, 0.0, 690, 10, {"forward": 1.0}, 1.0, 0, 0)
    course = at(700, begin=401, pace=1.0, change=change)
    found = slowdown(course.see(compute_times=(times,)))
    assert found is not None and found.first < 690 and found.began == 695
    assert is_measured_still(course.see(compute_times=(times,)), found)


@pytest.mark.parametrize(
    ("factor", "upto", "severity"),
    [(8.0, 720, "WARNING"), (8.0, 800, "CRITICAL"), (1.9, 950, "WARNING"), (2.2, 800, "CRITICAL")],
    ids=["little is lost yet", "eight times as long", "less than half is lost", "more than half"],
)
def test_a_training_that_loses_most_of_its_time_does_not_wait_for_the_morning(
    factor: float, upto: int, severity: str
) -> None:
    """Of the time since it began, a step of 20 s each: a quarter of an hour is lost by then, or not."""
    course = at(upto, begin=401, pace=20.0, change=slower(700, 1.0 / factor))
    finding = only(course.see(), "slow")
    assert finding.severity.name == severity, finding


# ----------------------------------------------------------------------------- spikes
NORMS = {31214: 0.24, 31215: 0.95, 31216: 2.4, 31217: 15.9, 31218: 145.0, 31219: 960.351}
LOSSES = {31219: 5.098124, **{31219 + n: 2.2 + 2.9 * 0.8**n for n in range(1, 31)}}


def april(last: int) -> Snapshot:
    """12 April 2022: loss and gradient norm around iteration 31219, as they were logged."""
    noise = random.Random(5)
    lines = tuple(
        Step(
            record(
                iteration,
                lm_loss=LOSSES.get(iteration, 2.2 + noise.uniform(-0.05, 0.05)),
                grad_norm=NORMS.get(iteration, noise.uniform(0.12, 0.21)),
            ),
            NOW - 30 - (last - iteration) * 105.0,
            "1007",
        )
        for iteration in range(31_000, last + 1)
    )
    return snapshot(steps=lines, heartbeats=beats(iteration=last), logs=())


def test_the_spike_of_april_is_announced_two_lines_before() -> None:
    assert names(april(31_216)) == []
    assert names(april(31_217)) == ["gradient-norm"]
    assert names(april(31_218)) == ["gradient-norm"]
    early = only(april(31_217), "gradient-norm")
    assert early.evidence[0].startswith("iteration 31216: grad norm 2.4, its median is 0.1")
    assert early.evidence[1] == "iteration 31217: grad norm 15.9"
    seen = april(31_219)
    assert [(finding.detector, finding.severity.name) for finding in findings(seen)] == [
        ("loss-spike", "CRITICAL"),
        ("gradient-norm", "WARNING"),
    ]
    finding = only(seen, "loss-spike")
    assert finding.title == "the loss is 2.3 times its median since iteration 31219"
    assert (
        finding.evidence[0]
        == "iteration 31219: lm loss 5.098, 2.3 times its median 2.207; grad norm 960.4"
    )
    assert judge(seen, registry.detect_all(seen)).word is VerdictWord.AT_RISK, "it trains"


def test_a_spike_that_is_over_stays_in_sight_for_a_while() -> None:
    seen = april(31_250)
    assert [(finding.detector, finding.severity.name) for finding in findings(seen)] == [
        ("loss-spike", "WARNING"),
        ("gradient-norm", "INFO"),
    ]
    assert only(seen, "loss-spike").title.startswith(
        "the loss had a spike from iteration 31219 to 3122"
    )
    assert names(april(31_290)) == []


def test_what_the_trainer_did_about_a_spike_is_quoted() -> None:
    seen = april(31_219)
    back = changed(
        seen,
        events=(
            TrainingEvent("roll-back", NOW - 10, "1007", {"to": 31200, "skip": "31209-31229"}),
        ),
    )
    finding = only(back, "loss-spike")
    assert finding.severity.name == "WARNING"
    assert finding.evidence[-1] == "the trainer notes: roll-back: to 31200, skip 31209-31229"


def test_one_high_norm_is_noise_and_the_card_says_what_is_high() -> None:
    course = at(
        300, change=lambda line: replace(line, grad_norm=30.0) if line.iteration == 299 else line
    )
    assert findings(course.see()) == []
    seen = april(31_219)
    facts = facts_with(seen.run, recovery=RecoverySection(loss_factor=3.0))
    assert names(replace(seen, run=facts)) == ["gradient-norm"]


def test_a_level_that_stays_is_the_new_ordinary() -> None:
    course = at(
        600, change=lambda line: replace(line, lm_loss=20.0) if line.iteration > 400 else line
    )
    assert "loss-spike" not in names(course.see())


# ----------------------------------------------------------------------------- counters
def resumed(change: Any, **changes: Any) -> Snapshot:
    """Three lines after a restart at iteration 450 from the checkpoint of 400, which `change`
    alters.
    """
    course = Course(restarts=(450,), **changes)

    def stop(given_course: Course) -> None:
        if given_course.job == 2002 and given_course.iteration == 403:
            raise Over

    course.hook = stop
    course.change = lambda line: change(line) if course.job == 2002 else line
    return course.run().see()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda line: line, None),
        (
            lambda line: replace(line, learning_rate=line.learning_rate * 1.2),
            "learning rate 7.12e-05; it was 5.94e-05 at iteration 401",
        ),
        (
            lambda line: replace(line, consumed_samples=line.consumed_samples + 4096),
            "4096 after 0 iterations of 176",
        ),
        (lambda line: replace(line, consumed_samples=0), "consumed samples 0"),
        (lambda line: replace(line, global_batch_size=192), "global batch size 192; it was 176"),
    ],
)
def test_counters_are_compared_with_the_same_iteration_before(
    change: Any, part: str | None
) -> None:
    seen = resumed(change)
    if part is None:
        assert findings(seen) == []
        return
    finding = only(seen, "counters-jump")
    assert finding.subject == "401"
    assert finding.title.startswith("at the restart at iteration 401: ")
    assert part in finding.title + "".join(finding.evidence)
    assert "job 2001, iteration 450: consumed samples " in "".join(finding.evidence)


def test_a_training_that_restarts_although_saved_is_critical() -> None:
    course = Course(restarts=(450,))

    def stop(given_course: Course) -> None:
        if given_course.job == 2002 and given_course.iteration == 400:
            given_course.iteration = 0
        if given_course.job == 2002 and given_course.iteration == 2:
            raise Over

    course.hook = stop
    finding = only(course.run().see(), "counters-jump")
    assert finding.severity.name == "CRITICAL"
    assert "the training went back to iteration 1, though global_step400 was there" in finding.title


def test_a_resume_from_an_older_checkpoint_is_told() -> None:
    lines = (*steps(60, last=250, age=2000), *steps(3, last=153, age=10, job_id="1008"))
    newest = replace(
        snapshot().checkpoints, examined=(Checkpoint(200, True, NOW - 9000, 1, "sizes"),)
    )  # type: ignore[type-var]
    seen = snapshot(steps=lines, checkpoints=newest, heartbeats=beats(iteration=153), logs=())
    assert (
        "went back to iteration 151, though global_step200 was there"
        in only(seen, "counters-jump").title
    )
    back = TrainingEvent("roll-back", lines[60].time - 1.0, "1008", {"to": 150})  # type: ignore[operator]
    assert "counters-jump" not in names(changed(seen, events=(back,)))
    tried = LaunchEnd(
        "1007", 1, back.time, "SIGSEGV", "again", reached=210, began_at=200, older_checkpoint=150
    )
    assert "counters-jump" not in names(changed(seen, launch_ends=(tried,)))
    assert "counters-jump" in names(changed(seen, launch_ends=(replace(tried, time=0.0),)))


# ----------------------------------------------------------------------------- logs
def test_a_log_that_stands_while_the_training_goes_on() -> None:
    course = at(250)
    ahead = moved(course, set(range(8)), iteration=280, time=course.clock + 2900)
    seen = later(course, 3000, heartbeats=ahead)
    assert names(seen) == ["log-not-growing"]
    finding = only(seen, "log-not-growing")
    assert finding.title == "job 1000_1 trains iteration 280, but its log stands at 250"
    assert finding.evidence[1].startswith("main_log.txt: 953.7 MiB, changed ")


def test_heartbeats_that_stand_while_the_log_grows() -> None:
    course = at(250)
    old = moved(course, set(range(8)), iteration=200, time=course.clock - 5000)
    finding = only(course.see(heartbeats=old), "log-not-growing")
    assert finding.title == "job 1000_1 logs iteration 250, but its heartbeats stand at 200"


def test_the_main_log_alone_stands_still() -> None:
    course = at(250)
    logs = (
        LogFile("main_log.txt", 10, course.clock - 4000),
        LogFile("metrics.jsonl", 10, course.clock),
    )
    assert only(course.see(logs=logs), "log-not-growing").title.startswith(
        "main_log.txt has not grown for 1 h 06 min"
    )


# ------------------------------------------------------------------------- checkpoints by the clock
def with_minutes(course: Course, minutes: float, **changes: Any) -> Snapshot:
    seen = course.see(**changes)
    return replace(
        seen, run=facts_with(seen.run, checkpoint_interval=None, checkpoint_minutes=minutes)
    )


def test_checkpoints_that_are_due_by_the_clock() -> None:
    course = at(360)  # 60 iterations, or 105 minutes, after the last save
    assert findings(with_minutes(course, 80.0)) == []
    finding = only(with_minutes(course, 60.0), "checkpoint-overdue")
    assert finding.severity.name == "WARNING"
    assert finding.title.startswith("no checkpoint for 1 h 4")
    assert finding.title.endswith("of training (the interval is 1 h 00 min)")
    assert only(with_minutes(course, 30.0), "checkpoint-overdue").severity.name == "CRITICAL"


def test_minutes_count_from_the_launch_and_a_save_may_take_long() -> None:
    course = Course(restarts=(390,), hook=lambda _: None)

    def stop(given_course: Course) -> None:
        if given_course.job == 2002 and given_course.iteration == 310:
            raise Over

    course.hook = stop
    assert findings(with_minutes(course.run(), 20.0)) == [], (
        "the hours before the restart are no delay of this launch"
    )
    late = at(360)
    late.enter("saving")
    assert findings(with_minutes(late, 60.0)) == []


def test_a_step_with_no_job_is_compared_with_nothing() -> None:
    """Where main_log.txt alone could be read there are neither times nor jobs: no number is made
    up.
    """
    bare = tuple(Step(step.record) for step in at(700, begin=401).steps)
    assert findings(at(700, begin=401).see(steps=bare)) == []
    assert (
        names(
            snapshot(jobs=(running(),), steps=bare, phases=(Phase("1007", 1, "training", 1, NOW),))
        )
        == []
    )
