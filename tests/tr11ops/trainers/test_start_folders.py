"""Each start saves into a folder of its own: what counts is taken over, and what an earlier one writes
afterwards no start goes on from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.trainers.folders import age
from tests.tr11ops.trainers.holding import Bench, contents, never, no_fence, noon, quiet
from tr11ops.base.errors import Refusal
from tr11ops.dialects.dialect import dialect_named
from tr11ops.dialects.settings import TrainerSettings, settings_of
from tr11ops.trainers.held import HoldPlace
from tr11ops.trainers.moved import aside_place
from tr11ops.trainers.prepare import ResumePoint, prepare
from tr11ops.trainers.start import refusal_of
from tr11ops.trainers.start_folders import refuse_beginning, take_over
from tr11ops.trainers.start_names import base_of, current_folder
from trainer.contract.errors import LeaseLost


class Starts:
    """Starts of one training, whose checkpoints `Bench.save` lays into the folder of the newest."""

    def __init__(self, root: Path, dialect: str = "huggingface") -> None:
        self.bench = Bench(root, dialect)
        self.base = self.bench.folder

    def begin(self, epoch: int, fence: Callable[[], None] = no_fence) -> ResumePoint | None:
        place = take_over(
            replace(self.bench.place, folder=self.base), self.base, epoch, fence, self.bench.said.append,
            clock=noon, pause=never,
        )  # fmt: skip
        self.bench.place, self.bench.folder = place, place.folder
        return prepare(place, no_fence, quiet, clock=noon, pause=never)

    def save_as(self, number: int, *steps: int) -> Path:
        """What a start of the past saves when it wakes."""
        now, self.bench.folder = self.bench.folder, self.base / f"start-{number}"
        self.bench.folder.mkdir(exist_ok=True)
        self.bench.save(*steps)
        woken, self.bench.folder = self.bench.folder, now
        return woken

    def cut(self, folder: Path, name: str = "checkpoint-20") -> None:
        """What is left of a save that was cut off."""
        (folder / name / "trainer_state.json").unlink()
        age(folder)

    def names(self, number: int) -> list[str]:
        return sorted(one.name for one in (self.base / f"start-{number}").iterdir())


def step_of(point: ResumePoint | None) -> int | None:
    return None if point is None else point.step


@pytest.mark.parametrize("dialect", ["huggingface", "megatron", "lightning", "nanochat"])
def test_what_is_whole_is_taken_over_and_what_a_woken_start_saves_is_not(
    tmp_path: Path, dialect: str
) -> None:
    starts = Starts(tmp_path, dialect)
    starts.bench.save(10)  # before each start had a folder of its own
    assert step_of(starts.begin(1)) == 10
    starts.bench.save(20)
    assert step_of(starts.begin(2)) == 20
    whole = contents(starts.base / "start-2")
    assert (starts.base / "current").resolve() == starts.base / "start-2"
    assert not (starts.base / "start-1").exists()
    starts.save_as(1, 20, 900)  # the step that was taken from it, and one that looks newer
    assert contents(starts.base / "start-2") == whole
    for epoch in (3, 4):
        assert step_of(starts.begin(epoch)) == 20
    assert starts.bench.name(900) in starts.names(1)
    assert starts.bench.name(900) not in starts.names(4)


def test_a_broken_one_of_a_woken_start_stands_in_no_ones_way(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    starts.begin(1)
    starts.bench.save(10)
    starts.begin(2)
    starts.cut(starts.save_as(1, 30), "checkpoint-30")
    assert step_of(starts.begin(3)) == 10
    assert not aside_place(starts.base / "current").exists()


def test_a_save_that_was_cut_off_stays_where_it_is_and_is_said(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    starts.begin(1)
    starts.bench.save(10, 20)
    starts.cut(starts.bench.folder)
    assert step_of(starts.begin(2)) == 10
    starts.save_as(1, 20)  # it goes on
    assert step_of(starts.begin(3)) == 10
    assert sum("it stays there, and no start takes it" in line for line in starts.bench.said) == 1


@pytest.mark.parametrize("calls", range(2, 6))
@pytest.mark.parametrize("dialect", ["megatron", "nanochat"])
def test_a_start_that_is_ended_while_it_takes_over_is_followed_by_one_that_does(
    tmp_path: Path, dialect: str, calls: int
) -> None:
    starts = Starts(tmp_path, dialect)
    starts.begin(1)
    starts.bench.save(10, 20)
    left = [calls]

    def fence() -> None:
        left[0] -= 1
        if not left[0]:
            raise LeaseLost("another launch has taken the run over")

    with pytest.raises(LeaseLost):
        starts.begin(2, fence)
    assert step_of(starts.begin(3)) == 20
    assert starts.bench.name(10) in starts.names(3)


def test_a_start_from_random_weights_beside_what_is_broken_is_refused(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    starts.begin(1)
    starts.bench.save(10)
    starts.cut(starts.bench.folder, "checkpoint-10")
    for epoch in (2, 3):
        assert starts.begin(epoch) is None
        with pytest.raises(
            Refusal, match=r"start-1 holds checkpoint-10, and nothing whole is left"
        ):
            refuse_beginning(starts.bench.place)
    (starts.base / "start-1").rename(tmp_path / "away")
    assert starts.begin(4) is None
    refuse_beginning(starts.bench.place)


def test_what_cannot_be_judged_is_for_a_person(tmp_path: Path) -> None:
    starts = Starts(tmp_path, "megatron")
    starts.begin(1)
    starts.bench.save(10)
    folder = starts.bench.folder / "iter_0000020"
    folder.mkdir()
    (folder / "mp_rank_00").write_text("an older format, which the tracker alone tells")
    (starts.bench.folder / "latest_checkpointed_iteration.txt").write_text("")
    age(starts.bench.folder)
    with pytest.raises(Refusal, match=r"whether iter_0000020 in .*start-1 is whole is not known"):
        starts.begin(2)


def test_numbers_never_go_back(tmp_path: Path) -> None:
    """The folder of leases may have been lost."""
    starts = Starts(tmp_path)
    starts.begin(7)
    starts.bench.save(10)
    assert step_of(starts.begin(1)) == 10
    assert starts.bench.folder.name == "start-8"


def settings(*command: str, dialect: str = "huggingface", **more: object) -> TrainerSettings:
    return settings_of(
        {"dialect": dialect, "command": list(command), "folder": "/out", **more}, "here"
    )


def test_the_command_says_it(tmp_path: Path) -> None:
    assert not settings("train.py", "--output_dir", "{folder}").saves_apart
    assert settings("train.py", "--output_dir", "{save}").saves_apart
    assert settings("train.py", environment={"OUT": "{save}"}).saves_apart
    given = settings("train.py", "--output_dir", "{save}", folder=str(tmp_path))
    assert current_folder(given) == tmp_path
    (tmp_path / "start-3").mkdir()
    (tmp_path / "current").symlink_to("start-3")
    found = current_folder(given)
    assert found == tmp_path / "current" and base_of(found) == tmp_path
    place = HoldPlace.of(given, Bench(tmp_path).paths, 2)
    assert place is not None and place.folder == tmp_path / "start-3"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dialect": "none"}, "where checkpoints lie"),
        ({"checkpoints": {"name": "start-{step}"}}, "bear the name of a checkpoint"),
        ({"dialect": "megatron", "resume": ["--load", "{folder}"]}, "lies in {save}"),
    ],
    ids=["unknown", "name", "resume"],
)
def test_what_cannot_be_kept_apart_is_refused(more: dict[str, object], said: str) -> None:
    fault = refusal_of(settings("train.py", "{save}", **more))  # type: ignore[arg-type]
    assert said in fault and "\n" not in fault


def test_a_dialect_that_asks_for_it_in_its_example_may(tmp_path: Path) -> None:
    for name in ("megatron", "torchtitan", "nanogpt", "litgpt"):
        found = dialect_named(name)
        assert any("{save}" in word for word in found.command.example), name
        given = settings(*found.command.example, dialect=name, folder=str(tmp_path))
        assert refusal_of(given) == "" and found.checkpoints is not None
