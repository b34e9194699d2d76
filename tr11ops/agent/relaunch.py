"""What follows a failed launch: another one in the same allocation, the next task elsewhere, or a
stop. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from tr11ops.agent.recurrence import Repetition, condemning_checks
from tr11ops.cluster.arrays import compress
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.diagnose.attribution.restart import MOST_AT_ONE_STEP
from tr11ops.diagnose.signature import Restart
from tr11ops.runcard.sections import ResilienceSection
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.rundir.exclusion import is_broad
from trainer.contract.record import Record

NOT_THE_NODES = "the same fault came back on other nodes: it is not the nodes"
# suspects give way to a spare at once
_SWAPPED = frozenset({Kind.NODE, Kind.PORT})
LAUNCH_SECONDS = 60.0  # a launch that has less than this cannot do much


class AllocationState(Record):
    """The allocation now.

    `usable` are its nodes that may be started on, in the allocation's order; `reluctant` those of
    them to be used only when there are no others (the site wants them back, or something is on
    record of them), `suspected` those that come last of all, the one that was accused last at the very end.
    `needed`: nodes of one launch.
    `may_reuse`: the nodes are one machine's, so that none can be replaced by another.
    `seconds_left` is None without a limit.
    """

    usable: tuple[str, ...]
    needed: int
    seconds_left: float | None
    reluctant: frozenset[str] = frozenset()
    suspected: tuple[str, ...] = ()
    may_reuse: bool = False


class Relaunch(Record):
    """Start again at once, on these nodes."""

    nodes: tuple[str, ...]
    why: str


class EndTask(Record):
    """Give the allocation back; the next task may go on elsewhere."""

    why: str


class Stop(Record):
    """End, and let nothing of this run start before a person has looked."""

    why: str


Decision: TypeAlias = Relaunch | EndTask | Stop


def first_nodes(situation: AllocationState) -> tuple[str, ...] | None:
    """The nodes of an attempt's first launch; None when too few may be used."""
    return _choose(situation, (), avoid=())


def decide(
    history: Sequence[LaunchRecord],
    repeated: Repetition,
    situation: AllocationState,
    resilience: ResilienceSection,
) -> Decision:
    """What follows the last launch of `history` (oldest first, all of this attempt, at least one),
    whose fault has `repeated` so often.

    A node that was ever blamed is never used again, unless the nodes are one machine's. One that
    was suspected is used again only when there are no others.
    """
    return _end(history, repeated, situation, resilience) or _next(history, situation)


def blamed_nodes(history: Sequence[LaunchRecord]) -> tuple[str, ...]:
    """The nodes that were blamed for launches, but for those whose health check proved to fail
    everywhere.
    """
    failing = {check for outcome in history for check in outcome.failing_checks}
    guilty: dict[str, None] = {}
    for outcome in history:
        checks = condemning_checks(outcome)
        if not checks or not failing.issuperset(checks):
            guilty |= dict.fromkeys(outcome.blamed)
    return tuple(guilty)


def named_twice(history: Sequence[LaunchRecord]) -> tuple[str, ...]:
    """The suspects whom the last two launches have both named, where the cause of both is unknown."""
    last = history[-1]
    named = tuple(
        node for before in history[-2:-1] for node in before.suspects if node in last.suspects
    )
    is_known = any(outcome.cause != Kind.UNKNOWN for outcome in history[-2:])
    if is_known or is_broad(len(named), len(last.nodes)):
        return ()
    return named


def _end(
    history: Sequence[LaunchRecord],
    repeated: Repetition,
    situation: AllocationState,
    resilience: ResilienceSection,
) -> Decision | None:
    """Why no other launch may follow, whatever nodes there are; None when one may."""
    last = history[-1]
    fruitless = _fruitless(history)
    left = situation.seconds_left
    stop = ""
    if last.older_checkpoint is None:
        stop = _why_stop(history, repeated)
    if stop:
        return Stop(stop)
    why = ""
    if last.cause == Kind.OPERATOR:
        why = "it was asked for"
    elif len(history) >= resilience.launches_per_attempt:
        why = f"{resilience.launches_per_attempt} launches in this allocation are the most allowed"
    elif fruitless >= resilience.launches_without_progress:
        why = f"{fruitless} launches in a row added no iteration"
    elif left is not None and left < LAUNCH_SECONDS:
        why = f"{max(left, 0.0):.0f} s of the allocation are left to train in"
    if why:
        return EndTask(why)
    return None


