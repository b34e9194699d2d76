"""A copy of a checkpoint is not what was copied: bytes at the destination rotted, or someone
changed them.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown
from tr11ops.base.units import duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once"
SEVERITIES = "CRITICAL"
NAME = "copy-damaged"
NEEDS = ("operation.backup",)

NAMED = 10


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """CRITICAL as soon as a re-read found it, until the copy is repaired: the other copies may go
    the same way.
    """
    backup = snapshot.operation.backup
    if backup is None or isinstance(backup, Unknown) or not backup.damaged:
        return
    count = len(backup.damaged)
    more = (f"and {count - NAMED} more",) if count > NAMED else ()
    yield Finding(
        NAME,
        Severity.CRITICAL,
        f"{count} copies of checkpoints are damaged"
        if count > 1
        else "a copy of a checkpoint is damaged",
        evidence=(
            *backup.damaged[:NAMED],
            *more,
            f"the last round ended {duration(max(0.0, snapshot.time - backup.time))} ago",
        ),
        fix=derived.command(snapshot, "backup run"),
    )
