"""The catalogue of checkpoints as text for people: at most 80 columns for the numbers of a 176B
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

from tr11ops.base.observed import Unknown
from tr11ops.base.units import quantity, rough_duration, size
from tr11ops.checkpoints.catalogue import Catalogue
from tr11ops.checkpoints.retention import RetentionDecision, counts
from tr11ops.dialects.settings import NO_DIALECT
from tr11ops.rundir.checkpoint_digests import NotFiniteRecord
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.copies import CopyRecord
from trainer.contract.checkpoint_names import SUPERSEDED_SUFFIX
from trainer.contract.units import printable

_HEAD = ("step", "size", "tokens", "age", "state", "read", "copies", "kept")
# what is shortened in the columns, as the help page says it too
MARKS = {
    "state": {
        "whole": "every file has its size",
        "NOT WHOLE": "the lines above say why",
        "no resume": "no restart takes it: see above",
        "no manifest": "another trainer wrote it",
    },
    "read": {
        "never": "its bytes were not compared yet",
        "ago": "all bytes agreed then",
        "BAD": "so many files differ",
        "NaN": "a number is NaN or infinite",
        "?": "not known",
    },
    "copies": {
        ":w": "weights alone",
        ":s": "weights around a spike",
        ":BAD": "damaged, or NaN or infinity in it",
    },
    "kept": {
        "latest": "a restart takes it",
        "use": "needed now",
        "pin": "kept by hand",
    },
}
_LEFT = {"state", "read", "copies", "kept", "why", "what"}
_SHOWN_FAULTS = 3
_SHORT_KINDS = {"full": "", "weights": ":w", "spike": ":s"}
_WIDTH = 80


def table(catalogue: Catalogue, now: float) -> str:
    """One line a checkpoint, oldest first, then what is to be said of some; `now`: seconds since
    the epoch.
    """
    cells = [_cells(entry, now) for entry in catalogue.checkpoints]
    lines = _columns(_HEAD, cells)
    for entry in catalogue.checkpoints:
        lines += _wrapped(_remarks(entry), f"step {entry.step}: ")
    if catalogue.quarantined:
        rows = [
            (
                quarantined.name,
                size(quarantined.bytes),
                _age(quarantined.changed, now),
                quarantined.kind,
            )
            for quarantined in catalogue.quarantined
        ]
        lines += [
            "",
            *_columns(("beside them", "size", "age", "what"), rows, left={"beside them", "what"}),
        ]
    shapes = {entry.shape for entry in catalogue.checkpoints}
    shape = ""
    foreign = {entry.foreign.dialect for entry in catalogue.checkpoints if entry.foreign}
    if foreign:
        named = ", ".join(sorted(foreign - {NO_DIALECT})) or "another trainer"
        alone = size(sum(entry.freed for entry in catalogue.checkpoints))
        shape = f", held of {named}: {alone} are here alone, the rest are links"
    elif len(shapes) == 1:
        shape = f", {shapes.pop()} (tensor x pipeline x data)"
    total = size(sum(entry.bytes for entry in catalogue.checkpoints))
    beside = ""
    if catalogue.quarantined:
        beside = (
            f", {size(sum(quarantined.bytes for quarantined in catalogue.quarantined))} beside them"
        )
    foot = f"{len(catalogue.checkpoints)} of them, {total}{beside}{shape}"
    return "\n".join([*lines, *_wrapped([foot, *_origin(catalogue)], ""), *_legend(cells)])


def _origin(catalogue: Catalogue) -> Iterator[str]:
    """What the first of them was trained from, where that is another run's."""
    origin = catalogue.origin
    if isinstance(origin, Unknown):
        yield f"what the run began with is not known: {origin.why}"
    elif origin is not None:
        yield f"the run began with {origin.lineage}"


