"""`tr11 checkpoints reshape`: either layout into either, for another topology; what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.trainer.cases import samples
from tests.trainer.checkpoint.huggingface.looks import STEP, load_and_look, train_and_save
from tests.trainer.checkpoint.memory_source import (
    Sizes,
    differences,
    extras_of,
    info_of,
    memory_source,
)
from tests.trainer.child_requests import checkpoints as run_checkpoints
from tests.trainer.llama_cases import KINDS, tiny_llama
from tests.trainer.spawn import run_ranks
from trainer.checkpoint.publishing import CheckpointInfo, NewCheckpoint
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.rewrite import write_checkpoint
from trainer.config.card import TrainerConfig
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.paths import RunPaths

SIZES = Sizes()
SOURCE = memory_source(SIZES)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    info = info_of(SOURCE, {"tensor": 1, "pipeline": 1, "data": 2})
    return write_checkpoint(NewCheckpoint(tmp_path / "saved", 5, extras_of(SOURCE), info), SOURCE)


def reshape(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run_checkpoints(*["reshape", "--json", *map(str, words)]) == 0
    return dict(json.loads(capsys.readouterr().out))


def refusal(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    assert run_checkpoints(*["reshape", *map(str, words)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.strip().splitlines()[-1]


def test_there_and_back(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    degrees = ("--tensor", 2, "--pipeline", 2, "--data", 11)
    there = reshape(capsys, saved, "-o", tmp_path / "there", "--format", "deepspeed", *degrees)
    place = tmp_path / "there" / "global_step5"
    manifest = Manifest.read(place)
    assert manifest is not None and manifest_faults(place, manifest, read_digests=True) == []
    assert there == {
        "schema": 1,
        "checkpoint": str(saved),
        "step": 5,
        "layout": "tr11",
        "topology": {"tensor": 1, "pipeline": 1, "data": 2},
        "folder": str(place),
        "new_layout": "deepspeed",
        "new_topology": {"tensor": 2, "pipeline": 2, "data": 11},
        "optimizer": True,
        "verified": True,
        "files": len(manifest.files),
        "bytes": manifest.total_bytes,
        "remarks": [],
    }
    assert differences(open_checkpoint(place), SOURCE) == []
    assert read_latest(tmp_path / "there") == 5

    back = reshape(capsys, place, "-o", tmp_path / "back")
    assert (back["new_layout"], back["topology"]) == (
        "tr11",
        {"tensor": 2, "pipeline": 2, "data": 11},
    )
    again = open_checkpoint(tmp_path / "back" / "global_step5")
    assert differences(again, SOURCE) == []
    assert dict(again.facts.cursor) == {**SOURCE.facts.cursor, "step": 5}

    # Without degrees the layout is written for those that the checkpoint has.
    same = reshape(capsys, place, "-o", tmp_path / "same", "--format", "deepspeed")
    assert same["new_topology"] == same["topology"]


def test_weights_only(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for layout in ("tr11", "deepspeed"):
        result = reshape(
            capsys,
            saved,
            "-o",
            tmp_path / layout,
            "--format",
            layout,
            "--weights-only",
            "--no-verify",
        )
        assert (result["optimizer"], result["verified"]) == (False, False)
        found = open_checkpoint(Path(result["folder"]))
        assert found.tensors("optimizer") == {}
        assert differences(found, memory_source(SIZES, optimizer=False)) == []


def test_the_text_for_people(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "reshape",
        str(saved),
        "-o",
        str(tmp_path / "new"),
        "--format",
        "deepspeed",
        "--data",
        "3",
    ]
    assert run_checkpoints(*words) == 0
    assert re.fullmatch(
        r"\S+/new/global_step5: step 5, DeepSpeed layout for tensor 1 x pipeline 1 x data 3, [\d.]+ KiB in \d+ files\n",
        capsys.readouterr().out,
    )


def test_refusals(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new"
    assert "only --format deepspeed has a topology" in refusal(
        capsys, 2, saved, "-o", out, "--tensor", 2
    )
    assert "greater than or equal to 1" in refusal(
        capsys, 2, saved, "-o", out, "--format", "deepspeed", "--data", 0
    )
    assert "lies inside the checkpoint" in refusal(capsys, 2, saved, "-o", saved / "inner")
    assert "cannot be cut into 5 equal parts" in refusal(
        capsys, 1, saved, "-o", out, "--format", "deepspeed", "--tensor", 5
    )
    assert "exists already and is not replaced" in refusal(capsys, 1, saved, "-o", saved.parent)
    path = next(path for path in sorted((saved / "weights").iterdir()) if path.suffix == ".distcp")
    path.write_bytes(path.read_bytes()[::-1])
    assert f"{path}: its digest differs from the manifest's" in refusal(capsys, 1, saved, "-o", out)
    assert not out.exists()


def hold(checkpoints: Path) -> None:
    """A living trainer's lease on the run whose checkpoints lie there."""
    paths = RunPaths.of_checkpoints(checkpoints)
    assert paths is not None
    assert LeaseFolder(paths).claim(
        1, LeaseClaim("1007", 1, "n01", 1, "ana", 1.0, "token", epoch=1)
    )


