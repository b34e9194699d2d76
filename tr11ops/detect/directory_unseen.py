"""The run directory that is seen here is not the one that the run's jobs were queued from: it is
not mounted.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tr11ops.base.observed import Unknown
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once"
SEVERITIES = "CRITICAL, WARNING while a job runs, which may see it on its own nodes"
NAME = "directory-unseen"
NEEDS = ("jobs",)


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """A job carries the directory's mark, and no launch is on record there: nothing that is read
    there is the run's.
    """
    if not snapshot.unmounted or isinstance(snapshot.jobs, Unknown):
        return
    yield Finding(
        NAME,
        Severity.WARNING if snapshot.active_jobs else Severity.CRITICAL,
        "the run directory is not mounted here: where the run stands is not known",
        evidence=(
            snapshot.unmounted,
            "a task that starts on a node without it ends at once and holds the rest; what is held stays held",
            "nothing was changed, and `tr11 launch` and `tr11 resume` refuse until it is there again",
        ),
        fix=f"findmnt --target {shlex.quote(str(snapshot.run.directory))}",
        then=(derived.command(snapshot, "pulse"),),
    )