def _legend(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """What the marks in these lines mean."""
    for column, marks in MARKS.items():
        cells = [row[_HEAD.index(column)] for row in rows]
        found = [mark for mark in marks if any(mark in cell for cell in cells)]
        if found:
            meanings = ", ".join(f"{mark} = {marks[mark]}" for mark in found)
            yield from _wrapped([meanings], f"{column}: ")


def decisions_table(decisions: Sequence[RetentionDecision]) -> str:
    """One line a folder, by its step, with why it goes or stays."""
    names = [decision.name.removeprefix("global_step") for decision in decisions]
    width = max(map(len, names), default=0)
    lines = []
    for name, decision in zip(names, decisions, strict=True):
        verb = "remove" if decision.goes else "keep"
        lines += _wrapped(
            [decision.why], f"{verb:<6}  {name:>{width}}  {size(decision.bytes):>9}  "
        )
    return "\n".join(lines)


def decisions_summary(decisions: Sequence[RetentionDecision]) -> str:
    """How much goes, and how many stay by which rule."""
    gone = [decision for decision in decisions if decision.goes]
    kept = ", ".join(f"{count} {rule}" for rule, count in counts(decisions)) or "none"
    first = f"{len(gone)} to remove, {size(sum(decision.bytes for decision in gone))}"
    return "\n".join([first, *_wrapped([kept], "kept: "), *_superseded_line(decisions)])


def _superseded_line(decisions: Iterable[RetentionDecision]) -> Iterator[str]:
    """What no round copies, so that no later prune removes it either: a person decides."""
    stay = [
        entry
        for entry in decisions
        if entry.rule == "not backed up" and SUPERSEDED_SUFFIX in entry.name
    ]
    if stay:
        total = size(sum(entry.bytes for entry in stay))
        text = f"{len(stay)} ({total}) without a copy, which no round makes: tr11 checkpoints remove NAME"
        yield from _wrapped([f"{text}, such as {stay[0].name}"], "superseded: ")


def _columns(
    head: tuple[str, ...], rows: Iterable[tuple[str, ...]], left: Iterable[str] = _LEFT
) -> list[str]:
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def _wrapped(texts: Iterable[str], head: str) -> list[str]:
    """Each text behind the head, on more lines where it is long."""
    indent = " " * min(len(head), _WIDTH - 30)
    return [
        line
        for text in texts
        for line in wrap(
            head + printable(text), _WIDTH, subsequent_indent=indent, break_on_hyphens=False
        )
        or [head.rstrip()]
    ]


def _cells(entry: SavedCheckpoint, now: float) -> tuple[str, ...]:
    if entry.pin:
        marks = ["pin"]
    else:
        marks = []
    if entry.is_latest:
        marks.insert(0, "latest")
    elif entry.used_by:
        marks.insert(0, "use")
    return (
        str(entry.step),
        size(entry.bytes),
        "?" if entry.consumed_tokens is None else quantity(entry.consumed_tokens),
        _age(entry.created, now),
        entry.state,
        _read(entry, now),
        " ".join(sorted({_copy(copy) for copy in entry.copies})) or "-",
        ",".join(marks),
    )


def _read(entry: SavedCheckpoint, now: float) -> str:
    """What the last reading of all bytes found, and how long ago; or that its numbers are bad."""
    if isinstance(entry.numbers, NotFiniteRecord):
        return "NaN"
    if entry.digests is None:
        return "never"
    if isinstance(entry.digests, Unknown):
        return "?"
    if entry.digests.bad:
        return f"{len(entry.digests.bad)} BAD"
    return f"{_age(entry.digests.time, now)} ago"


def _copy(copy: CopyRecord) -> str:
    return f"{copy.archive}{_SHORT_KINDS[copy.kind]}{'' if copy.is_sound else ':BAD'}"


def _age(moment: float | None, now: float) -> str:
    """How long ago, in one unit."""
    if moment is None:
        return "?"
    return rough_duration(now - moment)


def _remarks(entry: SavedCheckpoint) -> Iterator[str]:
    """What does not fit into the line."""
    yield from _first(entry.faults)
    if entry.lack:
        yield entry.lack
    if entry.unnamed:
        more = ""
        if len(entry.unnamed) > 1:
            more = f" and {len(entry.unnamed) - 1} more"
        yield f"holds {entry.unnamed[0]}{more}, which its manifest does not name: whole copies hold it, prune keeps all"
    if isinstance(entry.digests, Unknown):
        yield f"what was read is not known: {entry.digests.why}"
    elif entry.digests is not None:
        yield from _first(entry.digests.bad)
    if isinstance(entry.numbers, Unknown):
        yield f"what its numbers are is not known: {entry.numbers.why}"
    elif entry.numbers is not None:
        yield from _first([f"NaN or infinity in {name}" for name in entry.numbers.not_finite])
    for copy in entry.copies:
        if copy.fault:
            yield f"its copy {copy.archive}:{copy.location} is {copy.fault}"
    if entry.pin is not None:
        yield f"pinned by {entry.pin.who}" + (f": {entry.pin.why}" if entry.pin.why else "")
    if entry.is_discarded:
        yield "a roll-back discarded it: the next start sets it aside"
    yield from (use for use in entry.used_by if not entry.is_latest or use != "latest names it")


def _first(faults: Sequence[str]) -> Iterator[str]:
    yield from faults[:_SHOWN_FAULTS]
    if len(faults) > _SHOWN_FAULTS:
        yield f"and {len(faults) - _SHOWN_FAULTS} more"
