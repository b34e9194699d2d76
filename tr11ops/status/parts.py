"""The parts of a run's status document: typed, frozen values, as `--json` prints them and the screens show them.

The fields are the keys of docs/status-json.md, in their order; one underscore at the end of a name keeps it off a
Python name and is no part of the key. None means unknown, or that there is none. Durations are seconds, moments
`Instant`. They are tuples with names, as these cost a sixth of a frozen dataclass to define.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

from tr11ops.base.glyphs import means

COURSE_POINTS = 40  # of a course of losses


class Instant(float):
    """A point of time in seconds since the epoch; ISO 8601 in JSON."""

    @classmethod
    def of(cls, time: float | None) -> Self | None:
        """None for a time that is not known."""
        return None if time is None else cls(time)


class RunName(NamedTuple):
    """Which run was looked at."""

    name: str
    variant: str
    directory: str | None = None
    nodes_wanted: int | None = None


class CardWishes(NamedTuple):
    """What the run card asks for around the training. `name` is the card as it was typed; "" for the folder's own."""

    name: str = ""
    copies: tuple[str, ...] = ()  # "backup", "sync"
    filesystems: tuple[str, ...] = ()  # that are watched


class Need(NamedTuple):
    """What is missing before a person may sleep. `kind` is a key of NEEDS; `fix` is a command, or what to set."""

    kind: str
    text: str
    fix: str


class ShownJob(NamedTuple):
    """One job, or one task of an array; the waiting tasks of an array are one, `tasks` of them."""

    id_: str
    raw_id: str
    state: str
    reason: str | None
    nodes: tuple[str, ...]
    node_count: int
    tasks: int
    start: Instant | None
    end: Instant | None
    time_limit_seconds: float | None
    exit_code: int | None
    derived_exit_code: int | None
    user: str = ""  # whose job it is: who alone may change it at the scheduler


class NodeUse(NamedTuple):
    """How many nodes the run holds: those that the launch trains on, spares, and how many it must not use."""

    used: int
    spare: int
    excluded: int | None


class ShownSpeed(NamedTuple):
    """The median of the recent steps against the best that the run kept up, in `unit`."""

    current: float
    best: float | None
    percent: float | None
    unit: str


class Finish(NamedTuple):
    """The range of the training's end; `useful_share` (0..1) of the last `window_seconds` went into steps."""

    earliest: Instant | None
    likely: Instant | None
    earliest_seconds: float
    likely_seconds: float | None = None
    window_seconds: float | None = None
    useful_share: float | None = None


class ShownEnd(NamedTuple):
    """What the trainer wrote of its own end."""

    reason: str
    iteration: int
    checkpoint_step: int | None
    restart: bool
    message: str
    time: Instant


class ShownCode(NamedTuple):
    """The checkout that an attempt's code lay in; see `tr11ops.rundir.software.CodeIdentity`."""

    commit: str | None
    branch: str | None
    folder: str | None
    changed_files: int
    digest: str | None
    patch: str | None
    why: str | None
    text: str


class ShownAttempt(NamedTuple):
    """One attempt. `how` it ended is None while it may still run; `changed`: of its end, or its last sign."""

    id_: str
    raw_id: str
    start: Instant | None
    changes: tuple[str, ...]
    end_marker: ShownEnd | None
    changed: Instant
    how: str | None
    is_bad: bool
    code: ShownCode | None = None
    versions: Mapping[str, str] | None = None
    is_told: bool = True  # when it ended; else `changed` is its last word


class ShownCheckpoint(NamedTuple):
    """The newest whole checkpoint; `count_` checkpoint folders are there in all."""

    step: int
    age_seconds: float | None
    verified: str | None
    bytes: int | None
    latest: int | None
    count_: int | None


class ShownOrigin(NamedTuple):
    """The checkpoint of another run that this one began with; `run` is NAME/VARIANT, None where it is of no run.

    `before`: what that run had begun with, in words, nearest first.
    """

    run: str | None
    step: int
    folder: str
    weights_alone: bool
    counters_from_zero: bool
    time: Instant
    before: tuple[str, ...]
    text: str


