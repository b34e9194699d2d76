"""A hand-over as Markdown that reads well in a terminal and in a mail, and as JSON. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import tzinfo
from typing import Any

from msgspec import to_builtins

from tr11ops.base.glyphs import plain
from tr11ops.base.glyphs import wrapped as indented
from tr11ops.base.units import NEAR, counted, duration, iso_time, node_time, quantity, timestamp
from tr11ops.handover.shift import Handover, Happened, ShiftInterruption, ShiftProgress, Trouble
from tr11ops.handover.start import command_lines, job_lines

SCHEMA = 1
MOST_LINES = 40  # of one list
KEYS = {"read_errors": "doubts"}  # in the document; programs know it by that name
_COMMAND = re.compile(r"`[^`]{1,200}`")


def markdown(handover: Handover, zone: tzinfo | None, unicode: bool = True) -> str:
    """The whole page. Lines are at most 78 characters wide where no word or command is longer."""
    return "\n".join(plain(line, unicode) for line in _lines(handover, zone)) + "\n"


def _lines(given: Handover, zone: tzinfo | None) -> Iterator[str]:
    far = given.until - given.since >= 86400.0
    title = "Hand-over" if given.start is None else "Start of shift"
    yield f"# {title}: {one_line(given.run)} / {one_line(given.variant)}"
    yield ""
    length = duration(given.until - given.since)
    yield from wrapped(
        f"{timestamp(given.since, zone)} to {timestamp(given.until, zone)} ({length}; {given.basis})",
        "",
    )
    yield ""
    yield from wrapped(
        f"**{given.verdict.upper()}.** {given.answer}. {given.why[:1].upper()}{given.why[1:]}.", ""
    )
    yield from _section("What happened", _happened(given, zone, far))
    opened = [f"{what_happened(event)}{_since(given.until - event.time)}" for event in given.open]
    yield from _section("What is open", opened or ["nothing"])
    coming = [f"{clock(event.time, zone, True)}  {what_happened(event)}" for event in given.coming]
    yield from _section("What comes next", coming or ["nothing that could be foreseen"])
    if given.start is not None:
        if given.start.group:
            group = f" of group {given.start.group}"
        else:
            group = " of the group"
        yield from _section(f"Jobs{group}", list(job_lines(given.start)))
        yield from _section("What to type", list(command_lines(given.start)))
    if given.read_errors:
        yield from _section("What could not be read", given.read_errors)


def _happened(given: Handover, zone: tzinfo | None, far: bool) -> list[str]:
    lines = [
        progress_sentence(given.progress)
        if given.progress is not None
        else "No iteration is on record."
    ]
    if given.checkpoints:
        shown = given.checkpoints
        if len(shown) <= 6:
            steps = ", ".join(map(str, shown))
        else:
            steps = f"{shown[0]} to {shown[-1]}"
        count = counted(len(shown), "checkpoint was", "checkpoints were")
        lines.append(f"{count} made and kept: {steps}.")
    else:
        lines.append("No checkpoint was made.")
    if given.copies:
        lines.append(f"Copies: {given.copies}.")
    if given.software:
        lines.append(f"Code of {given.software}.")
    timed = [
        *((event.time, trouble_sentence(event)) for event in given.incidents),
        *((event.time, _restart_sentence(event)) for event in given.restarts),
        *timed_events(given),
    ]
    lines += [
        f"{clock(time, zone, far)}  {text}"
        for time, text in sorted(timed, key=lambda pair: pair[0])
    ]
    if not timed:
        lines.append("Nothing else: no incident, no restart, no one did anything.")
    return lines


def timed_events(given: Handover) -> Iterator[tuple[float, str]]:
    """What was done in the shift, and what ended as it should, each with its moment."""
    yield from (
        (event.time, what_happened(event)) for event in (*given.ends, *given.nodes, *given.people)
    )
    yield from (
        (event.time, f"tr11 by itself: {what_happened(event, named=False)}")
        for event in given.automatic
    )
    yield from ((event.time, f"changed: {what_happened(event)}") for event in given.changes)


def progress_sentence(progress: ShiftProgress) -> str:
    if progress.iterations == 0:
        return f"No progress: iteration {progress.last:,}."
    if progress.iterations < 0:
        return f"No progress: iteration {progress.last:,} after {progress.first:,}."
    text = f"{progress.iterations:,} iterations ({progress.first:,} to {progress.last:,})"
    if progress.tokens > 0:
        text += f", {quantity(progress.tokens)} tokens"
    if progress.loss_now is not None:
        if progress.loss_before is None:
            before = ""
        else:
            before = f"{progress.loss_before:.4f} -> "
        text += f"; loss {before}{progress.loss_now:.4f}"
    if progress.useful is not None:
        text += f"; {100 * progress.useful:.0f} % of {node_time(progress.node_hours)} trained what was kept"
    return f"{text}."


def trouble_sentence(trouble: Trouble) -> str:
    text = f"{trouble.severity.name}: {trouble.title}"
    if trouble.told >= 1:
        text += f", told after {duration(trouble.told)}"
    if trouble.acknowledged_by:
        text += f", {trouble.acknowledged_by} took it"
    if trouble.lasted is None:
        return f"{text}; still open"
    return f"{text}; over after {duration(trouble.lasted)}"


def _restart_sentence(interruption: ShiftInterruption) -> str:
    text = f"{interruption.job} failed: {interruption.cause}"
    if interruption.blamed and not interruption.names_its_node:
        text += f" ({', '.join(interruption.blamed)})"
    if interruption.decision:
        text += f"; {interruption.decision}"
    if interruption.down is None:
        return f"{text}; it has not trained since"
    return f"{text}; trained on after {duration(interruption.down)}"


def what_happened(event: Happened, named: bool = True) -> str:
    if event.why:
        text = f"{event.text} ({event.why})"
    else:
        text = event.text
    if event.who and named:
        return f"{event.who}: {text}"
    return text


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""
    for line in lines[:MOST_LINES]:
        yield from wrapped(line, "- ")
    if len(lines) > MOST_LINES:
        yield f"- and {len(lines) - MOST_LINES} more (--json has all)"


def wrapped(line: str, bullet: str) -> list[str]:
    """A paragraph's lines. A command stays on one of them, so that it can be copied."""
    whole = _COMMAND.sub(
        lambda match: match[0].replace(" ", "\0"), one_line(line).replace("\0", " ")
    )
    lines = indented(whole, bullet, " " * len(bullet))
    return [line.replace("\0", " ") for line in lines]


def one_line(text: str) -> str:
    """One line, in which nothing is taken for a tag; two blanks, which stand behind a time, stay."""
    head, gap, rest = text.partition("  ")
    words = f"{' '.join(head.split())}{gap}{' '.join(rest.split())}"
    return words.replace("<", "\\<")


def clock(time: float, zone: tzinfo | None, far: bool) -> str:
    return timestamp(time, zone, NEAR if far else "%H:%M")


def _since(seconds: float) -> str:
    if seconds < 1:
        return ""
    return f", for {duration(seconds)} so far"


# ----------------------------------------------------------------------------- for programs
def document(handover: Handover) -> dict[str, Any]:
    """Plain JSON values; times are ISO 8601 in UTC, durations seconds. Described in
    docs/handover.md.
    """
    value = _plain_value(to_builtins(handover))
    if handover.start is None:
        del value["start"]
    return {"schema": SCHEMA, **{KEYS.get(name, name): item for name, item in value.items()}}


def _plain_value(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _plain_value(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if key in {"time", "since", "until"} and isinstance(value, int | float):
        return iso_time(value)
    if key == "severity":
        return str(value).lower()
    return value
