"""Saving beside the training: a copy in host memory, then a thread that writes it while the steps
go on.

No collective operation runs in the background. Each rank's thread writes that rank's files; `poll`,
which all ranks call between steps, finds out with one small collective whether all have finished.
Then rank 0's thread publishes the checkpoint, and a later `poll` tells all ranks the outcome. So a
save that is under way when a rank is lost, a disk fills up or the processes are killed is a hidden
folder and nothing more, which the next save removes.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from trainer.checkpoint import sharded_files, store
from trainer.checkpoint.files import (
    ALIGNMENT,
    BlockFile,
    Bytes,
    copy_all,
    view_of,
    write_files,
)
from trainer.checkpoint.publishing import (
    CheckpointInfo,
    Extras,
    Fence,
    Finished,
    NewCheckpoint,
)
from trainer.checkpoint.save_plan import FolderShare, plan_share, signature
from trainer.checkpoint.staging import (
    MemoryNeed,
    Staging,
    available_memory,
    ready_staging,
    shortage,
)
from trainer.contract.errors import CheckpointError, lost_a_rank
from trainer.contract.files import host_name
from trainer.contract.manifest import FileEntry
from trainer.contract.record import Record
from trainer.contract.replacing import Report
from trainer.parallel.agreement import RankGroup
from trainer.parallel.state import LocalTensor, ShardedState

# Written and hashed at a time beside the training. For each block threads ask the interpreter,
# whose lock the thread that gives the GPU its work holds, some ten times.
BACKGROUND_BLOCK = 64 << 20


class Failed(Record):
    """A save that left nothing; all older checkpoints and `latest` are as before."""

    step: int
    fault: CheckpointError


Outcome = Finished | Failed


@dataclass
class _Flight:
    """One save under way. `published` is set once all ranks' files are written, and on rank 0 only."""

    new: NewCheckpoint
    partial: Path
    written: Future[list[FileEntry]]
    started: float
    stall: float
    waited: float
    awaited_since: float | None = None
    publishing: bool = False
    published: Future[int] | None = None

    @property
    def this_rank_is_done(self) -> bool:
        if not self.publishing:
            return self.written.done()
        return self.published is None or self.published.done()


