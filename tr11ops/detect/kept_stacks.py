"""What the stacks that were kept of a hang say of it, for the detectors of hangs. Pure."""

from __future__ import annotations

from tr11ops.base.observed import known
from tr11ops.cluster.base import Job
from tr11ops.detect.without_node import exclude_command
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.kept_stacks import KeptStacks

HANGING = frozenset({"hung", "stalled"})  # detectors of jobs whose workers' stacks say why


def stacks_since(snapshot: Snapshot, job: Job, moment: float | None) -> KeptStacks | None:
    """The stacks of this job that were taken after a moment; None where there are none: older ones
    are of another hang.
    """
    names = derived.identifiers(job)
    found = [one for one in known(snapshot.training.stacks, ()) if one.job_id in names]
    return next((one for one in found if moment is not None and one.time >= moment), None)


def culprit(kept: KeptStacks | None) -> str:
    """Who holds the others up, in a few words: `rank 5 on node tw07 is stopped (SIGSTOP)`; "" where
    no rank does.
    """
    if kept is None or not kept.ranks:
        return ""
    return kept.sentence.partition(";")[0]


def names_culprit(kept: KeptStacks | None) -> bool:
    """Whether one look at the stacks is enough to say that the ranks of one node hold all others
    up.
    """
    return kept is not None and kept.is_certain and bool(kept.ranks) and len(kept.nodes) == 1


def way_out(snapshot: Snapshot, job: Job, kept: KeptStacks | None) -> tuple[str, ...]:
    """What to type, one command after another: a look while nothing was kept of the hang; to leave
    out the node that surely causes it; to end the job, which cannot save; to go on.
    """
    end = derived.command(snapshot, "kill --now --wait"), *derived.go_on(snapshot)
    if kept is None:
        return derived.command(snapshot, f"stacks --job {job.job_id}"), *end
    if not names_culprit(kept):
        return end
    return exclude_command(snapshot, kept.nodes[0], culprit(kept)), *end