def _why_stop(history: Sequence[LaunchRecord], repeated: Repetition) -> str:
    """Why a person has to look before anything starts again; "" where that is not so."""
    last = history[-1]
    came_back = repeated.times > 1
    if (
        last.cause in {Kind.UNKNOWN, Kind.NUMERICS, Kind.SOFTWARE}
        and came_back
        and repeated.tried_older
    ):
        return "the same fault came back at the same step, from an older checkpoint too"
    if last.restart == Restart.CHANGE and not _is_worth_a_try(last, repeated):
        again = f"the same fault came back at the same step, {repeated.times} times"
        if last.cause == Kind.UNKNOWN:
            return again
        return f"{last.cause}: another launch would end the same way"
    if _is_not_the_nodes(history):
        return NOT_THE_NODES
    return ""


def _is_worth_a_try(last: LaunchRecord, repeated: Repetition) -> bool:
    """Whether one more launch is the cheapest way to know: where the cause is not known, or the
    numbers broke once after a checkpoint, which a fault of memory does too.
    """
    if last.cause == Kind.UNKNOWN:
        return repeated.times < MOST_AT_ONE_STEP
    return (
        last.cause == Kind.NUMERICS and last.checkpoint_before is not None and repeated.times == 1
    )


def _next(history: Sequence[LaunchRecord], situation: AllocationState) -> Decision:
    """The nodes of the next launch, if there are enough."""
    last = history[-1]
    blamed: set[str] = set()
    if not situation.may_reuse:
        blamed = {
            *blamed_nodes(history),
            *(node for outcome in history for node in outcome.avoided),
        }
    suspected = [
        node for outcome in history if outcome.cause in _SWAPPED for node in outcome.suspects
    ]
    if last.older_checkpoint is not None:
        suspected += last.suspects
    wary = _suspecting(situation, suspected)
    kept = [node for node in last.nodes if node not in suspected]
    others = [node for node in situation.usable if node not in last.suspects]
    again = _choose(wary, dict.fromkeys((*kept, *others)), avoid=blamed)
    if again is None:
        return EndTask(_why_no_nodes(last, situation))
    if last.older_checkpoint is not None:
        why = f"from the older checkpoint of step {last.older_checkpoint}"
        return Relaunch(again, _with_change(why, last, again))
    if last.cause in {Kind.NODE, Kind.HEALTH_CHECK}:
        return Relaunch(again, _why_again(last, again, situation))
    if last.cause == Kind.PORT and not last.suspects:
        return Relaunch(again, _with_change("with another port", last, again))
    if last.cause == Kind.PORT and set(again) != set(last.nodes):
        why = "the card fixes the port: with rank 0 on another node"
        return Relaunch(again, _with_change(why, last, again))
    return _once_more_or_elsewhere(history, situation, again, blamed)


def _once_more_or_elsewhere(
    history: Sequence[LaunchRecord],
    situation: AllocationState,
    again: tuple[str, ...],
    blamed: set[str],
) -> Decision:
    """After a fault that points to no node: a second try on the same nodes, then one on others."""
    last = history[-1]
    # of two that are only to be used last, the one that was named now
    wary = _suspecting(situation, last.suspects)
    if _tries(history) < 2:
        return _once_more(last, again, _choose(wary, last.nodes, avoid=blamed))
    swapped = _choose(wary, _without(last.nodes, last.suspects, situation, blamed), avoid=blamed)
    if swapped is None or set(swapped) == set(last.nodes):
        return EndTask("it failed again, and there is no spare node to try instead")
    why = "it failed again: on other nodes"
    return Relaunch(swapped, _with_change(why, last, swapped))


def _once_more(
    last: LaunchRecord, again: tuple[str, ...], without: tuple[str, ...] | None
) -> Relaunch:
    """The same nodes; but where the others waited for one of them in vain, which may take them as
    long again, a spare in its place, if there is one. `without`: the nodes of a launch that uses
    suspects last.
    """
    cause = last.cause
    if cause == Kind.UNKNOWN:
        cause = "the cause is unknown"
    same = f"{cause}: once more on the same nodes"
    if set(again) != set(last.nodes):
        same = _with_change(f"{cause}: once more", last, again)
    if not last.waited_for:
        return Relaunch(again, same)
    waited = f"the others waited for {', '.join(last.waited_for)}, which is only suspected"
    if without is None or set(last.waited_for) & set(without):
        return Relaunch(again, f"{same}: {waited}, and no spare node is left")
    return Relaunch(without, f"{cause}: {waited}: {_change(last, without, last.waited_for)}")


def _why_no_nodes(last: LaunchRecord, situation: AllocationState) -> str:
    if situation.may_reuse:  # machines that joined this one, and nothing can replace
        return f"{', '.join(last.blamed) or 'a node'} is gone: start all nodes again to go on"
    named = ""
    if last.blamed:
        named = f"{', '.join(last.blamed)} may not be used again, and "
    if last.avoided:
        named = f"{', '.join(last.avoided)} is left out while enough others are free, and "
    return f"{named}no spare node is left"


def _with_change(
    why: str, last: LaunchRecord, again: tuple[str, ...], named: Sequence[str] = ()
) -> str:
    """The sentence, and behind it which nodes take whose place, where that changes; `named`: nodes that
    it names.
    """
    change = _change(last, again, named)
    if not change:
        return why
    return f"{why}; {change}"


