"""One sentence over all stacks: who stands out, what it does, and who waits for it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tr11ops.base.units import counted
from tr11ops.diagnose.stacks.groups import StackGroup, nodes_words, ranks_words
from tr11ops.diagnose.stacks.operations import OperationsFinding
from tr11ops.diagnose.stacks.waits import WaitKind
from trainer.contract.record import Record

# looks in a row at one place, from which on a worker that computes, or all that wait, count as hung
STANDS = 2
# Where several stand out, the one that explains most is named.
_TELLING = (
    WaitKind.FILE,
    WaitKind.DATA_LOADER,
    WaitKind.STARTING,
    WaitKind.OTHER,
    WaitKind.HOST_SYNC,
    WaitKind.COMPUTE,
)
_VERBS = {  # of one rank, of several
    WaitKind.FILE: ("waits for a file ({what})", "wait for a file ({what})"),
    WaitKind.DATA_LOADER: ("waits for the data loader", "wait for the data loader"),
    WaitKind.STARTING: ("is still starting ({what})", "are still starting ({what})"),
    WaitKind.HOST_SYNC: ("waits for its GPU", "wait for their GPUs"),
    WaitKind.COMPUTE: ("computes", "compute"),
    WaitKind.OTHER: ("is in {what}", "are in {what}"),
    WaitKind.STOPPED: ("is stopped ({what})", "are stopped ({what})"),
    WaitKind.DEAD: ("has ended", "have ended"),
}


class StacksVerdict(Record):
    """`sentence` for people. `ranks` and `nodes`: who stands out; none where no one does. `kind`:
    what these are in.

    `is_certain`: one look is enough to say that this holds the training up; a wait may end in the
    next second.
    """

    sentence: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    kind: str = ""
    is_certain: bool = False

    @property
    def needs_person(self) -> bool:
        return bool(self.ranks or self.nodes)


def judge(
    groups: Sequence[StackGroup],
    silent: Sequence[str] = (),
    operations: OperationsFinding | None = None,
) -> StacksVerdict:
    """Who holds the others up. `silent`: nodes that did not answer. `operations`: what the flight
    recorder says.
    """
    return _certain(groups, silent) or _by_waits(groups, operations)


def _certain(groups: Sequence[StackGroup], silent: Sequence[str]) -> StacksVerdict | None:
    """What needs no second look: who has ended, is stopped, or does not answer."""
    for kind in (WaitKind.DEAD, WaitKind.STOPPED):
        if found := [group for group in groups if group.wait.kind is kind]:
            return _named(found, groups, is_certain=True)
    if silent and groups:
        one = len(silent) == 1
        words = f"{nodes_words(silent)} {'does' if one else 'do'} not answer"
        words += _waiting_words(groups, " for it" if one else " for them")
        return StacksVerdict(words, (), tuple(silent), "silent")
    if silent:
        return StacksVerdict("no node answered: nothing is known of the workers")
    if not groups:
        return StacksVerdict(
            "no worker of this attempt runs on its nodes: it is between two launches, or ending"
        )
    return None


def _by_waits(groups: Sequence[StackGroup], operations: OperationsFinding | None) -> StacksVerdict:
    """Who is elsewhere than the ranks that wait for others."""
    waiting = [group for group in groups if group.wait.kind.is_for_others]
    others = [group for group in groups if group.wait.kind in _TELLING]
    if waiting and others and _size(others) <= _size(waiting):
        kind = next(kind for kind in _TELLING if any(group.wait.kind is kind for group in others))
        return _odd([group for group in others if group.wait.kind is kind], groups)
    if operations is not None and operations.ranks and (waiting or not others):
        return StacksVerdict(
            operations.sentence, operations.ranks, _nodes_of(operations.ranks, groups), "collective"
        )
    if waiting:
        return _all_wait(waiting)
    return _none_wait(groups)


def _odd(found: Sequence[StackGroup], groups: Sequence[StackGroup]) -> StacksVerdict:
    kind = found[0].wait.kind
    if (
        kind in {WaitKind.COMPUTE, WaitKind.HOST_SYNC}
        and min(group.looks for group in found) < STANDS
    ):
        verb = _VERBS[kind][_size(found) > 1]
        return StacksVerdict(
            f"{_who(found)} {verb}{_waiting_words(groups, '')}: as usual, if it moves: --watch tells"
        )
    return _named(found, groups)


def _all_wait(waiting: Sequence[StackGroup]) -> StacksVerdict:
    """All that were read wait for each other: an operation that few came to is the odd one."""
    counts = _operations(waiting)
    total = sum(counts.values())
    standing = min(group.looks for group in waiting) >= STANDS
    if len(counts) == 1:
        what = next(iter(counts))
        if total > 1:
            words = f"all {counted(total, 'rank')} that were read wait in {what}"
        else:
            words = f"the rank waits in {what}"
        if not standing:
            return StacksVerdict(f"{words}: no rank stands out; --watch tells whether they move")
        return StacksVerdict(
            f"{words} since {counted(min(g.looks for g in waiting), 'look')}: the network between the nodes or a GPU",
            tuple(sorted(rank for group in waiting for rank in group.ranks)),
            _all_nodes(waiting),
            "collective",
        )
    (most, size), *fewer = counts.most_common()
    odd = [group for group in waiting if group.wait.what != most]
    small = _size(odd)
    listed = ", ".join(f"{number} in {what}" for what, number in counts.most_common())
    if small * 2 >= total or not standing:
        more = "" if standing else "; --watch tells whether they move"
        return StacksVerdict(f"{counted(total, 'rank')} wait for each other: {listed}{more}")
    verb = "waits" if small == 1 else "wait"
    what = "other operations"
    if len(fewer) == 1:
        what = fewer[0][0]
    words = f"{_who(odd)} {verb} in {what}, {counted(size, 'rank')} in {most}: they came to different operations"
    return StacksVerdict(words, _ranks(odd), _all_nodes(odd), odd[0].wait.kind.value)


def _none_wait(groups: Sequence[StackGroup]) -> StacksVerdict:
    """No one waits for another rank, or too few do."""
    read = [group for group in groups if group.wait.kind is not WaitKind.UNREAD]
    if not read:
        why = groups[0].wait.what
        return StacksVerdict(f"no stack could be read: {why}")
    counts: Counter[WaitKind] = Counter()
    for group in read:
        counts[group.wait.kind] += len(group.workers)
    listed = ", ".join(
        f"{counted(number, 'rank')}: {kind.value}" for kind, number in counts.most_common()
    )
    hung = [
        group
        for group in read
        if group.looks >= STANDS and group.wait.kind in _TELLING and group.wait.kind.value
    ]
    if hung and _size(hung) == _size(read):
        looks = counted(min(group.looks for group in hung), "look")
        words = f"no rank has moved in {looks} ({listed})"
        if list(counts) == [WaitKind.DATA_LOADER]:
            who = counted(_size(hung), "rank")
            words = f"all that were read ({who}) wait for their data; none has moved in {looks}"
        return StacksVerdict(
            words,
            _ranks(hung),
            _all_nodes(hung),
            hung[0].wait.kind.value,
        )
    return StacksVerdict(f"no rank holds the others up ({listed})")


def _named(
    found: Sequence[StackGroup], groups: Sequence[StackGroup], is_certain: bool = False
) -> StacksVerdict:
    kind, several = found[0].wait.kind, _size(found) > 1
    whats = list(dict.fromkeys(group.wait.what for group in found))
    verb = _VERBS[kind][several].format(what=whats[0] if len(whats) == 1 else f"{whats[0]}, ...")
    words = f"{_who(found)} {verb}{_waiting_words(groups, ' for them' if several else ' for it')}"
    return StacksVerdict(
        words, _ranks(found), nodes=_all_nodes(found), kind=kind.value, is_certain=is_certain
    )


def _waiting_words(groups: Iterable[StackGroup], whom: str) -> str:
    """`; 7 ranks wait for it in all-reduce`; nothing where no one waits."""
    waiting = [group for group in groups if group.wait.kind.is_for_others]
    if not waiting:
        return ""
    counts = _operations(waiting)
    total = sum(counts.values())
    names = [what for what, _ in counts.most_common()]
    if len(names) == 1:
        where = names[0]
    else:
        where = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"; {counted(total, 'rank')} {'waits' if total == 1 else 'wait'}{whom} in {where}"


def _who(found: Sequence[StackGroup]) -> str:
    """`rank 5 on node tw07`, `ranks 2-3 on nodes tw[02-03]`."""
    return f"{ranks_words(_ranks(found))} on {nodes_words(_all_nodes(found))}"


def _operations(groups: Iterable[StackGroup]) -> Counter[str]:
    """How many ranks wait in which operation."""
    counts: Counter[str] = Counter()
    for group in groups:
        counts[group.wait.what] += len(group.workers)
    return counts


def _size(groups: Iterable[StackGroup]) -> int:
    return sum(len(group.workers) for group in groups)


def _ranks(groups: Iterable[StackGroup]) -> tuple[int, ...]:
    return tuple(sorted(rank for group in groups for rank in group.ranks))


def _all_nodes(groups: Iterable[StackGroup]) -> tuple[str, ...]:
    return tuple(sorted({node for group in groups for node in group.nodes}))


def _nodes_of(ranks: Iterable[int], groups: Iterable[StackGroup]) -> tuple[str, ...]:
    wanted = set(ranks)
    return tuple(
        sorted({one.node for group in groups for one in group.workers if one.rank in wanted})
    )
