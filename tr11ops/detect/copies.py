"""What is copied away: backups, the mirror of the logs, and secrets in them."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known, seen
from tr11ops.base.units import duration, first_few
from tr11ops.detect.detector import Finding, Severity, detector
from tr11ops.observe import derived
from tr11ops.observe.observations import CopyStatus
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.copy_policy import ArchiveName, WantedCopy, wanted_copies

GRACE_ROUNDS = 1.5  # terabytes take hours, and one round may come late
CRITICAL_SECONDS = 7 * derived.DAY
NAMED = 5  # missing copies that the evidence lists
_ARCHIVES: tuple[ArchiveName, ...] = ("store", "url")


@detector(
    "backup-overdue",
    needs=("operation.backup", "checkpoints", "submissions", "steps"),
    bound="one and a half rounds, 36 hours at least, after it was trained; a week",
    severities="WARNING, CRITICAL",
)
def backup_overdue(snapshot: Snapshot) -> Iterator[Finding]:
    """A checkpoint that must be copied away was not: one lost file system, and months of training are
    gone.

    One finding for each archive that lags: WARNING after one round and a half, CRITICAL after a
    week.

    The clock begins when the first step that has no copy there was reached, but not before the
    first submission. A copy of which the step is not known counts for every step that was reached
    before it.
    """
    backup = seen(snapshot.operation.backup)
    missing = missing_copies(snapshot, backup)
    for archive in _ARCHIVES:
        lacking = [wanted for wanted in missing if wanted.archive == archive]
        late = max((late_by(snapshot, wanted.step) for wanted in lacking), default=0.0)
        if late > copy_grace(snapshot):
            yield Finding(
                backup_overdue.name,
                Severity.CRITICAL
                if late > max(CRITICAL_SECONDS, 2 * copy_grace(snapshot))
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


def copy_grace(snapshot: Snapshot) -> float:
    """How long a copy may be due before anyone hears of it, in seconds."""
    copies = snapshot.run.copies
    if copies is None:
        return derived.DAY * GRACE_ROUNDS
    return max(derived.DAY, 3600.0 * copies.interval_hours) * GRACE_ROUNDS


def missing_copies(snapshot: Snapshot, backup: CopyStatus | None) -> tuple[WantedCopy, ...]:
    """Copies that the card wants of checkpoints that are here, and that are not on record, by step."""
    policy = snapshot.run.copies
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


DAMAGED_NAMED = 10


@detector(
    "copy-damaged",
    needs=("operation.backup",),
    bound="at once",
    severities="WARNING, CRITICAL",
)
def copy_damaged(snapshot: Snapshot) -> Iterator[Finding]:
    """A copy of a checkpoint is not what was copied, or no one can go on from it: bytes at the
    destination rotted, someone changed them, or its numbers are NaN or infinite.

    CRITICAL as soon as a re-read found rot, until the copy is repaired: the other copies may go
    the same way. WARNING where whole bytes hold NaN or infinity, as a look at the numbers found,
    until the archive has a later sound copy.
    """
    backup = seen(snapshot.operation.backup)
    if backup is None or not (backup.damaged or backup.not_finite):
        return
    severity, command = Severity.CRITICAL, "backup run"
    bad, one, many = backup.damaged, "is damaged", "are damaged"
    if not bad:
        severity, command = Severity.WARNING, "checkpoints verify --all --values"
        bad, one, many = backup.not_finite, "holds NaN or infinity", "hold NaN or infinity"
    if len(bad) > 1:
        title = f"{len(bad)} copies of checkpoints {many}"
    else:
        title = f"a copy of a checkpoint {one}"
    lines = (*backup.damaged, *backup.not_finite)
    more = (f"and {len(lines) - DAMAGED_NAMED} more",) if len(lines) > DAMAGED_NAMED else ()
    yield Finding(
        copy_damaged.name,
        severity,
        title,
        evidence=(
            *lines[:DAMAGED_NAMED],
            *more,
            f"the last round ended {duration(max(0.0, snapshot.time - backup.time))} ago",
        ),
        fix=derived.command(snapshot, command),
    )


MISSED = 3.0  # intervals; the hub may be unreachable for one, and a job may wait for another
SHORTEST_SECONDS = derived.HOUR


@detector(
    "sync-overdue",
    needs=("operation.sync", "steps"),
    uses=("submissions",),
    bound="3 intervals and an hour",
    severities="WARNING",
)
def sync_overdue(snapshot: Snapshot) -> Iterator[Finding]:
    """The logs are not mirrored any more: anyone who watches from outside takes an old picture for the
    present.

    WARNING after three intervals and at least an hour without a success, if the run has logged a
    step since.

    Silent where the card names no repository. One that was never reached counts from the first
    submission.
    """
    interval, sync = snapshot.run.sync_seconds, seen(snapshot.operation.sync)
    if interval is None:
        return
    if sync is None:
        since = derived.first_submission(snapshot)
    else:
        since = sync.time
    logged = max(
        (step.time for step in seen(snapshot.steps) if step.time is not None), default=None
    )
    if since is None or logged is None or logged <= since:
        return
    late = snapshot.time - since
    if late <= max(SHORTEST_SECONDS, MISSED * interval):
        return
    if sync is None:
        title = f"the logs were never mirrored, {duration(late)} after the first submission"
    else:
        title = f"the logs were last mirrored {duration(late)} ago (every {duration(interval)} is asked for)"
    evidence = [f"last logged step {duration(snapshot.time - logged)} ago"]
    if sync is not None and sync.message:
        evidence.append(sync.message)
    yield Finding(
        sync_overdue.name,
        Severity.WARNING,
        title,
        evidence=tuple(evidence),
        fix=derived.command(snapshot, "sync"),
    )


@detector(
    "secret-in-log",
    needs=("operation.sync",),
    bound="at once, until `tr11 sync --revoked`",
    severities="WARNING",
)
def secret_in_log(snapshot: Snapshot) -> Iterator[Finding]:
    """The training printed a secret: anyone who reads the log has it. What was published is masked, the
    log here is not.

    WARNING, one for each file and kind of secret, until a person says that it is revoked.
    """
    sync = seen(snapshot.operation.sync)
    if sync is None:
        return
    for secret in sync.secrets:
        if secret.revoked is None:
            yield Finding(
                secret_in_log.name,
                Severity.WARNING,
                f"the training printed a secret: {secret.kind}",
                subject=secret.path,
                evidence=(
                    f"{secret}, found {duration(max(0.0, snapshot.time - secret.time))} ago",
                    "it is masked at the hub; everyone who reads the log here has it",
                ),
                fix=derived.command(snapshot, "sync --revoked"),
                identity=(secret.path, secret.kind),
            )
