"""What the scheduler, a person, health checks and the nodes themselves tell of the end of a launch: one
attributor a source. Pure.
"""

from __future__ import annotations

from tr11ops.base.redact import signature
from tr11ops.cluster.base import is_gone, is_silent, lost_words
from tr11ops.diagnose.attribution.conclusions import in_order, nodes_heard, of_nodes, weighed
from tr11ops.diagnose.attribution.error_text import read_error
from tr11ops.diagnose.attribution.evidence import (
    OUTSIDE,
    Attribution,
    Evidence,
    Kind,
)
from trainer.contract.attempt import BAD_REASONS, EXIT_REFUSED


def of_order(why: str) -> Attribution:
    """That the end was asked for."""
    return Attribution(Kind.OPERATOR, why, 1.0, fault="operator")


def by_operator(evidence: Evidence) -> Attribution | None:
    """A person or the scheduler asked for the end, or the trainer left as it should."""
    marker = evidence.marker
    if evidence.stopped_by:
        return of_order(f"{evidence.stopped_by} to the batch script")
    # its ranks go one by one: the last ones lose the first, or are ended
    if marker is None and evidence.ended_by:
        return of_order(f"ended at once, as asked by {evidence.ended_by}")
    if marker is not None and marker.reason not in {*BAD_REASONS, "signal"}:
        return of_order(marker.message)
    # unless something else was the reason for the signal
    if marker is not None and marker.reason == "signal":
        return weighed("signal-marker", Kind.OPERATOR, marker.message, fault=OUTSIDE)
    return None


def by_node_state(evidence: Evidence) -> Attribution | None:
    """Nodes that the scheduler holds for lost, by its states and by srun's own word.

    One that does not answer the scheduler is lost where none of its workers has left a word either.
    A draining or failing node is not: what runs there runs on.
    """
    lines: dict[str, str] = {}
    heard = nodes_heard(evidence)
    for line in evidence.srun:
        if line.lost_node:
            lines.update({node: line.text for node in line.nodes if node in evidence.nodes})
    for node in evidence.nodes:
        words = (evidence.states or {}).get(node, frozenset())
        if is_gone(words) or (is_silent(words) and node not in heard):
            lines.setdefault(node, f"{node} is {'+'.join(sorted(words))} for the scheduler")
    if not lines:
        return None
    blamed = in_order(lines, evidence)
    said = tuple(dict.fromkeys(lines[node] for node in blamed))
    summary = lost_words(blamed)
    return weighed("node-state", Kind.NODE, summary, blamed, evidence=said, fault=of_nodes(blamed))


def by_lost_machine(evidence: Evidence) -> Attribution | None:
    """Machines whose agents node 0 has lost, where no scheduler knows of nodes."""
    blamed = in_order(evidence.lost, evidence)
    if not blamed:
        return None
    said = tuple(
        f"{node}: the connection to its agent was lost: {evidence.lost[node]}" for node in blamed
    )
    return weighed(
        "lost-machine", Kind.NODE, said[0], blamed, evidence=said, fault=of_nodes(blamed)
    )


def by_lost_host(evidence: Evidence) -> Attribution | None:
    """The node of the batch script, lost with the agent on it: two facts, as the agent left no word
    either.
    """
    if not evidence.lost_host or not evidence.nodes:
        return None
    host = evidence.nodes[0]
    why = f"{host}, which ran the batch script, was lost with it"
    said = (evidence.lost_host,)
    return weighed("lost-machine", Kind.NODE, why, (host,), evidence=said, fault=of_nodes((host,)))


