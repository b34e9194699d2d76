"""What to do after an end is a function of what the run does now, and the same as `tr11 status` says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.operation_table import TABLE as OPERATION_TABLE
from tests.tr11ops.status_cases import (
    DAY,
    HOUR,
    NOW,
    beats,
    changed,
    ended,
    idle,
    pending,
    slowed,
    snapshot,
    steps,
    wordless,
)
from tests.tr11ops.watchdog.verdict_table import TABLE
from tr11ops.alerts import incidents
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.state import AlertState
from tr11ops.base.observed import Unknown, known
from tr11ops.detect.registry import detect_all
from tr11ops.diagnose.attribution.evidence import Attribution, Conclusion, Kind
from tr11ops.diagnose.attribution.joined import joined
from tr11ops.diagnose.causes import judge as judge_log
from tr11ops.diagnose.diagnosis import Diagnosis, NowState, followed
from tr11ops.diagnose.screen import lines
from tr11ops.diagnose.sighting import LogLaunch
from tr11ops.diagnose.signature import FaultClass, NextStep
from tr11ops.observe.observations import LaunchEnd, Phase
from tr11ops.observe.snapshot import Attempt, KillSwitch, Snapshot
from tr11ops.runcard.watching import WatchSection
from tr11ops.serve.poller import News
from tr11ops.serve.view import view_of
from tr11ops.status.assessment import Assessment
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.status.rows import incident_rows, incidents_of
from tr11ops.status.run_now import commands_now, led_by_findings, run_now, running_on
from tr11ops.watchdog.verdict import VerdictWord, judge, with_severity_of, with_what_resumes

PASSES = Attribution(Kind.UNKNOWN, "rank 3 on n02: NCCL error", 0.5, evidence=("NCCL error",))
STAYS = Attribution(Kind.SOFTWARE, "KeyError: 'a'", 0.9, evidence=("KeyError: 'a'",))
AGAIN = "starting again: the cause is unknown: once more on the same nodes"


def seen(given: Snapshot) -> Assessment:
    findings = detect_all(given)
    verdict = judge(given, findings)
    findings = with_what_resumes(given, with_severity_of(verdict, findings), verdict)
    return Assessment(given, findings, verdict, ExtraObservations())


def ended_by(
    said: Attribution = PASSES, attempt: str = "1006", number: int | None = 1
) -> Diagnosis:
    found = replace(judge_log([LogLaunch("")]), launch=attempt, number=number)
    return joined(found, Conclusion(said, by_agent=True, file="launches/1.json"))


def now(given: Snapshot, found: Diagnosis) -> Diagnosis:
    return replace(found, now=run_now(seen(given), found))


def screen(found: Diagnosis) -> str:
    return " ".join(" ".join(lines(found)).split())


def died(age: float = HOUR) -> tuple[Attempt, ...]:
    return (wordless(age=age),)


def quiet(**changes: object) -> Snapshot:
    """Nothing runs; the last attempt has died an hour ago."""
    return idle(**{"attempts": died(), "heartbeats": (), **changes})


@pytest.mark.parametrize("name", ["1000_[8-10%1]", "1006"])
def test_what_is_queued_is_not_submitted_again(name: str) -> None:
    job = pending() if name != "1006" else pending((), job_id="1006", raw_id="1006")
    found = now(quiet(jobs=(job,)), ended_by())
    shown = screen(found)
    assert found.action is NextStep.NONE and "starts by itself" in shown
    assert "what to do Nothing now." in shown and "tr11 status" in shown
    assert "Type" not in shown and "Submit" not in shown
    assert ("put back into the queue" in shown) == (name == "1006")


def test_what_would_end_alike_is_kept_back_before_it_starts() -> None:
    found = now(quiet(jobs=(pending(),)), ended_by(STAYS))
    assert found.action is NextStep.FIX_CONFIG
    assert "Correct the program" in screen(found) and "`tr11 pause`" in screen(found)


@pytest.mark.parametrize("said", [PASSES, STAYS])
def test_a_run_that_trains_again_says_since_when_where_and_from_which_iteration(
    said: Attribution,
) -> None:
    given = snapshot(attempts=(Attempt("1007", NOW - 12 * HOUR, None, "1000_7"), *died(13 * HOUR)))
    found = now(given, ended_by(said))
    assert found.action is NextStep.NONE and found.now is not None
    assert (found.now.job, found.now.since) == ("1000_7", NOW - 12 * HOUR)
    assert "It runs again since" in screen(found) and "in job 1000_7" in screen(found)
    assert f"from iteration {steps()[0].record.iteration - 1}, and is at iteration" in screen(found)
    assert "nothing to restart" not in screen(found) and "Type" not in screen(found)


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_restart_inside_the_job_is_waited_for(has_begun: bool) -> None:
    """No one types anything between the end of a launch and the next one's first step."""
    begun = (Phase("1007", 2, "starting", 31219, NOW - 30.0),) if has_begun else ()
    given = snapshot(
        launch_ends=(LaunchEnd("1007", 1, NOW - 60.0, "NCCL error", AGAIN, reached=31219),),
        phases=begun,
        heartbeats=beats(5.0, "starting" if has_begun else "ended"),
        steps=steps(age=90.0),
    )
    found = now(given, ended_by(attempt="1007"))
    shown = screen(found)
    assert found.action is NextStep.NONE and found.now is not None
    assert found.now.state is NowState.STARTS
    if has_begun:
        assert "in launch 2 of job 1000_7" in shown and "has made no step yet" in shown
    else:
        assert "Job 1000_7 still runs. Starting again: the cause is unknown" in shown
    assert "recovered when `tr11 status` shows new iterations" in shown and "Type" not in shown


