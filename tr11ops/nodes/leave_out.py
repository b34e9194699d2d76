"""May a run leave nodes out that are only suspected? Only while enough others are free, within the
cap. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tr11ops.cluster.node_states import StateAnswer, may_start
from tr11ops.rundir.exclusion import ExclusionLimit


def why_not_leave_out(
    out: Iterable[str],
    listed: Collection[str],
    limit: ExclusionLimit,
    states: Mapping[str, frozenset[str]] | None,
    own: Collection[str],
) -> str:
    """Why these nodes cannot be left out now, in words; "" where they can.

    `listed` are not used as it is; `states`: of all nodes, None where the scheduler did not say;
    `own`: the attempt's nodes, which are free when it ends. What others' jobs hold is not free: the
    run would wait for it.
    """
    leaving = set(out)
    if states is None or limit.names is None:
        return "which other nodes are free is not known"
    if limit.forbids(leaving, listed):
        return str(limit)
    free = {
        node
        for node in limit.names - leaving - set(listed)
        if may_start(states.get(node, frozenset({"unknown"}))) is StateAnswer.YES
        and (node in own or "idle" in states[node])
    }
    if len(free) < limit.needed:
        return f"only {len(free)} others are free, an attempt needs {limit.needed}"
    return ""
