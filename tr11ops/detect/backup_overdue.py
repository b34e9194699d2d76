"""A checkpoint that must be copied away was not: one lost file system, and months of training are
gone.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration, first_few
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.operation import CopyStatus
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.copy_policy import ArchiveName, WantedCopy, wanted_copies

BOUND = "one and a half rounds, 36 hours at least, after it was trained; a week"
SEVERITIES = "WARNING, CRITICAL"
NAME = "backup-overdue"
NEEDS = ("operation.backup", "checkpoints", "submissions", "steps")

GRACE_ROUNDS = 1.5  # terabytes take hours, and one round may come late
CRITICAL_SECONDS = 7 * derived.DAY
NAMED = 5  # missing copies that the evidence lists
_ARCHIVES: tuple[ArchiveName, ...] = ("store", "url")


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """One finding for each archive that lags: WARNING after one round and a half, CRITICAL after a
    week.

    The clock begins when the first step that has no copy there was reached, but not before the
    first submission. A copy of which the step is not known counts for every step that was reached
    before it.
    """
    backup = snapshot.operation.backup
    if (
        isinstance(backup, Unknown)
        or isinstance(snapshot.submissions, Unknown)
        or isinstance(snapshot.steps, Unknown)
    ):
        return
    missing = missing_copies(snapshot, backup)
    for archive in _ARCHIVES:
        lacking = [wanted for wanted in missing if wanted.archive == archive]
        late = max((late_by(snapshot, wanted.step) for wanted in lacking), default=0.0)
        if late > grace(snapshot):
            yield Finding(
                NAME,
                Severity.CRITICAL
                if late > max(CRITICAL_SECONDS, 2 * grace(snapshot))
                else Severity.WARNING,
                f"step {lacking[-1].step} is not copied to the {archive}; copies are due for {duration(late)}",
                subject=archive,
                identity=(archive,),
                evidence=tuple(_evidence(snapshot, backup, lacking)),
                fix=derived.command(snapshot, "backup run"),
            )


def _evidence(
    snapshot: Snapshot, backup: CopyStatus | None, lacking: list[WantedCopy]
) -> Iterator[str]:
    if backup is None:
        yield "none was ever copied"
    else:
        if backup.step is None:
            step = ""
        else:
            step = f", of step {backup.step}"
        yield f"the last copy is {duration(snapshot.time - backup.time)} old{step}"
        if backup.message:
            yield backup.message
    yield "missing: " + first_few((f"{wanted.step} ({wanted.kind})" for wanted in lacking), NAMED)


def grace(snapshot: Snapshot) -> float:
    """How long a copy may be due before anyone hears of it, in seconds."""
    copies = snapshot.run.operation.copies
    if copies is None:
        return derived.DAY * GRACE_ROUNDS
    return max(derived.DAY, 3600.0 * copies.interval_hours) * GRACE_ROUNDS


def missing_copies(snapshot: Snapshot, backup: CopyStatus | None) -> tuple[WantedCopy, ...]:
    """Copies that the card wants of checkpoints that are here, and that are not on record, by step."""
    policy = snapshot.run.operation.copies
    if policy is None or isinstance(snapshot.checkpoints, Unknown):
        return ()
    copied = () if backup is None or backup.copied is None else backup.copied
    there = {(copy.archive, copy.kind, copy.step) for copy in copied}
    here = set(snapshot.checkpoints.steps)
    last = derived.total_iterations(snapshot) or max(here, default=0)
    wanted = wanted_copies(policy, sorted(here | {copy.step for copy in copied}), last)
    return tuple(
        copy
        for copy in wanted
        if copy.step in here and not _is_copied(snapshot, copy, backup, there)
    )


def _is_copied(
    snapshot: Snapshot,
    wanted: WantedCopy,
    backup: CopyStatus | None,
    there: set[tuple[str, str, int]],
) -> bool:
    if backup is None:
        return False
    if backup.copied is not None:  # a whole copy holds all that another would
        return any((wanted.archive, kind, wanted.step) in there for kind in {wanted.kind, "full"})
    if backup.step is not None:
        return wanted.step <= backup.step
    reached = reached_at(snapshot, wanted.step)
    return reached is None or backup.time >= reached


def late_by(snapshot: Snapshot, step: int) -> float:
    """For how long a step's copy is due, in seconds; 0.0 where it is not known when the step was
    reached.
    """
    since = [
        moment
        for moment in (derived.first_submission(snapshot), reached_at(snapshot, step))
        if moment is not None
    ]
    if since:
        return max(0.0, snapshot.time - max(since))
    return 0.0


def reached_at(snapshot: Snapshot, step: int) -> float | None:
    """About when a step was trained: its checkpoint's own time, else reckoned back from the last
    one at this pace.

    Waits and restarts in between make the truth earlier, so a copy is never called for too soon.
    """
    for checkpoint in snapshot.examined:
        if checkpoint.step == step and checkpoint.created is not None:
            return checkpoint.created
    steps, pace = known(snapshot.steps, ()), derived.seconds_per_iteration(snapshot)
    if not steps or steps[-1].time is None or pace is None:
        return None
    return steps[-1].time - max(0, steps[-1].record.iteration - step) * pace
