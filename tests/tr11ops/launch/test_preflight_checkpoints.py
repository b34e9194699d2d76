"""Every refusal and warning of a launch about its checkpoints: its words, its fix and its exit
code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.launch.preflight_bench import MODEL, Bench, cut
from tests.tr11ops.launch.run_inputs import write_checkpoint
from tr11ops.runcard.speed import RunHistory
from tr11ops.rundir.checkpoint_digests import DigestRecord, write_digest
from tr11ops.rundir.copies import identity_of
from trainer.config.data_match import DataRecord, data_facts
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.files import write_json
from trainer.contract.manifest import STAND_IN, file_digest
from trainer.contract.origin import BranchOrigin
from trainer.contract.resumable import NEW_VARIANT
from trainer.schedule.learning_rate import plan_of
from trainer.schedule.start import optimizer_facts


def test_digests_are_compared_where_asked(bench: Bench) -> None:
    place = write_checkpoint(checkpoints(bench), 10, MODEL)
    data = place / "weights" / "part.bin"
    data.write_bytes(bytes(64))
    assert bench.code() == 0 and "global_step10 (saved on" in bench.text()
    bench.request = replace(bench.request, read_digests=True)
    assert bench.code() == 1 and "none is resumable" in bench.faults()[0]


def checkpoints(bench: Bench) -> Path:
    return bench.directory.paths.checkpoints


def test_resume_from_what_latest_names(bench: Bench) -> None:
    for step in (10, 20):
        write_checkpoint(checkpoints(bench), step, MODEL)
    assert bench.faults() == []
    assert (
        "resumes at step 21 from global_step20 (saved on tensor 1 x pipeline 1 x data 1); sizes verified"
        in bench.text()
    )
    (checkpoints(bench) / "latest").write_text("global_step10")
    assert bench.faults() == [
        "warning: checkpoints: global_step20 is newer than global_step10, which latest names"
    ]


def test_a_resume_that_cuts_sequences_otherwise_is_told(bench: Bench) -> None:
    place = write_checkpoint(checkpoints(bench), 10, MODEL)
    value = json.loads((place / "manifest.json").read_text())
    write_json(place / "manifest.json", {**value, "job_id": "7", "topology": {"tensor": 2}})
    attempt = bench.directory.paths.attempt("7")
    attempt.mkdir(parents=True)
    write_json(attempt / "card.json", {"parallel": {"tensor": 2, "sequence_parallel": False}})
    bench.overrides = ["parallel.tensor=2"]
    (line,) = (fault for fault in bench.faults() if "sequence" in fault)
    assert line == (
        "warning: parallel.sequence_parallel: is true, and global_step10 was trained with false: sums round otherwise "
        "from there; say false in the card to go on as before"
    )
    bench.overrides.append("parallel.sequence_parallel=false")
    assert not any("sequence" in fault for fault in bench.faults())


def test_a_training_does_not_go_on_from_a_rehearsal_nor_a_rehearsal_from_a_training(
    bench: Bench,
) -> None:
    place = write_checkpoint(checkpoints(bench), 10, MODEL)
    value = json.loads((place / "manifest.json").read_text())
    bench.overrides = ["rehearsal.step_seconds=1"]
    assert f"checkpoints: {place} is a training's, and this card has a [rehearsal]" in bench.text()
    write_json(place / "manifest.json", {**value, "versions": {STAND_IN: "1"}})
    assert "resumes at step 11 from global_step10" in bench.text()
    bench.overrides = []
    (line,) = bench.faults()
    assert line == (
        f"refused: checkpoints: {place} is a rehearsal's: it holds no weights, and no training goes on from it; "
        "give the training a run.directory of its own"
    )


@pytest.mark.parametrize("text", [None, "garbage", "global_step99"])
def test_a_useless_latest_is_a_warning_that_says_what_resumes(
    bench: Bench, text: str | None
) -> None:
    write_checkpoint(checkpoints(bench), 10, MODEL, latest=False)
    if text:
        (checkpoints(bench) / "latest").write_text(text)
    assert (
        bench.code() == 0 and "latest" in bench.faults()[0] and "global_step10" in bench.faults()[0]
    )
    assert "will be resumed" in bench.faults()[0]


def test_a_damaged_newest_one_is_passed_over(bench: Bench) -> None:
    for step in (10, 20):
        write_checkpoint(checkpoints(bench), step, MODEL)
    cut(checkpoints(bench) / "global_step20/weights/part.bin")
    assert (
        "warning: checkpoints: global_step20 is skipped: weights/part.bin: 63 bytes"
        in bench.faults()[0]
    )
    assert "resumes at step 11 from global_step10" in bench.text() and bench.code() == 0


def without_optimizer(place: Path) -> None:
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"] = [
        entry for entry in manifest["files"] if not entry["path"].startswith("optimizer/")
    ]
    (place / "manifest.json").write_text(json.dumps(manifest))


def test_weights_alone_are_passed_over_as_the_trainer_does_it(bench: Bench) -> None:
    for step in (10, 20):
        place = write_checkpoint(checkpoints(bench), step, MODEL)
    without_optimizer(place)
    assert (
        "warning: checkpoints: global_step20 is skipped: it holds weights alone"
        in bench.faults()[0]
    )
    assert "resumes at step 11 from global_step10" in bench.text() and bench.code() == 0


def test_what_a_reading_found_damaged_is_passed_over(bench: Bench) -> None:
    for step in (10, 20):
        place = write_checkpoint(checkpoints(bench), step, MODEL)
    bad = ("weights/part.bin: its digest differs from the manifest's",)
    write_digest(bench.directory, DigestRecord(20, identity_of(place), 1.0, 3, 64, bad))
    assert "global_step20 is skipped: weights/part.bin: its digest differs" in bench.faults()[0]
    assert "resumes at step 11 from global_step10" in bench.text()


def test_other_data_is_refused_before_anything_is_queued(bench: Bench) -> None:
    place = write_checkpoint(checkpoints(bench), 10, MODEL)
    record = DataRecord(data_facts(bench.card), ((0, "a"),))
    write_cursor(place, {"data": record.document()})
    assert bench.faults() == []
    bench.overrides = ["run.seed=7"]
    assert bench.faults()[0].startswith(
        "refused: data.on_resume: global_step10 was trained on other data: run.seed was 1"
    )
    assert bench.code() == 1
    bench.overrides = ["run.seed=7", "data.on_resume=switch"]
    assert (
        "warning: data.on_resume: the data is switched after global_step10: run.seed"
        in bench.faults()[0]
    )
    assert bench.code() == 0
    bench.overrides = ["batch.train_samples=100"]
    assert (
        "batch.train_samples was 64, is 100: the trainer compares what it holds"
        in bench.faults()[0]
    )
    assert bench.code() == 0


def write_cursor(place: Path, cursor: dict[str, Any]) -> None:
    path = place / "cursor.json"
    path.write_text(json.dumps(cursor))
    manifest = json.loads((place / "manifest.json").read_text())
    kept = [entry for entry in manifest["files"] if entry["path"] != "cursor.json"]
    entry = {"path": "cursor.json", "bytes": path.stat().st_size, "digest": file_digest(path)}
    (place / "manifest.json").write_text(json.dumps({**manifest, "files": [*kept, entry]}))


def test_a_newer_format_is_not_trained_over(bench: Bench) -> None:
    for step in (10, 20):
        place = write_checkpoint(checkpoints(bench), step, MODEL)
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    assert (
        "global_step20 is newer than global_step10 and not for this run to judge"
        in bench.faults()[0]
    )
    assert bench.code() == 1
    (checkpoints(bench) / "latest").write_text("global_step10")
    assert bench.code() == 0, "told so, it goes on"


def test_saving_weights_alone_is_warned_of(bench: Bench) -> None:
    bench.overrides = ["checkpoint.save_optimizer=false"]
    assert any(fault.startswith("warning: checkpoint.save_optimizer: ") for fault in bench.faults())
    assert bench.code() == 0


def test_none_whole_is_refused(bench: Bench) -> None:
    place = write_checkpoint(checkpoints(bench), 10, MODEL)
    (place / "manifest.json").unlink()
    assert (
        "none is resumable" in bench.faults()[0]
        and "has no manifest" in bench.faults()[0]
        and bench.code() == 1
    )
    fixes = [check.fix for check in bench.checks() if check.name == "checkpoints"]
    assert fixes == [f"restore one from a backup; {NEW_VARIANT}"], (
        "all of it, and nothing of the rule"
    )
    (place / "manifest.json").write_text("{")
    assert bench.code() == 1


def test_expected_but_absent_checkpoints_are_refused(bench: Bench) -> None:
    bench.overrides = ["run.expect_resume=true"]
    assert "run.expect_resume: " in bench.faults()[0] and bench.code() == 1
    bench.overrides = []
    checkpoints(bench).mkdir(parents=True)
    (checkpoints(bench) / "latest").write_text(checkpoint_name(3))
    assert "latest is there, but no checkpoint" in bench.faults()[0] and bench.code() == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_size", 64),
        ("precision.dtype", "fp32"),
        ("tokenizer.padded_vocabulary_size", 256),
    ],
)
def test_a_checkpoint_of_another_model_names_the_key(bench: Bench, key: str, value: object) -> None:
    write_checkpoint(checkpoints(bench), 10, {**MODEL, key: value})
    assert (
        bench.faults()[0].startswith(f"refused: {key}: ")
        and f"set {key} = {value!r}" in bench.faults()[0]
    )
    assert bench.code() == 2


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["model.sequence_length=1500"], 2, "data/corpus has 1,500 tokens, one sample takes 1,501"),
        (["model.sequence_length=1490"], 0, "949,50,1 leaves training about 1,423 tokens of "),
        (
            ["model.sequence_length=100", "evaluation.iterations=1"],
            0,
            "949,50,1 leaves validation about 75 tokens of ",
        ),
    ],
)
def test_data_that_hold_less_than_one_sample(
    bench: Bench, overrides: list[str], code: int, words: str
) -> None:
    bench.overrides = overrides
    assert any(words in fault for fault in bench.faults()), bench.faults()
    assert bench.code() == code


def test_a_training_with_nothing_left_is_a_warning_until_it_says_that_it_is_finished(
    bench: Bench,
) -> None:
    write_checkpoint(checkpoints(bench), 64, MODEL)
    said = "batch.train_samples: nothing is left to train: global_step64 has consumed 64 of 64 samples; raise it"
    assert bench.faults()[0].startswith(f"warning: {said}") and bench.code() == 0
    marker = EndMarker("finished", 8, 64, False, "", 5.0, "h", "3")
    write_json(bench.directory.paths.end_marker("3"), to_builtins(marker))
    assert bench.faults()[0].startswith(
        "refused: batch.train_samples: the training is finished, nothing is left"
    )
    assert bench.code() == 1
    # here, where no allocation is taken for it
    bench.request = replace(bench.request, on_scheduler=False)
    assert bench.faults()[0].startswith(f"warning: {said}")
    bench.request = replace(bench.request, on_scheduler=True)
    bench.overrides = ["batch.train_samples=128"]
    assert bench.code() == 0 and "nothing is left" not in bench.text()


# ----------------------------------------------------------- settings, as the trainer compares them
def settings(bench: Bench) -> dict[str, Any]:
    """What a checkpoint of the bench's card keeps of schedule and optimizer."""
    return {
        "iteration": 10, "consumed_samples": 10, "consumed_tokens": 160,
        "schedule": plan_of(bench.card).facts(), "optimizer": optimizer_facts(bench.card),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedule.learning_rate=2e-3", "learning rate: value from checkpoint (0.001) is not equal to the card's (0.002)"),
        ("schedule.warmup_samples=8", "warm-up (samples): value from checkpoint (0) is not equal to the card's (8)"),
        ("schedule.decay_style=linear", "decay style: value from checkpoint (cosine) is not equal to the card's (linear)"),
        ("optimizer.beta2=0.95", "was trained with other settings: optimizer.beta2 is 0.999 there and 0.95 in the card"),
    ],
)  # fmt: skip
def test_other_settings_are_refused_in_the_words_of_the_trainer(
    bench: Bench, override: str, words: str
) -> None:
    write_cursor(write_checkpoint(checkpoints(bench), 10, MODEL), settings(bench))
    assert bench.faults() == []
    bench.overrides = [override]
    (fault,) = bench.faults()
    assert (
        fault.startswith("refused: schedule.on_resume: global_step10 ")
        and words in fault
        and bench.code() == 2
    )
    assert "schedule.on_resume" in fault.rpartition("; ")[2]
    bench.overrides = [override, "schedule.on_resume=override"]
    (fault,) = bench.faults()
    assert fault.startswith(
        "warning: schedule.on_resume: the card counts from global_step10 on: overriding "
    )
    assert bench.code() == 0


