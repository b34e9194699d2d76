"""What the pages say, and where their links lead."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

from msgspec.structs import replace

from tests.tr11ops.serve.conftest import Site, form_of, words
from tr11ops.rundir.journal import user_name
from tr11ops.serve.access import WebSession
from tr11ops.serve.pages import Pages
from tr11ops.serve.poller import News, key_of
from tr11ops.serve.view import in_order, view_of


def test_the_list_says_of_each_run_what_status_says(site: Site) -> None:
    said = site.ask("/")
    shown = words(said.text)
    assert (
        said.status == 200
        and "4 runs: none is known to need a person; broken unknown, small" in shown
    )
    assert "stopped small" in shown and "The kill switch was set by root (new data)" in shown
    assert "38 / 6,253" in shown and "2.7689" in shown and "a mirrored copy" in shown
    assert "unknown broken" in shown and "is a folder" in shown, "why a run cannot be read"


def test_what_needs_a_person_comes_first() -> None:
    told = [
        News(word, Path(word), document={"verdict": word, "exit_code": code, "run": {}})
        for word, code in (("healthy", 0), ("at risk", 1), ("down", 1), ("unknown", 3))
    ]
    shown = [view.word for view in in_order([view_of(news, 0.0) for news in told])]
    assert shown == ["down", "at risk", "unknown", "healthy"]


def test_a_run_has_its_state_what_to_do_its_curves_and_its_log(site: Site) -> None:
    shown = words(site.ask(f"/run/{site.run}").text)
    assert "$ tr11 nodes include" in shown and "local-node3" in shown and "Runbook" in shown
    details = site.ask(f"/run/{site.run}/details").text
    assert (
        'id="course-chart"' in details
        and "Attempts" in details
        and "Where the node-hours" in details
    )
    log = json.loads(site.ask(f"/run/{site.run}/log?q=iteration").text)
    assert log["lines"] and all("iteration" in line.lower() for line in log["lines"])
    assert (
        json.loads(site.ask(f"/run/{site.run}/log?q=no-such-word").text)["why"] == "nothing there"
    )


def test_an_alert_has_a_page_and_its_runbook(site: Site) -> None:
    page = site.ask(f"/run/{site.run}").text
    [path, *_] = re.findall(r'href="(/run/[0-9a-f]+/alert/[0-9a-f]+)"', page)
    said = site.ask(path)
    assert said.status == 200 and "Sign in" in said.text
    [runbook, *_] = re.findall(r'href="(/runbook/[a-z-]+)"', page)
    shown = site.ask(runbook)
    assert shown.status == 200 and site.ask("/runbook/none").status == 404
    assert "What it means." in shown.text and not re.search(r"\*\*|```|^#", shown.text, re.M)


def test_a_mirrored_copy_is_shown_and_cannot_be_changed(site: Site) -> None:
    shown = words(site.ask(f"/run/{site.mirror}").text)
    assert "nothing was synchronised for" in shown or "The training runs" in shown
    assert "Nothing can be changed from here" in shown
    cookie = site.sign_in()
    form = {"action": "shift", "form": form_of(site, cookie)}
    assert site.ask(f"/run/{site.mirror}/act", form, cookie).status == 409
    copy = key_of(site.folder / "copy" / "run")
    assert site.ask(f"/run/{copy}/act", form, cookie).status == 409


def test_who_asks_for_pages_is_who_reads_and_is_told_how_to_get_a_token(site: Site) -> None:
    before = site.watcher.asked
    shown = words(site.ask("/login").text)
    assert site.watcher.asked > before
    assert f"Only {user_name()} , who runs this server" in shown and socket.gethostname() in shown
    assert f"$ tr11 serve token ADDRESS --tokens {site.folder / 'tokens.json'}" in shown


def test_what_an_older_look_saw_is_said_as_past_and_lets_no_one_sleep(tmp_path: Path) -> None:
    now = 1_651_406_400.0
    told = {
        "time": "2022-05-01T11:59:41+00:00", "verdict": "healthy", "why": "the training runs",
        "answer": "You may sleep", "exit_code": 0, "run": {"name": "small"},
    }  # fmt: skip

    def shown(after: float) -> tuple[str, str]:
        """The visible words of the page, and those that it hides."""
        view = view_of(News("k", tmp_path, document=told, looked=now - 18), now + after)
        page = Pages().render("run", is_part=True, run=view, session=None, form="")
        hidden = " ".join(re.findall(r"<span hidden>(.*?)</span>", page))
        return words(re.sub(r"<span hidden>.*?</span>", "", page)), hidden

    fresh, not_yet = shown(0)
    assert "small ● healthy" in fresh and "seen 19 s ago" in fresh, (
        "from the moment of the snapshot"
    )
    assert "You may sleep" in fresh and "is not known" in not_yet
    old, over = shown(22)
    assert "41 s ago ● healthy" in old and "How it is now is not known" in old
    assert "You may sleep" not in old and "You may sleep" in over
    slow = News("k", tmp_path, document=told, looked=now - 18, every=200.0)
    assert not view_of(slow, now + 300).is_old, "one that is looked at less often"


def test_only_what_makes_sense_is_offered_and_the_slow_node_is_filled_in() -> None:
    node = {"node": "n07", "iteration": 5, "is_slow": True, "ranks": 1}
    for word, stops in (("healthy", True), ("down", False), ("finished", False)):
        told = {
            "verdict": word,
            "run": {},
            "node_progress": [node, {**node, "node": "n08", "is_slow": False}],
        }
        view = replace(view_of(News("k", Path("run"), document=told), 0.0), can_act=True)
        for session in (WebSession("ana", 0.0), None):
            page = Pages().render(
                "run", is_part=True, run=view, session=session, form="", asks_address=False
            )
            assert ("tr11 kill" in page or "Save and stop" in page) == stops
            assert session is None or ('value="n07"' in page and '<option value="n08"' in page)


def test_a_cause_is_said_once_on_the_first_screens_of_a_run() -> None:
    cause = "rank 1 on n13: the program ended by SIGSEGV"
    title = f"attempt 7 failed: {cause}"
    ended = {"id": "7", "how": f"ended without an end marker: {cause}"}
    fault = {
        "detector": "unfinished-end", "severity": "critical", "title": title, "fingerprint": "aa",
        "evidence": [f"7, 2 min ago: ended without an end marker: {cause}"], "fix": "tr11 rollback 50",
    }  # fmt: skip
    alert = {"fingerprint": "aa", "severity": "critical", "title": title}
    slow = {"node": "n13", "iteration": 5, "is_slow": True, "ranks": 1}
    told: dict[str, object] = {
        "verdict": "down", "why": f"{title}; job 8 waits for a person", "run": {},
        "last_attempts": [ended], "findings": [fault], "alerts": [alert], "node_progress": [slow],
        "slow_nodes": {"state": "named", "text": "Slow: n13."},
    }  # fmt: skip

    def page(**changes: object) -> str:
        view = view_of(News("k", Path("k"), document={**told, **changes}), 0.0)
        shown = Pages().render("run", is_part=True, run=view, session=None, form="")
        return words(re.sub("<details.*?</details>", "", shown, flags=re.S))

    first = page().partition("Nodes now")[0]
    assert first.count("SIGSEGV") == 1 and "Slow: n13" not in first and "tr11 rollback 50" in first
    full = "the disk is full"
    other = page(why=full, findings=[{**fault, "title": full, "evidence": []}], alerts=[])
    assert (
        "Last end : Attempt 7: ended without an end marker: rank 1" in other
        and "The disk is full" in other
    )
    several = page(alerts=[alert, {**alert, "title": "another"}])
    assert "Attempt 7 failed" in several.partition("Alerts")[2], "which alert is which"


def test_faults_are_told_by_their_cause_with_all_that_is_typed_one_after_another() -> None:
    told = {
        "verdict": "healthy",
        "why": "the training runs",
        "answer": "Before you sleep: no watchdog looks; no one would be told",
        "sleep_needs": [{"text": "set `watch.act`", "fix": "tr11 cron install"}, "recipients"],
        "run": {"name": "small"},
        "findings": [
            {
                "detector": "slow-node", "severity": "warning", "title": "n03 holds the others back",
                "fix": "tr11 nodes exclude n03", "then": ["tr11 kill --wait", "tr11 resume"],
                "evidence": ["<b>8 s</b> a step"], "fingerprint": "aa", "runbook": "slow-node.md",
            },
            {
                "detector": "slow", "severity": "warning", "title": "the training is slow",
                "fix": "tr11 kill --wait", "fingerprint": "bb", "follows_from": "aa",
            },
        ],
        "alerts": [{"fingerprint": "aa", "severity": "warning", "title": "n03 held them back"}],
    }  # fmt: skip
    news = News("k", Path("k"), document=told, looked=1.0)
    view = view_of(news, 1.0)
    [fault] = view.faults
    assert fault.commands_after == ("tr11 kill --wait", "tr11 resume")
    assert [one.title for one in fault.following] == ["the training is slow"]
    assert fault.names == {"aa", "bb"}
    assert view.answer == "Before you sleep: 2 things to do, below"
    pages, common = Pages(), {"is_part": True, "session": None, "form": ""}
    page = pages.render("run", run=view, **common)
    typed = ["exclude n03", "kill --wait", "resume", "cron install"]
    assert sorted(typed, key=words(page).index) == typed, "faults, then what waits for the night"
    assert "<code>watch.act</code>" in page and "&lt;b&gt;8 s" in page
    shown = pages.render(
        "list", runs=[view], counts="1 run", sums="", troubles={}, roots=[], is_part=True
    )
    assert "! warning n03 holds the others back" in words(shown)
    assert "1 is open: no one has taken it" in shown
