"""When a run must not use a node: the record of one, the rule by which a node goes from innocent to
excluded and back, and how many may be. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Self

from msgspec.structs import replace

from tr11ops.base.errors import HostlistError
from tr11ops.base.units import counted, duration
from tr11ops.cluster.arrays import expand
from tr11ops.cluster.base import Job, Node
from tr11ops.cluster.pending_reasons import with_room
from trainer.contract.record import Finite, Record

# ---------------------------------------------------------------- how many
# One answer for the command, the watchdog, the detectors and the job.

DEFAULT_PERCENT = 10.0
KEY = "resilience.exclusion_cap_percent"


def most_exclusions(partition_nodes: int, needed_nodes: int, percent: float | None) -> int:
    """How many nodes of a partition may be excluded: a share of it (rounded up), and never into
    what a run needs.

    None: DEFAULT_PERCENT, or half of what the run leaves idle where that is more, but no more nodes
    than it needs.
    """
    idle = max(0, partition_nodes - needed_nodes)
    share = math.ceil(partition_nodes * (DEFAULT_PERCENT if percent is None else percent) / 100)
    if percent is None:
        share = max(share, min(math.ceil(idle / 2), needed_nodes))
    return min(share, idle)


def percent_for(partition_nodes: int, needed_nodes: int, count: int) -> int | None:
    """The least whole percentage that lets `count` nodes be excluded; None where a run needs the
    others.
    """
    if not 0 < count <= partition_nodes - needed_nodes:
        return None
    return min(100, (count - 1) * 100 // partition_nodes + 1)


def partition_nodes(nodes: Iterable[Node], *named: str | None) -> tuple[Node, ...]:
    """The nodes that count for a run: those of the first of these partitions that has any; all
    where none has.

    Who asks names those of the run's queued jobs first ("a,b": either), then the card's, then those
    of the run's other jobs, then the cluster's default one, as far as each is known.
    """
    every = tuple(nodes)
    for name in filter(None, named):
        wanted = set(name.split(","))
        found = tuple(node for node in every if wanted & set(node.partitions))
        if found:
            return found
    return every


def partitions_of(jobs: Iterable[Job]) -> str:
    """The partitions of these jobs as one name for `partition_nodes`; "" where none says its own."""
    return ",".join(sorted({job.partition for job in jobs if job.partition}))


class ExclusionLimit(Record):
    """The limit of one run at one moment. `names`: the nodes that count, None where they are not
    known (all count).
    """

    most: int
    names: frozenset[str] | None = None
    needed: int = 0

    @classmethod
    def of(cls, partition: Collection[str], needed: int, percent: float | None) -> Self:
        """For these nodes (see `partition_nodes`). What is excluded outside of them, or is gone,
        does not count.

        `needed` are the nodes of one attempt, spares included; `percent` is the card's KEY.
        """
        return cls(most_exclusions(len(partition), needed, percent), frozenset(partition), needed)

    @classmethod
    def of_run(
        cls,
        nodes: Iterable[Node],
        jobs: Iterable[Job],
        *,
        partitions: Iterable[str | None],
        excluded: Collection[str],
        allocated: int,
        percent: float | None,
    ) -> Self:
        """For a run as it is now: its queued `jobs` say how many nodes an attempt needs, and where.

        Where none is queued it is the card that says it: `allocated` nodes, in the first of
        `partitions`. Those that the card `excluded` serve no attempt, and do not count.
        """
        every = tuple(nodes)
        queued = with_room(jobs, every)
        counting = partition_nodes(every, partitions_of(queued), *partitions)
        needed = max((job.node_count for job in queued), default=allocated)
        names = frozenset(node.name for node in counting).difference(excluded)
        return cls.of(names, needed, percent)

    def counted(self, excluded: Iterable[str]) -> int:
        """How many of these count."""
        names = set(excluded)
        return len(names if self.names is None else names & self.names)

    def left(self, excluded: Iterable[str]) -> int:
        """How many more may be excluded beside these."""
        return max(0, self.most - self.counted(excluded))

    def forbids(self, nodes: Iterable[str], excluded: Iterable[str]) -> bool:
        """Whether these would be too many beside those that are excluded; one that is excluded
        already may stay.
        """
        before = frozenset(excluded)
        total = self.counted(before.union(nodes))
        return total > max(self.most, self.counted(before))

    def __str__(self) -> str:
        if self.names is None:
            return f"{self.most} may be excluded while it is not known how many nodes there are"
        of = f"of the partition's {counted(len(self.names), 'node')} at most {self.most} may be excluded"
        return f"{of}, for an attempt needs {self.needed} ({KEY})"


def way_past(node: str) -> str:
    """The command with which a person excludes a node all the same."""
    return f"tr11 nodes exclude {node} --force --reason REASON"


NOT_EXCLUDABLE = " cannot be excluded: "  # in a hold's reason, behind the host list of bad nodes


def refused_exclusions(why: str) -> tuple[str, ...]:
    """The bad nodes for which queued work is held, by the hold's reason, because they could not be
    excluded; none where it is held for something else.
    """
    names, found, _ = why.partition(NOT_EXCLUDABLE)
    try:
        if found:
            return expand(names)
        return ()
    except HostlistError:
        return ()


HANG = "hang"  # the family of hangs that were ended from outside


class NodeStanding(StrEnum):
    """How far a node has gone from suspicion to exclusion (see `tr11ops.rundir.exclusion`)."""

    RETURNED = "returned"  # taken off the list: trusted again once it has trained well
    SUSPECT = "suspect"  # after one attribution
    AVOID = "avoid"  # after two independent ones: not used while enough others are free
    EXCLUDE = "exclude"  # after a third of the same family, by proof, or by a person


class Exclusion(Record):
    """One node that must not be used: by the run's own list, or by a queued job's exclude list.

    `until` is when it is due for a check (None: never); `evidence` quotes what was seen, `job_id`
    the attempt in which. `state`: a NodeStanding. A suspect on the list is left out for one try.
    `fault`: the family of faults that it was suspected for, "" where it is of another kind.
    `good_seconds`: how long it has trained well since. `out`: when the site was first seen to have
    the excluded node out of service; `returns`: how often it has come back since for a repair alone.
    """

    node: str
    why: str = ""
    owner: str = ""
    until: Finite | None = None
    evidence: tuple[str, ...] = ()
    since: Finite | None = None
    job_id: str = ""
    state: str = NodeStanding.EXCLUDE.value
    fault: str = ""
    good_seconds: Finite = 0.0
    out: Finite | None = None
    returns: int = 0


# ---------------------------------------------------------------- standing
# innocent -> suspect: one attribution. -> avoid: a second one that is independent, or another run's
# word and one of our own. -> exclude: a third of the same family. Proof excludes at once, and is none
# of this module's business. A broad set of suspects makes suspects and no more. Good training on a
# node takes it one step back.

GOOD_SECONDS = 86_400.0  # of good training: 22 % of repaired nodes fail again within a day
# of a launch's nodes: more suspects than that, and more than one, are a broad set
BROAD_SHARE = 0.25
_STEPS = (NodeStanding.SUSPECT, NodeStanding.AVOID, NodeStanding.EXCLUDE)
# how many attributions another run's word stands for, and the run's own record beside its
# suspicions in a row
_ELSEWHERE = {
    NodeStanding.RETURNED: 0,
    NodeStanding.SUSPECT: 1,
    NodeStanding.AVOID: 2,
    NodeStanding.EXCLUDE: 2,
}
_OWN = {
    NodeStanding.RETURNED: 1,
    NodeStanding.SUSPECT: 0,
    NodeStanding.AVOID: 2,
    NodeStanding.EXCLUDE: 2,
}


def family(fault: str) -> str:
    """A fault without the rank that had it: two of one family may be the same broken part."""
    return re.sub(r" at (\d+|several|none)$", "", fault)


def is_broad(suspects: int, nodes: int) -> bool:
    """Whether so many suspects among the nodes of a launch tell nothing of any one of them."""
    return suspects > 1 and suspects > nodes * BROAD_SHARE


def after_attribution(
    fault: str,
    in_a_row: Sequence[str],
    own: Exclusion | None,
    others: Iterable[Exclusion],
    of_broad_set: bool = False,
) -> NodeStanding:
    """How a node stands after one more attribution of `fault`, by no proof.

    `in_a_row`: faults of the suspicions of this run just before it, which all were of this node.
    `own`: what the run has on record of it, `others` what other runs have: a suspicion each, of
    which none is proof here.
    """
    before = len(in_a_row)
    faults = [family(one) for one in in_a_row]
    if own is not None and _OWN[NodeStanding(own.state)]:
        before = max(before, _OWN[NodeStanding(own.state)])
        faults += [own.fault] if own.fault else []
    for one in others:
        before += _ELSEWHERE[NodeStanding(one.state)]
        faults += [one.fault] if one.fault else []
    if of_broad_set:
        before = 0
    step = _STEPS[min(before, len(_STEPS) - 1)]
    is_one_family = all(one == family(fault) for one in faults)
    if step is NodeStanding.EXCLUDE and not is_one_family:
        step = NodeStanding.AVOID
    return step


def after_good_use(entry: Exclusion, seconds: float) -> Exclusion | None:
    """What remains on record of a node after so much more good training on it; None: nothing. An
    exclusion stays.
    """
    if entry.state == NodeStanding.EXCLUDE:
        return entry
    trained = entry.good_seconds + seconds
    if trained < GOOD_SECONDS:
        return replace(entry, good_seconds=trained)
    if entry.state == NodeStanding.AVOID:
        return replace(entry, state=NodeStanding.SUSPECT.value, good_seconds=0.0, until=None)
    return None


def what_comes_next(entry: Exclusion) -> str:
    """What makes a node's standing worse or better, in one line."""
    left = duration(GOOD_SECONDS - entry.good_seconds)
    words = {
        NodeStanding.RETURNED: f"used as a spare first; one more fault: avoid; {left} of good training: trusted again",
        NodeStanding.SUSPECT: f"used after the others; one more fault: avoid; {left} of good training: cleared",
        NodeStanding.AVOID: f"not used while enough others are free; one more of this kind: exclude; {left} of good "
        "training: a suspect again",
        NodeStanding.EXCLUDE: "not used; a check that it passes gives it back",
    }
    return words[NodeStanding(entry.state)]


def kept_off(state: str | None) -> str:
    """What is done with a node on the list, in a word or a few."""
    words = {
        NodeStanding.AVOID.value: "avoided",
        NodeStanding.SUSPECT.value: "left out for one task",
    }
    return words.get(state or "", "excluded")


def is_trial(entry: Exclusion) -> bool:
    """Whether a node on the list is a suspect that one task runs without, to tell whether it is at
    fault.
    """
    return entry.state == NodeStanding.SUSPECT and entry.fault != HANG


def is_left_out_once(entry: Exclusion) -> bool:
    """Whether a node on the list is one that held a hang up, and that the next start alone is kept
    off: that this one trains proves nothing, for most hangs come late.
    """
    return entry.state == NodeStanding.SUSPECT and entry.fault == HANG
