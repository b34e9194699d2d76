"""Bad input on the way to and from Hugging Face: one line that names the file or the key, and
nothing left behind.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.checkpoint import world
from tests.trainer.checkpoint.huggingface.models import card, made_by_transformers, make_checkpoint
from tests.trainer.child_requests import checkpoints as run_checkpoints
from tests.trainer.spawn import fork_server
from trainer.checkpoint.commands import import_
from trainer.checkpoint.huggingface import export as huggingface_export
from trainer.checkpoint.huggingface.bloom import BLOOM
from trainer.checkpoint.huggingface.export import parse_size, plan_export, write_export
from trainer.checkpoint.huggingface.import_ import HuggingFaceFolder
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.source import TensorSource
from trainer.config.card import TrainerConfig
from trainer.contract.checkpoint_names import checkpoint_steps
from trainer.contract.errors import CheckpointError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded BLOOM folder of transformers; not to be changed."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    made_by_transformers().save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "hf"))


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    return make_checkpoint(model, tmp_path / "checkpoints", "fp32")


def card_file(config: TrainerConfig, folder: Path, **sections: dict[str, Any]) -> Path:
    """A resolved card of a run in `folder`."""
    value = config.model_dump(mode="json")
    value["run"]["directory"] = str(folder / "run")
    for name, keys in sections.items():
        value[name].update(keys)
    path = folder / "card.json"
    path.write_text(json.dumps({**value, "derived": {"card_hash": "abc"}}))
    return path


# ------------------------------------------------------------------ folders that cannot be imported
def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def truncate(folder: Path) -> Path:
    path = shard(folder)
    path.write_bytes(path.read_bytes()[:-10])
    return path


def lengthen(folder: Path) -> Path:
    path = shard(folder)
    path.write_bytes(path.read_bytes() + b"1234")
    return path


def replace_by_text(folder: Path) -> Path:
    path = shard(folder)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")
    return path


def remove(folder: Path) -> Path:
    path = shard(folder)
    path.unlink()
    return path


def swap(folder: Path) -> Path:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    return first


def other_shape(folder: Path) -> Path:
    path = shard(folder)
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({**tensors, name: torch.zeros(5)}, path)
    return path


def quantised(folder: Path) -> Path:
    path = shard(folder)
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)
    return path


def no_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder / "config.json"


def other_model(folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "gpt2"}))
    return path


def other_residual(folder: Path) -> Path:
    path = folder / "config.json"
    value = {**json.loads(path.read_text()), "apply_residual_connection_post_layernorm": True}
    path.write_text(json.dumps(value))
    return path


def garbled_index(folder: Path) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text("[")
    return path


def outside(folder: Path) -> Path:
    path = folder / "model.safetensors.index.json"
    value = json.loads(path.read_text())
    value["weight_map"]["transformer.ln_f.bias"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(value))
    return path


def no_weights(folder: Path) -> Path:
    for path in folder.glob("model*"):
        path.unlink()
    return folder


def one_tensor_less(folder: Path) -> Path:
    path = folder / "model.safetensors.index.json"
    value = json.loads(path.read_text())
    del value["weight_map"]["transformer.ln_f.bias"]
    path.write_text(json.dumps(value))
    return folder


def one_tensor_more(folder: Path) -> Path:
    path = folder / "score.safetensors"
    save_file({"score.weight": torch.zeros(3)}, path)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["score.weight"] = path.name
    index.write_text(json.dumps(value))
    return path


def untied(folder: Path) -> Path:
    path = folder / "head.safetensors"
    save_file({"lm_head.weight": torch.zeros(64, 48)}, path)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["lm_head.weight"] = path.name
    index.write_text(json.dumps(value))
    return path


def truncated_bin(folder: Path) -> Path:
    no_weights(folder)
    path = folder / "pytorch_model.bin"
    torch.save(made_by_transformers().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-1000])
    return path


class Attack:
    """Unpickling it would run a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def attacking_bin(folder: Path) -> Path:
    no_weights(folder)
    path = folder / "pytorch_model.bin"
    torch.save({"transformer.ln_f.bias": Attack()}, path)
    return path


DAMAGES = [
    truncate, lengthen, replace_by_text, remove, swap, other_shape, quantised, no_config, other_model, other_residual,
    garbled_index, outside, no_weights, one_tensor_less, one_tensor_more, untied, truncated_bin, attacking_bin,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda function: function.__name__)
