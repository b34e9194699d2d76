"""One look at several runs: a scheduler's answers serve all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Job, Node, Overview

T = TypeVar("T")


class SharedOverview:
    """An Overview for one look at many runs: each question is asked once, and not again where it
    failed.
    """

    def __init__(self, scheduler: Overview) -> None:
        self.name = scheduler.name
        self._scheduler = scheduler
        self._jobs: dict[tuple[str | None, str | None], tuple[Job, ...]] = {}
        self._nodes: tuple[Node, ...] | None = None
        self._error: SchedulerError | None = None

    def jobs(self, name: str | None = None, user: str | None = None) -> tuple[Job, ...]:
        """As a Scheduler's."""
        if (name, user) not in self._jobs:
            self._jobs[name, user] = self._asked(lambda: self._scheduler.jobs(name=name, user=user))
        return self._jobs[name, user]

    def nodes(self) -> tuple[Node, ...]:
        """As a Scheduler's."""
        if self._nodes is None:
            self._nodes = self._asked(self._scheduler.nodes)
        return self._nodes

    def _asked(self, call: Callable[[], tuple[T, ...]]) -> tuple[T, ...]:
        if self._error is not None:
            raise self._error
        try:
            return call()
        except SchedulerError as error:
            self._error = error
            raise
