"""What a keeper learns of its trainer's stages, and sees of its processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.tr11ops.trainers.kept import JOB, PATIENCE, KeptTraining, wait_until
from tr11ops.rundir.attempts import KeptStacks, TrainerLife, read_kept_stacks, read_lives
from tr11ops.trainers.course import TrainingCourse
from tr11ops.trainers.life import Processes, Stages, stage_of
from tr11ops.trainers.words import Heard, MarkSeen, StepSeen
from tr11ops.watchdog.hangs import hang_case
from tr11ops.watchdog.stacks import keep_stacks


def step(number: int) -> StepSeen:
    return StepSeen(number, None, {})


COURSE: tuple[tuple[float, Heard], ...] = (
    (0.0, MarkSeen("loading")),
    (40.0, MarkSeen("scratch")),
    (90.0, step(1)),  # it compiled
    (91.0, step(2)),
    (92.5, step(3)),
    (92.5, MarkSeen("saving")),
    (112.5, MarkSeen("saved")),
    (113.0, step(4)),
    (114.0, MarkSeen("evaluating")),
    (144.0, step(5)),
    (164.0, step(6)),  # a save that no line told
)


def test_each_kind_of_stage_is_learned_by_itself() -> None:
    course, stages = TrainingCourse(sign=0.0), Stages("load", 0, 0.0)
    for moment, heard in COURSE:
        course = course.after(heard, moment)
        stages = stages.after(course, moment)
        stages = stages.after(course, moment + 0.2)  # a turn in which nothing happens
    longest = {kind: (one.longest, one.count) for kind, one in stages.learned.items()}
    assert longest["load"] == (90.0, 1)
    assert longest["save"] == (20.0, 1)
    assert longest["evaluation"] == (30.0, 1)
    assert longest["step"][0] == 20.0
    assert stage_of(course) == "step"


def test_a_break_teaches_nothing() -> None:
    course = TrainingCourse(sign=0.0).after(step(1), 1.0)
    stages = Stages("step", 1, 1.0).broken_off(5000.0).after(course.after(step(2), 5001.0), 5001.0)
    assert stages.learned["step"].longest == 1.0


BEFORE = Processes(100.0, {1: 50.0, 2: 7.0}, {1: 10, 2: 10})


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        (Processes(105.0, {1: 50.01, 2: 7.02}, {1: 900, 2: 10}), False),
        (Processes(105.0, {1: 50.01, 2: 9.0}, {1: 10, 2: 10}), True),
        (Processes(105.0, {1: 50.0, 2: 7.0}, {1: 10, 2: 5 << 20}), True),
        (Processes(105.0, {1: 50.0}, {1: 10}), True),
        (Processes(105.0, {1: 50.0, 2: 7.0, 3: 0.0}, {1: 10, 2: 10}), True),
        (Processes(105.0, {1: 50.0, 2: 7.0}, {}), False),
    ],
)
def test_processes_that_only_wait_have_not_moved(after: Processes, moved: bool) -> None:
    assert after.have_moved_since(BEFORE) == moved


# ----------------------------------------------------------------------------- for real
def life_of(training: KeptTraining) -> TrainerLife | None:
    return next(iter(read_lives(training.paths, JOB)), None)


def silent_for(training: KeptTraining) -> float:
    life = life_of(training)
    if life is None or life.moved is None:
        return 0.0
    return life.time - max(life.sign, life.moved)


def stacks_of(training: KeptTraining) -> KeptStacks:
    keep_stacks(training.paths, JOB, (), 1, os.environ, now=time.time(), is_local=True)
    kept = read_kept_stacks(training.paths, JOB)
    assert kept is not None
    return kept


def test_a_rank_that_sleeps_for_ever_is_proved_to_hang(tmp_path: Path) -> None:
    training = KeptTraining(tmp_path)
    training.with_torch(60, 50, "sleep-at-25", seconds=0.3)
    with training.kept() as keeper:
        wait_until(lambda: silent_for(training) > 6.0)
        stacks = stacks_of(training)
        life = life_of(training)
        assert life is not None and keeper.poll() is None
        case = hang_case((life,), stacks, time.time(), bound=6.0)
        assert case.is_proved, (case, life, stacks)
        assert life.kind == "step" and life.learned["step"].count >= 20
        assert hang_case((life,), stacks, time.time(), bound=60.0).why
        assert training.end() is None, "the keeper itself ends nothing"


def test_a_save_that_lasts_as_long_as_twenty_steps_is_none(tmp_path: Path) -> None:
    training = KeptTraining(tmp_path)
    training.plain(26, 25, "slow-save", seconds=0.4)
    with training.kept() as keeper:
        wait_until(lambda: silent_for(training) > 4.0)  # in the save, as silent as it can be
        life = life_of(training)
        assert life is not None
        pace = life.learned["step"].longest
        case = hang_case((life,), None, time.time(), bound=30 * pace)  # as ten steps, three times
        assert not case.is_proved
        assert keeper.wait(timeout=PATIENCE) == 0
    end = training.end()
    assert end is not None and end.reason == "finished"
    learned = read_lives(training.paths, JOB)[0].learned["step"]
    assert learned.longest > 7.0, "a later save is waited for longer"
