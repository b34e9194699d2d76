"""Ways to lose a checkpoint, each against a folder, a tar and a bucket: nothing is lost, and nothing lost is called safe;
an archive that is the run directory is none, by whatever path it is reached.

Add a scenario as a test that takes `case`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest
from msgspec.structs import replace

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.fault_proxy import Fault
from tests.tr11ops.backup.lose_it import Case, copied, faults_of, invoke, refuse
from tests.tr11ops.backup.round_cases import CARD, DAY, flip
from tr11ops.backup import archives as overlapping
from tr11ops.backup.archives import parse_mounts, place_of
from tr11ops.backup.drill import LoadResult, choose_copy, run_drill
from tr11ops.base.errors import ArchivePermanentError, ArchiveUnavailable
from tr11ops.launch.directory_checks import archive_checks
from tr11ops.runcard.card import load_card
from tr11ops.runcard.check import Level
from trainer.config.base import CardError
from trainer.contract.checkpoint_names import read_latest


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


def test_a_copy_lost_during_prune_keeps_its_checkpoint(
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
    assert case.here() == [100, 200, 300, 400] and not faults_of(
        case.checkpoints / "global_step100"
    )


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
    assert case.copy(100).is_sound and case.copy(200).is_sound, (
        "what could not be read says nothing of the bytes"
    )
    case.prune()
    assert case.here() == ([100, 300, 400] if case.kind == "bucket" else [300, 400]), (
        "a folder is looked at by prune"
    )


# ---------------------------------------------------------------------- rot, no matter who finds it
def test_rot_that_a_restore_finds_is_repaired_by_the_next_round(case: Case, tmp_path: Path) -> None:
    copied(case, 100)
    case.damage(100, "optimizer/b")
    result = invoke(case, f"restore 100 --into {tmp_path / 'new'}")
    assert (
        result.exit_code == 1
        and "the damage is on record, and tr11 backup run repairs it" in result.text
    )
    assert (
        case.copy(100).damaged == ("optimizer/b",)
        and not (tmp_path / "new" / "global_step100").exists()
    )
    assert case.status()["damaged"] and case.journal("backup-damaged")
    assert [copy.step for copy in case.round().tallies[0].copied] == [100]
    assert case.copy(100).is_sound and not faults_of(case.restore(100, tmp_path / "new"))


def test_rot_that_a_drill_finds_is_repaired_by_the_next_round(case: Case) -> None:
    copied(case, 100)
    case.damage(100, "optimizer/b")
    archive = case.place().open(case.archive, case.card)
    newest = choose_copy(case.copies())
    assert newest is not None
    assert not run_drill(
        case.place(), archive, newest, look=lambda folder: LoadResult(True, "")
    ).passed
    assert case.copy(100).damaged == ("optimizer/b",)
    assert [copy.step for copy in case.round().tallies[0].copied] == [100] and case.copy(
        100
    ).is_sound


def test_verify_typed_by_a_person_reads_everything(case: Case) -> None:
    copied(case, 100, 200)
    case.damage(200, "weights/a")
    due, invocation, again = (
        invoke(case, line) for line in ("verify --due", "verify", "verify 200")
    )
    assert due.exit_code == 0 and "nothing was due" in due.text
    assert (
        invocation.exit_code == 1
        and f"{case.archive}: DAMAGED: step 200 (full): weights/a" in invocation.text
    )
    assert again.exit_code == 1
    assert [copy.step for copy in case.round().tallies[0].copied] == [200]
    after = invoke(case, "verify")
    assert after.exit_code == 0 and "8 files read again" in after.text


def test_verify_of_a_step_whose_receipt_is_gone_says_damaged(case: Case) -> None:
    copied(case, 100)
    case.drop_receipt(100)
    result = invoke(case, "verify 100")
    assert (
        result.exit_code == 1
        and "DAMAGED: step 100" in result.text
        and "no copy" not in result.text
    )


def test_rot_here_that_a_round_finds_keeps_the_sound_older_ones(case: Case) -> None:
    """Two newer ones rot in the run directory: the round that would copy them puts it on record, as
    a verify does.
    """
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


def test_a_restore_over_rot_says_so_and_one_in_place_clears_it(case: Case) -> None:
    copied(case, 100)
    flip(case.checkpoints / "global_step100" / "weights/a", 3)
    line = f"restore 100 --into {case.checkpoints}"
    result = invoke(case, line)
    assert result.exit_code == 1 and "is not this copy (weights/a differs)" in result.text
    assert not case.catalogue().checkpoints[0].is_sound
    shutil.rmtree(case.checkpoints / "global_step100")
    result = invoke(case, line)
    assert result.exit_code == 0 and case.catalogue().checkpoints[0].is_sound, result.text


def test_a_restore_puts_no_older_one_before_what_resumes(case: Case) -> None:
    copied(case, 100, 200)
    shutil.rmtree(case.checkpoints / "global_step100")
    line = f"restore 100 --latest --into {case.checkpoints}"
    result = invoke(case, line)
    assert result.exit_code == 1 and "tr11 rollback 100" in result.text and case.here() == [200]
    assert read_latest(case.checkpoints) == 200
    (case.checkpoints / "global_step200" / "cursor.json").unlink()
    assert invoke(case, line).exit_code == 0 and read_latest(case.checkpoints) == 100


# ----------------------------------------------------------------------------- faults that pass
def hiccups(case: Case, times: int) -> None:
    """From now on each method of the archive fails so many times at first, as a network does."""
    failed: Counter[str] = Counter()

    def on(what: str, path: str, position: int) -> None:
        if what not in ("write", "piece", "finish") and failed[what] < times:
            failed[what] += 1
            raise ArchiveUnavailable("connection reset")

    case.odd[case.archive] = {"on": on}


def test_a_fault_that_passes_ends_no_round(case: Case) -> None:
    case.save(100)
    hiccups(case, 2)
    assert case.round().exit_code == 0
    hiccups(case, 2)
    assert case.round(copies=False, reading="all").exit_code == 0
    assert case.copied(case.archive) == [(100, "full")]
    hiccups(case, 99)
    assert case.round(copies=False, reading="all").exit_code == 3 and case.copied(case.archive) == [
        (100, "full")
    ]


def test_a_restore_at_night_lives_through_faults_that_pass(case: Case, tmp_path: Path) -> None:
    copied(case, 100)
    hiccups(case, 2)
    assert not faults_of(case.restore(100, tmp_path / "new"))


@pytest.mark.parametrize(
    "fault", [Fault("answer", status=503), Fault("answer", status=429), Fault("reset")]
)
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


# ------------------------------------------------------------------------- one bad thing among many
def test_one_receipt_that_is_none_stops_nothing_else(case: Case, tmp_path: Path) -> None:
    copied(case, 100, 200)
    case.spoil_receipt(100)
    case.save(300)
    done = case.round(reading="none")
    assert [copy.step for copy in done.tallies[0].copied] == [300, 100], (
        "the newest first, then the damaged one"
    )
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
    assert "global_step100" in case.status()["message"], (
        "it is in the alerts' evidence until someone looks"
    )


def test_a_log_whose_name_is_no_text_is_copied(case: Case) -> None:
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
            raise ArchivePermanentError(f"{path}: Invalid argument")

    case.odd[case.archive] = {"on": on}
    done = case.run(case.archive)
    assert done.exit_code == 1 and done.tallies[0].logs == 1
    (fault,) = done.tallies[0].faults
    assert "a.txt" in fault and case.copied(case.archive) == [(100, "full")]


def test_a_checkpoint_with_an_odd_name_stops_no_other_copy(case: Case) -> None:
    case.save(100, 200)
    odd = os.fsencode(case.checkpoints / "global_step200") + b"/weights/\xff"
    with open(odd, "wb") as stream:
        stream.write(b"odd")
    done = case.round()
    assert (100, "full") in case.copied(case.archive), done


# ------------------------------------------------------------- an archive that is the run directory
@pytest.mark.parametrize(
    "where", ["root", "inside", "link", "file-url", "local-url", "checkpoints", "around"]
)
def test_an_archive_that_is_the_run_directory_is_refused(memory: Path, where: str) -> None:
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
    case.card = case.card.model_copy(
        update={"backup": case.card.backup.model_copy(update={key: address})}
    )
    (check,) = [check for check in archive_checks(case.card) if check.name == f"backup.{key}"]
    assert (
        check.level is Level.REFUSED
        and check.exit_code == 2
        and "a copy there is no copy" in check.text
    )
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
    assert inside[1].is_relative_to(run[1]) and place_of("/archive", mounts) == (
        "8:1",
        PurePosixPath("/archive"),
    )


def test_a_run_mounted_into_the_archive_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(memory, "folder", None)
    (case.store / "checkpoints").mkdir()
    table = memory / "mounts"
    monkeypatch.setattr(overlapping, "MOUNTS", table)
    table.write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    assert overlapping.overlap(case.store, case.card.paths) == ""
    table.write_text(
        table.read_text()
        + f"23 22 8:1 {case.checkpoints.parent} {case.store}/checkpoints rw - x y rw\n"
    )
    assert overlapping.overlap(case.store, case.card.paths).startswith(
        "its folder checkpoints lies in the run dir"
    )


@pytest.mark.parametrize("where", ["root", "inside", "checkpoints", "variant", "elsewhere"])
def test_the_run_directory_mounted_twice_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Neither path, table of mounts nor numbers tell: a file that is made here shows there."""
    case = Case(memory, "folder", None)
    (case.directory.root / "deep").mkdir()
    (memory / "alias").symlink_to(case.directory.root)
    (memory / "mounted").symlink_to(case.checkpoints.parent)
    target = {
        "root": "alias",
        "inside": "alias/deep",
        "checkpoints": "mounted",
        "elsewhere": "store",
    }
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
    """The copy is the original by a way that no table shows: it is looked at again when the
    original is hidden.
    """
    case = Case(memory, "folder", None)
    copied(case, 100, 200, 300, 400)
    for step in (100, 200):
        shutil.rmtree(case.far(step, ""))
        case.far(step, "").symlink_to(case.checkpoints / f"global_step{step}")
    assert [outcome.result for outcome in case.prune().outcomes] in ([], ["kept", "kept"])
    assert case.here() == [100, 200, 300, 400]


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
    assert load_card(
        CARD, ('backup.options.endpoint_url="http://host:4443"',), {}, directory=tmp_path
    ).backup.options
