"""`tr11 status --remote`: a laptop sees what the hub has, says how old that is, and never more."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from rich.console import Console

from tests.tr11ops.logs.hub_server import Hub, serving
from tests.tr11ops.logs.log_cases import log_of
from tests.tr11ops.status.publishing import published
from tests.tr11ops.status.screens import keys_below
from tests.tr11ops.status_cases import DAY, HOUR, NOW, idle, snapshot
from tr11ops.base.errors import HubPermanentError, HubUnavailable
from tr11ops.cli.main import execute
from tr11ops.hub.base import HubRepo, repo_of
from tr11ops.hub.log_end import end_of_log
from tr11ops.hub.remote_log import remote_retries, until_answered
from tr11ops.observe.snapshot import Snapshot
from tr11ops.status.assessment import status_of
from tr11ops.status.published import read_published
from tr11ops.status.remote import (
    LARGEST_FACTS_BYTES,
    Facts,
    NoSuchVariant,
    Outside,
    RemoteView,
    judge_outside,
    outside_document,
)
from tr11ops.status.remote_screen import render_outside
from tr11ops.status.rows import Screen
from tr11ops.status.screen import render
from tr11ops.watchdog.verdict import judge

LOG = "logs/main/main_log.txt"
TOKEN = "hf_distinctive0123456789"


def status_bytes(seen: Snapshot | None = None, **changes: Any) -> bytes:
    return json.dumps({**published(snapshot() if seen is None else seen), **changes}).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(
        Hub(files={"status.json": status_bytes(), LOG: log_of(range(31000, 31220))})
    ) as server:
        yield server


def outside(hub: Hub, variant: str | None = None, tries: int = 2) -> Outside:
    return Outside(
        HubRepo(hub.url, "model", "big/logs"),
        TOKEN,
        remote_retries(lambda _: None, lambda _: None, tries),
        variant,
    )


def screen_of(view: RemoteView, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render_outside(view, Screen(width, unicode=False, zone=UTC)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ----------------------------------------------------------------------------- what is seen
def test_a_healthy_run_on_one_screen(hub: Hub) -> None:
    view = outside(hub).look(NOW + 42 * 60)
    shown = screen_of(view)
    assert judge_outside(view).exit_code == 0
    for words in (
        "HEALTHY  tr11-176B-ml / main", "As of 2022-05-01 12:00 UTC, 42 min ago. You may sleep. The", "training runs.", "31,219 / 115,311  27.0 %",
        "2.3000", "105.00 s/iteration; 149.5 TFLOPs", "63.9 M samples, 130.9 B tokens", "1 running, 3 queued", "48 used, 0 spare; none excluded",
        "global_step31200, 1 h 15 min ago, 2.2 TiB; 3 kept", "91.0 % of the held node time", "ends at iteration 31,219, 30 s before that look",
        "big/logs at commit c0ffee01",
    ):  # fmt: skip
        assert words in shown, words
    assert all(len(line) <= 80 for line in shown.splitlines()) and shown.isascii()
    assert len(shown.splitlines()) <= 24


def test_both_screens_say_the_same_in_one_way(hub: Hub) -> None:
    seen = snapshot()
    local = Console(width=80, file=io.StringIO(), color_system=None)
    local.print(render(status_of(seen, (), judge(seen, ())), Screen(80, unicode=False, zone=UTC)))
    assert isinstance(local.file, io.StringIO)
    here, there = local.file.getvalue().splitlines(), screen_of(outside(hub).look(NOW)).splitlines()
    for label in ("progress", "ETA", "speed", "consumed", "nodes"):
        [line] = [line for line in here if line.startswith(f"{label} ")]
        # which node is slow is not published
        assert line.replace("; slow: not known", "").rstrip() in map(str.rstrip, there), label


def test_a_repository_with_a_log_alone(hub: Hub) -> None:
    """As the original trainings left them: no status.json, whatever else lies there."""
    del hub.files["status.json"]
    hub.files |= {"README.md": b"#", "tensorboard/main/events": b"x"}
    view = outside(hub).look(NOW + HOUR)
    shown = screen_of(view)
    assert (
        "LOG ONLY  big/logs / main" in shown
        and "As of 2022-05-01 12:00 UTC, 1 h 00 min ago." in shown
    )
    # 84,092 steps of 105 s
    assert "102 d" in shown and "of training, without waits and restarts" in " ".join(shown.split())
    assert judge_outside(view).exit_code == 3 and outside_document(view)["verdict"] is None
    assert "publishes no status" in judge_outside(view).line
    assert judge_outside(replace(view, time=NOW + 4 * HOUR)).exit_code == 1


def test_an_old_finished_training_is_no_fault(hub: Hub) -> None:
    hub.files = {LOG: log_of(range(115000, 115312))}
    view = outside(hub).look(NOW + 900 * DAY)
    assert judge_outside(view).exit_code == 0 and not judge_outside(view).is_stale
    hub.files["status.json"] = status_bytes(idle(), verdict="finished", exit_code=0)
    hub.commit = "a" * 40
    assert judge_outside(outside(hub).look(NOW + 900 * DAY)).exit_code == 0


def test_of_a_stopped_run_no_news_is_expected(hub: Hub) -> None:
    """What is published of it does not change, so nothing is committed any more."""
    hub.files["status.json"] = status_bytes(idle(), verdict="stopped", exit_code=0)
    verdict = judge_outside(outside(hub).look(NOW + 9 * DAY))
    assert (verdict.is_stale, verdict.exit_code) == (False, 0)


def test_news_that_stay_away_are_no_news(hub: Hub) -> None:
    view = outside(hub).look(NOW + 3 * HOUR)
    assert judge_outside(view).exit_code == 0
    stale = replace(view, time=NOW + 3 * HOUR + 1)
    assert judge_outside(stale).exit_code == 1
    shown = screen_of(stale)
    assert (
        "STALE  tr11" in shown
        and "it said HEALTHY." in shown
        and "nothing was synchronised for 3 h" in " ".join(shown.lower().split())
    )
    slow = replace(
        view, time=NOW + 20 * HOUR, published={**(view.published or {}), "interval_seconds": DAY}
    )
    assert judge_outside(slow).exit_code == 0


def test_a_clock_that_is_behind_makes_nothing_younger_than_new(hub: Hub) -> None:
    verdict = judge_outside(outside(hub).look(NOW - 9 * HOUR))
    assert verdict.age == 0.0 and verdict.exit_code == 0


def test_the_exit_code_is_the_runs_own(hub: Hub) -> None:
    hub.files["status.json"] = status_bytes(snapshot(jobs=(), heartbeats=(), attempts=()))
    view = outside(hub).look(NOW + 60)
    assert judge_outside(view).exit_code == 1 and "DOWN" in screen_of(view)
    assert judge_outside(replace(view, published={"run": {}, "schema": 1})).exit_code == 3


def test_the_log_may_be_ahead_of_the_status(hub: Hub) -> None:
    hub.files[LOG] += log_of(range(31220, 31260))
    assert "31,259 / 115,311" in screen_of(outside(hub).look(NOW))


def test_a_log_that_says_little(hub: Hub) -> None:
    for content in (b"", b"no step at all\n", b"\xff" * 5000, log_of(range(1, 2))[:50]):
        hub.files[LOG], hub.commit = content, f"{len(content):040x}"
        shown = screen_of(outside(hub).look(NOW))
        assert "no step in its end" in shown and "31,219" in shown
    del hub.files["status.json"]
    hub.commit = "b" * 40
    assert "no iteration yet" in screen_of(outside(hub).look(NOW))


def test_steps_far_from_the_end_are_found(hub: Hub) -> None:
    hub.files[LOG] += b"noise of a worker\n" * 40_000
    end = outside(hub).look(NOW).log
    assert end is not None and end.last is not None and end.last.iteration == 31219


def test_the_end_of_a_log() -> None:
    data = (
        b"[2022-05-01 10:00:00] PULSE: tr11 is running\n"
        + log_of(range(5, 8))
        + b"cut iteration 9/ 10 | consumed"
    )
    end = end_of_log(data, 999, is_whole=True)
    assert [step.iteration for step in end.steps] == [
        5,
        6,
        7,
    ] and end.stamp == "2022-05-01 10:00:00"
    assert end.seconds_per_iteration == 105.0 and end.tflops == 149.5 and end.size == 999
    assert [step.iteration for step in end_of_log(data[46:], 999, is_whole=False).steps] == [6, 7]


# ----------------------------------------------------------------------------- which training
def test_the_variant_of_the_status_is_the_usual_one(hub: Hub) -> None:
    hub.files["logs/other/main_log.txt"] = log_of(range(1, 9))
    assert outside(hub).look(NOW).variant == "main"
    other = outside(hub, "other").look(NOW)
    assert other.published is None and other.trouble == "status.json is of variant main"
    assert other.log is not None and other.log.last is not None and other.log.last.iteration == 8
    with pytest.raises(NoSuchVariant) as caught:
        outside(hub, "third").look(NOW)
    assert caught.value.variants == ("main", "other")


def test_without_a_status_the_newest_log_is_taken(hub: Hub) -> None:
    del hub.files["status.json"]
    hub.files["logs/late/main_log.txt"] = log_of(range(1, 9)) + b"[2022-05-02 10:00:00] PULSE: x\n"
    hub.files[LOG] += b"[2022-05-01 10:00:00] PULSE: x\n"
    assert outside(hub).look(NOW).variant == "late"
    hub.files |= {f"logs/v{number}/main_log.txt": b"" for number in range(9)}
    with pytest.raises(NoSuchVariant):
        outside(hub).look(NOW)


# ----------------------------------------------------------------------------- the hub
def test_what_did_not_change_is_not_fetched_again(hub: Hub) -> None:
    eye = outside(hub)
    first = eye.look(NOW)
    asked, sent = len(hub.asked), hub.sent
    later = eye.look(NOW + 300)
    assert (len(hub.asked) - asked, hub.sent - sent) == (1, 0)
    assert later.time == NOW + 300 and later.log == first.log
    hub.commit, hub.files[LOG] = "d" * 40, hub.files[LOG] + log_of([31220])
    newer = eye.look(NOW + 600)
    assert (
        newer.log is not None and newer.log.last is not None and newer.log.last.iteration == 31220
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "hf auth login"), (403, "hf auth login"), (404, "no such repository")],
)
def test_a_repository_that_is_not_for_us(hub: Hub, status: int, words: str) -> None:
    hub.failures = [(status, "")] * 9
    with pytest.raises(HubPermanentError, match=words) as caught:
        outside(hub).look(NOW)
    assert len(hub.failures) == 8 and TOKEN not in str(caught.value)


def test_a_hub_that_is_busy_is_waited_for(hub: Hub) -> None:
    hub.failures = [(429, "7"), (503, "")]
    slept: list[float] = []
    patience = remote_retries(slept.append, lambda _: None, tries=3)
    Outside(HubRepo(hub.url, "model", "big/logs"), None, patience).look(NOW)
    assert slept == [7.0, 10.0]
    hub.failures = [(500, "")] * 9
    with pytest.raises(HubUnavailable, match="answers 500"):
        outside(hub).look(NOW)


@pytest.mark.parametrize(
    "answer", [b"", b"<html>", b"[]", b'{"sha": 1, "siblings": [{}]}', b'{"siblings": []}']
)
def test_a_server_that_is_no_hub(answer: bytes) -> None:
    here = Hub(answer, path="/api/models/big/logs", knows_ranges=False)
    with serving(here) as server, pytest.raises(HubPermanentError, match="no repository"):
        outside(server).look(NOW)


def test_an_empty_repository_and_a_strange_one(hub: Hub) -> None:
    hub.files = {"README.md": b""}
    with pytest.raises(HubPermanentError, match="no repository of a training's logs"):
        outside(hub).look(NOW)
    hub.files, hub.commit = {"status.json": b"{", LOG: b""}, "e" * 40
    view = outside(hub).look(NOW)
    assert view.trouble == "status.json is no JSON" and "status.json is no JSON" in screen_of(view)
    assert judge_outside(view).exit_code == 3
    hub.commit = ""
    with pytest.raises(HubPermanentError, match="nothing was ever synchronised"):
        outside(hub).look(NOW)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "is no JSON"), (b'{"run": {}, "schema": 99}', "schema"), (b"{}", "no status of a run")],
)
def test_a_status_that_cannot_be_used_is_not_said_to_be_missing(
    hub: Hub, content: bytes, words: str
) -> None:
    hub.files["status.json"] = content
    view = outside(hub).look(NOW)
    verdict, shown = judge_outside(view), " ".join(screen_of(view).split())
    assert verdict.exit_code == 3 and words in verdict.line and words in shown
    assert "publishes no status" not in shown


def test_a_verdict_that_is_not_known_here_is_no_health(hub: Hub) -> None:
    hub.files["status.json"] = status_bytes(verdict="splendid", exit_code=0)
    assert judge_outside(outside(hub).look(NOW)).exit_code == 3


def test_a_hub_that_wants_an_hour_is_not_waited_for() -> None:
    slept: list[float] = []
    said: list[str] = []

    def busy() -> None:
        raise HubUnavailable("hub.example answers 429", 3600.0)

    with pytest.raises(HubUnavailable, match=r"429, and asks for 1 h .*: not waited for") as caught:
        until_answered(
            busy, remote_retries(slept.append, said.append, tries=3, most=60.0), "hub.example"
        )
    assert caught.value.wait == 3600.0 and not slept and not said


@pytest.mark.parametrize("status", [200, 302, 404])
def test_an_endless_answer_is_read_no_further_than_needed(status: int) -> None:
    passed = threading.Event()

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere/nothing")
            self.end_headers()
            with suppress(OSError):
                for _ in range(4 * LARGEST_FACTS_BYTES >> 20):
                    self.wfile.write(b"[" * (1 << 20))
                passed.set()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        repo = repo_of("big/logs", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises((HubPermanentError, HubUnavailable)):
            Outside(
                repo, None, remote_retries(lambda seconds: None, lambda text: None, tries=1)
            ).look(NOW)
    finally:
        server.shutdown()
        server.server_close()
    assert not passed.is_set()


def test_a_hostile_status_shows_no_escape_and_breaks_nothing(hub: Hub) -> None:
    wild: dict[str, Any] = dict.fromkeys(json.loads(status_bytes()), "\x1b[2J" * 400)
    wild |= {
        "schema": 1,
        "run": {"name": "\x1b]0;x\x07", "variant": None},
        "iteration": -5,
        "total_iterations": 1e308,
    }
    wild |= {
        "findings": [{"severity": "critical", "title": "\x1b[31m", "count": 1e300}, 5],
        "unknown": ["\x1b"] * 99,
    }
    hub.files["status.json"] = json.dumps(wild).encode()
    view = outside(hub).look(NOW)
    assert "\x1b" not in screen_of(view) and judge_outside(view).exit_code == 3
    json.dumps(outside_document(view), allow_nan=False)


def test_the_described_keys_are_the_written_ones(hub: Hub) -> None:
    described = (Path(__file__).parents[3] / "docs" / "how-to" / "outside.md").read_text(
        encoding="utf-8"
    )
    rows = [line.split("|")[1:3] for line in described.splitlines() if line.startswith("| `")]
    written = outside_document(outside(hub).look(NOW))
    assert sorted(key for names, _ in rows for key in re.findall(r"`([a-z_]+)`", names)) == sorted(
        written
    )
    assert set(written["log"]) == {
        key
        for names, words in rows
        if "`log`" in names
        for key in re.findall(r"`([a-z_]+)`", words)
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["2022-05-01T12:00:00+00:00", "9999-12-31T23:59:59-23:59", "healthy", "stalled", "critical", "TFLOPs"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(sorted(keys_below(published(snapshot())))), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(published(snapshot()))), JSON, max_size=12),
    st.booleans(),
)
def test_whatever_someone_published_is_shown_or_left_out(
    changes: dict[str, Any], has_log: bool
) -> None:
    log = end_of_log(log_of(range(1, 9)), 9999, is_whole=True) if has_log else None
    facts = Facts("c" * 40, NOW, (LOG,))
    try:
        told = read_published(json.dumps({**published(snapshot()), **changes}).encode())
    except ValueError:
        return
    view = RemoteView(NOW + 60, "big/logs", facts, "main", told, "", LOG, log)
    shown = screen_of(view)
    assert (
        all(len(line) <= 80 for line in shown.splitlines())
        and shown.isascii()
        and "\x1b" not in shown
    )
    assert judge_outside(view).exit_code in {0, 1, 3}
    json.dumps(outside_document(view), allow_nan=False)


# ----------------------------------------------------------------------------- typed
@pytest.mark.parametrize(
    ("text", "kind", "name", "path"),
    [
        ("a/b", "model", "a/b", ""), ("datasets/a/b", "dataset", "a/b", ""), ("models/a/b/c/d.txt", "model", "a/b", "c/d.txt"),
    ],
)  # fmt: skip
def test_what_people_type(text: str, kind: str, name: str, path: str) -> None:
    repo = repo_of(text, "https://hub.example/")
    assert (repo.kind, repo.name, repo.path) == (kind, name, path)
    assert repo.facts == f"https://hub.example/api/{kind}s/a/b"


@pytest.mark.parametrize(
    "endpoint", ["https://u:hunter2@hub.example", "ftp://hub.example", "hub.example", "http://"]
)
def test_an_invalid_endpoint_is_refused_without_repeating_it(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--endpoint must be") as caught:
        repo_of("a/b", endpoint)
    assert "hunter2" not in str(caught.value)


@pytest.fixture
def laptop(hub: Hub, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A folder with nothing in it, and a hub somewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("tr11ops.cli.status.time.time", lambda: NOW + 60)
    return hub


def test_typed_on_a_laptop(laptop: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["status", "--remote", "big/logs"]) == 0
    assert "HEALTHY" in capsys.readouterr().out and laptop.asked[0][1] == f"Bearer {TOKEN}"
    assert execute(["status", "--remote", "big/logs", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["schema"] == 1 and told["verdict"] == "healthy" and told["log"]["iteration"] == 31219
    )
    assert (
        told["published"]["attempts"] == {"running": 1, "waiting": 3} and told["age_seconds"] == 60
    )
    assert datetime.fromisoformat(told["changed"]).timestamp() == NOW


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--remote", "nonsense"], 2, "give OWNER/NAME"),
        (["--remote", "https://user:hunter2@hub.example/a/b"], 2, "give OWNER/NAME"),
        (["--remote", "a/b/c"], 2, "--variant"),
        (["--remote", "a/b", "--run", "demo"], 2, "needs no card"),
        (["--remote", "a/b", "--watch", "3"], 2, "every 30 seconds at most"),
        (["--remote", "a/b", "--endpoint", "http://u:hunter2@h"], 2, "without a user"),
        (["--variant", "main"], 2, "go with --remote"),
        (["--remote", "big/logs", "--variant", "x"], 2, "there are logs of: main"),
        (["--remote", "no/such"], 1, "404"),
        (["--remote", "a/b", "--endpoint", "http://127.0.0.1:9"], 3, "nothing may be concluded"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    laptop: Hub, capsys: pytest.CaptureFixture[str], words: list[str], code: int, told: str
) -> None:
    assert execute(["status", *words]) == code
    said = capsys.readouterr()
    last = said.err.strip().splitlines()[-1]
    assert told in last and said.out == "" and "hunter2" not in said.err and TOKEN not in said.err


def test_watching_goes_on_through_a_silent_hub(
    laptop: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a pipe: a look a line, what fails is said, and the hub's wish to be left alone is
    honoured.
    """
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        laptop.failures = [(429, "900")] if len(slept) == 1 else []
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    assert execute(["status", "--remote", "big/logs", "--watch", "60", "--json"]) == 0
    said = capsys.readouterr()
    assert (
        len(said.out.splitlines()) == 2
        and "answers 429" in said.err
        and slept == [60.0, 900.0, 60.0]
    )
