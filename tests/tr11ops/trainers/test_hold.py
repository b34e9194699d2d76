"""What the run holds of another trainer's checkpoints, and what is put back before a launch."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.trainers.folders import LATER, WHOLE_ARCHIVE, age, lay
from tr11ops.base.errors import Refusal
from tr11ops.checkpoints.catalogue import read_catalogue
from tr11ops.checkpoints.screen import table
from tr11ops.cli.main import execute
from tr11ops.dialects.dialect import dialect_named
from tr11ops.rundir.checkpoint_scan import list_rows
from tr11ops.rundir.claims import Clocks
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trainers.checkpoints import FoundCheckpoint, survey
from tr11ops.trainers.held import HoldPlace, read_origin, take_hold
from tr11ops.trainers.hold import Holder
from tr11ops.trainers.prepare import ResumePoint, prepare
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.errors import LeaseLost
from trainer.contract.manifest import Manifest, file_digest, manifest_faults
from trainer.contract.paths import RunPaths
from trainer.contract.resumable import ResumeNeed, lack_of, size_faults


def no_fence() -> None:
    """The lease is held."""


def quiet(line: str) -> None:
    """No one reads it."""


def noon() -> float:
    return LATER


def never(seconds: float) -> None:
    raise AssertionError("nothing is being written: nothing is waited for")


HUGGING_FACE = {
    "trainer_state.json": "{{}}",
    "rng_state_0.pth": WHOLE_ARCHIVE,
    "rng_state_1.pth": WHOLE_ARCHIVE,
    "pytorch_model.bin": "weights of step {step}",
    "optimizer.pt": WHOLE_ARCHIVE,
    "inner/part.bin": "more",
}
FILES: Mapping[str, Mapping[str, str]] = {
    "huggingface": {f"checkpoint-{{step}}/{name}": text for name, text in HUGGING_FACE.items()},
    "megatron": {
        "iter_{step:07d}/.metadata": "m",
        "iter_{step:07d}/__0_0.distcp": "weights of step {step}",
        "latest_checkpointed_iteration.txt": "{step}",
    },
    "lightning": {"epoch=0-step={step}.ckpt": WHOLE_ARCHIVE},
    "nanochat": {
        "model_{step:06d}.pt": WHOLE_ARCHIVE,
        "meta_{step:06d}.json": "{{}}",
        "optim_{step:06d}_rank0.pt": "optimizer of step {step}",
        "optim_{step:06d}_rank1.pt": "x",
    },
}
NAMES = {
    "huggingface": "checkpoint-{step}",
    "megatron": "iter_{step:07d}",
    "lightning": "epoch=0-step={step}.ckpt",
    "nanochat": "model_{step:06d}.pt",
}


TRACKER = "latest_checkpointed_iteration.txt"


class Bench:
    """A run directory, and beside it a trainer's folder with checkpoints of two ranks."""

    def __init__(self, root: Path, dialect: str = "huggingface"):
        rules = dialect_named(dialect).checkpoints
        assert rules is not None
        self.dialect, self.folder = dialect, root / "out"
        self.folder.mkdir()
        self.paths = RunPaths(root / "run", "r", "main")
        told = rules.newest == "told"
        self.place = HoldPlace(dialect, rules, self.folder, self.paths, ranks=2, told=told)
        self.said: list[str] = []

    def save(self, *steps: int) -> None:
        for step in steps:
            files = {
                name.format(step=step): text if text == WHOLE_ARCHIVE else text.format(step=step)
                for name, text in FILES[self.dialect].items()
            }
            lay(self.folder, files)

    def name(self, step: int) -> str:
        return NAMES[self.dialect].format(step=step)

    def hold(self, fence: Callable[[], None] = no_fence, seconds: float = 20.0) -> Holder:
        holder = Holder(self.place, fence, self.said.append, clock=noon)
        holder.start()
        try:
            holder.finish(seconds)
        finally:
            holder.stop()
        return holder

    def prepare(self) -> ResumePoint | None:
        return prepare(self.place, no_fence, self.said.append, clock=noon, pause=never)

    def manifest(self, step: int) -> Manifest:
        found = Manifest.read(self.paths.checkpoint(step))
        assert found is not None
        return found

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints that are held and whole."""
        rows = list_rows(self.paths.checkpoints, None, ResumeNeed(trainer="foreign"))
        assert all(row.is_sound for row in rows)
        return [row.step for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("dialect", sorted(FILES))
def test_whole_checkpoints_are_held_listed_and_put_back_as_they_were(
    tmp_path: Path, dialect: str
) -> None:
    bench = Bench(tmp_path, dialect)
    if dialect == "megatron":  # its tracker says nothing of older ones
        bench.save(16)
    else:
        bench.save(8, 16)
    before = contents(bench.folder)
    bench.hold()
    assert bench.steps == ([16] if dialect == "megatron" else [8, 16])
    assert read_latest(bench.paths.checkpoints) == 16
    manifest = bench.manifest(16)
    assert manifest.foreign is not None and manifest.foreign.name == bench.name(16)
    assert not manifest_faults(bench.paths.checkpoint(16), manifest, read_digests=True)
    assert contents(bench.folder) == before
    shutil.rmtree(bench.folder)
    start = bench.prepare()
    assert start == ResumePoint(16, bench.name(16), bench.folder / bench.name(16))
    assert contents(bench.folder) == {
        path: text for path, text in before.items() if "8" not in path
    }
    assert bench.prepare() == start  # again, nothing changes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_the_held_files_are_links_and_their_rights_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    weights = bench.folder / "checkpoint-8" / "pytorch_model.bin"
    weights.chmod(0o600)
    bench.hold()
    held = bench.paths.checkpoint(8) / "foreign" / "checkpoint-8" / "pytorch_model.bin"
    assert held.samefile(weights) and weights.stat().st_mode & 0o777 == 0o600


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


def test_our_own_trainer_takes_none_of_them(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    bench.hold()
    fault = lack_of(bench.manifest(8), ResumeNeed(trainer="tr11"))
    assert fault is not None and fault.is_foreign
    assert "checkpoint-8 of another trainer (huggingface)" in fault.text
    own = replace(bench.manifest(8), foreign=None)
    assert lack_of(own, ResumeNeed(trainer="foreign")) is not None


def test_a_launch_that_lost_the_lease_publishes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    asked = []

    def fence() -> None:
        asked.append(1)
        if len(asked) > 1:
            raise LeaseLost("another trainer holds this run's lease")

    holder = bench.hold(fence)
    assert holder.lost and bench.steps == [] and read_latest(bench.paths.checkpoints) is None
    bench.hold()  # the next launch goes on with what it left
    assert bench.steps == [8]


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


# ----------------------------------------------------------------------------- saved again
def held_file(bench: Bench, step: int, file: str) -> Path:
    return bench.paths.checkpoint(step) / "foreign" / bench.name(step) / file


def write_over(path: Path, text: str, moment: float) -> None:
    """Write into a file as it lies there, so that each link to it holds the new bytes."""
    with path.open("r+") as stream:
        stream.write(text)
    os.utime(path, (moment, moment))


def test_one_that_was_written_over_while_it_was_being_held_is_not_held_as_sound(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    hidden = take_hold(bench.place, found_of(bench, 8), LATER)
    write_over(bench.folder / "checkpoint-8" / "pytorch_model.bin", "WEIGHTS", LATER - 100)
    bench.hold()
    assert not hidden.exists()
    assert bench.steps == [8]  # as it is now
    manifest = bench.manifest(8)
    assert not manifest_faults(bench.paths.checkpoint(8), manifest, read_digests=True)
    assert any("is not held as it was" in line for line in bench.said)


def found_of(bench: Bench, step: int) -> FoundCheckpoint:
    found = survey(bench.place.rules, bench.folder, 2, LATER)
    return next(one for one in found.found if one.step == step)


def test_one_that_was_written_over_later_is_unsound_at_once_and_held_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8, 16)
    bench.hold()
    write_over(bench.folder / "checkpoint-16" / "pytorch_model.bin", "WEIGHTS", LATER - 5)
    assert bench.hold(seconds=0.2).seen is not None  # being written: not held yet
    assert bench.manifest(16).created < LATER - 5
    prepare(bench.place, no_fence, quiet, clock=noon, pause=age_of(bench, LATER - 100))
    row = next(row for row in list_rows(bench.paths.checkpoints, None) if row.step == 16)
    assert "differs" in str(size_faults(Path(row.path), bench.manifest(16)))
    bench.hold()
    assert bench.steps == [8, 16]
    assert not manifest_faults(bench.paths.checkpoint(16), bench.manifest(16), read_digests=True)
    names = sorted(path.name for path in bench.paths.checkpoints.iterdir())
    assert names == ["global_step16", "global_step8", "latest"]  # the links of old are of no use


def age_of(bench: Bench, moment: float) -> Callable[[float], None]:
    def pause(seconds: float) -> None:
        path = bench.folder / "checkpoint-16" / "pytorch_model.bin"
        os.utime(path, (moment, moment))

    return pause


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


def test_another_number_of_ranks_is_refused_where_the_trainer_cannot(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    bench.hold()
    shutil.rmtree(bench.folder)
    bench.place = replace(bench.place, ranks=4)
    with pytest.raises(Refusal, match="written by 2 ranks, this launch has 4"):
        bench.prepare()


# ----------------------------------------------------------------------------- killed
def run_killed_at(point: int, work: Callable[[], object]) -> bool:
    """Do something in a child process that is killed before its `point`-th change of a file system;
    returns whether it came to its end before.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status
        return status == 0
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        is_writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
        if event not in CHANGES and not is_writing:
            return
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(77)


