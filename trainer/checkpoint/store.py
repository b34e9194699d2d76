"""Topology-free checkpoints: saved by any tensor x pipeline x data shape, loaded by any other, complete or invisible.

A checkpoint is written into a hidden sibling folder, every file flushed to disk; then its manifest; then one rename
gives it its name; then `latest` is replaced. Killed at any moment, the run has either the old state or the whole
new one. Both `save` and `load` are collective: all ranks call them, and all succeed or all raise CheckpointError.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial as bind
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint import catalogue, sharded_files
from trainer.checkpoint.agreement import Crew, one_line
from trainer.checkpoint.catalogue import CheckpointError, Report, Verify
from trainer.checkpoint.compatibility import check_complete, check_model, check_pieces
from trainer.checkpoint.files import DigestingWriter, digesting, make_folder, sync_folder
from trainer.checkpoint.sharded_files import STEP_KEY, Piece
from trainer.checkpoint.state import ShardedState
from trainer.contract import LATEST_FILE, FileEntry, Manifest, checkpoint_name, manifest_faults, now, write_atomically

WEIGHTS, OPTIMIZER, RNG, CURSOR = "weights", "optimizer", "rng", "cursor.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of its run.

    `topology`: degrees such as {"tensor": 2, "pipeline": 2, "data": 2}. `model`: facts under the card's keys, such as
    {"model.layers": 4}; a load compares those that both sides have. `versions`: of torch, deepspeed, tr11.
    """

    topology: Mapping[str, int]
    model: Mapping[str, Any]
    run_card_hash: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    job_id: str = ""


@dataclass(frozen=True)
class Extras:
    """What must survive besides the tensors.

    `cursor`: plain JSON values, the same on all ranks; `consumed_samples` and `consumed_tokens` must be among them.
    `rng`: this rank's random state (see `trainer.checkpoint.randomness.capture`).
    """

    cursor: Mapping[str, Any]
    rng: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveResult:
    """A finished save: its folder, wall seconds (all ranks wait for the slowest), bytes of all files of all ranks."""

    folder: Path
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Loaded:
    """What a load returns besides the tensors that it filled.

    `rng` is None where this rank has no state to restore bitwise: another topology wrote the checkpoint, and the
    caller reseeds (`trainer.checkpoint.randomness.derived_seed`). `remarks`: lines for the log.
    """

    manifest: Manifest
    cursor: Mapping[str, Any]
    optimizer_step: int
    rng: dict[str, Tensor] | None
    remarks: tuple[str, ...]
    seconds: float


def save(
    folder: Path,
    step: int,
    state: ShardedState,
    extras: Extras,
    info: CheckpointInfo,
    *,
    group: dist.ProcessGroup | None = None,
) -> SaveResult:
    """Write the checkpoint of `step` below `folder` (checkpoints/VARIANT) and make `latest` name it. Collective.

    `group`: all ranks, with a CPU back-end; None is the default group, or this process alone without one.
    An existing checkpoint of the same step is replaced. Folders that killed saves left are removed first.
    Raises CheckpointError on every rank (disk full, no rights, ranks whose parts do not fit together); the partial
    folder is then removed, and `latest` and all older checkpoints are as before.
    """
    crew = Crew(group)
    started = time.perf_counter()
    what = f"checkpoint of step {step} was not saved in {folder}"
    parts = crew.each(what, lambda: _parts(state, torch.tensor(state.optimizer_step)))
    partial = crew.on_first(what, lambda: _prepare(folder, step, list(parts)))
    try:
        entries: list[FileEntry] = []
        for name, pieces in parts.items():
            entries += crew.each(what, bind(sharded_files.write, partial / name, partial, pieces, crew))
        entries += crew.each(what, lambda: _write_extras(partial, crew.rank, step, extras))
        written = tuple(chain.from_iterable(crew.gather(entries)))
        total = crew.on_first(what, lambda: _publish(folder, partial, _manifest(step, extras, info, written)))
    except CheckpointError:
        if crew.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return SaveResult(folder / checkpoint_name(step), time.perf_counter() - started, total)


