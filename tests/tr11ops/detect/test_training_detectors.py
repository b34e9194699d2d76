"""Faults of the training itself, on realistic courses: when each is seen, and that a clean course is left alone."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tr11ops.detect.training_course import Course, Over
from tests.tr11ops.status_cases import HOUR, NOW, beats, record, running, snapshot, steps
from tr11ops.detect import bounds, registry
from tr11ops.detect.finding import Finding
from tr11ops.snapshot import Checkpoint, Snapshot, Step
from tr11ops.training import Event, LaunchEnd, LogFile, NodeWarning, Phase
from tr11ops.verdict import Word, judge
from trainer.contract import Heartbeat, StepRecord

OF_TRAINING = {
    "hung", "stalled", "slow", "slow-node", "loss-spike", "gradient-norm", "loss-not-finite", "counters-jump",
    "log-not-growing", "checkpoint-overdue", "checkpoint-unsound",
}  # fmt: skip


def findings(given_snapshot: Snapshot) -> list[Finding]:
    return [finding for finding in registry.detect_all(given_snapshot) if finding.detector in OF_TRAINING]


def names(given_snapshot: Snapshot) -> list[str]:
    return [finding.detector for finding in findings(given_snapshot)]


def only(given_snapshot: Snapshot, detector: str) -> Finding:
    (finding,) = [finding for finding in findings(given_snapshot) if finding.detector == detector]
    return finding


def at(iteration: int, **changes: Any) -> Course:
    """A course that is looked at as it begins the iteration after this one."""

    def stop(course: Course) -> None:
        if course.iteration == iteration:
            raise Over

    return Course(hook=stop, **changes).run()


def later(course: Course, seconds: float, **changes: Any) -> Snapshot:
    """The same files, seen so much later."""
    seen = course.see()
    return dataclasses.replace(seen, time=seen.time + seconds, **changes)


# ----------------------------------------------------------------------------- clean courses
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    pace=st.sampled_from([0.05, 0.7, 5.0, 105.0]),
    moment=st.floats(0.0, 1.0),
    restarts=st.lists(st.integers(1, 900), max_size=3).map(lambda found: tuple(sorted(found))),
    begin=st.sampled_from([1, 1, 401]),
    noise=st.sampled_from([0.001, 0.003, 0.08]),
    log_interval=st.sampled_from([1, 1, 10]),
)
def test_a_clean_course_has_no_findings(
    seed: int, pace: float, moment: float, restarts: tuple[int, ...], begin: int, noise: float, log_interval: int
) -> None:
    """Whatever the moment: in a save, an evaluation, a ramp of the batch, between two attempts, after a restart."""
    course = Course(
        until=NOW + moment * (900 * pace + 3000), seed=seed, pace=pace, restarts=restarts, begin=begin, noise=noise,
        last=1000, log_interval=log_interval,
    ).run()  # fmt: skip
    assert findings(course.see()) == []


def test_a_clean_course_is_left_alone_all_week() -> None:
    seen: list[int] = []

    def look(course: Course) -> None:
        if course.iteration % 25 == 3:
            seen.append(course.iteration)
            assert findings(course.see()) == []

    Course(until=NOW + 7 * 24 * HOUR, restarts=(300, 301, 1500, 2600), hook=look).run()
    assert len(seen) > 200


# ----------------------------------------------------------------------------- hung, stalled
def test_all_ranks_stand_still() -> None:
    course = at(250)
    assert findings(later(course, 17 * 60)) == []
    seen = later(course, 18 * 60)
    assert names(seen) == ["hung"]
    finding = only(seen, "hung")
    assert finding.title == "job 1000_1 hangs: no sign of life for 18 min while training (normal: up to 17 min)"
    assert finding.evidence[0] == "all 8 ranks stand together (training, iteration 250): no node stands out"
    verdict = judge(seen, registry.detect_all(seen))
    assert (verdict.word, verdict.why, verdict.exit_code) == (Word.STALLED, finding.title, 1)


def moved(course: Course, ranks: set[int], **changes: Any) -> tuple[Heartbeat, ...]:
    given_beats = course.see().heartbeats
    assert isinstance(given_beats, tuple)
    return tuple(dataclasses.replace(beat, **changes) if beat.rank in ranks else beat for beat in given_beats)


def test_the_ranks_that_the_others_wait_for_are_named_with_their_node() -> None:
    course = at(250)
    behind = moved(course, {4, 5, 6, 7}, iteration=249, time=course.clock - 104)
    # Half of the ranks is no minority: nobody is accused.
    assert "no node stands out" in only(later(course, HOUR, heartbeats=behind), "hung").evidence[0]
    finding = only(later(course, HOUR, heartbeats=behind[:6]), "hung")
    assert finding.evidence[0] == "2 of 6 ranks are the odd ones out, on n02; the other 4: training, iteration 250"
    assert finding.evidence[1].startswith("rank 4 on n02: training, iteration 249, 1 h 01 min ago")
    assert finding.fix == "tr11 logs --rank 4"
    elsewhere = moved(course, {3}, phase="evaluating")
    assert (
        "rank 3 is the odd one out, on n01" in only(later(course, 4 * HOUR, heartbeats=elsewhere), "hung").evidence[0]
    )


@pytest.mark.parametrize(("age", "said"), [(0.9, "no node stands out"), (1.3, "rank 3 is the odd one out, on n01")])
def test_ranks_of_quick_steps_are_together_within_a_second(age: float, said: str) -> None:
    """Heartbeats are a second apart at least: of quick steps, two ranks that are together may show different ones."""
    course = at(250, pace=0.6)
    behind = moved(course, {3}, iteration=249, time=course.beat_time - age)
    assert said in only(later(course, 130, heartbeats=behind), "hung").evidence[0]


def test_ranks_that_fell_behind_living_ones_hang() -> None:
    course = at(250)
    seen = course.see(heartbeats=moved(course, {6, 7}, iteration=248, time=course.clock - 2000))
    finding = only(seen, "hung")
    assert "2 of 8 ranks, on n02, stand still for 33 min" in finding.title
    fresh = course.see(heartbeats=moved(course, {6, 7}, time=course.clock - 2000))
    assert "hung" not in names(fresh), "a clock that is wrong is no hang: they are where the others are"


def test_an_evaluation_hangs_beyond_what_evaluations_took() -> None:
    course = Course(evaluate_every=50, hook=lambda _: None)

    def stop(given_course: Course) -> None:
        if given_course.iteration == 299:
            given_course.enter("evaluating")
            raise Over

    course.hook = stop
    seen = course.run().see()
    patience = bounds.phase_patience(seen, "evaluating")
    longest = bounds.longest(seen, "evaluating")
    assert longest is not None and 300 < longest <= 450
    assert patience == 5 * longest
    assert findings(later(course, patience)) == []
    finding = only(later(course, patience + 1), "hung")
    assert "while evaluating" in finding.title
    unlearned = dataclasses.replace(later(course, patience + 1), phases=())
    assert findings(unlearned) == [], "an hour, before anything was learned"
    assert names(dataclasses.replace(later(course, 3601), phases=())) == ["hung"]


def test_a_save_and_a_start_that_are_quick_are_learned_too() -> None:
    seen = at(150).see()
    assert bounds.phase_patience(seen, "saving") == 600.0, "a floor below which a busy file system is no fault"
    assert bounds.phase_patience(seen, "ending") == 3600.0, "nothing was learned"
    assert 600.0 <= bounds.phase_patience(seen, "starting") <= 1000.0
    (first,) = bounds.first_steps(seen)
    assert 3 * 105 <= first < 3.2 * 105
    assert bounds.first_step_patience(seen) == 5 * first


def test_between_two_launches_nobody_hangs() -> None:
    """The workers of the first launch are gone, by the controller's record; those of the next take their time to begin."""
    course = at(250, pace=1.0)
    ended = (LaunchEnd("2001", 1, course.clock + 3.0),)
    seen = later(course, 500, launch_ends=ended)
    assert findings(seen) == []
    assert (
        judge(seen, registry.detect_all(seen)).why
        == "job 1000_1 on 2 nodes: starting, last sign of life 8 min 17 s ago"
    )
    assert names(later(course, 500)) == ["hung"]
    patience = bounds.phase_patience(seen, "starting")
    assert "while starting" in only(later(course, patience + 4, launch_ends=ended), "hung").title
    alive = later(course, 500, launch_ends=(LaunchEnd("2001", 1, course.clock - 3.0),))
    assert names(alive) == ["hung"], "these are of a later launch"
    gone = dataclasses.replace(seen, jobs=())
    assert judge(gone, registry.detect_all(gone)).word is Word.DOWN, "without an allocation there is no next launch"


