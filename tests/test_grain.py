"""The figures of `.ci/grain`: each counts what it says, a limit holds, and `--tighten` only lowers
it.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
SOURCE = '''
"""A text."""
from __future__ import annotations
from typing import TYPE_CHECKING
import trainer.below
if TYPE_CHECKING:
    from trainer.types_only import Thing


class Here:
    def choose(self, a, b):
        return 1 if a else 2 if b else f"{a + b} and {b}"


def far(call):
    from tr11ops import back
    back.work(lambda x: x, 2, 3, 4, 5)
    call(1, 2, 3, 4)
'''
FIGURES = {
    "tokens": 92, "density": 6.13, "nested": 1, "conditionals": 100.0, "positional": 1, "lambdas": 1, "classes": 1,
    "files": 5, "circles": 0, "function-circles": 2,
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small project of its own, with limits that it meets exactly."""
    for folder in (".ci", "tr11ops", "trainer"):
        (tmp_path / folder).mkdir()
    for name in ("grain", "import_circles.py"):
        shutil.copy(CI / name, tmp_path / ".ci" / name)
    (tmp_path / "tr11ops" / "here.py").write_text(SOURCE)
    (tmp_path / "tr11ops" / "back.py").write_text("from tr11ops.here import Here\n")
    (tmp_path / "trainer" / "below.py").write_text("")
    (tmp_path / "trainer" / "types_only.py").write_text("import tr11ops.here\n")
    (tmp_path / "trainer" / "__init__.py").write_text("")
    write_limits(tmp_path, FIGURES)
    return tmp_path


def write_limits(tree: Path, limits: dict[str, float]) -> None:
    lines = ["# why", *(f"{name} = {limit}" for name, limit in limits.items())]
    (tree / ".ci" / "grain.toml").write_text("\n".join(lines) + "\n")


def limits(tree: Path) -> dict[str, float]:
    return tomllib.loads((tree / ".ci" / "grain.toml").read_text())


def grain(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / ".ci" / "grain"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_figure_counts_what_it_says(tree: Path) -> None:
    done = grain(tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()} == FIGURES


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_above_its_limit_fails_and_says_where(tree: Path, name: str) -> None:
    write_limits(tree, FIGURES | {name: FIGURES[name] * 0.9 - 0.1})
    done = grain(tree)
    assert done.returncode == 1
    [said, rule, where] = done.stderr.splitlines()
    assert said.startswith(f"grain: {name} is ") and rule.startswith("  rule: ")
    assert where == f"  the worst places: python .ci/grain --where {name}"


def test_a_reader_that_leaves_early_is_no_error(tree: Path) -> None:
    command = [sys.executable, str(tree / ".ci" / "grain")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""


def test_a_commit_may_add_a_little_to_what_grows_with_the_code(tree: Path) -> None:
    write_limits(tree, FIGURES | {"tokens": FIGURES["tokens"] / 1.002})
    assert grain(tree).returncode == 0
    write_limits(tree, FIGURES | {"tokens": FIGURES["tokens"] / 1.004})
    assert grain(tree).returncode == 1


def test_tighten_only_lowers(tree: Path) -> None:
    write_limits(tree, FIGURES | {"tokens": 1000, "density": 6.5, "lambdas": 0})
    assert grain(tree, "--tighten").returncode == 0
    assert limits(tree) == FIGURES | {"lambdas": 0}
    assert (tree / ".ci" / "grain.toml").read_text().startswith("# why\n")


def test_the_places_behind_a_figure(tree: Path) -> None:
    assert grain(tree, "--where", "nested").stdout == "tr11ops/here.py:12\n"
    assert grain(tree, "--where", "positional").stdout == "tr11ops/here.py:17\n"
    assert grain(tree, "--where", "function-circles").stdout == "tr11ops.back  tr11ops.here\n"
    assert grain(tree, "--where", "circles").stdout.strip() == ""


def test_every_figure_has_a_limit_here() -> None:
    assert set(tomllib.loads((CI / "grain.toml").read_text())) == {*FIGURES, "status-modules"}


def test_every_mutant_has_its_place() -> None:
    """`make mutants` takes a quarter of an hour; that its table fits the code is seen here."""
    mutants = runpy.run_path(str(CI / "mutants"), run_name="read")
    every = mutants["MUTANTS"]
    assert len(every) >= 30 and len({mutant.name for mutant in every}) == len(every)
    assert [mutant.name for mutant in every if mutants["place_of"](mutant) is None] == []
    folders = {folder for mutant in every for folder in mutant.folders.split()}
    assert [folder for folder in folders if not (CI.parent / folder).is_dir()] == []
