"""Ways to lose a checkpoint, each against a folder, a tar and a bucket: nothing is lost, and nothing lost is called safe.

Add a scenario as a test that takes `case`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.fault_proxy import Fault
from tests.tr11ops.backup.lose_it import KINDS, Case, invoke
from tests.tr11ops.backup.round_cases import CARD, DAY, flip, in_memory
from tr11ops.backup import overlap as overlapping
from tr11ops.backup.base import ArchiveAway, ArchiveRefused
from tr11ops.backup.data_sets import units_of
from tr11ops.backup.drill import Look, choose_copy, run_drill
from tr11ops.backup.overlap import parse_mounts, place_of
from tr11ops.backup.records import identity_of
from tr11ops.backup.source import read_source
from tr11ops.launch.archives import archive_checks, look_at_archives
from tr11ops.launch.check import Level
from tr11ops.run_identity import run_id
from tr11ops.runcard import load_card
from trainer.config_base import CardError
from trainer.contract import Manifest, manifest_faults


@pytest.fixture
def memory() -> Iterator[Path]:
    with in_memory() as folder:
        yield folder


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, memory: Path) -> Case:
    bucket = request.getfixturevalue("object_store") if request.param == "bucket" else None
    return Case(memory, request.param, bucket)


def copied(case: Case, *steps: int) -> None:
    """Steps that are saved and copied."""
    case.save(*steps)
    done = case.round()
    assert done.exit_code == 0 and [step for step, _ in case.copied(case.archive)] == list(steps), done


def faults_of(folder: Path) -> list[str]:
    manifest = Manifest.read(folder)
    assert manifest is not None
    return manifest_faults(folder, manifest, read_digests=True)


# ----------------------------------------------------------------------------- what prune goes by
def test_with_copies_seen_where_they_are_the_old_ones_go(case: Case) -> None:
    copied(case, 100, 200, 300, 400)
    assert not case.prune().failed and case.here() == [300, 400]


def test_a_copy_that_is_gone_keeps_its_checkpoint(case: Case) -> None:
    copied(case, 100, 200, 300, 400)
    case.drop(100, "optimizer/b")
    if case.kind == "bucket":  # a bucket is seen by a round
        case.round(copies=False, reading="none")
    assert case.prune().outcomes[0].step == 200 and case.here() == [100, 300, 400]
    assert "is damaged" in case.kept()[100] or "is on record, but" in case.kept()[100]


def test_a_receipt_that_is_gone_keeps_its_checkpoint(case: Case) -> None:
    copied(case, 100, 200, 300, 400)
    case.drop_receipt(100)
    if case.kind == "bucket":
        case.round(copies=False, reading="none")
    case.prune()
    assert case.here() == [100, 300, 400]


def test_a_copy_that_goes_while_prune_is_at_it_keeps_its_checkpoint(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the plan and the unlink, which is after the checkpoint was hidden."""
    from tr11ops.checkpoints import prune as pruning

    copied(case, 100, 200, 300, 400)
    hide = pruning.hide

    def hide_and_drop(folder: Path, name: str) -> str:
        hidden = hide(folder, name)
        case.drop_receipt(int(name.removeprefix("global_step")))
        if case.kind == "bucket":
            case.round(copies=False, reading="none")
        return hidden

    monkeypatch.setattr(pruning, "hide", hide_and_drop)
    assert [outcome.result for outcome in case.prune().outcomes] == ["kept", "kept"]
    assert case.here() == [100, 200, 300, 400] and not faults_of(case.checkpoints / "global_step100")


@pytest.mark.parametrize("days", [-3000.0, 3.0, 40.0])
def test_a_bucket_listed_long_ago_or_by_a_wrong_clock_keeps_all(
    memory: Path, object_store: ObjectStore, days: float
) -> None:
    case = Case(memory, "bucket", object_store)
    case.now -= days * DAY
    copied(case, 100, 200, 300, 400)
    assert case.prune().outcomes == () and case.here() == [100, 200, 300, 400]
    assert "last seen in the url" in case.kept()[100] or "a clock is wrong" in case.kept()[100]
    case.now += days * DAY
    case.round(copies=False, reading="none")
    assert not case.prune().failed and case.here() == [300, 400]


