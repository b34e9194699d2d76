"""What a person changes from the page: previewed, confirmed as it was shown, and on record."""

from __future__ import annotations

import re
import time
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from tests.tr11ops.serve.conftest import Site, form_of, words
from tests.waiting import until
from tr11ops.alerts.store import commit, current_alert_state
from tr11ops.api import Answer, Run
from tr11ops.base.errors import WrongUsage
from tr11ops.cli.stopping import way_on
from tr11ops.rundir.journal import read_journal
from tr11ops.serve.access import WebSession
from tr11ops.serve.acts import WebAct, carry_out
from tr11ops.serve.app import asks_address
from tr11ops.serve.pages import Pages
from tr11ops.serve.view import view_of
from trainer.contract.requests import read_request


def test_a_change_is_previewed_confirmed_and_on_record(site: Site) -> None:
    cookie = site.sign_in()
    form = {"form": form_of(site, cookie), "action": "pause", "reason": "a new corpus"}
    path, pause = f"/run/{site.run}/act", site.folder / "run" / "state"
    before = sorted(pause.rglob("*"))
    shown = site.ask(path, form, cookie)
    assert shown.status == 200 and "small: stop after this task?" in shown.text
    assert sorted(pause.rglob("*")) == before, "a preview changes nothing"
    seen = plan_of(shown.text)
    for other in ({**seen, "reason": "another"}, {**seen, "shown": "0" * 12}):
        said = site.ask(path, {**form, **other}, cookie)
        assert "small: stop after this task?" in said.text, "a plan confirms only what was shown"
    done = site.ask(path, {**form, **seen}, cookie)
    assert done.status == 200 and "Done" in done.text
    told = words(done.text)
    assert "ana has asked the run to stop after this task." in told and "paused: " in told
    assert "will " not in told, "of the plan nothing is repeated: it was agreed to"
    assert "Excluded already: local-node3." in told
    for button in ("exclude", "resume"):
        assert f'name="action" value="{button}"' in done.text, "what makes sense next is offered"
    assert 'name="reason" maxlength="300" autocomplete="off" value="a new corpus"' in done.text
    entries = read_journal(site.folder / "run" / "journal").entries
    acts = [entry for entry in entries if entry.kind == "served-act"]
    assert [entry.who for entry in acts] == ["ana", "ana"] and acts[1].data["exit_code"] == 0
    [own] = [entry for entry in entries if entry.kind == "pause" and "a new corpus" in entry.why]
    assert own.why == "from the page: a new corpus" and own.who == "ana"
    news = site.watcher.find(site.run)
    assert news is not None and news.run is not None
    set_by = read_request(news.run.directory.paths.pause, "pause")
    assert set_by is not None and set_by.who == "ana", "what is told of the pause names her too"


def test_an_act_leads_to_the_next_and_where_nothing_is_queued_to_what_is_typed(site: Site) -> None:
    news = site.watcher.find(site.run)
    assert news is not None and news.run is not None
    slow = {"node": "n07", "iteration": 5, "is_slow": True, "ranks": 1}
    title = "n07 holds the others back"
    finding = {"detector": "slow-node", "severity": "warning", "title": title}
    told = {"verdict": "slow", "run": {}, "node_progress": [slow], "findings": [finding]}
    told["main_fault"] = title
    view = view_of(replace(news, document=told, acted=0.0), 0.0)

    form: dict[str, object] = {"is_part": True, "session": WebSession("ana", 0.0), "form": "f"}
    first = Pages().render("run", run=view, asks_address=False, **form)
    assert f'value="{title}"' in first and "required" not in first, "nothing has to be typed"

    def page(action: str, *lines: str, title: str = "Done") -> str:
        act = WebAct(site.run, action, "ana", reason="n07 is slow")
        shown = {"title": title, "lines": ("ana did it", *lines), "back": "/"}
        return Pages().render("done", run=view, act=act, **shown, **form)

    killed, excluded = page("kill"), page("exclude")
    assert 'value="n07"' in killed and 'value="exclude" class="go"' in killed
    assert 'value="n07"' not in excluded and 'value="kill"' in excluded, "it still runs there"
    assert 'value="n07" required' in killed and 'value="resume" formnovalidate>' in killed
    assert (
        'value="resume" formnovalidate class="go"' in excluded and 'value="n07 is slow"' in excluded
    )
    run = Mock(**{"command.side_effect": "tr11 {}".format, "launch.return_value": "tr11 launch"})
    queued = Mock(finished=None, unmounted="", queued=[1], read_error="", unread="")
    seen = view
    off = {**told, "exclusions": [{"node": "n07", "state": "exclude", "why": "slow"}]}
    view = view_of(replace(news, document=off, acted=0.0), 0.0)
    without = page("kill", "held: job 7", way_on(run, queued))
    view = seen
    assert "Excluded already: n07." in words(without) and "More nodes to leave out" in without
    assert re.search('name="nodes"[^>]* value=""', without), "the slow one is excluded already"
    assert 'value="resume" formnovalidate class="go"' in without
    assert "held: job 7" in without and "tr11 resume" not in without, "its button is there"
    queued.queued = ()
    rest = page("kill", way_on(run, queued))
    assert "tr11 launch" in rest, "what has no button is said"
    for other in (page("resume"), page("kill", title="Not done"), page("ack")):
        assert "<form" not in other and f'data-from="/run/{site.run}"' in other
    launch = "tr11 launch --array 1-3"
    said = f"nothing is queued: start it with `{launch}`"
    assert f'data-copy="{launch}"' in page("resume", said)
    plan = {"act": WebAct(site.run, "resume", "ana"), "plan": "", "changed": ""}
    shown = Pages().render(
        "preview", run=view, answer=Answer(0, {}, (f"next: {said}",)), session=None, form="f",
        is_part=True, **plan,
    )  # fmt: skip
    assert "nothing to confirm" in shown and f'data-copy="{launch}"' in shown


