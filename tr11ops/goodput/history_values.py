"""What is known of a run's past: frozen values, read by `history`. Times are seconds since the
epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tr11ops.base.observed import Observed, known
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord
from tr11ops.rundir.paths import Submission
from trainer.contract.attempt import EndMarker, PhaseRecord
from trainer.contract.record import Record


def micro(seconds: float) -> int:
    """Whole microseconds: sums of these are exact."""
    return round(seconds * 1_000_000)


class StepMark(NamedTuple):
    """One logged step: `seconds` is what one iteration took, without saves and evaluations; None
    where not told.
    """

    time: float
    iteration: int
    seconds: float | None
    job_id: str


class CheckpointMark(NamedTuple):
    """A complete checkpoint and when it was finished."""

    step: int
    created: float


class Period(Record):
    """Something that was in force from `start` to `end` (None: still): a stop switch, a hold, a
    node's exclusion.
    """

    start: float
    end: float | None
    what: str
    who: str = ""
    why: str = ""

    def holds_at(self, moment: int) -> bool:
        """Whether it was in force at a moment in whole microseconds."""
        return micro(self.start) <= moment and (self.end is None or moment < micro(self.end))


def edges(stretches: Iterable[Period | LaunchRecord]) -> set[int]:
    """When each begins, and ends as far as it does, in whole microseconds."""
    return {
        micro(moment) for one in stretches for moment in (one.start, one.end) if moment is not None
    }


class AttemptHistory(Record):
    """One allocation. `nodes` are all that it held, spares included.

    `ended` is when it gave its nodes back: None where it did not say so itself and the scheduler
    does not know; `is_running` is the scheduler's word, None where there is none. `last_sign`: the
    last moment it is known to have lived. `limit`: its time limit in seconds. `logged_as` is the job's number in the
    log of steps. `lost_its_host`: the node of its batch script was lost, as the watchdog or the
    scheduler said: no one was left there to say how it ended.
    """

    job_id: str
    label: str
    kind: str
    submission: str
    start: float
    ended: float | None
    is_running: bool | None
    last_sign: float
    nodes: tuple[str, ...]
    launches: tuple[LaunchRecord, ...] = ()
    phases: tuple[PhaseRecord, ...] = ()
    marker: Observed[EndMarker | None] = None
    verdict: Observed[AttemptVerdict | None] = None
    limit: float | None = None
    logged_as: str = ""
    lost_its_host: bool = False


class History(Record):
    """A run's past. Attempts are in the order of their starts, steps in that of the log.

    `pauses`: kill switch and pause; `holds`: queued jobs that were held, since when, until someone let it go;
    `exclusions`: `what` is the node.
    `waits`: whether work of the run waits in the queue now; None where the scheduler does not say.
    `ends_with_its_jobs`: someone else submits them, so that no time between them is the run's.
    """

    name: str
    variant: str
    submissions: Observed[tuple[Submission, ...]]
    attempts: Observed[tuple[AttemptHistory, ...]]
    steps: Observed[tuple[StepMark, ...]]
    checkpoints: Observed[tuple[CheckpointMark, ...]]
    pauses: tuple[Period, ...] = ()
    holds: tuple[Period, ...] = ()
    exclusions: tuple[Period, ...] = ()
    waits: bool | None = None
    ends_with_its_jobs: bool = False
    read_errors: tuple[str, ...] = ()

    @property
    def labels(self) -> dict[str, str]:
        """What each attempt is called, by its job."""
        return {attempt.job_id: attempt.label for attempt in known(self.attempts, ())}
