"""How many nodes a run may still use. Pure functions over a Snapshot, shared by detectors."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence

from tr11ops.base.observed import Unknown, known
from tr11ops.base.units import counted
from tr11ops.cluster.base import Job, JobState, Node, is_loss_alone
from tr11ops.cluster.pending_reasons import Cause, is_held, reason_of_job, with_room
from tr11ops.detect.detector import HELD_FOR_FAULT
from tr11ops.observe import derived
from tr11ops.observe.jobs import standing_holds
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.exclusion import (
    Exclusion,
    ExclusionLimit,
    partition_nodes,
    partitions_of,
    refused_exclusions,
    way_past,
)
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER
from tr11ops.rundir.hold_store import tells_of_lost_directory

TO_BE_REBOOTED = "reboot_requested"  # such a node may get work again, once it is back
NOTE = "note.txt"  # as the runbook's page calls it
MEANT_SECONDS = 86_400.0  # so long what a person excluded is what that person wants


def partition_of(snapshot: Snapshot) -> str:
    """The partition that the run uses: that of what is queued, else the card's, else that of its
    other jobs; "" where none says.
    """
    queued = partitions_of(with_room(snapshot.pending_jobs, known(snapshot.nodes, ())))
    named = [job.partition for job in known(snapshot.jobs, ()) if job.partition]
    return queued or snapshot.run.partition or (named[0] if named else "")


def nodes_of_partition(snapshot: Snapshot, partition: str) -> tuple[Node, ...]:
    """The nodes of a partition; all nodes where it is not known, or where no node tells its
    partitions.
    """
    return partition_nodes(known(snapshot.nodes, ()), partition)


def needed_nodes(snapshot: Snapshot) -> int | None:
    """Without how many nodes no attempt starts, by the card; None where that does not say it."""
    run = snapshot.run
    return run.least_nodes or run.allocated_nodes or run.nodes


def needed_next(snapshot: Snapshot) -> int | None:
    """What the next attempt asks for: what is queued may be of another shape than the card is now.

    Of several jobs it is the one that asks for least, for it starts first; not one that waits for
    another of them.
    """
    queued = derived.startable_jobs(snapshot) or with_room(
        snapshot.pending_jobs, known(snapshot.nodes, ())
    )
    asked = [job.node_count for job in derived.first_in_line(queued) if job.node_count]
    if asked:
        return min(asked)
    return needed_nodes(snapshot)


def needed_queued(snapshot: Snapshot) -> int | None:
    """The most that anything queued asks for; else what the card does."""
    queued = with_room(snapshot.pending_jobs, known(snapshot.nodes, ()))
    return max((job.node_count for job in queued), default=needed_nodes(snapshot))


def held_nodes(snapshot: Snapshot) -> frozenset[str]:
    """The nodes of the run's jobs that run."""
    return frozenset(node for job in snapshot.active_jobs for node in job.nodes)


def training_count(snapshot: Snapshot) -> int | None:
    """On how many nodes the running attempt trains: those of its newest launch, else as its card
    says; None where neither is known.
    """
    launched = known(snapshot.training.launch_nodes, None)
    if launched is not None:
        return len(launched)
    return snapshot.run.trains_on or snapshot.run.nodes


def spare_nodes(snapshot: Snapshot) -> tuple[int, bool]:
    """How many nodes an attempt has beyond those that train, and whether that is the one that runs
    now.

    Of that one only nodes count that can still be used: neither gone, nor silent, nor excluded, nor
    found bad by one of its launches. Those that train and cannot be used any more take a spare each.
    """
    held = _nodes_of_attempt(snapshot)
    if not held:
        asked = snapshot.run.allocated_nodes or needed_nodes(snapshot) or 0
        return max(0, asked - (snapshot.run.nodes or 0)), False
    training = training_count(snapshot)
    if training is None:
        return 0, True
    return max(0, len(held - unusable_nodes(snapshot)) - training), True


def is_spare(snapshot: Snapshot, job: Job, node: str) -> bool:
    """Whether the newest launch of a job does without this node, and none before was lost by it."""
    newest = derived.last_attempt(snapshot)
    launched = known(snapshot.training.launch_nodes, None)
    if newest is None or launched is None or newest.job_id not in derived.identifiers(job):
        return False
    ends = known(snapshot.training.launch_ends, ())
    return node not in launched and not any(node in end.blamed for end in ends)


