"""`.ci/nightly`: what it would run is there to be run, and its exit status is that of its parts."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NIGHTLY = ROOT / ".ci" / "nightly"


@pytest.fixture(scope="module")
def nightly() -> dict[str, Any]:
    return runpy.run_path(str(NIGHTLY))


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, NIGHTLY, *words], capture_output=True, text=True)


def test_every_command_of_the_night_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = typed("--dry-run").stdout.splitlines()
    assert len(commands) == len(typed("--list").stdout.splitlines()) >= 4
    for command in commands:
        program, *words = [word for word in command.split() if "=" not in word]
        if program == "make":
            assert set(words) <= targets, command
        else:
            assert all((ROOT / word).is_file() for word in words), command


def test_one_part_may_be_asked_for() -> None:
    assert typed("--dry-run", "history").stdout == "HISTORY_OPTIONS=--trial make history\n"
    refused = typed("--dry-run", "chaoss")
    assert refused.returncode == 2 and "no part 'chaoss': there are chaos, soak" in refused.stderr


@pytest.mark.parametrize(
    ("codes", "status"), [((0, 0), 0), ((0, 3), 3), ((3, 2, 0), 1), ((-9,), 1)]
)
def test_its_exit_status(
    nightly: dict[str, Any], capfd: pytest.CaptureFixture[str], codes: tuple[int, ...], status: int
) -> None:
    """A part that fails stops none of those behind it; one that is killed has failed."""
    ends = [f"exit {code}" if code >= 0 else f"kill {code} $$" for code in codes]
    parts = [nightly["Part"](f"p{at}", 1, "", ("sh", "-c", end)) for at, end in enumerate(ends)]
    assert nightly["_run_all"](parts) == status
    table = capfd.readouterr().out.splitlines()[-len(codes) :]
    words = {0: "passed", 3: "could not be had"}
    assert all(words.get(code, "FAILED") in line for code, line in zip(codes, table, strict=True))


def test_a_variable_that_is_set_makes_the_night_a_small_one(
    nightly: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TR11_NIGHT", "10 or so")
    given = {"TR11_NIGHT": "200", "TR11_LENGTH": "long"}
    command = ("sh", "-c", 'exit "$((${#TR11_NIGHT} - ${#TR11_LENGTH}))"')
    part = nightly["Part"]("small", 1, "", command, given)
    assert part.shown().startswith("TR11_NIGHT='10 or so' TR11_LENGTH=long sh -c ")
    assert nightly["_run"](part) == len("10 or so") - len("long")


def test_what_cannot_be_started_has_failed(nightly: dict[str, Any]) -> None:
    assert nightly["_run_all"]([nightly["Part"]("none", 1, "", ("/nowhere/python",))]) == 1
