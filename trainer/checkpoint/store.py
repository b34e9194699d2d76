"""Topology-free checkpoints: saved by any tensor x pipeline x data shape, loaded by any other,
complete or invisible.

A checkpoint is written into a hidden sibling folder, every file flushed to disk; then its manifest;
then one rename gives it its name; then `latest` is replaced. Killed at any moment, the run has
either the old state or the whole new one. Both `save` and `load` are collective: all ranks call
them, and all succeed or all raise CheckpointError.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint import sharded_files
from trainer.checkpoint.files import Bytes, as_bytes
from trainer.checkpoint.publishing import (
    CheckpointInfo,
    Finished,
    NewCheckpoint,
    save_together,
    write_named,
)
from trainer.checkpoint.save_plan import INDEX_FILE, FolderShare, plan_share
from trainer.checkpoint.sharded_files import STEP_KEY, check_complete, check_pieces
from trainer.contract import checkpoints
from trainer.contract.checkpoint_formats import CURSOR_FILE, OPTIMIZER, RNG, WEIGHTS
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.checkpoints import Verify
from trainer.contract.errors import CheckpointError
from trainer.contract.manifest import FileEntry, Manifest, manifest_faults
from trainer.contract.record import Record
from trainer.contract.replacing import Report
from trainer.contract.resumable import WEIGHTS_ALONE, ResumeNeed, lack_of, size_faults
from trainer.parallel.agreement import RankGroup, one_line
from trainer.parallel.state import LocalTensor, ShardedState

START_ANOTHER = (
    "; use another step, or start another run from it with checkpoint.load and "
    "checkpoint.load_optimizer = false"
)


class Loaded(Record):
    """What a load returns besides the tensors that it filled.

    `rng` is None where this rank has no state to restore bitwise: another topology wrote the
    checkpoint. `remarks`: lines for the log.
    """

    manifest: Manifest
    cursor: Mapping[str, Any]
    optimizer_step: int
    rng: dict[str, Tensor] | None
    remarks: tuple[str, ...]
    seconds: float


def save(
    new: NewCheckpoint,
    state: ShardedState,
    *,
    group: dist.ProcessGroup | None = None,
    save_optimizer: bool = True,
) -> Finished:
    """Write a checkpoint and make `latest` name it. Collective.

    `group`: all ranks, with a CPU back-end; None is the default group, or this process alone without one.
    `save_optimizer`: without it the checkpoint is the weights alone, and only a load that does without the optimizer
    takes it. Without random state among the extras a load derives random streams again.
    What bears the step's name already makes room (see `trainer.contract.replacing`). Folders that killed saves left
    are removed first, so no AsyncSaver may be at work on the folder.
    Raises CheckpointError on every rank (disk full, no rights, ranks whose parts do not fit together); the partial
    folder is then removed, and `latest` and all older checkpoints are as before.
    """
    ranks = RankGroup(group)
    parts = ranks.each(new.not_saved, saved_parts, state, save_optimizer)
    shares = {name: plan_share(pieces, ranks, new.not_saved) for name, pieces in parts.items()}

    def write(partial: Path) -> list[FileEntry]:
        """Tensors are read when a file's turn comes."""
        files: dict[str, Iterable[Bytes]] = {
            f"{name}/{share.file}": share.contents(sharded_files.by_index(parts[name]))
            for name, share in shares.items()
            if share.placed
        }
        return write_named(partial, files | small_files(ranks.rank, shares, new))

    return save_together(ranks, new, list(parts), write)


def saved_parts(state: ShardedState, save_optimizer: bool) -> dict[str, list[LocalTensor]]:
    """The pieces of each folder that a save writes. Raises ValueError when one rank describes a
    place twice.
    """
    parts = _parts(state, torch.tensor(state.optimizer_step))
    if save_optimizer:
        return parts
    return {WEIGHTS: parts[WEIGHTS]}


def small_files(
    rank: int, shares: Mapping[str, FolderShare], new: NewCheckpoint
) -> dict[str, list[Bytes]]:
    """What this rank writes besides tensors, by path in the checkpoint; most of it is rank 0's:
    indexes and cursor.
    """
    indexes = {
        f"{name}/{INDEX_FILE}": [as_bytes(share.index)]
        for name, share in shares.items()
        if share.index is not None
    }
    return {**indexes, **new.extra_files(rank)}