def load(
    folder: Path,
    step: int,
    state: ShardedState,
    info: CheckpointInfo,
    *,
    group: dist.ProcessGroup | None = None,
    weights_only: bool = False,
) -> Loaded:
    """Fill the tensors of `state` from the checkpoint of `step` below `folder`, whatever topology wrote it. Collective.

    Everything is checked before the first tensor is touched: manifest, sizes of files, model facts, names, shapes,
    dtypes. Digests are `find_resumable`'s part. `weights_only` leaves the optimizer alone (evaluation, export) and then
    allows bf16 weights into fp32 tensors, which is exact; a training resumes in the precision that it was saved in.
    Raises CheckpointError on every rank; after a failure while reading, the tensors hold a mixture and the process
    must not train on.
    """
    crew = Crew(group)
    started = time.perf_counter()
    place = folder / checkpoint_name(step)
    what = f"{place} was not loaded"
    manifest = crew.on_first(what, lambda: _checked_manifest(folder, step, info, weights_only))
    optimizer_step = torch.zeros((), dtype=torch.int64)
    parts = crew.each(what, lambda: _parts(state, optimizer_step))
    if weights_only:
        del parts[OPTIMIZER]
    for name, pieces in parts.items():
        index = crew.each(what, bind(sharded_files.read_index, place / name))
        crew.each(what, bind(check_pieces, name, index, pieces, weights_only))
        wanted = set().union(*crew.gather({piece.key for piece in pieces}))
        crew.each(what, bind(check_complete, name, index, wanted))
    for name, pieces in parts.items():
        crew.each(what, bind(sharded_files.read, place / name, pieces, crew))
    same = dict(manifest.topology) == dict(info.topology)
    cursor, rng = crew.each(what, lambda: _read_extras(place, crew.rank, same))
    remarks = () if same else (_reshaped(manifest.topology, info.topology),)
    return Loaded(manifest, cursor, int(optimizer_step), rng, remarks, time.perf_counter() - started)


def find_resumable(
    folder: Path, verify: Verify, expect_resume: bool, report: Report, group: dist.ProcessGroup | None = None
) -> int | None:
    """The search of `trainer.checkpoint.catalogue`, decided by rank 0 and told to all; all read digests. Collective.

    `report` is called on rank 0 only. Raises CheckpointError on every rank.
    """
    crew = Crew(group)
    if crew.rank == 0:
        return _lead_search(crew, folder, verify, expect_resume, report)
    while True:
        order = crew.broadcast(cast("tuple[str, Any]", ("", None)))
        if order[0] == "found":
            return cast("int | None", order[1])
        if order[0] == "refused":
            raise CheckpointError(order[1])
        crew.gather(_share_of_faults(crew, *order[1]))


def _lead_search(crew: Crew, folder: Path, verify: Verify, expect_resume: bool, report: Report) -> int | None:
    def faults_of(place: Path, manifest: Manifest) -> list[str]:
        if verify == "sizes":
            return manifest_faults(place, manifest, read_digests=False)
        crew.broadcast(("verify", (place, manifest)))
        return list(chain.from_iterable(crew.gather(_share_of_faults(crew, place, manifest))))

    try:
        step = catalogue.find_resumable(folder, verify, expect_resume, report, faults_of)
    except CheckpointError as error:
        crew.broadcast(("refused", str(error)))
        raise
    crew.broadcast(("found", step))
    return step


def _share_of_faults(crew: Crew, place: Path, manifest: Manifest) -> list[str]:
    try:
        return catalogue.verify_share(place, manifest, crew.rank, crew.size)
    except OSError as error:
        return [one_line(error)]


def _parts(state: ShardedState, optimizer_step: Tensor) -> dict[str, list[Piece]]:
    """The pieces of each folder of a checkpoint. Every rank holds the step; DCP writes it once."""
    counter = Piece(STEP_KEY, (), (), optimizer_step, is_owner=True)
    parts = {
        WEIGHTS: sharded_files.weight_pieces(state.weights),
        OPTIMIZER: [counter, *sharded_files.fragment_pieces(state.fragments)],
    }
    for pieces in parts.values():
        sharded_files.by_index(pieces)
    return parts