def test_latest_of_others_is_left_alone(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints" / "main"
    folder.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    result = reshape(capsys, saved, "-o", folder)
    assert read_latest(folder) == 3 and "--latest has it name the new one" in result["remarks"][-1]
    shutil.rmtree(folder / "global_step5")
    hold(folder)
    said = refusal(capsys, 1, saved, "-o", folder, "--latest")
    assert "is being trained by job 1007" in said and not (folder / "global_step5").exists()
    shutil.rmtree(tmp_path / "run" / "state")
    reshape(capsys, saved, "-o", folder, "--latest")
    assert read_latest(folder) == 5


def test_latest_is_not_moved_below_what_a_training_resumes_from(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints" / "main"
    reshape(capsys, saved, "-o", folder)
    (folder / "global_step5").rename(folder / "global_step7")
    manifest = folder / "global_step7" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 5', '"step": 7'))
    (folder / "latest").write_text("global_step7")
    said = refusal(capsys, 1, saved, "-o", folder, "--latest")
    assert (
        "is not moved back to step 5: a training resumes from step 7" in said
        and "tr11 rollback 5" in said
    )
    assert not (folder / "global_step5").exists()
    (folder / "latest").unlink()
    result = reshape(capsys, saved, "-o", folder)
    assert not (folder / "latest").exists() and "is not moved back" in result["remarks"][-1]
    (folder / "global_step7" / "manifest.json").unlink()  # no training resumes from it any more
    shutil.rmtree(folder / "global_step5")
    reshape(capsys, saved, "-o", folder, "--latest")
    assert read_latest(folder) == 5


@pytest.mark.parametrize("layout", ["tr11", "deepspeed"])
def test_a_training_that_starts_meanwhile_keeps_its_latest(
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    folder = tmp_path / "run" / "checkpoints" / "main"
    write = Manifest.write

    def write_and_start(manifest: Manifest, place: Path) -> None:
        write(manifest, place)
        hold(folder)

    monkeypatch.setattr(Manifest, "write", write_and_start)
    said = refusal(capsys, 1, saved, "-o", folder, "--format", layout)
    assert "is being trained by job 1007" in said and list(folder.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--latest",)])
def test_a_newer_one_that_comes_meanwhile_keeps_latest(
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    """As when several steps are reshaped into one folder at once."""
    folder = tmp_path / "there"
    write = Manifest.write

    def write_and_overtake(manifest: Manifest, place: Path) -> None:
        write(manifest, place)
        newer = shutil.copytree(place, folder / "global_step7")
        write(replace(manifest, step=7), newer)
        (folder / "latest").write_text("global_step7")

    monkeypatch.setattr(Manifest, "write", write_and_overtake)
    if options:
        said = refusal(capsys, 1, saved, "-o", folder, *options)
        assert "global_step5 is written, but" in said and "is not moved back" in said
    else:
        assert "is not moved back" in reshape(capsys, saved, "-o", folder)["remarks"][-1]
    found = Manifest.read(folder / "global_step5")
    assert found is not None and not manifest_faults(
        folder / "global_step5", found, read_digests=True
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "global_step5",
        "global_step7",
        "latest",
    ]
    assert read_latest(folder) == 7


def test_weights_alone_never_take_latest(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    reshape(capsys, saved, "-o", folder)
    (folder / "global_step5").rename(folder / "global_step3")
    manifest = folder / "global_step3" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 5', '"step": 3'))
    (folder / "latest").write_text("global_step3")
    result = reshape(capsys, saved, "-o", folder, "--weights-only", "--latest")
    assert read_latest(folder) == 3 and "no training resumes" in result["remarks"][-1]
    shutil.rmtree(folder)
    reshape(capsys, saved, "-o", folder, "--weights-only")
    assert read_latest(folder) == 5, "where there is nothing else, it is the one to evaluate"


def test_another_models_folder_is_not_written_to(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = memory_source(Sizes(), step=4)
    info = CheckpointInfo({"tensor": 1}, {**SOURCE.facts.model, "model.layers": 70})
    write_checkpoint(NewCheckpoint(tmp_path / "other", 4, extras_of(other), info), other)
    said = refusal(capsys, 1, saved, "-o", tmp_path / "other")
    assert "holds checkpoints of another model (global_step4 differs in model.layers)" in said
    assert not (tmp_path / "other" / "global_step5").exists()


# ----------------------------------------------------------------------------- reshape llama
# `tr11 checkpoints reshape` of today's models: what it writes is loaded by other topologies, and
# trained on.

SAME = 2e-6  # fp32 sums in another order, on losses of size 4


def card(kind: str, pipeline: int, tensor: int) -> TrainerConfig:
    """Micro batches of one sample, so that a loss is one's."""
    value = tiny_llama(pipeline, tensor, kind=kind).model_dump(mode="json")
    value["batch"] |= {"micro_batch_size": 1}
    return TrainerConfig.model_validate(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shapes", [((2, 2), (1, 1)), ((1, 2), (2, 1))], ids=str)
def test_a_reshaped_model_is_the_same(
    kind: str,
    shapes: tuple[tuple[int, int], tuple[int, int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`shapes`: pipeline and tensor degrees that save and that load: the layout has none. The
    optimizer goes on too: `load_and_look` does a step.
    """
    (pipeline, tensor), (new_pipeline, new_tensor) = shapes
    tokens = samples(card(kind, 1, 1), 100, 4)
    before = run_ranks(
        train_and_save, pipeline * tensor, card(kind, pipeline, tensor), tmp_path / "old", tokens
    )
    source = tmp_path / "old" / f"global_step{STEP}"
    assert run_checkpoints(*["reshape", "--json", str(source), "-o", str(tmp_path / "new")]) == 0
    assert json.loads(capsys.readouterr().out)["new_layout"] == "tr11"
    place = tmp_path / "new" / f"global_step{STEP}"
    manifest = Manifest.read(place)
    assert manifest is not None and manifest_faults(place, manifest, read_digests=True) == []

    config = card(kind, new_pipeline, new_tensor)
    for losses, _ in run_ranks(
        load_and_look, new_pipeline * new_tensor, config, tmp_path / "new", STEP, tokens
    ):
        torch.testing.assert_close(losses, before[0], atol=SAME, rtol=0)