def plan_of(page: str) -> dict[str, str]:
    """What the form of a preview sends back of its plan."""
    return dict(re.findall(r'name="(plan|shown)" value="([^"]+)"', page))


def test_a_plan_that_has_changed_is_shown_again(site: Site) -> None:
    cookie = site.sign_in()
    form = {"form": form_of(site, cookie), "action": "resume", "reason": "a new corpus"}
    path, news = f"/run/{site.run}/act", site.watcher.find(site.run)
    assert news is not None and news.run is not None
    seen = plan_of(site.ask(path, form, cookie).text)
    news.run.kill("a colleague was first", now=True).checked()
    switch = site.folder / "run" / "kill-switch"
    before = switch.read_text()
    again = site.ask(path, {**form, **seen}, cookie)
    assert "the plan is another one now" in again.text and "a colleague was first" in again.text
    assert switch.read_text() == before and plan_of(again.text)["shown"] != seen["shown"]


def test_an_alert_is_acknowledged_and_the_shift_is_taken(site: Site) -> None:
    cookie = site.sign_in()
    page = site.ask(f"/run/{site.run}", cookie=cookie).text
    alert = re.findall(
        r'name="action" value="ack"><input type="hidden" name="alert" value="([\w-]+)"', page
    )[0]
    form = {"form": form_of(site, cookie), "action": "ack", "alert": alert}
    path = f"/run/{site.run}/act"
    said = site.ask(path, form, cookie)
    assert said.status == 200 and "Acknowledged by ana: " in said.text
    form["action"] = "shift"
    shown = site.ask(path, form, cookie)
    assert "small: take the shift?" in shown.text
    assert "ana takes the shift of small from no one named" in shown.text
    seen = plan_of(shown.text)
    done = site.ask(path, {**form, **seen}, cookie)
    assert done.status == 200 and "on call: ana until" in done.text
    until(lambda: "ana (took the shift, " in site.ask("/").text)
    until(lambda: "ana has it" in site.ask(f"/run/{site.run}").text)
    again = site.ask(path, {**form, **seen}, cookie)
    assert "the plan is another one now" in again.text and "from ana" in again.text
    assert "Give the shift back" in site.ask(f"/run/{site.run}", cookie=cookie).text
    back = {**form, "action": "shift-back"}
    seen = plan_of(site.ask(path, back, cookie).text)
    assert "on call: no one named" in site.ask(path, {**back, **seen}, cookie).text


