"""What `tr11 diagnose` tells people to type holds for the run as it stands now."""

from __future__ import annotations

from msgspec.structs import replace

from tests.tr11ops.detect.operation_table import operated
from tests.tr11ops.status_cases import HOUR, NOW, facts_with, idle, snapshot, steps
from tr11ops.cli.diagnose import advice, with_advice
from tr11ops.diagnose.attribution.evidence import Attribution, Conclusion, Kind
from tr11ops.diagnose.attribution.joined import joined
from tr11ops.diagnose.causes import judge
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.screen import lines
from tr11ops.diagnose.sighting import LogLaunch
from tr11ops.observe.observations import LaunchEnd
from tr11ops.observe.snapshot import SOUND_LOSSES, Attempt
from tr11ops.runcard.sections import ResilienceSection

TWICE = "software or data, not the nodes: the same fault came back on n08 and n40: rank 1 on n40: it was ended by SIGSEGV"
FIRST = "attempt 7_1, launch 1: rank 1 on n08: it was ended by SIGSEGV"


def concluded(said: Attribution, attempt: str = "1007") -> Diagnosis:
    found = replace(judge([LogLaunch("")]), launch=attempt)
    return joined(found, Conclusion(said, by_agent=True, file="launches/2.json"))


def screen(found: Diagnosis) -> str:
    return " ".join(" ".join(lines(found)).split())


def test_the_line_and_its_node_are_one() -> None:
    found = concluded(Attribution(Kind.SOFTWARE, TWICE, 0.9, suspects=("n40",), evidence=(FIRST,)))
    assert found.root_cause is not None and (found.root_cause.text, found.root_cause.node) == (
        FIRST,
        "n08",
    )


def test_data_that_may_be_at_fault_are_passed_over() -> None:
    found = concluded(Attribution(Kind.SOFTWARE, TWICE, 0.9, evidence=(FIRST,)))
    bad = Attempt(
        "1007", NOW - HOUR, None, cause="software", held_because="the same fault came back"
    )
    ends = (LaunchEnd("1007", 1, NOW - HOUR, reached=31_350, began_at=31_200),)
    found = with_advice(found, advice(idle(attempts=(bad,), launch_ends=ends), found))
    assert "`tr11 rollback 31200 --skip 31351-31351`" in screen(found)
    assert advice(idle(attempts=(bad,)), found) == "", "no one knows how far it came"


def test_a_node_beyond_the_limit_is_excluded_by_force_only() -> None:
    found = concluded(
        Attribution(Kind.NODE, "the second time on n20", 0.9, blamed=("n20",), evidence=("n20",))
    )
    run = operated()
    tight = ResilienceSection(exclusion_cap_percent=0)
    at_limit = replace(run, run=facts_with(run.run, resilience=tight), exclusions=())
    shown = screen(with_advice(found, advice(at_limit, found)))
    assert "helps now: `tr11 nodes exclude n20 --force --reason 'found bad'`" in shown
    assert "tr11 nodes exclude n20" in screen(found)


def test_a_kill_while_the_loss_is_no_number_is_no_clean_end() -> None:
    found = concluded(
        Attribution(
            Kind.OPERATOR, "the kill switch is set", 1.0, evidence=("the kill switch is set",)
        )
    )
    *before, bad = steps()[-1 - SOUND_LOSSES :]
    bad = replace(bad, record=replace(bad.record, lm_loss=float("nan")), job_id="1007")
    told = with_advice(found, advice(snapshot(steps=(*before, bad)), found))
    assert (told.fault.value, told.step.value) == ("numerics", "rollback_and_skip")
    assert f"--skip {bad.record.iteration}-" in screen(told)
    well = with_advice(found, advice(snapshot(steps=tuple(before)), found))
    assert well.fault == found.fault and well.advice == ""
