"""What the workers left behind tells of the end of a launch: one attributor a source. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from tr11ops.base.redact import signature
from tr11ops.diagnose.attribution.conclusions import (
    in_order,
    lines_of,
    nodes_heard,
    of_nodes,
    weighed,
)
from tr11ops.diagnose.attribution.error_text import read_error
from tr11ops.diagnose.attribution.evidence import (
    OUTSIDE,
    UNEXPLAINED,
    Attribution,
    Awaited,
    Evidence,
    Failure,
    Kind,
    awaited_node,
)
from tr11ops.diagnose.attribution.names import NodeNames
from tr11ops.rundir.attempts import WAITED
from tr11ops.trainers.outside import ended_from_outside
from trainer.contract.units import signal_of_status

CLOCKS_SECONDS = 2.0  # what two nodes' clocks may be apart
_TOLD_TO_GO = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
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
                apart = in_order(together, evidence)
            else:
                apart = ()
            return weighed(
                "death-everywhere",
                Kind.UNKNOWN,
                summary,
                suspects=apart,
                evidence=said,
                fault=fault,
            )
        fault = f"died: {signature(first.error)} at {first.rank}"
        rule = "death" if len({one.host for one in died}) == 1 else "death-several"
        return weighed(
            rule,
            Kind.NODE,
            str(first),
            suspects=(first.host,),
            evidence=lines_of(first, evidence),
            fault=fault,
        )
    killed = next((line for line in evidence.srun if line.is_own and line.by_signal), None)
    if killed is None or len(killed.nodes) != 1:
        return None
    return weighed(
        "death-by-srun",
        Kind.NODE,
        killed.text,
        suspects=killed.nodes,
        evidence=(killed.text,),
        fault=f"died: {signature(killed.what)}",
    )


def by_agreement(evidence: Evidence) -> Attribution | None:
    """A node that does not reach the files, by the word of all ranks, which asked for them at the
    same moment.
    """
    first = next((one for one in evidence.failures if one.node in evidence.nodes), None)
    if first is None:
        return None
    fault = f"no files: {signature(first.error)}"
    return weighed(
        "agreement",
        Kind.NODE,
        str(first),
        suspects=(first.node,),
        evidence=lines_of(first, evidence),
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
        return weighed(
            "error-of-hardware",
            Kind.NODE,
            str(first),
            alone,
            evidence=lines_of(first, evidence),
            fault=fault,
        )
    if error.is_storage or error.is_numerics:
        kind = Kind.STORAGE if error.is_storage else Kind.NUMERICS
        return weighed(f"error-{kind}", kind, str(first), evidence=said, fault=f"{kind}: {same}")
    if alone and error.may_be_nodes_own:
        return weighed(
            "error-of-one-node",
            Kind.NODE,
            str(first),
            suspects=alone,
            evidence=lines_of(first, evidence),
            fault=fault,
        )
    if error.is_memory:
        said = lines_of(first, evidence)
    if not alone and error.is_configuration and evidence.reached is None:
        return weighed(
            "error-everywhere", Kind.CONFIGURATION, str(first), evidence=said, fault=fault
        )
    after = "" if evidence.reached is None else f" (after iteration {evidence.reached})"
    return weighed(
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
        return weighed("last-words", Kind.UNKNOWN, marker.message, evidence=said, fault=UNEXPLAINED)
    # by all ranks' word: it failed twice where the others did not
    if marker.node in evidence.nodes:
        said = (f"end marker: {marker.message}",)
        return weighed(
            "cannot-save",
            Kind.NODE,
            marker.message,
            (marker.node,),
            evidence=said,
            fault=of_nodes((marker.node,)),
        )
    kind = Kind.STORAGE if read_error(marker.message).is_storage else Kind.UNKNOWN
    said = (f"end marker: {marker.message}",)
    return weighed(
        "last-words",
        kind,
        marker.message,
        evidence=said,
        fault=f"{kind}: {signature(marker.message)}",
    )


def _is_own(failure: Failure) -> bool:
    if failure.signal is not None or ended_from_outside(failure.error):
        return False
    return not read_error(failure.error).is_consequence


def by_launcher(evidence: Evidence) -> Attribution | None:
    """The launcher, ended by a signal that no one on record had sent, before any worker had failed. That
    accuses no node.
    """
    ended = next((one for one in evidence.failures if ended_from_outside(one.error)), None)
    failed = [one for one in evidence.failures if _is_own(one) or one.signal is not None]
    if evidence.marker is not None or ended is None or failed:
        return None
    return weighed(
        "launcher-killed", Kind.UNKNOWN, str(ended), evidence=(str(ended),), fault=OUTSIDE
    )


def _has_own_word(evidence: Evidence) -> bool:
    """Whether the end is on record, or a worker left a first error of its own."""
    return evidence.marker is not None or any(
        one.signal is not None or _is_own(one) for one in evidence.failures
    )


def by_first_exit(evidence: Evidence) -> Attribution | None:
    """The node whose task srun saw end first, where no worker left a first error of its own.

    A node whose workers lost a peer, one whose task was told to go, or several that ended alike
    before srun ended the rest, say nothing.
    """
    if _has_own_word(evidence):
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
    return weighed(
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
    return weighed(
        "lost-peer",
        Kind.UNKNOWN,
        str(last),
        suspects=() if are_two_ends else (accused,),
        evidence=said,
        fault=f"{WAITED}{signature(last.error)}",
    )


def by_awaited(evidence: Evidence) -> Attribution | None:
    """The node that the others waited for while the launch hung, by their stacks and last
    operations. Who waited aborts at a time-out, and is no suspect for that.

    Where these name several nodes, or the workers' words another one, none is a suspect.
    """
    ended_otherwise = any(
        one.signal != signal.SIGABRT if one.signal is not None else _is_own(one)
        for one in evidence.failures
    )
    if evidence.marker is not None or not evidence.awaited or ended_otherwise:
        return None
    words = list(evidence.awaited)
    lost = by_lost_peer(evidence)
    if lost is not None and lost.suspects:
        words.append(Awaited(lost.suspects, lost.summary))
    said = tuple(word.said for word in words)
    summary = said[0]
    suspects = awaited_node(words)
    if not suspects:
        summary = f"whom the others waited for is not known: {'; '.join(said)}"
    fault = f"{WAITED}{signature(summary)}" if lost is None else lost.fault
    return weighed("awaited", Kind.UNKNOWN, summary, suspects=suspects, evidence=said, fault=fault)


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
    if _has_own_word(evidence):
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
    return weighed(
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
    return weighed(
        "step-codes", Kind.UNKNOWN, said, suspects=alone, evidence=(said,), fault=f"step: {name}"
    )


def by_silence(evidence: Evidence) -> Attribution | None:
    """Nodes of which nothing was heard although the others had ended: the step had to be ended
    without them.
    """
    if not evidence.overdue:
        return None
    heard = nodes_heard(evidence)
    silent = tuple(node for node in evidence.nodes if node not in heard)
    if not silent or len(silent) > len(evidence.nodes) / 2:
        return None
    said = f"{', '.join(silent)}: went silent, and the others ended without it"
    return weighed("silence", Kind.NODE, said, silent, evidence=(said,), fault=of_nodes(silent))