def _change(last: LaunchRecord, again: tuple[str, ...], named: Sequence[str] = ()) -> str:
    """Which nodes take whose place after the last launch; "" where none changes."""
    came = [node for node in again if node not in last.nodes]
    left = [node for node in last.nodes if node not in again]
    if not came:
        return ""
    whose, takes = "their place", "take"
    if len(came) == 1:
        whose, takes = "its place", "takes"
    if set(left) != set(named):
        whose = f"the place of {compress(left)}"
    return f"{compress(came)} {takes} {whose}"


def _why_again(last: LaunchRecord, again: tuple[str, ...], situation: AllocationState) -> str:
    left_out = f"without health check {', '.join(last.failing_checks)}, which fails everywhere"
    if last.cause == Kind.HEALTH_CHECK:
        return _with_change(left_out, last, again)
    why = _why_these_nodes(last, again, situation)
    if last.failing_checks:
        return f"{why}; {left_out}"
    return why


def _why_these_nodes(last: LaunchRecord, again: tuple[str, ...], situation: AllocationState) -> str:
    left_out = [node for node in last.blamed or last.avoided if node not in again]
    if left_out:
        why = f"without {', '.join(left_out)}"
        if not last.blamed:
            why += ", while enough others are free"
        return _with_change(why, last, again, left_out)
    change = _change(last, again)
    if situation.may_reuse and not change:
        return "on the same nodes"
    kept = [node for node in last.suspects if node in again]
    if kept:
        why = f"no spare node is left for {', '.join(kept)}, which is only suspected"
        return _with_change(why, last, again)
    if change and set(last.suspects) == set(last.nodes) - set(again):
        return f"{change}, which is only suspected"
    return change or "on the same nodes"


def _tries(history: Sequence[LaunchRecord]) -> int:
    """Launches in a row on the last one's nodes that failed for an unknown cause; progress begins
    the count again.
    """
    last = history[-1]
    count = 0
    for outcome in reversed(history):
        if outcome.cause == Kind.NODE or set(outcome.nodes) != set(last.nodes):
            break
        count += 1
        if outcome.has_progress:
            break
    return count


def _without(
    nodes: tuple[str, ...], suspects: tuple[str, ...], situation: AllocationState, blamed: set[str]
) -> tuple[str, ...]:
    """The nodes to keep when as many as there are spares make room: the suspects first, else the
    last ones.
    """
    spares = [node for node in situation.usable if node not in nodes and node not in blamed]
    leaving = [node for node in nodes if node in suspects] or list(reversed(nodes))
    going = set(leaving[: len(spares)])
    kept = tuple(node for node in nodes if node not in going)
    return (*kept, *spares)


def _suspecting(situation: AllocationState, named: Sequence[str]) -> AllocationState:
    """The allocation where these, in the order in which they were named, are suspected too."""
    latest_first = dict.fromkeys(reversed((*situation.suspected, *named)))
    return replace(situation, suspected=tuple(reversed(latest_first)))


def _choose(
    situation: AllocationState, preferred: Iterable[str], avoid: Iterable[str]
) -> tuple[str, ...] | None:
    """`needed` nodes in the allocation's order: the preferred ones first, the reluctant ones late,
    suspects last, and of these the one last that was accused last.
    """
    preferred, barred = tuple(preferred), set(avoid)
    able = [node for node in situation.usable if node not in barred]
    if len(able) < situation.needed:
        return None
    order = {node: place for place, node in enumerate(situation.usable)}
    rank = {node: place for place, node in enumerate(preferred)}
    late = situation.reluctant
    last = {node: place for place, node in enumerate(situation.suspected, start=1)}
    able.sort(
        key=lambda node: (
            last.get(node, 0),
            node in late,
            rank.get(node, len(rank)),
            order[node],
        )
    )
    return tuple(sorted(able[: situation.needed], key=order.__getitem__))


def _fruitless(history: Sequence[LaunchRecord]) -> int:
    count = 0
    for outcome in reversed(history):
        if outcome.has_progress:
            break
        count += 1
    return count


def _is_not_the_nodes(history: Sequence[LaunchRecord]) -> bool:
    """Did the last fault come again and again without progress, each time with another node held
    guilty?

    Two nodes are enough for a worker's own error. Two nodes may die alike side by side; three
    hardly do.
    """
    last = history[-1]
    accused: set[str] = set()
    times = 0
    for outcome in reversed(history):
        guilty = set(outcome.blamed or outcome.suspects)
        if outcome.has_progress or not guilty or outcome.fault != last.fault:
            break
        if not guilty & accused:
            times += 1
        accused |= guilty
    return times >= (3 if last.cause == Kind.NODE else 2)
