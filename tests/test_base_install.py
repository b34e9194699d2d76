"""The base install operates: from the wheel, without torch, deepspeed and what only the trainer loads, on each Python
that pyproject.toml names.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from pathlib import Path

import pytest

from tests.base_install import (
    ROOT,
    VERSIONS,
    BaseInstall,
    build_wheel,
    chosen,
    chosen_one,
    files_of,
    interpreter,
)
from tests.plugins.twin_fixture import require_slurm
from tests.waiting import until

ABSENT = ("torch", "deepspeed", "numpy", "tokenizers", "safetensors", "tensorboard", "transformers")
# Loads each module of the operation, and of the trainer what the operation may read; shows each command's page.
EVERYTHING = f"""
OF_AN_EXTRA = ("serve.app", "top.app")  # tr11[serve], tr11[top]
import importlib, importlib.util, pkgutil, sys
import tr11ops, trainer.config, trainer.contract, trainer.schedule
assert not [name for name in {ABSENT} if importlib.util.find_spec(name)]
for package in (tr11ops, trainer.config, trainer.contract, trainer.schedule):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", *OF_AN_EXTRA)):
            importlib.import_module(module.name)
from tr11ops.cli.main import COMMANDS, execute, load
def pages(words, command):
    assert execute([*words, "--help"]) == 0, words
    for name, inner in getattr(command, "commands", {{}}).items():
        pages([*words, name], inner)
for name in COMMANDS:
    pages([name], load(name))
assert execute(["--help"]) == 0
"""
# Of what is recorded of a run: all screens but those in which our own trainer would be launched from here.
SCREENS = "not (stalled or down or held or finished or damaged or older or launch or doctor)"
UNITS = tuple(f"tests/tr11ops/{name}" for name in ("dialects",))
CARD = ("init", "--preset", "toy", "--yes", "--set", "run.name=toy", "--mail", "me@example.org")
REHEARSED = (
    "slurm.nodes=2", "slurm.workers_per_node=1", "parallel.tensor=1", "parallel.pipeline=2",
    "rehearsal.step_seconds=0.05", "rehearsal.start_seconds=0.2", "rehearsal.save_seconds=0.1",
    "rehearsal.evaluation_seconds=0.1", "batch.train_samples=1280", "schedule.decay_samples=1200",
)  # fmt: skip
LOCAL = ("--scheduler", "local")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", params=chosen())
def base(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> BaseInstall:
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"no Python {request.param} on this machine")
    return BaseInstall(
        request.param, python, wheel, tmp_path_factory.mktemp(f"base-{request.param}")
    )


class Typed:
    """Commands that are typed in a folder; what each printed, where its exit code is as it should be."""

    def __init__(self, base: BaseInstall, folder: Path) -> None:
        self.base = base
        self.folder = folder
        self.environment: dict[str, str] = {}

    def __call__(self, *words: str, code: int | None = 0) -> str:
        done = self.base.run(["tr11", *words], self.folder, self.environment)
        assert code in (None, done.returncode), (words, done)
        assert "Traceback" not in done.stdout + done.stderr
        return (
            done.stdout
            if "--json" in words or words[:2] == ("twin", "env")
            else done.stdout + done.stderr
        )


def test_the_pythons_are_those_that_the_package_names() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    head = "Programming Language :: Python :: 3."
    known = {
        f"3.{line.removeprefix(head)}" for line in named["classifiers"] if line.startswith(head)
    }
    assert known == set(VERSIONS) and named["requires-python"] == f">={VERSIONS[-1]}"


def test_the_wheel_has_every_file_that_a_command_reads(wheel: Path) -> None:
    there = files_of(wheel)
    shipped = {"slurm", "runbooks", "cron", "container"}
    missing = []
    for top in ("tr11ops", "trainer", *sorted(shipped)):
        for path in (ROOT / top).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and "__pycache__" not in path.parts and path.name != ".keep":
                kept = f"tr11ops/shipped/{name}" if top in shipped else name
                missing += [name] if kept not in there else []
    assert missing == []
    assert {
        "tr11ops/dialects/families/huggingface.toml",
        "tr11ops/shipped/runbooks/README.md",
    } <= there


def test_everything_loads_and_shows_its_page(base: BaseInstall) -> None:
    done = base.run(["python", "-P", "-c", EVERYTHING], base.folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_screens_of_a_recorded_run_and_units_are_the_same(base: BaseInstall) -> None:
    """On the newest Python that is here: what they say does not depend on it."""
    if base.version != chosen_one():
        pytest.skip(f"they are tried on {chosen_one()}")
    words = ["python", "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = base.run([*words, "tests/pins/test_screens.py", *UNITS, "-k", SCREENS], base.tree)
    assert done.returncode == 0, done.stdout[-3000:]


def test_what_needs_the_trainer_is_refused(base: BaseInstall, tmp_path: Path) -> None:
    tr11 = Typed(base, tmp_path)
    assert "operations alone: no torch, deepspeed" in tr11("--version")
    tr11(*CARD, *LOCAL)
    for words in (
        ("launch", "--array", "1-2", "--dry-run", *LOCAL),
        ("data", "corpus", "--output", "made"),
    ):
        assert 'pip install "tr11[trainer]"' in tr11(*words, code=1)
    assert "huggingface" in tr11("trainer", "list")
    log = ROOT / "tests/data/diagnose/blind/one/001-moe-imbalance-single-rank-oom.log"
    assert "root cause" in tr11("diagnose", str(log), code=None)


def test_a_run_is_launched_followed_and_explained(base: BaseInstall, tmp_path: Path) -> None:
    """By the stand-in of a trainer: the agents on the nodes do without torch too."""
    if base.version != chosen_one():
        pytest.skip(f"it is tried on {chosen_one()}")
    require_slurm()
    tr11 = Typed(base, tmp_path)
    # Slurm's sockets have short paths
    with tempfile.TemporaryDirectory(prefix="tr11-", dir="/tmp") as twins:
        twin = ("--name", "base", "--dir", twins)
        tr11("twin", "up", "--nodes", "2", "--gpus", "0", *twin)
        try:
            for line in tr11("twin", "env", *twin).splitlines():
                name, _, value = line.removeprefix("export ").partition("=")
                tr11.environment[name] = value.strip("'\"")
            tr11(
                *CARD,
                "--output",
                "tr11.toml",
                *(word for key in REHEARSED for word in ("--set", key)),
            )
            tr11("doctor")
            tr11("launch", "--array", "1-1", "--yes")
            until(
                lambda: json.loads(tr11("status", "--json", code=None))["verdict"] == "finished",
                seconds=120,
            )
            for words in (
                ("status",), ("diagnose",), ("goodput",), ("report", "--output", "report.html"), ("pulse", "--dry-run"),
                ("checkpoints", "verify", "latest"), ("handover", "--dry-run"), ("nodes", "list"), ("runbook", "node-lost"),
            ):  # fmt: skip
                tr11(*words, code=0)
        finally:
            tr11("twin", "down", *twin)