def test_where_nothing_goes_on_the_commands_are_those_of_status() -> None:
    found = now(quiet(), ended_by())
    assert found.action is NextStep.RESUBMIT
    assert "what to do Type `tr11 launch --array 1-10`." in screen(found)
    changed = now(quiet(), ended_by(STAYS))
    assert "Then type `tr11 launch --array 1-10`." in screen(changed)


def test_a_clean_end_with_nothing_queued_is_not_all() -> None:
    given = idle(attempts=(ended("1007", age=HOUR),), steps=steps(age=HOUR))
    said = Attribution(Kind.OPERATOR, "its time was up", 1.0, evidence=("its time was up",))
    found = now(given, ended_by(said, "1007"))
    assert found.fault is FaultClass.CLEAN_EXIT and found.action is NextStep.RESUBMIT
    assert "more is left to train. Then type `tr11 launch" in screen(found)


def test_a_stopped_run_waits_for_who_stopped_it_and_a_finished_one_for_no_one() -> None:
    switch = KillSwitch(snapshot().run.kill_switch, "ana", NOW - HOUR, "new data")
    found = now(quiet(kill_switch=switch), ended_by())
    assert found.action is NextStep.NONE and "set by ana (new data)" in screen(found)
    assert (
        "Nothing trains until it is resumed: `tr11 resume`, then `tr11 launch --array 1-10`."
        in screen(found)
    )
    done = ended("1007", age=HOUR, reason="finished", iteration=115311, restart=False)
    last = steps(last=115311, age=HOUR)
    found = now(idle(attempts=(done,), steps=last), ended_by(attempt="1007"))
    assert "what to do Nothing. The training is finished." in screen(found)


def test_what_is_not_known_leaves_the_general_answer() -> None:
    found = now(snapshot(jobs=Unknown("squeue is silent"), heartbeats=()), ended_by())
    assert found.now is not None and found.now.state is NowState.UNKNOWN
    assert "Type" not in screen(found)


def test_a_node_that_is_proved_bad_is_kept_out_though_the_run_goes_on() -> None:
    bad = Attribution(Kind.NODE, "the second time on n20", 0.9, ("n20",), evidence=("n20",))
    found = now(quiet(jobs=(pending(),)), ended_by(bad))
    assert found.action is NextStep.EXCLUDE_AND_RESUBMIT
    assert "`tr11 nodes exclude n20`" in screen(found) and "starts by itself" in screen(found)
    suspect = replace(bad, blamed=(), suspects=("n20",))
    assert "tr11 nodes exclude" not in screen(now(quiet(jobs=(pending(),)), ended_by(suspect)))


