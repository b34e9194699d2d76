"""Trainings in 8-bit floats and with compiled blocks, cut in two by a save and a resume: bit for
bit the whole one.

Graphs are those of torch's AOT compiler, as in `test_compiled.py`. What inductor makes of a graph
of one length and of one of any length may round in other places: there a resume under a curriculum
is not promised bit for bit.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters

from tests.plugins.object_store_fixture import ObjectStore
from tests.trainer.courses import attempt, card, curve, refusal, run
from tests.trainer.spawn import run_ranks
from tr11ops.backup.base import Archive
from tr11ops.backup.copying import copy_source
from tr11ops.backup.folder import FolderArchive, Owner
from tr11ops.backup.restore import restore_checkpoint
from tr11ops.backup.source import read_source
from tr11ops.backup.transfer import Transfer
from tr11ops.rundir.copies import Kind, Receipt, location_of
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import read_phases
from trainer.contract.checkpoint_names import checkpoint_steps
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.control import saving
from trainer.model import compiled

HALF, END = 3, 6
FLOAT8: dict[str, Any] = {"precision": {"dtype": "bf16", "float8": True}}
COMPILED: dict[str, Any] = {
    "model": {"compile_blocks": True, "hidden_dropout": 0.2, "attention_dropout": 0.2},
    "curriculum": {"kind": "linear", "start_length": 8, "step": 4, "total_steps": 4},
}


def traced_attempt(config: TrainerConfig, number: int) -> tuple[str, int, bool, list[str]]:
    """An attempt, in a process of its own, with torch's own operations in place of inductor's;
    whether any block was compiled, and what this rank's log says of the step that compiles.
    """
    compiled.BACKEND = "aot_eager"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/kept"
    with redirect_stdout(StringIO()) as said:
        ends = attempt(config, number)
    told = re.findall(r"(?:compiling in|step \d+ took).*", said.getvalue())
    made = bool(counters["stats"]["unique_graphs"])
    return *ends, made, [re.sub(r"took [0-9.]+ s", "took T s", line) for line in told]


def saved(config: TrainerConfig) -> dict[str, str]:
    """Digests of the tensors' files of the last checkpoint, by name."""
    manifest = Manifest.read(config.paths.checkpoints / f"global_step{END}")
    assert manifest is not None
    return {
        entry.path: entry.digest
        for entry in manifest.files
        if entry.path.startswith(("weights/", "optimizer/"))
    }


def compiled_at(config: TrainerConfig) -> list[int]:
    """After which iterations a step of a new kind was done, in all attempts."""
    files = sorted(config.paths.attempts.glob("*/phases.jsonl"))
    return [
        one.iteration for file in files for one in read_phases(file) if one.phase == "compiling"
    ]


@pytest.mark.parametrize("options", [FLOAT8, COMPILED], ids=["float8", "compiled"])
def test_a_resume_is_bitwise(options: dict[str, Any], tmp_path: Path) -> None:
    def until(name: str, last: int) -> TrainerConfig:
        return card(
            tmp_path, **options, run={"directory": str(tmp_path / name), "exit_interval": last}
        )

    whole, rest = until("whole", END), until("cut", END)
    for config, number in ((whole, 1), (until("cut", HALF), 1), (rest, 2)):
        ends = run_ranks(traced_attempt, 2, config, number, launch=False)
        last = config.run.exit_interval
        assert [end[:3] for end in ends] == [("exit-interval", last, options is COMPILED)] * 2
        first = HALF + 1 if config is rest else 1
        expected_lines = [
            f"compiling in step {first}, the first of this launch; kept for the next launch in /kept",
            f"step {first} took T s, compiling included",
        ]
        assert ends[0][3] == (expected_lines if options is COMPILED else []) and ends[1][3] == []
    # its lengths are 8, 12, 12, 16, ...: the first two steps are one stretch; where the first
    # attempt leaves it is due
    expected = [[0, 3], [0, 3, 3]] if options is COMPILED else [[], []]
    assert [compiled_at(config) for config in (whole, rest)] == expected
    assert curve(rest) == curve(whole) and set(curve(whole)) == set(range(1, END + 1))
    assert saved(rest) == saved(whole) != {}


# ----------------------------------------------------------------------------- masks of another kind
def told_attempt(config: TrainerConfig, number: int, draws: bool) -> tuple[str, int, bool]:
    """An attempt, of an older trainer where `draws`; and whether this rank was told of its masks."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        if draws:
            patch.setattr(saving, "drops", lambda config: False)
        ends = attempt(config, number)
    return *ends, "dropout's masks are by place from here on" in said.getvalue()


@pytest.mark.parametrize(("share", "draws"), [(0.2, True), (0.2, False), (0.0, True)])
def test_a_run_that_began_with_drawn_masks_goes_on_and_says_so(
    share: float, draws: bool, tmp_path: Path
) -> None:
    def until(last: int) -> TrainerConfig:
        return card(tmp_path, model={"hidden_dropout": share}, run={"exit_interval": last})

    first = run_ranks(told_attempt, 2, until(HALF), 1, draws, launch=False)
    second = run_ranks(told_attempt, 2, until(END), 2, False, launch=False)
    assert first == [("exit-interval", HALF, False)] * 2
    assert second == [("exit-interval", END, draws and share > 0.0), ("exit-interval", END, False)]


# ----------------------------------------------------------------------------- restore drill
# The drill: a checkpoint is copied away, restored into a new run directory, and the training goes
# on as if nothing was. The next losses are those of the training that was never interrupted, bit
# for bit.


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
        "folder": FolderArchive(tmp_path / "store", "store", Owner("tiny")),
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
