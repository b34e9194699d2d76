"""A note to the site's support about bad nodes, ready to send: what was seen, when, in which job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC

from tr11ops.base.units import timestamp
from tr11ops.cluster.hostlist import compress
from tr11ops.rundir.exclusion import Exclusion


def support_note(exclusions: Sequence[Exclusion], run: str, sender: str, address: str | None) -> str:
    """Head lines as a mail has them, and the body. Times are UTC. Raises ValueError when there is nothing to report."""
    if not exclusions:
        raise ValueError("no node is excluded: there is nothing to report")
    names = compress(entry.node for entry in exclusions)
    one = len(exclusions) == 1
    lines = [
        f"To: {address or '(the site support: set resilience.support_address in the run card)'}",
        f"Subject: {'Faulty node' if one else 'Faulty nodes'} {names}",
        "",
        "Hello,",
        "",
        f"the training {run} has stopped using {'this node' if one else 'these nodes'}. Could you please look at",
        f"{'it' if one else 'them'}? Nothing was drained: that is yours to decide.",
        "",
    ]
    for entry in exclusions:
        job = f", job {entry.job_id}" if entry.job_id else ""
        seen = f" (seen {timestamp(entry.since, UTC)}{job})" if entry.since is not None else job
        why = short_reason(entry)
        lines.append(f"{entry.node}: {why or 'no reason was noted'}{seen}")
        said = (_one_line(line) for line in entry.evidence)
        lines += [f"    {line}" for line in said if line.removeprefix(f"{entry.node}: ") != why]
        lines.append("")
    return "\n".join([*lines, "Regards,", sender, ""])


def short_reason(entry: Exclusion) -> str:
    """Why a node is excluded, on one line and without its own name before it."""
    return _one_line(entry.why).removeprefix(f"{entry.node}: ")


def _one_line(text: str) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
