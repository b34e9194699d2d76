"""A copy of the weights alone is a checkpoint to the trainer's own tools, in both layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.backup.copy_cases import contents, copy, make_archive
from tests.trainer.checkpoint.memory_source import (
    Sizes,
    differences,
    extras_of,
    info_of,
    memory_source,
)
from trainer.checkpoint.__main__ import main
from trainer.checkpoint.reader import check_digests, open_checkpoint
from trainer.checkpoint.rewrite import write_checkpoint
from trainer.contract.checkpoints import find_resumable
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import Manifest

SIZES = Sizes()
SOURCE = memory_source(SIZES)
TOPOLOGY = {"tensor": 1, "pipeline": 1, "data": 2}


def run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main([*map(str, words), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("layout", ["tr11", "deepspeed", "deepspeed without a manifest"])
def test_inspect_reshape_and_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    folder = write_checkpoint(
        tmp_path / "saved", SOURCE, 5, extras_of(SOURCE), info_of(SOURCE, TOPOLOGY)
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
