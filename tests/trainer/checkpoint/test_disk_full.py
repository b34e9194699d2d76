"""A disk that fills up on one rank, or on all: every rank hears it, and what was there before is
intact.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.trainer.checkpoint import world
from tests.trainer.checkpoint.synthetic import Model, Shape, differences, state
from trainer.checkpoint import store
from trainer.checkpoint.publishing import CheckpointInfo, Extras, Finished, NewCheckpoint
from trainer.checkpoint.writer import AsyncSaver, Failed
from trainer.contract.errors import CheckpointError

MODEL = Model(layers=2, hidden=64, vocabulary=64)
SHAPE = Shape(tensor=2, data=2)
INFO = CheckpointInfo(SHAPE.topology, {})


def extras(step: int) -> Extras:
    return Extras({"consumed_samples": step, "consumed_tokens": step})


def limited_save(rank: int, folder: Path) -> str:
    """Save once; then again while rank 2 may not write files of more than 8 KiB; then once more
    without the limit.
    """
    store.save(NewCheckpoint(folder, 1, extras(1), INFO), state(MODEL, SHAPE, rank, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    with pytest.raises(CheckpointError) as caught:
        store.save(NewCheckpoint(folder, 2, extras(2), INFO), state(MODEL, SHAPE, rank, 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if rank == 0:
        assert sorted(path.name for path in folder.iterdir()) == ["global_step1", "latest"]
    found = state(MODEL, SHAPE, rank, None)
    assert store.find_resumable(folder, "digests", True, print) == 1
    store.load(folder, 1, found, INFO)
    assert differences(found, state(MODEL, SHAPE, rank, 1)) == []
    store.save(NewCheckpoint(folder, 3, extras(3), INFO), state(MODEL, SHAPE, rank, 3))
    assert store.find_resumable(folder, "digests", True, print) == 3
    return str(caught.value)


def test_one_rank_cannot_write(memory: Path) -> None:
    messages = world.run(SHAPE.world, limited_save, memory)
    assert len(set(messages)) == 1
    assert "checkpoint of step 2 was not saved in" in messages[0]
    assert re.search(r": rank 2 on \S+: File too large: .*/__2_0.distcp", messages[0])
    assert "\n" not in messages[0]


@pytest.fixture
def small_disk(memory: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    place = memory / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tr11-test", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small file system here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(rank: int, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        for step in range(1, 100):
            store.save(
                NewCheckpoint(folder, step, extras(step), INFO), state(MODEL, SHAPE, rank, step)
            )
    assert step > 1
    assert store.find_resumable(folder, "digests", True, print) == step - 1
    found = state(MODEL, SHAPE, rank, None)
    store.load(folder, step - 1, found, INFO)
    assert differences(found, state(MODEL, SHAPE, rank, step - 1)) == []
    return str(caught.value)


def test_the_disk_is_full(small_disk: Path) -> None:
    folder = small_disk / "checkpoints" / "main"
    messages = world.run(SHAPE.world, fill, folder)
    assert len(set(messages)) == 1
    assert re.search(r"not saved in .*: rank \d on \S+: No space left on device", messages[0])
    assert not list(folder.glob(".global*"))
    shutil.rmtree(folder)


def fill_beside_the_training(rank: int, folder: Path) -> tuple[str, int]:
    """Save in the background until the disk is full; make room; save again."""
    saver = AsyncSaver(folder, pytest.fail)
    step, outcome = 0, None
    while not isinstance(outcome, Failed):
        step += 1
        saver.start(step, state(MODEL, SHAPE, rank, step), extras(step), INFO)
        [outcome] = saver.wait()
    assert step > 2
    assert store.find_resumable(folder, "digests", True, print) == step - 1
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / "global_step1")
    dist.barrier()
    saver.start(step, state(MODEL, SHAPE, rank, step), extras(step), INFO)
    assert [type(outcome) for outcome in saver.wait()] == [Finished]
    found = state(MODEL, SHAPE, rank, None)
    assert store.find_resumable(folder, "digests", True, print) == step
    store.load(folder, step, found, INFO)
    assert differences(found, state(MODEL, SHAPE, rank, step)) == []
    saver.close()
    return str(outcome.fault), step


def test_the_disk_is_full_beside_the_training(small_disk: Path) -> None:
    results = world.run(SHAPE.world, fill_beside_the_training, small_disk)
    assert len(set(results)) == 1
    assert re.search(r"not saved in .*: rank \d on \S+: No space left on device", results[0][0])
    assert not list(small_disk.glob(".global*"))
