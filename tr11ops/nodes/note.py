"""A note to the site's support about bad nodes, ready to send: what was seen, when, in which job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC

from tr11ops.base.units import timestamp
from tr11ops.cluster.base import Node
from tr11ops.cluster.hostlist import compress
from tr11ops.rundir.exclusion import Exclusion


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
    names = compress([*excluded, *(node.name for node in others)])
    one, verb = (
        len(excluded) + len(others) == 1,
        "has stopped using" if exclusions else "cannot use",
    )
    lines = [
        f"To: {address or '(the site support: set resilience.support_address in the run card)'}",
        f"Subject: {'Faulty node' if one else 'Faulty nodes'} {names}",
        "",
        "Hello,",
        "",
        f"the training {run} {verb} {'this node' if one else 'these nodes'}. Could you please look at",
        f"{'it' if one else 'them'}? Nothing was drained: that is yours to decide.",
        "",
    ]
    said_of = {node.name: words_of(node) for node in shut}
    for entry in exclusions:
        job = ""
        if entry.job_id:
            job = f", job {entry.job_id}"
        if entry.since is not None:
            seen = f" (seen {timestamp(entry.since, UTC)}{job})"
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
        lines += [f"{compress(alike)}: {words}", ""]
    return "\n".join([*lines, "Regards,", sender, ""])


def words_of(node: Node) -> str:
    """What the scheduler says of a node: its state, why, since when (UTC) and by whom."""
    state, why = "+".join(sorted(node.states)), _one_line(node.reason)
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
    return " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )
