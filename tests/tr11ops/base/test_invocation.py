"""Commands that are shown carry the card that the person named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.base.errors import LaunchBusy
from tr11ops.base.invocation import GROUPS, WITHOUT_RUN, command_for, for_card
from tr11ops.cli.main import COMMANDS, execute, load
from tr11ops.launch.submit import launch_lock


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("look with `tr11 status`", "look with `tr11 status --run my.toml`"),
        ("`tr11 cron install` has one look", "`tr11 cron install --run my.toml` has one look"),
        (
            "`tr11 launch --after 7`, or `tr11 kill`",
            "`tr11 launch --run my.toml --after 7`, or `tr11 kill --run my.toml`",
        ),
        ("tr11 launch --array 1-4", "tr11 launch --run my.toml --array 1-4"),
        ("`tr11 status --run other`", "`tr11 status --run other`"),
        ("write one with `tr11 init`", "write one with `tr11 init`"),
        ("`tr11 cron install --help`", "`tr11 cron install --help`"),
        ("tr11: nothing was done", "tr11: nothing was done"),
        ("tr11 reads it by itself: `pulse --act`", "tr11 reads it by itself: `pulse --act`"),
    ],
)
def test_the_card_is_in_each_command(text: str, shown: str) -> None:
    assert for_card("my.toml", text) == shown
    assert for_card("", text) == text
    assert for_card("my.toml", shown) == shown, "once"


def test_a_card_that_a_shell_would_split() -> None:
    assert command_for("my run.toml", "backup run") == "tr11 backup run --run 'my run.toml'"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_which_commands_are_groups_and_which_take_a_card(name: str) -> None:
    entry = COMMANDS[name]
    assert (name in GROUPS) == entry.is_group
    if not entry.is_group:
        options = {option for parameter in load(name).params for option in parameter.opts}
        assert ("--run" in options) == (name not in WITHOUT_RUN)


@pytest.mark.parametrize("option", [["--run", "demo"], []], ids=["--run", "TR11_RUN"])
def test_a_check_names_the_card(
    option: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not option:
        monkeypatch.setenv("TR11_RUN", "demo")
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tr11ops.launch.facts.start_of_watchdog", lambda: "cron run")
    execute(["doctor", *option, "--scheduler", "local"])
    shown = capsys.readouterr().out
    assert "`tr11 cron run --run demo`, in a terminal that stays open, starts one" in " ".join(
        shown.split()
    )


def test_the_lock_says_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "launch.lock"
    with launch_lock(path), pytest.raises(LaunchBusy) as busy, launch_lock(path):
        pass
    words = busy.value.sentence
    assert (
        "the scheduler" not in words
        and ", since 20" in words
        and str(path) in words
        and "process " in words
    )
    with launch_lock(path):
        pass