def test_every_setting_that_differs_is_named_at_once(bench: Bench) -> None:
    write_cursor(write_checkpoint(checkpoints(bench), 10, MODEL), settings(bench))
    bench.overrides = [
        "schedule.learning_rate=2e-3",
        "schedule.min_learning_rate=1e-5",
        "optimizer.beta1=0.8",
    ]
    assert len(bench.faults()) == 3 and bench.code() == 2
    bench.overrides = ["schedule.learning_rate=2e-3", "schedule.on_resume=checkpoint"]
    words = "warning: schedule.on_resume: global_step10 counts, not what the card says of: learning rate"
    assert bench.faults() == [words]


def test_settings_among_tensors_and_a_cursor_that_cannot_be_read_are_told(bench: Bench) -> None:
    place = write_checkpoint(checkpoints(bench), 10, MODEL)
    write_cursor(place, {})
    (place / "cursor.json").write_text("[]")
    assert bench.faults()[0].startswith(
        "unknown: checkpoints: global_step10: what it says of schedule and data"
    )
    assert bench.code() == 3
    (place / "cursor.json").rename(place / "mp_rank_00_model_states.pt")
    manifest = json.loads((place / "manifest.json").read_text())
    for entry in manifest["files"]:
        entry["path"] = entry["path"].replace("cursor.json", "mp_rank_00_model_states.pt")
    write_json(place / "manifest.json", manifest)
    (fault,) = bench.faults()
    assert fault.startswith(
        "warning: schedule.on_resume: global_step10 keeps schedule, optimizer settings and data"
    )


