"""Small checkpoints of a stand-in training: real folders, manifests, `latest`, digests, and a
resume that verifies.

What stands for the weights is a chain of digests, one link a step: a training that lost, repeated
or changed a step on its way through faults and resumes ends with another chain.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from trainer.config.card import TrainerConfig
from trainer.contract.checkpoint_formats import CURSOR_FILE, WEIGHTS
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name
from trainer.contract.checkpoints import (
    find_resumable,
    partial_path,
    read_checkpoint,
    remove_leftovers,
)
from trainer.contract.documents import document
from trainer.contract.errors import CheckpointError
from trainer.contract.files import write_beside
from trainer.contract.manifest import STAND_IN, FileEntry, Manifest, file_digest
from trainer.contract.record import JsonObject
from trainer.contract.recovery import read_recovery, settle
from trainer.contract.replacing import retire, settle_replaced, take_place
from trainer.schedule.path import Progress

Say = Callable[[str], None]
VERSIONS = {STAND_IN: "1"}
FIRST_LINK = "0" * 64


def next_link(chain: str, iteration: int, samples: int) -> str:
    """The chain after one more step."""
    return hashlib.sha256(f"{chain} {iteration} {samples}".encode()).hexdigest()


def rank_file(rank: int) -> str:
    """Where a rank's part of a checkpoint lies."""
    return f"{WEIGHTS}/rank_{rank:05d}.bin"


def prepare(folder: Path, step: int) -> Path:
    """Clean up after killed saves and make this save's hidden folder; rank 0 only."""
    folder.mkdir(parents=True, exist_ok=True)
    settle_replaced(folder, print)
    remove_leftovers(folder)
    partial = partial_path(folder, step, uuid.uuid4().hex[:12])
    (partial / WEIGHTS).mkdir(parents=True)
    return partial


def write_part(partial: Path, rank: int, chain: str, size: int) -> JsonObject:
    """Write this rank's part; returns its entry of the manifest, as JSON. Raises OSError."""
    head = json.dumps({"rank": rank, "chain": chain}).encode() + b"\n"
    data = head + hashlib.shake_256(f"{chain} {rank}".encode()).digest(max(0, size - len(head)))
    path = partial / rank_file(rank)
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    entry: JsonObject = document(
        FileEntry(rank_file(rank), len(data), hashlib.sha256(data).hexdigest())
    )
    return entry


def publish(
    config: TrainerConfig,
    partial: Path,
    progress: Progress,
    chain: str,
    parts: list[FileEntry],
    card_hash: str,
    job_id: str,
    world: int,
    fence: Callable[[], None],
) -> None:
    """Make the hidden folder the checkpoint of its step; rank 0 only, after all have written.
    Raises OSError.

    `fence` is asked last; it raises when another training has taken the run over.
    """
    folder = config.paths.checkpoints
    cursor = partial / CURSOR_FILE
    cursor.write_text(
        json.dumps({**document(progress), "chain": chain, "step": progress.iteration}),
        encoding="utf-8",
    )
    entry = FileEntry(CURSOR_FILE, cursor.stat().st_size, file_digest(cursor))
    parallel = config.parallel
    model = config.model
    manifest = Manifest(
        step=progress.iteration,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens,
        files=tuple(sorted([*parts, entry], key=lambda each: each.path)),
        topology={
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "data": world // (parallel.tensor * parallel.pipeline),
        },
        model={"model.layers": model.layers, "model.hidden_size": model.hidden_size},
        run_card_hash=card_hash,
        created=time.time(),
        versions=VERSIONS,
        job_id=job_id,
    )
    manifest.write(partial)
    pointer = write_beside(folder / LATEST_FILE, checkpoint_name(progress.iteration))
    try:
        fence()
        # fails where a later trainer has moved it away
        replaced = take_place(folder, partial, manifest, print)
        pointer.replace(folder / LATEST_FILE)
    except BaseException:
        pointer.unlink(missing_ok=True)
        raise
    if replaced is not None:
        retire(folder, replaced, print)


def find(config: TrainerConfig, say: Say) -> int | None:
    """The step to resume from, every byte verified, or None; rank 0 only, which holds the run's
    lease.

    Raises CheckpointError as the trainer does, and for a checkpoint that a real training wrote.
    """
    folder = config.paths.checkpoints
    try:
        settle(config.paths, read_recovery(config.paths))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    step = find_resumable(folder, config.checkpoint.verify, config.run.expect_resume, say)
    if step is not None and not read_checkpoint(folder, step).is_rehearsed:
        raise CheckpointError(
            f"{folder / checkpoint_name(step)} was written by a real training, and this is a rehearsal: give the "
            "rehearsal a run.directory of its own"
        )
    return step


def load(folder: Path, step: int, rank: int) -> tuple[Progress, str]:
    """Where the training stands after that step, and its chain. Raises CheckpointError when the
    parts disagree.
    """
    place = folder / checkpoint_name(step)
    try:
        cursor = json.loads((place / CURSOR_FILE).read_text(encoding="utf-8"))
        chain = str(cursor["chain"])
        part = place / rank_file(rank)
        if part.exists():  # there is none where the checkpoint was written by fewer ranks
            with part.open("rb") as stream:
                mine = json.loads(stream.readline())
            if mine != {"rank": rank, "chain": chain}:
                raise CheckpointError(
                    f"{part} is of another step than {place / CURSOR_FILE}; use another checkpoint"
                )
        return Progress.from_cursor(cursor), chain
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{place} cannot be read by rank {rank}: {error}; use another step"
        ) from None