def _prepare(folder: Path, step: int, names: list[str]) -> Path:
    """Clean up after killed saves and make this save's hidden folder; rank 0 only."""
    folder.mkdir(parents=True, exist_ok=True)
    catalogue.settle_replaced(folder)
    catalogue.remove_leftovers(folder)
    partial = catalogue.partial_path(folder, step, uuid.uuid4().hex[:12])
    make_folder(partial)
    for name in (*names, RNG):
        make_folder(partial / name)
    return partial


def _write_extras(partial: Path, rank: int, step: int, extras: Extras) -> list[FileEntry]:
    files: dict[str, Callable[[DigestingWriter], object]] = {
        f"{RNG}/rank_{rank}.pt": lambda stream: torch.save(dict(extras.rng), cast(IO[bytes], stream))
    }
    if rank == 0:
        text = json.dumps({**extras.cursor, "step": step}, indent=1, sort_keys=True) + "\n"
        files[CURSOR] = lambda stream: stream.write(text.encode())
    entries = []
    for name, fill in files.items():
        with digesting(partial / name) as stream:
            fill(stream)
        entries.append(stream.entry(name))
    return entries


def _manifest(step: int, extras: Extras, info: CheckpointInfo, entries: tuple[FileEntry, ...]) -> Manifest:
    return Manifest(
        step=step,
        consumed_samples=extras.cursor["consumed_samples"],
        consumed_tokens=extras.cursor["consumed_tokens"],
        files=tuple(sorted(entries, key=lambda entry: entry.path)),
        topology=dict(info.topology),
        model=dict(info.model),
        run_card_hash=info.run_card_hash,
        created=now(),
        versions=dict(info.versions),
        job_id=info.job_id,
    )


def _publish(folder: Path, partial: Path, manifest: Manifest) -> int:
    """Make a fully written folder the checkpoint of its step, and return its bytes; rank 0, after all have written."""
    faults = manifest_faults(partial, manifest, read_digests=False)
    if faults:
        raise CheckpointError(f"what was written is not what is there: {faults[0]}")
    manifest.write(partial)
    for inner in sorted(path for path in partial.iterdir() if path.is_dir()):
        sync_folder(inner)
    sync_folder(partial)
    home = folder / checkpoint_name(manifest.step)
    aside = catalogue.replaced_path(folder, manifest.step, uuid.uuid4().hex[:12])
    replacing = home.exists()
    if replacing:
        home.rename(aside)
    partial.rename(home)
    sync_folder(folder)
    write_atomically(folder / LATEST_FILE, home.name)
    sync_folder(folder)
    if replacing:
        shutil.rmtree(aside, ignore_errors=True)  # if this fails, the next save or search removes it
    return manifest.total_bytes


def _checked_manifest(folder: Path, step: int, info: CheckpointInfo, weights_only: bool) -> Manifest:
    manifest = catalogue.read_checkpoint(folder, step)
    faults = manifest_faults(folder / checkpoint_name(step), manifest, read_digests=False)
    if faults:
        raise CheckpointError(f"it is damaged: {faults[0]}; restore it or resume from an older step")
    facts = {key: fact for key, fact in info.model.items() if not (weights_only and key == "precision.dtype")}
    check_model(manifest.model, facts)
    return manifest


def _read_extras(place: Path, rank: int, same_topology: bool) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    cursor = json.loads((place / CURSOR).read_text(encoding="utf-8"))
    if not same_topology:
        return cursor, None
    return cursor, torch.load(place / RNG / f"rank_{rank}.pt", map_location="cpu", weights_only=True)


def _reshaped(then: Mapping[str, int], now_: Mapping[str, int]) -> str:
    shapes = [" x ".join(f"{name} {degree}" for name, degree in shape.items()) for shape in (then, now_)]
    return f"saved on {shapes[0]}, loaded on {shapes[1]}: random-number streams are derived anew, not restored"
