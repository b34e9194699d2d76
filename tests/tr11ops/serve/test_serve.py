"""The pages: what they say, who may act, and that no request gets more than it should."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from tests.tr11ops.serve.conftest import HOSTILE, Site, published, served
from tests.waiting import until
from tr11ops.alerts.store import commit, current_alert_state
from tr11ops.api import Answer, Run
from tr11ops.base import deadline
from tr11ops.base.errors import PrivateFileError, Refusal, WrongUsage
from tr11ops.cli.main import execute
from tr11ops.cli.stopping import way_on
from tr11ops.rundir.journal import Journal, read_journal, user_name
from tr11ops.serve import poller
from tr11ops.serve.access import CookieSigner, RateLimit, WebSession, is_known_host
from tr11ops.serve.acts import WebAct, carry_out
from tr11ops.serve.app import ServeSettings, asks_address
from tr11ops.serve.pages import Pages
from tr11ops.serve.poller import News, RunPoller, key_of
from tr11ops.serve.tokens import make_token, owner_of, read_tokens, revoke_token
from tr11ops.serve.view import in_order, view_of
from trainer.contract.requests import read_request


def words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


# ----------------------------------------------------------------------------- what is shown
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


def test_the_page_is_told_of_changes(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port), timeout=300) as stream:
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = b""
        while b"event: change" not in seen:
            seen += stream.recv(4096)
        version = site.watcher.version
        site.watcher.look_again(site.mirror)
        until(lambda: site.watcher.version > version)
        while seen.count(b"event: change") < 2:
            seen += stream.recv(4096)


def test_what_is_typed_in_a_terminal_is_seen_at_once_while_someone_reads(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the next look, which is an hour away here."""
    monkeypatch.setattr(poller, "LOOK_EVERY_SECONDS", 3600.0)
    monkeypatch.setattr(poller, "GLANCE_SECONDS", 0.05)
    folder = site.folder / "run"
    watcher = RunPoller([folder], "local")
    watcher.start()
    try:
        until(lambda: all(one.looked for one in watcher.news()) and bool(watcher.news()))
        [seen] = watcher.news()
        reader = watcher._readers.of(seen.run.directory)  # type: ignore[union-attr]
        watcher.asked = time.monotonic()
        Journal(folder / "journal").write("noted", "typed in a terminal")
        until(lambda: watcher.news()[0].looked > seen.looked)
        assert watcher.news()[0].run.reader is not reader, "the scheduler is asked again too"  # type: ignore[union-attr]
        assert watcher.news()[0].stamp == poller.stamp_of(folder) != seen.stamp
    finally:
        watcher.stop()
    with monkeypatch.context() as refusing:
        stale = OSError(errno.ESTALE, "Stale file handle")
        refusing.setattr(os, "scandir", Mock(side_effect=stale))
        assert poller.stamp_of(folder) == 0.0, "one that refuses ends no looks"
    monkeypatch.setattr(deadline, "is_silent", lambda *_: True)
    assert poller.stamp_of(folder) == 0.0, "a file system that does not answer is not waited for"


def test_who_asks_for_pages_is_who_reads_and_is_told_how_to_get_a_token(site: Site) -> None:
    before = site.watcher.asked
    shown = words(site.ask("/login").text)
    assert site.watcher.asked > before
    assert f"Only {user_name()} , who runs this server" in shown and socket.gethostname() in shown
    assert f"$ tr11 serve token ADDRESS --tokens {site.folder / 'tokens.json'}" in shown


# ----------------------------------------------------------------------------- who may act
def form_of(site: Site, cookie: str) -> str:
    page = site.ask(f"/run/{site.run}", cookie=cookie).text
    return re.findall(r'name="form" value="([0-9a-f]{64})"', page)[0]


