"""`tr11 import` as it is typed: exit codes, where the card goes, what is shown, and that nothing is
ever run.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.tr11ops.importer.old_scripts import minimal
from tr11ops.base.errors import ScriptError
from tr11ops.cli.main import execute
from tr11ops.importer.importing import import_script, import_text

SCRIPTS = Path(__file__).parents[2] / "data" / "slurm_scripts"
BIG = str(SCRIPTS / "large-bf16.slurm")
SMALL = str(SCRIPTS / "small-twenty-hours.slurm")


def test_a_complete_card_goes_to_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "card.toml"
    assert execute(["import", BIG, "-o", str(card)]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and shown.out.rstrip().endswith("nothing is left to decide")
    assert max(map(len, shown.out.splitlines()[:-1])) <= 100  # the last one holds the card's path
    assert tomllib.loads(card.read_text())["model"]["layers"] == 70
    assert [path.name for path in tmp_path.iterdir()] == ["card.toml"]


def test_the_card_without_a_file_is_all_there_is_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert execute(["import", BIG]) == 0
    shown = capsys.readouterr()
    assert tomllib.loads(shown.out)["run"]["name"] == "tr11-176B-ml"
    assert "Warnings" in shown.err


def test_a_person_must_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = tmp_path / "card.toml"
    assert execute(["import", SMALL, "-o", str(card)]) == 1
    shown = capsys.readouterr().out
    assert (
        "   52  --exit-duration-in-mins 5990 is not below the time limit of 1200 minutes" in shown
    )
    assert "a person must look at 1 error" in shown
    assert tomllib.loads(card.read_text())["run"]["exit_duration_minutes"] == 1185
    assert "DECIDE, line 52" in card.read_text()
    assert (
        execute(
            ["import", SMALL, "--set", "run.exit_duration_minutes=1100", "-o", str(card), "--force"]
        )
        == 0
    )
    assert tomllib.loads(card.read_text())["run"]["exit_duration_minutes"] == 1100


def test_a_card_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = tmp_path / "card.toml"
    card.write_text("mine")
    assert execute(["import", BIG, "-o", str(card)]) == 2
    assert capsys.readouterr().err == f"tr11: {card}: is already there; --force writes over it\n"
    assert card.read_text() == "mine"
    assert execute(["import", BIG, "-o", str(card), "--force"]) == 0
    assert card.read_text() != "mine" and card.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["card.toml"]


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = tmp_path / "card.toml"
    assert execute(["import", SMALL, "--json", "-o", str(card)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["exit_code"], found["card"]) == (1, 1, str(card))
    assert found["text"] == card.read_text()
    layers = next(item for item in found["placed"] if item["key"] == "model.layers")
    assert (layers["value"], layers["source"], layers["line"]) == (24, "--num-layers", 33)
    assert {item["code"] for item in found["defects"] if item["severity"] == "error"} == {
        "exit-minute-beyond-limit"
    }
    assert {"option", "value", "line", "reason", "why", "key"} == set(found["unplaced"][0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"A='x\n", "line 1: a single quote is not closed"),
        (b"A=x\n" + b"A=$A$A\n" * 60, "line 18: a value grows beyond all measure"),
        (b"\x7fELF\0\0", "line 1: it is not text"),
        (b"echo hello\n", "no command in it starts a training"),
        (None, "it does not exist"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, card = tmp_path / "old.slurm", tmp_path / "card.toml"
    if content is not None:
        script.write_bytes(content)
    assert execute(["import", str(script), "-o", str(card)]) == 2
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and shown.err.startswith(f"tr11: {script}: {words}")
        and len(shown.err.splitlines()) == 1
    )
    assert not card.exists()


def test_a_wrong_override_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["import", BIG, "--set", "model.layer=3"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "did you mean 'model.layers'" in shown.err


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = tmp_path / "no" / "card.toml"
    assert execute(["import", BIG, "-o", str(card)]) == 2
    assert capsys.readouterr().err == f"tr11: {card}: No such file or directory\n"


def test_nothing_of_the_script_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    harm = f"touch {mark}"
    text = Path(BIG).read_text()
    text = text.replace(
        "set -x -e\n",
        f"set -x -e\n{harm}\nX=$({harm})\nY=`{harm}`\neval '{harm}'\nbash -c \"{harm}\"\n: > {mark}\n",
    )
    text = text.replace("SAVE_EVERY=100", f"SAVE_EVERY=$((100 + a[$({harm})]))")
    script = tmp_path / "old.slurm"
    script.write_text(text)
    assert execute(["import", str(script)]) == 1
    assert "checkpoint.interval" in capsys.readouterr().err
    assert not mark.exists()


def test_sourced_files_beside_the_script(tmp_path: Path) -> None:
    """What they set was unknown; and what is not at hand was not told."""
    (tmp_path / "shape.sh").write_text("LAYERS=6\nexport SEED_OF_ENV=7\n")
    (tmp_path / "more.sh").write_text("WIDTH=128\n")
    before = '. shape.sh\nsource "$(dirname "$0")/more.sh"\nsource /etc/site.sh\n. "$HOME/own.sh"'
    script = tmp_path / "old.slurm"
    script.write_text(minimal("--num-layers $LAYERS --hidden-size $WIDTH", before=before))
    found = import_script(script)
    assert (found.tables["model"]["layers"], found.tables["model"]["hidden_size"]) == (6, 128)
    not_read = {item.value: item.line for item in found.unplaced if "not read" in item.why}
    assert not_read == {"/etc/site.sh": 8, "${HOME}/own.sh": 9}
    assert "SEED_OF_ENV" not in found.text  # the set-up's own line exports it
    assert found.tables["slurm"]["setup"][0] == ". shape.sh"


def test_a_text_that_a_script_submits_is_the_script() -> None:
    """Its `#SBATCH` lines too, with what the shell around it puts into them."""
    document = minimal("--lr $RATE", head="#SBATCH --nodes=$NODES")
    for end in ("END", "'END'"):
        text = f"#!/bin/bash\nNODES=2\nexport RATE=2e-4\nsbatch <<{end}\n{document}\nEND\n"
        found = import_text(text, "old.slurm")
        assert found.tables["slurm"]["time_limit"] == "1:00:00"
        assert found.tables["schedule"]["learning_rate"] == 2e-4
        assert (found.tables["slurm"].get("nodes") == 2) == (end == "END")
        assert not any("comment" in item.what for item in found.defects)


def test_what_read_may_change_is_told() -> None:
    """In a condition the value before it was taken without a word."""
    for way in ("read LR < f", "printf -v LR 3", "for LR in 1 2; do :; done", "((LR = $(date)))"):
        before = f"LR=2e-4\nif [ -f f ]; then\n {way}\nfi"
        found = import_text(minimal("--lr $LR", before=before), "old.slurm")
        assert found.tables["schedule"]["learning_rate"] == 2e-4
        (told,) = [item for item in found.unplaced if item.option == "LR"]
        assert told.key == "schedule.learning_rate" and "value before it was taken" in told.why


@pytest.mark.parametrize("dtype", ["--bf16", ""])
def test_a_loss_scale_without_fp16_is_left_out(dtype: str) -> None:
    """Megatron takes it and multiplies; the card refuses the key."""
    script = minimal("--loss-scale 12")
    found = import_text(script.replace("--bf16", dtype), "old.slurm")
    assert "loss_scale" not in found.tables["precision"]
    assert [item.why for item in found.unplaced if item.option == "--loss-scale"] == [
        "without fp16 it changes nothing but rounding"
    ]
    kept = import_text(script.replace("--bf16", "--fp16"), "old.slurm")
    assert kept.tables["precision"]["loss_scale"] == 12.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "f() {\n torchrun x.py --num-layers 2 --hidden-size 4 --lr 1\n}\n",
            "nothing calls f of line 1",
        ),
        (". other.sh\n", "line 1 sources other.sh, which is not at hand"),
        ("sbatch --wait -n 2 <<END\nsrun x\nEND\n", "line 1 submits another script"),
    ],
)
def test_why_there_is_no_training(tmp_path: Path, text: str, words: str) -> None:
    script = tmp_path / "old.slurm"
    script.write_text(text)
    with pytest.raises(ScriptError) as caught:
        import_script(script)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        ('{\n "pipe-parallel-size": 2, # it\'s\n "num-layers": 4}\n', "GPT-NeoX"),
        ("general:\n  run: a\nparallelism:\n  tp: 2\n", "nanotron"),
        ("trainer:\n  devices: 8\n", "NeMo"),
        ("model:\n  d_model: 64\n", "OLMo"),
        ("a: 1\n", "another trainer"),
    ],
)
def test_settings_of_other_trainers_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, trainer: str
) -> None:
    """They were read as shell text: a quote that is not closed, or no training."""
    (tmp_path / "model.yml").write_text(text)
    assert execute(["import", str(tmp_path / "model.yml")]) == 2
    assert f"settings of {trainer} in YAML" in capsys.readouterr().err
