"""What is seen beside steps and heartbeats: of the training itself, and of the operation around it
(copies, clocks, purges, holds). The types, and no reading.

Frozen values only. Times are seconds since the epoch, durations seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr11ops.base.observed import Observed
from tr11ops.cluster.base import Job
from tr11ops.rundir.attempts import KeptStacks, TrainerLife
from tr11ops.rundir.hold_store import HoldRecord
from trainer.contract.attempt import STEPPING
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.rundir import cron_records as periodic
    from tr11ops.rundir.disk_usage import Usage
    from trainer.contract.compute_record import ComputeTimes


TRAINING_PHASES = (*STEPPING, "data-wait")  # in which iterations are to be finished


class Phase(Record):
    """One phase of one launch. `ended` is None for the last one of a launch: it lasts, or no one
    saw its end.
    """

    job_id: str
    launch: int
    phase: str
    iteration: int
    began: float
    ended: float | None = None


class TrainingEvent(Record):
    """What the trainer noted beside its steps, with its `values`: a spike, a roll-back, a save that
    failed.
    """

    kind: str
    time: float
    job_id: str = ""
    values: Mapping[str, Any] = {}


class Validation(Record):
    """The loss after `iteration` on one set of texts that is not trained on, by the name of the set."""

    name: str
    iteration: int
    loss: float
    time: float


class LogFile(Record):
    """A log that is there: `bytes` long, last written to at `changed` by the file system's clock."""

    name: str
    bytes: int
    changed: float


class LaunchEnd(Record):
    """When the workers of one launch were gone, by the batch controller's record: why, and which
    nodes it found bad.

    `decision`: what followed, in one line. `older_checkpoint`: the step from which the training was
    to go on then, where launches that began from that of `began_at` ended at the iteration
    `reached` again and again. `failing_checks`: health checks that fail everywhere, and are left
    out from then on, each with what showed it. `suspects`: nodes that may be at fault, without
    proof. `fault` names the fault, free of hosts and of what changes from one time to the next.
    `is_last`: it was decided that no other launch follows in this attempt.
    """

    job_id: str
    launch: int
    time: float
    why: str = ""
    decision: str = ""
    blamed: tuple[str, ...] = ()
    reached: int | None = None
    began_at: int | None = None
    older_checkpoint: int | None = None
    failing_checks: Mapping[str, str] = {}
    suspects: tuple[str, ...] = ()
    fault: str = ""
    is_last: bool = False


class Readmission(Record):
    """That a node was taken off the run's list of exclusions, by a person or by tr11, and when.

    `of_speed`: it was not, but measured to be as quick as others: that answers slowness alone.
    """

    node: str
    time: float
    of_speed: bool = False


class Corruption(Record):
    """A worker whose results cannot be trusted, by a check of the arithmetic at `iteration` of an
    attempt.

    `certain`: it differs from itself, or from replicas that agree; else it or another one is wrong.
    `why` is in words.
    """

    node: str
    rank: int
    time: float
    iteration: int
    certain: bool
    why: str


class NodeWarning(Record):
    """What a health check of a node said before the newest attempt's workers began there, where it
    was not fine.
    """

    node: str
    check: str
    result: str
    why: str


class TrainingObservations(Record):
    """The part of a Snapshot that the trainer left beside its steps."""

    phases: Observed[tuple[Phase, ...]] = ()  # of the kept attempts; oldest first in each
    events: Observed[tuple[TrainingEvent, ...]] = ()  # oldest first
    validations: Observed[tuple[Validation, ...]] = ()  # as they were written
    logs: Observed[tuple[LogFile, ...]] = ()
    node_warnings: Observed[tuple[NodeWarning, ...]] = ()  # of the newest attempt
    # of the newest attempts, the newest of them first
    launch_ends: Observed[tuple[LaunchEnd, ...]] = ()
    # of the newest attempt's newest launch; None where none has begun, or the attempt is over
    launch_nodes: Observed[tuple[str, ...] | None] = None
    corruptions: Observed[tuple[Corruption, ...]] = ()  # of all attempts, oldest first
    # of the newest attempt's newest launch, while it lasts
    compute_times: Observed[tuple[ComputeTimes, ...]] = ()
    # the same of the last attempt before that one which measured any
    compute_before: Observed[tuple[ComputeTimes, ...]] = ()
    # of the newest attempts' hangs, the last look of each
    stacks: Observed[tuple[KeptStacks, ...]] = ()
    # of another trainer: what the keepers of the newest attempt's newest launch see, while it lasts
    lives: Observed[tuple[TrainerLife, ...]] = ()