def load(
    folder: Path,
    step: int,
    state: ShardedState,
    info: CheckpointInfo,
    *,
    group: dist.ProcessGroup | None = None,
    weights_only: bool = False,
) -> Loaded:
    """Fill the tensors of `state` from the checkpoint of `step` below `folder`, whatever topology
    wrote it. Collective.

    Everything is checked before the first tensor is touched: manifest, sizes of files, model facts, names, shapes,
    dtypes. Digests are `find_resumable`'s part. `weights_only` leaves the optimizer alone (evaluation, export, a new
    training from these weights) and then allows bf16 and fp16 weights into fp32 tensors, which is exact; a training
    resumes in the precision that it was saved in.
    Raises CheckpointError on every rank; after a failure while reading, the tensors hold a mixture and the process
    must not train on.
    """
    ranks = RankGroup(group)
    started = time.perf_counter()
    place = folder / checkpoint_name(step)
    what = f"{place} was not loaded"
    manifest = ranks.on_first(
        what, _checked_manifest, folder, step, info=info, weights_only=weights_only
    )
    optimizer_step = torch.zeros((), dtype=torch.int64)
    parts = ranks.each(what, _parts, state, optimizer_step)
    if weights_only:
        del parts[OPTIMIZER]
    for name, pieces in parts.items():
        index = ranks.each(what, sharded_files.read_index, place / name)
        ranks.each(what, check_pieces, name, index, pieces=pieces, widening=weights_only)
        wanted = set().union(*ranks.gather({piece.name for piece in pieces}))
        ranks.each(what, check_complete, name, index, wanted=wanted)
    for name, pieces in parts.items():
        ranks.each(what, sharded_files.read, place / name, pieces, ranks=ranks)
    same = dict(manifest.topology) == dict(info.topology)
    cursor, rng = ranks.each(what, _read_extras, place, ranks.rank, same_topology=same)
    remarks: tuple[str, ...] = ()
    if not weights_only:  # nothing random follows from weights alone
        if not same:
            remarks = (_reshaped(manifest.topology, info.topology),)
        elif rng is None:
            remarks = ("the checkpoint holds no random-number state: streams are derived again",)
    return Loaded(
        manifest,
        cursor,
        int(optimizer_step),
        rng=rng,
        remarks=remarks,
        seconds=time.perf_counter() - started,
    )


def find_resumable(
    folder: Path,
    verify: Verify,
    expect_resume: bool,
    report: Report,
    group: dist.ProcessGroup | None = None,
    need: ResumeNeed | None = None,
) -> int | None:
    """The search of `trainer.contract.checkpoints`, decided by rank 0 and told to all; all read
    digests. Collective.

    `report` is called on rank 0 only. Raises CheckpointError on every rank.
    """
    ranks = RankGroup(group)
    if ranks.rank != 0:
        return _follow_search(ranks)

    def faults_of(place: Path, manifest: Manifest) -> list[str]:
        if verify == "sizes":
            return size_faults(place, manifest)
        ranks.broadcast(("verify", (place, manifest)))
        return list(chain.from_iterable(ranks.gather(_share_of_faults(ranks, place, manifest))))

    try:
        step = checkpoints.find_resumable(
            folder, verify, expect_resume, report=report, faults_of=faults_of, need=need
        )
    except CheckpointError as error:
        ranks.broadcast(("refused", str(error)))
        raise
    ranks.broadcast(("found", step))
    return step


def _follow_search(ranks: RankGroup) -> int | None:
    """The search on any other rank than the first: it reads its share of what that asks for."""
    while True:
        order = ranks.broadcast(cast("tuple[str, Any]", ("", None)))
        if order[0] == "found":
            return cast("int | None", order[1])
        if order[0] == "refused":
            raise CheckpointError(order[1])
        ranks.gather(_share_of_faults(ranks, *order[1]))


def _share_of_faults(ranks: RankGroup, place: Path, manifest: Manifest) -> list[str]:
    try:
        return checkpoints.verify_share(place, manifest, ranks.rank, ranks.size)
    except OSError as error:
        return [one_line(error)]


def _parts(state: ShardedState, optimizer_step: Tensor) -> dict[str, list[LocalTensor]]:
    """The pieces of each folder of a checkpoint. Every rank holds the step; DCP writes it once."""
    counter = LocalTensor(STEP_KEY, (), (), optimizer_step, is_owner=True)
    parts = {
        WEIGHTS: sharded_files.weight_pieces(state.weights),
        OPTIMIZER: [counter, *sharded_files.fragment_pieces(state.fragments)],
    }
    for pieces in parts.values():
        sharded_files.by_index(pieces)
    return parts


def _checked_manifest(
    folder: Path, step: int, info: CheckpointInfo, weights_only: bool
) -> Manifest:
    manifest = checkpoints.read_checkpoint(folder, step)
    faults = manifest_faults(folder / checkpoint_name(step), manifest, read_digests=False)
    if faults:
        raise CheckpointError(
            f"it is damaged: {faults[0]}; restore it or resume from an older step"
        )
    need = ResumeNeed(info.model, trainer="tr11")
    lack = lack_of(manifest, need.for_weights() if weights_only else need)
    if lack is not None:
        more = START_ANOTHER if lack.text == WEIGHTS_ALONE else ""
        raise CheckpointError(f"{lack.text}{more}")
    return manifest


def _read_extras(
    place: Path, rank: int, same_topology: bool
) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    cursor = json.loads((place / CURSOR_FILE).read_text(encoding="utf-8"))
    saved = place / RNG / f"rank_{rank}.pt"
    if not same_topology or not saved.exists():  # files that the manifest lists were found before
        return cursor, None
    return cursor, torch.load(saved, map_location="cpu", weights_only=True)


def _reshaped(then: Mapping[str, int], now_: Mapping[str, int]) -> str:
    shapes = [
        " x ".join(f"{name} {degree}" for name, degree in shape.items()) for shape in (then, now_)
    ]
    return f"saved on {shapes[0]}, loaded on {shapes[1]}: random-number streams are derived again, not restored"
