"""The steps of making a folder a checkpoint: a hidden folder, small files, the manifest, one
rename, `latest`.
"""

from __future__ import annotations

import io
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.files import Bytes, as_bytes, make_folder, write_files
from trainer.contract import checkpoints, replacing
from trainer.contract.checkpoint_formats import CURSOR_FILE, RNG
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name
from trainer.contract.errors import CheckpointError, LatestStays
from trainer.contract.files import json_text, make_shared, now, sync_folder, write_beside
from trainer.contract.manifest import FileEntry, Manifest, manifest_faults
from trainer.contract.record import Record
from trainer.contract.replacing import Report
from trainer.contract.resumable import ResumeNeed, has_resumable, lack_of
from trainer.parallel.agreement import RankGroup, one_line

Fence = Callable[[], None]  # raises when this trainer may not publish any more


class CheckpointInfo(Record):
    """What a checkpoint says of its run.

    `topology`: degrees such as {"tensor": 2, "pipeline": 2, "data": 2}. `model`: facts under the
    card's keys, such as {"model.layers": 4}; a load compares those that both sides have.
    `versions`: of torch, deepspeed, tr11.
    """

    topology: Mapping[str, int]
    model: Mapping[str, Any]
    run_card_hash: str = ""
    versions: Mapping[str, str] = {}
    job_id: str = ""


class Finished(Record):
    """A save that has become a checkpoint; `bytes` of all files of all ranks.

    `seconds`: from the request until this rank heard of the end. `stall`: of these, how long the
    training stood still (in `start`, and in `wait` if that was called); `waited`: of these, for an
    earlier save to end.
    """

    step: int
    folder: Path
    bytes: int
    seconds: float
    stall: float
    waited: float = 0.0


class Extras(Record):
    """What must survive besides the tensors.

    `cursor`: plain JSON values, the same on all ranks; `consumed_samples` and `consumed_tokens`
    must be among them. `rng`: this rank's random state (see
    `trainer.checkpoint.randomness.capture`); empty, none is saved.
    """

    cursor: Mapping[str, Any]
    rng: Mapping[str, Tensor] = {}


class NewCheckpoint(Record):
    """A checkpoint that is to be made below `folder` (checkpoints/VARIANT), but for its tensors.

    `latest`: whether the file of that name shall name it; it never names the weights alone while a training could
    resume from another one. `fence` is asked on rank 0 before it gets its name, `report` told there when another
    checkpoint bore it: see `publish`.
    """

    folder: Path
    step: int
    extras: Extras
    info: CheckpointInfo
    latest: bool = True
    fence: Fence | None = None
    report: Report = lambda line: None

    @property
    def place(self) -> Path:
        """The checkpoint's own folder."""
        return self.folder / checkpoint_name(self.step)

    @property
    def not_saved(self) -> str:
        """How the fault of its save begins."""
        return f"checkpoint of step {self.step} was not saved in {self.folder}"

    def partial_path(self) -> Path:
        """A hidden folder in which it may be written, which does not exist yet."""
        return checkpoints.partial_path(self.folder, self.step, uuid.uuid4().hex[:12])

    def prepare(self, names: Iterable[str]) -> Path:
        """Clean up after killed saves and make this save's hidden folder with the inner folders
        `names`; rank 0 only.

        No other save may be under way: what it has written would be taken for a killed one's.
        """
        make_shared(self.folder)
        replacing.settle_replaced(self.folder, self.report)
        checkpoints.remove_leftovers(self.folder)
        partial = self.partial_path()
        make_folders(partial, names)
        return partial

    def extra_files(self, rank: int) -> dict[str, list[Bytes]]:
        """The small files of a rank by their path in the checkpoint: its random state and, on rank
        0, the cursor.
        """
        files: dict[str, list[Bytes]] = {}
        if self.extras.rng:
            stream = io.BytesIO()
            torch.save(dict(self.extras.rng), stream)
            files[f"{RNG}/rank_{rank}.pt"] = [as_bytes(stream.getbuffer())]
        if rank == 0:
            text = json_text({**self.extras.cursor, "step": self.step})
            files[CURSOR_FILE] = [as_bytes(text.encode())]
        return files

    def publish(self, partial: Path, entries: Iterable[FileEntry]) -> int:
        """Make a fully written folder the checkpoint; `entries` are of all ranks' files. See the
        function of that name.
        """
        manifest = make_manifest(self.step, self.extras, self.info, entries)
        return publish(
            self.folder,
            partial,
            manifest,
            latest=self.latest,
            fence=self.fence,
            report=self.report,
        )