# ------------------------------------------------------------------------- another run's checkpoint
@pytest.fixture
def other(bench: Bench) -> Path:
    """The checkpoints of another run, `big/main`, which saved step 30 with the bench's settings."""
    folder = bench.folder / "other" / "checkpoints" / "main"
    write_cursor(write_checkpoint(folder, 30, MODEL), {**settings(bench), "iteration": 30})
    write_json(
        bench.folder / "other" / "state" / "run.json", {"schema": 1, "id": "0" * 32, "run": "big"}
    )
    bench.overrides = [f"checkpoint.load={folder}"]
    return folder


def test_a_start_from_another_run_is_said_and_compared(bench: Bench, other: Path) -> None:
    assert bench.faults() == []
    assert f"starts from {other / 'global_step30'} (saved on" in bench.text()
    assert (
        "weights and optimizer, at step 31; sizes verified" in bench.text()
        and "random" not in bench.text()
    )
    load = bench.overrides
    bench.overrides = [*load, "schedule.learning_rate=2e-3"]
    assert bench.code() == 2 and "learning rate" in bench.faults()[0]
    bench.overrides = [*load, "schedule.learning_rate=2e-3", "checkpoint.finetune=true"]
    assert bench.faults() == [] and "weights alone, all counters from zero" in bench.text()
    bench.overrides = [*load, "run.seed=7"]
    assert bench.code() == 0 and "the data is switched after global_step30" not in bench.text()
    # which the trainer takes for "do not begin at random"
    bench.overrides = [*load, "run.expect_resume=true"]
    assert bench.code() == 0
    write_checkpoint(checkpoints(bench), 5, MODEL)
    # the run's own go before all others
    assert "resumes at step 6 from global_step5" in bench.text()