def test_a_copy_that_a_round_could_not_look_at_was_not_seen(case: Case) -> None:
    case.now -= 3 * DAY
    copied(case, 100, 200, 300, 400)
    case.now += 3 * DAY
    refuse(case, "global_step100.copy.json")
    done = case.round(copies=False, reading="none")
    assert done.exit_code == 1 and any("global_step100" in line for line in done.tallies[0].faults)
    assert case.copy(100).is_sound and case.copy(200).is_sound, "what could not be read says nothing of the bytes"
    case.prune()
    assert case.here() == ([100, 300, 400] if case.kind == "bucket" else [300, 400]), "a folder is looked at by prune"


def refuse(case: Case, text: str) -> None:
    """Reading files of such a name is refused from now on, and nothing else is."""

    def on(what: str, path: str, position: int) -> None:
        if what == "read" and text in path:
            raise ArchiveRefused(f"{path}: Permission denied")

    case.odd[case.archive] = {"on": on}


# ----------------------------------------------------------------------------- rot, whoever finds it
def test_rot_that_a_restore_finds_is_repaired_by_the_next_round(case: Case, tmp_path: Path) -> None:
    copied(case, 100)
    case.damage(100, "optimizer/b")
    result = invoke(case, f"restore 100 --into {tmp_path / 'new'}")
    assert result.exit_code == 1 and "the damage is on record, and tr11 backup run repairs it" in result.text
    assert case.copy(100).damaged == ("optimizer/b",) and not (tmp_path / "new" / "global_step100").exists()
    assert case.status()["damaged"] and case.journal("backup-damaged")
    assert [copy.step for copy in case.round().tallies[0].copied] == [100]
    assert case.copy(100).is_sound and not faults_of(case.restore(100, tmp_path / "new"))


def test_rot_that_a_drill_finds_is_repaired_by_the_next_round(case: Case) -> None:
    copied(case, 100)
    case.damage(100, "optimizer/b")
    archive = case.place().open(case.archive, case.card)
    newest = choose_copy(case.copies())
    assert newest is not None
    assert not run_drill(case.place(), archive, newest, look=lambda folder: Look(True, "")).passed
    assert case.copy(100).damaged == ("optimizer/b",)
    assert [copy.step for copy in case.round().tallies[0].copied] == [100] and case.copy(100).is_sound


def test_verify_typed_by_a_person_reads_everything(case: Case) -> None:
    copied(case, 100, 200)
    case.damage(200, "weights/a")
    due, typed, again = (invoke(case, line) for line in ("verify --due", "verify", "verify 200"))
    assert due.exit_code == 0 and "nothing was due" in due.text
    assert typed.exit_code == 1 and f"{case.archive}: DAMAGED: step 200 (full): weights/a" in typed.text
    assert again.exit_code == 1
    assert [copy.step for copy in case.round().tallies[0].copied] == [200]
    after = invoke(case, "verify")
    assert after.exit_code == 0 and "8 files read again" in after.text


def test_verify_of_a_step_whose_receipt_is_gone_says_damaged(case: Case) -> None:
    copied(case, 100)
    case.drop_receipt(100)
    result = invoke(case, "verify 100")
    assert result.exit_code == 1 and "DAMAGED: step 100" in result.text and "no copy" not in result.text


def test_rot_here_that_a_round_finds_keeps_the_sound_older_ones(case: Case) -> None:
    """Two newer ones rot in the run directory: the round that would copy them puts it on record, as a verify does."""
    copied(case, 100, 200)
    case.save(300, 400)
    for step in (300, 400):
        flip(case.checkpoints / f"global_step{step}" / "optimizer/b", 5)
    done = case.round()
    assert done.exit_code == 1 and "tr11 checkpoints remove 300" in " ".join(done.tallies[0].faults)
    assert [entry.step for entry in case.catalogue().checkpoints if entry.is_sound] == [100, 200]
    assert len(case.journal("checkpoint-damaged")) == 2
    case.prune()
    assert {100, 200} <= set(case.here())
    case.round()
    assert len(case.journal("checkpoint-damaged")) == 2, "what is known is not new"