class NextSave(NamedTuple):
    """The next save that is due; `iterations` away where no pace is known yet."""

    step: int | None
    seconds: float | None
    due: Instant | None
    why: str
    iterations: int | None


class LastCopy(NamedTuple):
    """The last success of a backup or of a copy of the logs; `message` says what fails since."""

    time: Instant
    age_seconds: float
    step: int | None
    message: str | None


class Copying(NamedTuple):
    """Someone copies now: to an archive of the card, or to the hub (`to` is "sync")."""

    to: str
    who: str
    host: str
    since: Instant
    step: int | None


class ShownDrill(NamedTuple):
    """The last restore that was tried."""

    time: Instant
    age_seconds: float
    archive: str
    step: int
    passed: bool
    message: str | None


class StopFile(NamedTuple):
    """A file that stops the run, and who made it; it is there where `set_`."""

    set_: bool
    path: str
    who: str | None
    time: Instant | None
    why: str | None


class ShownHold(NamedTuple):
    """Queued work that tr11 holds."""

    job: str
    who: str | None
    time: Instant | None
    why: str | None


class ShownExclusion(NamedTuple):
    """A node that must not be used. `state`: exclude; avoid, while enough others are free; suspect, for one task."""

    node: str
    why: str
    owner: str
    until: Instant | None
    state: str = "exclude"


class LeavingNode(NamedTuple):
    """A node that the run works on and that the site takes away when its job ends. `why`: the site's reason."""

    node: str
    states: tuple[str, ...]
    why: str


class ShownFinding(NamedTuple):
    """A fault that this look found. `severity`: "info", "warning", "critical"; `runbook`: a page of `runbooks/`.

    `then`: what lets the run go on once `fix` has helped. `fingerprint` names its incident, as alerts do, and
    `follows_from` that of its first cause, where it has one in this look.
    """

    detector: str
    severity: str
    title: str
    subject: str
    evidence: tuple[str, ...]
    fix: str | None
    runbook: str | None
    then: tuple[str, ...] = ()
    fingerprint: str | None = None
    follows_from: str | None = None


class ShownAlert(NamedTuple):
    """An open alert, and who has it."""

    fingerprint: str
    detector: str
    subject: str
    severity: str
    title: str
    since: Instant
    owner: str | None
    acknowledged_by: str | None
    snoozed_until: Instant | None
    runbook: str | None
    watchdog: str | None = None


class ShownPeriodicJob(NamedTuple):
    """The last round of a periodic job. `late`: a round was left out; `wanted`: the card asks for the job."""

    name: str
    way: str
    host: str
    started: Instant
    ended: Instant | None
    exit_code: int | None
    message: str | None
    interval_seconds: float
    next_due: Instant
    late: bool
    failures_in_a_row: int
    wanted: bool


class ShownChain(NamedTuple):
    """The next link of a chain of periodic Slurm jobs."""

    name: str
    job_id: str
    next_due: Instant


class ShownFilesystem(NamedTuple):
    """The newest look at a file system. It counts as full from `bytes_bound_percent`, `inodes_bound_percent` on."""

    name: str
    source: str
    path: str | None
    time: Instant
    bytes_percent: float | None
    inodes_percent: float | None
    bytes_free: float | None
    full_at: Instant | None
    bytes_bound_percent: float
    inodes_bound_percent: float


class LossCourse(NamedTuple):
    """The loss of the last `steps` steps in at most COURSE_POINTS `means`; None where no loss was a number."""

    steps: int
    means: tuple[float | None, ...]

    @classmethod
    def of(cls, losses: dict[int, float]) -> LossCourse | None:
        """Of losses by iteration, the oldest first; None where there is none."""
        values = list(losses.values())
        return cls(len(values), tuple(means(values, min(COURSE_POINTS, len(values))))) if values else None


class DoneAgain(NamedTuple):
    """What a starting training does again: `iterations` behind its checkpoint of step `from_step` were lost."""

    from_step: int
    iterations: int


class ShownRelaunch(NamedTuple):
    """A running attempt has started its workers again: `launch` runs, the one before `ended`, and why."""

    job: str
    launch: int
    ended: Instant
    why: str | None
    decision: str | None
