"""How a run goes on without a node that it holds, shared by the detectors of such nodes. Pure."""

from __future__ import annotations

import shlex

from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot


def exclude_command(snapshot: Snapshot, node: str, reason: str) -> str:
    """The command that excludes a node for a reason."""
    return derived.command(snapshot, f"nodes exclude {node} --reason {shlex.quote(reason)}")


def start_again(snapshot: Snapshot, node: str) -> tuple[str, ...]:
    """What lets the run leave an excluded node: it saves, ends and starts again; nothing where no job holds it."""
    if not any(node in job.nodes for job in snapshot.active_jobs):
        return ()
    reason = shlex.quote(f"to go on without {node}")
    return derived.command(snapshot, f"kill --wait --reason {reason}"), *derived.go_on(snapshot)