def test_a_restore_over_rot_says_so_and_one_in_its_place_clears_the_record(case: Case) -> None:
    copied(case, 100)
    flip(case.checkpoints / "global_step100" / "weights/a", 3)
    line = f"restore 100 --into {case.checkpoints}"
    result = invoke(case, line)
    assert result.exit_code == 1 and "is not this copy (weights/a differs)" in result.text
    assert not case.catalogue().checkpoints[0].is_sound
    shutil.rmtree(case.checkpoints / "global_step100")
    result = invoke(case, line)
    assert result.exit_code == 0 and case.catalogue().checkpoints[0].is_sound, result.text


# ----------------------------------------------------------------------------- an archive that is the run directory
@pytest.mark.parametrize("where", ["root", "inside", "link", "file-url", "local-url", "checkpoints", "around"])
def test_an_archive_that_is_the_run_directory_is_refused_everywhere(memory: Path, where: str) -> None:
    case = Case(memory, "folder", None)
    copied(case, 100, 200, 300, 400)
    root = case.directory.root
    (memory / "link").symlink_to(root)
    (root / "deep" / "er").mkdir(parents=True)
    address = {
        "root": f"{root}", "inside": f"{root}/deep/er", "link": f"{memory}/link", "file-url": f"file://{root}",
        "local-url": f"local://{root}", "checkpoints": f"{case.checkpoints.parent}", "around": f"{root.parent}",
    }[where]  # fmt: skip
    key = "url" if "://" in address else "store"
    case.card = case.card.model_copy(update={"backup": case.card.backup.model_copy(update={key: address})})
    (check,) = [check for check in archive_checks(look_at_archives(case.card)) if check.name == f"backup.{key}"]
    assert check.level is Level.REFUSED and check.exit_code == 2 and "a copy there is no copy" in check.text
    done = case.run(key)
    assert done.exit_code == 1 and "a copy there is no copy" in done.tallies[0].faults[0]
    before = set(case.checkpoints.parent.rglob("*"))
    if key == "store":
        assert case.prune().outcomes == ()
    assert set(case.checkpoints.parent.rglob("*")) == before and not list(root.rglob("*.copy.json"))


def test_a_bind_mount_of_the_run_directory_is_it() -> None:
    """As the table of mounts shows it: part of one file system, at another place."""
    mounts = parse_mounts(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /scratch rw - lustre a:/s rw\n"
        "31 22 0:40 /team/run\\040one/checkpoints /archive/copies rw - lustre a:/s rw\n"
    )
    run = place_of("/scratch/team/run one", mounts)
    inside = place_of("/archive/copies/main", mounts)
    assert run == ("0:40", PurePosixPath("/team/run one")) and inside[0] == run[0]
    assert inside[1].is_relative_to(run[1]) and place_of("/archive", mounts) == ("8:1", PurePosixPath("/archive"))


def test_a_folder_of_the_archive_that_is_mounted_from_the_run_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(memory, "folder", None)
    (case.store / "checkpoints").mkdir()
    table = memory / "mounts"
    monkeypatch.setattr(overlapping, "MOUNTS", table)
    table.write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    assert overlapping.overlap(case.store, case.card.paths) == ""
    table.write_text(table.read_text() + f"23 22 8:1 {case.checkpoints.parent} {case.store}/checkpoints rw - x y rw\n")
    assert overlapping.overlap(case.store, case.card.paths).startswith("its folder checkpoints lies in the run dir")