def write_named(partial: Path, files: Mapping[str, Iterable[Bytes]]) -> list[FileEntry]:
    """Write files below the folder, each with its contents; returns their entries."""
    writers = write_files((partial / name, contents) for name, contents in files.items())
    return [writer.entry(name) for name, writer in zip(files, writers, strict=True)]


def make_manifest(
    step: int, extras: Extras, info: CheckpointInfo, entries: Iterable[FileEntry]
) -> Manifest:
    """The manifest of a checkpoint whose files are `entries`, all ranks' together."""
    return Manifest(
        step=step,
        consumed_samples=extras.cursor["consumed_samples"],
        consumed_tokens=extras.cursor["consumed_tokens"],
        files=tuple(sorted(entries, key=lambda entry: entry.path)),
        topology=dict(info.topology),
        model=dict(info.model),
        run_card_hash=info.run_card_hash,
        created=now(),
        # torch has a type for its own
        versions={name: str(version) for name, version in info.versions.items()},
        job_id=info.job_id,
    )


def make_folders(partial: Path, names: Iterable[str]) -> None:
    """Make the hidden folder of a save, with the inner folders `names`."""
    for inner in ("", *names, RNG):
        make_folder(partial / inner)


def save_together(
    ranks: RankGroup,
    new: NewCheckpoint,
    names: Iterable[str],
    write: Callable[[Path], list[FileEntry]],
) -> Finished:
    """The checkpoint that all ranks' files make, those that `write` writes below a hidden folder,
    which has the inner folders `names`. Collective.

    Raises CheckpointError on every rank; nothing of it is then left.
    """
    started = time.perf_counter()
    partial = ranks.on_first(new.not_saved, new.prepare, names)
    try:
        entries = ranks.collect(ranks.each(new.not_saved, write, partial))
        total = ranks.on_first(new.not_saved, new.publish, partial, chain.from_iterable(entries))
    except CheckpointError:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    seconds = time.perf_counter() - started
    return Finished(new.step, new.place, total, seconds=seconds, stall=seconds)


def save_alone(new: NewCheckpoint, write: Callable[[Path], list[FileEntry]]) -> Path:
    """The checkpoint that one process writes, its tensors by `write` below a hidden folder; returns
    its own folder.

    It leaves alone what other savers have there, and nothing of its own where it fails. Raises
    CheckpointError when the step exists already, or when the disk refuses.
    """
    if new.place.exists():
        raise CheckpointError(
            f"{new.place} exists already and is not replaced; move it away, or write to another folder"
        )
    partial = new.partial_path()
    try:
        make_shared(new.folder)
        make_folders(partial, ())
        new.publish(partial, write(partial) + write_named(partial, new.extra_files(0)))
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {new.step} was not written in {new.folder}: {one_line(error)}"
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return new.place


def publish(
    folder: Path,
    partial: Path,
    manifest: Manifest,
    *,
    latest: bool = True,
    fence: Fence | None = None,
    report: Report = lambda line: None,
) -> int:
    """Make a fully written folder the checkpoint of its step, and return its bytes; rank 0, after
    all have written.

    `latest`: whether the file of that name shall name it; it never names the weights alone while a training could
    resume from another one. `fence` is asked last, when everything lies ready under hidden names: what follows are
    renames of these, and anyone who takes the run over takes them away first (see
    `trainer.contract.checkpoints.fence_off`). So even a trainer that was frozen behind its fence changes nothing.
    Where it raises `LatestStays`, the checkpoint gets its name and `latest` is left as it is.
    `report`: told when another checkpoint bore the name, and is kept (see `trainer.contract.replacing`).
    """
    faults = manifest_faults(partial, manifest, read_digests=False)
    if faults:
        raise CheckpointError(f"what was written is not what is there: {faults[0]}")
    manifest.write(partial)
    inner = sorted(path for path in partial.iterdir() if path.is_dir())
    with ThreadPoolExecutor(4, thread_name_prefix="checkpoint-sync") as flushing:
        for _ in flushing.map(sync_folder, [*inner, partial]):
            pass
    home = folder / checkpoint_name(manifest.step)
    moves = latest and (lack_of(manifest, ResumeNeed()) is None or not has_resumable(folder))
    pointer = None
    if moves:
        pointer = write_beside(folder / LATEST_FILE, home.name)
    try:
        if fence is not None:
            try:
                fence()
            except LatestStays:
                if pointer is not None:
                    pointer.unlink(missing_ok=True)
                pointer = None
        aside = replacing.take_place(folder, partial, manifest, report)
        sync_folder(folder)
        if pointer is not None:
            pointer.replace(folder / LATEST_FILE)
            sync_folder(folder)
    except BaseException:
        if pointer is not None:
            pointer.unlink(missing_ok=True)
        raise
    if aside is not None:
        replacing.retire(folder, aside, report)
    return manifest.total_bytes
