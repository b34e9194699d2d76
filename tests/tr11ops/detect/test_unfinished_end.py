"""What is said of attempts that ended badly: which are one incident, and what lets the run go on."""

from __future__ import annotations

from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console

from tests.tr11ops.detect.detector_table import (
    UNKNOWN,
    found,
)
from tests.tr11ops.status_cases import (
    HOUR,
    NOW,
    changed,
    checkpoints,
    ended,
    idle,
    pending,
    running,
    snapshot,
    steps,
    with_facts,
    wordless,
)
from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.detect.detector import (
    CAUSES,
    HELD_FOR_FAULT,
    Finding,
    Severity,
    by_cause,
    cause_of,
    lead,
)
from tr11ops.detect.registry import DETECTORS, detect_all
from tr11ops.dialects.settings import settings_of
from tr11ops.observe.observations import LaunchEnd, Phase
from tr11ops.observe.snapshot import Attempt
from tr11ops.rundir.hold_store import HoldRecord
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.status.rows import Screen
from tr11ops.status.screen import render
from tr11ops.trainers.levels import standing_of
from tr11ops.watchdog.verdict import judge


def test_a_check_that_fails_everywhere_is_shown_by_its_own_failures() -> None:
    """Not by what else ended that launch, or a later one."""
    shown = {"script:fans.sh": "health check script:fans.sh failed on n[01-48]"}
    ends = (
        LaunchEnd("1007", 1, NOW - 60, "n02: health check disk: full", failing_checks=shown),
        LaunchEnd("1007", 2, NOW, "rank 3 died", failing_checks=shown),
    )
    [finding] = found(snapshot(launch_ends=ends), "check-failing")
    assert finding.evidence == tuple(shown.values())


def failed(job_id: str, age: float, cause: str, why: str) -> Attempt:
    return replace(wordless(job_id, age=age), cause=cause, held_because=why)


def test_ends_of_different_causes_are_different_incidents() -> None:
    """Each is told with its own cause, and none of them is counted with another."""
    lost = failed("1005", 3 * HOUR, "node", "n07 does not answer")
    away = failed("1006", 2 * HOUR, "storage", "/scratch is not mounted")
    bad = failed("1007", HOUR, "software", "the same fault came back after iteration 8")
    three = found(idle(attempts=(lost, away, bad), steps=()), "unfinished-end")
    assert [(one.title, one.identity) for one in three] == [
        ("attempt 1000_7 failed: the same fault came back after iteration 8", ("software",)),
        ("attempt 1000_6 failed: /scratch is not mounted", ("storage",)),
        ("attempt 1000_5 failed: n07 does not answer", ("node",)),
    ]
    assert three[0].severity is Severity.CRITICAL, (
        "three in a row, and nothing was trained in between"
    )


SIGSEGV = "died: the worker was ended by sigsegv"


def suspicion(job_id: str, age: float, node: str, rank: int = 3) -> tuple[Attempt, LaunchEnd]:
    """An attempt whose worker died on a node, which alone is no proof."""
    why = f"the second time on {node}: rank {rank} on {node}: the worker was ended by SIGSEGV"
    end = LaunchEnd(
        job_id, 2, NOW - age, why, reached=31_220, suspects=(node,), fault=f"{SIGSEGV} at {rank}"
    )
    bad = replace(wordless(job_id, age=age, failure=why), cause="node", fault=end.fault)
    return bad, end


def test_no_node_is_named_as_guilty_while_the_next_attempt_will_tell() -> None:
    bad, end = suspicion("1007", HOUR, "iam02")
    (finding,) = found(
        idle(attempts=(bad,), launch_ends=(end,), jobs=(pending(),), steps=()), "unfinished-end"
    )
    assert finding.title == (
        "attempt 1000_7 failed: the second time: rank 3: the worker was ended by SIGSEGV; whether it is a node's fault,"
        " the next attempt tells"
    )
    assert "seen on iam02, which alone proves nothing against it" in finding.evidence
    held = pending(reason="JobHeldAdmin")
    (alone,) = found(
        idle(attempts=(bad,), launch_ends=(end,), jobs=(held,), steps=()), "unfinished-end"
    )
    assert "on iam02" in alone.title, (
        "no attempt follows by itself: a person has to look, and hears where"
    )
    proof = replace(end, blamed=("iam02",), suspects=())
    blamed = replace(bad, blamed=("iam02",))
    (sure,) = found(
        idle(attempts=(blamed,), launch_ends=(proof,), jobs=(pending(),), steps=()),
        "unfinished-end",
    )
    assert "on iam02" in sure.title and sure.identity == ("node", f"{SIGSEGV} at 3")


