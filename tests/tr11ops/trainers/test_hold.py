"""What the run holds of another trainer's checkpoints, while it trains."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.trainers.folders import LATER, LONG_AGO, age, age_to
from tests.tr11ops.trainers.holding import (
    FILES,
    Bench,
    contents,
    held_file,
    never,
    no_fence,
    noon,
    quiet,
    write_over,
)
from tr11ops.checkpoints.catalogue import read_catalogue
from tr11ops.checkpoints.screen import table
from tr11ops.cli.main import execute
from tr11ops.rundir.checkpoint_scan import list_rows
from tr11ops.rundir.claims import Clocks
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trainers.checkpoints import FoundCheckpoint, survey
from tr11ops.trainers.held import take_hold
from tr11ops.trainers.prepare import ResumePoint, prepare
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.errors import LeaseLost
from trainer.contract.manifest import manifest_faults
from trainer.contract.resumable import ResumeNeed, lack_of, size_faults


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


@pytest.mark.parametrize("nanoseconds", [120, 1_665])
def test_one_of_the_same_moment_as_the_last_that_is_held_is_held_too(
    tmp_path: Path, nanoseconds: int
) -> None:
    """A float of seconds rounds these moments to either side."""
    bench = Bench(tmp_path)
    for step in (16, 8):
        bench.save(step)
        age_to(bench.folder, int(LONG_AGO) * 10**9 + nanoseconds)
        bench.hold()
    assert bench.steps == [8, 16]


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
