"""Files that the run needs have not been touched for so long that the site will delete them soon."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from tr11ops.base.observed import known
from tr11ops.base.units import counted, duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "75 % of `watch.scratch_purge_days`; 90 %"
SEVERITIES = "WARNING, CRITICAL"
NAME = "purge-near"
NEEDS = ("operation.least_used",)

WARN_SHARE = 0.75  # of watch.scratch_purge_days: of 30 days, a week is left
CRITICAL_SHARE = 0.9


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING when three quarters of watch.scratch_purge_days are over, CRITICAL from nine tenths
    on; one a kind.

    Looks at the newest checkpoint and at the datasets. A run that trains reads its data and saves:
    it is silent then.
    """
    days = snapshot.run.watch.scratch_purge_days
    if days is None:
        return
    for entry in known(snapshot.operation.least_used, ()):
        age = snapshot.time - entry.time
        left = days * derived.DAY - age
        if age <= WARN_SHARE * days * derived.DAY:
            continue
        if left > 0:
            when = f"may be purged in {duration(left)}"
        else:
            when = "may be purged at any moment"
        yield Finding(
            NAME,
            Severity.CRITICAL if age >= CRITICAL_SHARE * days * derived.DAY else Severity.WARNING,
            f"{entry.what} {when}",
            subject=entry.what,
            identity=(entry.what,),
            evidence=(
                f"{entry.path}: untouched for {duration(age)}; the site deletes after {counted(days, 'day')}",
            ),
            fix=f"find {shlex.quote(str(_folder_of(snapshot, Path(entry.path))))} -type f -exec touch -a -c {{}} +",
        )


def _folder_of(snapshot: Snapshot, path: Path) -> Path:
    """What is read again at once: of the run's own files the whole folder that they are in, else
    the file's.
    """
    root = snapshot.run.directory
    if path.is_relative_to(root):
        return root / path.relative_to(root).parts[0]
    return path.parent