def test_a_suspicion_that_proves_to_be_the_programs_is_one_incident_with_it() -> None:
    """Whichever rank had it, and whatever it was taken for at first: the later end says who is
    cleared.
    """
    first, end = suspicion("1006", 2 * HOUR, "iam02", rank=5)
    verdict = "software or data, not the nodes: the same fault came back on iam02 and iam04"
    last = replace(failed("1007", HOUR, "software", verdict), fault=f"{SIGSEGV} at 3")
    ends = (
        end,
        LaunchEnd("1007", 1, NOW - HOUR, verdict, suspects=("iam04",), fault=last.fault),
    )
    seen = idle(attempts=(first, last), launch_ends=ends, steps=())
    (before,) = found(idle(attempts=(first,), launch_ends=(end,), steps=()), "unfinished-end")
    (finding,) = found(seen, "unfinished-end")
    assert finding.identity == before.identity == (SIGSEGV,)
    assert finding.title == f"the last 2 attempts failed: {verdict}"
    assert "suspected before, and cleared by it: iam02" in finding.evidence
    (older,) = found(changed(seen, launch_ends=ends[1:]), "unfinished-end")
    assert older.title == finding.title, "also when its launches are not looked into any more"
    (unsure,) = found(replace(seen, exclusions=UNKNOWN), "unfinished-end")
    assert not any("cleared" in line for line in unsure.evidence)


def test_two_faults_of_one_class_are_two_incidents() -> None:
    first, last = (
        replace(failed(name, HOUR, "unknown", ""), fault=fault)
        for name, fault in (("1006", "a at 1"), ("1007", "b at 1"))
    )
    two = found(idle(attempts=(first, last), steps=()), "unfinished-end")
    assert {one.identity for one in two} == {("a",), ("b",)}


def test_ends_of_unknown_cause_are_one_fault_only_where_the_same_is_known_of_them() -> None:
    """The batch host of one was lost, and of the other nothing is known: neither failed by both."""
    lost = "n07, which ran the batch script, was lost with it"
    last = wordless("1007", HOUR, failure=lost)
    two = found(idle(attempts=(wordless("1006", 2 * HOUR), last), steps=()), "unfinished-end")
    assert [one.title for one in two] == [
        f"attempt 1000_7 failed: {lost}",
        "attempt 1000_6 ended without the trainer's end marker",
    ]
    other = wordless("1006", 2 * HOUR, failure=lost.replace("n07", "n12"))
    (one,) = found(idle(attempts=(other, last), steps=()), "unfinished-end")
    assert one.title == f"the last 2 attempts failed, 1000_7 because {lost}"


def test_a_queue_that_a_leaving_attempt_holds_is_not_told_as_its_end() -> None:
    """The mail said to launch more tasks, into the same fault."""
    job, held = running(start_time=NOW - HOUR), pending(reason="JobHeldAdmin")
    hold = HoldRecord("1000", "tr11", NOW - 20, "the same fault came back", is_for_fault=True)
    seen = snapshot(jobs=(job, held), holds=(hold,))
    assert found(seen, "chain-end") == []
    by_person = replace(hold, is_for_fault=False)
    assert found(snapshot(jobs=(job, held), holds=(by_person,)), "chain-end") != []


def test_a_fault_that_a_later_attempt_trained_past_is_over_whatever_ended_that_one() -> None:
    lost = failed("1006", 2 * HOUR, "node", "n07 does not answer")
    bad = failed("1007", HOUR, "software", "the same fault came back after iteration 8")
    trained = idle(attempts=(lost, bad), steps=steps(job_id="1007", age=HOUR))
    severities = {one.identity: one.severity for one in found(trained, "unfinished-end")}
    assert severities == {("software",): Severity.WARNING}