def test_weights_alone_are_enough_where_no_optimizer_is_loaded(bench: Bench, other: Path) -> None:
    without_optimizer(other / "global_step30")
    assert bench.code() == 1 and "none is resumable" in bench.faults()[0]
    bench.overrides += ["checkpoint.load_optimizer=false"]
    assert bench.code() == 0


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("nowhere", "nowhere is not a folder that is there; name a folder of checkpoints"),
        (
            "other/checkpoints",
            "checkpoints holds no checkpoint (global_stepN); name a folder of checkpoints",
        ),
        (
            "other/checkpoints/main/global_step30",
            "global_step30 is one checkpoint; name the folder above it",
        ),
    ],
)
def test_a_folder_to_start_from_that_holds_none_is_refused(
    bench: Bench, other: Path, place: str, words: str
) -> None:
    bench.overrides = [f"checkpoint.load={bench.folder / place}"]
    assert (
        bench.faults()[0].startswith(f"refused: checkpoint.load: {bench.folder}")
        and words in bench.faults()[0]
    )
    assert bench.code() == 2


def test_a_checkpoint_of_another_tool_is_left_to_the_trainer(bench: Bench, other: Path) -> None:
    (other / "global_step30" / "manifest.json").unlink()
    for name in ("weights/part.bin", "weights"):
        path = other / "global_step30" / name
        path.unlink() if path.is_file() else path.rmdir()
    (other / "global_step30" / "layer_01-model_00-model_states.pt").touch()
    assert bench.faults() == []
    assert f"starts from {other / 'global_step30'} of another tool" in bench.text()


def test_what_a_run_began_with_stays_in_sight(bench: Bench) -> None:
    write_checkpoint(checkpoints(bench), 10, MODEL)
    BranchOrigin("/other/checkpoints/main", 30, "big/main", True, True, 5.0, "3").write(
        bench.directory.paths
    )
    assert "the run began with big/main step 30 (weights alone, counters from zero)" in bench.text()


def test_a_last_checkpoint_without_a_word_of_the_card(bench: Bench) -> None:
    """The trainer leaves in time by itself, and the launch says when; where there is no room for
    that, it says so.
    """
    unsaid = ["run.exit_duration_minutes=none", "slurm.signal_seconds_before_limit=none"]
    bench.overrides = unsaid
    assert (
        bench.faults() == []
        and "last save: the trainer leaves after 7.5 min, 2 min 30 s before" in bench.text()
    )
    bench.changes = {"history": RunHistory(step=0.5, save=60.0)}
    assert (
        bench.faults() == []
        and "after 7.99 min" in bench.text()
        and "a save 1 min (measured)" in bench.text()
    )
    bench.changes = {"history": RunHistory(step=0.5, save=400.0)}
    assert bench.faults()[0].startswith(
        "warning: run.exit_duration_minutes: cannot be derived, so each attempt ends without a last checkpoint: too "
    )
    bench.overrides = []
    assert "last save: " not in bench.text()  # what the card says goes on as before
