"""`tr11 checkpoints`: which checkpoint STEP means, the list, and what the child is told and says; the
words of `import` and `export` reach the commands, with the card.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forks import exit_code, forked
from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.saving import save
from tests.tr11ops.launch.run_inputs import write_checkpoint
from tests.trainer.checkpoint.synthetic import Model, Shape, state
from tr11ops.base.errors import Refusal
from tr11ops.cli.checkpoints_keep import resolve_step
from tr11ops.cli.common import read_card
from tr11ops.cli.main import execute, load
from trainer.checkpoint.__main__ import COMMANDS, explain
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.origin import BranchOrigin

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkpoints(bench: LocalBench) -> Path:
    return bench.folder / "run" / "checkpoints" / "main"


# ----------------------------------------------------------------------------- STEP
def test_step_is_a_number_latest_a_name_or_a_path(bench: LocalBench, checkpoints: Path) -> None:
    places = [write_checkpoint(checkpoints, step).resolve() for step in (10, 20)]
    card = read_card(str(bench.card))
    assert resolve_step(card, "10") == resolve_step(card, "global_step10") == places[0]
    assert resolve_step(card, "latest") == places[1]
    assert resolve_step(card, str(places[0])) == places[0]
    assert resolve_step(card, "run/checkpoints/main/global_step20") == places[1]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("30", 1, "global_step30 does not exist; there are 10, 20 (tr11 checkpoints list)"),
        ("newest", 2, "STEP = 'newest': is not a step; use a number, latest, or a folder's path"),
        ("-1", 2, "is not a step"),
        ("²", 2, "is not a step"),
        ("", 2, "is not a step"),
        ("9" * 5000, 2, "is not a step"),
        ("./nowhere", 1, "nowhere is not a folder"),
    ],
)
def test_a_step_that_is_not_there(
    bench: LocalBench, checkpoints: Path, text: str, code: int, message: str
) -> None:
    for step in (10, 20):
        write_checkpoint(checkpoints, step)
    with pytest.raises(Refusal) as caught:
        resolve_step(read_card(str(bench.card)), text)
    assert message in str(caught.value) and caught.value.exit_code == code


def test_latest_without_a_checkpoint_and_garbled(bench: LocalBench, checkpoints: Path) -> None:
    card = read_card(str(bench.card))
    with pytest.raises(Refusal, match="nothing was saved there yet"):
        resolve_step(card, "latest")
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest").write_text("the last one")
    with pytest.raises(Refusal, match="give the step's number"):
        resolve_step(card, "latest")
    with pytest.raises(Refusal, match="there is none yet"):
        resolve_step(card, "5")


# ----------------------------------------------------------------------------- list
def test_list(bench: LocalBench, checkpoints: Path) -> None:
    words = ["checkpoints", "list", "--run", str(bench.card)]
    empty = bench.tr11(*words)
    assert empty.code == 0 and empty.out == f"no checkpoint in {checkpoints}\n"
    for step in (10, 20):
        write_checkpoint(checkpoints, step)
    answer = bench.tr11(*words)
    assert answer.code == 0
    head, *lines = answer.out.splitlines()
    assert "2 of them, 258 B, 1 x 1 x 1 (tensor x pipeline x data)" in lines
    assert head.split() == ["step", "size", "tokens", "age", "state", "read", "copies", "kept"]
    assert lines[0].split()[0] == "10" and "  whole  " in lines[0] and lines[0].endswith("use")
    assert lines[1].endswith("latest") and "  whole  " in lines[1]
    value = bench.tr11(*words, "--json").json
    assert (value["schema"], value["latest"], value["fault"]) == (1, 20, None)
    one = value["checkpoints"][1]
    assert (
        one["step"],
        one["complete"],
        one["bytes"],
        one["consumed_samples"],
        one["is_latest"],
    ) == (
        20,
        True,
        129,
        20,
        True,
    )
    assert one["layout"] == "tr11" and one["topology"] == {"tensor": 1, "pipeline": 1, "data": 1}


def test_list_tells_what_another_runs_checkpoint_it_all_began_with(
    bench: LocalBench, checkpoints: Path
) -> None:
    words = ["checkpoints", "list", "--run", str(bench.card)]
    write_checkpoint(checkpoints, 10)
    assert bench.tr11(*words, "--json").json["origin"] is None
    paths = run_directory(bench).paths
    BranchOrigin(
        "/big/checkpoints/main", 30, "big/main", True, False, 5.0, "3", ("seed/main step 7",)
    ).write(paths)
    said = " ".join(bench.tr11(*words).out.split())
    assert "began with big/main step 30 (weights alone); that run with seed/main step 7" in said
    assert bench.tr11(*words, "--json").json["origin"]["step"] == 30
    paths.origin.write_text("[]")
    assert "what the run began with is not known" in bench.tr11(*words).out


def test_list_tells_what_is_not_whole(bench: LocalBench, checkpoints: Path) -> None:
    words = ["checkpoints", "list", "--run", str(bench.card)]
    short, partial, foreign = (write_checkpoint(checkpoints, step) for step in (30, 10, 20))
    (short / "weights" / "part.bin").write_bytes(b"x")
    (partial / "manifest.json").unlink()
    (foreign / "manifest.json").unlink()
    (foreign / "mp_rank_00_model_states.pt").write_bytes(b"12345")
    (checkpoints / "latest").write_text("global_step30")
    answer = bench.tr11(*words)
    assert (
        answer.code == 1
        and "latest names global_step30, from which no restart goes on" in answer.err
    )
    states = {line.split()[0]: line for line in answer.out.splitlines()}
    assert "it is not whole: weights/part.bin" in answer.err
    assert (
        "NOT WHOLE" in states["30"]
        and states["30"].endswith("latest")
        and "NOT WHOLE" in states["10"]
    )
    assert "no manifest" in states["20"]
    rows = {row["step"]: row for row in bench.tr11(*words, "--json").json["checkpoints"]}
    assert [rows[step]["complete"] for step in (10, 20, 30)] == [False, None, False]
    assert rows[20]["layout"] == "deepspeed" and rows[20]["bytes"] == 134
    for text, message in (
        ("global_step7", "names global_step7, which does not exist"),
        ("what", "expected global_stepN"),
    ):
        (checkpoints / "latest").write_text(text)
        answer = bench.tr11(*words)
        assert answer.code == 1 and message in answer.err and "20" in answer.out
    (checkpoints / "latest").unlink()
    assert "a restart takes the newest resumable one" in bench.tr11(*words).err


def test_list_of_a_folder_that_cannot_be_read(bench: LocalBench, checkpoints: Path) -> None:
    checkpoints.parent.mkdir(parents=True)
    checkpoints.write_text("a file in the way")
    answer = bench.tr11("checkpoints", "list", "--run", str(bench.card))
    assert answer.code == 3 and "nothing may be concluded" in answer.err


# ----------------------------------------------------------------------------- the child
def test_a_real_child(bench: LocalBench, checkpoints: Path) -> None:
    save(checkpoints, 20)
    words = ["checkpoints", "inspect", "latest", "--run", str(bench.card), "--tensors", "nothing"]
    done = subprocess.run(
        [sys.executable, "-c", "from tr11ops.cli.main import run; run()", *words], cwd=bench.folder,
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "tr11: --tensors 'nothing': no tensor of this checkpoint has such a name\n"
    )


@pytest.mark.usefixtures("near")
def test_inspect(bench: LocalBench, checkpoints: Path) -> None:
    place, run = save(checkpoints, 20), ("--run", str(bench.card))
    answer = bench.tr11(
        "checkpoints", "inspect", "latest", *run, "--tensors", "layer.0.norm*", "--verify", "--json"
    )
    assert answer.code == 0, answer.err
    value = answer.json
    assert (value["schema"], value["step"], value["layout"], value["verified"]) == (
        1,
        20,
        "tr11",
        "digests",
    )
    assert (
        value["optimizer_step"],
        value["cursor"]["consumed_samples"],
        value["random_state_ranks"],
    ) == (1007, 160, 1)
    assert {entry["name"] for entry in value["tensors"]} == {
        f"layer.0.norm.weight{kind}" for kind in ("", "/fp32", "/exp_avg", "/exp_avg_sq")
    }
    held = {item.name: item.tensor.double() for item in state(Model(), Shape(), 0, 7).weights}[
        "layer.0.norm.weight"
    ]
    shown = next(entry for entry in value["tensors"] if entry["part"] == "weights")
    assert (shown["min"], shown["max"], shown["shape"]) == (held.min(), held.max(), [12])
    assert shown["mean"] == pytest.approx(held.mean().item()) and shown["l2_norm"] == pytest.approx(
        held.norm().item()
    )
    text = bench.tr11("checkpoints", "inspect", str(place), "--tensors", "layer.0.norm.weight").out
    assert (
        f"{held.min():13.6e} {held.max():13.6e}" in text and "step       20, 1007 updates" in text
    )
    assert (
        len(bench.tr11("checkpoints", "inspect", str(place)).out.splitlines())
        > len(value["tensors"]) * 10
    )

    path = place / "cursor.json"
    path.write_text(path.read_text().replace("160", "161"))
    assert bench.tr11("checkpoints", "inspect", str(place)).code == 0  # of the same size
    answer = bench.tr11("checkpoints", "inspect", str(place), "--verify")
    assert (
        answer.code == 1
        and "FAULT      cursor.json: its digest differs from the manifest's" in answer.out
    )
    path.unlink()
    answer = bench.tr11("checkpoints", "inspect", "20", *run)
    assert answer.code == 1 and "FAULT      cursor.json: No such file" in answer.out


@pytest.mark.usefixtures("near")
def test_diff(bench: LocalBench, checkpoints: Path) -> None:
    save(checkpoints, 20)
    same, other = save(bench.folder / "same", 20), save(bench.folder / "other", 20, spoil=True)
    run = ("--run", str(bench.card))
    answer = bench.tr11("checkpoints", "diff", "20", str(same), *run)
    assert answer.code == 0 and "EQUAL: " in answer.out
    answer = bench.tr11("checkpoints", "diff", "latest", str(other), *run, "--json")
    assert answer.code == 1 and [finding["kind"] for finding in answer.json["findings"]] == [
        "weight"
    ]
    assert answer.json["first_divergence"]["delta"]["different"] == 1
    assert (
        bench.tr11("checkpoints", "diff", "latest", str(other), *run, "--tolerance", "1").code == 0
    )
    answer = bench.tr11("checkpoints", "diff", f"{other}:4:on-save", str(same))
    assert answer.code == 1 and "has no dump of 4:on-save; it holds no dump" in answer.err


@pytest.mark.usefixtures("near")
def test_a_path_needs_no_card_and_refusals_are_one_line(
    bench: LocalBench, checkpoints: Path
) -> None:
    bench.card.unlink()
    place = save(checkpoints, 20)
    assert bench.tr11("checkpoints", "inspect", str(place)).code == 0
    for words, code in (
        (["inspect", "20"], 2), (["inspect"], 2), (["inspect", str(checkpoints)], 1),
        (["diff", str(place)], 2), (["diff", str(place), str(place), "--tolerance", "-1"], 2),
        (["diff", str(place), str(checkpoints)], 1), (["diff", f"{place}:x", str(place)], 2),
    ):  # fmt: skip
        answer = bench.tr11("checkpoints", *words)
        assert (answer.code, answer.out) == (code, ""), words
        assert answer.err.startswith("tr11: ") and len(answer.err.splitlines()) == 1, answer.err
    answer = bench.tr11("checkpoints", "inspect", str(checkpoints), "--json")
    assert answer.json["error"]["exit_code"] == 1


# ----------------------------------------------------------------------------- both command lines
# `values` is asked by `verify --values` and `backup restore --values`, and is no command of its own.
def test_each_command_of_the_trainer_is_offered() -> None:
    group: Any = load("checkpoints")
    assert set(COMMANDS) - {"values"} <= set(group.commands)


def test_only_the_command_that_is_asked_for_is_imported() -> None:
    """In a fork that has torch, and of the trainer's checkpoints nothing any more."""

    def build() -> None:
        for name in [name for name in sys.modules if f"{name}.".startswith("trainer.checkpoint.")]:
            del sys.modules[name]
        request = {"command": "inspect", "as_json": False, "place": "x"}
        assert (
            importlib.import_module("trainer.checkpoint.__main__").main([json.dumps(request)]) == 1
        )
        found = [name for name in sys.modules if name.startswith("trainer.checkpoint.commands.")]
        assert found == ["trainer.checkpoint.commands.inspect"]

    assert exit_code(forked(build)) == 0