@pytest.mark.parametrize(
    ("reached", "severity"),
    [(31_215, Severity.WARNING), (31_220, Severity.WARNING), (31_221, None)],
)
def test_several_ends_are_over_once_a_later_attempt_has_come_past_the_last_of_them(
    reached: int, severity: Severity | None
) -> None:
    """And then no word is left of them: the run is well."""
    first = failed("1005", 3 * HOUR, "software", "SIGSEGV")
    second = failed("1006", 2 * HOUR, "software", "SIGSEGV")
    ends = (
        LaunchEnd("1005", 1, NOW - 3 * HOUR, "SIGSEGV", reached=31_220, began_at=31_200),
        LaunchEnd("1006", 1, NOW - 2 * HOUR, "SIGSEGV", reached=31_210, began_at=31_200),
        LaunchEnd("1007", 1, NOW - HOUR, reached=reached, began_at=31_200),
    )
    living = Attempt("1007", NOW - HOUR, None)
    standing = found(
        snapshot(attempts=(first, second, living), launch_ends=ends, steps=()), "unfinished-end"
    )
    assert [(one.severity, one.is_to_be_passed) for one in standing] == (
        [] if severity is None else [(severity, True)]
    )


def test_a_cause_that_the_scheduler_alone_knows_tells_incidents_apart() -> None:
    job = running(
        raw_id="1006", job_id="1000_6", task_id=6, state=JobState.NODE_FAIL, end_time=NOW - 2 * HOUR
    )
    two = found(
        idle(jobs=(job,), attempts=(wordless("1006", 2 * HOUR), wordless("1007"))), "unfinished-end"
    )
    assert [one.identity for one in two] == [("unknown",)]


@pytest.mark.parametrize(
    ("cause", "reached", "says"),
    [
        ("software", 31_350, True),
        ("unknown", 31_350, True),
        ("node", 31_350, False),
        ("software", None, False),
    ],
)
def test_a_fault_that_came_back_at_one_step_names_the_command_that_passes_over_it(
    cause: str, reached: int | None, says: bool
) -> None:
    bad = failed("1007", HOUR, cause, "the same fault came back after iteration 31350")
    ends = (LaunchEnd("1007", 1, NOW - HOUR, reached=reached, began_at=31_200),)
    (finding,) = found(idle(attempts=(bad,), launch_ends=ends), "unfinished-end")
    command = "to skip the data of iteration 31351, if they are at fault: `tr11 rollback 31200 --skip 31351-31351`"
    assert (command in finding.evidence) is says
    free = replace(bad, held_because="", failure="SIGSEGV")  # the next task tries it by itself
    (finding,) = found(idle(attempts=(free,), launch_ends=ends), "unfinished-end")
    assert command not in finding.evidence


def test_a_fault_that_followed_the_data_over_the_nodes_has_the_cure_as_its_command() -> None:
    """What its mail says to type is what lets the run go on, and not only where to look."""
    bad = failed(
        "1007", HOUR, "software", "the same fault came back after iteration 31350 on n1 and n2"
    )
    ends = tuple(LaunchEnd("1007", launch, NOW - HOUR, reached=31_350) for launch in (1, 2))
    held = pending(reason="JobHeldAdmin")
    seen = idle(attempts=(bad,), launch_ends=ends, jobs=(held,))
    (finding,) = found(seen, "unfinished-end")
    assert (finding.fix, finding.then) == (
        "tr11 rollback 31200 --skip 31351-31351",
        ("tr11 resume",),
    )
    assert any("`tr11 diagnose --job 1000_7` says where" in line for line in finding.evidence)
    unsaved = replace(seen, checkpoints=checkpoints(steps=(), latest=None, examined=()))
    (finding,) = found(unsaved, "unfinished-end")
    assert finding.fix == "tr11 launch --replace --set 'data.skip_ranges=[\"31351-31351\"]'"
    (once,) = found(changed(seen, launch_ends=ends[:1]), "unfinished-end")
    assert once.fix == "tr11 diagnose --job 1000_7", "one end alone is no sign of the data"


@pytest.mark.parametrize(
    ("phases", "cured"),
    [(("starting", "loading"), False), (("starting", "loading", "training", "ended"), True)],
)
def test_what_dies_in_its_first_iteration_met_the_data_and_what_dies_before_did_not(
    phases: tuple[str, ...], cured: bool
) -> None:
    """A save came just before the bad sample: no launch finishes an iteration after it."""
    why = "the same fault came back before its first iteration on n1 and n2 and n3"
    bad = replace(failed("1007", HOUR, "software", why), fault=SIGSEGV)
    ends = tuple(
        LaunchEnd("1007", launch, NOW - HOUR, began_at=31_200, fault=SIGSEGV) for launch in (1, 2)
    )
    seen = idle(
        attempts=(bad,),
        launch_ends=ends,
        jobs=(pending(reason="JobHeldAdmin"),),
        phases=tuple(
            Phase("1007", end.launch, name, 31_200, NOW) for end in ends for name in phases
        ),
    )
    (finding,) = found(seen, "unfinished-end")
    expected = "tr11 rollback 31200 --skip 31201-31201" if cured else "tr11 diagnose --job 1000_7"
    assert finding.fix == expected
    stopped = (replace(ends[0], fault="operator"), ends[1])
    (once,) = found(changed(seen, launch_ends=stopped), "unfinished-end")
    assert once.fix == "tr11 diagnose --job 1000_7", "a stop at that place is no sign of the data"


