"""Is a fault the nodes' own, or does it follow the training from node to node? Judged over all
attempts of a run. Pure.

A launch names the node that its fault showed itself on. When the same fault shows itself at the
same place of the training on other nodes, the software or the data have it: the nodes are innocent,
also those that were excluded before. A node that was only suspected goes a step further each time
it is suspected again, and no other node was in between (`rundir.exclusion` has the steps).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec.structs import replace

from tr11ops.cluster.arrays import compress
from tr11ops.diagnose.attribution.evidence import Attribution, Kind, NodeReport
from tr11ops.diagnose.signature import FaultClass
from tr11ops.health.base import fails_everywhere
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.rundir.exclusion import GOOD_SECONDS, Exclusion, NodeStanding, family
from trainer.contract.record import Record

# ---------------------------------------------------------------------- checks that fail everywhere
# See `health.base`; judged over the launches of a run.
#
# Its nodes are innocent, those that were excluded before as well, and the launch goes without it.

SOFTWARE_OR_DATA = FaultClass.USER_CODE.words

_CONDEMNED = re.compile(r"\S+: health check (?P<check>.+?): ")


class FailingCheck(Record):
    """A check that fails everywhere: on these nodes, since (seconds since the epoch). `passed` it
    have few or none.
    """

    name: str
    nodes: tuple[str, ...]
    passed: tuple[str, ...]
    since: float

    def __str__(self) -> str:
        if self.passed:
            others = f", {compress(self.passed)} alone passed it"
        else:
            others = ", and none passed it"
        return f"health check {self.name} failed on {compress(self.nodes)}{others}"


def with_checks(launch: LaunchRecord, reports: Iterable[NodeReport]) -> LaunchRecord:
    """The launch with what its node agents say of the health checks."""
    told = [report for report in reports if report.bad_checks or report.passed_checks]
    failed: dict[str, list[str]] = {}
    for report in told:
        for name in report.names_of_bad_checks:
            failed.setdefault(name, []).append(report.node)
    passed = {
        name: [report.node for report in told if name in report.passed_checks] for name in failed
    }
    return replace(launch, checked=bool(told), failed_checks=failed, passed_checks=passed)


def failing_everywhere(
    last: LaunchRecord, before: Sequence[LaunchRecord]
) -> tuple[FailingCheck, ...]:
    """The checks of `last` that fail everywhere, with what earlier launches (`before`, newest
    first) saw of them.

    Of a node its newest answer counts. What was before a launch that passed the check says nothing:
    it was sound then.
    """
    judged = (_gathered(name, last, before) for name in last.failed_checks)
    return tuple(one for one in judged if fails_everywhere(one.nodes, one.passed))


def _gathered(name: str, last: LaunchRecord, before: Sequence[LaunchRecord]) -> FailingCheck:
    failed = set(last.failed_checks[name])
    passed = set(last.passed_checks.get(name, ()))
    since = last.start
    for one in before:
        if not one.checked or name in one.left_out_checks:
            continue
        if name not in one.failed_checks:
            break
        failed |= set(one.failed_checks[name]) - passed
        passed |= set(one.passed_checks.get(name, ())) - failed
        since = one.start
    return FailingCheck(name, tuple(sorted(failed)), tuple(sorted(passed)), since)


def all_failing_everywhere(launches: Sequence[LaunchRecord]) -> tuple[FailingCheck, ...]:
    """The checks that failed everywhere at the time of any of these launches (newest first)."""
    return tuple(
        found
        for place, last in enumerate(launches)
        for found in failing_everywhere(last, launches[place + 1 :])
    )


def acquitted(
    entries: Iterable[Exclusion], owner: str, checks: Sequence[FailingCheck]
) -> tuple[Exclusion, ...]:
    """The automatic exclusions that rest on these checks alone, made since they fail everywhere."""
    return tuple(
        entry
        for entry in entries
        if entry.owner == owner and rests_on(checks, entry.evidence, entry.since or 0.0)
    )


def rests_on(checks: Sequence[FailingCheck], evidence: Sequence[str], when: float) -> bool:
    """Whether all of this evidence against nodes, of that moment, is what checks said that failed
    everywhere then.
    """
    matches = [_CONDEMNED.match(line) for line in evidence]
    names = {match["check"] for match in matches if match is not None}
    failing = {check.name for check in checks if check.since <= when}
    return all(matches) and bool(names) and names <= failing


def condemning_checks(launch: LaunchRecord) -> tuple[str, ...]:
    """The health checks on which the blame of a launch rests; none where it rests on something
    else.
    """
    if not launch.evidence or _CONDEMNED.match(launch.evidence[0]) is None:
        return ()
    blamed = set(launch.blamed)
    return tuple(name for name, nodes in launch.failed_checks.items() if blamed & set(nodes))


NEAR = 1  # iterations: the step in which a rank dies is logged, or just not
# nodes; two may die alike side by side before a step is done, three hardly do
ENOUGH = 2
ENOUGH_BEFORE_A_STEP = 3
SURE = 0.9
ALMOST_SURE = 0.8
# rules that conclude from the workers' own first errors
ERRORS = frozenset({"error-everywhere", "error-unknown"})
# what a checkpoint that is whole and wrong may lead to
_MAY_BE_CHECKPOINTS = frozenset({Kind.UNKNOWN, Kind.NUMERICS, Kind.SOFTWARE})


class NodeFault(Record):
    """A launch whose fault showed itself on nodes, or on none. `fault` names what happened, and to
    which rank, free of hosts.

    `reached`: the last iteration that the launch logged, None where it logged none. `began_at`: the
    checkpoint that was the newest when it began, None where there was none. `is_suspicion`: the
    nodes were not blamed, only suspected.
    """

    job_id: str
    launch: int
    fault: str
    reached: int | None
    nodes: tuple[str, ...]
    summary: str = ""
    began_at: int | None = None
    is_suspicion: bool = False
    # the attempt's number as people type it, where it is another than the scheduler's own
    label: str = ""
    start: float = 0.0  # of the launch, seconds since the epoch
    may_be: tuple[str, ...] = ()  # nodes that may be at fault, also where the cause is unknown

    @classmethod
    def of(cls, job_id: str, launch: LaunchRecord, label: str = "") -> NodeFault:
        """The fault that ended a launch."""
        accused = launch.blamed or launch.suspects
        is_node = launch.cause == Kind.NODE
        nodes: tuple[str, ...] = ()
        if is_node:
            nodes = accused
        elif launch.cause == Kind.SOFTWARE:
            nodes = launch.suspects
        return cls(
            job_id,
            launch.launch,
            fault=launch.fault,
            reached=launch.reached,
            nodes=nodes,
            summary=launch.summary,
            began_at=launch.checkpoint_before,
            is_suspicion=is_node and not launch.blamed,
            label=label,
            start=launch.start,
            may_be=accused if launch.cause in {Kind.NODE, Kind.UNKNOWN} else (),
        )

    @property
    def place(self) -> str:
        """Which launch it was, for a person."""
        return f"attempt {self.label or self.job_id}, launch {self.launch}"


def is_everywhere(found: Attribution, nodes: Sequence[str]) -> bool:
    """Whether several nodes of one launch met one error, or most of them one death at once: no node
    that had it alone before is at fault.
    """
    if found.rule in ERRORS:
        return len(nodes) > 1 and not found.suspects and found.fault.endswith(" at several")
    if found.rule != "death-everywhere":
        return False
    return not found.suspects or 2 * len(found.suspects) > len(nodes)


def same_elsewhere(last: NodeFault, before: Iterable[NodeFault]) -> tuple[NodeFault, ...]:
    """The earlier faults that show that `last` is not its nodes' own, in the order given; empty
    where they do not.

    All are the same fault at the same iteration, each on other nodes than the others.
    """
    found: list[NodeFault] = []
    nodes = set(last.nodes)
    for one in before:
        is_same = bool(last.fault) and one.fault == last.fault and _is_near(one, last)
        if is_same and one.nodes and not nodes & set(one.nodes):
            found.append(one)
            nodes |= set(one.nodes)
    after_a_step = sum(one.reached is not None for one in (*found, last))
    is_enough = after_a_step >= ENOUGH or len(found) + 1 >= ENOUGH_BEFORE_A_STEP
    if last.nodes and is_enough:
        return tuple(found)
    return ()


def of_one_family(last: NodeFault, before: Iterable[NodeFault]) -> tuple[NodeFault, ...]:
    """The earlier faults at the place of `last` that are the same but for the rank that had it:
    once it is known to be no node's, no suspicion rests on any of them.
    """
    return tuple(
        one for one in before if family(one.fault) == family(last.fault) and _is_near(one, last)
    )


def of_software(found: Attribution, last: NodeFault, others: Sequence[NodeFault]) -> Attribution:
    """The conclusion about `last` in place of `found`, once `others` have shown that it is not the
    node's.

    Its suspects are the nodes on which it showed itself this time; none is blamed.
    """
    where = "before its first iteration"
    if last.reached is not None:
        where = f"after iteration {last.reached}"
    places = " and ".join(node for one in others for node in one.nodes)
    summary = f"{where} again, as on {places}: {found.summary}"
    said = (*(f"{one.place}: {one.summary}" for one in others), *found.evidence)
    return _no_nodes(found, summary, said, suspects=last.nodes)


def _no_nodes(
    found: Attribution, summary: str, evidence: Sequence[str], suspects: tuple[str, ...] = ()
) -> Attribution:
    """The conclusion in place of `found` that it is no node's."""
    return replace(
        found,
        kind=Kind.SOFTWARE,
        summary=f"{SOFTWARE_OR_DATA}: {summary}",
        confidence=SURE,
        blamed=(),
        avoided=(),
        suspects=suspects,
        evidence=tuple(evidence),
    )