def _nodes_of_attempt(snapshot: Snapshot) -> frozenset[str]:
    """The nodes of the job that the newest attempt is of, else of the last one that runs: what another
    job of the run holds beside it is no spare. Empty where none runs, or it is leaving.
    """
    running = [job for job in snapshot.active_jobs if job.state is not JobState.COMPLETING]
    newest = derived.last_attempt(snapshot)
    for job in running:
        if newest is not None and newest.job_id in derived.identifiers(job):
            return frozenset(job.nodes)
    if running:
        return frozenset(running[-1].nodes)
    return frozenset()


def lost_nodes(snapshot: Snapshot) -> frozenset[str]:
    """The nodes that the scheduler gives to no one now, as they are gone or do not answer it."""
    return frozenset(
        node.name for node in known(snapshot.nodes, ()) if node.is_gone or node.is_silent
    )


def unusable_nodes(snapshot: Snapshot) -> frozenset[str]:
    """Nodes on which the running attempt starts no launch any more."""
    running = {job.raw_id for job in snapshot.active_jobs}
    blamed = {
        node
        for end in known(snapshot.training.launch_ends, ())
        if end.job_id in running
        for node in end.blamed
    }
    return excluded_nodes(snapshot) | bad_nodes(snapshot).keys() | lost_nodes(snapshot) | blamed


def what_may_be_lost(snapshot: Snapshot) -> str:
    """How many nodes an attempt goes on without, by its spares: the one that runs as it is now,
    else the next one.
    """
    spares, runs = spare_nodes(snapshot)
    usable, needed = usable_nodes(snapshot), needed_next(snapshot)
    if not runs and usable is not None and needed is not None and usable < needed:
        return "too few are left for an attempt"
    if not spares:
        return "the next bad node stops the run"
    if runs:
        return f"the attempt can lose {counted(spares, 'more node')}, and stops at the next"
    return f"an attempt can lose {counted(spares, 'node')}, and stops at the next"


def excluded_nodes(snapshot: Snapshot) -> frozenset[str]:
    """The names on the run's own list; without those that only a queued job excludes."""
    return frozenset(
        entry.node
        for entry in known(snapshot.exclusions, ())
        if entry.since is not None or entry.owner
    )


def excluded_in_partition(snapshot: Snapshot) -> list[str]:
    """Those that count for the cap, by name."""
    nodes = nodes_of_partition(snapshot, partition_of(snapshot))
    return sorted(excluded_nodes(snapshot).intersection(node.name for node in nodes))


def bad_nodes(snapshot: Snapshot) -> Mapping[str, str]:
    """Nodes that a recent launch found bad and that the cap keeps off the run's list, with why each
    is bad.

    Below the cap a node that is not on the list has been let back in; empty also where the cap is
    not known.
    """
    limit, excluded = exclusion_limit(snapshot), excluded_nodes(snapshot)
    if limit is None or isinstance(snapshot.exclusions, Unknown):
        return {}
    if limit.counted(excluded) < limit.most:
        return {}
    names = limit.names or frozenset()
    listed = {entry.node for entry in snapshot.exclusions}
    ends = known(snapshot.training.launch_ends, ())
    return {
        node: end.why
        for end in ends
        for node in end.blamed
        if node in names and node not in listed and blame_stands(snapshot, node, end.time, end.why)
    }


def let_in_since(snapshot: Snapshot, node: str, when: float, of_speed: bool = False) -> bool:
    """Whether a node was taken off the list since then; or `of_speed`: measured to be quick enough."""
    return any(
        one.node == node and one.time >= when and one.of_speed is of_speed
        for one in known(snapshot.readmissions, ())
    )


def blame_stands(snapshot: Snapshot, node: str, when: float, why: str) -> bool:
    """Whether what a launch that ended at `when` blamed a node for still holds.

    It does not where the node was taken off the list since, nor, where it was lost to the scheduler
    and no more is against it, once it answers again: the node is looked at now. False too where it
    is not known who was let in.
    """
    if isinstance(snapshot.readmissions, Unknown):
        return False
    if let_in_since(snapshot, node, when):
        return False
    now = snapshot.node(node)
    return not is_loss_alone(why) or now is None or now.is_gone or now.is_silent


