"""What a launch of another trainer finds: what is put back of what the run holds, and what is moved out of its way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.trainers.folders import LATER, LONG_AGO, age, age_to, lay
from tests.tr11ops.trainers.holding import (
    TRACKER,
    Bench,
    contents,
    held_file,
    no_fence,
    noon,
    quiet,
    write_over,
)
from tr11ops.base.errors import Refusal
from tr11ops.trainers.held import read_origin
from tr11ops.trainers.prepare import prepare
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.manifest import file_digest


def test_what_is_not_whole_is_not_held(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8, 16, 24)
    (bench.folder / "checkpoint-16" / "trainer_state.json").unlink()
    age(bench.folder)
    os.utime(bench.folder / "checkpoint-24", (LATER - 5, LATER - 5))
    assert prepare(bench.place, no_fence, quiet, clock=noon, pause=age_all(bench)) is not None
    assert 16 not in bench.steps


def age_all(bench: Bench) -> Callable[[float], None]:
    def pause(seconds: float) -> None:
        age(bench.folder)

    return pause


def test_a_broken_newest_one_gives_way_to_the_one_that_is_held(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8, 16)
    bench.hold()
    shutil.rmtree(bench.folder / "checkpoint-8")
    (bench.folder / "checkpoint-16" / "optimizer.pt").unlink()
    age(bench.folder)
    start = bench.prepare()
    assert start is not None and start.name == "checkpoint-16"
    assert (bench.folder / "checkpoint-16" / "optimizer.pt").exists()
    assert (tmp_path / "out.set-aside" / "checkpoint-16").is_dir()


def test_a_start_is_refused_where_the_folder_cannot_be_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.folder.rmdir()
    bench.folder.write_text("no folder")
    with pytest.raises(Refusal, match="cannot be read"):
        bench.prepare()


def test_a_training_begins_anew_where_there_is_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.prepare() is None
    assert read_origin(bench.paths.checkpoint(8)) is None


def test_a_damaged_one_is_not_put_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8, 16)
    bench.hold()
    shutil.rmtree(bench.folder)
    path = held_file(bench, 16, "pytorch_model.bin")
    kept = path.stat().st_mtime
    write_over(path, "WEIGHTS", kept)
    start = bench.prepare()
    assert start is not None and start.step == 8
    shutil.rmtree(bench.folder)
    write_over(held_file(bench, 8, "pytorch_model.bin"), "WEIGHTS", kept)
    with pytest.raises(Refusal, match="none is resumable"):
        bench.prepare()


def digests_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a preparation reads to its last byte; only that."""
    read: list[str] = []

    def digest(path: Path) -> str:
        read.append(path.relative_to(bench.paths.checkpoint(16)).as_posix())
        return file_digest(path)

    monkeypatch.setattr("tr11ops.trainers.prepare.file_digest", digest)
    start = bench.prepare()
    assert start is not None and start.step == 16
    return read


def test_what_is_as_it_was_sealed_is_put_back_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.save(8, 16)
    bench.hold()
    shutil.move(bench.folder, tmp_path / "elsewhere")
    assert digests_read(bench, monkeypatch) == ["foreign.json"]
    shutil.rmtree(bench.folder)
    bench.hold()  # who looks while the trainer runs sees that only a name has gone
    assert digests_read(bench, monkeypatch) == ["foreign.json"]


def test_what_is_not_as_it_was_sealed_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.save(8, 16)
    bench.hold()
    path = held_file(bench, 16, "pytorch_model.bin")
    kept = path.stat().st_mtime
    write_over(path, path.read_text(), kept)  # the same bytes, and the same time of writing
    shutil.move(bench.folder, tmp_path / "elsewhere")
    read = digests_read(bench, monkeypatch)
    assert read == ["foreign.json", "foreign/checkpoint-16/pytorch_model.bin"]
    shutil.rmtree(bench.folder)  # no one looked between that and the next launch
    assert len(digests_read(bench, monkeypatch)) == len(bench.manifest(16).files)


def test_a_copy_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.place = replace(bench.place, rules=replace(bench.place.rules, rewritten=True))
    bench.save(16)
    bench.hold()
    shutil.move(bench.folder, tmp_path / "elsewhere")
    assert len(digests_read(bench, monkeypatch)) == len(bench.manifest(16).files)


