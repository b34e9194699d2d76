"""Why a launch ended, and which node is to blame: pure conclusions from what the launch left
behind.

Each attributor reads one kind of evidence and returns its conclusion, or None where that evidence
says nothing. The most confident one wins, the earlier one on a tie; so a further source of evidence
is one more function in the list.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence

from tr11ops.base.redact import signature
from tr11ops.cluster.base import is_gone, is_silent, lost_words
from tr11ops.diagnose.attribution.error_text import read_error
from tr11ops.diagnose.attribution.evidence import (
    UNEXPLAINED,
    Attribution,
    Evidence,
    Failure,
    Kind,
)
from tr11ops.diagnose.attribution.names import NodeNames
from tr11ops.diagnose.attribution.weights import weights
from trainer.contract.attempt import BAD_REASONS, EXIT_REFUSED
from trainer.contract.units import signal_of_status

Attributor = Callable[[Evidence], Attribution | None]

CLOCKS_SECONDS = 2.0  # what two nodes' clocks may be apart
_TOLD_TO_GO = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
)


# ----------------------------------------------------------------------------- one function a
# source
def by_operator(evidence: Evidence) -> Attribution | None:
    """A person or the scheduler asked for the end, or the trainer left as it should."""
    marker = evidence.marker
    if evidence.stopped_by:
        why = f"{evidence.stopped_by} to the batch script"
        return Attribution(Kind.OPERATOR, why, 1.0, fault="operator")
    # its ranks go one by one: the last ones lose the first, or are ended
    if marker is None and evidence.ended_by:
        return Attribution(
            Kind.OPERATOR, f"ended at once, as asked by {evidence.ended_by}", 1.0, fault="operator"
        )
    if marker is not None and marker.reason not in {*BAD_REASONS, "signal"}:
        return Attribution(Kind.OPERATOR, marker.message, 1.0, fault="operator")
    # unless something else was the reason for the signal
    if marker is not None and marker.reason == "signal":
        return _weighed("signal-marker", Kind.OPERATOR, marker.message, fault="operator")
    return None


def by_node_state(evidence: Evidence) -> Attribution | None:
    """Nodes that the scheduler holds for lost, by its states and by srun's own word.

    One that does not answer the scheduler is lost where none of its workers has left a word either.
    A draining or failing node is not: what runs there runs on.
    """
    lines: dict[str, str] = {}
    heard = _heard(evidence)
    for line in evidence.srun:
        if line.lost_node:
            lines.update({node: line.text for node in line.nodes if node in evidence.nodes})
    for node in evidence.nodes:
        words = (evidence.states or {}).get(node, frozenset())
        if is_gone(words) or (is_silent(words) and node not in heard):
            lines.setdefault(node, f"{node} is {'+'.join(sorted(words))} for the scheduler")
    if not lines:
        return None
    blamed = _ordered(lines, evidence)
    said = tuple(dict.fromkeys(lines[node] for node in blamed))
    summary = lost_words(blamed)
    return _weighed(
        "node-state", Kind.NODE, summary, blamed, evidence=said, fault=_of_nodes(blamed)
    )


def by_lost_machine(evidence: Evidence) -> Attribution | None:
    """Machines whose agents node 0 has lost, where no scheduler knows of nodes."""
    blamed = _ordered(evidence.lost, evidence)
    if not blamed:
        return None
    said = tuple(
        f"{node}: the connection to its agent was lost: {evidence.lost[node]}" for node in blamed
    )
    return _weighed(
        "lost-machine", Kind.NODE, said[0], blamed, evidence=said, fault=_of_nodes(blamed)
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
    return _weighed(
        "lost-machine", Kind.NODE, why, (host,), evidence=said, fault=_of_nodes((host,))
    )


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
        return _weighed(
            "health",
            Kind.HEALTH_CHECK,
            summary,
            evidence=said,
            fault=f"checks: {', '.join(failing)}",
        )
    if not bad:
        return None
    lines = tuple(
        f"{node}: health check {check}" for node in _ordered(bad, evidence) for check in bad[node]
    )
    blamed = tuple(node for node in _ordered(bad, evidence) if _is_bad_alone(node, evidence))
    if blamed:
        return _weighed(
            "health", Kind.NODE, lines[0], blamed, evidence=lines, fault=_of_nodes(blamed)
        )
    # Its own word alone: the launch was over before another node had told how the same check ends
    # there.
    suspects = _ordered(bad, evidence)
    return _weighed(
        "health", Kind.NODE, lines[0], suspects=suspects, evidence=lines, fault=_of_nodes(suspects)
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
        kind = Kind.STORAGE if read_error(marker.message).is_storage else Kind.CONFIGURATION
        return _weighed(
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
        return _weighed(
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
    return _weighed(
        "unwritable",
        Kind.STORAGE,
        why,
        evidence=(why,),
        fault="storage: the run directory cannot be written",
    )


def by_death(evidence: Evidence) -> Attribution | None:
    """Processes that a signal ended on one node: by the agents' records, else by srun's lines."""
    died = sorted(
        (one for one in evidence.failures if one.signal is not None), key=lambda one: one.time
    )
    if died:
        first = died[0]
        together = {one.host for one in died if one.time - first.time < 1.0}
        if 1 < len(together) >= len(evidence.nodes) / 2:  # everywhere at once: no node's own fault
            fault = f"died: {signature(first.error)}"
            said = tuple(str(one) for one in died[:4])
            summary = f"{first.error}, on {len(together)} nodes at once"
            if len(together) < len(evidence.nodes):
                apart = _ordered(together, evidence)
            else:
                apart = ()
            return _weighed(
                "death-everywhere",
                Kind.UNKNOWN,
                summary,
                suspects=apart,
                evidence=said,
                fault=fault,
            )
        fault = f"died: {signature(first.error)} at {first.rank}"
        rule = "death" if len({one.host for one in died}) == 1 else "death-several"
        return _weighed(
            rule,
            Kind.NODE,
            str(first),
            suspects=(first.host,),
            evidence=_lines(first, evidence),
            fault=fault,
        )
    killed = next((line for line in evidence.srun if line.is_own and line.by_signal), None)
    if killed is None or len(killed.nodes) != 1:
        return None
    return _weighed(
        "death-by-srun",
        Kind.NODE,
        killed.text,
        suspects=killed.nodes,
        evidence=(killed.text,),
        fault=f"died: {signature(killed.what)}",
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
        return _weighed("port", Kind.PORT, summary, evidence=tuple(said), fault="port taken")
    held = f"held by {holder}" if holder else "taken, by whom is not known"
    summary = (
        f"port {port} of {first.host} is {held}: end that process, or remove slurm.master_port from the card, and each "
        "launch takes a free port"
    )
    return _weighed(
        "port",
        Kind.PORT,
        summary,
        suspects=(first.host,),
        evidence=tuple(said),
        fault=f"port {port} taken",
    )


def by_agreement(evidence: Evidence) -> Attribution | None:
    """A node that does not reach the files, by the word of all ranks, which asked for them at the
    same moment.
    """
    first = next((one for one in evidence.failures if one.node in evidence.nodes), None)
    if first is None:
        return None
    fault = f"no files: {signature(first.error)}"
    return _weighed(
        "agreement",
        Kind.NODE,
        str(first),
        suspects=(first.node,),
        evidence=_lines(first, evidence),
        fault=fault,
    )


def by_error(evidence: Evidence) -> Attribution | None:
    """What the workers' own first errors say; those that only tell of a lost peer are set aside.

    A card or a program with which this launch has trained is not what is wrong: its error may be
    met again, or not.
    """
    own = sorted((one for one in evidence.failures if _is_own(one)), key=lambda one: one.time)
    if not own:
        return None
    first = own[0]
    same = signature(first.error)
    alike = [one for one in own if signature(one.error) == same]
    said = tuple(str(one) for one in own[:4])
    fault = f"{same} at {first.rank if len(alike) == 1 else 'several'}"
    alone = (first.host,) if len({one.host for one in alike}) == 1 < len(evidence.nodes) else ()
    error = read_error(first.error)
    if alone and error.condemns_node:
        return _weighed(
            "error-of-hardware",
            Kind.NODE,
            str(first),
            alone,
            evidence=_lines(first, evidence),
            fault=fault,
        )
    if error.is_storage or error.is_numerics:
        kind = Kind.STORAGE if error.is_storage else Kind.NUMERICS
        return _weighed(f"error-{kind}", kind, str(first), evidence=said, fault=f"{kind}: {same}")
    if alone and error.may_be_nodes_own:
        return _weighed(
            "error-of-one-node",
            Kind.NODE,
            str(first),
            suspects=alone,
            evidence=_lines(first, evidence),
            fault=fault,
        )
    if error.is_memory:
        said = _lines(first, evidence)
    if not alone and error.is_configuration and evidence.reached is None:
        return _weighed(
            "error-everywhere", Kind.CONFIGURATION, str(first), evidence=said, fault=fault
        )
    after = "" if evidence.reached is None else f" (after iteration {evidence.reached})"
    return _weighed(
        "error-unknown", Kind.UNKNOWN, f"{first}{after}", suspects=alone, evidence=said, fault=fault
    )


def by_last_words(evidence: Evidence) -> Attribution | None:
    """The trainer's end marker, where it tells of an error: a last save that failed; or of an end
    that nothing explains, which no node is suspected of.
    """
    marker = evidence.marker
    if marker is None or marker.reason not in {"error", "unexplained"}:
        return None
    if marker.reason == "unexplained":
        said = (f"end marker: {marker.message}",)
        return _weighed(
            "last-words", Kind.UNKNOWN, marker.message, evidence=said, fault=UNEXPLAINED
        )
    # by all ranks' word: it failed twice where the others did not
    if marker.node in evidence.nodes:
        said = (f"end marker: {marker.message}",)
        return _weighed(
            "cannot-save",
            Kind.NODE,
            marker.message,
            (marker.node,),
            evidence=said,
            fault=_of_nodes((marker.node,)),
        )
    kind = Kind.STORAGE if read_error(marker.message).is_storage else Kind.UNKNOWN
    said = (f"end marker: {marker.message}",)
    return _weighed(
        "last-words",
        kind,
        marker.message,
        evidence=said,
        fault=f"{kind}: {signature(marker.message)}",
    )


def _is_own(failure: Failure) -> bool:
    return failure.signal is None and not read_error(failure.error).is_consequence


def by_first_exit(evidence: Evidence) -> Attribution | None:
    """The node whose task srun saw end first, where no worker left a first error of its own.

    A node whose workers lost a peer, one whose task was told to go, or several that ended alike
    before srun ended the rest, say nothing.
    """
    if evidence.marker is not None or any(
        one.signal is not None or _is_own(one) for one in evidence.failures
    ):
        return None
    victims = {one.host for one in evidence.failures}
    own = [
        line for line in evidence.srun if line.is_own and not line.lost_node and not line.told_to_go
    ]
    nodes = list(dict.fromkeys(node for line in own for node in line.nodes))
    culprits = [node for node in nodes if node not in victims]
    if len(culprits) != 1 or (len(nodes) > 1 and not victims):
        return None
    line = next(line for line in own if culprits[0] in line.nodes)
    return _weighed(
        "first-exit",
        Kind.NODE,
        line.text,
        suspects=(culprits[0],),
        evidence=(line.text,),
        fault=f"exit: {signature(line.what)}",
    )


def by_lost_peer(evidence: Evidence) -> Attribution | None:
    """The node that most others name as lost, by name, rank or address; else the first one: it may
    be a victim too.

    Where the one that was named has left a word itself, that counts before what others say of it.
    It may name another. Two that lost each other are the two ends of a link: where no third one
    names either, neither is a suspect.
    """
    names = evidence.names
    in_order = sorted(evidence.failures, key=lambda one: one.time)
    accusing = [one for one in in_order if _peer_named(one, names) is not None and not _is_own(one)]
    if not accusing:
        return None
    named = _most_named(accusing, names)
    failure = next(one for one in accusing if _peer_named(one, names) == named)
    last, accused = _last_accuser(failure, named, in_order, names)
    hosts = {one.host for one in accusing}
    are_two_ends = len(hosts) == 2 and {_peer_named(one, names) for one in accusing} == hosts
    said = tuple(dict.fromkeys((str(last), str(failure))))
    return _weighed(
        "lost-peer",
        Kind.UNKNOWN,
        str(last),
        suspects=() if are_two_ends else (accused,),
        evidence=said,
        fault=f"lost: {signature(last.error)}",
    )


def _most_named(accusing: Sequence[Failure], names: NodeNames) -> str:
    """The node that most nodes name; of several the one that was named first."""
    witnesses: dict[str, set[str]] = {}
    for one in accusing:
        named = _peer_named(one, names)
        if named is not None:
            witnesses.setdefault(named, set()).add(one.host)
    return max(witnesses, key=lambda node: len(witnesses[node]))


def _last_accuser(
    witness: Failure, named: str, failures: Sequence[Failure], names: NodeNames
) -> tuple[Failure, str]:
    """Who names whom, from `witness` on, to the last: the word that counts most, and the node that
    it accuses.
    """
    word, accused = witness, named
    heard = {witness.host}
    while accused not in heard:
        heard.add(accused)
        own = next((one for one in failures if one.host == accused), None)
        if own is None:
            break
        further = _peer_named(own, names)
        if further is None:
            return word if read_error(own.error).tells_of_peer else own, accused
        answer = next((one for one in failures if one.host == further), None)
        names_back = answer is not None and _peer_named(answer, names) == accused
        # What saw the end of one that had waited for it in vain clears itself of nothing.
        waited = read_error(own.error).tells_of_waiting and (
            answer is None or answer.time > own.time
        )
        # they lost each other: who was named before stands
        if not waited and (further in heard or names_back):
            break
        word, accused = own, further
    return word, accused


def _peer_named(failure: Failure, names: NodeNames) -> str | None:
    """The one other node that an error names."""
    named = names.named_in(failure.error)
    if named == failure.host:
        return None
    return named


def by_first_missed(evidence: Evidence) -> Attribution | None:
    """The node whose worker was gone first, well before any of the others', where no worker left a
    word of its own.
    """
    if evidence.marker is not None or any(
        one.signal is not None or _is_own(one) for one in evidence.failures
    ):
        return None
    missed = sorted(
        ((one.first_missed, one.node) for one in evidence.reports if one.first_missed is not None),
        key=lambda pair: pair[0].time,
    )
    if not missed or len(evidence.nodes) < 2:
        return None
    first, node = missed[0]
    if any(other.time - first.time < CLOCKS_SECONDS for other, _ in missed[1:]):
        return None
    said = f"rank {first.rank} on {node} was gone first: {first.how}"
    fault = f"gone: {signature(first.how)} at {first.rank}"
    return _weighed(
        "first-missed", Kind.UNKNOWN, said, suspects=(node,), evidence=(said,), fault=fault
    )


def by_step_codes(evidence: Evidence) -> Attribution | None:
    """The highest exit status of the job's steps: it outlives the signals by which the job itself
    was ended.

    It says how a worker ended, and of which node only where there is one.
    """
    code = evidence.derived_exit_code
    if evidence.marker is not None or code is None or code - 128 in _TOLD_TO_GO:
        return None
    name = signal_of_status(code)
    if not name:
        return None
    said = f"a step of the job was ended by {name} (DerivedExitCode {code - 128})"
    alone = evidence.nodes if len(evidence.nodes) == 1 else ()
    return _weighed(
        "step-codes", Kind.UNKNOWN, said, suspects=alone, evidence=(said,), fault=f"step: {name}"
    )


def by_silence(evidence: Evidence) -> Attribution | None:
    """Nodes of which nothing was heard although the others had ended: the step had to be ended
    without them.
    """
    if not evidence.overdue:
        return None
    heard = _heard(evidence)
    silent = tuple(node for node in evidence.nodes if node not in heard)
    if not silent or len(silent) > len(evidence.nodes) / 2:
        return None
    said = f"{', '.join(silent)}: nothing was heard after the others had ended"
    return _weighed("silence", Kind.NODE, said, silent, evidence=(said,), fault=_of_nodes(silent))


ATTRIBUTORS: tuple[Attributor, ...] = (
    by_operator,
    by_node_state,
    by_lost_machine,
    by_lost_host,
    by_health,
    by_refusal,
    by_unwritable,
    by_last_words,
    by_death,
    by_port,
    by_agreement,
    by_error,
    by_first_exit,
    by_lost_peer,
    by_silence,
    by_first_missed,
    by_step_codes,
)


def attribute(evidence: Evidence) -> Attribution:
    """The most confident conclusion; UNKNOWN, with what there is to quote, where no attributor has
    one.
    """
    found = [
        conclusion for attributor in ATTRIBUTORS if (conclusion := attributor(evidence)) is not None
    ]
    if found:
        return max(found, key=lambda conclusion: conclusion.confidence)
    quoted = tuple(str(one) for one in sorted(evidence.failures, key=lambda one: one.time)[:3])
    quoted += tuple(line.text for line in evidence.srun[:3])
    if quoted:
        summary = quoted[0]
    else:
        summary = f"the workers ended with status {evidence.status} and no word"
    return Attribution(
        Kind.UNKNOWN, summary, 0.3, evidence=quoted, fault=f"unknown: {signature(summary)}"
    )


def _weighed(
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


# ----------------------------------------------------------------------------- words
def _of_nodes(nodes: Sequence[str]) -> str:
    return "node " + ",".join(nodes)


def _heard(evidence: Evidence) -> frozenset[str]:
    """Nodes of which something was heard when the launch ended: a worker's record, a line of srun,
    its agent's end.
    """
    heard = {node for line in evidence.srun for node in line.nodes} | {
        one.host for one in evidence.failures
    }
    return frozenset(
        heard | {report.node for report in evidence.reports if report.exit_status is not None}
    )


def _ordered(nodes: Iterable[str], evidence: Evidence) -> tuple[str, ...]:
    wanted = set(nodes)
    return tuple(node for node in evidence.nodes if node in wanted)


def _lines(first: Failure, evidence: Evidence) -> tuple[str, ...]:
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