def leaving_nodes(snapshot: Snapshot) -> tuple[Node, ...]:
    """Nodes on which the run works on, and that the site takes away when that work ends: drained,
    or to be rebooted.

    One that is gone, or silent, has a finding of its own.
    """
    used = {name for job in snapshot.active_jobs for name in job.nodes}
    return tuple(
        node
        for node in known(snapshot.nodes, ())
        if node.name in used
        and not (node.is_gone or node.is_silent or node.is_unknown)
        and (not node.is_usable or TO_BE_REBOOTED in node.states)
    )


def take_back(snapshot: Snapshot, nodes: Collection[str]) -> str:
    """The command that takes one of these back, which are excluded: of those that can come back
    now, the one that was excluded first; "" where none can. It is checked before, whether or not
    its time is over.
    """
    entries = [entry for entry in _listed(snapshot, nodes) if not _against_return(snapshot, entry)]
    first = min(entries, key=lambda entry: (entry.since or 0.0, entry.node), default=None)
    if first is None:
        return ""
    return derived.command(snapshot, f"nodes include {first.node}")


def cannot_return(snapshot: Snapshot, nodes: Collection[str]) -> tuple[str, ...]:
    """Which of these, which are excluded, cannot come back now, each with why, by name."""
    entries = sorted(_listed(snapshot, nodes), key=lambda entry: entry.node)
    against = [(entry.node, _against_return(snapshot, entry)) for entry in entries]
    return tuple(f"{node} {why}" for node, why in against if why)


def unusable_exclusions(snapshot: Snapshot, nodes: Collection[str]) -> tuple[str, ...]:
    """Which of these, which tr11 has excluded or a person has a day ago or longer, the scheduler
    cannot use now.
    """
    entries = [entry for entry in _listed(snapshot, nodes) if not is_meant(snapshot, entry)]
    return tuple(sorted(entry.node for entry in entries if _against_return(snapshot, entry)))


def note_for_site(snapshot: Snapshot, nodes: Collection[str]) -> str:
    """The command that writes what the site has to repair of these, which are excluded; "" where all
    of them are because someone wants it so.
    """
    if not unusable_exclusions(snapshot, nodes):
        return ""
    return derived.command(snapshot, f"nodes list --excluded --report {NOTE}")


def is_meant(snapshot: Snapshot, entry: Exclusion) -> bool:
    """Whether a person excluded it within the last day: no one is told to take back what was just
    done on purpose.
    """
    is_by_person = entry.owner not in {"", AUTOMATIC_OWNER}
    return is_by_person and entry.since is not None and snapshot.time - entry.since < MEANT_SECONDS


def is_last_meant(snapshot: Snapshot, nodes: Collection[str]) -> bool:
    """Whether the last of these was excluded by a person within the last day: `tr11 nodes exclude` said
    how many more may be, or that the limit is passed.
    """
    entries = sorted(_listed(snapshot, nodes), key=lambda entry: entry.since or 0.0)
    return bool(entries) and is_meant(snapshot, entries[-1])


def _listed(snapshot: Snapshot, nodes: Collection[str]) -> list[Exclusion]:
    return [entry for entry in known(snapshot.exclusions, ()) if entry.node in nodes]


def _against_return(snapshot: Snapshot, entry: Exclusion) -> str:
    """Why an excluded node is not to be taken back now, behind its name; "" where nothing is known
    against it.
    """
    if is_meant(snapshot, entry):
        return f"was excluded by {entry.owner} within the last day"
    node = snapshot.node(entry.node)
    if node is None:
        return "is not known to the scheduler"
    if node.is_silent:
        return "does not answer the scheduler"
    if not node.is_usable:
        return f"is {'+'.join(sorted(node.states))}"
    return ""


def usable_nodes(snapshot: Snapshot, partition: str = "") -> int | None:
    """Nodes that the scheduler may use, now or when their present work ends, and that neither the
    run nor its card excludes.

    `partition`: in which to look, "" for the run's. None where nodes or exclusions are unknown.
    """
    names = _usable_names(snapshot, partition or partition_of(snapshot))
    if names is None:
        return None
    return len(names)


