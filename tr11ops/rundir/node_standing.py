"""The one rule by which a node goes from innocent to excluded, and back. Pure.

innocent -> suspect: one attribution. -> avoid: a second one that is independent, or another run's
word and one of our own. -> exclude: a third of the same family. Proof excludes at once, and is none
of this module's business. A broad set of suspects makes suspects and no more. Good training on a
node takes it one step back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from tr11ops.base.units import duration
from tr11ops.rundir.exclusion import Exclusion, NodeStanding

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
    left = duration(max(0.0, GOOD_SECONDS - entry.good_seconds))
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
    return entry.state == NodeStanding.SUSPECT