def test_what_a_leaving_attempt_holds_for_its_fault_is_told_with_its_end() -> None:
    job, queued = running(start_time=NOW - HOUR), pending(reason="JobHeldAdmin")
    hold = HoldRecord("1000", "tr11", NOW - 20, "the same fault came back", is_for_fault=True)
    (leaving,) = found(snapshot(jobs=(job, queued), holds=(hold,)), "held")
    assert leaving.severity is Severity.INFO
    (stays,) = found(
        snapshot(jobs=(job, queued), holds=(replace(hold, time=NOW - HOUR / 2),)), "held"
    )
    assert stays.severity is Severity.WARNING


# ---------------------------------------------------------------------------
# Which finding follows from which: every detector is placed, no circle, and the cause comes
# first.


INFO, WARNING, CRITICAL = Severity
SEGFAULT = "software or data, not the nodes: the same fault came back after iteration 8 on n1 and n2: SIGSEGV"


def finding(detector: str, severity: Severity = WARNING, **more: object) -> Finding:
    return Finding(detector, severity, f"{detector} it is", **more)  # type: ignore[arg-type]


def test_every_detector_is_placed() -> None:
    names = {detector.name for detector in DETECTORS}
    assert set(CAUSES) == names
    assert {link.cause for links in CAUSES.values() for link in links} <= names


@pytest.mark.parametrize("name", CAUSES)
def test_nothing_follows_from_itself(name: str) -> None:
    before, causes = set[str](), {name}
    while causes:
        before |= causes
        causes = {link.cause for cause in causes for link in CAUSES[cause]}
        assert name not in causes
        causes -= before


def test_what_others_follow_from_comes_before_them_in_the_one_order() -> None:
    places = list(CAUSES)
    for name, links in CAUSES.items():
        assert all(places.index(link.cause) < places.index(name) for link in links), name
    assert lead("chain-end", CRITICAL) < lead("filesystem-full", WARNING), "the most severe first"
    assert lead("of a newer tr11", WARNING) > lead(places[-1], WARNING)


def test_of_equals_the_strongest_cause_is_told_first() -> None:
    given = (finding("held", CRITICAL), finding("chain-end"), finding("filesystem-full", CRITICAL))
    assert [one.detector for one in by_cause(given)][:2] == ["filesystem-full", "held"]


def test_the_first_cause_leads_and_is_as_severe_as_what_follows() -> None:
    slow, node, down = (
        finding("slow"),
        finding("slow-node", identity=("n3",)),
        finding("down", CRITICAL),
    )
    fault = finding("unfinished-end")
    told = by_cause((down, slow, node, fault))
    assert [(one.detector, one.severity) for one in told] == [
        ("unfinished-end", CRITICAL),
        ("slow-node", WARNING),
    ]
    assert [one.consequences for one in told] == [(down,), (slow,)]


def test_what_goes_with_its_cause_needs_no_command_of_its_own() -> None:
    hung = finding("hung", CRITICAL, subject="5", then=("tr11 resume",))
    down = finding("down", CRITICAL, then=("tr11 launch",))
    told = by_cause(
        (hung, finding("suspended", CRITICAL, subject="5"), down, finding("unfinished-end"))
    )
    assert {one.consequences[0].detector: one.consequences[0].then for one in told} == {
        "hung": (), "down": ("tr11 launch",),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("consequence", "cause", "follows"),
    [
        (finding("zombie", identity=("n1",)), finding("node-lost", identity=("n1",)), True),
        (finding("zombie", identity=("n1",)), finding("node-lost", identity=("n2",)), False),
        (finding("hung", subject="5"), finding("suspended", subject="5"), True),
        (finding("hung", subject="5"), finding("suspended", subject="6"), False),
        (finding("held", fault=HELD_FOR_FAULT), finding("unfinished-end"), True),
        (finding("held"), finding("unfinished-end"), False),  # a person holds it
        (finding("unfinished-end", fault="storage"), finding("filesystem-full"), True),
        (finding("unfinished-end", fault="software"), finding("filesystem-full"), False),
        (finding("held", CRITICAL, fault=HELD_FOR_FAULT), finding("unfinished-end", INFO), False),
        (finding("backup-overdue"), finding("slow-node"), False),
    ],
)
def test_what_two_findings_must_share(consequence: Finding, cause: Finding, follows: bool) -> None:
    assert (cause_of(consequence, (cause,)) is not None) is follows