def held_because(why: str, summary: str) -> str:
    """Why what is queued is held, the strongest conclusion first: where the summary of the last
    launch says whose fault it is, people need no other reason why none follows.
    """
    if summary.startswith(SOFTWARE_OR_DATA):
        return summary
    return f"{why}: {summary}"


def suspected_before(
    last: NodeFault, before: Sequence[NodeFault], launches: Sequence[LaunchRecord] = ()
) -> tuple[NodeFault, ...]:
    """The suspicions just before `last` that were all of its nodes, newest first, up to the first
    one of others.

    `before`: newest first. A suspicion that proved to be the software's does not count, nor does
    one after which the nodes have trained well for long enough, in these launches.
    """
    found: list[NodeFault] = []
    for one in without_recurring(before):
        if not one.is_suspicion:
            continue
        if not set(last.nodes) <= set(one.nodes) or _trained_well(last.nodes, one.start, launches):
            break
        found.append(one)
    return tuple(found)


def _trained_well(nodes: Iterable[str], since: float, launches: Sequence[LaunchRecord]) -> bool:
    """Whether each of these has trained well for long enough since then."""
    later = [launch for launch in launches if launch.start > since]
    return all(
        sum(good_seconds(launch, node) for launch in later) >= GOOD_SECONDS for node in nodes
    )


