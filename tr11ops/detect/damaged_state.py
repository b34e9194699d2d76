"""A state file of the run directory is damaged: what it said is missing, and nothing says so but
this.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once"
SEVERITIES = "WARNING"
NAME = "damaged-state"
NEEDS = ("damaged_files",)
MOST_NAMED = 3


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING, one for all files, as long as one is damaged."""
    damaged = snapshot.damaged_files
    if isinstance(damaged, Unknown) or not damaged:
        return
    damaged = tuple(sorted(damaged, key=lambda entry: entry.is_newer))
    more = ""
    if len(damaged) > 1:
        more = f" and {len(damaged) - 1} more"
    head = "a state file:" if damaged[0].is_newer else "a state file is damaged:"
    lines = [f"{entry.path} {entry.what}: {entry.without}" for entry in damaged[:MOST_NAMED]]
    is_moved = any(entry.is_set_aside for entry in damaged)
    yield Finding(
        NAME,
        Severity.WARNING,
        f"{head} {damaged[0].path} {damaged[0].what}{more}",
        evidence=tuple(lines),
        fix=derived.command(snapshot, "pulse --act --no-email") if is_moved else "",
    )