def test_a_watchdog_that_may_submit_is_named_before_a_person_does() -> None:
    given = quiet()
    acts = replace(given, run=replace(given.run, watch=WatchSection(act=True)))
    told = run_now(seen(acts), ended_by())
    assert "`tr11 pulse --dry-run` says what it does next" in told.text


def test_of_several_launches_each_says_what_came_after_it() -> None:
    first, second = ended_by(number=1), ended_by(number=2)
    last = ended_by(attempt="1007")
    [one, two] = followed([first, second], last)
    assert "launch 2 of the same attempt" in screen(one) and "attempt 1007" in screen(two)
    assert one.action is two.action is NextStep.NONE


STOPPED = KillSwitch(snapshot().run.kill_switch, "ana", NOW - HOUR, "new data")
CASES = {
    **{name: given for name, given, _, _ in TABLE},
    **{
        f"stopped: {name}": changed(given, kill_switch=STOPPED, jobs=())
        for name, given, *_ in OPERATION_TABLE
    },
}


def typed_at(shown: Sequence[str], commands: Sequence[str]) -> list[int]:
    """Where each command stands among those that a screen shows; -1 for one that it does not."""
    return [shown.index(line) if line in shown else -1 for line in commands]


def test_what_is_to_be_typed_has_one_answer_and_one_order_wherever_it_is_shown() -> None:
    """diagnose, the screen of status, the page and the mail of one look."""
    told = stopped = 0
    for name, given in CASES.items():
        look = seen(given)
        status, commands = look.status, commands_now(look)
        found = incidents_of(status.findings)
        rows = (row for incident in found for row in incident_rows(incident))
        shown = [*(need.fix for need in status.sleep_needs), *(text for _, text, _ in rows)]
        places = typed_at(shown, commands)
        assert -1 not in places and places == sorted(places), (name, commands, shown)
        view = view_of(News("k", Path("k"), document=status.document()), NOW)
        page = [fix for _, fix in view.needs]
        page += [line for one in view.faults for line in (one.cause.fix, *one.commands_after)]
        places = typed_at(page, commands)
        assert -1 not in places and places == sorted(places), (name, commands, page)
        alerted = with_what_resumes(given, detect_all(given), look.verdict)
        policy = Policy("r", "/r")
        alerts = incidents.look(AlertState(), alerted, frozenset(), policy, NOW).alerts
        mails = {line for alert in alerts for line in (alert.fix, *alert.commands_after)}
        if look.verdict.exit_code == 1:
            assert mails.issuperset(commands), (name, commands, mails)
        if look.verdict.word is VerdictWord.STOPPED:
            assert any(line.startswith("tr11 resume") for line in commands), name
            stopped += look.verdict.exit_code
        told += len(commands)
    assert told > 10 and stopped, "a stopped run with a critical fault is among them"


def test_a_stopped_run_goes_on_when_its_fault_is_repaired_and_not_before() -> None:
    [too_few] = [given for name, given, *_ in OPERATION_TABLE if name == "too few left"]
    look = seen(changed(too_few, kill_switch=STOPPED, jobs=()))
    commands = ("tr11 nodes include n01", "tr11 resume", "tr11 launch --array 1-10")
    [incident, *_] = incidents_of(look.status.findings)
    assert (incident.cause.fix, *incident.commands_after) == commands
    assert run_now(look, ended_by()).commands == commands


def test_what_a_person_holds_is_released_after_the_run_is_resumed() -> None:
    look = seen(CASES["paused, the rest is held"])
    assert commands_now(look) == ("tr11 resume", "scontrol release 1000")


# ----------------------------------------------------------------------------- the first answer
def untold(attempt: str = "1007") -> Diagnosis:
    return replace(judge_log([LogLaunch("")]), launch=attempt)


