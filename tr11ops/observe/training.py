"""What is watched of the training itself, beyond steps and heartbeats: the types, and no reading.

Times are seconds since the epoch, durations seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tr11ops.base.observed import Observed
from trainer.contract.phases import STEPPING
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.rundir.kept_stacks import KeptStacks
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


class Readmission(Record):
    """That a node was taken off the run's list of exclusions, by a person or by tr11, and when."""

    node: str
    time: float


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
    # of the newest attempts' hangs, the last look of each
    stacks: Observed[tuple[KeptStacks, ...]] = ()