def test_a_fault_that_held_the_array_is_the_headline() -> None:
    """Releasing what is held leads into the same fault: the finding says so first, and what to type
    for it.
    """
    attempt = replace(
        wordless("1007", failure="SIGSEGV"), label="20_3", cause="software", held_because=SEGFAULT
    )
    hold = HoldRecord("1000", "tr11", attempt.changed, SEGFAULT, is_for_fault=True)
    seen = idle(jobs=(pending(reason="JobHeldAdmin"),), attempts=(attempt,), holds=(hold,))
    (told,) = [one for one in by_cause(detect_all(seen)) if one.severity is CRITICAL]
    assert told.title == f"attempt 20_3 failed: {SEGFAULT}" and "diagnose" in told.fix
    (held,) = told.consequences
    assert (
        held.title.startswith("nothing trains: job 1000_[8-10%1] is held")
        and "resume" in held.then[0]
    )


def test_what_a_person_holds_is_told_beside_the_fault() -> None:
    seen = idle(jobs=(pending(reason="JobHeldUser"),), attempts=(wordless("1007"),))
    assert [one.detector for one in by_cause(detect_all(seen)) if not one.consequences][:1] == [
        "held"
    ]


def test_the_reason_of_a_hold_leads_where_the_attempt_left_none() -> None:
    """The run directory was away: the queued job's own comment is all that says why."""
    why = "the run directory cannot be used: /scratch is not mounted"
    hold = HoldRecord("1000", "tr11", 1.0, why, is_for_fault=True)
    jobs = (pending(reason="JobHeldAdmin"),)
    for attempts in ((wordless("1007"),), (), (ended("1007"),)):
        seen = idle(jobs=jobs, attempts=attempts, holds=(hold,))
        told = by_cause(detect_all(seen))[0]
        assert why in told.title.partition(" is held")[0], attempts


def test_a_dead_batch_host_is_one_incident() -> None:
    job = running(nodes=("n1", "n2"))
    attempt = Attempt(job.raw_id, 1.0, None, nodes=("n1", "n2"))
    seen = snapshot(
        jobs=(job,),
        attempts=(attempt,),
        heartbeats=(),
        steps=(),
        nodes=(Node("n1", frozenset({"down"})),),
    )
    told = [one for one in by_cause(detect_all(seen)) if one.severity is CRITICAL]
    assert [one.detector for one in told] == ["node-lost"]
    fixes = {one.detector: one.fix for one in told[0].consequences}
    assert set(fixes) == {"zombie", "stalled"}
    assert told[0].fix == fixes["zombie"]  # one command for both


@pytest.mark.parametrize(("jobs", "fix"), [((), "tr11 launch --array 1-10"), ((pending(),), "")])
def test_what_a_dead_batch_host_leaves_is_of_the_same_incident(
    jobs: tuple[Job, ...], fix: str
) -> None:
    """Its job was ended meanwhile: what is queued goes on by itself, and where nothing is, a launch
    gets other nodes.
    """
    attempt = replace(wordless("1007"), nodes=("n1", "n2"))
    seen = idle(jobs=jobs, attempts=(attempt,), nodes=(Node("n1", frozenset({"down"})),))
    (told,) = [one for one in by_cause(detect_all(seen)) if one.detector == "node-lost"]
    assert (told.identity, told.fix) == (("n1",), fix)
    assert {one.detector for one in told.consequences} == (
        {"unfinished-end"} if jobs else {"unfinished-end", "down"}
    )
    well = replace(seen, nodes=(Node("n1", frozenset({"idle"})),))
    assert "node-lost" not in {one.detector for one in detect_all(well)}


STANDING = standing_of(
    settings_of({"command": ["train.py"], "dialect": "torchtitan"}, "a card"), ranks=2
)


def quit_twice(cause: str = "unknown", **facts: object) -> Finding:
    """What is said of an attempt whose two launches left unasked with status 0, and which held the rest."""
    left = ended("1007", age=60.0, reason="unexplained", iteration=31_220, restart=False)
    left = replace(left, cause=cause, held_because="unexplained, and it came again: status 0")
    ends = tuple(LaunchEnd("1007", one, NOW - 60, reached=31_219 + one) for one in (1, 2))
    held = (pending(reason="JobHeldUser"),)
    seen = idle(attempts=(left,), launch_ends=ends, checkpoints=checkpoints(), jobs=held, steps=())
    [finding] = found(with_facts(seen, **{"standing": STANDING, **facts}), "unfinished-end")
    return finding