def test_a_bad_folder_is_refused_by_the_name_of_its_file(
    copy: Path, tmp_path: Path, damage: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = damage(copy)
    with pytest.raises(CheckpointError) as caught:
        HuggingFaceFolder(copy, BLOOM, "fp32")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        (
            {"model": {"attention_heads": 12}},
            "model.attention_heads is 6 there and 12 in the run card",
        ),
        ({"model": {"layers": 3}}, "model.layers is 2 there and 3 in the run card"),
        (
            {"model": {"layernorm_epsilon": 1e-6}},
            "model.layernorm_epsilon is 1e-05 there and 1e-06 in the run card",
        ),
        (
            {"tokenizer": {"padded_vocabulary_size": 128}},
            "tokenizer.padded_vocabulary_size is 64 there and 128 in the run card",
        ),
        ({"model": {"position_embedding": "absolute"}}, "model.position_embedding = 'absolute'"),
    ],
)
def test_a_card_of_another_model(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, Any],
    key: str,
) -> None:
    path = card_file(card(6), tmp_path, **sections)
    assert run_checkpoints(*["import", "--card", str(path), str(model)]) == 1
    said = capsys.readouterr().err.strip()
    assert key in said and said.count("\n") == 0
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_finite_is_not_imported(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(shard(copy))
    key = next(iter(tensors))
    tensors[key].view(-1)[0] = math.nan
    save_file(tensors, shard(copy), {"format": "pt"})
    config = card(6)
    path = card_file(config, tmp_path)
    assert run_checkpoints(*["import", "--card", str(path), str(copy)]) == 1
    assert "holds NaN or infinity" in capsys.readouterr().err
    assert not list(config.paths.checkpoints.glob("*"))


def test_a_run_with_checkpoints_is_not_imported_into(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = card_file(card(6), tmp_path)
    (tmp_path / "run" / "checkpoints" / "main" / "global_step7").mkdir(parents=True)
    assert run_checkpoints(*["import", "--card", str(path), str(model)]) == 1
    assert "holds global_step7 already" in capsys.readouterr().err


def test_numbers_too_large_for_half_precision(tmp_path: Path) -> None:
    made = made_by_transformers()
    with torch.no_grad():
        made.transformer.ln_f.weight[3] = 1e6
    made.save_pretrained(tmp_path / "hf")
    source = HuggingFaceFolder(tmp_path / "hf", BLOOM, "fp32")
    with pytest.raises(
        CheckpointError, match=r"final_norm\.weight holds numbers too large for fp16"
    ):
        write_export(plan_export(source, dtype="fp16"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------- targets
def export(checkpoint: Path, target: Path, *words: str) -> int:
    return run_checkpoints(*["export", "--to", "hf", "-o", str(target), *words, str(checkpoint)])


def test_a_folder_with_something_in_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    assert export(checkpoint, target) == 1
    assert "exists and is not empty" in capsys.readouterr().err
    assert export(checkpoint, target, "--force") == 1
    assert "--force does not replace it" in capsys.readouterr().err
    assert (target / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "mine"]


def test_an_earlier_export_is_replaced_with_force(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    assert export(checkpoint, target, "--max-shard-size", "60KB") == 0
    assert len(list(target.glob("*.safetensors"))) > 1
    assert export(checkpoint, target) == 1
    assert export(checkpoint, target, "--force", "--dtype", "bf16") == 0
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_a_file_or_the_checkpoint_itself_is_no_target(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert export(checkpoint, tmp_path / "file") == 1
    assert "is a file" in capsys.readouterr().err
    assert export(checkpoint, checkpoint / "hf") == 2
    assert "lies inside the checkpoint" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint / "weights" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert export(checkpoint, tmp_path / "out") == 1
    assert f"{path}: its digest differs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert export(checkpoint, tmp_path / "out", "--no-verify") == 0


class WithNaN:
    """A source in whose last tensor one number is none."""

    def __init__(self, source: TensorSource):
        self._source, self.facts, self.tensors = source, source.facts, source.tensors

    def read(
        self, part: str, key: str, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        block = self._source.read(part, key, offsets, sizes).clone()
        if key == list(self.tensors("weights"))[-1]:
            block.view(-1)[0] = math.nan
        return block


def test_a_model_that_is_not_finite_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    plan = plan_export(WithNaN(open_checkpoint(checkpoint)))
    with pytest.raises(
        CheckpointError, match=r"holds NaN or infinity as .*: nothing is made of it"
    ):
        write_export(plan, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_a_disk_too_small_is_seen_before(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        huggingface_export.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000)
    )
    assert export(checkpoint, tmp_path / "out") == 1
    assert " free and the export needs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def limited_export(rank: int, checkpoint: Path, target: Path) -> str:
    import resource

    plan = plan_export(open_checkpoint(checkpoint))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    with pytest.raises(CheckpointError) as caught:
        write_export(plan, target)
    return str(caught.value)


def test_a_disk_that_fills_up(checkpoint: Path, tmp_path: Path) -> None:
    [message] = world.run(1, limited_export, checkpoint, tmp_path / "out")
    assert message.startswith(f"{tmp_path / 'out'} was not written: File too large")
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def slow_export(checkpoint: Path, target: Path, word: Connection) -> None:
    """An export that says when it has begun to write, and then stands still."""

    def crawl(count: int) -> None:
        word.send("began")
        time.sleep(600)

    write_export(plan_export(open_checkpoint(checkpoint)), target, on_bytes=crawl)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_export_is_invisible_and_cleared_away(
    checkpoint: Path, tmp_path: Path, stop: signal.Signals
) -> None:
    target, context = tmp_path / "out", fork_server()
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=slow_export, args=(checkpoint, target, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        assert ours.poll(300) and ours.recv() == "began"
        assert child.pid is not None
        os.kill(child.pid, stop)
        child.join(300)
        assert child.exitcode == (-stop if stop == signal.SIGKILL else 1)
    finally:
        child.kill()
        child.join()
        ours.close()
    left = [path.name for path in tmp_path.iterdir() if path.name != "checkpoints"]
    assert (left == []) == (stop == signal.SIGINT)
    assert all(name.startswith(".out.partial-") for name in left)
    assert export(checkpoint, target) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_two_exports_to_one_folder(checkpoint: Path, tmp_path: Path) -> None:
    """The second begins while the first writes: it does not take the first's folder for a leftover."""
    plan = plan_export(open_checkpoint(checkpoint))
    began: list[int] = []

    def second(count: int) -> None:
        if not began:
            began.append(count)
            write_export(plan, tmp_path / "out")

    with pytest.raises(CheckpointError, match="exists and is not empty"):
        write_export(plan, tmp_path / "out", on_bytes=second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out"]
    assert (tmp_path / "out" / "config.json").is_file()


# -------------------------------------------------------------------------- the commands as a whole
def test_import_and_export_by_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = card_file(card(6, dtype="bf16"), tmp_path)
    before = time.time()
    assert run_checkpoints(*["import", "--card", str(path), "--json", str(model)]) == 0
    result = json.loads(capsys.readouterr().out)
    place = tmp_path / "run" / "checkpoints" / "main" / "global_step0"
    assert (result["checkpoint"], result["dtype"], result["step"]) == (str(place), "bf16", 0)
    assert checkpoint_steps(place.parent) == [0]
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["run_card_hash"] == "abc" and manifest["created"] >= before
    assert run_checkpoints(*["import", "--card", str(path), str(model)]) == 1
    capsys.readouterr()

    target = tmp_path / "out"
    assert (
        run_checkpoints(*["export", "--card", str(path), "--json", "-o", str(target), str(place)])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["dtype"], result["shards"], result["verified"]) == (
        0,
        "bfloat16",
        1,
        True,
    )
    assert result["tensor_bytes"] == 2 * result["parameters"]
    assert result["remarks"] == ["no tokenizer is known: none is written (--tokenizer PATH)"]
    for entry in result["files"]:
        assert (target / entry["path"]).stat().st_size == entry["bytes"]
    config = json.loads((target / "config.json").read_text())
    assert (config["seq_length"], config["initializer_range"]) == (24, 0.2)


def test_text_for_people(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = card_file(card(6), tmp_path)
    assert run_checkpoints(*["import", "--card", str(path), str(model)]) == 0
    shown = capsys.readouterr().out
    assert (
        "global_step0: 59,808 parameters in fp32, 1.1 MiB with" in shown and shown.count("\n") == 1
    )
    place = tmp_path / "run" / "checkpoints" / "main" / "global_step0"
    assert export(place, tmp_path / "out", "--max-shard-size", "60KB") == 0
    shown = capsys.readouterr().out
    assert (
        "step 0, 59,808 parameters in float32, 233.6 KiB in 6 files" in shown
        and shown.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500mb", 5 * 10**8),
        ("1.5GiB", 3 * 2**29),
        ("2 TB", 2 * 10**12),
        ("10K", 10**4),
        ("7", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0GB", "GB", "-5GB", "5XB", "five"])
def test_what_is_no_size(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
    target = tmp_path / "out"
    assert run_checkpoints("export", "-o", target, f"--max-shard-size={text}", tmp_path) == 2


def test_an_import_needs_a_card(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_checkpoints(*["import", "--card", str(tmp_path / "none.json"), str(model)]) == 2
    assert "none.json" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"latest already"):
        (tmp_path / "latest").write_text("global_step3")
        import_.check_new(tmp_path)
