"""How a run goes on without a node that it holds, shared by the detectors of such nodes. Pure."""

from __future__ import annotations

import shlex

from tr11ops.base.observed import known
from tr11ops.base.units import counted
from tr11ops.detect.nodes_left import (
    excluded_nodes,
    exclusion_limit,
    fewer_spares,
    needed_queued,
    usable_nodes,
)
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot


def exclude_command(snapshot: Snapshot, node: str, reason: str) -> str:
    """The command that excludes a node for a reason: with `--force` where it would be refused for
    the limit.
    """
    limit = exclusion_limit(snapshot)
    force = ""
    if limit is not None and limit.forbids([node], excluded_nodes(snapshot)):
        force = " --force"
    return derived.command(snapshot, f"nodes exclude {node}{force} --reason {shlex.quote(reason)}")


def start_again(snapshot: Snapshot, node: str) -> tuple[str, ...]:
    """What lets the run leave an excluded node: it saves, ends and starts again; nothing where no
    job holds it.

    Where an attempt does not find all its spares without the node, what is queued is queued with
    fewer before.
    """
    if not any(node in job.nodes for job in snapshot.active_jobs):
        return ()
    reason = shlex.quote(f"to go on without {node}")
    stop = derived.command(snapshot, f"kill --wait --reason {reason}")
    spares = _spares_without(snapshot, node)
    if not spares:
        return stop, *derived.go_on(snapshot)
    if snapshot.pending_jobs:
        return (
            derived.command(snapshot, f"launch --replace {spares}"),
            stop,
            *derived.go_on(snapshot),
        )
    return stop, *(
        f"{line} {spares}" if "launch" in line.split() else line for line in derived.go_on(snapshot)
    )


def why_no_other(snapshot: Snapshot, node: str) -> str:
    """Why no attempt can train without this node; "" where one can, or where that is not known."""
    left, training = _left_without(snapshot, node), snapshot.run.nodes
    if left is None or training is None or left >= training:
        return ""
    are = counted(left, "other node", "other nodes")
    return f"no other node is free: {are} can be used, an attempt trains on {training}; it stays so until one is"


def _left_without(snapshot: Snapshot, node: str) -> int | None:
    """How many nodes can be used beside this one; None where that is not known."""
    usable = usable_nodes(snapshot)
    if usable is None:
        return None
    own = next((one for one in known(snapshot.nodes, ()) if one.name == node), None)
    is_counted = own is not None and own.is_usable and node not in excluded_nodes(snapshot)
    return usable - is_counted


def _spares_without(snapshot: Snapshot, node: str) -> str:
    """The option for an attempt with the spares that are left without this node; "" where all are,
    or none fits.
    """
    left, needed = _left_without(snapshot, node), needed_queued(snapshot)
    if left is None or needed is None or left >= needed:
        return ""
    return fewer_spares(snapshot, left)
