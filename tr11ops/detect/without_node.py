"""How a run goes on without a node that it holds, shared by the detectors of such nodes. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tr11ops.base.units import counted
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.detect.attempts import last_launch
from tr11ops.detect.finding import HELD_FOR_FAULT
from tr11ops.detect.nodes_left import (
    bad_nodes,
    excluded_in_partition,
    excluded_nodes,
    exclusion_limit,
    fewer_spares,
    lost_nodes,
    needed_next,
    needed_queued,
    note_for_site,
    take_back,
    usable_nodes,
)
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.queue.held_jobs import standing_holds
from tr11ops.rundir.exclusion import refused_exclusions, way_past
from tr11ops.rundir.hold_store import tells_of_lost_directory


def exclude_command(snapshot: Snapshot, node: str, reason: str) -> str:
    """The command that excludes a node for a reason: with `--force` where it would be refused for
    the limit.
    """
    limit = exclusion_limit(snapshot)
    force = ""
    if limit is not None and limit.forbids([node], excluded_nodes(snapshot)):
        force = " --force"
    return derived.command(snapshot, f"nodes exclude {node}{force} --reason {shlex.quote(reason)}")


def start_next(snapshot: Snapshot) -> tuple[str, ...]:
    """The commands that start the run's next attempt, by what is queued now; none where one starts by
    itself, or where someone has stopped the run.
    """
    if derived.stop_of(snapshot) is not None or derived.startable_jobs(snapshot):
        return ()
    if not snapshot.pending_jobs:
        return (derived.command(snapshot, last_launch(snapshot)),)
    for hold in standing_holds(snapshot):
        return after_hold(snapshot, hold.why) or (derived.command(snapshot, "resume"),)
    for job in filter(is_held, snapshot.pending_jobs):
        return (derived.scheduler_command(snapshot, "scontrol release", job),)
    return (derived.command(snapshot, "launch --repair"),)


def after_hold(snapshot: Snapshot, why: str) -> tuple[str, ...]:
    """What lets queued work go on that is held because bad nodes could not be excluded, one command
    after another, as the nodes are now; or because an attempt did not see the run directory, which
    a look that knows of it sees. None where `why` it is held says something else.
    """
    if tells_of_lost_directory(why) and not snapshot.active_jobs:
        return derived.go_on(snapshot)
    refused = refused_exclusions(why)
    if not refused:
        return ()
    left = [node for node in refused if node not in excluded_nodes(snapshot)]
    return *without_bad_nodes(snapshot, left), derived.command(snapshot, "resume")


def fault_of_cap(snapshot: Snapshot) -> str:
    """The `fault` of findings about nodes that the cap leaves in use, or that an attempt lacks: that
    queued work is held because bad nodes could not be excluded; "" where none is.
    """
    if any(refused_exclusions(hold.why) for hold in standing_holds(snapshot)):
        return HELD_FOR_FAULT
    return ""


def without_bad_nodes(snapshot: Snapshot, bad: Sequence[str]) -> tuple[str, ...]:
    """The commands by which the next attempt does without these nodes, which are not excluded, though
    the cap is reached. One that is lost gets no work: it needs no exclusion.

    Where too few nodes are left without them, one that is excluded is taken back first, or, as none
    can come back, a bad one is looked at.
    """
    in_use = [node for node in bad if node not in lost_nodes(snapshot)]
    usable, needed = usable_nodes(snapshot), needed_next(snapshot)
    if usable is not None and needed is not None and usable - len(in_use) >= needed:
        return past_the_cap(snapshot, in_use)
    excluded = excluded_in_partition(snapshot)
    back = take_back(snapshot, excluded)
    if back:
        return back, *past_the_cap(snapshot, in_use)
    if in_use:
        return (derived.command(snapshot, f"nodes check {' '.join(in_use)}"),)
    return tuple(filter(None, [note_for_site(snapshot, excluded)]))


def past_the_cap(snapshot: Snapshot, nodes: Sequence[str]) -> tuple[str, ...]:
    """The command that excludes bad nodes whatever the cap says; none for no node."""
    if not nodes:
        return ()
    why = bad_nodes(snapshot).get(nodes[0], "") or "found bad"
    command = way_past(",".join(nodes)).removeprefix("tr11 ")
    return (derived.command(snapshot, command.replace("REASON", shlex.quote(why))),)


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
    own = snapshot.node(node)
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
