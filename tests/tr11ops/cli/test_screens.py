"""Every screen on a terminal without a width, and on a very narrow one: it is there, and no columns
run together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import Answer
from tests.tr11ops.observe.filling import fill
from tr11ops.cli.main import execute
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths

SCREENS = (
    ("status", "--scheduler", "local"), ("handover", "--dry-run", "--scheduler", "local"), ("goodput",), ("advise",),
    ("nodes", "list", "--scheduler", "local"), ("checkpoints", "list"), ("alerts", "digest"), ("cron", "status"),
    ("cron", "list"), ("fs-watchdog",), ("doctor", "--scheduler", "local"), ("estimate",),
    ("pulse", "--dry-run", "--scheduler", "local"), ("perms", "check"),
)  # fmt: skip
NARROW = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("screens")
    root = made / "demo-run"
    root.mkdir()
    fill(RunDirectory(RunPaths(root, "demo", "main"), root / "kill-switch"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.setenv("TR11_LOCAL_SCHEDULER", str(made / "scheduler"))
        patch.setenv("TR11_LOCAL_NODES", "8")
        yield made


def shown(words: tuple[str, ...], columns: str, capture: pytest.CaptureFixture[str]) -> Answer:
    capture.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", columns)
        code = execute([*words, "--run", "demo"])
    out, err = capture.readouterr()
    assert "Traceback" not in out + err
    return Answer(code, out, err)


def tokens(text: str) -> set[str]:
    """Words that no clock changes."""
    # a backslash ends a line of a command that goes on
    found = (word.strip(".…,;:()\\") for word in text.split())
    return {word for word in found if word and not re.search(r"\d", word)}


@pytest.mark.parametrize("words", SCREENS, ids=lambda words: " ".join(words[:2]))
def test_a_screen_of_no_width_and_a_narrow_one(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, none, narrow = (shown(words, columns, capsys) for columns in ("80", "0", str(NARROW)))
    assert usual.code == none.code == narrow.code
    assert usual.out.strip() and tokens(none.out) == tokens(usual.out)
    whole = tokens(usual.out)
    merged = [word for word in tokens(narrow.out) if not any(word in other for other in whole)]
    assert not merged, f"columns that run together: {merged}"
    if words[0] == "status":
        assert max(map(len, narrow.out.splitlines())) <= NARROW
