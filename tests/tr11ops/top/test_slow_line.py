"""`tr11 top` where all is slow: in a real tmux of 80x24 behind a line that hangs, and over a folder that
does not answer. What a person confirms is what they saw, and it is carried out once.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pins.commands import beside
from tests.pins.states import Place, place_in
from tests.tr11ops.top.screen import (
    drive,
    head,
    more,
    needs_textual,
    sentence,
    settled,
    shown,
    text,
)
from tests.waiting import until
from tr11ops import api
from tr11ops.alerts.policy import Policy
from tr11ops.base.invocation import PLAN_CHANGED, mark_of_plan
from tr11ops.rundir.journal import JournalEntry, read_journal, user_name
from tr11ops.top.commands import REASON

SLOW_LINE = Path(__file__).with_name("slow_line.py")


def entries(place: Place, kind: str) -> list[JournalEntry]:
    return [one for one in read_journal(place.run / "journal").entries if one.kind == kind]


class Tmux:
    """A tmux server of its own, with one pane in which `tr11 top` runs behind a line that can be held."""

    def __init__(self, place: Place) -> None:
        self._name = f"tr11-{uuid.uuid4().hex[:8]}"
        self.held, self.waiting = place.folder / "held", place.folder / "waiting"
        program = [str(Path(sys.executable).with_name("tr11")), "top", "--scheduler", "local"]
        line = [sys.executable, str(SLOW_LINE), str(self.held), str(self.waiting)]
        code = Path(__file__).parents[3]
        given = ["-e", f"PYTHONPATH={code}", "-c", str(place.folder)]
        words = shlex.join([*line, *program, "--every", "3600"])
        self._tmux("new-session", "-d", "-x", "80", "-y", "24", *given, words)

    def _tmux(self, *words: str) -> str:
        line = ["tmux", "-f", os.devnull, "-L", self._name, *words]
        return subprocess.run(line, capture_output=True, text=True, check=False).stdout

    def press(self, *keys: str) -> None:
        for key in keys:
            self._tmux("send-keys", key)

    def shown(self) -> str:
        return self._tmux("capture-pane", "-p")

    def until_shown(self, words: str) -> str:
        until(lambda: words in self.shown(), words, context=self.shown)
        return self.shown()

    def until_drawn(self, words: str) -> None:
        """Until the program has drawn it, though the line holds it back."""
        until(lambda: words in self.waiting.read_text(errors="replace"), words, context=self.shown)

    def end(self) -> None:
        self._tmux("kill-server")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with place_in("stopped") as made, beside(made.folder):
        yield made


@needs_textual
@pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")
def test_what_is_typed_before_the_plan_is_seen_confirms_nothing(place: Place) -> None:
    switch, tmux = place.run / "kill-switch", Tmux(place)
    switch.unlink(missing_ok=True)
    before = len(entries(place, "kill-switch-set"))
    try:
        tmux.until_shown("small/main")
        tmux.held.touch()
        tmux.press("k")
        tmux.until_drawn("to be stopped?")
        tmux.press(*"why", "Enter", "y", "k", "y")
        tmux.until_drawn("to carry it out")
        assert "carry" not in tmux.shown(), "the line holds it back"
        tmux.press("y", "Enter", "y")
        tmux.held.unlink()
        plan = tmux.until_shown("to carry it out")
        assert not switch.exists() and len(entries(place, "kill-switch-set")) == before
        [keys] = re.findall(r"Type (y\d\d) to carry it out", plan)
        tmux.press(*keys, *keys)
        until(switch.exists)
        tmux.until_shown("kill switch set")
        assert len(entries(place, "kill-switch-set")) == before + 1
    finally:
        tmux.end()


class Commands:
    """Stands for the commands that are typed: each waits until it may answer."""

    def __init__(self) -> None:
        self.typed: list[str] = []
        self.may_answer = threading.Event()
        self.plan = "one alert"

    def command(
        self, words: list[str], reason: str, dry_run: bool = False, plan: str = "", **rest: bool
    ) -> api.Answer:
        """In place of `Run.command`."""
        self.typed.append(" ".join([*words, *["--dry-run"] * dry_run, "--reason", reason]))
        assert self.may_answer.wait(600)
        if dry_run:
            return api.Answer(0, {}, (self.plan,), mark_of_plan([self.plan]))
        if plan != mark_of_plan([self.plan]):
            return api.Answer(1, {}, (PLAN_CHANGED,))
        return api.Answer(0, {}, ("it was done",))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands()

    def command(run: api.Run, *given: Any, **rest: Any) -> api.Answer:
        return commands.command(*given, **rest)

    monkeypatch.setattr(api.Run, "command", command)
    return commands


@needs_textual
def test_a_folder_that_does_not_answer_holds_up_no_key_and_loses_none(
    place: Place, typed: Commands
) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("a", "A", "y", "A", "question_mark")
        assert "What" in text(app), "the screen goes on"
        await pilot.press("escape", "escape", "enter")
        assert "attempts" in head(app) and shown(app)
        await pilot.press("escape", "a")
        typed.may_answer.set()
        await settled(app, pilot)
        assert "one alert" in text(app) and len(app.screen_stack) == 2
        typed.may_answer.clear()
        await pilot.press(*app.screen._keys, *app.screen._keys, "A", "k", "question_mark")
        assert "What" in text(app), "and goes on while it is carried out"
        await pilot.press("escape")
        typed.may_answer.set()
        await settled(app, pilot)
        assert text(app) == "it was done"

    drive(place, keys)
    plan, done = typed.typed
    assert plan == f"alerts ack --all --dry-run --reason {REASON}"
    assert done.startswith("alerts ack --all --reason"), "carried out once"


@needs_textual
def test_a_plan_that_has_changed_since_it_was_shown_is_shown_again(
    place: Place, typed: Commands
) -> None:
    typed.may_answer.set()

    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("k", "enter")
        await settled(app, pilot)
        seen, typed.plan = app.screen._keys, "one job, and another"
        await pilot.press(*seen)
        await settled(app, pilot)
        assert "the plan is another one now" in text(app) and typed.plan in text(app)
        assert app.screen._keys != seen
        await pilot.press(*seen)
        assert len(app.screen_stack) == 2, "the keys of the plan before confirm nothing"
        await pilot.press(*app.screen._keys)
        await settled(app, pilot)
        assert text(app) == "it was done"

    drive(place, keys)


@needs_textual
def test_a_shift_is_taken_by_the_address_that_the_card_tells_or_that_is_asked_for(
    place: Place, typed: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed.may_answer.set()

    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("a")
        for addresses in ((f"{user_name()}@example.org",), ("ana@example.org",)):
            monkeypatch.setattr(Policy, "everyone", addresses)
            await pilot.press("t")
            if user_name() not in addresses[0]:
                assert "the card has: ana@example.org" in sentence(app)
                await pilot.press(*addresses[0], "enter")
            await settled(app, pilot)
            assert f"tr11 alerts take-shift --as {addresses[0]}" in text(app)
            await pilot.press("escape")

    drive(place, keys)


@needs_textual
def test_each_alert_is_shown_with_who_has_it_and_taken_or_snoozed_by_its_incident(
    place: Place, typed: Commands
) -> None:
    typed.may_answer.set()

    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("s", "t", "A")
        assert len(app.screen_stack) == 1, "of no alert that is not shown"
        await pilot.press("enter", "a")
        assert "small/main: alerts" in head(app)
        assert f"{len(shown(app))} alerts are open; on call: no one named" in sentence(app)
        assert {row[2] for row in shown(app)} == {"no one", "no longer found"}
        assert more(app).startswith(f"{shown(app)[0][3]}; no longer found")
        await pilot.press("enter")
        assert "What it means" in text(app), "its runbook page"
        await pilot.press("escape", "down")
        incident = app._chosen().key
        for key, words in (
            ("a", f"ack {incident}"),
            ("s", f"snooze {incident} --for 2h"),
            ("t", f"take-shift --as {user_name()}"),
        ):
            await pilot.press(key)
            await settled(app, pilot)
            await pilot.press(*app.screen._keys)
            await settled(app, pilot)
            assert text(app) == "it was done"
            assert typed.typed[-1].startswith(f"alerts {words} --reason {REASON}"), key
            await pilot.press("escape")
        await pilot.press("escape")
        assert "attempts" in head(app), "back where it was asked for"

    drive(place, keys)