def test_ranks_that_live_and_finish_nothing_stall() -> None:
    course = at(250)
    waiting = tuple(
        dataclasses.replace(beat, phase="data-wait", time=course.clock + 1100) for beat in course.see().heartbeats
    )  # type: ignore[union-attr]
    assert findings(later(course, 1000, heartbeats=waiting)) == []
    seen = later(course, 1101, heartbeats=waiting)
    assert names(seen) == ["stalled"]
    finding = only(seen, "stalled")
    assert finding.title.startswith("job 1000_1: no iteration after 250 for 18 min, though its ranks show life")
    assert finding.evidence[1] == "8 ranks: 8 in data-wait; last sign of life 1 s ago"
    assert judge(seen, registry.detect_all(seen)).word is Word.STALLED


@pytest.mark.parametrize("phase", ["saving", "evaluating"])
def test_no_stall_during_nor_soon_after_a_save_or_evaluation(phase: str) -> None:
    course = at(250)
    course.enter(phase)
    course.clock += 3000.0
    beating = tuple(dataclasses.replace(beat, time=course.clock) for beat in course.see().heartbeats)  # type: ignore[union-attr]
    assert findings(course.see(heartbeats=beating)) == []
    course.enter("training")
    course.clock += 60.0
    assert findings(course.see()) == [], "the iteration's time counts from the end of the phase"


