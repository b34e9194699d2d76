"""What holds for every detector: when it speaks and how loudly, and that it survives whatever cannot be seen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import (
    SWITCH,
    TABLE,
    UNKNOWN,
    found,
    severities,
)
from tests.tr11ops.detect.operation_table import OPERATION
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
    DAY,
    HOUR,
    NOW,
    beats,
    changed,
    facts_with,
    idle,
    pending,
    record,
    running,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tr11ops.base.observed import known
from tr11ops.cluster.base import JobState
from tr11ops.detect import registry
from tr11ops.detect.detector import Severity, by_cause
from tr11ops.observe import derived
from tr11ops.observe.liveness import first_step_patience, first_steps, longest_phase, phase_patience
from tr11ops.observe.observations import LaunchEnd, Phase, TrainingEvent
from tr11ops.observe.snapshot import Snapshot, Step
from tr11ops.runcard.watching import WatchSection
from tr11ops.rundir.attempts import KeptStacks
from tr11ops.watchdog.verdict import VerdictWord, judge
from trainer.contract.attempt import EndMarker, Heartbeat


def test_a_healthy_run_has_no_findings() -> None:
    assert registry.detect_all(with_facts(snapshot(), total_iterations=32_000)) == ()


@pytest.mark.parametrize(
    ("given_snapshot", "detector", "expected"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_table(given_snapshot: Snapshot, detector: str, expected: list[str]) -> None:
    assert severities(given_snapshot, detector) == expected


# those of test_training_numbers.py, which need a course of steps, and of
# test_operation_detectors.py
ELSEWHERE = {
    "slow", "slow-node", "loss-spike", "gradient-norm", "counters-jump", "log-not-growing",
    *(detector.name for detector in OPERATION),
}  # fmt: skip


def test_every_detector_speaks_somewhere_in_the_table() -> None:
    spoken = {finding.detector for row in TABLE for finding in registry.detect_all(row[1])}
    assert spoken >= {detector.name for detector in registry.DETECTORS} - ELSEWHERE


def test_the_slowest_ranks_are_named() -> None:
    ranks = (*beats(age=3 * HOUR, ranks=4), *beats(age=4 * HOUR, iteration=31200, ranks=1))
    (finding,) = found(snapshot(heartbeats=ranks, steps=steps(age=3 * HOUR)), "hung")
    assert finding.evidence[1] == "rank 0 on n01: training, iteration 31200, 4 h 00 min ago"


def test_the_first_cause_is_quoted() -> None:
    dead = running(state=JobState.FAILED, exit_code=143, derived_exit_code=134, end_time=NOW - 60)
    (finding,) = found(
        idle(
            jobs=(dead,), attempts=(wordless("1007", failure="rank 12 on n02: RuntimeError: NCCL"),)
        ),
        "unfinished-end",
    )
    assert finding.title == "attempt 1000_7 failed: rank 12 on n02: RuntimeError: NCCL"
    assert finding.evidence == (
        "1000_7: ended without an end marker: the scheduler says FAILED, a step of it was ended by SIGABRT (exit code 134)",
    )


@pytest.mark.parametrize(
    ("scheduler", "card", "expected"),
    [
        ("slurm", "", ["scancel 1000_7", "tr11 resume"]),
        ("local", "my card.toml", ["", "tr11 resume --run 'my card.toml'"]),
    ],
)
def test_fixes_are_commands_for_this_run(scheduler: str, card: str, expected: list[str]) -> None:
    given = with_facts(
        snapshot(
            scheduler=scheduler,
            jobs=(running(job_id="1000_6", start_time=NOW - DAY), running(), pending()),
            kill_switch=SWITCH,
        ),
        card=card,
    )
    assert [
        found(given, name)[0].fix for name in ("two-attempts", "kill-switch-left-on")
    ] == expected


def test_a_command_of_two_words_takes_the_card_after_both() -> None:
    given_snapshot = with_facts(snapshot(), card="my.toml")
    assert (
        derived.command(given_snapshot, "nodes check n07") == "tr11 nodes check --run my.toml n07"
    )
    assert derived.command(given_snapshot, "logs --rank 3") == "tr11 logs --run my.toml --rank 3"


FIELDS = [
    "jobs", "nodes", "steps", "heartbeats", "attempts", "checkpoints", "kill_switch", "exclusions", "submissions", "phases",
    "events", "logs", "node_warnings", "periodic_jobs",
]  # fmt: skip


@given(
    base=st.sampled_from([row[1] for row in TABLE]),
    hidden=st.sets(st.sampled_from(FIELDS)),
    later=st.floats(-DAY, 30 * DAY),
)
def test_detectors_survive_any_blindness(base: Snapshot, hidden: set[str], later: float) -> None:
    """Whatever is unknown, nothing is raised; and what is unknown is never reported as absent."""
    changes: dict[str, Any] = dict.fromkeys(hidden, UNKNOWN)
    seen = changed(base, time=base.time + later, **changes)
    findings = registry.detect_all(seen)
    assert [finding.severity for finding in findings] == sorted(
        (f.severity for f in findings), reverse=True
    )
    if hidden & {"jobs", "kill_switch", "attempts"}:
        assert not [finding for finding in findings if finding.detector == "down"]
    if len(hidden) == len(FIELDS):
        assert {finding.detector for finding in findings} <= {"namesake"}


@given(st.integers(1, 200), st.floats(0.01, 1e4))
def test_the_pace_is_a_median(count: int, pace: float) -> None:
    given = list(steps(count, pace=pace))
    given[0] = Step(
        replace(given[0].record, seconds_per_iteration=pace * 1000 if count > 2 else pace)
    )
    assert derived.seconds_per_iteration(snapshot(steps=tuple(given))) == pytest.approx(pace)


def test_severities_are_ordered() -> None:
    assert Severity.INFO < Severity.WARNING < Severity.CRITICAL


def test_a_fault_begins_where_its_evidence_has_it_begin() -> None:
    first, second = wordless("1006", age=20 * 60), wordless("1007", age=9 * 60)
    (finding,) = found(idle(attempts=(first, second)), "unfinished-end")
    assert finding.since == NOW - 20 * 60, (
        "the end of the first of them: each has its own in the evidence"
    )
    assert [line.partition(":")[0] for line in finding.evidence] == [
        "1000_7, 9 min ago",
        "1000_6, 20 min ago",
    ]
    gone = running(state=JobState.CANCELLED, end_time=NOW - 60)
    (down,) = found(idle(jobs=(gone,), attempts=(first, second)), "down")
    assert down.since == NOW - 60, "the last of the queue was cancelled then"
    stopped = EndMarker("kill-switch", 5, 5, True, "", NOW - 9 * 60, "n01", "1007", 1)
    (after_stop,) = found(idle(attempts=(replace(second, end=stopped),)), "down")
    assert after_stop.since is None, "it was stopped until someone removed the switch"


def test_an_end_says_that_the_next_attempt_starts_by_itself() -> None:
    first, second = wordless("1006", age=20 * 60), wordless("1007", age=9 * 60)
    queued = idle(jobs=(pending(),), attempts=(first, second))
    (finding,) = found(queued, "unfinished-end")
    assert finding.severity is Severity.CRITICAL
    assert finding.by_itself == (
        f"The next attempt, {pending().job_id}, is queued, and starts by itself."
    )
    (alone,) = found(idle(attempts=(first, second)), "unfinished-end")
    assert alone.by_itself == ""


# what a mail says that the run does by itself about what a detector finds, in the table's own cases
BY_ITSELF = {
    "waits-for-site": "What is queued starts by itself when the site is done.",
    "limit-changed": "The attempt saves and leaves in time by itself, unless the limit is too short for a save.",
    "checkpoint-unsound": "A resume takes the newest checkpoint that is whole.",
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_what_the_run_does_by_itself_is_said_by_its_finding_alone(name: str) -> None:
    """A second table of the mails' own said it by the detector's name."""
    told = [one for row in TABLE for one in found(row[1], name) if one.severity > Severity.INFO]
    assert told and {one.by_itself for one in told} == {BY_ITSELF[name]}


# ---------------------------------------------------------------------------
# Trainings that hang or stall: when it is seen, who is named; and that a clean course, or
# garbage, breaks nothing.


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
    seed: int,
    pace: float,
    moment: float,
    restarts: tuple[int, ...],
    begin: int,
    noise: float,
    log_interval: int,
) -> None:
    """Whatever the moment: in a save, an evaluation, a ramp of the batch, between two attempts,
    after a restart.
    """
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
    assert (
        finding.title
        == "job 1000_1 hangs: no sign of life for 18 min while training (normal: up to 17 min)"
    )
    assert (
        finding.evidence[0]
        == "all 8 ranks stand together (training, iteration 250): their heartbeats name no node"
    )
    assert finding.fix == "tr11 stacks --job 1000_1" and finding.since is not None
    assert seen.time - finding.since == pytest.approx(18 * 60, abs=60)
    verdict = judge(seen, registry.detect_all(seen))
    assert (verdict.word, verdict.why, verdict.exit_code) == (VerdictWord.STALLED, finding.title, 1)


STOPPED = "rank 6 on node n02 is stopped (SIGSTOP)"


def kept(
    seen: Snapshot, sentence: str = f"{STOPPED}; 7 ranks wait for it in all-reduce", **values: Any
) -> Snapshot:
    """The same look, with stacks that were taken a second before."""
    given: dict[str, Any] = {
        "ranks": (6,),
        "nodes": ("n02",),
        "is_certain": True,
        "time": seen.time - 1.0,
        **values,
    }
    return changed(seen, stacks=(KeptStacks("2001", sentence=sentence, **given),))


def test_the_headline_of_ranks_that_all_wait_for_data_has_room_for_that() -> None:
    """`and none has moved in 2 looks` was what a subject kept of it."""
    verdict = "all that were read (8 ranks) wait for their data; none has moved in 2 looks"
    seen = later(at(250), 18 * 60)
    finding = only(kept(seen, verdict, nodes=()), "hung")
    assert finding.title == "job 1000_1 hangs: all that were read (8 ranks) wait for their data"
    assert finding.evidence[1] == f"the workers' stacks: {verdict}"


def test_a_hang_bears_the_name_that_the_stacks_gave() -> None:
    """All heartbeats are alike: only the stacks tell whom all others wait for."""
    seen = later(at(250), 18 * 60)
    finding = only(kept(seen), "hung")
    assert finding.title == f"job 1000_1 hangs: {STOPPED}"
    assert finding.evidence[:2] == (
        "no sign of life for 18 min while training (normal: up to 17 min)",
        f"the workers' stacks: {STOPPED}; 7 ranks wait for it in all-reduce",
    )
    end, go_on = "tr11 kill --now --wait", ("tr11 resume",)
    assert (finding.fix, finding.then) == (
        f"tr11 nodes exclude n02 --reason '{STOPPED}'",
        (end, *go_on),
    )
    doubtful = only(kept(seen, is_certain=False), "hung")
    assert (doubtful.fix, doubtful.then) == (end, go_on), "a wait may end in the next second"
    silent = only(kept(seen, "n02 does not answer", ranks=()), "hung")
    assert (
        "n02" not in silent.title
        and "the workers' stacks: n02 does not answer" in silent.evidence[0]
    )
    assert silent.fix == end
    of_another = only(kept(seen, time=seen.time - 19 * 60), "hung")
    assert of_another == only(seen, "hung"), "they were taken before this hang began"


def test_ranks_that_others_wait_for_are_named_with_their_node() -> None:
    course = at(250)
    behind = moved(course, {4, 5, 6, 7}, iteration=249, time=course.clock - 104)
    # Half of the ranks is no minority: no one is accused.
    assert (
        "their heartbeats name no node"
        in only(later(course, HOUR, heartbeats=behind), "hung").evidence[0]
    )
    finding = only(later(course, HOUR, heartbeats=behind[:6]), "hung")
    assert (
        finding.evidence[0]
        == "2 of 6 ranks are the odd ones out, on n02; the other 4: training, iteration 250"
    )
    assert finding.evidence[1].startswith("rank 4 on n02: training, iteration 249, 1 h 01 min ago")
    assert finding.fix == "tr11 stacks --job 1000_1"
    elsewhere = moved(course, {3}, phase="evaluating")
    assert (
        "rank 3 is the odd one out, on n01"
        in only(later(course, 4 * HOUR, heartbeats=elsewhere), "hung").evidence[0]
    )


@pytest.mark.parametrize(
    ("age", "said"),
    [(0.9, "their heartbeats name no node"), (1.3, "rank 3 is the odd one out, on n01")],
)
def test_ranks_of_quick_steps_are_together_within_a_second(age: float, said: str) -> None:
    """Heartbeats are a second apart at least: of quick steps, two ranks that are together may show
    different ones.
    """
    course = at(250, pace=0.6)
    behind = moved(course, {3}, iteration=249, time=course.beat_time - age)
    assert said in only(later(course, 130, heartbeats=behind), "hung").evidence[0]


def test_ranks_that_fell_behind_living_ones_hang() -> None:
    course = at(250)
    seen = course.see(heartbeats=moved(course, {6, 7}, iteration=248, time=course.clock - 2000))
    finding = only(seen, "hung")
    assert "2 of 8 ranks, on n02, stand still for 33 min" in finding.title
    fresh = course.see(heartbeats=moved(course, {6, 7}, time=course.clock - 2000))
    assert "hung" not in names(fresh), (
        "a clock that is wrong is no hang: they are where the others are"
    )


def test_what_is_written_for_the_ranks_of_a_node_tells_none_apart() -> None:
    """One heartbeat a node, of which only one hears the steps: the others stand still in a healthy
    training.
    """
    course = at(250)
    still = moved(course, {4, 5, 6, 7}, iteration=0, time=course.clock - 2000)
    of_nodes = tuple(replace(beat, ranks=4) for beat in still if beat.rank in {0, 4})
    seen = course.see(heartbeats=of_nodes)
    assert {"hung", "slow-node", "stalled"}.isdisjoint(names(seen))
    silent = only(later(course, 1400, heartbeats=of_nodes), "hung")
    assert silent.evidence[0].startswith("8 ranks, and no word of their own")
    assert not any("odd one" in line for line in silent.evidence)
    assert any("ranks 4 to 7 on n02" in line for line in silent.evidence)
    own = course.see(heartbeats=tuple(replace(beat, ranks=None) for beat in of_nodes))
    assert "hung" in names(own), "a rank's own word does"


def test_silence_between_two_lines_of_the_log_is_no_hang_of_a_trainer_that_beats_by_them() -> None:
    course = at(250)
    seen = course.see()
    usual = known(seen.steps, ())
    rare = tuple(step for step in usual if step.record.iteration % 50 == 0)
    last = rare[-1].time
    assert last is not None
    word = Heartbeat(0, "n01", 7, "training", 250, last, rare[-1].job_id, ranks=8)
    within = replace(seen, steps=rare, heartbeats=(word,), time=last + 49 * 105.0)
    assert {"hung", "stalled"}.isdisjoint(names(within))
    assert "hung" in names(replace(within, heartbeats=(replace(word, ranks=None),)))


def test_an_evaluation_hangs_beyond_what_evaluations_took() -> None:
    course = Course(evaluate_every=50, hook=lambda _: None)

    def stop(given_course: Course) -> None:
        if given_course.iteration == 299:
            given_course.enter("evaluating")
            raise Over

    course.hook = stop
    seen = course.run().see()
    patience = phase_patience(seen, "evaluating")
    longest = longest_phase(seen, "evaluating")
    assert longest is not None and 300 < longest <= 450
    assert patience == 5 * longest
    assert findings(later(course, patience)) == []
    finding = only(later(course, patience + 1), "hung")
    assert "while evaluating" in finding.title
    unlearned = changed(later(course, patience + 1), phases=())
    assert findings(unlearned) == [], "an hour, before anything was learned"
    assert names(changed(later(course, 3601), phases=())) == ["hung"]


def test_a_save_and_a_start_that_are_quick_are_learned_too() -> None:
    seen = at(150).see()
    assert phase_patience(seen, "saving") == 600.0, (
        "a floor below which a busy file system is no fault"
    )
    assert phase_patience(seen, "ending") == 3600.0, "nothing was learned"
    assert 600.0 <= phase_patience(seen, "starting") <= 1000.0
    (first,) = first_steps(seen)
    assert 3 * 105 <= first < 3.2 * 105
    assert first_step_patience(seen) == 5 * first


def test_between_two_launches_no_one_hangs() -> None:
    """The workers of the first launch are gone, by the controller's record; those of the next take
    their time to begin.
    """
    course = at(250, pace=1.0)
    ended = (LaunchEnd("2001", 1, course.clock + 3.0),)
    seen = later(course, 500, launch_ends=ended)
    assert findings(seen) == []
    assert (
        judge(seen, registry.detect_all(seen)).why
        == "job 1000_1 on 2 nodes: starting, last sign of life 8 min 17 s ago"
    )
    assert names(later(course, 500)) == ["hung"]
    patience = phase_patience(seen, "starting")
    assert "while starting" in only(later(course, patience + 4, launch_ends=ended), "hung").title
    alive = later(course, 500, launch_ends=(LaunchEnd("2001", 1, course.clock - 3.0),))
    assert names(alive) == ["hung"], "these are of a later launch"
    gone = replace(seen, jobs=())
    assert judge(gone, registry.detect_all(gone)).word is VerdictWord.DOWN, (
        "without an allocation there is no next launch"
    )


def test_ranks_that_live_and_finish_nothing_stall() -> None:
    course = at(250)
    waiting = tuple(
        replace(beat, phase="data-wait", time=course.clock + 1100)
        for beat in course.see().heartbeats
    )  # type: ignore[union-attr]
    assert findings(later(course, 1000, heartbeats=waiting)) == []
    seen = later(course, 1101, heartbeats=waiting)
    assert names(seen) == ["stalled"]
    finding = only(seen, "stalled")
    assert finding.title.startswith(
        "job 1000_1: no iteration after 250 for 18 min, though its ranks show life"
    )
    assert finding.evidence[1] == "8 ranks: 8 in data-wait; last sign of life 1 s ago"
    assert judge(seen, registry.detect_all(seen)).word is VerdictWord.STALLED


def test_a_rank_that_is_stopped_is_one_incident_from_the_first_look() -> None:
    """The others still show life: it is told as the hang that it is, with the same commands as when
    they do no more.
    """
    course = at(250)
    living = tuple(replace(beat, time=course.clock + 1100) for beat in course.see().heartbeats)  # type: ignore[union-attr]
    seen = later(course, 1101, heartbeats=living)
    assert names(seen) == ["stalled"]
    (told,) = [one for one in by_cause(registry.detect_all(kept(seen))) if one.subject == "1000_1"]
    assert (told.detector, told.title) == ("hung", f"job 1000_1 hangs: {STOPPED}")
    assert told.evidence[0] == "no iteration after 250 for 18 min (normal: up to 17 min)"
    silent = only(kept(later(at(250), 18 * 60)), "hung")
    assert (told.fix, told.then) == (silent.fix, silent.then)
    assert names(kept(seen, is_certain=False)) == ["stalled"], "it may come back, and save"


@pytest.mark.parametrize("phase", ["saving", "evaluating"])
def test_no_stall_during_nor_soon_after_a_save_or_evaluation(phase: str) -> None:
    course = at(250)
    course.enter(phase)
    course.clock += 3000.0
    beating = tuple(replace(beat, time=course.clock) for beat in course.see().heartbeats)  # type: ignore[union-attr]
    assert findings(course.see(heartbeats=beating)) == []
    course.enter("training")
    course.clock += 60.0
    assert findings(course.see()) == [], "the iteration's time counts from the end of the phase"


def test_without_phases_a_stall_takes_an_hour() -> None:
    course = at(250)
    beating = tuple(replace(beat, time=course.clock + 3700) for beat in course.see().heartbeats)  # type: ignore[union-attr]
    assert findings(later(course, 3500, heartbeats=beating, phases=())) == []
    assert names(later(course, 3700, heartbeats=beating, phases=())) == ["stalled"]


def test_the_card_says_how_many_iterations_are_a_stall() -> None:
    seen = later(at(250), 18 * 60)
    facts = facts_with(seen.run, watch=WatchSection(stall_iterations=20))
    assert findings(replace(seen, run=facts)) == []


# --------------------------------------------------------------------------- whatever the files say
NUMBERS = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e308, 105.0]))
WHEN = st.floats(-1e6, 1e6).map(lambda seconds: NOW + seconds)
PHASE_NAMES = st.sampled_from(
    ["starting", "loading", "training", "data-wait", "saving", "evaluating", "ended", "lunch"]
)


@st.composite
def any_step(draw: st.DrawFn) -> Step:
    line = record(
        draw(st.integers(-5, 300)), lm_loss=draw(NUMBERS), grad_norm=draw(st.none() | NUMBERS), tflops=draw(NUMBERS),
        learning_rate=draw(NUMBERS), samples_per_second=draw(NUMBERS), seconds_per_iteration=draw(NUMBERS),
        consumed_samples=draw(st.integers(-(10**20), 10**20)), global_batch_size=draw(st.integers(-9, 9)),
    )  # fmt: skip
    return Step(line, draw(st.none() | WHEN), draw(st.sampled_from(["", "1006", "1007"])))


ANY_BEAT = st.builds(
    Heartbeat, st.integers(0, 9), st.sampled_from(["", "n01", "n02"]), st.just(1), PHASE_NAMES, st.integers(-9, 300), WHEN,
    st.sampled_from(["1006", "1007"]),
)  # fmt: skip
ANY_PHASE = st.builds(
    Phase,
    st.sampled_from(["1006", "1007"]),
    st.integers(-1, 3),
    PHASE_NAMES,
    st.integers(-9, 300),
    WHEN,
    st.none() | WHEN,
)


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(any_step(), max_size=12),
    repeat=st.integers(1, 12),
    beats_seen=st.lists(ANY_BEAT, max_size=8),
    phases=st.lists(ANY_PHASE, max_size=8),
    events=st.lists(
        st.builds(TrainingEvent, st.sampled_from(["spike", "roll-back", "skipped", "?"]), WHEN),
        max_size=4,
    ),
    log_interval=st.integers(1, 10),
    minutes=st.none() | st.floats(0.01, 1e5),
)
def test_no_content_of_the_files_breaks_a_detector(
    lines: list[Step], repeat: int, beats_seen: list[Heartbeat], phases: list[Phase], events: list[TrainingEvent],
    log_interval: int, minutes: float | None,
) -> None:  # fmt: skip
    """Numbers that are none, clocks that jump, phases that no one knows: a finding at most, never a
    traceback.
    """
    seen = snapshot(
        steps=tuple(lines * repeat),
        heartbeats=tuple(beats_seen),
        phases=tuple(phases),
        events=tuple(events),
    )
    seen = replace(
        seen, run=facts_with(seen.run, log_interval=log_interval, checkpoint_minutes=minutes)
    )
    found = registry.detect_all(seen)
    judge(seen, found)
    assert all("\n" not in finding.title for finding in found)
