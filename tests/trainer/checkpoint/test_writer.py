"""Saving beside the training: what is saved is what was when it began, and a failure costs nothing
but the save.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from tests.trainer.checkpoint import world
from tests.trainer.checkpoint.synthetic import Model, Shape, differences, state
from trainer.checkpoint import store
from trainer.checkpoint.publishing import CheckpointInfo, Extras, Finished, NewCheckpoint
from trainer.checkpoint.writer import AsyncSaver, Failed, Outcome
from trainer.contract.checkpoint_names import checkpoint_steps, read_latest
from trainer.contract.errors import CheckpointError, lost_a_rank
from trainer.contract.manifest import Manifest
from trainer.parallel.state import ShardedState

MODEL = Model(layers=2, hidden=64, vocabulary=64)
SHAPE = Shape(tensor=2, data=2)
INFO = CheckpointInfo(SHAPE.topology, {})
ALONE = CheckpointInfo(Shape().topology, {})
HEARD = 3


def extras(step: int) -> Extras:
    rng = {"torch": torch.full((4,), step, dtype=torch.uint8)}
    return Extras({"consumed_samples": step, "consumed_tokens": step}, rng)


def overwrite(target: ShardedState, source: ShardedState) -> None:
    """What the next training step does to the live tensors."""
    for mine, theirs in zip(target.weights, source.weights, strict=True):
        mine.tensor.copy_(theirs.tensor)
    for mine, theirs in zip(target.fragments, source.fragments, strict=True):
        for kind, run in mine.tensors.items():
            run.copy_(theirs.tensors[kind])


def outcome_of(saver: AsyncSaver) -> Outcome:
    """Poll as a training does, until a save has ended."""
    while True:
        outcome = saver.poll()
        if outcome is not None:
            return outcome
        time.sleep(0.002)


def loaded(folder: Path, step: int, rank: int, shape: Shape = SHAPE) -> list[str]:
    found = state(MODEL, shape, rank, None)
    store.load(folder, step, found, CheckpointInfo(shape.topology, {}))
    return differences(found, state(MODEL, shape, rank, step))


# ----------------------------------------------------------------------------- all goes well
def save_while_the_tensors_change(rank: int, folder: Path) -> None:
    live = state(MODEL, SHAPE, rank, 1)
    saver = AsyncSaver(folder, pytest.fail)
    for step in (1, 2, 3):
        overwrite(live, state(MODEL, SHAPE, rank, step))
        saver.start(
            step, ShardedState(live.weights, live.fragments, 1000 + step), extras(step), INFO
        )
        overwrite(live, state(MODEL, SHAPE, rank, 99))
        assert saver.in_flight == step
        outcome = outcome_of(saver)
        assert isinstance(outcome, Finished)
        assert (outcome.step, outcome.folder, saver.in_flight) == (
            step,
            folder / f"global_step{step}",
            None,
        )
        assert 0 < outcome.stall <= outcome.seconds
        assert loaded(folder, step, rank) == []
    saver.close()
    store.save(
        NewCheckpoint(folder / "synchronous", 3, extras(3), INFO), state(MODEL, SHAPE, rank, 3)
    )


def test_what_is_saved_is_what_was_when_it_began(memory: Path) -> None:
    world.run(SHAPE.world, save_while_the_tensors_change, memory)
    mine, other = (
        Manifest.read(place / "global_step3") for place in (memory, memory / "synchronous")
    )
    assert mine is not None
    assert other is not None
    assert mine.files == other.files, (
        "the same files, bit by bit, as a save that the training waits for"
    )
    assert read_latest(memory) == 3


def one_after_the_other(rank: int, folder: Path) -> None:
    """A save is held up; meanwhile an older checkpoint is loaded, and another save is asked for."""
    saver = AsyncSaver(folder, pytest.fail)
    saver.start(1, state(MODEL, SHAPE, rank, 1), extras(1), INFO)
    assert [outcome.step for outcome in saver.wait()] == [1]
    gate = threading.Event()
    if rank == 2:
        saver._background.submit(gate.wait)
    saver.start(2, state(MODEL, SHAPE, rank, 2), extras(2), INFO)
    assert [saver.poll() for _ in range(5)] == [None] * 5, "one rank has not finished, so none has"
    assert store.find_resumable(folder, "digests", True, pytest.fail) == 1
    assert loaded(folder, 1, rank) == []
    assert saver.in_flight == 2
    opener = threading.Timer(0.3, gate.set)
    opener.start()
    saver.start(3, state(MODEL, SHAPE, rank, 3), extras(3), INFO)
    first, second = outcome_of(saver), outcome_of(saver)
    assert isinstance(first, Finished)
    assert isinstance(second, Finished)
    assert (first.step, second.step, first.waited < 0.1) == (2, 3, True)
    assert second.waited > 0.1, "the time for which it waited is told"
    assert first.stall > 0.1
    assert [loaded(folder, step, rank) for step in (1, 2, 3)] == [[], [], []]
    opener.join()
    outcomes = saver.save_now(4, state(MODEL, SHAPE, rank, 4), extras(4), INFO)
    assert [(outcome.step, type(outcome)) for outcome in outcomes] == [(4, Finished)]
    assert saver.wait() == []
    saver.close()


def test_one_save_at_a_time(memory: Path) -> None:
    world.run(SHAPE.world, one_after_the_other, memory)
    assert checkpoint_steps(memory) == [1, 2, 3, 4]
    assert not list(memory.glob(".global*"))


def test_with_nothing_under_way_a_poll_is_no_collective(memory: Path) -> None:
    assert world.run(2, poll_on_one_rank, memory) == [0, 1]


def poll_on_one_rank(rank: int, folder: Path) -> int:
    saver = AsyncSaver(folder, pytest.fail)
    if rank == 0:
        assert {saver.poll() for _ in range(1000)} == {None}
    sums = [torch.tensor(rank) for _ in range(2)]
    dist.all_gather(sums, torch.tensor(rank))  # would meet the other rank's poll
    return int(sums[rank])


def test_weights_alone_and_no_random_state(memory: Path) -> None:
    saver = AsyncSaver(memory, pytest.fail)
    saver.start(1, state(MODEL, Shape(), 0, 1), extras(1), ALONE)
    saver.start(
        2,
        state(MODEL, Shape(), 0, 2),
        Extras(extras(2).cursor),
        ALONE,
        save_optimizer=False,
    )
    saver.start(3, state(MODEL, Shape(), 0, 3), extras(3), ALONE)
    assert [outcome.step for outcome in saver.wait()] == [1, 2, 3]
    assert [loaded(memory, step, 0, Shape()) for step in (1, 3)] == [[], []]
    manifest = Manifest.read(memory / "global_step2")
    assert manifest is not None
    assert {entry.path.split("/")[0] for entry in manifest.files} == {"weights", "cursor.json"}


def save_small(rank: int, folder: Path, model: Model, shape: Shape) -> int:
    saver = AsyncSaver(folder, pytest.fail)
    mine = state(model, shape, rank, 1)
    for step in (1, 2):
        saver.start(step, mine, extras(step), CheckpointInfo(shape.topology, {}))
        assert [type(outcome) for outcome in saver.wait()] == [Finished]
    saver.close()
    return len(mine.fragments)


def test_a_rank_may_hold_nothing_but_padding(memory: Path) -> None:
    shape, small = Shape(data=4), Model(layers=0, hidden=4, vocabulary=2)
    assert world.run(4, save_small, memory, small, shape) == [1, 1, 0, 0]
    empty = state(small, Shape(), 0, None)
    store.load(memory, 2, empty, ALONE)
    assert differences(empty, state(small, Shape(), 0, 1)) == []


# ----------------------------------------------------------------------------- what goes wrong
def short_of_memory(rank: int, folder: Path) -> list[str]:
    said: list[str] = []
    room = {True: 1 << 40, False: 1000}
    plenty = rank != 1
    saver = AsyncSaver(folder, said.append, available=lambda: room[plenty])
    saver.start(1, state(MODEL, SHAPE, rank, 1), extras(1), INFO)
    assert saver.in_flight is None
    outcome = saver.poll()
    assert isinstance(outcome, Finished)
    assert outcome.stall == outcome.seconds
    plenty = True
    saver.start(2, state(MODEL, SHAPE, rank, 2), extras(2), INFO)
    assert saver.in_flight == 2, "there is memory again"
    saver.wait()
    assert [loaded(folder, step, rank) for step in (1, 2)] == [[], []]
    saver.close()
    return said


def test_without_memory_for_a_copy_the_training_waits(memory: Path) -> None:
    for said in world.run(SHAPE.world, short_of_memory, memory):
        assert len(said) == 1
        assert re.fullmatch(
            r"checkpoint of step 1 is saved while the training waits: \S+ would need \d+\.\d KiB of memory for copies "
            r"and can spare 800 B",
            said[0],
        )


def test_where_free_memory_is_unknown_the_training_waits(memory: Path) -> None:
    def unknown() -> int:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    said: list[str] = []
    saver = AsyncSaver(memory, said.append, available=unknown)
    saver.start(1, state(MODEL, Shape(), 0, 1), extras(1), ALONE)
    assert [type(outcome) for outcome in saver.wait()] == [Finished]
    assert said == [
        "checkpoint of step 1 is saved while the training waits: it is not known how much host memory is free: "
        "No such file or directory: /proc/meminfo"
    ]


def one_rank_cannot_write(rank: int, folder: Path) -> tuple[str, str]:
    """Rank 2 may not write files of more than 8 KiB during one save; then, rank 0 cannot make the
    hidden folder.
    """
    saver = AsyncSaver(folder, pytest.fail)
    saver.start(1, state(MODEL, SHAPE, rank, 1), extras(1), INFO)
    assert isinstance(outcome_of(saver), Finished)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    saver.start(2, state(MODEL, SHAPE, rank, 2), extras(2), INFO)
    written = outcome_of(saver)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(written, Failed)
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["global_step1", "latest"]
    assert store.find_resumable(folder, "digests", True, pytest.fail) == 1
    dist.barrier()
    if rank == 0:
        folder.rename(folder.with_name("away"))
        folder.write_text("in the way")
    saver.start(3, state(MODEL, SHAPE, rank, 3), extras(3), INFO)
    prepared = saver.poll()
    assert isinstance(prepared, Failed)
    if rank == 0:
        folder.unlink()
        folder.with_name("away").rename(folder)
    saver.start(4, state(MODEL, SHAPE, rank, 4), extras(4), INFO)
    assert isinstance(outcome_of(saver), Finished)
    assert loaded(folder, 4, rank) == []
    saver.close()
    return str(written.fault), str(prepared.fault)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_goes_on(memory: Path) -> None:
    messages = world.run(SHAPE.world, one_rank_cannot_write, memory / "checkpoints")
    assert len(set(messages)) == 1
    written, prepared = messages[0]
    assert re.search(
        r"step 2 was not saved in .*: rank 2 on \S+: File too large: .*/__2_0.distcp", written
    )
    assert re.search(
        r"step 3 was not saved in .*: rank 0 on \S+: (File exists|Not a directory)", prepared
    )
    assert "\n" not in written + prepared


def test_a_copy_that_fails_is_a_failed_save(memory: Path) -> None:
    saver = AsyncSaver(memory, pytest.fail)
    good = state(MODEL, Shape(), 0, 1)
    saver.start(1, good, extras(1), ALONE)
    saver.wait()
    first = good.weights[0]
    broken = [
        replace(first, tensor=torch.empty_like(first.tensor, device="meta")),
        *good.weights[1:],
    ]
    saver.start(2, ShardedState(broken, good.fragments, 1002), extras(2), ALONE)
    [outcome] = saver.wait()
    assert isinstance(outcome, Failed)
    assert "step 2 was not saved" in str(outcome.fault)
    assert store.find_resumable(memory, "digests", True, pytest.fail) == 1


def test_an_abandoned_save_leaves_a_folder_the_next_removes(memory: Path) -> None:
    gate = threading.Event()
    saver = AsyncSaver(memory, pytest.fail)
    saver._background.submit(gate.wait)
    saver.start(1, state(MODEL, Shape(), 0, 1), extras(1), ALONE)
    saver.close()
    gate.set()
    assert [path.name.split("-")[0] for path in memory.iterdir()] == [".global_step1.partial"]
    other = AsyncSaver(memory, pytest.fail)
    other.start(2, state(MODEL, Shape(), 0, 2), extras(2), ALONE)
    assert not list(memory.glob(".global_step1*"))
    other.wait()
    assert sorted(path.name for path in memory.iterdir()) == ["global_step2", "latest"]


def poll_until_a_rank_is_lost(rank: int, folder: Path) -> None:
    saver = AsyncSaver(folder, print)
    saver.start(1, state(MODEL, SHAPE, rank, 1), extras(1), INFO)
    saver.wait()
    gate = threading.Event()
    saver._background.submit(gate.wait)
    saver.start(2, state(MODEL, SHAPE, rank, 2), extras(2), INFO)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        outcome_of(saver)
    except CheckpointError as fault:
        os._exit(HEARD if lost_a_rank(fault) else 1)


def test_a_lost_rank_is_heard_and_leaves_the_older_checkpoint(memory: Path, tmp_path: Path) -> None:
    processes = world.start(tmp_path / "meeting", SHAPE.world, poll_until_a_rank_is_lost, memory)
    for process in processes:
        process.join(world.DEADLINE)
    codes = [process.exitcode for process in processes]
    world.stop(processes)
    assert codes == [HEARD, -signal.SIGKILL, HEARD, HEARD]
    assert store.find_resumable(memory, "digests", True, pytest.fail) == 1