def test_without_phases_a_stall_takes_an_hour() -> None:
    course = at(250)
    beating = tuple(dataclasses.replace(beat, time=course.clock + 3700) for beat in course.see().heartbeats)  # type: ignore[union-attr]
    assert findings(later(course, 3500, heartbeats=beating, phases=())) == []
    assert names(later(course, 3700, heartbeats=beating, phases=())) == ["stalled"]


def test_the_card_says_how_many_iterations_are_a_stall() -> None:
    seen = later(at(250), 18 * 60)
    facts = dataclasses.replace(seen.run, training=dataclasses.replace(seen.run.training, stall_iterations=20))
    assert findings(dataclasses.replace(seen, run=facts)) == []


# ----------------------------------------------------------------------------- slow
def slower(first: int, factor: float, upto: int = 10**9) -> Any:
    def change(line: StepRecord) -> StepRecord:
        if not first <= line.iteration < upto:
            return line
        return dataclasses.replace(
            line, tflops=line.tflops * factor, seconds_per_iteration=line.seconds_per_iteration / factor,
            samples_per_second=line.samples_per_second * factor,
        )  # fmt: skip

    return change


def test_the_slow_gpu_of_april_is_seen() -> None:
    """28 April 2022: 149 -> 141-142 TFLOPs at iterations 42782 to 42784, in the middle of a run, for good."""

    def look(iteration: int) -> Snapshot:
        return at(iteration, begin=42_501, last=50_000, change=slower(42_782, 141.5 / 149.5)).see()

    assert findings(look(42_782)) == []
    finding = only(look(42_784), "slow")
    assert finding.title in {
        "the training is 5.2 % slower than it was",
        "the training is 5.3 % slower than it was",
        "the training is 5.4 % slower than it was",
        "the training is 5.5 % slower than it was",
    }
    assert finding.evidence[0].startswith("TFLOPs of iterations 42782 to 42784: 14")
    assert finding.evidence[1].startswith("the median of 100 lines before them was 14")
    assert finding.fix == "tr11 nodes check n[01-02]"
    assert names(look(42_950)) == ["slow"], "it does not become the new normal within a day"


