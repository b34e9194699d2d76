"""What is typed where only the operation is installed: one line says what to install, and nothing was begun."""

from __future__ import annotations

import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.launch.preflight_bench import Bench
from tr11ops.backup.drill import inspect
from tr11ops.base.installed import EXTRA, TRAINING
from tr11ops.runcard.check import Level

LOCAL = ("--scheduler", "local")
OF_A_REHEARSAL = "rehearsal.step_seconds=1"


@pytest.fixture(autouse=True)
def without_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no package of the extra were installed."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in TRAINING else find(name, package)

    monkeypatch.setattr("tr11ops.base.installed.importlib.util.find_spec", found)


@pytest.mark.parametrize(
    "words",
    [
        ("data", "corpus", "--output", "made"),
        ("data", "preprocess", "--input", "a", "--tokenizer", "b", "--output-prefix", "made"),
        ("checkpoints", "inspect", "{folder}"),
        ("checkpoints", "diff", "{folder}", "{folder}"),
        ("checkpoints", "export", "{folder}", "--output", "made"),
        ("checkpoints", "verify", "--all", "--values"),
        ("eval", "--split", "valid"),
        ("train",),
        ("nodes", "bench", *LOCAL),
        ("nodes", "search", *LOCAL),
    ],
    ids=" ".join,
)
def test_what_needs_it_is_refused_in_one_line(bench: LocalBench, words: tuple[str, ...]) -> None:
    place = bench.folder / "run" / "checkpoints" / "main" / "global_step5"
    place.mkdir(parents=True)
    before = sorted(bench.folder.rglob("*"))
    typed = [word.format(folder=place) for word in words]
    if words[0] != "data":
        typed += ["--run", str(bench.card)]
    answer = bench.tr11(*typed)
    [line] = [line for line in answer.err.splitlines() if EXTRA in line]
    assert answer.code == 1 and line.startswith("tr11: ")
    assert "torch" in line or "numpy" in line
    made = set(bench.folder.rglob("*")) - set(before)
    assert not [path for path in made if "scheduler" not in path.parts], "nothing was begun"


def test_with_a_command_of_ones_own_nodes_are_measured(bench: LocalBench) -> None:
    """What it runs needs no torch of ours."""
    words = ("nodes", "bench", "--command", "echo speed 1", "--repeats", "1", *LOCAL)
    answer = bench.tr11(*words, "--run", str(bench.card), "--dry-run")
    assert EXTRA not in answer.err + answer.out and answer.code == 0


def test_a_launch_of_our_trainer_is_refused_and_one_of_another_is_not(bench: LocalBench) -> None:
    answer = bench.launch("--array", "1-2", "--dry-run", "--json")
    value = answer.json
    [check] = [one for one in value["checks"] if one["name"] == "trainer"]
    assert answer.code == 1 and check["level"] == "refused" and EXTRA in check["fix"]
    answer = bench.launch("--array", "1-2", "--dry-run", "--set", OF_A_REHEARSAL)
    assert EXTRA not in answer.out + answer.err


def test_where_the_set_up_may_bring_it_the_launch_is_warned(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for overrides, level in (
        ([], Level.REFUSED),
        (["slurm.setup=['source env']"], Level.WARNING),
        (["slurm.environment.PYTHONPATH='/site/torch'"], Level.WARNING),
    ):
        bench.overrides = overrides
        assert [one.level for one in bench.checks() if one.name == "trainer"] == [level]


def test_an_image_brings_its_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.overrides = ["slurm.container.image='/i.sif'", "slurm.container.runtime='apptainer'"]
    assert bench.facts().missing_packages == ()


def test_doctor_and_version_say_what_there_is(bench: LocalBench) -> None:
    said = "operations alone: no torch, deepspeed, numpy, tokenizers"
    answer = bench.tr11("doctor", *LOCAL)
    assert answer.code == 0 and said in " ".join(answer.out.split())
    assert said in bench.tr11("--version").out
    answer = bench.tr11("doctor", *LOCAL, "--run", str(bench.card), "--json")
    levels = {one["name"]: one["level"] for one in answer.json["checks"]}
    assert (answer.code, levels["packages"], levels["trainer"]) == (1, "ok", "refused")


def test_a_restored_copy_is_not_called_bad_for_what_nothing_here_can_read(tmp_path: Path) -> None:
    """A drill that failed would be an alert about a copy; its digests were compared."""
    (tmp_path / "manifest.json").write_text(json.dumps({"step": "none"}))
    found = inspect(tmp_path)
    assert not found.passed, "what is no manifest is still a fault"
    (tmp_path / "manifest.json").unlink()
    found = inspect(tmp_path)
    assert found.passed and found.not_finite is None
    assert "its numbers were not looked at: torch, numpy not installed here" in found.text