def good_seconds(launch: LaunchRecord, node: str) -> float:
    """How long a node has trained well in a launch: one that added an iteration, and that holds
    nothing against it.
    """
    accused = (*launch.blamed, *launch.suspects)
    if launch.end is None or node not in launch.nodes or node in accused:
        return 0.0
    if (launch.iteration_after or 0) <= (launch.iteration_before or 0):
        return 0.0
    return launch.end - launch.start


def of_standing(
    found: Attribution,
    last: NodeFault,
    before: Sequence[NodeFault],
    state: NodeStanding,
    known: Sequence[Exclusion],
) -> Attribution:
    """The conclusion about a suspicion in place of `found`, where `before` and what is `known` make
    more of it.

    `state`: how its nodes stand now; excluded nodes are blamed, and what is avoided is a suspect
    still.
    """
    nodes = ", ".join(last.nodes)
    times = {1: "the second time", 2: "the third time"}.get(len(before), "not the first time")
    told = tuple(f"{one.place}: {one.summary}" for one in before)
    told += tuple(f"{one.node} is known: {one.state}: {one.why}" for one in known)
    better = replace(
        found, summary=f"{times} on {nodes}: {found.summary}", evidence=(*found.evidence, *told)
    )
    if state is NodeStanding.EXCLUDE:
        return replace(better, confidence=SURE, blamed=last.nodes, suspects=())
    return replace(better, confidence=ALMOST_SURE, avoided=last.nodes)