def with_broken_newest(root: Path) -> Bench:
    """Megatron's older format: a held one, and a newest that is cut short; only the tracker tells a
    whole one, and says nothing of the one before.
    """
    bench = Bench(root, "megatron")
    lay(bench.folder, {"iter_0000008/mp_rank_00/w.pt": "weights", TRACKER: "8"})
    bench.hold()
    assert bench.steps == [8]
    lay(bench.folder, {"iter_0000016/part.pt": "cut", TRACKER: "16"})
    return bench


def test_an_older_one_that_lies_as_it_was_held_is_whole(tmp_path: Path) -> None:
    bench = with_broken_newest(tmp_path)
    start = bench.prepare()
    assert start is not None and start.step == 8
    assert (bench.folder / TRACKER).read_text() == "8"
    assert (tmp_path / "out.set-aside" / "iter_0000016").is_dir()


def test_an_older_one_that_was_saved_again_since_stays_unknown(tmp_path: Path) -> None:
    bench = with_broken_newest(tmp_path)
    lay(bench.folder, {"iter_0000008/mp_rank_00/other.pt": "another save"})
    with pytest.raises(Refusal, match="iter_0000008"):
        bench.prepare()


def test_a_trainer_that_went_back_goes_on_from_what_it_wrote_last(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8, 16, 24)
    bench.hold()
    shutil.rmtree(bench.folder / "checkpoint-24")
    lay(bench.folder, {"checkpoint-16/pytorch_model.bin": "another course"})
    age(bench.folder / "checkpoint-16", LATER - 100)
    start = bench.prepare()
    assert start is not None and start.step == 16
    assert any("of an earlier course" in line for line in bench.said)
    bench.hold()
    assert read_latest(bench.paths.checkpoints) == 16
    assert bench.prepare() == start


@pytest.mark.parametrize("nanoseconds", [120, 1_665])
def test_a_checkpoint_of_the_same_moment_is_of_the_same_course(
    tmp_path: Path, nanoseconds: int
) -> None:
    """A float of seconds rounds these moments to either side."""
    bench = Bench(tmp_path)
    bench.save(8, 16)
    age_to(bench.folder, int(LONG_AGO) * 10**9 + nanoseconds)
    bench.hold()
    shutil.rmtree(bench.folder / "checkpoint-16")
    start = bench.prepare()
    assert start is not None and start.step == 16
    assert not any("of an earlier course" in line for line in bench.said)


def test_another_number_of_ranks_is_refused_where_the_trainer_cannot(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    bench.hold()
    shutil.rmtree(bench.folder)
    bench.place = replace(bench.place, ranks=4)
    with pytest.raises(Refusal, match="written by 2 ranks, this launch has 4"):
        bench.prepare()


def test_a_trainer_that_is_told_which_one_gets_the_newest_whole_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "nanochat")
    bench.save(8, 16, 24)
    (bench.folder / "optim_000016_rank1.pt").unlink()
    (bench.folder / "model_000024.pt").write_text("cut")
    age(bench.folder)
    start = bench.prepare()
    assert start is not None and start.step == 8
    assert sorted(path.name for path in bench.folder.iterdir()) == [
        "meta_000008.json", "model_000008.pt", "optim_000008_rank0.pt", "optim_000008_rank1.pt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("optim_000016_rank9.pt", "whether model_000016.pt in .* is whole is not known"),
        (
            None,
            "none is whole; restore a copy, or move model_000016.pt away to start from the beginning",
        ),
    ],
)
def test_a_start_is_refused_where_it_would_be_a_risk(
    tmp_path: Path, spoil: str | None, said: str
) -> None:
    bench = Bench(tmp_path, "nanochat")
    bench.save(8, 16)
    if spoil is not None:
        (bench.folder / spoil).write_text("x")
    else:
        for step in (8, 16):
            (bench.folder / f"model_{step:06d}.pt").write_text("cut")
    age(bench.folder)
    before = contents(bench.folder)
    with pytest.raises(Refusal, match=said):
        bench.prepare()
    assert contents(bench.folder) == before
