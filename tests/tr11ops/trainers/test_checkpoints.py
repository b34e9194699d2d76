"""Which checkpoints are whole, which one the trainer would take, and what is moved out of its way."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tr11ops.trainers.folders import LATER, LONG_AGO, WHOLE_ARCHIVE, age, lay
from tr11ops.base.errors import Refusal
from tr11ops.dialects.dialect import CheckpointRules, dialect_named
from tr11ops.trainers.aside import MOVES, Aside, plan_aside, set_aside
from tr11ops.trainers.checkpoints import CheckpointSurvey, survey
from tr11ops.trainers.saves import complete_of, whole_of

SHARDS = ("__0_0.distcp", ".metadata")


def rules_of(name: str) -> CheckpointRules:
    rules = dialect_named(name).checkpoints
    assert rules is not None
    return rules


def huggingface(step: int, **without: bool) -> dict[str, str]:
    """The files of a whole checkpoint of two ranks, but for some."""
    names = {
        "state": "trainer_state.json",
        "rank0": "rng_state_0.pth",
        "rank1": "rng_state_1.pth",
        "weights": "pytorch_model.bin",
        "optimizer": "optimizer.pt",
    }
    texts = {"trainer_state.json": "{}"}
    return {
        f"checkpoint-{step}/{file}": texts.get(file, WHOLE_ARCHIVE)
        for part, file in names.items()
        if not without.get(part)
    }


def look(root: Path, files: Mapping[str, str], name: str = "huggingface") -> CheckpointSurvey:
    return survey(rules_of(name), lay(root, files), 2, LATER)


@pytest.mark.parametrize(
    ("files", "taken", "wanted", "conflict"),
    [
        ({}, None, None, ""),
        (huggingface(8), 8, 8, ""),
        ({**huggingface(8), **huggingface(16)}, 16, 16, ""),
        ({**huggingface(8), **huggingface(100), **huggingface(16)}, 100, 100, ""),
        (
            {**huggingface(8), **huggingface(16, rank1=True)}, 16, 8,
            "it would take checkpoint-16, which is broken (1 file rng_state*.pth, where 2 belong to it), in place of checkpoint-8",
        ),
        (
            {**huggingface(8), **huggingface(16, optimizer=True)}, 16, 8,
            "it would take checkpoint-16, which is weights only (no optimizer.pt in it), in place of checkpoint-8",
        ),
        (
            huggingface(16, state=True), 16, None,
            "it would take checkpoint-16, which is broken (no trainer_state.json in it), and no other is whole",
        ),
        ({**huggingface(8, state=True), **huggingface(16)}, 16, 16, ""),
    ],
)  # fmt: skip
def test_a_trainer_that_takes_the_highest_whatever_it_is(
    tmp_path: Path, files: dict[str, str], taken: int | None, wanted: int | None, conflict: str
) -> None:
    found = look(tmp_path, files)
    assert (found.taken and found.taken.step) == taken
    assert (found.wanted and found.wanted.step) == wanted
    assert found.conflict == conflict


def test_a_trainer_that_looks_at_less_than_makes_one_whole(tmp_path: Path) -> None:
    rules = rules_of("torchtitan")
    for step in (8, 16):
        lay(tmp_path, {f"step-{step}/model.safetensors.index.json": "{}"})
    found = survey(rules, tmp_path, None, LATER)
    assert found.taken is not None and found.taken.name == "step-16"
    assert found.taken.state == "weights only" and found.wanted is None
    lay(tmp_path, {"step-24/__0_0.distcp": "x"})  # it does not look at this one
    found = survey(rules, tmp_path, None, LATER)
    assert found.taken is not None and found.taken.name == "step-16"


@pytest.mark.parametrize(
    ("tracker", "taken", "said"),
    [
        ("16", "iter_0000016", ""),
        ("8", "iter_0000008", ""),
        ("24", None, "the next start would look for '24', which is not there"),
        ("", None, "the next start would look for '', which is not there"),
        ("1" * 5000, None, "which is not there"),
        (None, None, "it would start from the beginning beside iter_0000016"),
    ],
)
def test_a_trainer_that_goes_by_a_file(
    tmp_path: Path, tracker: str | None, taken: str | None, said: str
) -> None:
    files = {f"iter_{step:07d}/{file}": "x" for step in (8, 16) for file in SHARDS}
    if tracker is not None:
        files["latest_checkpointed_iteration.txt"] = tracker
    found = look(tmp_path, files, "megatron")
    assert (found.taken and found.taken.name) == taken
    assert said in found.conflict and bool(said) == bool(found.conflict)


def test_what_was_written_a_moment_ago_is_being_written(tmp_path: Path) -> None:
    lay(tmp_path, {**huggingface(8), **huggingface(16, rank1=True)})
    found = survey(rules_of("huggingface"), tmp_path, 2, LONG_AGO + 9.0)
    assert [one.state for one in found.found] == ["being written", "being written"]
    assert [one.is_complete for one in found.found] == [True, False]
    assert found.is_fresh and "a moment ago" in found.conflict and found.wanted is None
    found = survey(rules_of("huggingface"), tmp_path, 2, LONG_AGO + 11.0)
    assert [one.state for one in found.found] == ["whole", "broken"]


def test_what_was_complete_before_a_wish_is_not_what_was_saved_since(tmp_path: Path) -> None:
    lay(tmp_path, huggingface(8))
    asked = survey(rules_of("huggingface"), tmp_path, 2, LONG_AGO + 5.0)
    later = survey(rules_of("huggingface"), tmp_path, 2, LONG_AGO + 20.0)
    assert not whole_of(asked) and whole_of(later)
    assert not whole_of(later) - complete_of(asked)


def test_one_that_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    lay(tmp_path, {**huggingface(8), "checkpoint-16": "no folder"})
    (tmp_path / "checkpoint-24").symlink_to(tmp_path / "gone")
    found = survey(rules_of("huggingface"), tmp_path, 2, LATER)
    states = {one.name: one.state for one in found.found}
    assert states == {"checkpoint-8": "whole", "checkpoint-24": "not known"}
    assert "checkpoint-24, which it takes next" in found.unsure


# ----------------------------------------------------------------------------- moved aside
def aside(root: Path, name: str = "huggingface") -> list[Path]:
    rules = rules_of(name)
    plan = plan_aside(rules, survey(rules, root, 2, LATER))
    assert plan is not None
    return set_aside(plan, rules, root, LATER)


def test_broken_ones_above_the_newest_whole_one_are_moved_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "output"
    lay(root, {
        **huggingface(4, state=True), **huggingface(8),
        **huggingface(16, rank1=True), **huggingface(24, state=True),
    })  # fmt: skip
    before = {path.relative_to(root): path.read_bytes() for path in root.rglob("*.*t*")}
    assert [path.name for path in aside(root)] == ["checkpoint-16", "checkpoint-24"]
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint-4", "checkpoint-8"]
    place = tmp_path / "output.set-aside"
    for path, content in before.items():
        home = root if path.parts[0] in ("checkpoint-4", "checkpoint-8") else place
        assert (home / path).read_bytes() == content
    lines = [json.loads(line) for line in (place / MOVES).read_text().splitlines()]
    assert [(line["name"], line["to"]) for line in lines] == [
        ("checkpoint-16", "checkpoint-16"),
        ("checkpoint-24", "checkpoint-24"),
    ]
    rules = rules_of("huggingface")
    assert plan_aside(rules, survey(rules, root, 2, LATER)) is None


def test_the_same_step_broken_twice_lies_there_twice(tmp_path: Path) -> None:
    root = tmp_path / "output"
    for name in ("checkpoint-16", "checkpoint-16-2"):
        lay(root, {**huggingface(8), **huggingface(16, rank1=True)})
        assert [path.name for path in aside(root)] == [name]


def test_the_file_that_names_the_newest_is_written_again(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    lay(root, {
        "20/model_config.json": "{}", "40/checkpoint_metadata.json": "{}", "latest.txt": "40",
    })  # fmt: skip
    aside(root, "nanotron")
    assert (root / "latest.txt").read_text() == "20"
    assert (tmp_path / "ckpt.set-aside" / "latest.txt").read_text() == "40"
    found = survey(rules_of("nanotron"), root, 2, LATER)
    assert found.taken is not None and found.taken.name == "20" and not found.conflict


@pytest.mark.parametrize(
    ("files", "name", "said"),
    [
        (huggingface(16, state=True), "huggingface", "or move checkpoint-16 away to start from the beginning"),
        ({"ckpt.pt": "PK"}, "nanogpt", "or move ckpt.pt away to start from the beginning"),
        (huggingface(8), "huggingface", None),
    ],
)  # fmt: skip
def test_where_nothing_is_moved(
    tmp_path: Path, files: dict[str, str], name: str, said: str | None
) -> None:
    root = tmp_path / "output"
    found = look(root, files, name)
    if said is None:
        assert plan_aside(rules_of(name), found) is None
    else:
        with pytest.raises(Refusal, match=said):
            plan_aside(rules_of(name), found)
    assert not (tmp_path / "output.set-aside").exists()


@pytest.mark.parametrize("dies_at", ["tracker", "move"])
def test_a_kill_between_the_moves_and_the_file_that_names_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    root = tmp_path / "ckpt"
    lay(root, {
        "20/model_config.json": "{}", "40/shard": "x", "60/shard": "x", "latest.txt": "60",
    })  # fmt: skip
    step = "rename" if dies_at == "move" else "replace"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path if dies_at == "move" else os, step, killed)
    with pytest.raises(KeyboardInterrupt):
        aside(root, "nanotron")
    monkeypatch.undo()
    rules = rules_of("nanotron")
    found = survey(rules, root, 2, LATER)
    if dies_at == "move":  # the next start goes on from the whole one already
        assert found.taken is not None and found.taken.name == "20" and not found.conflict
    else:
        assert found.taken is not None and found.taken.name == "60"
        aside(root, "nanotron")
        assert sorted(path.name for path in root.iterdir()) == ["20", "latest.txt"]


def test_a_file_that_names_what_is_gone_is_written_again(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    elsewhere = tmp_path / "latest.txt"
    elsewhere.write_text("60")
    lay(root, {"20/model_config.json": "{}"})
    (root / "latest.txt").symlink_to(elsewhere)
    assert aside(root, "nanotron") == []
    assert (root / "latest.txt").is_symlink() and elsewhere.read_text() == "20"
    (root / "latest.txt").unlink()
    rules = rules_of("nanotron")
    with pytest.raises(Refusal, match=r"write 20 into latest\.txt"):
        plan_aside(rules, survey(rules, root, 2, LATER))


def test_a_file_that_a_crash_emptied_says_a_step_again(tmp_path: Path) -> None:
    root, tracker = tmp_path / "ckpt", "latest_checkpointed_iteration.txt"
    lay(root, {f"iter_0000008/{file}": "x" for file in SHARDS} | {tracker: ""})
    assert aside(root, "megatron") == []
    assert (root / tracker).read_text() == "8"


def test_a_clock_that_is_ahead(tmp_path: Path) -> None:
    lay(tmp_path, huggingface(8))
    found = survey(rules_of("huggingface"), tmp_path, 2, LONG_AGO - 86_400.0)
    assert (found.found[0].state, found.found[0].why[:16]) == ("not known", "a clock is ahead")


def test_one_of_which_nothing_is_known_is_not_moved(tmp_path: Path) -> None:
    root = tmp_path / "output"
    lay(root, {**huggingface(8), **huggingface(16, state=True)})
    (root / "checkpoint-12").symlink_to(root / "gone")
    with pytest.raises(Refusal, match="checkpoint-12: not known"):
        plan_aside(rules_of("huggingface"), survey(rules_of("huggingface"), root, 2, LATER))
    (root / "checkpoint-32").symlink_to(root / "gone")
    with pytest.raises(Refusal, match="not known whether checkpoint-32"):
        plan_aside(rules_of("huggingface"), survey(rules_of("huggingface"), root, 2, LATER))


def test_a_move_that_was_cut_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "output"
    lay(root, {**huggingface(8), **huggingface(16, rank1=True), **huggingface(24, rank1=True)})
    rename, moved = Path.rename, []

    def once(path: Path, to: Path) -> Path:
        if moved:
            raise OSError(28, "No space left on device")
        moved.append(path)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(OSError, match="No space"):
        aside(root)
    monkeypatch.undo()
    assert [path.name for path in aside(root)] == ["checkpoint-24"]
    assert [path.name for path in root.iterdir()] == ["checkpoint-8"]


# ----------------------------------------------------------------------------- odd files
@pytest.mark.parametrize(
    ("name", "files", "odd", "state"),
    [
        ("torchtitan", {"step-8/__0_0.distcp": "x"}, "step-8/.metadata", "broken"),
        ("torchtitan", {"step-8/model.safetensors.index.json": "{}"}, "step-8/.metadata", "not known"),
        ("huggingface", huggingface(8, state=True), "checkpoint-8/trainer_state.json", "not known"),
        ("huggingface", huggingface(8, optimizer=True), "checkpoint-8/optimizer.pt", "weights only"),
        ("lightning", {}, "epoch=0-step=8.ckpt", "broken"),
    ],
)  # fmt: skip
def test_a_pipe_at_the_place_of_a_file_is_looked_at_and_not_opened(
    tmp_path: Path, name: str, files: dict[str, str], odd: str, state: str
) -> None:
    lay(tmp_path, files)
    (tmp_path / odd).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / odd)
    age(tmp_path)
    found = survey(rules_of(name), tmp_path, 2, LATER)
    assert [one.state for one in found.found] == [state]


def test_a_pipe_at_the_place_of_the_tracker_tells_nothing(tmp_path: Path) -> None:
    lay(tmp_path, {"iter_0000008/mp_rank_00": "x"})
    os.mkfifo(tmp_path / "latest_checkpointed_iteration.txt")
    found = survey(rules_of("megatron"), tmp_path, 2, LATER)
    assert found.taken is None and "is a pipe" in found.taken_unknown
    assert found.found[0].state == "not known"


def test_files_that_lie_loose_are_moved_with_all_that_are_of_their_step(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    files = {
        f"{part}_{step:06d}{end}": WHOLE_ARCHIVE if part == "model" else "{}"
        for step in (8, 16)
        for part, end in (("model", ".pt"), ("meta", ".json"), ("optim", "_rank0.pt"))
    }
    files["optim_000008_rank1.pt"] = "{}"  # of step 16, the second rank's is missing
    lay(root, files)
    rules = rules_of("nanochat")
    found = survey(rules, root, 2, LATER)
    broken = found.found[-1]
    assert broken.state == "broken" and found.wanted is not None and found.wanted.step == 8
    moved = set_aside(Aside((broken,), found.wanted), rules, root, LATER)
    gone = {"model_000016.pt", "meta_000016.json", "optim_000016_rank0.pt"}
    assert {path.name for path in moved} == gone and moved[-1].name == "model_000016.pt"
    assert {path.name for path in root.iterdir()} == files.keys() - gone


def test_a_whole_newest_is_taken_whatever_its_trainer_tells_one_by(tmp_path: Path) -> None:
    rules = CheckpointRules("step-{step}", ("has DONE",))
    lay(tmp_path, {"step-1/DONE": "", "step-2/DONE": ""})
    found = survey(rules, tmp_path, 2, LATER)
    assert found.taken is not None and found.taken.name == "step-2" and not found.unsure
    lay(tmp_path, {"step-3/x": ""})
    found = survey(rules, tmp_path, 2, LATER)
    assert found.taken is None and "is not known" in found.unsure
