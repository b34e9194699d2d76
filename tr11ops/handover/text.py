"""A hand-over as Markdown that reads well in a terminal and in a mail, as JSON, and as an entry of a
chronicle: what happened, on what evidence, what was done, what it cost. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import tzinfo
from typing import Any

from msgspec import to_builtins

from tr11ops.base.units import (
    DAY,
    NEAR,
    capitalized,
    counted,
    duration,
    iso_time,
    node_time,
    plain,
    quantity,
    timestamp,
    wrapped as indented,
)
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
        f"**{given.verdict.upper()}.** {given.answer}. {capitalized(given.why)}.", ""
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
    elif given.saves_unseen:
        lines.append("Its checkpoints are not known: none of them is held.")
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
    if progress.tokens is not None and progress.tokens > 0:
        text += f", {quantity(progress.tokens)} tokens"
    if progress.loss_now is not None:
        before = ""
        if progress.loss_before is not None:
            before = f"{progress.loss_before:.4f} -> "
        text += f"; loss {before}{progress.loss_now:.4f}"
    if progress.useful is not None:
        text += f"; {100 * progress.useful:.0f} % of {node_time(progress.node_hours)} {progress.useful_did}"
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
    docs/how-to/handover.md.
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


# ----------------------------------------------------------------------------- as an entry of a chronicle
# It is written for those who read it in a year: each fault has a heading of its own, with everything
# that was done until the training went on; what belongs to no fault comes at the end.
BEFORE_SECONDS = 300.0  # an alert that began so shortly before a fault is its first sign
MOST_QUOTED = 5
_Events = list[tuple[float, str]]


def chronicle(handover: Handover, zone: tzinfo | None) -> str:
    """The entry; lines are at most 78 characters wide where no word or command is longer."""
    return "\n".join(_chronicle_lines(handover, zone)) + "\n"


def _chronicle_lines(given: Handover, zone: tzinfo | None) -> Iterator[str]:
    first = timestamp(given.since, zone, DAY)
    last = timestamp(given.until, zone, DAY)
    if first == last:
        days = first
    else:
        days = f"{first} to {last}"
    yield f"## {days}: {one_line(given.run)} / {one_line(given.variant)}"
    yield ""
    yield from wrapped(_summary(given), "")
    episodes, rest = _episodes(given)
    far = first != last
    for fault, events in zip(given.restarts, episodes, strict=True):
        yield from _fault_section(fault, events, zone, far)
    if rest:
        yield ""
        yield "### Besides"
        yield ""
        for time, text in rest:
            yield from wrapped(f"{clock(time, zone, far)}  {text}", "- ")
    if given.read_errors:
        yield ""
        yield from wrapped(f"Not read: {'; '.join(given.read_errors)}.", "")


def _summary(given: Handover) -> str:
    if given.progress is None:
        progress = "No iteration is on record."
    else:
        progress = progress_sentence(given.progress)
    count = len(given.restarts)
    if not count:
        faults = "No fault."
    else:
        lost = node_time(sum(map(_hours, given.restarts)))
        faults = f"{counted(count, 'fault')}, {lost} lost."
    saved = ""
    if given.checkpoints:
        saved = f" {counted(len(given.checkpoints), 'checkpoint')} made."
    return f"{progress}{saved} {faults}"


def _episodes(given: Handover) -> tuple[list[_Events], _Events]:
    """Every event of the shift once, by time: with the fault whose time it lies in, the later one of
    two, else in the rest.
    """
    ends = [
        fault.time + fault.down if fault.down is not None else given.until
        for fault in given.restarts
    ]
    found: list[_Events] = [[] for _ in given.restarts]
    rest: _Events = []
    alerts = ((trouble.time, f"alert {trouble_sentence(trouble)}") for trouble in given.incidents)
    for time, text in (*alerts, *timed_events(given)):
        inside = [
            index
            for index, (fault, end) in enumerate(zip(given.restarts, ends, strict=True))
            if fault.time - BEFORE_SECONDS <= time <= end
        ]
        (found[inside[-1]] if inside else rest).append((time, text))
    return [sorted(events) for events in found], sorted(rest)


def _fault_section(
    fault: ShiftInterruption, events: _Events, zone: tzinfo | None, far: bool
) -> Iterator[str]:
    nodes = ""
    if fault.blamed and not fault.names_its_node:
        nodes = f" on {', '.join(fault.blamed)}"
    yield ""
    yield from wrapped(
        f"### {clock(fault.time, zone, far)}  {fault.job} failed{nodes}: {fault.cause}", ""
    )
    if fault.evidence:
        yield ""
        for line in fault.evidence[:MOST_QUOTED]:
            yield f"    {one_line(line)}"
    yield ""
    done = [f"{clock(time, zone, far)}  {text}" for time, text in events]
    done += [f"then: {fault.decision}"] if fault.decision else []
    for line in done or ["nothing is on record"]:
        yield from wrapped(line, "- ")
    yield ""
    yield from wrapped(_cost(fault), "")


def _cost(fault: ShiftInterruption) -> str:
    stood = "It has not trained since."
    if fault.down is not None:
        stood = f"It trained on after {duration(fault.down)}."
    parts = [f"{hours:,.1f} {bucket}" for bucket, hours in fault.node_hours.items()]
    lost = ""
    if parts:
        lost = f" Cost: {_hours(fault):,.1f} node hours ({', '.join(parts)})"
    again = ""
    if fault.trained_again:
        again = f"; {counted(fault.trained_again, 'iteration')} trained again"
    return f"{stood}{lost}{again if lost else ''}{'.' if lost else ''}"


def _hours(fault: ShiftInterruption) -> float:
    return sum(fault.node_hours.values())
