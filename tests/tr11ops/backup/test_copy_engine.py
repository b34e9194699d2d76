"""A copy is what was read back: whole, weights alone, after any fault of the source, the
destination, or the person.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.plugins.disk_fixture import in_memory
from tests.tr11ops.backup.checkpoint_copies import FORMATS, LOCATION, far, nothing_published
from tests.tr11ops.backup.copy_cases import (
    SIZES,
    VARIANT,
    OddArchive,
    contents,
    copy,
    make_archive,
    make_checkpoint,
    quick,
)
from tr11ops.backup.base import ARCHIVE_RETRIES
from tr11ops.backup.copying import work_bytes
from tr11ops.backup.folder import FolderArchive
from tr11ops.backup.source import read_source
from tr11ops.backup.survey import list_receipts, read_receipt
from tr11ops.base.errors import (
    ArchiveError,
    ArchiveFull,
    ArchivePermanentError,
    ArchiveUnavailable,
    CopyError,
)
from trainer.contract.manifest import Manifest, manifest_faults

ERRORS = {"away": ArchiveUnavailable, "full": ArchiveFull, "refused": ArchivePermanentError}


def test_whole(checkpoint: Path, archive: FolderArchive) -> None:
    counted: list[int] = []
    receipt = copy(archive, checkpoint, quick(on_bytes=counted.append))
    assert contents(far(archive) / LOCATION) == contents(checkpoint)
    assert receipt == read_receipt(archive, LOCATION)
    assert list_receipts(archive, VARIANT) == (receipt,)
    assert receipt.bytes == sum(SIZES.values()) + (checkpoint / "manifest.json").stat().st_size
    assert {file.path: file.digest for file in receipt.files} == {
        path: hashlib.sha256(content).hexdigest() for path, content in contents(checkpoint).items()
    }
    assert sum(counted) == work_bytes(read_source(checkpoint, 100, "full")) == 2 * receipt.bytes
    assert (far(archive) / LOCATION / "weights").stat().st_mode & 0o2070 == 0o2070
    assert (far(archive) / LOCATION / "cursor.json").stat().st_mode & 0o060 == 0o060


def test_weights_alone_have_a_manifest_of_their_own(
    checkpoint: Path, archive: FolderArchive
) -> None:
    receipt = copy(archive, checkpoint, kind="weights")
    place = far(archive) / "checkpoints-weights" / VARIANT / "global_step100"
    manifest = Manifest.read(place)
    assert manifest is not None
    assert {entry.path for entry in manifest.files} == {
        "weights/__0_0.distcp",
        "weights/.metadata",
        "cursor.json",
    }
    assert manifest_faults(place, manifest, read_digests=True) == []
    assert {file.path for file in receipt.files} == {entry.path for entry in manifest.files} | {
        "manifest.json"
    }
    assert (
        receipt.identity == hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()
    )


@pytest.mark.parametrize("has_manifest", [True, False])
def test_the_original_layout_loses_its_optimizer_by_prefix(
    tmp_path: Path, archive: FolderArchive, has_manifest: bool
) -> None:
    names = ("layer_01-model_00-model_states.pt", "mp_rank_00_model_states.pt", "notes-bf16.txt")
    optimizer = ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",)
    folder = make_checkpoint(tmp_path / VARIANT, sizes=dict.fromkeys((*names, *optimizer), 100))
    if not has_manifest:
        (folder / "manifest.json").unlink()
    receipt = copy(archive, folder, kind="spike")
    there = contents(far(archive) / "checkpoints-spikes-weights" / VARIANT / "global_step100")
    assert set(there) == {*names, *(["manifest.json"] if has_manifest else [])}
    assert all(
        file.digest == hashlib.sha256(there[file.path]).hexdigest() for file in receipt.files
    )
    assert copy(archive, folder, kind="spike") == receipt
    whole = copy(archive, folder, kind="full")
    assert {file.path for file in whole.files} == set(contents(folder))


@pytest.mark.parametrize("format", FORMATS)
def test_a_copy_is_not_made_again(checkpoint: Path, archive: FolderArchive, format: str) -> None:
    first = copy(archive, checkpoint, format=format)
    watched = OddArchive(archive)
    assert copy(watched, checkpoint, format=format) == first
    assert {what for what, _ in watched.calls} == {"look", "read", "piece"}
    assert all(path.endswith(".copy.json") for _, path in watched.calls)
    other = "tar" if format == "files" else "files"
    assert copy(archive, checkpoint, format=other) == first


@pytest.mark.parametrize("format", FORMATS)
def test_a_step_that_was_trained_again_lies_beside(
    tmp_path: Path, archive: FolderArchive, format: str
) -> None:
    first = copy(archive, make_checkpoint(tmp_path / "one"), format=format)
    before = contents(far(archive))
    anew = make_checkpoint(tmp_path / "two", seed=1)
    second = copy(archive, anew, format=format)
    assert second.location.removesuffix(".tar") == f"{LOCATION}.{second.identity[:8]}"
    after = contents(far(archive))
    assert all(after[path] == content for path, content in before.items())
    assert copy(archive, anew, format=format) == second
    assert list_receipts(archive, VARIANT) == tuple(
        sorted((first, second), key=lambda receipt: receipt.location)
    )


# ----------------------------------------------------------------------------- the destination
@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "what", ["look", "upload", "write", "finish", "read", "piece", "move", "put"]
)
def test_a_destination_that_fails_now_and_then(
    checkpoint: Path, archive: FolderArchive, what: str, format: str, renames: bool
) -> None:
    counts: dict[str, int] = {}

    def fail(called: str, path: str, position: int) -> None:
        if called == what:
            counts[path] = counts.get(path, 0) + 1
            if counts[path] % 3 == 1:
                raise ArchiveUnavailable("no route")

    said: list[str] = []
    counted: list[int] = []
    odd = OddArchive(archive, fail, renames=renames)
    receipt = copy(odd, checkpoint, quick(say=said.append, on_bytes=counted.append), format=format)
    assert receipt == read_receipt(archive, receipt.location)
    assert sum(counted) == work_bytes(read_source(checkpoint, 100, "full"), receipt.format)
    assert (
        said and all(line.startswith("no route: trying again in") for line in said)
    ) or what == "move"
    if format == "files":
        assert contents(far(archive) / LOCATION) == contents(checkpoint)


def test_a_destination_that_stays_away(checkpoint: Path, archive: FolderArchive) -> None:
    waits: list[str] = []

    def fail(called: str, path: str, position: int) -> None:
        if called == "write" and path.endswith("__1_0.distcp") and position >= 32_768:
            raise ArchiveUnavailable("no route", wait=0.0)

    transfer = quick(
        say=waits.append, retries=replace(ARCHIVE_RETRIES, tries=3, first_seconds=0.0), parallel=1
    )
    with pytest.raises(ArchiveUnavailable):
        copy(OddArchive(archive, fail), checkpoint, transfer)
    assert len(waits) == 2 and nothing_published(archive)
    watched = OddArchive(archive)
    copy(watched, checkpoint)
    written = [
        path for what, path in watched.calls if what == "write" and path.endswith("__1_0.distcp")
    ]
    assert len(written) == 2, "the first two pieces of four were there already"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("renames", [True, False])
def test_a_bit_that_flips_at_the_destination_is_sent_again(
    checkpoint: Path, archive: FolderArchive, format: str, renames: bool
) -> None:
    flipped: list[str] = []

    def flip(what: str, path: str, position: int) -> None:
        name = "global_step100.tar" if format == "tar" else "__1_0.distcp"
        if what == "read" and name in path and not flipped and not path.endswith(".json"):
            flipped.append(path)
            place = far(archive) / path
            content = bytearray(place.read_bytes())
            content[len(content) // 2] ^= 4
            place.write_bytes(content)

    said: list[str] = []
    receipt = copy(
        OddArchive(archive, flip, renames=renames),
        checkpoint,
        quick(say=said.append),
        format=format,
    )
    assert flipped and len(said) == 1 and "did not come back as it was sent" in said[0]
    sound = OddArchive(archive)
    assert copy(sound, checkpoint, repair=True).identity == receipt.identity
    assert not any(
        what == "upload" and not path.endswith(".copy.json") for what, path in sound.calls
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "spoil", [lambda c: b"\0" * len(c), lambda c: c[:-1], lambda c: c + b"x"], ids=["0", "-", "+"]
)
def test_a_destination_that_always_spoils(
    checkpoint: Path, archive: FolderArchive, format: str, spoil: Callable[[bytes], bytes]
) -> None:
    odd = OddArchive(
        archive, spoil=lambda path, content: content if path.endswith(".json") else spoil(content)
    )
    with pytest.raises(CopyError, match="although it was sent 3 times; nothing was published"):
        copy(odd, checkpoint, format=format)
    assert nothing_published(archive)
    copy(archive, checkpoint, format=format)


@pytest.mark.parametrize("format", FORMATS)
def test_repair_sends_what_is_damaged_and_nothing_else(
    checkpoint: Path, archive: FolderArchive, format: str
) -> None:
    first = copy(archive, checkpoint, format=format)
    before = contents(far(archive))
    damaged = far(archive) / (
        first.location if format == "tar" else f"{first.location}/weights/__0_0.distcp"
    )
    content = damaged.read_bytes()
    damaged.write_bytes(content[:60_000] + bytes([content[60_000] ^ 1]) + content[60_001:])
    if format == "files":
        (far(archive) / first.location / "cursor.json").unlink()
    watched = OddArchive(archive)
    again = copy(watched, checkpoint, repair=True)
    after = contents(far(archive))
    receipt = next(path for path in after if path.endswith(".copy.json"))
    assert {**after, receipt: b""} == {**before, receipt: b""}
    assert (again.copied, again.files) == (
        first.copied,
        first.files,
    ) and again.verified >= first.verified
    sent = {path.rpartition("/")[2] for what, path in watched.calls if what == "upload"}
    assert sent == (
        {"__0_0.distcp", "cursor.json"} if format == "files" else {"global_step100.tar"}
    )


@settings(max_examples=30, deadline=None)
@given(
    faults=st.lists(
        st.sampled_from(["away", "full", "refused", "flip", "cut", "fine"]), max_size=60
    ),
    format=st.sampled_from(FORMATS),
    renames=st.booleans(),
    parallel=st.integers(1, 4),
)
def test_any_faults_in_any_order(
    faults: list[str], format: str, renames: bool, parallel: int
) -> None:
    """Whatever the destination does: a copy that is published is whole, and when it behaves again
    there is one.
    """
    with in_memory() as folder:
        checkpoint = make_checkpoint(
            folder / VARIANT, sizes={"weights/a": 9000, "optimizer/b": 3000, "cursor.json": 9}
        )
        archive, coming = make_archive(folder / "store"), iter(faults)

        def on(what: str, path: str, position: int) -> None:
            fault = next(coming, "fine")
            if fault in ERRORS:
                raise ERRORS[fault](fault)
            place = far(archive) / path
            if what == "read" and fault in ("flip", "cut") and not path.endswith(".copy.json"):
                content = place.read_bytes()
                place.write_bytes(
                    content[:-1] + (b"" if fault == "cut" else bytes([content[-1] ^ 1]))
                )

        odd = OddArchive(archive, on, renames=renames)
        settings_of_copy = quick(
            piece_bytes=1024,
            parallel=parallel,
            retries=replace(ARCHIVE_RETRIES, tries=3, first_seconds=0.0),
        )
        for transfer in (
            settings_of_copy,
            settings_of_copy,
            quick(retries=replace(ARCHIVE_RETRIES, tries=100, first_seconds=0.0)),
        ):
            try:
                receipt = copy(odd, checkpoint, transfer, format=format)
            except (CopyError, ArchiveError):
                assert not list_receipts(archive, VARIANT)
            else:
                assert list_receipts(archive, VARIANT) == (receipt,)
        receipt = copy(OddArchive(archive, renames=renames), checkpoint, format=format)
        again = OddArchive(archive)
        assert copy(again, checkpoint, repair=True).files == receipt.files
        assert not any(what == "write" for what, _ in again.calls)


def test_the_disk_is_full(checkpoint: Path, archive: FolderArchive) -> None:
    def fill(what: str, path: str, position: int) -> None:
        if what == "write" and position >= 65_536:
            raise ArchiveFull("no space left")

    with pytest.raises(ArchiveFull):
        copy(OddArchive(archive, fill), checkpoint)
    assert nothing_published(archive)
    copy(archive, checkpoint)
    assert contents(far(archive) / LOCATION) == contents(checkpoint)


def test_without_renames_manifest_is_late_and_receipt_last(
    checkpoint: Path, archive: FolderArchive
) -> None:
    odd = OddArchive(archive, renames=False)
    copy(odd, checkpoint)
    finished = [path for what, path in odd.calls if what == "finish"]
    assert finished[-1] == f"{LOCATION}/manifest.json"
    assert odd.calls[-1] == ("put", f"{LOCATION}.copy.json")
    last_read = max(number for number, (what, path) in enumerate(odd.calls) if what == "piece")
    assert odd.calls[last_read][1] == f"{LOCATION}/manifest.json"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("renames", [True, False])
def test_a_copy_without_receipt_is_adopted_after_reading(
    checkpoint: Path, archive: FolderArchive, format: str, renames: bool
) -> None:
    first = copy(archive, checkpoint, format=format)
    (far(archive) / f"{LOCATION}.copy.json").unlink()
    odd = OddArchive(archive, renames=renames)
    assert copy(odd, checkpoint, format=format).location == first.location
    read = {path for what, path in odd.calls if what == "read"}
    assert (f"{LOCATION}/weights/__0_0.distcp" if format == "files" else f"{LOCATION}.tar") in read
    assert not any(what == "upload" for what, _ in odd.calls)
    (far(archive) / f"{LOCATION}.copy.json").unlink()
    anew = make_checkpoint(checkpoint.parents[1] / "anew", seed=1)
    assert copy(odd, anew, format=format).location != first.location, (
        "another one's copy is left alone"
    )
