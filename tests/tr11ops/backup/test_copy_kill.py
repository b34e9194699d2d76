"""kill -9 at any call of the file system: nothing half is ever visible, and the next copy finishes
the work.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.backup.copy_cases import (
    VARIANT,
    OddArchive,
    contents,
    copy,
    make_archive,
    make_checkpoint,
)
from tests.tr11ops.backup.copy_nursery import CopyNursery
from tr11ops.backup.survey import list_receipts

TRIALS = 50


def check_visible(store: Path, checkpoint: Path, tar: bytes) -> None:
    """Whatever a visitor of the archive sees is whole."""
    archive = make_archive(store)
    seen = {file.path for file in archive.list("")} - {"tr11-archive.json"}
    receipts = {path for path in seen if path.endswith(".copy.json")}
    places = {path.split("/")[2].removesuffix(".copy.json") for path in receipts}
    for receipt in list_receipts(archive, VARIANT):
        assert receipt.location.rpartition("/")[2].removesuffix(".tar") in places
        assert receipt.location in {"/".join(path.split("/")[:3]) for path in seen - receipts}
    whole = {
        f"checkpoints/{VARIANT}/{checkpoint.name}/{path}": content
        for path, content in contents(checkpoint).items()
    }
    if f"checkpoints/{VARIANT}/{checkpoint.name}.tar" in seen:
        assert (store / "checkpoints" / VARIANT / f"{checkpoint.name}.tar").read_bytes() == tar
    elif seen - receipts:
        assert seen - receipts == set(whole)
        assert all((store / path).read_bytes() == content for path, content in whole.items())


@pytest.fixture
def checkpoint(memory: Path) -> Path:
    return make_checkpoint(
        memory / "run" / VARIANT, sizes={"weights/a": 9000, "optimizer/b": 20_000, "cursor.json": 3}
    )


@pytest.fixture(scope="module")
def killer() -> Iterator[CopyNursery]:
    with CopyNursery() as made:
        yield made


@pytest.mark.parametrize("format", ["files", "tar"])
def test_kill_at_any_call(checkpoint: Path, memory: Path, format: str, killer: CopyNursery) -> None:
    settings = {"piece_bytes": 4096 if format == "files" else 512, "parallel": 2}
    copy(make_archive(memory / "clean"), checkpoint, format=format)
    expected = contents(memory / "clean")
    tar = expected.get(f"checkpoints/{VARIANT}/{checkpoint.name}.tar", b"")
    receipt_name = f"checkpoints/{VARIANT}/{checkpoint.name}.copy.json"
    chance = random.Random(7)
    kills = 0
    for trial, at in enumerate(
        [*range(1, 16), *(chance.randrange(16, 110) for _ in range(TRIALS - 15))]
    ):
        store = memory / f"store{trial}"
        kills += killer.killed(at, store, checkpoint, format, **settings)
        check_visible(store, checkpoint, tar)
        # as it goes on
        kills += killer.killed(chance.randrange(1, 60), store, checkpoint, format, **settings)
        check_visible(store, checkpoint, tar)
        copy(make_archive(store), checkpoint, format=format)
        found = contents(store)
        # drafts, for `sweep`
        leftover = {path for path in found if path.endswith(".part") and "json." in path}
        assert {**found, receipt_name: b""}.keys() - leftover == expected.keys()
        assert all(found[path] == expected[path] for path in expected if path != receipt_name)
        make_archive(store).sweep(older_than=float("inf"))
        assert contents(store).keys() == expected.keys()
    assert kills >= TRIALS, kills


@pytest.mark.parametrize("format", ["files", "tar"])
def test_a_copy_that_is_always_killed_gets_there(
    checkpoint: Path, memory: Path, format: str, killer: CopyNursery
) -> None:
    """Each try is killed after a few calls; each goes on where the last one was, and in mid-file."""
    store = memory / "store"
    tries = 0
    while killer.killed(14, store, checkpoint, format, piece_bytes=1024, parallel=1):
        tries += 1
        assert tries < 60
    assert tries > 1
    watched = OddArchive(make_archive(store))
    copy(watched, checkpoint, format=format, repair=True)
    assert not any(what == "write" for what, _ in watched.calls)
