"""A log's summary for people (at most 80 columns) and for programs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import to_builtins

from tr11ops.base.units import size
from tr11ops.logs.summary import LoggedStart, Summary
from trainer.contract.documents import document

SCHEMA = 1
SHOWN = 8


def lines(summary: Summary, name: str) -> Iterator[str]:
    """A label and what it says, line by line; what there is none of is left out."""
    for label, text in _rows(summary, name):
        yield f"{label:>12}  {text}"


def _rows(found: Summary, name: str) -> Iterator[tuple[str, str]]:
    yield "log", f"{name} ({size(found.bytes)})"
    if found.steps == 0 and found.unnumbered:
        yield "iterations", f"none: no line of a step has its number (lines: {found.unnumbered:,})"
    elif found.steps == 0:
        yield "iterations", "none: no line of a step was found"
    else:
        total = ""
        if found.total:
            total = f" of {found.total:,}"
        highest = ""
        if found.highest != found.last:
            highest = f", highest {found.highest:,}"
        yield (
            "iterations",
            f"{found.first:,} to {found.last:,}{total}{highest} (lines: {found.steps:,})",
        )
        yield from _loss(found)
    for group, (iteration, loss) in found.validations.items():
        yield "evaluation", f"{group[:40]}: {loss:.4f} at iteration {iteration:,}"
    yield from _several("starts", len(found.starts), [_start(one) for one in found.starts])
    yield from _several(
        "gaps", len(found.gaps), [f"nothing between {a:,} and {b:,}" for a, b in found.gaps]
    )
    ends = [
        f"{one.how}{'' if one.iteration is None else f' after {one.iteration:,}'}"
        for one in found.ends
    ]
    yield from _several("clean ends", len(found.ends), ends)
    if found.pulses:
        often_first = sorted(found.pulses.items(), key=lambda entry: -entry[1])
        for number, (verdict, count) in enumerate(often_first):
            yield "" if number else "pulses", f"{count:,} {verdict}"
    silences = [
        f"{one.pulses} pulses said running after {one.iteration:,}, {one.first} on"
        for one in found.silences
    ]
    yield from _several("silences", len(found.silences), silences)
    if found.tracebacks:
        yield "tracebacks", f"{found.tracebacks:,} (tr11 logs --level error shows them)"


def _loss(found: Summary) -> Iterator[tuple[str, str]]:
    if (
        found.last_loss is not None
        and found.first_loss is not None
        and found.lowest_loss is not None
    ):
        lowest = f"lowest {found.lowest_loss:.4f} at {found.lowest_at:,}"
        yield "lm loss", f"{found.first_loss:.4f} to {found.last_loss:.4f}, {lowest}"
    if found.without_loss:
        yield "", f"steps without a finite loss: {found.without_loss:,}"


def _start(start: LoggedStart) -> str:
    if start.after is None:
        after = "no step came"
    else:
        after = f"first step {start.after:,}"
    if start.before is None:
        before = ""
    else:
        before = f", the last one before was {start.before:,}"
    redone = ""
    if start.redone:
        redone = f" ({start.redone:,} redone)"
    return f"{f'{start.attempt}: ' if start.attempt else ''}{after}{before}{redone}"


def _several(label: str, count: int, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The first few and the last one of a list that may be long."""
    if not texts:
        return
    if len(texts) <= SHOWN:
        shown = list(texts)
    else:
        shown = [*texts[: SHOWN - 2], "...", texts[-1]]
    yield label, f"{count:,}"
    yield from (("", text) for text in shown)


def value(summary: Summary, name: str) -> dict[str, Any]:
    """The summary for --json."""
    return {
        "schema": SCHEMA,
        "log": name,
        **to_builtins(summary),
        "starts": [{**document(start), "redone": start.redone} for start in summary.starts],
        "validations": {
            group: {"iteration": iteration, "lm_loss": loss if math.isfinite(loss) else None}
            for group, (iteration, loss) in summary.validations.items()
        },
    }
