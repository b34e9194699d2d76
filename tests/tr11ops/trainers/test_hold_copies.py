"""Checkpoints that are held as copies: of a file that is written over, and where no link can be made."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.tr11ops.trainers.folders import LATER
from tests.tr11ops.trainers.holding import (
    Bench,
    held_file,
    no_fence,
    no_link,
    noon,
    write_over,
)
from tr11ops.trainers.hold import Holder
from trainer.contract.manifest import manifest_faults


def save_over(bench: Bench, step: int, moment: float) -> None:
    """As nanoGPT saves: into the one file that is there."""
    path = bench.folder / "ckpt.pt"
    content = pickle.dumps({"model": {"iter_num": "x"}, "iter_num": step, "loss": 0.5}, protocol=2)
    with (
        path.open("r+b" if path.exists() else "wb") as stream,
        zipfile.ZipFile(stream, "w") as archive,
    ):
        archive.writestr("ckpt/data.pkl", content)
        archive.writestr("ckpt/data/0", f"weights of step {step}" * 100)
    os.utime(path, (moment, moment))


def test_a_file_that_is_written_over_is_copied_by_the_step_that_it_holds(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "nanogpt")
    for step in (250, 500):
        save_over(bench, step, LATER - 1000 + step)
        bench.hold()
    assert bench.steps == [250, 500]
    older = bench.paths.checkpoint(250)
    assert not manifest_faults(older, bench.manifest(250), read_digests=True)
    whole = (bench.folder / "ckpt.pt").read_bytes()
    (bench.folder / "ckpt.pt").write_bytes(whole[:100])  # killed in the save after it
    os.utime(bench.folder / "ckpt.pt", (LATER - 100, LATER - 100))
    start = bench.prepare()
    assert start is not None and start.step == 500
    assert (bench.folder / "ckpt.pt").read_bytes() == whole
    assert (tmp_path / "out.set-aside" / "ckpt.pt").read_bytes() == whole[:100]
    save_over(bench, 750, LATER - 90)  # into its own file, not into what is held
    assert not manifest_faults(bench.paths.checkpoint(500), bench.manifest(500), read_digests=True)


def test_where_no_link_can_be_made_a_copy_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    monkeypatch.setattr(os, "link", no_link)
    bench.hold()
    path = held_file(bench, 8, "pytorch_model.bin")
    assert bench.steps == [8] and path.stat().st_nlink == 1
    write_over(bench.folder / "checkpoint-8" / "pytorch_model.bin", "WEIGHTS", LATER - 50)
    assert path.read_text() == "weights of step 8"
    shutil.rmtree(bench.folder)
    start = bench.prepare()
    assert start is not None and start.step == 8


def test_without_room_for_a_copy_that_is_said_once_and_nothing_else_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, "nanogpt")
    save_over(bench, 250, LATER - 500)
    facts = os.statvfs(tmp_path)

    def full(path: object) -> os.statvfs_result:
        return os.statvfs_result((*facts[:4], 0, *facts[5:]))

    monkeypatch.setattr(os, "statvfs", full)
    holder = Holder(bench.place, no_fence, bench.said.append, clock=noon)
    for _ in range(3):
        holder._look(LATER)
    assert len(bench.said) == 1 and "has no room for a copy" in bench.said[0]
    assert list(bench.paths.checkpoints.iterdir()) == []
    start = bench.prepare()
    assert start is not None and start.name == "ckpt.pt"
    monkeypatch.undo()
    bench.hold()
    assert bench.steps == [250]


def test_before_a_launch_nothing_is_copied_that_can_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    monkeypatch.setattr(os, "link", no_link)
    start = bench.prepare()
    assert start is not None and start.step == 8 and bench.said == []
    assert list(bench.paths.checkpoints.iterdir()) == []
