"""What is shown of a run, from its document alone."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tests.tr11ops.serve.conftest import words
from tr11ops.serve.access import WebSession
from tr11ops.serve.pages import Pages
from tr11ops.serve.poller import News
from tr11ops.serve.view import RunView, view_of


def test_since_when_and_the_slow_node_are_said() -> None:
    node = {"job": "1", "ranks": 8, "phase": "training", "silent_seconds": 2.0, "step_seconds": 104}
    told = {
        "verdict": "healthy",
        "verdict_since": "2022-05-01T10:00:00+00:00",
        "run": {},
        "last_step_time": "2022-05-01T11:59:30+00:00",
        "node_progress": [
            {**node, "node": "n01", "iteration": 9, "times_usual": 1.0, "is_slow": False},
            {**node, "node": "n02", "iteration": 9, "times_usual": 1.3, "is_slow": True},
            {**node, "node": "n03", "iteration": "many", "times_usual": {}, "is_slow": "yes"},
        ],
        "slow_nodes": {
            "state": "named",
            "nodes": ["n02"],
            "text": "Slow: n02 (1.30 times the usual).",
        },
    }
    now = 1_651_406_400.0
    view = view_of(News("k", Path("k"), document=told), now)
    assert view.since == "for 2 h 00 min" and view.nodes_line == "Slow: n02 (1.30 times the usual)."
    assert [node.name for node in view.nodes] == ["n02", "n01", "n03"]
    assert (view.nodes[0].state, view.nodes[0].times) == ("slow", "1.30")
    assert view.nodes[2].iteration == "-", "what is no number is not shown"
    off = {"exclusions": [{"node": "n02", "why": "slow"}, {"node": "n09"}], "nodes": ["n02", "n03"]}
    view = view_of(News("k", Path("k"), document={**told, **off}), now)
    states = {node.name: node.state for node in view.nodes}
    assert states == {"n02": "slow, excluded", "n09": "excluded", "n01": "in use", "n03": "in use"}
    assert len(view.nodes) == len(states), "each once"
    unknown = view_of(News("k", Path("k"), document={**told, "verdict_since": None}), now)
    assert unknown.since == "", "the time of the last step is not that of the verdict"


def test_the_first_screen_of_a_run_answers_who_has_the_alert_and_why_it_ended() -> None:
    now = 1_651_406_400.0
    alert = {"fingerprint": "abcd", "severity": "critical", "title": "it hangs", "detector": "hung"}
    told: dict[str, object] = {
        "verdict": "down",
        "run": {},
        "last_attempts": [{"id": "7", "how": "out of memory"}],
    }

    def shown(alerts: list[dict[str, object]]) -> str:
        return view_of(News("k", Path("k"), document={**told, "alerts": alerts}), now).alerts_line

    assert shown([]) == "None is open."
    unread = view_of(News("k", Path("k"), why="its card cannot be read"), now)
    assert unread.alerts_line == "Not known.", "what could not be read is not said to be well"
    told["on_call"] = {"who": ["bo@example.org"]}
    assert shown([alert]) == "1 is open: no one has taken it; bo@example.org is on call."
    said = "1 (hung) is open: no one has taken it; bo@example.org is on call; 1 (hung 8) is open: ana has it."
    assert shown([alert, {**alert, "subject": "8", "owner": "ana"}]) == said
    assert shown([{**alert, "acknowledged_by": "ana"}]) == "1 is open: ana has it."
    gone = {**alert, "found": False, "closes": "2022-05-01T12:04:00Z"}
    fate = "no longer found; the watchdog closes it in about 4 min"
    assert shown([gone]) == f"1 is {fate}."
    assert shown([gone] * 2) == "2 (hung, hung) are no longer found, and close by themselves."
    assert shown([alert, gone]).endswith(f"is on call; 1 (hung) is {fate}."), "told apart"
    told["untold"] = [{"subject": "slow-node n01", "looks": "2022-05-01T12:01:03Z", "told": None}]
    tells = "the watchdog looks within 1 min 3 s and then tells bo@example.org"
    assert shown([]) == f"1 is not told yet: {tells}."
    assert shown([gone]) == f"1 (slow-node n01) is not told yet: {tells}; 1 (hung) is {fate}."
    told["untold"] = [{"subject": "slow-node n01", "looks": None, "told": None}]
    assert shown([]) == "1 is not told yet: no watchdog looks, so no one will be told."
    del told["untold"]
    session, can_act = WebSession("ben", 0.0), view_of(News("k", Path("run")), 0.0)
    for holder, wanted in (
        ("", "Acknowledge"),
        ("ana@example.org", "Take it over from ana@"),
        ("ben@x.org", ""),
    ):
        [one] = view_of(
            News("k", Path("run"), document={"alerts": [{**alert, "owner": holder}]}), 0.0
        ).alerts
        page = Pages().render(
            "incident", is_part=True, run=replace(can_act, can_act=True), alert=one, faults=[],
            session=session, form="", asks_address=False,
        )  # fmt: skip
        assert wanted in words(page) and ("Take it over" in page) == wanted.startswith("Take it")
    view = view_of(News("k", Path("k"), document=told), now)
    assert view.ended_line == "Attempt 7: out of memory." and "kill" in view.stop_command


def test_where_the_training_stands_the_slowest_node_of_before_is_no_news() -> None:
    def line(verdict: str, state: str, text: object) -> str:
        told = {"verdict": verdict, "run": {}, "slow_nodes": {"state": state, "text": text}}
        return view_of(News("k", Path("k"), document=told), 0.0).nodes_line

    assert line("healthy", "none", "None is slow.") == "None is slow."
    assert line("stalled", "none", "None is slow.") == "" == line("healthy", "none", 7)
    assert line("stalled", "named", "Slow: n01.") == "Slow: n01."


def test_a_spare_node_is_called_spare_and_no_slow_one_has_its_moment() -> None:
    node = {"job": "1", "phase": "training", "iteration": 180, "times_usual": 1.01}
    spare = {"node": "n02", "job": "1", "ranks": 0, "is_spare": True}
    told = {
        "verdict": "healthy",
        "run": {},
        "node_progress": [{**node, "node": "n01", "ranks": 8, "measured_at": 180}, spare],
    }
    view = view_of(News("k", Path("k"), document=told), 0.0)
    shown = {one.name: (one.state, one.phase, one.is_bad) for one in view.nodes}
    assert shown == {"n01": ("in use", "training", False), "n02": ("spare", "", False)}
    assert view.nodes_line == "", "an older look does not say which is slow"
    silent = {**told, "node_progress": [{**spare, "is_spare": False}]}
    assert view_of(News("k", Path("k"), document=silent), 0.0).nodes[0].phase == "no word yet"


def test_why_is_said_in_a_clause_and_of_a_stop_what_has_come_of_it() -> None:
    fault = "n07 holds the others back"

    def shown(verdict: str, why: str, main_fault: str = fault) -> RunView:
        told = {"verdict": verdict, "why": why, "run": {}, "main_fault": main_fault}
        return view_of(News("k", Path("k"), document=told), 0.0)

    slow = shown("slow", f"{fault} (its rank 1 computes 3 times as long); job 7 on 4 nodes")
    assert (slow.brief, slow.outcome) == (fault, slow.why) and slow.says(fault.upper())
    assert shown("healthy", "job 7 trains", "").brief == "job 7 trains"
    asked = f"the kill switch was set by ana ({fault})"
    saved = shown("stopped", f"{asked}; it has saved at iteration 9; what is queued is held")
    assert saved.brief == saved.why, "who has stopped it is why it stopped"
    assert saved.outcome == "it has saved at iteration 9; what is queued is held"
    for why in (asked, "the kill switch was set by ana; it has saved at iteration 9"):
        assert shown("stopped", why).outcome == why, "nothing is cut where no reason stands"


def test_the_nodes_that_are_filled_in_are_the_slow_and_the_suspected_that_are_not_excluded_yet() -> (
    None
):
    node = {"iteration": 5, "ranks": 1}
    slow = [{**node, "node": name, "is_slow": True} for name in ("n07", "n09")]
    told = {"run": {}, "node_progress": [*slow, {**node, "node": "n08"}], "nodes": ["n05"]}
    told |= {"bad_nodes": ["n05"], "exclusions": [{"node": "n09", "state": "exclude"}]}
    assert view_of(News("k", Path("k"), document=told), 0.0).accused == "n07,n05"


def test_an_end_is_told_once() -> None:
    def line(how: str, why: str, *evidence: str) -> str:
        told = {"run": {}, "why": why, "last_attempts": [{"id": "7", "how": how}]}
        told["findings"] = [{"title": "it failed", "evidence": list(evidence)}]
        return view_of(News("k", Path("k"), document=told), 0.0).ended_line

    how = "ended without an end marker: rank 1 was ended by SIGSEGV"
    assert line(how, "nothing runs") == f"Attempt 7: {how}."
    assert line(how, "nothing runs", f"7, 2 min ago: {how}") == "", "a finding quotes it"
    assert line(how, "attempt 7 failed: rank 1 was ended by SIGSEGV; job 8 waits") == ""
    assert line("kill-switch", "the kill switch was set by ana") == ""
    assert line("", "nothing runs") == "", "it runs"


def test_figures_of_a_run_that_stands_still_do_not_speak_of_its_speed() -> None:
    told = {"run": {}, "throughput": {"percent": 100.0}, "seconds_per_iteration": 1.0}
    told["queue_coverage_seconds"] = 0

    def notes(verdict: object) -> dict[str, str]:
        view = view_of(News("k", Path("k"), document={**told, "verdict": verdict}), 0.0)
        return {tile.name: tile.note for tile in view.tiles}

    assert notes("slow")["seconds a step"] == "100 % of its best"
    for verdict in ("down", "stopped", ["down"]):
        assert notes(verdict)["seconds a step"] == "", "that was before"
    assert notes("down")["of training queued"] == "nothing starts by itself", "held is queued too"
