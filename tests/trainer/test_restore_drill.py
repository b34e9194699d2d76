"""The drill: a checkpoint is copied away, restored into a new run directory, and the training goes
on as if nothing was.

The next losses are those of the training that was never interrupted, bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.plugins.object_store_fixture import ObjectStore
from tests.trainer.courses import card, curve, refusal, run
from tests.trainer.spawn import run_ranks
from tr11ops.backup.base import Archive
from tr11ops.backup.copying import copy_source
from tr11ops.backup.folder import FolderArchive
from tr11ops.backup.restore import restore_checkpoint
from tr11ops.backup.source import read_source
from tr11ops.backup.transfer import Transfer
from tr11ops.rundir.copies import Kind, Receipt, location_of
from trainer.config.card import TrainerConfig
from trainer.contract.checkpoint_names import checkpoint_steps
from trainer.contract.manifest import Manifest, manifest_faults


def training(folder: Path, name: str) -> TrainerConfig:
    return card(
        folder,
        run={"directory": str(folder / name), "exit_interval": 6},
        checkpoint={"interval": 3},
        model={"attention_dropout": 0.1, "hidden_dropout": 0.1},
    )


def copy(archive: Archive, config: TrainerConfig, kind: Kind, tar: bool) -> Receipt:
    return copy_source(
        archive, read_source(config.paths.checkpoint(3), 3, kind), kind, location_of(kind, "main", 3), run="tiny",
        variant="main", transfer=Transfer(), format="tar" if tar else "files",
    )  # fmt: skip


def test_a_restored_checkpoint_trains_on_with_the_same_losses(
    tmp_path: Path, object_store: ObjectStore
) -> None:
    whole = training(tmp_path, "whole")
    assert run(whole) == ("exit-interval", 6)
    expected = curve(whole)
    (tmp_path / "store").mkdir()
    archives: dict[str, Archive] = {
        "folder": FolderArchive(tmp_path / "store", "store", "tiny"),
        "bucket": object_store.open(),
    }
    full = {
        name: copy(archive, whole, "full", tar=name == "folder")
        for name, archive in archives.items()
    }
    weights = copy(archives["bucket"], whole, "weights", tar=False)
    shutil.rmtree(whole.paths.checkpoints)
    for number, (name, receipt) in enumerate(full.items(), start=2):
        again = training(tmp_path, f"restored-from-{name}")
        restore_checkpoint(archives[name], receipt, again.paths.checkpoints, Transfer())
        assert checkpoint_steps(again.paths.checkpoints) == [3]
        assert run(again, number) == ("exit-interval", 6)
        assert curve(again) == {step: values for step, values in expected.items() if step > 3}

    alone = training(tmp_path, "weights")
    home = restore_checkpoint(archives["bucket"], weights, alone.paths.checkpoints, Transfer())
    manifest = Manifest.read(home)
    assert manifest is not None
    assert manifest_faults(home, manifest, read_digests=True) == []
    said = run_ranks(refusal, 2, alone, 9, launch=False)
    assert said[0] == said[1]
    assert "it holds weights alone, from which no training resumes" in said[0]