def test_a_single_slow_iteration_is_not_a_slow_training() -> None:
    assert findings(at(700, begin=401, change=slower(700, 0.5)).see()) == []
    assert findings(at(700, begin=401, change=slower(699, 0.5)).see()) != [], "two of three are"


def test_quick_iterations_are_slow_when_they_were_for_a_minute() -> None:
    assert findings(at(700, begin=401, pace=1.0, change=slower(675, 0.8)).see()) == []
    finding = only(at(700, begin=401, pace=1.0, change=slower(640, 0.8)).see(), "slow")
    assert finding.evidence[0].startswith("TFLOPs of iterations 653 to 700: 11")
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
    course = at(700, begin=401, change=lambda line: dataclasses.replace(change(line), tflops=float("nan")))
    assert only(course.see(), "slow").evidence[0].startswith("samples per second of iterations 698 to 700")


def test_a_node_that_is_behind_is_named() -> None:
    course = at(700, begin=401, ranks=12)
    finding = only(course.see(heartbeats=moved(course, {4, 5, 6, 7}, iteration=697)), "slow-node")
    assert (finding.subject, finding.fix) == ("n02", "tr11 nodes check n02")
    assert finding.evidence == ("its 4 ranks are at iteration 697, the others at 700",)
    of_two = at(700, begin=401)
    assert only(of_two.see(heartbeats=moved(of_two, {4, 5, 6, 7}, iteration=697)), "slow-node").subject == "n02"
    assert findings(course.see(heartbeats=moved(course, {4, 5, 6, 7}, iteration=699))) == []
    assert findings(course.see(heartbeats=moved(course, {4}, iteration=690))) == [], "one rank is not a node"


def test_a_node_with_a_warning_is_suspected_only_while_the_training_is_slow() -> None:
    warned = (NodeWarning("n02", "throttling", "warning", "GPU 3 runs at 900 MHz"),)
    slow = at(700, begin=401, change=slower(690, 0.8)).see(node_warnings=warned)
    assert only(slow, "slow-node").evidence == ("health check throttling said at the start: GPU 3 runs at 900 MHz",)
    assert findings(at(700, begin=401).see(node_warnings=warned)) == []


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
    assert finding.evidence[0] == "iteration 31219: lm loss 5.098, 2.3 times its median 2.207; grad norm 960.4"
    assert judge(seen, registry.detect_all(seen)).word is Word.HEALTHY, "it trains"


def test_a_spike_that_is_over_stays_in_sight_for_a_while() -> None:
    seen = april(31_250)
    assert [(finding.detector, finding.severity.name) for finding in findings(seen)] == [
        ("loss-spike", "WARNING"),
        ("gradient-norm", "INFO"),
    ]
    assert only(seen, "loss-spike").title.startswith("the loss had a spike from iteration 31219 to 3122")
    assert names(april(31_290)) == []


def test_what_the_trainer_did_about_a_spike_is_quoted() -> None:
    seen = april(31_219)
    back = dataclasses.replace(
        seen, events=(Event("roll-back", NOW - 10, "1007", {"to": 31200, "skip": "31209-31229"}),)
    )
    finding = only(back, "loss-spike")
    assert finding.severity.name == "WARNING"
    assert finding.evidence[-1] == "the trainer notes: roll-back: to 31200, skip 31209-31229"


def test_one_high_norm_is_noise_and_the_card_says_what_is_high() -> None:
    course = at(300, change=lambda line: dataclasses.replace(line, grad_norm=30.0) if line.iteration == 299 else line)
    assert findings(course.see()) == []
    seen = april(31_219)
    facts = dataclasses.replace(seen.run, training=dataclasses.replace(seen.run.training, loss_factor=3.0))
    assert names(dataclasses.replace(seen, run=facts)) == ["gradient-norm"]


def test_a_level_that_stays_is_the_new_ordinary() -> None:
    course = at(600, change=lambda line: dataclasses.replace(line, lm_loss=20.0) if line.iteration > 400 else line)
    assert "loss-spike" not in names(course.see())


