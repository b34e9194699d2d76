"""`tr11 top` where all is slow: in a real tmux of 80x24 behind a line that hangs, and over a folder that
does not answer. What a person confirms is what they saw, and it is carried out once.
"""

from __future__ import annotations

import asyncio
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
from tr11ops.base import deadline
from tr11ops.base.errors import Refusal
from tr11ops.base.invocation import PLAN_CHANGED, mark_of_plan
from tr11ops.rundir.journal import JournalEntry, read_journal, user_name
from tr11ops.top.commands import REASON
from tr11ops.top.looks import RunLooks

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

    def at_once(self, *keys: str) -> None:
        """As they come over a slow line: all in one."""
        self._tmux("send-keys", *keys)

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
        tmux.at_once("k", *"fan", "Enter", "y", "k", "y")
        tmux.until_drawn("to do it")
        assert "to do it" not in tmux.shown(), "the line holds it back"
        tmux.press("y", "Enter", "y")
        tmux.held.unlink()
        plan = tmux.until_shown("to do it")
        assert not switch.exists() and len(entries(place, "kill-switch-set")) == before
        [keys] = re.findall(r"Type (y\d\d) to do it", plan)
        tmux.press(*keys, *keys)
        until(switch.exists)
        tmux.until_shown("kill switch set")
        new = entries(place, "kill-switch-set")[before:]
        assert [entry.why for entry in new] == ["fan"], (
            "what was typed right behind k is the reason"
        )
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
        await pilot.press("k", *"no fan", "enter", "y", "1")
        assert text(app) == "looking ...", "it has the screen at once, and confirms nothing unseen"
        await pilot.press("escape", "enter")
        assert "attempts" in head(app) and shown(app), "the screen goes on"
        await pilot.press("escape", "k", *"its fa", "n", "backspace", "n")
        assert text(app) == "looking ...\n\nbecause: its fan_"
        typed.may_answer.set()
        await settled(app, pilot)
        assert text(app).startswith("one alert\n\nbecause: its fan_\n\nType Enter, then y")
        assert len(app.screen_stack) == 2, "the plan that was left opens nothing"
        typed.may_answer.clear()
        await pilot.press("enter", *app.screen.keys, *app.screen.keys, "A", "k", "escape")
        assert len(app.screen_stack) == 1, "and goes on while it is carried out"
        typed.may_answer.set()
        await settled(app, pilot)
        assert [note.message for note in app._notifications] == ["it was done"]

    drive(place, keys)
    *_, plan, done = typed.typed
    assert plan == f"kill --dry-run --reason {REASON}"
    assert done.startswith("kill --reason its fan"), "carried out once"


@needs_textual
def test_of_fifty_runs_one_whose_file_system_hangs_holds_up_no_key_and_no_other_run(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`r08` does not answer at all, and a look at `r10` lasts."""
    over, asked = threading.Event(), os.statvfs
    monkeypatch.setattr(deadline, "PROBE_SECONDS", 0.5)
    for number in range(50):
        (tmp_path / f"r{number:02}" / "state" / "submissions").mkdir(parents=True)

    def statvfs(folder: Path) -> Any:
        if folder.name == "r08":
            over.wait(600)
        return asked(folder)

    def look(self: RunLooks, folder: Path, *_: Any) -> Any:
        if folder.name == "r10":
            over.wait(600)
        raise Refusal("it was looked at")

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(RunLooks, "look", look)

    async def keys() -> None:
        from tr11ops.top.app import TopApp

        app = TopApp(RunLooks((tmp_path,), "local"), 3600.0)
        async with app.run_test(size=(80, 24)) as pilot:
            while "it was looked at" not in {row[-1] for row in shown(app)}:
                await pilot.pause(0.05)
            assert len(shown(app)) == 50 and not over.is_set(), "the others wait for none of them"
            await pilot.press("down", "down")
            assert app._chosen().key == str(tmp_path / "r02")
            await pilot.press("slash", *"r3", "enter")
            assert [row[0] for row in shown(app)] == [f"r3{number}" for number in range(10)]
            run = app._chosen().key
            await pilot.press("k", *"fan")
            assert app.screen.key == run and "because: fan_" in text(app)
            await pilot.press("escape", "escape")
            over.set()
            await settled(app, pilot)
            whys = {row.key: row.more for row in app._shown.rows}
            assert "r08 does not answer" in whys.pop(str(tmp_path / "r08"))
            assert {why.partition(": ")[2] for why in whys.values()} == {"it was looked at"}

    try:
        asyncio.run(keys())
    finally:
        over.set()


@needs_textual
def test_a_plan_that_has_changed_since_it_was_shown_is_shown_again(
    place: Place, typed: Commands
) -> None:
    typed.may_answer.set()

    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("k", *"fan", "enter")
        await settled(app, pilot)
        seen, typed.plan = app.screen.keys, "one job, and another"
        await pilot.press(*seen)
        await settled(app, pilot)
        assert "the plan is another one now" in text(app) and typed.plan in text(app)
        assert app.screen.keys != seen
        await pilot.press(*seen)
        assert app.screen.apply is not None, "the keys of the plan before confirm nothing"
        await pilot.press(*app.screen.keys)
        await settled(app, pilot)
        assert text(app).endswith("\n\nit was done")
        assert typed.typed[-1].endswith("--reason fan")

    drive(place, keys)


@needs_textual
def test_a_shift_is_taken_by_this_user_or_the_address_that_is_typed(
    place: Place, typed: Commands
) -> None:
    typed.may_answer.set()

    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("a", "t")
        await settled(app, pilot)
        assert f"who: {user_name()}_" in text(app)
        assert typed.typed[-1].startswith("alerts take-shift --dry-run")
        await pilot.press(*"ana@example.org", "enter")
        await settled(app, pilot)
        assert typed.typed[-1].startswith("alerts take-shift --as ana@example.org --dry-run")
        await pilot.press(*app.screen.keys)
        await settled(app, pilot)
        assert typed.typed[-1].startswith("alerts take-shift --as ana@example.org --reason")
        await pilot.press("escape", "t")
        assert "who: ana@example.org_" in text(app)

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
        assert sentence(app).startswith("alerts: 1 (")
        assert (
            "(exclusion-cap) is open: no one has taken it; 2 (down, held 4) are no longer found"
            in sentence(app)
        )
        whose = [row[2] for row in shown(app)]
        assert whose == ["no one", *["no longer found"] * 2], "what a person has to do with first"
        assert "; no one has taken it" in more(app)
        await pilot.press("enter")
        assert "What it means" in text(app), "its runbook page"
        await pilot.press("escape", "down")
        incident = app._chosen().key
        for key, words in (
            ("a", f"ack {incident}"),
            ("s", f"snooze {incident} --for 2h"),
            ("t", "take-shift"),
        ):
            await pilot.press(key)
            await settled(app, pilot)
            await pilot.press("enter", *app.screen.keys)
            await settled(app, pilot)
            assert text(app) == "it was done"
            assert typed.typed[-1].startswith(f"alerts {words} --reason {REASON}"), key
            await pilot.press("escape")
        await pilot.press("escape")
        assert "attempts" in head(app), "back where it was asked for"

    drive(place, keys)