def test_a_change_is_previewed_confirmed_and_on_record(site: Site) -> None:
    cookie = site.sign_in()
    form = {"form": form_of(site, cookie), "action": "pause", "reason": "a new corpus"}
    path, pause = f"/run/{site.run}/act", site.folder / "run" / "state"
    before = sorted(pause.rglob("*"))
    shown = site.ask(path, form, cookie)
    assert shown.status == 200 and "Stop after this task?" in shown.text
    assert sorted(pause.rglob("*")) == before, "a preview changes nothing"
    seen = plan_of(shown.text)
    for other in ({**seen, "reason": "another"}, {**seen, "shown": "0" * 12}):
        said = site.ask(path, {**form, **other}, cookie)
        assert "Stop after this task?" in said.text, "a plan confirms only what was shown"
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
    assert "then tr11 launch" in rest, "what has no button is said"
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
    assert "Take the shift?" in shown.text
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


@pytest.mark.parametrize(
    ("cookie", "form", "headers", "status"),
    [
        ("", {"action": "kill"}, {}, 403),
        ("tr11=ana|9999999999|00|" + "0" * 64, {"action": "kill"}, {}, 403),
        ("mine", {"action": "kill", "reason": "x"}, {}, 403),
        ("mine", {"action": "kill", "reason": "x", "form": "0" * 64}, {}, 403),
        ("mine", {"action": "kill", "reason": "x", "form": "right"}, {"Origin": "http://evil.example"}, 403),
        ("mine", {"action": "kill", "reason": "x", "form": "right"}, {"Sec-Fetch-Site": "cross-site"}, 403),
        ("mine", {"action": "kill", "form": "right"}, {"Content-Type": "text/plain"}, 403),
        ("mine", {"action": "rm -rf", "form": "right"}, {}, 400),
        ("mine", {"action": "exclude", "nodes": "--force", "reason": "x", "form": "right"}, {}, 400),
        ("mine", {"action": "ack", "alert": "--all", "form": "right"}, {}, 400),
        ("mine", {"action": "snooze", "alert": "abcd-1f", "length": "9999d", "form": "right"}, {}, 400),
    ],
)  # fmt: skip
def test_what_the_page_does_not_send_changes_nothing(
    site: Site, cookie: str, form: dict[str, str], headers: dict[str, str], status: int
) -> None:
    site.watcher.find(site.run)
    if cookie == "mine":
        cookie = sessions(site)
    if form.get("form") == "right":
        form = {**form, "form": form_of(site, cookie)}
    switch = site.folder / "run" / "kill-switch"
    before = switch.read_text()
    assert site.ask(f"/run/{site.run}/act", form, cookie, headers).status == status
    assert switch.read_text() == before


_SESSIONS: dict[int, str] = {}


def sessions(site: Site) -> str:
    """One session for the attacks: a person may not sign in more than some times a minute."""
    if site.port not in _SESSIONS:
        seal = CookieSigner()
        assert seal.opened(seal.session("ana")) is not None
        until(lambda: site.ask("/login", {"token": site.token}).status in {303, 429})
        _SESSIONS[site.port] = until_signed_in(site)
    return _SESSIONS[site.port]


def until_signed_in(site: Site) -> str:
    found: list[str] = []

    def signed() -> bool:
        said = site.ask("/login", {"token": site.token})
        if said.status == 303:
            found.append(said.headers["set-cookie"].partition(";")[0])
        return bool(found)

    until(signed, pause=1.0)
    return found[0]


def test_guessing_a_token_is_slowed_down(site: Site) -> None:
    codes = [site.ask("/login", {"token": f"tr11-{number}"}).status for number in range(8)]
    assert codes[-1] == 429 and 303 not in codes


# ----------------------------------------------------------------------------- attacks
@pytest.mark.parametrize(
    "path",
    [
        "/run/../../etc/passwd", "/run/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/assets/../app.py",
        "/assets/%2e%2e%2ftokens.py", "/runbook/..%2f..%2fpyproject.toml", "/run/%00", "/run/" + "a" * 4000,
        "/run/x/log?q=" + "%ff" * 50,
    ],
)  # fmt: skip
def test_no_path_leads_out(site: Site, path: str) -> None:
    said = site.ask(path)
    assert said.status == 404 and "root:" not in said.text and "import" not in said.text