def test_unknown_is_no_answer_where_the_run_shows_a_cause() -> None:
    given = snapshot(heartbeats=beats(age=3 * HOUR), steps=steps(age=3 * HOUR))
    look, found = seen(given), untold()
    assert running_on(look, found, "") is None
    led = led_by_findings(look, found)
    assert led.fault is FaultClass.STALLED and led.accused.nodes == ()
    shown = screen(replace(led, now=run_now(look, led)))
    assert shown.startswith("verdict stalled:") and "hangs" in shown
    assert "`tr11 stacks --job 1000_7`" in shown and "nothing to restart" not in shown


def test_of_a_slow_run_the_node_is_named_with_the_commands_of_status() -> None:
    look, found = seen(slowed()), untold()
    assert running_on(look, found, "") is None
    led = led_by_findings(look, found)
    assert (led.fault, led.accused.nodes) == (FaultClass.SLOW, ("n02",))
    told = replace(led, now=run_now(look, led))
    assert told.action is not NextStep.NONE
    (slow,) = [one for one in look.findings if one.detector == "slow-node"]
    assert told.now is not None and told.now.commands == (slow.fix, *slow.then)
    shown = screen(told)
    assert shown.startswith("verdict slow:") and "to blame n02, slow" in shown
    assert (
        "Slow: n02 holds the others back: its rank 1 computes 3.00" in shown
        and f"`{slow.fix}`, then `tr11 kill" in shown
    )
    well = seen(snapshot())
    assert run_now(well, found).commands == () and running_on(well, found, "") is not None


def test_a_stopped_run_is_let_go_on_after_its_slow_node_is_excluded() -> None:
    given = slowed(
        jobs=(pending(),),
        attempts=(ended("1007", age=60.0),),
        kill_switch=KillSwitch(Path("/scratch/tr11/kill-switch"), "ana", NOW - 60, "to look"),
        compute_times=(),
        compute_before=known(slowed().training.compute_times, ()),
    )
    look = seen(given)
    exclude = "tr11 nodes exclude n02 --reason 'it holds the others back'"
    assert look.verdict.word is VerdictWord.STOPPED
    assert [need.fix for need in look.answer.needs] == [exclude, "tr11 resume"]
    assert "n02 held the others back in the last attempt" in look.answer.text
    assert run_now(look, untold()).commands == (exclude, "tr11 resume")
    assert led_by_findings(look, untold()).fault is FaultClass.UNKNOWN, "it trains no more"


def test_what_the_attempts_record_says_leads_and_accuses_no_node() -> None:
    storage = replace(wordless("1007"), cause="storage", failure="No space left on device")
    look = seen(idle(attempts=(storage,)))
    led = led_by_findings(look, untold())
    assert led.fault is FaultClass.STORAGE and "No space left" in led.explanation
    node = replace(wordless("1007"), cause="node", failure="n20 is lost", blamed=("n20",))
    led = led_by_findings(seen(idle(attempts=(node,))), untold())
    assert led.fault is FaultClass.SLURM_NODE_FAIL
    assert led.accused.nodes == () and led.step is NextStep.RESUBMIT


def test_a_better_supported_cause_and_an_older_attempt_stay_as_they_are() -> None:
    look = seen(idle(attempts=(replace(wordless("1007"), cause="storage", failure="full"),)))
    known = replace(untold(), fault=FaultClass.NCCL_NETWORK)
    assert led_by_findings(look, known) is known
    older = untold("1006")
    assert led_by_findings(look, older) is older
    quiet_look = seen(idle(attempts=(ended("1007", age=DAY),)))
    assert led_by_findings(quiet_look, untold()).fault is FaultClass.UNKNOWN


def test_the_first_line_says_how_it_ended_where_nothing_says_why() -> None:
    found = ended_by(Attribution(Kind.UNKNOWN, "rank 1 on n02 was gone first", 0.45))
    assert screen(found).startswith("verdict unknown: nothing says why: rank 1 on n02 was gone")