def test_the_shift_is_taken_by_the_address_that_was_given_and_confirmed_as_shown(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[str] = []

    def command(run: Run, words: list[str], *_: object, **_more: object) -> Answer:
        typed.append(" ".join(words))
        return Answer(0, {}, ("the plan",), plan="0123")

    monkeypatch.setattr(Run, "command", command)
    news = site.watcher.find(site.run)
    assert news is not None and news.run is not None
    act = WebAct(site.run, "shift", "carl", address="dan@example.org").checked()
    answer = carry_out(news.run, act, dry_run=True)
    carry_out(news.run, replace(act, address=""), dry_run=True)
    assert typed == ["alerts take-shift --as dan@example.org", "alerts take-shift --as carl"]
    with pytest.raises(WrongUsage, match="give your mail address"):
        replace(act, address="a person").checked()

    def page(of: Answer) -> str:
        view, shown = view_of(news, time.time()), {"act": act, "answer": of, "plan": "p"}
        return Pages().render(
            "preview", run=view, session=None, form="f", is_part=True, changed="", **shown
        )

    assert 'name="address" value="dan@example.org"' in page(answer), "as it was shown"
    assert "Yes: take the shift" in page(answer)
    nothing = page(replace(answer, plan=""))
    assert "nothing to confirm" in nothing and "Yes: " not in nothing


def test_a_token_whose_name_no_mail_reaches_is_asked_for_an_address(site: Site) -> None:
    news = site.watcher.find(site.run)
    assert news is not None and news.run is not None
    card = news.run.card
    alerts = card.alerts.model_copy(update={"recipients": ["ana@example.org", "oncall@x.org"]})
    reached = replace(news, run=replace(news.run, card=card.model_copy(update={"alerts": alerts})))
    session = WebSession("carl", time.time())
    assert asks_address(session, reached) and not asks_address(session, news)
    assert not asks_address(replace(session, name="ana"), reached)
    assert not asks_address(None, reached)
    view = view_of(news, time.time())
    page = Pages().render(
        "run", run=view, session=session, form="f", is_part=True, asks_address=True
    )
    assert "Your mail address" in page


def test_a_page_that_stood_open_acknowledges_no_later_incident(site: Site) -> None:
    """Without scripts a page shows for hours what was: the fault is over, and is back as another."""
    cookie = site.sign_in()
    until(lambda: 'value="snooze"' in site.ask(f"/run/{site.run}", cookie=cookie).text)
    path, page = f"/run/{site.run}/act", site.ask(f"/run/{site.run}", cookie=cookie).text
    form = {"form": form_of(site, cookie), "action": "snooze", "length": "2h"}
    [shown, *_] = re.findall(
        r'value="snooze"><input type="hidden" name="alert" value="([\w-]+)"', page
    )
    directory = site.watcher.find(site.run).run.directory  # type: ignore[union-attr]
    before = current_alert_state(directory)
    [alert] = [one for one in before.open_alerts if one.incident == shown]
    later = before.with_alert(replace(alert, began=time.time(), since=time.time()))
    commit(directory, lambda _: (later, None))
    try:
        said = site.ask(path, {**form, "alert": shown}, cookie)
        assert said.status == 409 and "another incident of that kind is open since" in said.text
        said = site.ask(path, {**form, "alert": alert.fingerprint}, cookie)
        assert said.status == 400 and "names no incident" in said.text
        now = current_alert_state(directory).find(alert.fingerprint)
        assert now is not None and now.incident != shown and now.snoozed_until is None
        assert site.ask(path, {**form, "alert": now.incident}, cookie).status == 200
    finally:
        commit(directory, lambda _: (before, None))


def test_an_act_is_one_line_without_options() -> None:
    with pytest.raises(WrongUsage, match="reason"):
        WebAct("k", "pause", "ana", reason="a\nb").checked()
    assert WebAct("k", "kill", "ana").checked().reason == "", (
        "as the typed command, it demands none"
    )


def test_a_stop_is_confirmed_and_told_in_few_words(site: Site) -> None:
    news = site.watcher.find(site.run)
    assert news is not None
    fault = "n07 holds the others back"
    told = {"verdict": "slow", "run": {"name": "small"}, "why": fault, "main_fault": fault}
    view = view_of(replace(news, document=told, acted=0.0), 0.0)
    form: dict[str, object] = {"is_part": True, "session": WebSession("ana", 0.0), "form": "f"}
    form["asks_address"] = False
    run = Pages().render("run", run=view, **form)
    first = words(run).partition("Save and stop…")[0]
    assert len(first.split()) < 10, "the button is beside the verdict"
    assert f'name="reason" value="{fault}"' in run, "why is filled in"
    act = WebAct(site.run, "kill", "ana", reason=fault)
    plan = (
        "running:    job 7_1 of root on 5 nodes: will save and leave",
        "queued:     2 tasks of 7_[2-3%1]: held at once",
        "checkpoint: saves first, at about iteration 117; on disk now: global_step100",
        "nothing was changed (--dry-run)",
    )
    shown = {"act": act, "answer": Answer(0, {}, plan, plan="0123"), "plan": "p", "changed": ""}
    page = words(Pages().render("preview", run=view, **shown, **form))
    first, _, rest = page.partition("Yes: save and stop")
    assert "small: save and stop?" in first
    assert "at about iteration 117" in first and fault in rest, "why is said below the button"
    assert len(first.split()) < 40 and "nothing was changed" not in page
    lines = ("ana has asked the run to save and stop", "held: job 7")
    done = Pages().render("done", run=view, act=act, title="Done", lines=lines, **form)
    first = words(done).partition("Next")[0]
    assert "Done: small" in first and "ana has asked the run to save" in first
    assert 'id="now"' in done.partition("Next")[0], "what the run does is told first"
    stopped = {**told, "verdict": "stopped", "why": f"set by ana ({fault}); it has saved at 117"}
    view = view_of(replace(news, document=stopped, acted=0.0), 0.0)
    assert 'data-brief="It has saved at 117."' in Pages().render("run", run=view, **form)
    waits = replace(news, document=stopped, acted=news.began + 1.0)
    page = Pages().render("run", run=view_of(waits, 0.0), **form)
    assert 'data-brief=""' in page, "what was seen before tells nothing of it"