@pytest.mark.parametrize("where", ["root", "inside", "checkpoints", "variant", "elsewhere"])
def test_the_run_directory_mounted_twice_over_the_network_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Neither path, table of mounts nor numbers tell: a file that is made here shows there."""
    case = Case(memory, "folder", None)
    (case.directory.root / "deep").mkdir()
    (memory / "alias").symlink_to(case.directory.root)
    (memory / "mounted").symlink_to(case.checkpoints.parent)
    target = {"root": "alias", "inside": "alias/deep", "checkpoints": "mounted", "elsewhere": "store"}
    folder = memory / target.get(where, "other")
    if where == "variant":
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "main").symlink_to(case.checkpoints)
    monkeypatch.setattr(overlapping, "_relation", lambda *_: "")
    before = set(case.directory.root.rglob("*"))
    words = {"root": "is the run", "inside": "lies in the run", "checkpoints": "is the checkpoint folder",
             "variant": "its folder checkpoints/main is the checkpoint folder", "elsewhere": ""}  # fmt: skip
    found = overlapping.overlap(folder, case.card.paths)
    assert found.startswith(words[where]) and bool(found) == (where != "elsewhere"), found
    assert set(case.directory.root.rglob("*")) == before


def test_a_copy_that_goes_with_its_checkpoint_was_none(memory: Path) -> None:
    """The copy is the original by a way that no table shows: it is looked at again when the original is hidden."""
    case = Case(memory, "folder", None)
    copied(case, 100, 200, 300, 400)
    for step in (100, 200):
        shutil.rmtree(case.far(step, ""))
        case.far(step, "").symlink_to(case.checkpoints / f"global_step{step}")
    assert [outcome.result for outcome in case.prune().outcomes] in ([], ["kept", "kept"])
    assert case.here() == [100, 200, 300, 400]


# ----------------------------------------------------------------------------- faults that pass
def hiccups(case: Case, times: int) -> None:
    """From now on each method of the archive fails so many times at first, as a network does."""
    failed: Counter[str] = Counter()

    def on(what: str, path: str, position: int) -> None:
        if what not in ("write", "piece", "finish") and failed[what] < times:
            failed[what] += 1
            raise ArchiveAway("connection reset")

    case.odd[case.archive] = {"on": on}


def test_a_fault_that_passes_ends_no_round(case: Case) -> None:
    case.save(100)
    hiccups(case, 2)
    assert case.round().exit_code == 0
    hiccups(case, 2)
    assert case.round(copies=False, reading="all").exit_code == 0
    assert case.copied(case.archive) == [(100, "full")]
    hiccups(case, 99)
    assert case.round(copies=False, reading="all").exit_code == 3 and case.copied(case.archive) == [(100, "full")]


def test_a_restore_at_night_lives_through_faults_that_pass(case: Case, tmp_path: Path) -> None:
    copied(case, 100)
    hiccups(case, 2)
    assert not faults_of(case.restore(100, tmp_path / "new"))


@pytest.mark.parametrize("fault", [Fault("answer", status=503), Fault("answer", status=429), Fault("reset")])
def test_a_first_request_that_fails_is_made_again(
    memory: Path, object_store: ObjectStore, tmp_path: Path, fault: Fault
) -> None:
    case = Case(memory, "bucket", object_store)
    copied(case, 100)
    object_store.faults.plant(replace(fault, times=2))
    assert case.round(copies=False, reading="all").exit_code == 0
    object_store.faults.clear()
    object_store.faults.plant(replace(fault, times=2))
    assert not faults_of(case.restore(100, tmp_path / "new"))


# ----------------------------------------------------------------------------- one bad thing among many
def test_one_receipt_that_is_none_stops_nothing_else(case: Case, tmp_path: Path) -> None:
    copied(case, 100, 200)
    case.spoil_receipt(100)
    case.save(300)
    done = case.round(reading="none")
    assert [copy.step for copy in done.tallies[0].copied] == [300, 100], "the newest first, then the damaged one"
    assert case.journal("backup-damaged") and not faults_of(case.restore(200, tmp_path / "new"))
    assert [step for step, _ in case.copied(case.archive)] == [100, 200, 300]


def test_one_receipt_that_cannot_be_read_stops_nothing_else(case: Case) -> None:
    copied(case, 100)
    case.save(200, 300)
    case.now += DAY
    refuse(case, "global_step100.copy.json")
    done = case.round(reading="none")
    assert [copy.step for copy in done.tallies[0].copied] == [300, 200] and done.exit_code == 1
    (fault,) = done.tallies[0].faults
    assert "global_step100.copy.json" in fault and case.copy(100).is_sound
    assert "global_step100" in case.status()["message"], "it is in the alerts' evidence until somebody looks"


def test_a_log_whose_name_is_no_text_is_copied_and_stops_nothing(case: Case) -> None:
    logs = case.directory.paths.published / "logs"
    logs.mkdir(parents=True)
    odd = os.fsencode(logs) + b"/a-\xff\xfe.txt"
    with open(odd, "wb") as stream:
        stream.write(b"odd")
    (logs / "b.txt").write_text("plain")
    case.save(100)
    done = case.run(case.archive)
    assert done.exit_code == 0 and done.tallies[0].logs == 2, done
    assert case.run(case.archive).tallies[0].logs == 0, "what was copied is known"
    archive = case.place().open(case.archive, case.card)
    names = {file.path: file.bytes for file in archive.list("small-logs")}
    assert names == {"small-logs/logs/a-%FF%FE.txt": 3, "small-logs/logs/b.txt": 5}


def test_a_log_that_the_archive_refuses_stops_nothing_else(case: Case) -> None:
    logs = case.directory.paths.published / "logs"
    logs.mkdir(parents=True)
    (logs / "a.txt").write_text("a")
    (logs / "b.txt").write_text("b")
    case.save(100)

    def on(what: str, path: str, position: int) -> None:
        if what == "upload" and path.endswith("a.txt"):
            raise ArchiveRefused(f"{path}: Invalid argument")

    case.odd[case.archive] = {"on": on}
    done = case.run(case.archive)
    assert done.exit_code == 1 and done.tallies[0].logs == 1
    (fault,) = done.tallies[0].faults
    assert "a.txt" in fault and case.copied(case.archive) == [(100, "full")]


def test_a_checkpoint_with_an_odd_name_in_it_keeps_no_other_from_its_copy(case: Case) -> None:
    case.save(100, 200)
    odd = os.fsencode(case.checkpoints / "global_step200") + b"/weights/\xff"
    with open(odd, "wb") as stream:
        stream.write(b"odd")
    done = case.round()
    assert (100, "full") in case.copied(case.archive), done


# ----------------------------------------------------------------------------- another run of the same name
def second(case: Case, memory: Path) -> Case:
    """Another run directory with the same card: the same name, the same archive."""
    other = Case(memory / "other", case.kind, case.bucket)
    keys = {"store": case.card.backup.store, "url": case.card.backup.url}
    other.card = other.card.model_copy(update={"backup": other.card.backup.model_copy(update=keys)})
    other.store = case.store
    return other


def test_another_run_of_the_same_name_neither_writes_nor_restores(case: Case, memory: Path, tmp_path: Path) -> None:
    copied(case, 100)
    other = second(case, memory)
    other.save(100, seed=7)
    done = other.round()
    assert done.exit_code == 1 and "is the archive of another run named 'small'" in done.tallies[0].faults[0]
    assert other.copies() == ()
    line = f"restore 100 --from {case.archive} --into {tmp_path / 'new'}"
    refused = invoke(other, line)
    assert refused.exit_code == 1 and "is there of another run alone" in refused.text
    listed = invoke(other, f"restore 100 --list --from {case.archive}")
    identity = case.copy(100).identity
    assert listed.exit_code == 0 and identity[:8] in listed.text and "another: " in listed.text
    mine = f"restore 100 --from {case.archive} --identity {identity[:8]} --into"
    wrong = invoke(other, f"{mine} {other.checkpoints}")
    assert wrong.exit_code == 1 and "it is not this run's" in wrong.text
    assert invoke(other, f"{mine} {tmp_path / 'new'}").exit_code == 0 and not faults_of(tmp_path / "new/global_step100")
    assert invoke(case, f"restore 100 --list --json --from {case.archive}").exit_code == 0


def test_an_archive_without_an_id_is_adopted_when_something_in_it_is_known(case: Case, memory: Path) -> None:
    copied(case, 100)
    case.forget_ids()
    stranger = second(case, memory)
    stranger.save(100, seed=7)
    done = stranger.round()
    assert done.exit_code == 1 and "older than run ids" in done.tallies[0].faults[0] and stranger.copies() == ()
    assert case.round().exit_code == 0 and len(case.journal("archive-adopted")) == 1
    assert case.round().exit_code == 0 and len(case.journal("archive-adopted")) == 1
    assert "is the archive of another run" in stranger.round().tallies[0].faults[0]


def test_adopting_by_hand(case: Case, memory: Path) -> None:
    """The run directory was lost; it is begun again, and goes on as the run that the archive knows."""
    copied(case, 100)
    again = second(case, memory)
    again.save(200)
    assert again.round().exit_code == 1
    shown = invoke(again, f"adopt {case.archive} --dry-run")
    assert shown.exit_code == 0 and "goes on as run" in shown.text and again.round().exit_code == 1
    assert invoke(again, f"adopt {case.archive} --yes").exit_code == 0
    assert run_id(again.directory) == run_id(case.directory) and again.round().exit_code == 0
    case.forget_ids()
    assert invoke(case, f"adopt {case.archive} --yes").exit_code == 0
    assert "nothing to do" in invoke(case, f"adopt {case.archive} --yes").text


def test_a_restore_into_a_lost_run_directory_goes_on_as_that_run(case: Case) -> None:
    copied(case, 100)
    before = run_id(case.directory)
    shutil.rmtree(case.directory.root)
    assert invoke(case, f"restore 100 --from {case.archive} --into {case.checkpoints}").exit_code == 0
    assert run_id(case.directory) == before and not faults_of(case.checkpoints / "global_step100")
    assert case.round().exit_code == 0 and [step for step, _ in case.copied(case.archive)] == [100]


def test_of_two_checkpoints_of_one_step_the_one_that_is_named_comes_back(case: Case, tmp_path: Path) -> None:
    copied(case, 100)
    first = case.copy(100).identity
    shutil.rmtree(case.checkpoints / "global_step100")
    case.save(100, seed=3)
    case.now += 60
    case.round()
    line = f"restore 100 --from {case.archive} --into {tmp_path / 'new'}"
    several = invoke(case, line)
    assert several.exit_code == 1 and "several checkpoints of step 100" in several.text
    assert invoke(case, f"{line} --identity {first[:10]}").exit_code == 0
    assert identity_of(tmp_path / "new/global_step100") == first


# ----------------------------------------------------------------------------- what a person put there, or names
def test_a_file_that_no_manifest_names_is_copied_and_never_pruned(case: Case, tmp_path: Path) -> None:
    case.save(100, 200, 300, 400)
    note = case.checkpoints / "global_step100" / "notes.txt"
    note.write_text("before the spike")
    (note.parent / "weights" / ".nfs0001").write_text("of the file system")
    assert case.round().exit_code == 0
    case.prune()
    assert case.here() == [100, 300, 400] and "does not name notes.txt" in case.kept()[100]
    home = case.restore(100, tmp_path / "new")
    assert (home / "notes.txt").read_text() == "before the spike" and not (home / "weights/.nfs0001").exists()
    assert case.round(copies=False, reading="all").exit_code == 0
    case.damage(100, "notes.txt")
    case.round(copies=False, reading="all")
    assert case.copy(100).damaged == ("notes.txt",)
    note.unlink()
    case.prune()
    assert case.here() == [100, 300, 400], "its copy is damaged"


def test_a_step_is_removed_by_name_with_the_same_safety(case: Case) -> None:
    case.card = case.card.model_copy(update={"backup": case.card.backup.model_copy(update={"keep_latest": 15})})
    copied(case, 100, 200, 300, 400)
    case.save(500, 600)
    shown = invoke(case, "checkpoints remove 100 --dry-run")
    assert shown.exit_code == 0 and 100 in case.here() and "1 to remove" in shown.text
    done = invoke(case, "checkpoints remove 100 --yes")
    assert done.exit_code == 0 and case.here() == [200, 300, 400, 500, 600], done
    assert [entry["name"] for entry in case.journal("checkpoint-removed")] == ["global_step100"]
    newest = invoke(case, "checkpoints remove 600 --yes")
    assert newest.exit_code == 1 and "latest names it" in newest.text
    case.drop_receipt(200)
    if case.kind == "bucket":
        case.round(copies=False, reading="none")
    both = invoke(case, "checkpoints remove 200 300 --yes")
    assert both.exit_code == 1 and case.here() == [200, 400, 500, 600]
    assert invoke(case, "checkpoints remove 100 --yes").exit_code == 1


# ----------------------------------------------------------------------------- data sets and the tokenizer
def with_data(case: Case) -> Path:
    """The card names a data set and a tokenizer, and wants them copied."""
    folder = case.folder / "data"
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("oscar_text_document.bin", "oscar_text_document.idx", "tokenizer/tokenizer.json"):
        (folder / name).write_bytes(name.encode() * 100)
    card = case.card
    case.card = card.model_copy(
        update={
            "backup": card.backup.model_copy(update={"data": True}),
            "data": card.data.model_copy(update={"prefixes": [f"{folder}/oscar_text_document"]}),
            "tokenizer": card.tokenizer.model_copy(update={"path": f"{folder}/tokenizer"}),
        }
    )
    return folder


def test_data_sets_and_tokenizer_are_copied_verified_and_restored(case: Case, tmp_path: Path) -> None:
    folder = with_data(case)
    plan = invoke(case, "plan")
    assert plan.exit_code == 0 and f"{case.archive}: data: 0 of 2 copied (0 B); due: oscar_text" in plan.text
    case.save(100)
    done = case.round()
    assert done.exit_code == 0 and sorted(copy.what for copy in done.tallies[0].copied) == [
        "data oscar_text_document", "data tokenizer", "step 100 (full)",
    ]  # fmt: skip
    assert "2 of 2 copied" in invoke(case, "status").text and not case.round().tallies[0].copied
    assert "7 files read again" in invoke(case, "verify").text
    listed = invoke(case, f"restore --data all --list --from {case.archive}")
    assert "oscar_text_document" in listed.text and "tokenizer" in listed.text
    assert invoke(case, f"restore --data all --into {tmp_path / 'back'} --from {case.archive}").exit_code == 0
    for name in ("oscar_text_document.bin", "oscar_text_document.idx", "tokenizer/tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert [step for step, _ in case.copied(case.archive)] == [0, 0, 100] and case.status()["step"] == 100


def test_data_that_rots_in_an_archive_is_found_and_repaired_but_not_by_rot(case: Case) -> None:
    folder = with_data(case)
    assert case.round().exit_code == 0
    case.damage_data("oscar_text_document", "oscar_text_document.bin")
    verified = invoke(case, "verify")
    assert verified.exit_code == 1 and "DAMAGED: data oscar_text_document: oscar_text_document.bin" in verified.text
    assert "damaged: oscar_text_document" in invoke(case, "status").text
    flip(folder / "oscar_text_document.bin", 7)  # of the same size and time: rot here as well
    done = case.round()
    assert done.exit_code == 1 and "data oscar_text_document" in done.tallies[0].faults[0]
    flip(folder / "oscar_text_document.bin", 7)
    assert case.round().exit_code == 0 and invoke(case, "verify").exit_code == 0


def test_data_that_was_made_again_is_copied_beside_the_old(case: Case) -> None:
    folder = with_data(case)
    assert case.round().exit_code == 0
    (folder / "oscar_text_document.bin").write_bytes(b"other")
    done = case.round()
    assert [copy.what for copy in done.tallies[0].copied] == [
        f"data oscar_text_document.{done.tallies[0].copied[0].identity[:8]}"
    ]
    (folder / "oscar_text_document.idx").unlink()
    done = case.round()
    assert done.exit_code == 1 and "oscar_text_document.idx is not a file" in done.tallies[0].faults[0]
    assert len(case.copied(case.archive)) == 3, "nothing that was copied is given up"


def test_a_tokenizer_that_is_one_file_and_lists_of_one_name_are_data_too(memory: Path) -> None:
    case = Case(memory, "folder", None)
    folder = with_data(case)
    for kind in ("train", "valid"):
        (folder / kind).mkdir()
        (folder / kind / "groups.txt").write_text(kind)
    data = {"train_groups_file": f"{folder}/train/groups.txt", "valid_groups_file": f"{folder}/valid/groups.txt"}
    case.card = case.card.model_copy(
        update={
            "data": case.card.data.model_copy(update=data),
            "tokenizer": case.card.tokenizer.model_copy(update={"path": f"{folder}/tokenizer/tokenizer.json"}),
        }
    )
    names = [unit.name for unit in units_of(case.card)]
    assert "tokenizer" in names and len(set(names)) == len(names) == 4


def test_data_that_the_first_archive_has_in_part_comes_from_the_next(memory: Path, tmp_path: Path) -> None:
    case = Case(memory, "folder", None, "backup.full_interval=100")
    with_data(case)
    assert case.run(logs=False).exit_code == 0
    shutil.rmtree(case.store / "data" / "main" / "tokenizer")
    (case.store / "data" / "main" / "tokenizer.copy.json").unlink()
    done = invoke(case, f"restore --data all --into {tmp_path / 'back'}")
    assert done.exit_code == 0 and (tmp_path / "back" / "tokenizer" / "tokenizer.json").is_file(), done.text
    assert "oscar_text_document" in done.text and done.text.count("is restored") == 2


# ----------------------------------------------------------------------------- what a card may hold
@pytest.mark.parametrize(
    "value",
    [
        "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=c2VjcmV0c2VjcmV0",
        "Authorization: Bearer abcdef123456",
        "SharedAccessSignature=sv123",
    ],
)
def test_a_secret_in_an_option_is_refused_and_not_repeated(tmp_path: Path, value: str) -> None:
    with pytest.raises(CardError) as refusal:
        load_card(CARD, (f"backup.options.connection={json.dumps(value)}",), {}, directory=tmp_path)
    assert "is shared with others" in str(refusal.value) and value not in str(refusal.value)
    assert load_card(CARD, ('backup.options.endpoint_url="http://host:4443"',), {}, directory=tmp_path).backup.options


# ----------------------------------------------------------------------------- whose copies count
def test_the_copies_of_another_variant_are_of_another_training(memory: Path) -> None:
    main = Case(memory, "folder", None, "backup.milestone_percent=10")
    copied(main, 100)
    other = Case(memory, "folder", None, "backup.milestone_percent=10", "run.variant=other")
    other.save(110, 120, 130, 140)
    assert other.round().exit_code == 0, "what the other variant has there is not missing"
    assert main.copy(100).is_sound and other.copies() == ()
    assert "milestone" in other.kept()[110], "the other training's copy is no copy of this one's milestone"
    assert other.prune().outcomes != () and 110 in other.here()


def test_a_bucket_listed_for_one_variant_was_not_for_another(memory: Path, object_store: ObjectStore) -> None:
    case = Case(memory, "bucket", object_store)
    case.now -= 3 * DAY
    copied(case, 100, 200, 300, 400)
    case.now += 3 * DAY
    Case(memory, "bucket", object_store, "run.variant=other").round(copies=False, reading="none")
    assert case.prune().outcomes == () and "last seen in the url" in case.kept()[100]


def test_a_stray_file_that_grows_is_no_damage_of_its_checkpoint(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(memory, "folder", None)
    case.save(100)
    stray = case.checkpoints / "global_step100" / "evaluation.log"
    stray.write_text("first\n")
    source = read_source(case.checkpoints / "global_step100", 100, "full")
    stray.write_text("first\nsecond\n")
    monkeypatch.setattr("tr11ops.backup.archive_round.read_source", lambda *_: source)
    done = case.round()
    assert done.exit_code == 1 and "was changed while it was copied" in done.tallies[0].faults[0]
    assert "remove" not in done.tallies[0].faults[0]
    monkeypatch.undo()
    assert case.round().exit_code == 0
