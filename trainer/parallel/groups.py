"""Process groups: each made once, each with a timeout of the card.

A group costs a communicator of its own on every GPU, with buffers of hundreds of megabytes and
seconds of start-up on hundreds of nodes. So anyone who asks for the same ranks again, DeepSpeed's
grid above all, gets the same group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout

START_TIMEOUT = timedelta(minutes=30)


@dataclass
class Groups:
    """The groups of this process. `timeout`: of every operation at first, and wherever something is
    done for the first time (`first_time`).

    `control` joins all workers for what lies in host memory and may take as long as a disk does:
    the default group where that is gloo, else a group beside it. Its timeout stays.
    """

    timeout: timedelta = START_TIMEOUT
    control: ProcessGroup | None = None
    _made: dict[tuple[str, tuple[int, ...]], ProcessGroup] = field(default_factory=dict)
    _done: set[tuple[object, ...]] = field(default_factory=set)

    @classmethod
    def create(cls, device: torch.device, timeout: timedelta = START_TIMEOUT) -> Groups:
        """Of the default process group, which must be up. Collective."""
        control = None
        if device.type == "cuda":
            control = dist.new_group(backend="gloo", timeout=timeout)
        return cls(timeout, control)

    def of(self, ranks: Iterable[int], purpose: str = "") -> ProcessGroup | None:
        """The group of these ranks; None where this worker is not in it. All workers ask, in the
        same order.

        With a `purpose` it is one of its own beside that.
        """
        wanted, rank = tuple(ranks), dist.get_rank()
        if len(wanted) == dist.get_world_size() and not purpose:
            return dist.group.WORLD
        key = purpose, wanted
        if key not in self._made:
            alone = len(wanted) == 1
            if alone and rank not in wanted:
                return None
            made = dist.new_group(wanted, timeout=self.timeout, use_local_synchronization=alone)
            self._made[key] = made
        if rank in wanted:
            return self._made[key]
        return None

    @contextmanager
    def first_time(self, usual: timedelta, *what: object) -> Iterator[None]:
        """Within it the long timeout holds when `what` is done for the first time, else the `usual`
        one, as afterwards.

        The first time compiles and connects: one rank may then keep the others waiting for minutes.
        All ranks say the same.
        """
        if what not in self._done:
            self._set_timeout(self.timeout)
        yield
        if what not in self._done:
            self._done.add(what)
            self._set_timeout(usual)

    def _set_timeout(self, timeout: timedelta) -> None:
        """From now on, for the groups of the training's own operations."""
        default = dist.group.WORLD
        own = [group for (_, ranks), group in self._made.items() if dist.get_rank() in ranks]
        for group in [
            *own,
            *([default] if self.control is not None and default is not None else []),
        ]:
            _set_pg_timeout(timeout, group)

    @contextmanager
    def shared_with(self, backend: Any) -> Iterator[None]:
        """Within it, `backend` (DeepSpeed's class for torch) makes no group of its own where there
        is one.
        """

        def new_group(_: object, ranks: Iterable[int]) -> ProcessGroup | int:
            group = self.of(ranks)
            if group is None:
                return dist.GroupMember.NON_GROUP_MEMBER
            return group

        with mock.patch.object(backend, "new_group", new_group):
            yield
