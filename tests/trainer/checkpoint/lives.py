"""A small training on eight ranks that saves all the time and is killed again and again; what each
life finds.

Every element of the state follows `x -> x / 2 + constant of the step`, which rounds alike however
the state is dealt, so the state of any step is known exactly: a checkpoint with elements of two
steps cannot pass for either.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.trainer.checkpoint import world
from tests.trainer.checkpoint.synthetic import Model, Shape, differences, state
from trainer.checkpoint import store
from trainer.checkpoint.publishing import CheckpointInfo, Extras
from trainer.checkpoint.writer import AsyncSaver, Failed
from trainer.contract.checkpoint_names import checkpoint_name, checkpoint_steps
from trainer.contract.errors import CheckpointError, lost_a_rank
from trainer.parallel.state import ShardedState

MODEL = Model(layers=4, hidden=64, vocabulary=64)
SHAPE = Shape(tensor=2, pipeline=2, data=2)
START = 0
HIDDEN = ".global_step"  # begins the name of a checkpoint that is being made
# how a rank leaves that heard of a lost one, found a wrong state, could not save
HEARD, MIXTURE, FAILED = (3, 4, 5)


def advance(live: ShardedState, step: int) -> ShardedState:
    """One training step, in place, on live tensors."""
    held = [item.tensor for item in live.weights] + [
        run for item in live.fragments for run in item.tensors.values()
    ]
    for tensor in held:
        tensor.div_(2).add_(step % 251)
    return ShardedState(live.weights, live.fragments, step)


def expected(shape: Shape, rank: int, step: int) -> ShardedState:
    """The state after `step` steps that nothing interrupted."""
    live = state(MODEL, shape, rank, START)
    for number in range(max(1, step - 64), step + 1):  # of what is older, halving has left nothing
        live = advance(live, number)
    return live


def info(shape: Shape) -> CheckpointInfo:
    return CheckpointInfo(shape.topology, {"model.layers": MODEL.layers})


def resume(folder: Path, shape: Shape, rank: int) -> tuple[int, ShardedState, list[str]]:
    """The step found, its state, and what of it is not as it should be. Collective."""
    step = store.find_resumable(folder, "digests", False, lambda line: None)
    if step is None:
        return 0, state(MODEL, shape, rank, START), []
    found = state(MODEL, shape, rank, None)
    loaded = store.load(folder, step, found, info(shape))
    wrong = differences(found, expected(shape, rank, step))
    if (loaded.cursor["consumed_samples"], loaded.optimizer_step) != (step, step):
        wrong.append("counters")
    return step, found, wrong


def train_until_killed(rank: int, folder: Path, ready: Path) -> None:
    """Body of a rank: resume, check, and train; every third step asks for a save."""
    try:
        step, live, wrong = resume(folder, SHAPE, rank)
        if wrong:
            os._exit(MIXTURE)
        saver = AsyncSaver(folder, print)
        (ready / str(rank)).touch()
        for number in itertools.count(step + 1):
            live = advance(live, number)
            if isinstance(saver.poll(), Failed):
                os._exit(FAILED)
            if number % 3 == 0:
                saver.start(
                    number,
                    live,
                    Extras({"consumed_samples": number, "consumed_tokens": number}),
                    info(SHAPE),
                )
    except CheckpointError as fault:
        os._exit(HEARD if lost_a_rank(fault) else FAILED)


@dataclass
class Tally:
    """What many lives came to. `moments`: where the kills fell, told by what lay in the folder
    afterwards.
    """

    reached: int = 0
    lives: int = 0
    gains: int = 0
    moments: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        moments = ", ".join(f"{count} {name}" for name, count in sorted(self.moments.items()))
        return (
            f"{self.lives} lives of {SHAPE.world} ranks, {self.gains} brought newer checkpoints, the last of step "
            f"{self.reached}; killed {moments}"
        )


def many_lives(count: int, folder: Path, scratch: Path, seed: int) -> Tally:
    """Kill `count` trainings one after the other at random moments: all ranks at once, or one and
    the others later.

    A life is let reach none, one or two new checkpoints; the kill falls at a moment drawn from the time of the next, and
    in every second life while that one is being made.
    Raises AssertionError when a life finds a mixture, an older state than before, or cannot save.
    """
    chance, tally, pace = random.Random(seed), Tally(), 1.0
    for life in range(count):
        ready = scratch / f"ready{life}"
        ready.mkdir()
        processes = world.start(
            scratch / f"meeting{life}", SHAPE.world, train_until_killed, folder, ready
        )
        try:
            _await(lambda: len(list(ready.iterdir())) == SHAPE.world, processes)  # noqa: B023
            target = chance.randrange(3)
            if target:
                began, known = time.monotonic(), len(checkpoint_steps(folder))
                _await(lambda: len(checkpoint_steps(folder)) >= known + target, processes)  # noqa: B023
                pace = (time.monotonic() - began) / target
            time.sleep(chance.uniform(0.0, pace))
            if life % 2:  # chance alone may let every kill fall between two saves
                _await(
                    lambda: any(path.name.startswith(HIDDEN) for path in folder.iterdir()),
                    processes,
                )
            victims = list(range(SHAPE.world)) if life % 2 else [chance.randrange(SHAPE.world)]
            for victim in victims:
                processes[victim].kill()
            if not life % 2:
                time.sleep(chance.choice([0.0, 0.05, 0.5]))
        finally:
            world.stop(processes)
        codes = {process.exitcode for process in processes}
        assert codes <= {-signal.SIGKILL, HEARD}, f"life {life}: exit codes {codes}"
        tally.lives += 1
        tally.moments[_moment(folder)] += 1
        step, _, wrong = resume(folder, Shape(), 0)
        assert not wrong, f"life {life}: step {step} is not what was saved: {wrong}"
        assert step >= tally.reached, (
            f"life {life}: step {tally.reached} was complete, now {step} is the newest"
        )
        tally.gains += step > tally.reached
        tally.reached = step
        for old in checkpoint_steps(folder)[:-2]:
            shutil.rmtree(folder / checkpoint_name(old))
    return tally


def _await(happened: Callable[[], bool], processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + world.DEADLINE
    while not happened():
        assert time.monotonic() < deadline, "the ranks did not get on"
        dead = {
            rank: process.exitcode
            for rank, process in enumerate(processes)
            if process.exitcode is not None
        }
        assert not dead, f"ranks that ended by themselves: {dead}"
        time.sleep(0.002)


def _moment(folder: Path) -> str:
    """What the newest hidden folder says about when the kill fell."""
    hidden = [path for path in folder.iterdir() if path.name.startswith(HIDDEN)]
    if not hidden:
        return "between saves"
    if any("replaced" in path.name for path in hidden):
        return "while replacing"
    partial = hidden[0]
    if (partial / "manifest.json").exists():
        return "between manifest and rename"
    count = len(list(partial.rglob("*.distcp")))
    if count == 0:
        return "before the first file"
    return "while files were written" if count < 2 * SHAPE.world else "when all files were there"