@dataclass
class AsyncSaver:
    """Saves checkpoints below `folder` (checkpoints/VARIANT) while the training goes on; one at a
    time.

    `report`: told, on rank 0, one line when a save cannot be asynchronous. `group`: all ranks, with
    a CPU back-end; None is the default group, or this process alone without one. `available`: bytes
    of free host memory. `fence`: asked on rank 0 before each publication, see
    `trainer.checkpoint.publishing.publish`. `is_held`: the owner calls `hold` before it changes
    what is saved, so that copies from a GPU may run beside the next step's computation. `start`,
    `poll`, `wait` and `save_now` are collective: all ranks call them in the same order, and all get
    outcomes of the same saves. They raise CheckpointError only when a rank was lost; a save that
    fails is an outcome.
    """

    folder: Path
    report: Report
    group: dist.ProcessGroup | None = None
    available: Callable[[], int] = available_memory
    fence: Fence | None = None
    is_held: bool = False
    _flight: _Flight | None = field(default=None, init=False)
    _outcomes: deque[Outcome] = field(default_factory=deque, init=False)
    _signature: object = field(default=None, init=False)
    _shares: dict[str, FolderShare] = field(default_factory=dict, init=False)
    _staging: Staging | None = field(default=None, init=False)
    _reserved: Future[Staging] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._ranks = RankGroup(self.group)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")

    @property
    def in_flight(self) -> int | None:
        """The step of the save under way."""
        if self._flight is None:
            return None
        return self._flight.new.step

    def reserve(self, state: ShardedState, *, save_optimizer: bool = True) -> None:
        """Plan the saves of such a state, and begin to get the memory for its copies, in the
        background. Collective.

        Without it the first save does both, while the training stands still. What is in the way is
        told then.
        """
        what = f"saves into {self.folder} cannot be planned"
        try:
            parts = self._ranks.each(what, store.saved_parts, state, save_optimizer)
            size = self._plan(parts, what)
            on_gpu = _lies_on_gpu(parts)
            if self._shortage(size) is not None:
                return
        except CheckpointError as fault:
            if lost_a_rank(fault):
                raise
            return
        device = None
        if on_gpu:
            device = torch.cuda.current_device()
        self._reserved = self._background.submit(ready_staging, size, device)

    def hold(self) -> None:
        """An owner who `is_held` calls this before what the last `start` saves is changed. Not
        collective.

        A GPU then waits for the copies; the host does not.
        """
        if self._staging is not None:
            self._staging.hold()

    def start(
        self,
        step: int,
        state: ShardedState,
        extras: Extras,
        info: CheckpointInfo,
        *,
        save_optimizer: bool = True,
    ) -> None:
        """Copy this rank's share to host memory and return; the rest happens in the background.
        Collective.

        The tensors may change as soon as this returns; of an owner who `is_held`, behind its next
        `hold`. A save that is still under way is waited for first. Where the hosts have no memory
        for a copy, the save is made at once, as by `save_now`. Options are those of `store.save`.
        """
        began = time.perf_counter()
        self._finish_flight()
        waited = time.perf_counter() - began
        new = self._new(step, extras, info)
        try:
            parts = self._ranks.each(new.not_saved, store.saved_parts, state, save_optimizer)
            reason = self._make_room(parts, new.not_saved)
            if reason is None:
                partial = self._ranks.on_first(new.not_saved, new.prepare, list(parts))
        except CheckpointError as fault:
            self._fail(step, fault)
            return
        if reason is not None:
            self.report(f"checkpoint of step {step} is saved while the training waits: {reason}")
            self._save_at_once(new, state, save_optimizer, began)
            return
        written = self._copy_and_write(new, partial, parts)
        stall = time.perf_counter() - began
        self._flight = _Flight(new, partial, written, started=began, stall=stall, waited=waited)

    def poll(self) -> Outcome | None:
        """The outcome of a save that has ended and was not told yet; None otherwise. Collective.

        To be called after every step: with nothing under way it costs nothing, else one collective
        of four bytes.
        """
        if self._outcomes:
            return self._outcomes.popleft()
        flight = self._flight
        if flight is None or not self._ranks.all_true(flight.this_rank_is_done):
            return None
        self._advance(flight)
        if self._outcomes:
            return self._outcomes.popleft()
        return None

    def wait(self) -> list[Outcome]:
        """Finish the save under way, and return all outcomes that were not told yet, oldest first.
        Collective.
        """
        self._finish_flight()
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    def save_now(
        self,
        step: int,
        state: ShardedState,
        extras: Extras,
        info: CheckpointInfo,
        *,
        save_optimizer: bool = True,
    ) -> list[Outcome]:
        """Finish the save under way, then save while the training waits; outcomes as of `wait`.
        Collective.
        """
        began = time.perf_counter()
        self._finish_flight()
        self._save_at_once(self._new(step, extras, info), state, save_optimizer, began)
        return self.wait()

    def close(self) -> None:
        """Release memory and thread. Not collective: a save under way is abandoned, so call `wait`
        first.
        """
        self._background.shutdown(wait=False, cancel_futures=True)
        self._drop_staging()

    # ------------------------------------------------------------------ the way of a save
    def _new(self, step: int, extras: Extras, info: CheckpointInfo) -> NewCheckpoint:
        return NewCheckpoint(self.folder, step, extras, info, fence=self.fence, report=self.report)

    def _copy_and_write(
        self, new: NewCheckpoint, partial: Path, parts: Mapping[str, list[LocalTensor]]
    ) -> Future[list[FileEntry]]:
        """Copy, and hand over to the background. A fault of this rank alone is the future's: all
        hear it at a poll.
        """
        try:
            assert self._staging is not None
            images = self._copy(parts, self._staging)
            small = store.small_files(self._ranks.rank, self._shares, new)
            return self._background.submit(_write, self._staging, partial, images, small)
        except Exception as error:
            failed: Future[list[FileEntry]] = Future()
            failed.set_exception(error)
            return failed

    def _finish_flight(self) -> None:
        if self._flight is not None:
            self._flight.awaited_since = time.perf_counter()
        while self._flight is not None:
            self._advance(self._flight)

    def _advance(self, flight: _Flight) -> None:
        """From written to publishing, or from published to the end; waits for anyone who is not so
        far.
        """
        what = flight.new.not_saved
        try:
            if not flight.publishing:
                entries = self._ranks.collect(self._ranks.each(what, flight.written.result))
                flight.publishing = True
                if self._ranks.rank == 0:
                    flight.published = self._background.submit(
                        flight.new.publish, flight.partial, chain.from_iterable(entries)
                    )
                return
            total = self._ranks.on_first(
                what, lambda: flight.published.result() if flight.published else 0
            )
        except CheckpointError as fault:
            self._flight = None
            if self._ranks.rank == 0 and not lost_a_rank(fault):
                shutil.rmtree(flight.partial, ignore_errors=True)
            self._fail(flight.new.step, fault)
            return
        self._flight = None
        now = time.perf_counter()
        stall = flight.stall + (0.0 if flight.awaited_since is None else now - flight.awaited_since)
        self._outcomes.append(
            Finished(
                flight.new.step,
                flight.new.place,
                total,
                seconds=now - flight.started,
                stall=stall,
                waited=flight.waited,
            )
        )

    def _save_at_once(
        self, new: NewCheckpoint, state: ShardedState, save_optimizer: bool, began: float
    ) -> None:
        waited = time.perf_counter() - began
        try:
            saved = store.save(new, state, group=self.group, save_optimizer=save_optimizer)
        except CheckpointError as fault:
            self._fail(new.step, fault)
            return
        seconds = time.perf_counter() - began
        self._outcomes.append(replace(saved, seconds=seconds, stall=seconds, waited=waited))

    def _fail(self, step: int, fault: CheckpointError) -> None:
        if lost_a_rank(fault):
            raise fault
        self._outcomes.append(Failed(step, fault))

    # ------------------------------------------------------------------ the copy
    def _make_room(self, parts: Mapping[str, list[LocalTensor]], what: str) -> str | None:
        """Plan the save and find memory for the copy, both as in the last save if it can be; why
        not, or None.
        """
        self._take_reserved()
        is_planned = self._signature == _signatures(parts)
        if self._ranks.all_true(is_planned and self._staging is not None):
            return None
        size = self._plan(parts, what)
        on_gpu = _lies_on_gpu(parts)
        if self._staging is None:
            held = -1
        else:
            held = len(self._staging.memory)
        reason = self._shortage(max(0, size - held))
        if reason is None and not self._ranks.all_true(
            size <= held or self._allocate(size, on_gpu)
        ):
            reason = "a rank could not allocate the memory for a copy"
        if reason is not None:
            self._drop_staging()
        return reason

    def _plan(self, parts: Mapping[str, list[LocalTensor]], what: str) -> int:
        """Deal out what is to be written; the bytes that this rank copies. Collective."""
        self._shares = {
            name: plan_share(pieces, self._ranks, what) for name, pieces in parts.items()
        }
        self._signature = _signatures(parts)
        return sum(_padded(share.size) for share in self._shares.values())

    def _take_reserved(self) -> None:
        """The memory that was reserved, once it is there; where there was none, a save tries again
        and says so.
        """
        if self._reserved is not None:
            with suppress(MemoryError, RuntimeError):
                self._staging = self._reserved.result()
            self._reserved = None

    def _shortage(self, needed: int) -> str | None:
        unknown = "it is not known how much host memory is free"
        try:
            need = self._ranks.each(
                unknown, lambda: MemoryNeed(host_name(), needed, self.available())
            )
        except CheckpointError as fault:
            if lost_a_rank(fault):
                raise
            return str(fault)
        return shortage(self._ranks.gather(need))

    def _allocate(self, size: int, on_gpu: bool) -> bool:
        self._drop_staging()  # first: old and new together need not fit
        try:
            self._staging = Staging(size, on_gpu)
        except (MemoryError, RuntimeError):  # torch has its own words for "no memory"
            return False
        return True

    def _drop_staging(self) -> None:
        if self._staging is not None:
            self._staging.release()
        self._staging = None

    def _copy(self, parts: Mapping[str, list[LocalTensor]], staging: Staging) -> dict[str, Tensor]:
        """The content of this rank's large files, by their path in the checkpoint, in the saver's
        own memory.
        """
        images: dict[str, Tensor] = {}
        with staging.copying():
            copy_all(self._copies(parts, staging.memory, images))
        if not self.is_held:
            staging.hold()
        return images

    def _copies(
        self, parts: Mapping[str, list[LocalTensor]], memory: Tensor, images: dict[str, Tensor]
    ) -> Iterator[tuple[Tensor, Bytes]]:
        """Each place in `memory` and what belongs there; fills `images` on the way."""
        begin = 0
        for name, share in self._shares.items():
            if not share.placed:
                continue
            position = begin
            for source in share.contents(sharded_files.by_index(parts[name])):
                yield memory[position : position + len(source)], source
                position += len(source)
            images[f"{name}/{share.file}"] = memory[begin:position]
            begin += _padded(share.size)


def _lies_on_gpu(parts: Mapping[str, list[LocalTensor]]) -> bool:
    return any(piece.tensor.is_cuda for pieces in parts.values() for piece in pieces)


def _signatures(parts: Mapping[str, list[LocalTensor]]) -> dict[str, object]:
    return {name: signature(pieces) for name, pieces in parts.items()}


def _write(
    staging: Staging, partial: Path, images: Mapping[str, Tensor], small: Mapping[str, list[Bytes]]
) -> list[FileEntry]:
    """Write this rank's files from its own memory; the large ones side by side. In the background."""
    files: dict[str, BlockFile] = {}
    staging.settle()
    try:
        for name, image in images.items():
            files[name] = BlockFile(partial / name)
            for begin in range(0, len(image), BACKGROUND_BLOCK):
                files[name].append(view_of(image[begin : begin + BACKGROUND_BLOCK]))
        writers = write_files((partial / name, contents) for name, contents in small.items())
        for file in files.values():
            file.close()
    finally:
        for file in files.values():
            file.release()
    entries = [writer.entry(name) for name, writer in zip(small, writers, strict=True)]
    return entries + [file.entry(name) for name, file in files.items()]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
