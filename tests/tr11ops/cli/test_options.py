"""One option, one meaning: its name and the form of its value on every page, and what the shell
completes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.pins.commands import beside
from tests.pins.recording import unpacked
from tests.tr11ops.cli.shown_commands import every_command
from tr11ops.base.units import since, span_seconds
from tr11ops.cli import completion, main
from tr11ops.cli.common import span_option

FORMS = {
    "--timeout": {"TIME"},
    "--for": {"TIME"},
    "--since": {"TIME", "TIME|last"},  # last: the hand-over before
    "--iterations": {"FIRST-LAST"},
    "--array": {"1-10"},
    "--scheduler": {"slurm|local|auto", "slurm|local|auto|kubernetes"},
    "--workers": {"N", None},
    "--run": {"CARD"},
}
FORMER = {
    "data corpus": ("--output", "--out"),
    "data tokenizer": ("--output", "--out"),
    "backup restore": ("--output", "--into"),
    "backup drill": ("--output", "--into"),
    "backup run": ("--workers", "--parallel"),
    "checkpoints verify": ("--workers", "--parallel"),
    "checkpoints export": ("--format", "--to"),
    "upload": ("--repository", "--to"),
    "alerts test": ("--address", "--to"),
    "eval": ("--windows", "--tokens"),
    "data text": ("--ids", "--tokens"),
    "init": ("--example", "--from"),
}


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    return dict(every_command())


def test_an_option_has_one_form_of_value_on_all_pages(commands: dict[str, Any]) -> None:
    for option, forms in FORMS.items():
        found = {
            words: one.metavar
            for words, command in commands.items()
            for one in command.params
            if option in one.opts and not one.hidden
        }
        assert found and set(found.values()) <= forms, (option, found)


def test_no_word_of_a_help_is_taken_for_markup(commands: dict[str, Any]) -> None:
    """`[toy]` in a help text is a style to the library that draws the page, and does not show."""
    style = r"(?<!\\)\[[a-z][a-z -]*\]"
    assert not [
        (words, one.name)
        for words, command in commands.items()
        for one in command.params
        if re.search(style, getattr(one, "help", None) or "")
    ]


@pytest.mark.parametrize("words", sorted(FORMER))
def test_a_former_spelling_is_taken_and_not_shown(
    words: str, commands: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    name, former = FORMER[words]
    [option] = [one for one in commands[words].params if former in one.opts]
    assert next(one for one in option.opts if one.startswith("--")) == name
    assert main.execute([*words.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"{name} " in shown and f"{former} " not in shown.split("─ Options")[1]
    assert former in option.opts, "the page leaves the parser as it was"


def test_every_command_about_a_run_takes_a_scheduler(commands: dict[str, Any]) -> None:
    for words, command in commands.items():
        names = {name for one in command.params for name in one.opts}
        assert "--run" not in names or "--scheduler" in names, words
    assert main.execute(["perms", "check", "--scheduler", "odd"]) == 2


def test_lengths_of_time() -> None:
    assert [span_option(text) for text in ("90", "90s", "45m", "45 min", "2h", "1.5d", "0")] == [
        90, 90, 2700, 2700, 7200, 129_600, 0,
    ]  # fmt: skip
    assert span_option("45", unit="m") == 2700
    for text in ("", "soon", "-1", "1y", "h"):
        with pytest.raises(typer.BadParameter, match="write 90s"):
            span_option(text)
    with pytest.raises(ValueError, match="no length"):
        span_seconds("90", None)
    assert since("12h", 100_000.0) == 100_000.0 - 43_200


# ------------------------------------------------------------------------- what the shell completes
@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("recorded").resolve())


def values(words: str, option: str, incomplete: str) -> list[str]:
    """What is offered for an option (or an argument, by its metavar) of a command."""
    command = dict(every_command())[words]
    parameter = next(one for one in command.params if option in (*one.opts, one.metavar))
    context = typer.Context(command, info_name="tr11")
    return [item.value for item in parameter.shell_complete(context, incomplete)]


def test_values_are_completed(recorded: Path) -> None:
    with beside(recorded):
        assert values("status", "--run", "tr11") == [
            "tr11-176B-ml",
            "tr11-176B-ml-24n",
            "tr11.toml",
        ]
        assert values("status", "--run", str(recorded) + "/tr") == [f"{recorded}/tr11.toml"]
        assert values("status", "--scheduler", "") == ["slurm", "local", "auto"]
        assert values("launch", "--scheduler", "k") == ["kubernetes"]
        assert values("goodput", "--by", "d") == ["day"]
        assert values("init", "--preset", "") == ["toy", "1b", "7b", "llama-1b", "llama-8b", "176b"]
        assert values("runbook", "NAME", "hu") == ["hung"]
        assert "node-dead" in values("twin fault", "[KIND]", "node-")
        assert {"5", "18", "latest"} <= set(values("checkpoints pin", "STEP", ""))
        assert values("nodes include", "NODE...", "") == ["local-node3"]
        assert values("logs", "--level", "w") == ["warning"]


def test_what_cannot_be_read_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TR11_RUN", raising=False)
    assert values("checkpoints pin", "STEP", "") == []
    assert values("nodes include", "NODE...", "") == []
    monkeypatch.setattr("tr11ops.cluster.select.choose_scheduler", lambda kind: 1 / 0)
    assert completion.nodes(typer.Context(main.load("status")), "") == []
