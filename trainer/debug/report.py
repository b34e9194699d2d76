"""What a diff answers: kinds of fault, findings, a verdict; for programs (JSON values) and for people
(text of at most 80 columns).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any, Literal, get_args

from trainer.contract import documents
from trainer.contract.record import JsonObject, Record
from trainer.debug.compare import Delta
from trainer.debug.record import RankCoordinates

# Causes before consequences: a wrong optimizer step explains weights that differ later, not the
# other way round.
FaultKind = Literal[
    "model",
    "missing",
    "optimizer-step",
    "schedule",
    "data-order",
    "random-state",
    "counters",
    "tied-copy",
    "tensor-duplicate",
    "data-replica",
    "weight",
    "master-weight",
    "moment",
]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


class DiffFinding(Record):
    """One kind of fault where it is first seen. `names`: all tensors (or facts) of this kind there,
    the first first.

    `between`: titles of the two states, or of the one state whose own copies disagree. `place`: who
    holds the first, `places`: all who hold it so. `detail`: sentences on what was seen. `later`:
    further places in time of this kind.
    """

    kind: FaultKind
    between: tuple[str, ...]
    names: tuple[str, ...]
    detail: tuple[str, ...] = ()
    place: RankCoordinates | None = None
    places: tuple[RankCoordinates, ...] = ()
    delta: Delta | None = None
    later: int = 0


class DiffVerdict(Record):
    """What a diff found, in the order of time and then of causes.

    `compared`: titles of the pairs of states; `numbers`: how many were compared; `remarks`: lines
    that are no fault.
    """

    findings: tuple[DiffFinding, ...]
    compared: tuple[tuple[str, str], ...]
    numbers: int
    remarks: tuple[str, ...]


def show_value(value: Any) -> str:
    """A fact for people: whole numbers in full, others with all the digits that tell them apart."""
    if isinstance(value, float):
        return f"{value!r}"
    return str(value)


WIDTH = 80
_SHOWN_NAMES = 4
_SHOWN_PAIRS = 6

# For each kind: its name, what it means, what to look at.
MEANING: Mapping[FaultKind, tuple[str, str, str]] = {
    "model": (
        "another model",
        "A and B do not hold the same tensors; what only one of them has cannot be compared",
        "the run cards of both, and whether A and B are of one run",
    ),
    "missing": (
        "missing dump",
        "a rank left no dump, so equality is not shown for what it holds",
        "the log of that rank (tr11 logs --rank R): it ended, or wrote elsewhere",
    ),
    "optimizer-step": (
        "optimizer step",
        "the update count does not go on; from a small one Adam's bias correction makes the next steps too large",
        "whether the optimizer's step was saved and loaded, and whether steps were skipped",
    ),
    "schedule": (
        "learning rate or schedule",
        "the schedule does not give what it gave before",
        "[schedule] and batch of both run cards; schedule.on_resume",
    ),
    "data-order": (
        "data order",
        "samples are repeated, skipped, or drawn in another order",
        "the data cursor (consumed samples), [data] and run.seed of both cards, the index maps' cache",
    ),
    "random-state": (
        "random state",
        "the generators do not go on where they were; weights and dropout masks do not follow from them",
        "whether the load restored the random state; another shape derives it again, which is right",
    ),
    "counters": (
        "counters",
        "a counter of the run is not what it was",
        "cursor.json of both checkpoints",
    ),
    "tied-copy": (
        "copy on another stage",
        "stages that share a parameter do not hold it alike; a load makes them alike, and the loss jumps",
        "reduction, clipping and weight decay of the last stage's copy; whether it is used, saved and restored",
    ),
    "tensor-duplicate": (
        "tensor-parallel duplicate",
        "a parameter that every tensor rank holds whole (LayerNorm, row bias, ...) is not equal on them",
        "whether the gradients of all tensor ranks are reduced and clipped alike before the update",
    ),
    "data-replica": (
        "data-parallel replica",
        "the replicas do not hold the same weights",
        "gradient reduction over data ranks, and the gathering of weights after the update; a faulty node",
    ),
    "weight": (
        "weights",
        "the weights themselves differ",
        "what differs before them in time: the findings above, the losses and gradient norms of these steps",
    ),
    "master-weight": (
        "fp32 master weights",
        "the optimizer's own weights differ; rounded to the model's dtype they may still be equal",
        "the update before, and whether the masters were saved and loaded or made again from rounded weights",
    ),
    "moment": (
        "optimizer moments",
        "Adam's running means differ: a gradient was different, or the moments were not restored",
        "the gradients of the steps before; whether the optimizer's state was loaded (checkpoint.load_optimizer)",
    ),
}


# ----------------------------------------------------------------------------- for programs
def document(verdict: DiffVerdict) -> JsonObject:
    """The verdict as JSON values. Numbers that JSON does not have are the strings "nan" and "inf"."""
    findings = [_finding(finding) for finding in verdict.findings]
    first = next((finding for finding in findings if finding["delta"] is not None), None)
    divergence = None
    if first is not None:
        divergence = {"tensor": first["names"][0]} | {
            key: first[key] for key in ("kind", "between", "place", "delta")
        }
    return {
        "equal": not findings,
        "first_divergence": divergence,
        "findings": findings,
        "compared": verdict.compared,
        "numbers": verdict.numbers,
        "remarks": verdict.remarks,
    }


def _finding(finding: DiffFinding) -> JsonObject:
    title, means, look_at = MEANING[finding.kind]
    shown = documents.document(finding)
    if finding.delta is not None:
        shown["delta"] |= {
            name: _number(getattr(finding.delta, name)) for name in ("largest", "a", "b")
        }
    return {**shown, "title": title, "means": means, "look_at": look_at}


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return str(value)


# ----------------------------------------------------------------------------- for people
def describe(result: Mapping[str, Any]) -> str:
    """What `document` made (with "a" and "b", what the person asked for), as text."""
    lines = [*_wrapped("A: ", result["a"]), *_wrapped("B: ", result["b"])]
    if result["equal"]:
        lines.append(f"EQUAL: {result['numbers']:,} numbers in {_comparisons(result)}")
    else:
        lines.append(f"DIFFERENT: {result['numbers']:,} numbers in {_comparisons(result)}")
        if result["first_divergence"] is not None:
            lines += _first(result["first_divergence"])
        for number, finding in enumerate(result["findings"], 1):
            lines += ["", *_section(number, finding)]
    lines += [line for remark in result["remarks"] for line in _wrapped("note: ", remark)]
    return "\n".join(lines)


def _comparisons(result: Mapping[str, Any]) -> str:
    count = len(result["compared"])
    if count == 1:
        return "one comparison"
    return f"{count} comparisons"


def _first(first: Mapping[str, Any]) -> list[str]:
    lines = _wrapped("first: ", first["tensor"])
    if first["place"] is not None:
        lines += _wrapped("       on ", str(RankCoordinates(**first["place"])))
    lines += _wrapped("       in ", " against ".join(first["between"]))
    return lines + _wrapped("       ", _delta_text(first["delta"]))


def _section(number: int, finding: Mapping[str, Any]) -> list[str]:
    names = finding["names"]
    more = ""
    if len(names) > _SHOWN_NAMES:
        more = f" and {len(names) - _SHOWN_NAMES} more"
    shown = ", ".join(names[:_SHOWN_NAMES]) + more
    lines = _wrapped(
        f"{number}. ", f"{finding['title'].upper()}: {shown}" if shown else finding["title"].upper()
    )
    lines += _wrapped("   in ", " against ".join(finding["between"]))
    lines += [line for detail in finding["detail"] for line in _wrapped("   ", detail)]
    if len(finding["places"]) > 0:
        lines += _wrapped("   held by ", _places(finding["places"]))
    if finding["delta"] is not None:
        lines += _wrapped("   ", _delta_text(finding["delta"]))
    lines += _wrapped("   means:   ", finding["means"])
    lines += _wrapped("   look at: ", finding["look_at"])
    if finding["later"]:
        lines.append(f"   seen {finding['later']} more time(s) later")
    return lines


def _places(places: list[Mapping[str, int]]) -> str:
    if len(places) == 1:
        return str(RankCoordinates(**places[0]))
    axes = []
    for axis, word in (("stage", "stage"), ("tensor", "tensor rank"), ("data", "data rank")):
        values = sorted({place[axis] for place in places})
        shown = ", ".join(map(str, values[:_SHOWN_PAIRS])) + (
            ", ..." if len(values) > _SHOWN_PAIRS else ""
        )
        axes.append(f"{word} {shown}")
    return f"{len(places)} ranks: {'; '.join(axes)}"


def _delta_text(delta: Mapping[str, Any]) -> str:
    if delta["largest"] == "nan" and delta["different"] is None:
        return "the shapes differ, or one side is not a number"
    largest = float(delta["largest"])
    if delta["different"] is None:
        return f"its bits differ; least, largest, mean or norm by up to {largest:.3g} (fingerprints show no more)"
    text = f"{delta['different']:,} of {delta['count']:,} numbers differ, by up to {largest:.3g}"
    if delta["at"] is None:
        return text
    return f"{text}: at {delta['at']} {float(delta['a']):.9g} in A, {float(delta['b']):.9g} in B"


def _wrapped(head: str, text: str) -> list[str]:
    """Lines of at most WIDTH columns, but for long names, which are never broken; text stands below
    text.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