def suspects_to_try_without(faults: Iterable[NodeFault], fault: str) -> tuple[str, ...]:
    """The nodes that may be at fault for what these launches of one family met; empty where it may
    be no node's.
    """
    same = [one for one in faults if family(one.fault) == family(fault)]
    if any(not one.may_be for one in same):
        return ()  # once it came without any sign of a node
    return tuple(dict.fromkeys(node for one in same for node in one.may_be))


def of_trial(
    found: Attribution, nodes: Sequence[str], left_out: Sequence[Exclusion]
) -> Attribution:
    """The conclusion in place of `found`, once the same fault came on these nodes without those
    that were left out.
    """
    names = ", ".join(entry.node for entry in left_out)
    said = (
        *found.evidence,
        f"it ran on {', '.join(nodes)}",
        *(line for one in left_out for line in one.evidence[:1]),
    )
    summary = f"the same fault came back without {names}: {found.summary}"
    return _no_nodes(found, summary, said)


class Repetition(Record):
    """How many launches in a row one fault has ended at one step, and the checkpoints that they
    began from.

    `began_at`: newest launch first; None where one began from no checkpoint.
    """

    began_at: tuple[int | None, ...]

    @property
    def times(self) -> int:
        return len(self.began_at)

    @property
    def tried_older(self) -> bool:
        """Whether a launch of them began from an older checkpoint than the one before it."""
        pairs = pairwise(self.began_at)
        return any(late is not None and early is not None and late < early for late, early in pairs)

    @property
    def newest_tried(self) -> int | None:
        return max((step for step in self.began_at if step is not None), default=None)


def repetition(last: NodeFault, before: Iterable[NodeFault]) -> Repetition:
    """How often the fault of `last` came in a row. `before`: newest first, of any kind. Before a
    first step: once.
    """
    row = [last]
    for one in before:
        if (
            last.reached is None
            or one.reached is None
            or not last.fault
            or one.fault != last.fault
            or not _is_near(one, last)
        ):
            break
        row.append(one)
    return Repetition(tuple(one.began_at for one in row))


def may_try_older(kind: Kind, repeated: Repetition) -> bool:
    """Whether an older checkpoint is worth a try: what fails at one step again and again after a
    resume may have it from the checkpoint, which is whole and wrong (NVIDIA/Megatron-LM#5281: 44
    times the same, from one bad copy).

    Once: what comes back from an older one too is not of the checkpoint.
    """
    has_resumed = repeated.began_at[0] is not None
    return (
        kind in _MAY_BE_CHECKPOINTS
        and has_resumed
        and repeated.times >= ENOUGH
        and not repeated.tried_older
    )


def innocent(
    entries: Iterable[Exclusion], owner: str, others: Sequence[NodeFault]
) -> tuple[Exclusion, ...]:
    """The automatic exclusions that rest on these faults alone; what a person asked for, or another
    fault, stays.
    """
    rests_on = {(node, one.job_id, one.summary) for one in others for node in one.nodes}
    return tuple(
        entry
        for entry in entries
        if entry.owner == owner and (entry.node, entry.job_id, entry.why) in rests_on
    )


def without_recurring(faults: Sequence[NodeFault]) -> tuple[NodeFault, ...]:
    """The faults that are still their nodes' own after all of them are known."""
    return tuple(
        one
        for one in faults
        if not same_elsewhere(one, (other for other in faults if other is not one))
    )


def _is_near(one: NodeFault, other: NodeFault) -> bool:
    """Whether both were at the same place of the training. Before a first step that is where they
    began: what fails at the start of a later checkpoint, after days of training, is another fault.
    So one that saved and died is at the same place as those that begin there.
    """
    if one.reached is None and other.reached is None:
        return one.began_at == other.began_at
    place, other_place = (
        fault.began_at if fault.reached is None else fault.reached for fault in (one, other)
    )
    return place is not None and other_place is not None and abs(place - other_place) <= NEAR