CHANGES = {"os.link", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.utime", "os.truncate"}


def test_killed_at_any_point_a_holder_leaves_nothing_half_that_is_taken_for_whole(
    tmp_path: Path,
) -> None:
    point, done = 1, False
    while not done:
        root = tmp_path / str(point)
        root.mkdir()
        bench = Bench(root)
        bench.save(8, 16)
        before = contents(bench.folder)
        done = run_killed_at(point, bench.hold)
        for step in bench.steps:
            manifest = bench.manifest(step)
            assert not manifest_faults(bench.paths.checkpoint(step), manifest, read_digests=True)
        assert contents(bench.folder) == before
        bench.hold()
        assert bench.steps == [8, 16] and read_latest(bench.paths.checkpoints) == 16
        assert contents(bench.folder) == before
        hidden = [one.name for one in bench.paths.checkpoints.iterdir() if one.name[0] == "."]
        assert not [name for name in hidden if "holding" in name]
        shutil.rmtree(root)
        point += 1
    assert point > 40


@pytest.mark.parametrize("dialect", sorted(FILES))
def test_killed_at_any_point_what_is_put_back_is_whole_or_is_put_back_again(
    tmp_path: Path, dialect: str
) -> None:
    def ready(root: Path) -> Bench:
        root.mkdir()
        bench = Bench(root, dialect)
        bench.save(8)
        bench.hold()
        bench.save(16)
        bench.hold()
        for path in bench.folder.glob("*16*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif "rank0" not in path.name:
                path.unlink()
        return bench

    point, done = 1, False
    while not done:
        bench = ready(tmp_path / str(point))
        old = contents(bench.folder)
        done = run_killed_at(point, bench.prepare)
        start = bench.prepare()
        assert start is not None and start.step == 16, point
        found = survey(bench.place.rules, bench.folder, 2, LATER)
        assert found.wanted is not None and found.wanted.step == 16
        kept = contents(bench.folder) | contents_aside(bench)
        tracker = bench.place.rules.tracker
        assert {path: text for path, text in old.items() if path != tracker}.items() <= kept.items()
        shutil.rmtree(tmp_path / str(point))
        point += 1
    assert point > 5


def contents_aside(bench: Bench) -> dict[str, bytes]:
    folder = bench.folder.with_name("out.set-aside")
    return contents(folder) if folder.exists() else {}


# ----------------------------------------------------------------------------- copies
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


def no_link(*given: object, **named: object) -> None:
    """As between two file systems."""
    raise OSError(errno.EXDEV, "Invalid cross-device link")


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


# ----------------------------------------------------------------------------- what it costs
def test_held_bytes_count_once_and_what_the_trainer_deleted_is_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.save(8, 16)
    bench.hold()
    total = sum(len(text) for text in contents(bench.folder / "checkpoint-8").values())
    assert [whole - freed for whole, freed in sizes(bench)] == [total, total + 1]  # "step 16"
    shutil.rmtree(bench.folder / "checkpoint-8")
    assert [whole - freed for whole, freed in sizes(bench)] == [0, total + 1]
    directory = RunDirectory(bench.paths, kill_switch=tmp_path / "kill")
    found = read_catalogue(directory, Clocks(LATER), need=ResumeNeed(trainer="foreign"))
    text = table(found, LATER)
    assert "held of huggingface: " in text and "here alone" in text and "?" in text


def sizes(bench: Bench) -> list[tuple[int, int]]:
    rows = list_rows(bench.paths.checkpoints, None)
    return [(row.bytes, row.freed) for row in rows]


def test_one_that_was_removed_is_not_held_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for step in (8, 16, 24):
        bench.save(step)
        age(bench.folder / f"checkpoint-{step}", LATER - 1000 + step)
    bench.hold()
    shutil.rmtree(bench.paths.checkpoint(16))  # as retention does
    bench.hold()
    bench.prepare()
    bench.hold()
    assert bench.steps == [8, 24]


def test_before_a_launch_nothing_is_copied_that_can_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    monkeypatch.setattr(os, "link", no_link)
    start = bench.prepare()
    assert start is not None and start.step == 8 and bench.said == []
    assert list(bench.paths.checkpoints.iterdir()) == []


def test_what_was_whole_and_has_not_changed_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.save(8)
    first = survey(bench.place.rules, bench.folder, 2, LATER)
    monkeypatch.setattr("tr11ops.trainers.checkpoints.check_rule", never)
    assert survey(bench.place.rules, bench.folder, 2, LATER, before=first) == first
    os.utime(bench.folder / "checkpoint-8" / "optimizer.pt", (LATER - 50, LATER - 50))
    with pytest.raises(TypeError):
        survey(bench.place.rules, bench.folder, 2, LATER, before=first)


# ----------------------------------------------------------------------------- which it is told
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


# ----------------------------------------------------------------------------- commands
def test_the_commands_show_and_verify_what_is_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench(tmp_path)
    bench.save(8, 16)
    bench.hold()
    card = tmp_path / "tr11.toml"
    card.write_text(
        f'[run]\nname = "r"\ndirectory = "{bench.paths.root}"\n[slurm]\nnodes = 1\ngpus_per_node = 0\n'
        "workers_per_node = 2\ncpus_per_task = 1\ntime_limit = '00:10:00'\n"
        f'[trainer]\ndialect = "huggingface"\ncommand = ["train.py"]\nfolder = "{bench.folder}"\n'
    )
    words = ("--run", str(card))
    assert execute(["checkpoints", "list", *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["layout"], row["complete"], row["lack"]) for row in rows] == [
        (8, "foreign", True, ""), (16, "foreign", True, ""),
    ]  # fmt: skip
    assert {row["consumed_tokens"] for row in rows} == {None}
    assert execute(["checkpoints", "verify", "--all", *words]) == 0
    capsys.readouterr()
    write_over(held_file(bench, 16, "pytorch_model.bin"), "WEIGHTS", LATER - 10)
    assert execute(["checkpoints", "verify", "16", *words]) == 1
    assert "its digest differs" in capsys.readouterr().err
