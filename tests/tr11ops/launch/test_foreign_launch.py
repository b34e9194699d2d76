"""What a launch says of a trainer that is not tr11's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.tr11ops.foreign_card import FOREIGN
from tests.tr11ops.trainers.holding import Bench
from tr11ops.cli.main import execute
from tr11ops.launch.foreign import foreign_checks, look_at_trainer
from tr11ops.observe.lost_checkpoints import find_lost
from tr11ops.runcard.card import load_card
from tr11ops.runcard.check import Level

CARD = FOREIGN.replace('"{folder}"]', '"{folder}", "--enable_jit_checkpoint"]')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tr11.toml"
    path.write_text(f'{CARD}python = "{sys.executable}"\n', encoding="utf-8")
    (tmp_path / "train.py").write_text("print()\n", encoding="utf-8")
    return path


def checks(path: Path, *overrides: str) -> dict[str, tuple[Level, str]]:
    card = load_card(path, overrides)
    return {one.name: (one.level, one.text) for one in foreign_checks(card, look_at_trainer(card))}


def test_a_sound_one_is_told_how_it_is_stopped(path: Path) -> None:
    assert checks(path) == {
        "trainer": (
            Level.OK,
            "huggingface, level 2: started; its ranks do not agree on the step at which they save: a stop"
            " ends it after its next checkpoint; not known: how often it saves",
        ),
        "trainer.resume": (Level.OK, "a resume adds: --resume_from_checkpoint PATH"),
    }


def test_words_that_the_script_does_not_know_are_told_before_the_first_launch(path: Path) -> None:
    """Its first launch is fine: each later one would end in its own parser."""
    text = "parser = argparse.ArgumentParser()\nparser.add_argument('--output_dir')\n"
    (path.parent / "train.py").write_text(text)
    level, said = checks(path)["trainer.resume"]
    assert level is Level.WARNING and "train.py seems not to know" in said
    found = checks(path, "trainer.resume=[]")["trainer.resume"]
    assert found[0] is Level.OK and "adds no words" in found[1]


def test_one_that_cannot_be_asked_says_what_a_stop_costs(path: Path) -> None:
    found = checks(path, 'trainer.command=["train.py"]', "trainer.checkpoint_minutes=10")
    assert found["trainer"][1] == (
        "huggingface, level 2: started; it cannot be asked to save without --enable_jit_checkpoint: a stop"
        " ends it after its next checkpoint"
    )


@pytest.mark.parametrize(
    ("override", "name", "level", "said"),
    [
        ("trainer.needs=['/no/data']", "trainer.needs", Level.REFUSED, "not there: /no/data"),
        ("trainer.command=['other.py']", "trainer.needs", Level.REFUSED, "other.py"),
        ("trainer.directory=/no/where", "trainer.needs", Level.REFUSED, "/no/where"),
        ("trainer.python=/no/python", "trainer.python", Level.REFUSED, "is no program"),
        (
            "trainer.command=['train.py', '--max-restarts=3']",
            "trainer.command",
            Level.REFUSED,
            "so does tr11",
        ),
        ("trainer.folder=none", "trainer.folder", Level.WARNING, "not known"),
    ],
)
def test_what_stands_against_a_start(
    path: Path, override: str, name: str, level: Level, said: str
) -> None:
    found = checks(path, override)
    assert found[name][0] is level and said in found[name][1]


def test_what_its_setup_brings_is_no_refusal(path: Path) -> None:
    found = checks(path, "trainer.python=no-such-python", "slurm.setup=['module load x']")
    assert found["trainer.python"][0] is Level.WARNING


def test_a_broken_newest_checkpoint_is_said_before(path: Path) -> None:
    for step in (8, 16):
        folder = path.parent / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "checkpoint-is-incomplete.txt").touch()
    level, said = checks(path, "trainer.checkpoints={quiet=0}")["trainer.checkpoints"]
    assert level is Level.WARNING and "checkpoint-16, which is broken" in said


def test_the_plan_is_shown_and_nothing_is_made(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["launch", "--dry-run", "--scheduler", "local", "--run", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "1 x 2 workers = 2 ranks of another trainer" in shown
    assert "its ranks do not agree on the step at which they save" in shown
    assert "a resume adds: --resume_from_checkpoint PATH" in shown
    assert not (path.parent / "run").exists()


def test_what_is_asked_of_a_training_while_it_trains_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path.parent / "run").mkdir()
    for command in ("profile", "compute-check"):
        assert execute([command, "--run", str(path), "--scheduler", "local"]) == 1
        assert "only for tr11's own trainer" in capsys.readouterr().err


def test_its_level_stands_in_the_status(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path.parent / "run").mkdir()
    execute(["status", "--json", "--run", str(path), "--scheduler", "local"])
    trainer = json.loads(capsys.readouterr().out)["trainer"]
    assert (trainer["dialect"], trainer["level"]) == ("huggingface", 2)
    assert trainer["unknown"] == ["how often it saves"]


def test_a_checkpoint_has_its_trainers_name_on_every_screen(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(path.parent)
    bench.save(30, 40)
    bench.hold()
    (path.parent / "run" / "state" / "submissions").mkdir(parents=True)
    words = ("--run", str(path), "--scheduler", "local", "--dry-run")
    for command in ("kill", "pause", "resume", "launch"):
        capsys.readouterr()
        execute([command, *words])
        said = "".join(capsys.readouterr())
        assert "checkpoint-40" in said and "global_step" not in said, said


def test_what_is_lost_has_its_trainers_name(path: Path) -> None:
    card = load_card(path)
    card.paths.digest_record("global_step40").parent.mkdir(parents=True)
    card.paths.digest_record("global_step40").write_text("{}", encoding="utf-8")
    (path.parent / "out").mkdir()
    lost = find_lost(card)
    assert lost is not None and "but checkpoint-40 was saved" in lost.rule
