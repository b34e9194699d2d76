"""`tr11 import` as it is typed: exit codes, where the card goes, what is shown, and that nothing is
ever run.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.tr11ops.importer.old_scripts import NAMES, SCRIPTS, minimal
from tr11ops.base.errors import ScriptError
from tr11ops.cli.main import execute
from tr11ops.importer.importing import import_script, import_text, read_script
from tr11ops.importer.traced import LARGEST_SCRIPT_BYTES
from tr11ops.runcard.toml_writer import toml_value, write_card
from trainer.config.card import CardError

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


# ---------------------------------------------------------------------------
# Files that are no scripts, damaged scripts, and what the writer makes of odd values.


# ----------------------------------------------------------------------------- hostile files
def test_files_that_are_no_scripts(tmp_path: Path) -> None:
    contents = {
        "binary": (b"#!/bin/bash\n\0\1\2", "line 2: it is not text"),
        "latin": (b"#!/bin/bash\n# \xe9\n", "line 2: it is not UTF-8 text"),
        "huge": (b"#\n" * (LARGEST_SCRIPT_BYTES // 2 + 1), "it is larger than"),
        "empty": (b"", "no command in it starts a training"),
        "train": (b"source real.slurm\n", "line 1 sources real.slurm"),
    }
    for name, (content, words) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ScriptError) as caught:
            import_script(tmp_path / name)
        assert words in str(caught.value)
    with pytest.raises(ScriptError, match="folder"):
        read_script(tmp_path)
    with pytest.raises(ScriptError, match="does not exist"):
        read_script(tmp_path / "no")


@pytest.mark.parametrize(
    ("settings_text", "words"),
    [
        ("{", "are not JSON"),
        ("[1]", "are no JSON object"),
        ('{"a":' * 9000 + "1" + "}" * 9000, "nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "huge number"),
        ("{" + ",".join(f'"k{i}": 1' for i in range(1500)) + "}", "more than 1000 keys"),
    ],
)
def test_deepspeed_settings_that_are_none(settings_text: str, words: str) -> None:
    text = minimal(
        "--deepspeed --deepspeed_config d.json", before=f"cat <<'E' > d.json\n{settings_text}\nE"
    )
    with pytest.raises(ScriptError) as caught:
        import_text(text, "x")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_deepspeed_settings_with_unknown_parts() -> None:
    before = (
        'cat <<E > d.json\n{"train_batch_size": $N, "gradient_clipping": 1.0, "name": "$WHO"}\nE'
    )
    found = import_text(
        minimal("--deepspeed --deepspeed_config d.json --clip-grad 1.0", before=before), "x"
    )
    assert [item.option for item in found.decisions] == ["DeepSpeed name"]


def test_an_override_that_is_none_is_refused() -> None:
    with pytest.raises(CardError, match="is not a known key"):
        import_text(minimal(), "x", ["model.layerss=3"])


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.sampled_from(NAMES), st.data())
def test_damaged_scripts_are_read_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    text = (SCRIPTS / f"{name}.slurm").read_text()
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 300))
    put = data.draw(st.text("$\"'`{}()\\\n#=- ab1\x1b\x7fé", max_size=12))
    damaged = text[:start] + put + text[start + length :]
    try:
        found = import_text(damaged, name)
    except ScriptError as error:
        assert "\n" not in str(error)
    else:
        assert tomllib.loads(found.text) == found.tables


# ----------------------------------------------------------------------------- the writer
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)


KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.dictionaries(KEYS, st.one_of(SCALARS, st.lists(SCALARS, max_size=4)), max_size=5),
    st.text(max_size=20),
)
def test_what_is_written_is_read_back(table: dict[str, Any], remark: str) -> None:
    tables = {"slurm": {"nodes": 1, "environment": table}, "batch": {"ramp": table}}
    remarks = {f"slurm.environment.{key}": remark for key in table} | {
        "slurm.nodes": remark,
        "batch.ramp": remark,
    }
    assert tomllib.loads(write_card(tables, remarks, [remark])) == tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (220_000_000, "220_000_000"),
        (2048, "2048"),
        (6e-5, "6e-5"),
        (1e-8, "1e-8"),
        (0.1, "0.1"),
        (1.0, "1.0"),
        (1e300, "1e300"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert toml_value(value) == text