def test_pages_carry_what_keeps_a_browser_safe(site: Site) -> None:
    said = site.ask("/")
    policy = said.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert (
        "frame-ancestors 'none'" in policy and said.headers["x-content-type-options"] == "nosniff"
    )
    assert site.ask("/", headers={"Host": "evil.example"}).status == 421
    assert site.ask("/", headers={"Host": "runs.example"}).status == 200
    assert "HttpOnly" in site.ask("/login", {"token": "x"}).headers.get("set-cookie", "HttpOnly")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "null", "[" * 50_000, json.dumps({"schema": 1, "run": HOSTILE}),
        published(run={"name": HOSTILE, "variant": HOSTILE}, line=HOSTILE, sleep_needs=[HOSTILE]),
        published(findings="x", iteration="nan", loss=[1], finish=7, nodes="no", attempts=3, unknown={}),
        published(verdict=["down"], exit_code=True, time="9999-99-99T00:00:00+00:00"),
        published(iteration=1e400, total_iterations=-1, throughput={"percent": "x"}, goodput=[]),
        published(x="y" * (2 << 20)),
    ],
    ids=range(11),
)  # fmt: skip
def test_huge_and_broken_documents_are_shown_as_what_they_are(site: Site, text: str) -> None:
    (site.folder / "mirror" / "status.json").write_text(text)
    looked = site.watcher.find(site.mirror)
    assert looked is not None
    site.watcher.look_again(site.mirror)
    until(lambda: site.watcher.find(site.mirror).looked > looked.looked)
    for path in ("/", f"/run/{site.mirror}", f"/run/{site.mirror}/details"):
        said = site.ask(path)
        assert said.status == 200 and "<script>document" not in said.text, said.text
        assert "<img" not in said.text
    (site.folder / "mirror" / "status.json").write_text(published())


def test_what_others_leave_in_a_shared_folder_leads_nowhere_and_stops_no_page(
    tmp_path: Path,
) -> None:
    """A log that is a link to a key, a pipe or a device; names that no text has, or that turn it."""
    secret = tmp_path / "secret"
    secret.write_text("the key\n")
    folder, bidi = tmp_path / "runs", "a\u202egnp.exe\u2066\x00\x1b[31m"
    names = (b"link", b"pipe", b"device", b"status", b"\xff\xfe", "b\u202e\n<b>".encode())
    for name in names:
        place = folder / os.fsdecode(name)
        (place / "logs" / "main").mkdir(parents=True)
        told = published(run={"name": bidi, "variant": bidi}, line=bidi)
        (place / "status.json").write_text(told)
    logs = Path("logs", "main", "main_log.txt")
    (folder / "link" / logs).symlink_to(secret)
    os.mkfifo(folder / "pipe" / logs)
    (folder / "device" / logs).symlink_to("/dev/zero")
    (folder / "status" / "status.json").unlink()
    (folder / "status" / "status.json").symlink_to(secret)
    watcher = RunPoller([folder], "local")
    settings = ServeSettings(tmp_path / "tokens.json", tmp_path / "links.key")
    with served(watcher, settings) as port:
        watcher.start()
        until(lambda: len(watcher.news()) == 6 and all(one.looked for one in watcher.news()))
        site, shown = Site(port, "", folder, watcher), []
        pages = [f"/run/{one.key}{end}" for one in watcher.news() for end in ("", "/log")]
        for path in ("/", "/runs.json", *pages):
            said = site.ask(path)
            assert said.status == 200, (path, said.text)
            shown.append(said.text)
        watcher.stop()
    every = "".join(shown)
    assert "the key" not in every and "is a link" in every and "is a pipe" in every
    assert not {"\u202e", "\u2066", "\x00", "\x1b"} & set(every)


