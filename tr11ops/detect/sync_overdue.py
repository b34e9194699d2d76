"""The logs are not mirrored any more: anyone who watches from outside takes an old picture for the
present.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "3 intervals and an hour"
SEVERITIES = "WARNING"
NAME = "sync-overdue"
NEEDS = ("operation.sync", "steps", "submissions")

MISSED = 3.0  # intervals; the hub may be unreachable for one, and a job may wait for another
SHORTEST_SECONDS = derived.HOUR


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING after three intervals and at least an hour without a success, if the run has logged a
    step since.

    Silent where the card names no repository. One that was never reached counts from the first
    submission.
    """
    interval, sync = snapshot.run.operation.sync_seconds, snapshot.operation.sync
    if interval is None or isinstance(sync, Unknown):
        return
    if sync is None:
        since = derived.first_submission(snapshot)
    else:
        since = sync.time
    logged = max(
        (step.time for step in known(snapshot.steps, ()) if step.time is not None), default=None
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
        NAME,
        Severity.WARNING,
        title,
        evidence=tuple(evidence),
        fix=derived.command(snapshot, "sync"),
    )
