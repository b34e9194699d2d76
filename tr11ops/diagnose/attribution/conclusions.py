"""How an attributor words and weighs what it concludes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tr11ops.diagnose.attribution.error_text import read_error
from tr11ops.diagnose.attribution.evidence import (
    Attribution,
    Evidence,
    Failure,
    Kind,
)
from tr11ops.diagnose.attribution.weights import weights


def weighed(
    rule: str,
    kind: Kind,
    summary: str,
    blamed: tuple[str, ...] = (),
    suspects: tuple[str, ...] = (),
    evidence: tuple[str, ...] = (),
    fault: str = "",
) -> Attribution:
    """A conclusion with the weight of the rule that led to it."""
    return Attribution(
        kind,
        summary,
        confidence=weights()[rule],
        blamed=blamed,
        suspects=suspects,
        evidence=evidence,
        fault=fault,
        rule=rule,
    )


def of_nodes(nodes: Sequence[str]) -> str:
    return "node " + ",".join(nodes)


def nodes_heard(evidence: Evidence) -> frozenset[str]:
    """Nodes of which something was heard when the launch ended: a worker's record, a line of srun,
    its agent's end.
    """
    heard = {node for line in evidence.srun for node in line.nodes} | {
        one.host for one in evidence.failures
    }
    return frozenset(
        heard | {report.node for report in evidence.reports if report.exit_status is not None}
    )


def in_order(nodes: Iterable[str], evidence: Evidence) -> tuple[str, ...]:
    wanted = set(nodes)
    return tuple(node for node in evidence.nodes if node in wanted)


def lines_of(first: Failure, evidence: Evidence) -> tuple[str, ...]:
    """A failure, what srun said of the same node, and of an error of its memory what is known of
    that.
    """
    said = [line.text for line in evidence.srun if first.host in line.nodes and line.is_own]
    is_memory = read_error(first.error).is_memory
    memory = [
        f"{one.node}: {one.memory}"
        for one in evidence.reports
        if one.node == first.host and one.memory
    ]
    return (str(first), *said[:3], *(memory if is_memory else ()))
