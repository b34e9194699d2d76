"""One look at an attempt's stacks: what was collected, and what follows from it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from typing import Any

from msgspec import field

from tr11ops.base.units import iso_time
from tr11ops.diagnose.stacks.groups import StackGroup, grouped, looks_of
from tr11ops.diagnose.stacks.records import RecordsLook
from tr11ops.diagnose.stacks.verdict import StacksVerdict, judge
from tr11ops.diagnose.stacks.worker import CollectedStacks, WorkerStack
from trainer.contract.record import Record

SCHEMA = 1
FRESH_SECONDS = 600.0  # a flight record that is older says nothing of what hangs now


class StacksLook(Record, dict=True):
    """All of one look. `time`: seconds since the epoch. `counts`: rank -> looks in a row at one
    place.
    """

    job: str
    time: float
    collected: CollectedStacks
    records: RecordsLook
    counts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def after(
        cls,
        before: StacksLook | None,
        job: str,
        time: float,
        collected: CollectedStacks,
        records: RecordsLook,
    ) -> StacksLook:
        """The look that follows `before`, which may be None."""
        if before is None:
            workers = {}
        else:
            workers = {one.rank: one for one in before.collected.workers}
        counts = looks_of(workers, {} if before is None else before.counts, collected.workers)
        return cls(job, time, collected=collected, records=records, counts=counts)

    @cached_property
    def groups(self) -> tuple[StackGroup, ...]:
        return grouped(self.collected.workers, self.counts)

    @cached_property
    def verdict(self) -> StacksVerdict:
        fresh = self.records.time is not None and self.time - self.records.time <= FRESH_SECONDS
        return judge(self.groups, self.collected.silent, self.records.finding if fresh else None)

    @property
    def mark(self) -> str:
        """The same for two looks between which no rank has moved; "" where one's stack could not be
        read, or a node did not answer.
        """
        workers = self.collected.workers
        if self.collected.silent or not workers or not all(one.frames for one in workers):
            return ""
        places = sorted((one.rank, one.pid, one.node, one.frames) for one in workers)
        return sha256(repr(places).encode()).hexdigest()

    @property
    def exit_code(self) -> int:
        """0 no rank or node stands out, 1 one does, 3 nothing could be read."""
        if not any(
            worker.frames or worker.is_dead or worker.is_stopped
            for worker in self.collected.workers
        ):
            if self.collected.workers or self.collected.silent:
                return 3
            return 0
        if self.verdict.needs_person:
            return 1
        return 0

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why some stacks are not there, each reason once, the most frequent first."""
        reasons = Counter(
            worker.trouble
            for worker in self.collected.workers
            if worker.trouble and not worker.is_dead
        )
        found = [
            reason if count == 1 else f"{reason} (and {count - 1} more like it)"
            for reason, count in reasons.most_common()
        ]
        return (
            *([self.collected.trouble] if self.collected.trouble else []),
            *found,
            *self.records.troubles,
        )

    def document(self) -> dict[str, Any]:
        """What programs read: docs/how-to/stacks.md."""
        verdict, finding = self.verdict, self.records.finding
        return {
            "schema": SCHEMA,
            "job": self.job,
            "time": iso_time(self.time),
            "verdict": verdict.sentence,
            "odd": {
                "ranks": list(verdict.ranks),
                "nodes": list(verdict.nodes),
                "kind": verdict.kind,
                "certain": verdict.is_certain,
            },
            "exit_code": self.exit_code,
            "groups": [_group(group) for group in self.groups],
            "workers": [_worker(worker) for worker in self.collected.workers],
            "nodes": {
                "answered": [answer.node for answer in self.collected.answers],
                "silent": list(self.collected.silent),
            },
            "flight_recorder": {
                "folder": str(self.records.folder),
                "time": None if self.records.time is None else iso_time(self.records.time),
                "ranks_read": self.records.ranks,
                "sentence": "" if finding is None else finding.sentence,
                "missing_ranks": [] if finding is None else list(finding.ranks),
                "group": "" if finding is None else finding.group,
                "sequence": None if finding is None else finding.number,
            },
            "troubles": list(self.troubles),
        }


def _group(group: StackGroup) -> dict[str, Any]:
    return {
        "kind": group.wait.kind.value,
        "what": group.wait.what,
        "ranks": list(group.ranks),
        "nodes": list(group.nodes),
        "looks": group.looks,
        "place": "" if group.wait.frame is None else str(group.wait.frame),
        "frames": [
            {"function": frame.function, "file": frame.file, "line": frame.line}
            for frame in group.frames
        ],
    }


def _worker(worker: WorkerStack) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "node": worker.node,
        "pid": worker.pid,
        "state": worker.state,
        "call": worker.call,
        "path": worker.path,
        "trouble": worker.trouble,
    }