def test_tr11_stays_free_of_the_heavy_libraries() -> None:
    code = "import sys, tr11ops.cli.checkpoints; print(sorted({'torch', 'numpy', 'trainer.checkpoint'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "code"),
    [(PermissionError(13, "Permission denied", "/c/x"), 3), (OSError(5, "Input/output error", "/c/x"), 3),
     (OSError(28, "No space left on device", "/c/x"), 1), (KeyboardInterrupt(), 1), (RuntimeError("a\nb"), 1)],
)  # fmt: skip
def test_what_could_not_be_observed_is_told_from_what_is_wrong(
    error: BaseException, code: int
) -> None:
    found, text = explain(error)
    assert found == code and "\n" not in text


SETTINGS = (
    "run.directory=run", "model.hidden_size=48", "model.attention_heads=6", "tokenizer.padded_vocabulary_size=64",
    "precision.dtype='fp32'",
)  # fmt: skip
CARD = ["--run", "demo", *(word for setting in SETTINGS for word in ("--set", setting))]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A BLOOM of transformers in the folder `bloom` of the current folder."""
    from transformers import BloomConfig, BloomForCausalLM

    monkeypatch.chdir(tmp_path)
    made = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=48, n_layer=2, n_head=6))
    made.save_pretrained(tmp_path / "bloom")
    return made


@pytest.mark.usefixtures("near")
def test_there_and_back(model: Any, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import BloomForCausalLM

    assert execute(["checkpoints", "import", "bloom", *CARD, "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["checkpoint"] == str(
        Path("run/checkpoints/main/global_step0").resolve()
    )
    assert read_latest(Path("run/checkpoints/main")) == 0
    assert "importing" not in said.err, "a bar is for terminals"

    assert (
        execute(
            [
                "checkpoints",
                "export",
                "latest",
                "-o",
                "back",
                "--max-shard-size",
                "50KB",
                *CARD,
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capfd.readouterr().out)
    assert result["folder"] == str(Path("back").resolve()) and result["shards"] > 1
    back = BloomForCausalLM.from_pretrained("back", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in model.state_dict().items())

    place = "run/checkpoints/main/global_step0"  # a path needs no card
    assert (
        execute(
            [
                "checkpoints",
                "export",
                place,
                "--to",
                "hf",
                "-o",
                "back",
                "--dtype",
                "bf16",
                "--no-verify",
            ]
        )
        == 1
    )
    assert "--force" in capfd.readouterr().err
    assert (
        execute(
            [
                "checkpoints",
                "export",
                place,
                "-o",
                "back",
                "--dtype",
                "bf16",
                "--no-verify",
                "--force",
            ]
        )
        == 0
    )
    assert "parameters in bfloat16" in capfd.readouterr().out
