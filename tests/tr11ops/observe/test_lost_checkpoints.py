"""Whether a run's checkpoints are lost: what tells of them, and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tr11ops.foreign_card import FOREIGN
from tests.tr11ops.launch.preflight_bench import MODEL, Bench
from tests.tr11ops.launch.run_inputs import write_checkpoint
from tr11ops.launch.foreign import look_at_trainer
from tr11ops.launch.resume import look_at_checkpoints, start_checks
from tr11ops.observe.lost_checkpoints import find_lost
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.runcard.kinds import ForeignCard
from tr11ops.rundir.copies import CopyRecord, write_copy
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import write_json


@pytest.fixture(params=["own", "foreign"])
def card(request: pytest.FixtureRequest, tmp_path: Path) -> RunCard:
    if request.param == "own":
        return Bench(tmp_path).card
    path = tmp_path / "tr11.toml"
    path.write_text(FOREIGN, encoding="utf-8")
    return load_card(path, [])


def note_copy(card: RunCard, step: int, damaged: tuple[str, ...] = ()) -> None:
    copy = CopyRecord(
        "store", "/archive", step=step, kind="full", identity="a" * 64,
        location=f"checkpoints/{card.paths.variant}/global_step{step}", format="files", files=1, bytes=1,
        copied=1.0, verified=2.0, damaged=damaged,
    )  # fmt: skip
    write_copy(RunDirectory(card.paths, card.kill_switch), copy)


def name_of(card: RunCard, step: int) -> str:
    """As its trainer calls the checkpoint."""
    if isinstance(card, ForeignCard):
        return f"checkpoint-{step}"
    return f"global_step{step}"


def note_attempt(card: RunCard, step: int, variant: str = "main") -> None:
    attempt = card.paths.attempt("7")
    write_json(attempt / "card.json", {"run": {"variant": variant}})
    write_json(
        attempt / "launches" / "1.json", {"checkpoint_before": None, "checkpoint_after": step}
    )


def said(card: RunCard) -> tuple[str, str]:
    (check,) = start_checks(card, look_at_checkpoints(card))
    return check.level.name.lower(), f"{check.text}; {check.fix}"


def test_nothing_on_record_begins_anew(card: RunCard) -> None:
    assert find_lost(card) is None
    assert said(card) == ("ok", "none: the training starts from random weights; ")


def test_a_copy_is_named_with_the_command_that_restores_it(card: RunCard) -> None:
    note_copy(card, 260)
    note_copy(card, 280)
    note_copy(card, 300, damaged=("a",))
    folder = card.paths.checkpoints
    level, text = said(card)
    assert level == "refused" and "\n" not in text
    assert f"{folder} holds no checkpoint, but {name_of(card, 300)} was saved" in text
    assert "a verified copy of step 280 is in backup.store" in text
    assert f"`tr11 backup restore 280 --output {folder} --latest`" in text
    assert "to begin from scratch, give run.variant a name of its own" in text


def test_how_an_attempt_ended_tells_of_one_of_which_there_is_no_copy(card: RunCard) -> None:
    note_attempt(card, 40)
    level, text = said(card)
    assert level == "refused"
    assert f"{name_of(card, 40)} was saved, and no sound copy is on record" in text


def test_a_training_that_was_never_saved_begins_anew(card: RunCard) -> None:
    note_attempt(card, 0)
    assert find_lost(card) is None


def test_another_variant_is_another_training(card: RunCard) -> None:
    note_attempt(card, 40, variant="second")
    assert find_lost(card) is None


def test_one_that_is_there_is_not_lost(card: RunCard) -> None:
    note_copy(card, 280)
    write_checkpoint(card.paths.checkpoints, 10, MODEL)
    assert find_lost(card) is None
    shutil.rmtree(card.paths.checkpoints)
    assert find_lost(card) is not None
    (card.paths.checkpoints / "global_step10.discarded").mkdir(parents=True)
    assert find_lost(card) is None  # a person has put it there


def test_what_lies_in_the_trainers_own_folder_counts(tmp_path: Path) -> None:
    path = tmp_path / "tr11.toml"
    path.write_text(FOREIGN, encoding="utf-8")
    card = load_card(path, [])
    note_copy(card, 280)
    assert find_lost(card) is not None
    (tmp_path / "out" / "checkpoint-20").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-20" / "trainer_state.json").write_text("{}")
    seen = look_at_trainer(card)
    assert seen is not None and find_lost(card) is None
    assert said(card)[1] == "none is held: the trainer goes on from those in its own folder; "


def test_a_record_that_cannot_be_read_is_said(card: RunCard) -> None:
    note_copy(card, 280)
    next((card.paths.state / "backup").rglob("*.json")).write_text("{")
    level, text = said(card)
    assert level == "warning" and "whether any were lost is not known" in text