class Copied(Record):
    """One sound copy of a checkpoint that is on record: which archive of the card has it, whole or
    its weights.
    """

    archive: str
    kind: str
    step: int


class FoundSecret(Record):
    """A kind of secret in a log: `line` of the first (0: it has none), `time` of the finding, when
    it was revoked.
    """

    path: str
    kind: str
    line: int
    time: float
    revoked: float | None = None

    def __str__(self) -> str:
        return f"{self.path}{f' line {self.line:,}' if self.line else ''}: {self.kind}"


def found_secrets(value: object) -> tuple[FoundSecret, ...]:
    """The secrets on record. Raises ValueError for what is no such list."""
    if not isinstance(value, list):
        raise ValueError("its secrets are no list")
    try:
        found = tuple(FoundSecret(**entry) for entry in value)
    except TypeError:
        raise ValueError("its secrets are no list of secrets") from None
    for secret in found:
        numbers = (secret.line, secret.time, 0 if secret.revoked is None else secret.revoked)
        texts = (secret.path, secret.kind)
        if not all(isinstance(n, int | float) for n in numbers) or not all(
            isinstance(t, str) for t in texts
        ):
            raise ValueError("its secrets are no list of secrets")
    return found


class CopyStatus(Record):
    """The last success of a backup or a synchronisation: when, and the newest step whose copy was
    verified.

    A backup also says all its sound copies (None: by an older tr11, which did not say), and in one
    line for each copy that was found damaged: where, which step, how many files, and which other
    copy there is; `not_finite`: the same of those that hold NaN or infinity and that no later sound
    one follows. A synchronisation says which secrets were ever found in the logs.
    """

    time: float
    step: int | None = None
    message: str = ""
    copied: tuple[Copied, ...] | None = None
    damaged: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()
    secrets: tuple[FoundSecret, ...] = ()


class UnwritableDirectory(Record):
    """A folder of the run that no one can write to, as seen from this host: its file system is
    full, or read-only.
    """

    path: str
    why: str
    is_full: bool


LITTLE = 10  # of a file system, one part in so many


class FolderRoom(Record):
    """How many bytes the run may still write to a file system; `path`: the first of its folders
    that are on it.

    `total_bytes` is its size, 0 where it has none. Where little is left, `largest` are the largest
    things below `path` but for checkpoints, by path, with their bytes; `is_all_seen`: nothing of it
    was left out for want of time.
    """

    path: str
    free_bytes: int
    total_bytes: int = 0
    largest: Mapping[str, int] = {}
    is_all_seen: bool = True

    @property
    def is_short(self) -> bool:
        """Whether so little is left that someone asks what fills it."""
        return self.free_bytes < self.total_bytes / LITTLE


class ClockReading(Record):
    """One file of the run directory: the time that its writer put into it, and the file system's
    own time of it.
    """

    host: str
    written: float
    stamped: float
    what: str


class LeastUsed(Record):
    """The file that was read or changed longest ago among some that the run needs."""

    what: str  # "checkpoint global_step800", "data"
    path: Path
    time: float


class OperationObservations(Record):
    """The part of a Snapshot that is of the operation around the run; each value may be unknown for
    itself.
    """

    # those that the scheduler no longer knows, from its own log
    ended_jobs: Observed[tuple[Job, ...]] = ()
    holds: Observed[tuple[HoldRecord, ...]] = ()
    holds_changed: float | None = None  # when tr11 last held or released something
    backup: Observed[CopyStatus | None] = None
    sync: Observed[CopyStatus | None] = None
    periodic_jobs: Observed[tuple[periodic.PeriodicJobState, ...]] = ()
    chains: Observed[tuple[periodic.ChainState, ...]] = ()
    usage: Observed[tuple[Usage, ...]] = ()
    clocks: Observed[tuple[ClockReading, ...]] = ()
    least_used: Observed[tuple[LeastUsed, ...]] = ()
    shut_folders: Observed[tuple[UnwritableDirectory, ...]] = ()
    # where checkpoints are written; None where they have no folder yet
    save_room: Observed[FolderRoom | None] = None
