"""Trainers that know nothing of tr11, with two processes each: what tr11 reads of them, and a save
that was cut, which their next start would die of, moved out of its way.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.tr11ops.backup.copy_cases import copy, make_archive, quick
from tests.tr11ops.trainers.folders import age
from tests.tr11ops.trainers.unchanged import (
    HUGGING_FACE,
    KINDS,
    LIGHTNING,
    STEPS,
    TITAN,
    Kind,
    train,
)
from tr11ops.backup.restorable import unreceipted
from tr11ops.backup.restore import restore_checkpoint
from tr11ops.cli.main import execute
from tr11ops.dialects.dialect import dialect_named
from tr11ops.rundir.checkpoint_scan import list_rows
from tr11ops.trainers.held import HoldPlace
from tr11ops.trainers.hold import Holder
from tr11ops.trainers.prepare import prepare
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.paths import RunPaths
from trainer.contract.resumable import ResumeNeed


@pytest.fixture(scope="module", params=KINDS, ids=[kind.dialect for kind in KINDS])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Kind, Path, Path]:
    """A training that came to its end: its kind, its folder and its log."""
    kind: Kind = request.param
    place = tmp_path_factory.mktemp(kind.dialect)
    folder, log = place / "out", place / "train.log"
    assert train(kind, folder, log) == 0, log.read_text(errors="replace")[-2000:]
    age(folder)
    return kind, folder, log


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    code = execute(["trainer", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_all_of_a_training_is_read(
    trained: tuple[Kind, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, folder, log = trained
    code, said = check(
        capsys,
        "check",
        "--log",
        str(log),
        "--folder",
        str(folder),
        "--world-size",
        "2",
        "--status",
        "0",
    )
    assert code == 0
    assert said["dialect"] == kind.dialect  # by the log alone
    assert said["log"]["last"] == STEPS  # type: ignore[index]
    states = {one["step"]: one["state"] for one in said["checkpoints"]["found"]}  # type: ignore[index]
    assert states == {8: "whole", 16: "whole", 24: "whole"}
    # torchtitan's log names no last step: nothing is made of its end by guess
    end = "unexplained" if kind is TITAN else "finished"
    assert said["end"]["reason"] == end  # type: ignore[index]


@pytest.mark.parametrize(
    "trained", [HUGGING_FACE, TITAN], indirect=True, ids=["huggingface", "torchtitan"]
)
def test_a_save_that_was_cut_is_moved_aside_and_the_next_start_goes_on(
    trained: tuple[Kind, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, folder, _ = trained
    out, log = tmp_path / "out", tmp_path / "again.log"
    shutil.copytree(folder, out)
    damaged = out / kind.checkpoints / kind.newest / kind.cut
    os.truncate(damaged, damaged.stat().st_size // 2)
    if kind is TITAN:  # the second save into a folder, cut: its old .metadata is still there
        os.utime(damaged)
        age(out)
        os.utime(damaged, (1_700_000_100, 1_700_000_100))
    else:
        age(out)
    # without tr11: every next start dies of it
    lost = tmp_path / "lost"
    shutil.copytree(out, lost)
    assert train(kind, lost, log) != 0
    words = ("--dialect", kind.dialect, "--folder", str(out), "--world-size", "2")
    code, said = check(capsys, "check", *words)
    assert code == 1 and kind.newest in str(said["conflict"])
    code, said = check(capsys, "set-aside", *words, "--yes")
    assert code == 0 and said["goes_back_to"] == kind.before
    assert train(kind, out, log) == 0, log.read_text(errors="replace")[-2000:]
    assert (out / kind.checkpoints / kind.newest / kind.cut).exists()
    code, said = check(capsys, "check", "--log", str(log), "--dialect", kind.dialect)
    # a bar that is drawn ten times a second at most may leave the first step out
    assert 16 < said["log"]["first"] <= STEPS  # type: ignore[index]
    if kind is TITAN:
        assert said["log"]["first"] == 17  # type: ignore[index]
        assert said["log"]["resumed_at"] == 16  # type: ignore[index]


@pytest.mark.parametrize("trained", [LIGHTNING], indirect=True, ids=["lightning"])
def test_a_file_that_was_cut_is_seen(
    trained: tuple[Kind, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, folder, _ = trained
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    os.truncate(out / kind.newest, 1000)
    age(out)
    _, said = check(capsys, "check", "--dialect", kind.dialect, "--folder", str(out))
    states = {one["step"]: one["state"] for one in said["checkpoints"]["found"]}  # type: ignore[index]
    assert states == {8: "whole", 16: "whole", 24: "broken"}
    assert said["checkpoints"]["wanted"]["name"] == kind.before  # type: ignore[index]
    assert any("its command says which one" in line for line in said["unknown"])  # type: ignore[union-attr]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def nothing() -> None:
    """The lease is held."""


def test_a_checkpoint_is_held_copied_restored_elsewhere_and_the_trainer_goes_on_from_it(
    trained: tuple[Kind, Path, Path], tmp_path: Path
) -> None:
    kind, folder, _ = trained
    rules = dialect_named(kind.dialect).checkpoints
    assert rules is not None
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    told = kind is LIGHTNING
    paths = RunPaths(tmp_path / "run", "r", "main")
    place = HoldPlace(kind.dialect, rules, out / kind.checkpoints, paths, ranks=2, told=told)
    holder = Holder(place, nothing, print)
    holder.start()
    assert holder.finish(60.0)
    holder.stop()
    rows = list_rows(paths.checkpoints, holder.held, ResumeNeed(trainer="foreign"))
    assert [(row.step, row.state, row.is_sound) for row in rows] == [
        (8, "whole", True), (16, "whole", True), (24, "whole", True),
    ]  # fmt: skip
    # the trainer deletes its own; the copy is of what is held
    before = contents(out / kind.checkpoints / kind.before)
    if told:
        before = {kind.before: (out / kind.before).read_bytes()}
    shutil.rmtree(out)
    archive = make_archive(tmp_path / "store")
    receipt = copy(archive, paths.checkpoint(16), format="tar")
    found = unreceipted(archive, receipt.location, 16, "main")
    assert found is not None and found.kind == "full"
    # into another run directory, whose trainer has nothing yet
    elsewhere = RunPaths(tmp_path / "elsewhere", "r", "main")
    restore_checkpoint(archive, receipt, elsewhere.checkpoints, quick())
    manifest = Manifest.read(elsewhere.checkpoint(16))
    assert manifest is not None and manifest.foreign is not None
    assert not manifest_faults(elsewhere.checkpoint(16), manifest, read_digests=True)
    new = tmp_path / "new"
    start = prepare(
        HoldPlace(kind.dialect, rules, new / kind.checkpoints, elsewhere, ranks=2, told=told),
        nothing,
        print,
    )
    assert start is not None and (start.step, start.name) == (16, kind.before)
    if told:
        assert {start.name: start.path.read_bytes()} == before
    else:
        assert contents(start.path) == before
    log = tmp_path / "again.log"
    more = [str(start.path)] if told else []
    assert train(kind, new, log, *more) == 0, log.read_text(errors="replace")[-2000:]
    assert (new / kind.checkpoints / kind.newest).exists()
    if kind is TITAN:
        assert "Training starts at step 17" in log.read_text()
    if kind is HUGGING_FACE:
        state = json.loads((new / kind.newest / "trainer_state.json").read_text())
        assert state["global_step"] == STEPS
    # what is held is what was restored, whatever the trainer has written since
    assert not manifest_faults(elsewhere.checkpoint(16), manifest, read_digests=True)