def _usable_names(snapshot: Snapshot, partition: str) -> frozenset[str] | None:
    if isinstance(snapshot.exclusions, Unknown) or not known(snapshot.nodes, ()):
        return None
    excluded = snapshot.run.excluded_nodes.union(entry.node for entry in snapshot.exclusions)
    nodes = nodes_of_partition(snapshot, partition)
    return frozenset(node.name for node in nodes if node.is_usable) - excluded


def fewer_spares(snapshot: Snapshot, usable: int | None) -> str:
    """The option for an attempt with as many spares as `usable` nodes leave; "" where those that
    train do not fit, or where that is not known.
    """
    training = snapshot.run.nodes
    if usable is None or training is None or training > usable:
        return ""
    return f"--set slurm.spare_nodes={usable - training}"


def exclusion_limit(snapshot: Snapshot) -> ExclusionLimit | None:
    """How many nodes may be excluded; None where that cannot be told."""
    needed = needed_nodes(snapshot)
    if isinstance(snapshot.nodes, Unknown) or not snapshot.nodes or needed is None:
        return None
    return ExclusionLimit.of_run(
        snapshot.nodes,
        snapshot.pending_jobs,
        partitions=(partition_of(snapshot),),
        excluded=snapshot.run.excluded_nodes,
        allocated=needed,
        percent=snapshot.run.resilience.exclusion_cap_percent,
    )


def exclude_command(snapshot: Snapshot, node: str, reason: str) -> str:
    """The command that excludes a node for a reason: with `--force` where it would be refused for
    the limit. Of one that is excluded already, and is used still, what comes next: the first step of
    `start_again`.
    """
    if node in excluded_nodes(snapshot):
        for step in start_again(snapshot, node):
            return step
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
        return (derived.command(snapshot, derived.launch_again(snapshot)),)
    for hold in standing_holds(snapshot):
        return after_hold(snapshot, hold.why) or (release_of_ours(snapshot),)
    return start_of(snapshot, max(snapshot.pending_jobs, key=is_held))


def release_of_ours(snapshot: Snapshot) -> str:
    """What lets go on what tr11 holds: with the card as it is now where the trainer refused the last one,
    which it would refuse again.
    """
    refused = derived.was_refused(snapshot)
    return derived.command(snapshot, "launch --replace" if refused else "resume")


def start_of(snapshot: Snapshot, job: Job) -> tuple[str, ...]:
    """What lets a queued job start that does not by itself, and that tr11 does not hold, one command after
    another.

    `launch --repair` cancels what can never start, and launches it again with the same card: it leaves alone
    what waits for a person, and helps not where fewer nodes are left than the card asks for. For these
    `launch --replace` queues the card as it is now.
    """
    replace, cause = derived.command(snapshot, "launch --replace"), reason_of_job(job).cause
    if is_held(job):
        return (derived.scheduler_command(snapshot, "scontrol release", job),)
    if cause is Cause.UNKNOWN:
        return (derived.scheduler_command(snapshot, "scontrol show job", job),)
    if job.reason == "PartitionTimeLimit":
        # what it gives now: no launch passes before the card or the site is changed
        return f"scontrol show partition {job.partition}", replace
    if cause is not Cause.REQUEST:
        return (replace,)
    spares = ""
    if asks_too_many(snapshot, job):
        spares = fewer_spares(snapshot, usable_nodes(snapshot, job.partition))
    return (f"{replace} {spares}" if spares else derived.command(snapshot, "launch --repair"),)


def asks_too_many(snapshot: Snapshot, job: Job) -> bool:
    """Whether a queued job can never start because it asks for more nodes than can be used."""
    usable = usable_nodes(snapshot, job.partition)
    is_refused = job.reason.startswith("BadConstraints")
    return is_refused and usable is not None and job.node_count > usable


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
    return *without_bad_nodes(snapshot, left), *derived.train_on(snapshot)


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
    names = _usable_names(snapshot, partition_of(snapshot))
    if names is None:
        return None
    return len(names - {node})


def _spares_without(snapshot: Snapshot, node: str) -> str:
    """The option for an attempt with the spares that are left without this node; "" where all are,
    or none fits.
    """
    left, needed = _left_without(snapshot, node), needed_queued(snapshot)
    if left is None or needed is None or left >= needed:
        return ""
    return fewer_spares(snapshot, left)