# ----------------------------------------------------------------------------- counters
def resumed(change: Any, **changes: Any) -> Snapshot:
    """Three lines after a restart at iteration 450 from the checkpoint of 400, which `change` alters."""
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
            lambda line: dataclasses.replace(line, learning_rate=line.learning_rate * 1.2),
            "learning rate 7.12e-05; it was 5.94e-05 at iteration 401",
        ),
        (
            lambda line: dataclasses.replace(line, consumed_samples=line.consumed_samples + 4096),
            "4096 after 0 iterations of 176",
        ),
        (lambda line: dataclasses.replace(line, consumed_samples=0), "consumed samples 0"),
        (lambda line: dataclasses.replace(line, global_batch_size=192), "global batch size 192; it was 176"),
    ],
)
def test_counters_are_compared_with_the_same_iteration_before(change: Any, part: str | None) -> None:
    seen = resumed(change)
    if part is None:
        assert findings(seen) == []
        return
    finding = only(seen, "counters-jump")
    assert finding.subject == "401"
    assert finding.title.startswith("at the restart at iteration 401: ")
    assert part in finding.title + "".join(finding.evidence)
    assert "job 2001, iteration 450: consumed samples " in "".join(finding.evidence)


def test_a_training_that_begins_anew_although_it_was_saved_is_critical() -> None:
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


def test_a_resume_from_an_older_checkpoint_is_told_and_a_roll_back_is_not() -> None:
    lines = (*steps(60, last=250, age=2000), *steps(3, last=153, age=10, job_id="1008"))
    newest = dataclasses.replace(snapshot().checkpoints, examined=(Checkpoint(200, True, NOW - 9000, 1, "sizes"),))  # type: ignore[type-var]
    seen = snapshot(steps=lines, checkpoints=newest, heartbeats=beats(iteration=153), logs=())
    assert "went back to iteration 151, though global_step200 was there" in only(seen, "counters-jump").title
    back = Event("roll-back", lines[60].time - 1.0, "1008", {"to": 150})  # type: ignore[operator]
    assert "counters-jump" not in names(dataclasses.replace(seen, events=(back,)))


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
    logs = (LogFile("main_log.txt", 10, course.clock - 4000), LogFile("metrics.jsonl", 10, course.clock))
    assert only(course.see(logs=logs), "log-not-growing").title.startswith("main_log.txt has not grown for 1 h 06 min")


# ----------------------------------------------------------------------------- checkpoints by the clock
def with_minutes(course: Course, minutes: float, **changes: Any) -> Snapshot:
    seen = course.see(**changes)
    training = dataclasses.replace(seen.run.training, checkpoint_minutes=minutes)
    return dataclasses.replace(seen, run=dataclasses.replace(seen.run, checkpoint_interval=None, training=training))


def test_checkpoints_that_are_due_by_the_clock() -> None:
    course = at(360)  # 60 iterations, or 105 minutes, after the last save
    assert findings(with_minutes(course, 80.0)) == []
    finding = only(with_minutes(course, 60.0), "checkpoint-overdue")
    assert finding.severity.name == "WARNING"
    assert finding.title.startswith("no checkpoint for 1 h 4")
    assert finding.title.endswith("of training (the interval is 1 h 00 min)")
    assert only(with_minutes(course, 30.0), "checkpoint-overdue").severity.name == "CRITICAL"


def test_minutes_count_from_the_begin_of_a_launch_and_a_save_may_take_its_time() -> None:
    course = Course(restarts=(390,), hook=lambda _: None)

    def stop(given_course: Course) -> None:
        if given_course.job == 2002 and given_course.iteration == 310:
            raise Over

    course.hook = stop
    assert findings(with_minutes(course.run(), 20.0)) == [], "the hours before the restart are no delay of this launch"
    late = at(360)
    late.enter("saving")
    assert findings(with_minutes(late, 60.0)) == []


def test_a_step_with_no_job_is_compared_with_nothing() -> None:
    """Where main_log.txt alone could be read there are neither times nor jobs: no number is made up."""
    bare = tuple(Step(step.record) for step in at(700, begin=401).steps)
    assert findings(at(700, begin=401).see(steps=bare)) == []
    assert names(snapshot(jobs=(running(),), steps=bare, phases=(Phase("1007", 1, "training", 1, NOW),))) == []
