"""What is known of the nodes, side by side: the scheduler's word, this run's exclusions, the jobs.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC

from tr11ops.base.units import plain, timestamp, wrapped
from tr11ops.cluster.arrays import compress
from tr11ops.cluster.base import Job, Node
from tr11ops.rundir.exclusion import Exclusion, kept_off
from trainer.contract.record import Record

# --------------------------------------------------------------------- a note to the site's support
# About bad nodes, ready to send: what was seen, when, in which job.

NOTE_WIDTH = 76
NOT_EXCLUDED = "not excluded by this run"


def support_note(
    exclusions: Sequence[Exclusion],
    run: str,
    sender: str,
    address: str | None,
    shut: Sequence[Node] = (),
) -> str:
    """Head lines as a mail has them, and the body. Times are UTC. Raises ValueError when there is
    nothing to report.

    `shut`: nodes on which the scheduler itself places no work, whether or not they are excluded.
    """
    excluded = {entry.node for entry in exclusions}
    others = [node for node in shut if node.name not in excluded]
    if not exclusions and not others:
        raise ValueError(
            "no node is excluded, and the scheduler can use all: there is nothing to report"
        )
    lines = [
        f"To: {address or '(the site support: set resilience.support_address in the run card)'}",
        f"Subject: {_subject(excluded, [node.name for node in others])}",
        "",
        "Hello,",
        "",
        *_request(run, excluded, [node.name for node in others]),
        "",
    ]
    said_of = {node.name: words_of(node) for node in shut}
    for entry in exclusions:
        job = ""
        if entry.job_id:
            job = f", job {entry.job_id}"
        if entry.since is not None:
            seen = f" ({kept_off(entry.state)} since {timestamp(entry.since, UTC)}{job})"
        else:
            seen = job
        why = short_reason(entry)
        lines.append(f"{entry.node}: {why or 'no reason was noted'}{seen}")
        said = (_one_line(line) for line in entry.evidence)
        lines += [f"    {line}" for line in said if line.removeprefix(f"{entry.node}: ") != why]
        lines += [f"    the scheduler says: {said_of[entry.node]}"] if entry.node in said_of else []
        lines.append("")
    groups: dict[str, list[str]] = {}
    for node in others:
        groups.setdefault(said_of[node.name], []).append(node.name)
    for words, alike in groups.items():
        lines += [f"{compress(alike)}: {NOT_EXCLUDED}; {words}", ""]
    return "\n".join([*lines, "Regards,", sender, ""])


def _subject(excluded: Collection[str], others: Collection[str]) -> str:
    """What the note is about: a node that the run does not exclude is called no more than out of
    service.
    """
    parts = []
    if excluded:
        parts.append(
            f"{'Faulty node' if len(excluded) == 1 else 'Faulty nodes'} {compress(excluded)}"
        )
    if others:
        parts.append(f"out of service: {compress(others)}")
    subject = "; ".join(parts)
    return subject[0].upper() + subject[1:]


def _request(run: str, excluded: Collection[str], others: Collection[str]) -> list[str]:
    """The note's first paragraph: what the run does about which nodes, and what is asked."""
    sentences = []
    if excluded:
        sentences.append(f"The training {run} keeps its next jobs off {compress(excluded)}.")
    if others:
        sentences.append(
            f"The scheduler has {compress(others)} out of service;"
            f" the training {run} has not excluded {_pronoun(len(others))}."
        )
    sentences.append(f"Could you please look at {_pronoun(len(excluded) + len(others))}?")
    sentences.append("Nothing was drained: that is yours to decide.")
    text = " ".join(sentences)
    text = text[0].lower() + text[1:]  # it follows "Hello,"
    return wrapped(text, width=NOTE_WIDTH)


def _pronoun(count: int) -> str:
    if count == 1:
        return "it"
    return "them"


def words_of(node: Node) -> str:
    """What the scheduler says of a node: its state, why, since when (UTC) and by whom."""
    state = "+".join(sorted(node.states))
    why = _one_line(node.reason)
    since = ""
    if node.reason_time is not None:
        since = f" since {timestamp(node.reason_time, UTC)}"
    by = ""
    if node.reason_user:
        by = f", by {node.reason_user}"
    return f"{state}{since}{by}: {why or 'no reason is given'}"


def short_reason(entry: Exclusion) -> str:
    """Why a node is excluded, on one line and without its own name before it."""
    return _one_line(entry.why).removeprefix(f"{entry.node}: ")


def _one_line(text: str) -> str:
    return " ".join(plain(text, unicode=True).split())


class NodeRow(Record):
    """One node. `state` is None for one that the scheduler does not know (any more); `jobs` hold it
    now.
    """

    name: str
    state: str | None
    reason: str
    exclusion: Exclusion | None
    jobs: tuple[str, ...]
    suspicion: Exclusion | None = None  # it is used on, after the others
    elsewhere: tuple[Exclusion, ...] = ()  # what other runs have on record of it
    node: Node | None = None  # as the scheduler has it, None as `state`


def is_shut(node: Node) -> bool:
    """Whether the scheduler itself places no work there, by what it says."""
    return not node.is_usable and not node.is_unknown


def is_lost(node: Node) -> bool:
    """Whether nothing runs there any more, or it does not answer: not where the site has taken it
    out of service.
    """
    return node.is_gone or node.is_silent


def rows(
    nodes: Iterable[Node],
    exclusions: Iterable[Exclusion],
    jobs: Iterable[Job],
    suspects: Iterable[Exclusion] = (),
    elsewhere: Iterable[Exclusion] = (),
) -> tuple[NodeRow, ...]:
    """A row for each node, and for each excluded one that is not among them, by name."""
    suspected = {entry.node: entry for entry in suspects}
    others = tuple(elsewhere)
    by_name = {node.name: node for node in nodes}
    excluded = {entry.node: entry for entry in exclusions}
    holders = holders_of(jobs)
    found = []
    for name in sorted({*by_name, *excluded}):
        node = by_name.get(name)
        entry = excluded.get(name)
        found.append(
            NodeRow(
                name=name,
                state="+".join(sorted(node.states)) if node else None,
                reason=node.reason if node else "",
                exclusion=entry,
                jobs=tuple(job.job_id for job in holders.get(name, ())),
                suspicion=suspected.get(name),
                elsewhere=tuple(one for one in others if one.node == name),
                node=node,
            )
        )
    return tuple(found)


def holders_of(jobs: Iterable[Job]) -> Mapping[str, tuple[Job, ...]]:
    """Node name to the jobs that hold it now."""
    found: dict[str, tuple[Job, ...]] = {}
    for job in jobs:
        if job.state.is_active:
            for name in job.nodes:
                found[name] = (*found.get(name, ()), job)
    return found
