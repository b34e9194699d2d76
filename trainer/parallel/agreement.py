"""Doing one thing on all ranks so that either it succeeds everywhere or every rank raises the same
error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from trainer.contract.checkpoints import refusal_code
from trainer.contract.errors import (
    CheckpointError,
    LostRanksError,
    NodeFilesError,
    lost_a_rank,
)
from trainer.contract.files import host_name
from trainer.contract.record import Record
from trainer.contract.units import shortened

T = TypeVar("T")
P = ParamSpec("P")


class _Fault(Record):
    """What went wrong, on which rank of the group; `host` is the host of the rank that says so.

    `code`: the operating system's error, where the file system refused it there, and need not
    elsewhere.
    """

    rank: int
    text: str
    host: str
    code: int | None = None


class RankGroup(Record):
    """The ranks that save or load together. Without a process group it is this process alone.

    `group`: a group with a CPU back-end over all ranks; None is the default group when there is
    one.
    """

    group: dist.ProcessGroup | None = None

    @property
    def alone(self) -> bool:
        return not (dist.is_available() and dist.is_initialized())

    @property
    def rank(self) -> int:
        if self.alone:
            return 0
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        if self.alone:
            return 1
        return dist.get_world_size(self.group)

    def each(self, what: str, action: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run `action` with its arguments on every rank and return this rank's result; doubles as a
        barrier.

        If it fails anywhere, every rank raises one CheckpointError "`what`: rank R on HOST: fault".
        The action may hold one collective operation, as its first statement, if that fails on all
        ranks together.
        """
        value, fault = self._attempt(action, *arguments, **options)
        words = self.gather(host_name() if fault is None else fault)
        faults = [word if isinstance(word, _Fault) else None for word in words]
        first = next((fault for fault in faults if fault is not None), None)
        if first is not None:
            teller = faults[first.rank]  # the failing rank's own report names its host
            text = f"{what}: {self._place(teller or first)}{first.text}"
            failed = {fault.host for fault in faults if fault is not None}
            served = {word for word in words if isinstance(word, str)} - failed
            codes = [fault.code for fault in faults if fault is not None]
            if served and None not in codes:
                raise NodeFilesError(
                    text,
                    sorted(failed),
                    sorted(served),
                    [code for code in codes if code is not None],
                )
            raise CheckpointError(text)
        return cast(T, value)

    def on_first(
        self, what: str, action: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Run `action`, likewise, on rank 0 and give its result to all; a failure is raised on all
        ranks.
        """
        answer: tuple[Any, _Fault | None] = (None, None)
        if self.rank == 0:
            answer = self._attempt(action, *arguments, **options)
        value, fault = self.broadcast(answer)
        if fault is not None:
            raise CheckpointError(f"{what}: {self._place(fault)}{fault.text}")
        return cast(T, value)

    def _place(self, fault: _Fault) -> str:
        if self.alone:
            return ""
        return f"rank {fault.rank} on {fault.host}: "

    def _attempt(
        self, action: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> tuple[T | None, _Fault | None]:
        try:
            return action(*arguments, **options), None
        except (
            CheckpointException
        ) as error:  # a BaseException of torch; it carries the failing ranks' own errors
            rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            return None, _Fault(rank, one_line(cause), host_name())
        except Exception as error:
            return None, _Fault(self.rank, one_line(error), host_name(), refusal_code(error))

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Raises CheckpointError when a rank is lost."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        _guarded(dist.all_gather_object, values, value, group=self.group)
        return values

    def collect(self, value: T) -> list[T]:
        """Every rank's value, by rank, on rank 0; elsewhere nothing. Raises CheckpointError when a
        rank is lost.
        """
        if self.alone:
            return [value]
        values: list[Any] | None = None
        if self.rank == 0:
            values = [None] * self.size
        _guarded(dist.gather_object, value, values, dst=self._first, group=self.group)
        return values or []

    def deal(self, what: str, action: Callable[[], list[T]]) -> T:
        """Run `action` on rank 0, and give each rank its element of the list; a failure is raised
        on all ranks.
        """
        if self.rank == 0:
            dealt, fault = self._attempt(action)
        else:
            dealt, fault = (None, None)
        mine: list[Any] = [(dealt[0], None) if dealt else (None, fault)]
        if not self.alone:
            parts = [(part, None) for part in dealt] if dealt else [(None, fault)] * self.size
            sent = parts if self.rank == 0 else None
            _guarded(dist.scatter_object_list, mine, sent, src=self._first, group=self.group)
        value, fault = mine[0]
        if fault is not None:
            raise CheckpointError(f"{what}: {self._place(fault)}{fault.text}")
        return cast(T, value)

    def all_true(self, flag: bool) -> bool:
        """Whether the flag is set on every rank; one small collective. Raises CheckpointError when
        a rank is lost.
        """
        if self.alone:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        _guarded(dist.all_reduce, flags, dist.ReduceOp.MIN, group=self.group)
        return bool(flags.item())

    def broadcast(self, value: T) -> T:
        """Rank 0's value. Raises CheckpointError when a rank is lost."""
        if self.alone:
            return value
        values = [value]
        _guarded(dist.broadcast_object_list, values, src=self._first, group=self.group)
        return values[0]

    @property
    def _first(self) -> int:
        """The global rank of the group's rank 0."""
        if self.group is None:
            return 0
        return dist.get_global_rank(self.group, 0)


def _guarded(collective: Callable[P, object], *arguments: P.args, **options: P.kwargs) -> None:
    try:
        collective(*arguments, **options)
    except RuntimeError as error:
        raise CheckpointError(
            f"the ranks lost each other during a checkpoint operation: {one_line(error)}"
        ) from error


def is_of_others(error: Exception) -> bool:
    """Whether it may say no more than that another rank has gone: gloo's errors have no type of
    their own.
    """
    return (
        type(error) is RuntimeError
        or isinstance(error, dist.DistError | LostRanksError)
        or lost_a_rank(error)
    )


def one_line(error: BaseException) -> str:
    """An exception as one line: the reason and the file for an OSError, else the type's name and
    its text.
    """
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"{error.strerror}: {error.filename}"
        return error.strerror
    text = shortened(" ".join(str(error).split()), 300)
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}"
