"""Whose copies they are: another run of the same name, another variant, what a person put there,
data sets.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.lose_it import Case, copied, faults_of, invoke, second
from tests.tr11ops.backup.round_cases import DAY, flip
from tr11ops.backup.data_sets import units_of
from tr11ops.backup.source import read_source
from tr11ops.rundir.copies import identity_of
from tr11ops.rundir.paths import require_run_id, run_id

# --------------------------------------------------------------------- another run of the same name


def test_another_run_of_the_name_neither_writes_nor_restores(
    case: Case, memory: Path, tmp_path: Path
) -> None:
    copied(case, 100)
    other = second(case, memory)
    other.save(100, seed=7)
    done = other.round()
    assert (
        done.exit_code == 1
        and "is the archive of another run named 'small'" in done.tallies[0].faults[0]
    )
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
    assert invoke(other, f"{mine} {tmp_path / 'new'}").exit_code == 0 and not faults_of(
        tmp_path / "new/global_step100"
    )
    assert invoke(case, f"restore 100 --list --json --from {case.archive}").exit_code == 0


def test_an_archive_without_an_id_is_adopted_by_what_is_known(case: Case, memory: Path) -> None:
    copied(case, 100)
    case.forget_ids()
    stranger = second(case, memory)
    stranger.save(100, seed=7)
    done = stranger.round()
    assert (
        done.exit_code == 1
        and "older than run ids" in done.tallies[0].faults[0]
        and stranger.copies() == ()
    )
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


def test_a_restore_into_a_lost_directory_goes_on_as_that_run(case: Case) -> None:
    copied(case, 100)
    before = run_id(case.directory)
    shutil.rmtree(case.directory.root)
    assert (
        invoke(case, f"restore 100 --from {case.archive} --into {case.checkpoints}").exit_code == 0
    )
    assert run_id(case.directory) == before and not faults_of(case.checkpoints / "global_step100")
    assert case.round().exit_code == 0 and [step for step, _ in case.copied(case.archive)] == [100]


@pytest.mark.parametrize("when", ["before it is seen", "after it is seen"])
def test_a_restore_killed_as_it_becomes_visible_keeps_its_run(
    case: Case, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    copied(case, 100)
    before = run_id(case.directory)
    shutil.rmtree(case.directory.root)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if ".partial-" not in path.name:
            return rename(path, target)
        if when == "after it is seen":
            rename(path, target)
        raise SystemExit(137)

    monkeypatch.setattr(Path, "rename", killed)
    line = f"restore 100 --from {case.archive} --into {case.checkpoints} --latest"
    assert invoke(case, line).exit_code == 137
    monkeypatch.undo()
    is_seen = (case.checkpoints / "global_step100").exists()
    assert is_seen == (when == "after it is seen") and not (case.checkpoints / "latest").exists()
    assert require_run_id(case.directory, "small") == before, (
        "a launch in between makes no other run of it"
    )
    assert invoke(case, line).exit_code == 0 and not faults_of(case.checkpoints / "global_step100")
    assert (case.checkpoints / "latest").read_text().strip() == "global_step100"
    assert case.round().exit_code == 0


def test_the_named_one_of_two_checkpoints_of_a_step_comes_back(case: Case, tmp_path: Path) -> None:
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


# ----------------------------------------------------------------------------- whose copies count
def test_the_copies_of_another_variant_are_of_another_training(memory: Path) -> None:
    main = Case(memory, "folder", None, "backup.milestone_percent=10")
    copied(main, 100)
    other = Case(memory, "folder", None, "backup.milestone_percent=10", "run.variant=other")
    other.save(110, 120, 130, 140)
    assert other.round().exit_code == 0, "what the other variant has there is not missing"
    assert main.copy(100).is_sound and other.copies() == ()
    assert "milestone" in other.kept()[110], (
        "the other training's copy is no copy of this one's milestone"
    )
    assert other.prune().outcomes != () and 110 in other.here()


def test_a_bucket_listed_for_one_variant_was_not_for_another(
    memory: Path, object_store: ObjectStore
) -> None:
    case = Case(memory, "bucket", object_store)
    case.now -= 3 * DAY
    copied(case, 100, 200, 300, 400)
    case.now += 3 * DAY
    Case(memory, "bucket", object_store, "run.variant=other").round(copies=False, reading="none")
    assert case.prune().outcomes == () and "last seen in the url" in case.kept()[100]


def test_a_stray_file_that_grows_is_no_damage_of_its_checkpoint(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# ---------------------------------------------------------------- what a person put there, or names
def test_a_file_that_no_manifest_names_is_copied_never_pruned(case: Case, tmp_path: Path) -> None:
    case.save(100, 200, 300, 400)
    note = case.checkpoints / "global_step100" / "notes.txt"
    note.write_text("before the spike")
    (note.parent / "weights" / ".nfs0001").write_text("of the file system")
    assert case.round().exit_code == 0
    case.prune()
    assert case.here() == [100, 300, 400] and "does not name notes.txt" in case.kept()[100]
    home = case.restore(100, tmp_path / "new")
    assert (home / "notes.txt").read_text() == "before the spike" and not (
        home / "weights/.nfs0001"
    ).exists()
    assert case.round(copies=False, reading="all").exit_code == 0
    case.damage(100, "notes.txt")
    case.round(copies=False, reading="all")
    assert case.copy(100).damaged == ("notes.txt",)
    note.unlink()
    case.prune()
    assert case.here() == [100, 300, 400], "its copy is damaged"


def test_a_step_is_removed_by_name_with_the_same_safety(case: Case) -> None:
    case.card = case.card.model_copy(
        update={"backup": case.card.backup.model_copy(update={"keep_latest": 15})}
    )
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


# ---------------------------------------------------------------------- data sets and the tokenizer
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


def test_data_sets_and_tokenizer_are_copied_and_restored(case: Case, tmp_path: Path) -> None:
    folder = with_data(case)
    plan = invoke(case, "plan")
    assert (
        plan.exit_code == 0
        and f"{case.archive}: data: 0 of 2 copied (0 B); due: oscar_text" in plan.text
    )
    case.save(100)
    done = case.round()
    assert done.exit_code == 0 and sorted(copy.what for copy in done.tallies[0].copied) == [
        "data oscar_text_document", "data tokenizer", "step 100 (full)",
    ]  # fmt: skip
    assert "2 of 2 copied" in invoke(case, "status").text and not case.round().tallies[0].copied
    assert "7 files read again" in invoke(case, "verify").text
    listed = invoke(case, f"restore --data all --list --from {case.archive}")
    assert "oscar_text_document" in listed.text and "tokenizer" in listed.text
    assert (
        invoke(
            case, f"restore --data all --into {tmp_path / 'back'} --from {case.archive}"
        ).exit_code
        == 0
    )
    for name in ("oscar_text_document.bin", "oscar_text_document.idx", "tokenizer/tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert [step for step, _ in case.copied(case.archive)] == [0, 0, 100] and case.status()[
        "step"
    ] == 100


def test_data_that_rots_is_repaired_but_not_by_rot(case: Case) -> None:
    folder = with_data(case)
    assert case.round().exit_code == 0
    case.damage_data("oscar_text_document", "oscar_text_document.bin")
    verified = invoke(case, "verify")
    assert (
        verified.exit_code == 1
        and "DAMAGED: data oscar_text_document: oscar_text_document.bin" in verified.text
    )
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
    assert (
        done.exit_code == 1 and "oscar_text_document.idx is not a file" in done.tallies[0].faults[0]
    )
    assert len(case.copied(case.archive)) == 3, "nothing that was copied is given up"


def test_a_one_file_tokenizer_and_lists_of_a_name_are_data_too(memory: Path) -> None:
    case = Case(memory, "folder", None)
    folder = with_data(case)
    for kind in ("train", "valid"):
        (folder / kind).mkdir()
        (folder / kind / "groups.txt").write_text(kind)
    data = {
        "train_groups_file": f"{folder}/train/groups.txt",
        "valid_groups_file": f"{folder}/valid/groups.txt",
    }
    case.card = case.card.model_copy(
        update={
            "data": case.card.data.model_copy(update=data),
            "tokenizer": case.card.tokenizer.model_copy(
                update={"path": f"{folder}/tokenizer/tokenizer.json"}
            ),
        }
    )
    names = [unit.name for unit in units_of(case.card)]
    assert "tokenizer" in names and len(set(names)) == len(names) == 4


def test_data_that_the_first_archive_lacks_comes_from_the_next(
    memory: Path, tmp_path: Path
) -> None:
    case = Case(memory, "folder", None, "backup.full_interval=100")
    with_data(case)
    assert case.run(logs=False).exit_code == 0
    shutil.rmtree(case.store / "data" / "main" / "tokenizer")
    (case.store / "data" / "main" / "tokenizer.copy.json").unlink()
    done = invoke(case, f"restore --data all --into {tmp_path / 'back'}")
    assert done.exit_code == 0 and (tmp_path / "back" / "tokenizer" / "tokenizer.json").is_file(), (
        done.text
    )
    assert "oscar_text_document" in done.text and done.text.count("is restored") == 2