def test_a_form_too_large_or_never_ending_is_not_read(site: Site) -> None:
    assert site.ask("/login", {"token": "x" * 100_000}).status in {400, 429}


def test_slow_and_silent_readers_hold_up_no_one(site: Site) -> None:
    """Two hundred that open a stream and read nothing of it; another is served all the same."""
    streams = []
    try:
        for _ in range(200):
            stream = socket.create_connection(("127.0.0.1", site.port), timeout=300)
            stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            streams.append(stream)
        for stream in streams[:20]:
            assert stream.recv(12) == b"HTTP/1.1 200"
        codes: list[int] = []
        threads = [
            threading.Thread(target=lambda: codes.append(site.ask("/").status)) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert codes == [200] * 20
    finally:
        for stream in streams:
            stream.close()


def test_a_folder_that_hangs_holds_up_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("well", "hangs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text(
            published(run={"name": name, "variant": "main"})
        )
    asked = deadline.is_silent

    def silent(place: Path, seconds: float) -> bool:
        return place.name == "hangs" or asked(place, seconds)

    monkeypatch.setattr(deadline, "is_silent", silent)
    watcher = RunPoller([tmp_path])
    watcher.start()
    try:
        until(lambda: len(watcher.news()) == 2 and all(one.looked for one in watcher.news()))
        hangs, well = watcher.news()
        assert hangs.document is None and "does not answer" in hangs.why
        assert well.document is not None
    finally:
        watcher.stop()


def test_a_change_of_a_run_and_a_run_that_is_new_are_seen_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK_EVERY_SECONDS", "FIND_EVERY_SECONDS"):
        monkeypatch.setattr(poller, name, 0.05)

    def publish(name: str, **changes: object) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        made = tmp_path / f"{name}.json"
        made.write_text(published(run={"name": name, "variant": "main"}, **changes))
        made.replace(tmp_path / name / "status.json")

    def seen() -> dict[str, object]:
        return {one.folder.name: (one.document or {}).get("iteration") for one in watcher.news()}

    publish("first")
    watcher = RunPoller([tmp_path])
    watcher.start()
    try:
        until(lambda: seen() == {"first": 7})
        version = watcher.version
        publish("first", iteration=8)
        until(lambda: seen() == {"first": 8})
        assert watcher.version > version, "pages that are open are told of it"
        publish("second", iteration=1)
        until(lambda: seen() == {"first": 8, "second": 1})
        (tmp_path / "first" / "status.json").write_text("{")
        until(lambda: seen()["first"] is None)
        assert "no JSON" in watcher.news()[0].why, "and of what can be read no longer"
    finally:
        watcher.stop()


# ----------------------------------------------------------------------------- parts
def test_tokens_are_kept_as_digests_in_a_file_of_the_owner_alone(tmp_path: Path) -> None:
    place = tmp_path / "config" / "tokens.json"
    first, other = make_token(place, "ana"), make_token(place, "bo")
    assert first not in place.read_text() and stat.S_IMODE(place.stat().st_mode) == 0o600
    assert (owner_of(place, first), owner_of(place, other)) == ("ana", "bo")
    assert owner_of(place, "tr11-x") is None and owner_of(place, "ä\udcff") is None
    again = make_token(place, "ana")
    assert owner_of(place, first) is None and owner_of(place, again) == "ana"
    revoke_token(place, "ana")
    assert owner_of(place, again) is None and len(read_tokens(place).tokens) == 1
    with pytest.raises(Refusal, match="has no token"):
        revoke_token(place, "ana")
    with pytest.raises(WrongUsage, match="letters, digits"):
        make_token(place, "a|b")
    place.chmod(0o644)
    with pytest.raises(PrivateFileError, match="chmod 600"):
        owner_of(place, other)


@pytest.mark.parametrize(
    ("typed", "lands"), [("", "/"), ("RUN", "/run/RUN"), ("//evil.example", "/")]
)
def test_who_signs_in_from_a_run_goes_on_there(
    site: Site, monkeypatch: pytest.MonkeyPatch, typed: str, lands: str
) -> None:
    monkeypatch.setattr(RateLimit, "allows", lambda *_: True)
    assert f'href="/login?run={site.run}"' in site.ask(f"/run/{site.run}").text
    form = {"token": site.token, "run": typed.replace("RUN", site.run)}
    said = site.ask("/login", form)
    assert (said.status, said.headers["location"]) == (303, lands.replace("RUN", site.run))


def test_a_seal_opens_only_what_it_made() -> None:
    seal, other = CookieSigner(), CookieSigner()
    cookie = seal.session("ana")
    assert seal.opened(cookie).name == "ana"
    for forged in ("", "|||", "ana|9|0|ä", cookie.replace("ana", "bob"), other.session("ana")):
        assert seal.opened(forged) is None
    plan = seal.plan(cookie, "kill", "run")
    assert seal.is_plan(plan, cookie, "kill", "run")
    assert not seal.is_plan(plan, cookie, "kill", "other")
    assert not seal.is_plan(plan.replace("1", "2", 1), cookie, "kill", "run")


def test_rates_and_names() -> None:
    rate = RateLimit(2)
    assert [rate.allows("a"), rate.allows("a"), rate.allows("a"), rate.allows("b")] == [
        True, True, False, True,
    ]  # fmt: skip
    known = ["localhost", "localhost:80", "127.0.0.1:8811", "[::1]:8811", "10.1.2.3", "Login1:80"]
    assert all(is_known_host(header, ("login1",)) for header in known)
    assert not any(is_known_host(header, ()) for header in ("", "evil.example", "localhost.evil"))


def test_an_act_is_one_line_without_options() -> None:
    with pytest.raises(WrongUsage, match="reason"):
        WebAct("k", "pause", "ana", reason="a\nb").checked()
    assert WebAct("k", "kill", "ana").checked().reason == "", (
        "as the typed command, it demands none"
    )


# ----------------------------------------------------------------------------- the command
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--listen", "0.0.0.0:1"), "give --cert and --key"),
        (("--listen", "x"), "give PORT or HOST:PORT"),
        (("--cert", "nowhere"), "go together"),
        (("token",), "give one NAME"),
        (("--revoke",), "goes with"),
    ],
)
def test_wrong_usage_is_one_line(
    typed: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["serve", *typed]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_token_is_made_and_revoked_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "tokens.json"
    assert execute(["serve", "token", "ana", "--tokens", str(place)]) == 0
    out = capsys.readouterr().out.strip()
    assert owner_of(place, out) == "ana"
    assert execute(["serve", "token", "ana", "--revoke", "--tokens", str(place)]) == 0
    assert owner_of(place, out) is None


def test_without_the_extra_one_line_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tr11ops.cli.serve.missing", lambda names: ("uvicorn",))
    assert execute(["serve"]) == 1
    assert 'pip install "tr11[serve]"' in capsys.readouterr().err


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
    alert = {"fingerprint": "abcd", "severity": "critical", "title": "it hangs"}
    told = {"verdict": "down", "run": {}, "last_attempts": [{"id": "7", "how": "out of memory"}]}

    def shown(alerts: list[dict[str, object]]) -> str:
        return view_of(News("k", Path("k"), document={**told, "alerts": alerts}), now).alerts_line

    assert shown([]) == "None is open."
    unread = view_of(News("k", Path("k"), why="its card cannot be read"), now)
    assert unread.alerts_line == "Not known.", "what could not be read is not said to be well"
    told["on_call"] = {"who": ["bo@example.org"]}
    assert shown([alert]) == "1 is open: no one has taken it; bo@example.org is on call."
    said = "2 are open: no one has taken 1 of them; bo@example.org is on call."
    assert shown([alert, {**alert, "owner": "ana"}]) == said
    assert shown([{**alert, "acknowledged_by": "ana"}]) == "1 is open: ana has it."
    gone = {**alert, "found": False, "closes": "2022-05-01T12:04:00Z"}
    fate = "no longer found; the watchdog closes it in about 4 min"
    assert shown([gone]) == f"1 is {fate}."
    assert shown([gone] * 2) == "2 are no longer found, and close by themselves."
    assert shown([alert, gone]).endswith(f"bo@example.org is on call; 1 is {fate}."), "told apart"
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


def test_a_cause_is_said_once_on_the_first_screens_of_a_run() -> None:
    cause = "rank 1 on n13: the program ended by SIGSEGV"
    title = f"attempt 7 failed: {cause}"
    ended = {"id": "7", "how": f"no end marker: {cause}"}
    fault = {
        "detector": "unfinished-end", "severity": "critical", "title": title, "fingerprint": "aa",
        "evidence": [f"7, 2 min ago: no end marker: {cause}"], "fix": "tr11 rollback 50",
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
    other = page(findings=[{**fault, "title": "the disk is full", "evidence": []}], alerts=[])
    assert "Last end : Attempt 7: no end marker: rank 1" in other and "The disk is full" in other
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


def test_where_the_training_stands_the_slowest_node_of_before_is_no_news() -> None:
    def line(verdict: str, state: str, text: object) -> str:
        told = {"verdict": verdict, "run": {}, "slow_nodes": {"state": state, "text": text}}
        return view_of(News("k", Path("k"), document=told), 0.0).nodes_line

    assert line("healthy", "none", "None is slow.") == "None is slow."
    assert line("stalled", "none", "None is slow.") == "" == line("healthy", "none", 7)
    assert line("stalled", "named", "Slow: n01.") == "Slow: n01."


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
    assert "19 s ago : ● healthy" in fresh, "from the moment of the snapshot, not of its document"
    assert "You may sleep" in fresh and "is not known" in not_yet
    old, over = shown(22)
    assert "41 s ago : ● healthy" in old and "How it is now is not known" in old
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


def test_what_was_seen_before_an_act_is_no_verdict_after_it(site: Site) -> None:
    watcher = RunPoller([site.folder / "run"], "local")
    watcher._follow(site.folder / "run")
    until(lambda: all(one.looked for one in watcher.news()))
    [seen] = watcher.news()
    reader, down = watcher._readers.of(seen.run.directory), "waits for a person"  # type: ignore[union-attr]
    told = {**(seen.document or {}), "verdict": "down", "why": down, "answer": "Do not sleep"}
    acted = replace(seen, document=told, acted=seen.began + 1)
    for shown in (view_of(acted, time.time()), view_of(replace(acted, document=None), time.time())):
        page = words(Pages().render("run", is_part=True, run=shown, session=None, form=""))
        assert "Looking again after what was done at" in page and shown.word == "unknown"
        assert not any(
            word in page for word in (down, "Do not sleep", "No alert is open", "$ tr11 n")
        )
    watcher.look_again(seen.key)
    [waits] = watcher.news()
    assert waits.acted > seen.began, "from the moment of the act"
    until(lambda: not watcher.news()[0].is_before_act)
    fresh = watcher.news()[0]
    assert fresh.run is not None and fresh.run.reader is not reader, "the scheduler is asked again"
    watcher._put(replace(acted, began=seen.began), 0.0)
    assert watcher.news()[0] == fresh, "an earlier look that took longer replaces no later one"
    watcher.stop()


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


def test_the_page_may_be_ended_the_moment_it_says_that_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = []

    def end(line: str) -> None:
        said.append(line)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("tr11ops.cli.serve.say", end)
    tokens = str(tmp_path / "tokens.toml")
    assert execute(["serve", str(tmp_path), "--listen", "127.0.0.1:0", "--tokens", tokens]) == 0
    assert len(said) == 1