def test_an_end_without_a_word_says_what_is_known_what_is_not_and_what_to_type() -> None:
    finding = quit_twice()
    assert finding.evidence[1:] == (
        "known: 2 launches ended so, after iterations 31220, 31221; the newest whole checkpoint is step-31200",
        "not known: why it left, unasked and without an error; what it said last may tell",
    )
    assert finding.fix == "tr11 logs --attempt 1000_7"


def test_where_its_last_step_is_not_known_the_card_can_say_it() -> None:
    finding = quit_twice(total_iterations=None)
    last = "if it was done at iteration 31221: `trainer.steps = 31221` in the card says so"
    assert finding.evidence[-1] == last


def test_workers_that_ended_without_a_word() -> None:
    """By a signal or a status that no one explains: no iteration may have been finished, nothing saved."""
    died = replace(failed("1007", 60.0, "unknown", "the workers ended with status 1"), label="7_1")
    seen = with_facts(idle(attempts=(died,), steps=(), checkpoints=UNKNOWN), standing=STANDING)
    [finding] = found(seen, "unfinished-end")
    assert finding.evidence[1:] == (
        "known: it finished no iteration",
        "not known: why: neither its log, nor how its workers ended, nor the nodes, nor the scheduler tell",
    )
    assert finding.fix == "tr11 logs --attempt 7_1"
    explained = replace(died, cause="storage")
    seen = with_facts(idle(attempts=(explained,), steps=()), standing=STANDING)
    [finding] = found(seen, "unfinished-end")
    assert finding.fix == "tr11 diagnose --job 7_1" and len(finding.evidence) == 1


def test_an_end_at_the_time_limit_without_a_marker_is_called_that() -> None:
    over = replace(
        running(), job_id="1000_7", raw_id="1007", state=JobState.TIMEOUT, end_time=NOW - 60
    )
    seen = idle(attempts=(wordless("1007", age=60.0),), jobs=(over,), steps=())
    [finding] = found(seen, "unfinished-end")
    title = "attempt 1000_7 ended at its time limit, without the trainer's end marker"
    assert finding.title == title


def test_what_the_scheduler_says_of_a_jobs_end_has_one_wording() -> None:
    """The worst step counts before the script, and a status above 128 tells of a signal."""
    job = replace(running(), state=JobState.FAILED, exit_code=1)
    assert job.end_words == "FAILED, its script ended with exit code 1"
    job = replace(job, derived_exit_code=134, exit_signal=9)
    assert job.end_words == (
        "FAILED, a step of it was ended by SIGABRT (exit code 134), it was ended by SIGKILL"
    )
    held = replace(running(), state=JobState.FAILED, exit_code=3, derived_exit_code=143)
    assert held.end_words == "FAILED, its script ended with exit code 3"
    ended = replace(held, exit_code=0).end_words
    assert ended == "FAILED, a step of it was ended by SIGTERM (exit code 143)"
    assert replace(running(), state=JobState.COMPLETED, exit_code=0).end_words == "COMPLETED"


def test_a_stopped_run_says_once_why_it_ended() -> None:
    """The screen's head says it; what stands below refers to that, and does not say it again."""
    why = "software or data, not the nodes: the same fault came back on n12 and n13"
    bad = replace(failed("1007", HOUR, "software", why), failure=why)
    ends = tuple(LaunchEnd("1007", launch, NOW - HOUR, reached=31_350) for launch in (1, 2))
    seen = idle(attempts=(bad,), launch_ends=ends, jobs=(pending(reason="JobHeldAdmin"),))
    hold = HoldRecord("1000", "tr11", NOW - HOUR, why, is_for_fault=True)
    seen = changed(seen, holds=(hold,))
    findings = detect_all(seen)
    status = status_of(seen, findings, judge(seen, findings), ExtraObservations())
    drawn = StringIO()
    Console(width=80, file=drawn).print(render(status, Screen(80, unicode=False)))
    shown = " ".join(drawn.getvalue().split())
    assert shown.count(why) == 1, shown
    assert (
        "attempt 1000_7 failed: see above" in shown
        and "1000_7 ended without an end marker, 1 h" in shown
    )
