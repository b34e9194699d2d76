"""Whether what a keeper has started lives, and how long the stages of its training take.

A stage ends with a step, or with a mark of another phase; so one of a step lasts from one line to the
next, whatever the trainer does in between without a word. Beside what is said it is seen whether its
processes use their processors, read or write.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import psutil
from msgspec.structs import replace

from tr11ops.rundir.attempts import (
    LearnedStage,
    StageKind,
    TrainerLife,
    life_file,
    read_lives,
)
from tr11ops.trainers.course import TrainingCourse
from tr11ops.trainers.kept_files import KeptFiles
from tr11ops.trainers.workers import rank_processes
from trainer.contract.documents import write_record
from trainer.contract.files import make_shared
from trainer.contract.record import Record

SAMPLE_SECONDS = 5.0  # between two looks at the processes
BREAK_SECONDS = 10.0  # a keeper that looks so seldom was stopped itself, with all that it watches
BUSY = 0.05  # of one processor: a process that only waits, and looks at a clock now and then, uses less
BUSY_BYTES = 1 << 20  # read or written between two looks
_KINDS: Mapping[str, StageKind] = {"saving": "save", "evaluating": "evaluation"}


class Processes(Record):
    """The processes of a trainer at one moment: the processor's seconds and the bytes of each; how
    many are stopped by a signal, and how many wait for a file system.
    """

    time: float
    seconds: Mapping[int, float]
    bytes: Mapping[int, int]
    stopped: int = 0
    on_disk: int = 0

    def have_moved_since(self, before: Processes) -> bool:
        """Whether one of them has done anything, began or ended."""
        if self.seconds.keys() != before.seconds.keys():
            return True
        least = BUSY * (self.time - before.time)
        return any(
            used - before.seconds[pid] > least or self._bytes(pid) - before._bytes(pid) > BUSY_BYTES
            for pid, used in self.seconds.items()
        )

    def _bytes(self, pid: int) -> int:
        return self.bytes.get(pid, 0)


def stage_of(course: TrainingCourse) -> StageKind:
    """Before the first step of a launch all is loading: it may compile, whatever it said."""
    if not course.has_stepped:
        return "load"
    return _KINDS.get(course.phase, "step")


class Stages(Record):
    """The stage that a training is in, since when, and how long the ones before it took."""

    kind: StageKind
    iteration: int
    since: float
    learned: Mapping[str, LearnedStage] = {}

    def after(self, course: TrainingCourse, now: float) -> Stages:
        """With where the training stands now."""
        kind = stage_of(course)
        if (kind, course.iteration) == (self.kind, self.iteration):
            return self
        took, known = max(0.0, now - self.since), self.learned.get(self.kind)
        stage = LearnedStage(took, 1)
        if known is not None:
            stage = LearnedStage(max(took, known.longest), known.count + 1)
        return Stages(kind, course.iteration, now, {**self.learned, self.kind: stage})

    def broken_off(self, now: float) -> Stages:
        """After a break in which nothing was seen: how long this stage takes is not learned."""
        return replace(self, since=now)


class LifeWatch:
    """Follows the life of one node's trainer, and keeps it on record."""

    def __init__(self, files: KeptFiles, now: float) -> None:
        self._files = files
        self.watched = self._looked = now
        self.stages = Stages("load", 0, now, _learned_before(files))
        self.moved: float | None = None
        self.seen: Processes | None = None

    def look(self, course: TrainingCourse) -> None:
        """One turn of the keeper."""
        now = time.time()
        if now - self._looked > BREAK_SECONDS:
            self.watched, self.seen = now, None
            self.stages = self.stages.broken_off(now)
        self._looked = now
        self.stages = self.stages.after(course, now)
        if self.seen is None or now - self.seen.time >= SAMPLE_SECONDS:
            self._sample(now)
            self._write(course, now)

    def _sample(self, now: float) -> None:
        seen, before = processes_now(now), self.seen
        if before is None or seen.have_moved_since(before):
            self.moved = now
        if not seen.seconds:
            self.moved = None
        self.seen = seen

    def _write(self, course: TrainingCourse, now: float) -> None:
        files, seen = self._files, self.seen
        assert seen is not None
        path = life_file(files.run.paths, files.attempt.job_id, files.places.node_rank)
        life = TrainerLife(
            files.attempt.job_id,
            launch=files.attempt.launch,
            node_rank=files.places.node_rank,
            nodes=files.places.nodes,
            time=now,
            watched=self.watched,
            sign=course.sign,
            kind=self.stages.kind,
            moved=self.moved,
            stopped=seen.stopped,
            on_disk=seen.on_disk,
            learned=self.stages.learned,
        )
        with suppress(OSError):  # then it is old, and nothing follows from it
            make_shared(path.parent)
            write_record(path, life)


def processes_now(now: float) -> Processes:
    """Of this node's ranks and what these have started; of all that the keeper has started, where none
    has a rank.
    """
    seconds: dict[int, float] = {}
    sizes: dict[int, int] = {}
    states: list[str] = []
    ranks = rank_processes() or psutil.Process().children()
    for process in [one for rank in ranks for one in (rank, *_below(rank))]:
        with suppress(psutil.Error):
            used = process.cpu_times()
            states.append(process.status())
            seconds[process.pid] = used.user + used.system
            counters = process.io_counters()
            sizes[process.pid] = counters.read_chars + counters.write_chars
    return Processes(
        now,
        seconds,
        sizes,
        stopped=sum(one in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) for one in states),
        on_disk=states.count(psutil.STATUS_DISK_SLEEP),
    )


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        found: list[psutil.Process] = process.children(recursive=True)
        return found
    return []


def _learned_before(files: KeptFiles) -> Mapping[str, LearnedStage]:
    """What the launches before this one have taught on this node."""
    paths, place = files.run.paths, files.places.node_rank
    newest: TrainerLife | None = None
    with suppress(OSError, ValueError):
        for attempt in paths.attempts.iterdir():
            for life in read_lives(paths, attempt.name):
                if life.node_rank == place and (newest is None or life.time > newest.time):
                    newest = life
    if newest is None:
        return {}
    return newest.learned
