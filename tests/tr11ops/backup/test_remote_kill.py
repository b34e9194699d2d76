"""kill -9 at fifty moments of backups to a bucket: nothing half is ever visible, and the next run
finishes the work.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.copy_cases import SIZES, contents, copy, make_checkpoint, quick
from tests.tr11ops.backup.remote_nursery import RemoteNursery
from tr11ops.backup.folder import Owner
from tr11ops.backup.remote import open_remote

TRIALS = 50
LARGE = {"optimizer/large_0": 900_000, "optimizer/large_1": 1_300_000}


@pytest.mark.parametrize("format", ["files", "tar"])
def test_killed_backups_leave_nothing_half_and_are_finished(
    tmp_path: Path, object_store: ObjectStore, format: str
) -> None:
    chance = random.Random(format)
    kills = finished = 0
    resumed: list[str] = []
    with RemoteNursery() as processes:
        step = 100
        source = make_checkpoint(tmp_path / "run", step, {**SIZES, **LARGE})
        what = {
            "url": object_store.url,
            "options": object_store.options,
            "state": str(object_store.state),
        }
        tar = reference_tar(tmp_path, source) if format == "tar" else b""
        moments = 60
        while kills < TRIALS // 2:
            object_store.faults.seen.clear()
            at = chance.randrange(1, moments)
            ended = processes.copy(at, folder=str(source), format=format, parallel=4, **what)
            resumed += [
                target for _, target, headers in object_store.faults.seen if asks_how_far(headers)
            ]
            check_visible(object_store, source, tar)
            if ended < 0:
                kills += 1
                if kills % 5:
                    continue
                ended = processes.copy(0, folder=str(source), format=format, parallel=4, **what)
            assert ended >= 0
            finished += 1
            moments = max(moments, ended)
            check_whole(object_store, source, tar)
            step += 100
            source = make_checkpoint(tmp_path / "run", step, {**SIZES, **LARGE})
            tar = reference_tar(tmp_path, source) if format == "tar" else b""
    assert finished >= 5
    assert resumed, "no upload went on in mid-file"
    archive = open_remote(object_store.url, object_store.options)
    before = object_store.objects()
    archive.sweep(1e12)
    assert object_store.objects() == before
    assert list(object_store.state.rglob("*.json")) == []


@pytest.mark.parametrize("same_user", [True, False])
def test_two_at_once_do_each_other_no_harm(
    tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, same_user: bool
) -> None:
    source = make_checkpoint(tmp_path / "run", sizes={**SIZES, **LARGE})
    archives = []
    for number in range(2):
        state = str(object_store.state if same_user else tmp_path / f"user{number}")
        archives.append(
            open_remote(
                object_store.url,
                object_store.options,
                owner=Owner("tr11-test"),
                environment={"XDG_STATE_HOME": state},
            )
        )
    with ThreadPoolExecutor(2) as pool:
        receipts = list(pool.map(lambda archive: copy(archive, source), archives))
    assert receipts[0].files == receipts[1].files
    check_whole(object_store, source, b"")


def asks_how_far(headers: object) -> bool:
    return str(dict(headers).get("Content-Range", "")).startswith("bytes */")  # type: ignore[call-overload]


def reference_tar(tmp_path: Path, source: Path) -> bytes:
    from tests.tr11ops.backup.copy_cases import make_archive

    archive = make_archive(tmp_path / "reference")
    receipt = copy(archive, source, quick(), format="tar")
    return b"".join(archive.read(receipt.location))


def expected(source: Path, tar: bytes) -> dict[str, bytes]:
    """Objects of a whole copy, without its receipt."""
    base = f"tr11-test/checkpoints/main/{source.name}"
    if tar:
        return {f"{base}.tar": tar}
    return {f"{base}/{path}": content for path, content in contents(source).items()}


def check_visible(store: ObjectStore, source: Path, tar: bytes) -> None:
    """Each object is a whole file, and a receipt has all of its files beside it."""
    base = f"tr11-test/checkpoints/main/{source.name}"
    whole, seen = expected(source, tar), store.objects()
    ours = [name for name in seen if name.startswith((f"{base}/", f"{base}."))]
    for name in ours:
        if name == f"{base}.copy.json":
            assert json.loads(store.content(name))["step"] == int(
                source.name.removeprefix("global_step")
            )
            assert set(ours) == {name, *whole}
        else:
            assert store.content(name) == whole[name], name


def check_whole(store: ObjectStore, source: Path, tar: bytes) -> None:
    base = f"tr11-test/checkpoints/main/{source.name}"
    whole = expected(source, tar)
    ours = {name for name in store.objects() if name.startswith((f"{base}/", f"{base}."))}
    assert ours == {f"{base}.copy.json", *whole}, "nothing lost, nothing twice"
    assert all(store.content(name) == content for name, content in whole.items())
