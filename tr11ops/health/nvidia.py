"""Asking `nvidia-smi`: one row a GPU, one field a column."""

from __future__ import annotations

from collections.abc import Sequence

from tr11ops.health.base import ProbeOutput, System, Unanswered

INVALID_FIELD = "is not a valid field to query"  # of a driver that is older or newer than the field's name


def query(system: System, fields: Sequence[str], seconds: float, what: str = "gpu") -> list[dict[str, str]]:
    """`nvidia-smi --query-WHAT=fields`, by field name. Values such as `[N/A]` lose their brackets.

    Raises Unanswered when there is no nvidia-smi, when it fails, or when it does not know a field.
    """
    output = ask(system, [f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"], seconds)
    if output.status != 0:
        raise Unanswered(words_of(output))
    rows = [[cell.strip().strip("[]") for cell in line.split(",")] for line in output.text.splitlines() if line.strip()]
    if any(len(row) != len(fields) for row in rows):
        raise Unanswered(f"nvidia-smi wrote something else than asked for: {output.text.strip()[:80]!r}")
    return [dict(zip(fields, row, strict=True)) for row in rows]


def ask(system: System, arguments: Sequence[str], seconds: float) -> ProbeOutput:
    """Run nvidia-smi. Raises Unanswered when there is none or it takes too long."""
    try:
        return system.command(["nvidia-smi", *arguments], seconds)
    except FileNotFoundError:
        raise Unanswered("there is no nvidia-smi on this node") from None


def words_of(output: ProbeOutput) -> str:
    """What a failed nvidia-smi said, in one line."""
    said = " ".join((output.text.strip() or output.error.strip()).split())
    return f"nvidia-smi: {said[:200]}" if said else f"nvidia-smi ended with status {output.status} and no word"


def number(text: str) -> int | None:
    """A whole number, or None where nvidia-smi has none (`N/A`, `Not Supported`, ...)."""
    return int(text) if text.isdigit() else None
