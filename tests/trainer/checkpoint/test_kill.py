"""Killed at any moment, a run keeps its old checkpoint or has the whole new one, never a mixture."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.forks import die_at, killed_at
from tests.trainer.checkpoint import lives, world
from tests.trainer.checkpoint.synthetic import Model, Shape, differences, state
from trainer.checkpoint import store
from trainer.checkpoint.publishing import CheckpointInfo, Extras, Finished, NewCheckpoint
from trainer.checkpoint.writer import AsyncSaver
from trainer.contract.checkpoint_names import SUPERSEDED_SUFFIX, checkpoint_steps
from trainer.contract.errors import CheckpointError

MODEL = Model(layers=2, hidden=8, vocabulary=8)
SHAPE = Shape(tensor=2, data=2)
HEARD = 3  # how a rank leaves that was told, by CheckpointError, that another is gone


def info(shape: Shape) -> CheckpointInfo:
    return CheckpointInfo(shape.topology, {"model.layers": MODEL.layers})


def save(
    folder: Path, shape: Shape, rank: int, step: int, content: int, beside: bool = False
) -> None:
    """Save as `step` the state whose values are those of `content`; `beside`: in the background."""
    cursor = {"content": content, "consumed_samples": content, "consumed_tokens": content}
    live, extras = state(MODEL, shape, rank, content), Extras(cursor)
    if not beside:
        store.save(NewCheckpoint(folder, step, extras, info(shape)), live)
        return
    saver = AsyncSaver(folder, print)
    saver.start(step, live, extras, info(shape))
    [outcome] = saver.wait()
    assert isinstance(outcome, Finished), outcome


def survivor(folder: Path) -> tuple[int, int] | None:
    """The step found and the content that all of it has; fails on a mixture. None when there is no
    checkpoint.
    """
    step = store.find_resumable(folder, "digests", False, lambda line: None)
    if step is None:
        return None
    found = state(MODEL, Shape(), 0, None)
    loaded = store.load(folder, step, found, info(Shape()))
    content = int(loaded.cursor["content"])
    assert differences(found, state(MODEL, Shape(), 0, content)) == []
    assert loaded.optimizer_step == 1000 + content
    return step, content


def touches(folder: Path) -> Callable[[str, tuple[Any, ...]], bool]:
    """Whether an audit event is something done to files below `folder`."""

    def is_effect(event: str, arguments: tuple[Any, ...]) -> bool:
        named = [str(argument) for argument in arguments if isinstance(argument, str | Path)]
        return (event == "open" or event.startswith(("os.", "shutil."))) and any(
            str(folder) in name for name in named
        )

    return is_effect


def kill_everywhere(
    rank: int, root: Path, old: list[tuple[int, int]], new: tuple[int, int], beside: bool
) -> list[tuple[int, int] | None]:
    """Kill a save of `new` at each of its file-system operations in turn; what was found after
    each.
    """
    base = root / "base"
    base.mkdir()
    for step, content in old:
        save(base, Shape(), 0, step, content)
    found = []
    for number in itertools.count(1):
        folder = root / f"try{number}"
        shutil.copytree(base, folder)
        killed = killed_at(number, partial(save, folder, Shape(), 0, *new, beside), touches(folder))
        found.append(survivor(folder))
        save(folder, Shape(), 0, 9, 9)  # the next save works, and cleans up
        names = {f"global_step{step}" for step in checkpoint_steps(folder)} | {"latest"}
        if found[-1] == new and new[0] in dict(old):
            names.add(f"global_step{new[0]}{SUPERSEDED_SUFFIX}")
            assert superseded(folder, new[0]) == (new[0], dict(old)[new[0]])
        assert {path.name for path in folder.iterdir()} == names
        shutil.rmtree(folder)
        if not killed:
            return found
    raise AssertionError("unreachable")


def superseded(folder: Path, step: int) -> tuple[int, int] | None:
    """As `survivor`, of the checkpoint that a save over the same step kept."""
    alone = folder.with_name("alone")
    shutil.copytree(folder / f"global_step{step}{SUPERSEDED_SUFFIX}", alone / f"global_step{step}")
    try:
        return survivor(alone)
    finally:
        shutil.rmtree(alone)


FIRST, NEXT, SAME_STEP = ([], (1, 1)), ([(1, 1)], (2, 2)), ([(1, 1), (2, 2)], (2, 3))


@pytest.mark.parametrize(
    ("old", "new", "beside"),
    [(*FIRST, False), (*NEXT, False), (*SAME_STEP, False), (*NEXT, True)],
    ids=["first", "next", "over-the-same-step", "next-in-the-background"],
)
def test_killed_at_every_file_operation(
    memory: Path, old: list[tuple[int, int]], new: tuple[int, int], beside: bool
) -> None:
    [found] = world.run(1, kill_everywhere, memory, old, new, beside)
    before = old[-1] if old else None
    assert set(found) == {before, new}
    assert found == sorted(found, key=lambda value: value == new), "once visible, the new one stays"
    assert len(found) > 20


def save_until_killed(rank: int, folder: Path, first: int, victim: int, event_number: int) -> None:
    if rank == victim:
        die_at(event_number, touches(folder))
    try:
        for step in itertools.count(first):
            save(folder, SHAPE, rank, step, step)
    except CheckpointError:
        os._exit(HEARD)


def test_four_ranks_killed_at_random_points(memory: Path, tmp_path: Path) -> None:
    """One rank, drawn by lot, dies at a drawn point of one of its next saves; the others soon
    after, in any order.
    """
    chance = random.Random(11)
    reached, left_behind = 0, set()
    for trial in range(10):
        victim = trial % SHAPE.world
        # rank 0 does more, the others' files are few
        event_number = 1 + chance.randrange(120 if victim == 0 else 20)
        arguments = (memory, reached + 1, victim, event_number)
        processes = world.start(
            tmp_path / f"meeting{trial}", SHAPE.world, save_until_killed, *arguments
        )
        processes[victim].join(world.DEADLINE)
        exitcode = processes[victim].exitcode
        for process in chance.sample(processes, len(processes)):
            process.kill()
            time.sleep(chance.choice([0, 0, 0.02]))
        world.stop(processes)
        assert exitcode == -signal.SIGKILL
        assert {process.exitcode for process in processes} <= {-signal.SIGKILL, HEARD}
        left_behind.add(
            tuple(sorted(path.name.split("-")[0] for path in memory.glob(".global_step*")))
        )
        found = survivor(memory)
        if found is None:
            assert reached == 0
        else:
            assert found[0] == found[1] >= reached
            reached = found[0]
    assert reached >= 3, "saves ended between the kills"
    assert len(left_behind) > 2, "kills fell inside saves"


def test_eight_ranks_killed_while_they_save_beside_the_training(
    memory: Path, tmp_path: Path
) -> None:
    tally = lives.many_lives(6, memory, tmp_path, seed=5)
    assert tally.gains >= 2, "saves ended between the kills"
    assert len(tally.moments) >= 2, "kills fell at different moments"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_kills(memory: Path, tmp_path: Path) -> None:
    tally = lives.many_lives(100, memory, tmp_path, seed=int(os.environ.get("TR11_SOAK_SEED", "1")))
    print(f"\n{tally}")
    assert tally.gains >= 50
    assert len(tally.moments) >= 4, "kills fell at different moments"
