"""`tr11 checkpoints import` and `export`: the words of the command line reach the commands, with
the card.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tr11ops.cli.main import execute
from trainer.contract.checkpoint_names import read_latest

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
