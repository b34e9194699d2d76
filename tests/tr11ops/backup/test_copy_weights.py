"""A copy of the weights alone is a checkpoint to the trainer's own tools, in both layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.backup.copy_cases import contents, copy, make_archive, make_checkpoint, quick
from tests.trainer.checkpoint.memory_source import (
    Sizes,
    differences,
    extras_of,
    info_of,
    memory_source,
)
from tests.trainer.child_requests import checkpoints as run_checkpoints
from tr11ops.backup.restore import restore_checkpoint
from tr11ops.backup.source import read_source
from tr11ops.base.errors import CopyError
from trainer.checkpoint.publishing import NewCheckpoint
from trainer.checkpoint.reader import check_digests, open_checkpoint
from trainer.checkpoint.rewrite import write_checkpoint
from trainer.contract.checkpoints import find_resumable
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import ForeignFacts, Manifest, manifest_faults
from trainer.contract.resumable import WEIGHTS_ALONE, ResumeNeed, lack_of

SIZES = Sizes()
SOURCE = memory_source(SIZES)
TOPOLOGY = {"tensor": 1, "pipeline": 1, "data": 2}


def run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert run_checkpoints(*map(str, words), "--json") == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("layout", ["tr11", "deepspeed", "deepspeed without a manifest"])
def test_inspect_reshape_and_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    folder = write_checkpoint(
        NewCheckpoint(tmp_path / "saved", 5, extras_of(SOURCE), info_of(SOURCE, TOPOLOGY)), SOURCE
    )
    if layout != "tr11":
        run(capsys, "reshape", folder, "-o", tmp_path / "other", "--format", "deepspeed")
        folder = tmp_path / "other" / "global_step5"
    if layout == "deepspeed without a manifest":
        (folder / "manifest.json").unlink()
    receipt = copy(make_archive(tmp_path / "store"), folder, kind="weights")
    place = tmp_path / "store" / receipt.location
    assert sum(file.bytes for file in receipt.files) < sum(map(len, contents(folder).values())) / 2

    assert differences(open_checkpoint(place), memory_source(SIZES, optimizer=False)) == []
    if layout != "deepspeed without a manifest":
        assert run(capsys, "inspect", place, "--verify")["verified"] == "digests"
        check_digests(place, "weights")
        manifest = Manifest.read(place)
        assert manifest is not None and (manifest.step, manifest.consumed_tokens) == (5, 5 * 64)
    exported = run(capsys, "export", "-o", tmp_path / "copy", place)
    assert exported["folder"] == str(tmp_path / "copy")
    run(capsys, "export", "-o", tmp_path / "original", folder)
    ours, theirs = contents(tmp_path / "copy"), contents(tmp_path / "original")
    assert (
        ours["model.safetensors"] == theirs["model.safetensors"]
        and ours["config.json"] == theirs["config.json"]
    )

    if layout == "tr11":  # the very files that the trainer's own weights-only checkpoint has
        run(capsys, "reshape", folder, "-o", tmp_path / "light", "--weights-only")
        light = contents(tmp_path / "light" / "global_step5")
        assert {path for path in light if path != "manifest.json"} == {
            file.path for file in receipt.files if file.path != "manifest.json"
        }
        with pytest.raises(
            CheckpointError, match="it holds weights alone, from which no training resumes"
        ):
            find_resumable(place.parent, "digests", True, lambda line: None)


# ----------------------------------------------------------------------------- of another trainer
def held(folder: Path, weights: tuple[str, ...]) -> Path:
    """A checkpoint that is held of another trainer."""
    made = make_checkpoint(
        folder,
        sizes={
            "foreign/checkpoint-100/model.safetensors": 900,
            "foreign/checkpoint-100/config.json": 90,
            "foreign/checkpoint-100/optimizer.pt": 1800,
            "foreign.json": 300,
        },
    )
    manifest = Manifest.read(made)
    assert manifest is not None
    facts = ForeignFacts("huggingface", "checkpoint-100", "folder", ranks=2, weights=weights)
    replace(manifest, foreign=facts).write(made)
    return made


def test_of_another_trainer_the_weights_are_what_its_dialect_names(tmp_path: Path) -> None:
    source = held(tmp_path / "run", ("model*.safetensors", "config.json"))
    found = read_source(source, 100, "weights")
    assert sorted(file.path for file in found.files) == [
        "foreign/checkpoint-100/config.json",
        "foreign/checkpoint-100/model.safetensors",
    ]
    archive = make_archive(tmp_path / "store")
    receipt = copy(archive, source, kind="weights")
    home = restore_checkpoint(archive, receipt, tmp_path / "new", quick())
    manifest = Manifest.read(home)
    assert manifest is not None and manifest_faults(home, manifest, read_digests=True) == []
    lack = lack_of(manifest, ResumeNeed(trainer="foreign"))
    assert lack is not None and lack.text == WEIGHTS_ALONE


def test_of_another_trainer_whose_dialect_names_none_no_weights_are_copied(tmp_path: Path) -> None:
    source = held(tmp_path / "run", ())
    with pytest.raises(CopyError, match="does not say which of its files are weights"):
        read_source(source, 100, "weights")
    assert len(read_source(source, 100, "full").files) == 4


def test_our_own_trainer_opens_none_of_another(tmp_path: Path) -> None:
    source = held(tmp_path / "run", ())
    with pytest.raises(CheckpointError, match="checkpoint-100 of another trainer"):
        open_checkpoint(source)
    need = ResumeNeed(trainer="tr11")
    with pytest.raises(CheckpointError, match="checkpoint-100 of another trainer"):
        find_resumable(source.parent, "sizes", False, print, need=need)