def by_health(evidence: Evidence) -> Attribution | None:
    """Nodes that their own health checks condemned, where another node passes the same check; else
    suspects.

    Checks that fail everywhere condemn no one.
    """
    bad: dict[str, list[str]] = {}
    failing: dict[str, str] = {}
    for report in (one for one in evidence.reports if one.node in evidence.nodes):
        for name, check in zip(report.names_of_bad_checks, report.bad_checks, strict=True):
            if name in evidence.failing_checks:
                failing[name] = evidence.failing_checks[name]
            else:
                bad.setdefault(report.node, []).append(check)
    if not bad and failing:
        said = tuple(failing.values())
        summary = f"{'; '.join(said)}: it is not the nodes"
        return weighed(
            "health",
            Kind.HEALTH_CHECK,
            summary,
            evidence=said,
            fault=f"checks: {', '.join(failing)}",
        )
    if not bad:
        return None
    lines = tuple(
        f"{node}: health check {check}" for node in in_order(bad, evidence) for check in bad[node]
    )
    blamed = tuple(node for node in in_order(bad, evidence) if _is_bad_alone(node, evidence))
    if blamed:
        return weighed(
            "health", Kind.NODE, lines[0], blamed, evidence=lines, fault=of_nodes(blamed)
        )
    # Its own word alone: the launch was over before another node had told how the same check ends
    # there.
    suspects = in_order(bad, evidence)
    return weighed(
        "health", Kind.NODE, lines[0], suspects=suspects, evidence=lines, fault=of_nodes(suspects)
    )


def _is_bad_alone(node: str, evidence: Evidence) -> bool:
    """Whether a check that this node fails was passed by another node of the launch; a launch of
    one node has none.
    """
    if len(evidence.nodes) <= 1:
        return True
    failed = {
        name for one in evidence.reports if one.node == node for name in one.names_of_bad_checks
    }
    passed = {name for one in evidence.reports if one.node != node for name in one.passed_checks}
    return bool(failed & passed - set(evidence.failing_checks))


def by_refusal(evidence: Evidence) -> Attribution | None:
    """The trainer, or every worker of it that could still speak, refused its input."""
    marker = evidence.marker
    if marker is not None and marker.reason == "refused":
        fault = f"refused: {signature(marker.message)}"
        if read_error(marker.message).is_storage:
            kind = Kind.STORAGE
        else:
            kind = Kind.CONFIGURATION
        return weighed(
            "refused",
            kind,
            marker.message,
            evidence=(f"end marker: {marker.message}",),
            fault=fault,
        )
    statuses = evidence.worker_statuses
    has_refused = bool(statuses) and all(status == EXIT_REFUSED for status in statuses.values())
    if has_refused and not evidence.failures and evidence.reached is None:
        ranks = ", ".join(str(rank) for rank in sorted(statuses)[:8])
        said = f"workers {ranks} left with exit status {EXIT_REFUSED}: the card is refused"
        return weighed(
            "refused-status", Kind.CONFIGURATION, said, evidence=(said,), fault="refused"
        )
    return None


def by_unwritable(evidence: Evidence) -> Attribution | None:
    """A run directory that takes nothing any more: then no worker can save or leave its word, on
    any node.
    """
    if not evidence.unwritable or evidence.marker is not None:
        return None
    why = f"the run directory cannot be written: {evidence.unwritable}"
    return weighed(
        "unwritable",
        Kind.STORAGE,
        why,
        evidence=(why,),
        fault="storage: the run directory cannot be written",
    )


def by_port(evidence: Evidence) -> Attribution | None:
    """Rank 0 could not listen on its port, by its own word or its launcher's: what the others say
    follows from that.
    """
    took = [
        one
        for one in evidence.failures
        if one.rank in {0, None} and read_error(one.error).is_port_taken
    ]
    first = next((one for one in took if one.host == evidence.nodes[0]), None)
    if first is None:
        return None
    holder = next(
        (one.port_holder for one in evidence.reports if one.node == first.host and one.port_holder),
        "",
    )
    port = evidence.fixed_port
    said = [str(first)]
    if holder:
        said.append(f"{first.host}: the port is held by {holder}")
    if port is None:
        summary = f"{first}; held by {holder}" if holder else str(first)
        return weighed("port", Kind.PORT, summary, evidence=tuple(said), fault="port taken")
    held = f"held by {holder}" if holder else "taken, by whom is not known"
    summary = (
        f"port {port} of {first.host} is {held}: end that process, or remove slurm.master_port from the card, and each "
        "launch takes a free port"
    )
    return weighed(
        "port",
        Kind.PORT,
        summary,
        suspects=(first.host,),
        evidence=tuple(said),
        fault=f"port {port} taken",
    )
