"""Which finding follows from which: every detector is placed, no circle, and the cause comes first."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.status_cases import ended, idle, pending, running, snapshot, wordless
from tr11ops.cluster.base import Job, Node
from tr11ops.detect.causes import CAUSES, by_cause, cause_of, lead
from tr11ops.detect.finding import HELD_FOR_FAULT, Finding, Severity
from tr11ops.detect.registry import DETECTORS, detect_all
from tr11ops.observe.snapshot import Attempt
from tr11ops.rundir.hold_store import HoldRecord

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
