"""A shift as an entry of a chronicle: what happened, on what evidence, what was done, what it cost.
Pure.

A chronicle is written for those who read it in a year: each fault has a heading of its own, with
everything that was done until the training went on; what belongs to no fault comes at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import tzinfo

from tr11ops.base.units import DAY, counted, duration, node_time, timestamp
from tr11ops.handover.shift import Handover, ShiftInterruption
from tr11ops.handover.text import (
    clock,
    one_line,
    progress_sentence,
    timed_events,
    trouble_sentence,
    wrapped,
)
from trainer.contract.record import Record

BEFORE_SECONDS = 300.0  # an alert that began so shortly before a fault is its first sign
MOST_QUOTED = 5


class _Episode(Record):
    """A fault and what was done until it was over; `events` by time."""

    fault: ShiftInterruption
    end: float
    events: tuple[tuple[float, str], ...]


def chronicle(handover: Handover, zone: tzinfo | None) -> str:
    """The entry; lines are at most 78 characters wide where no word or command is longer."""
    return "\n".join(_lines(handover, zone)) + "\n"


def _lines(given: Handover, zone: tzinfo | None) -> Iterator[str]:
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
    for episode in episodes:
        yield from _section(episode, zone, far)
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


def _episodes(given: Handover) -> tuple[list[_Episode], list[tuple[float, str]]]:
    """Every event of the shift once: with the fault whose time it lies in, the later one of two,
    else in the rest.
    """
    ends = [
        fault.time + fault.down if fault.down is not None else given.until
        for fault in given.restarts
    ]
    found: list[list[tuple[float, str]]] = [[] for _ in given.restarts]
    rest: list[tuple[float, str]] = []
    alerts = ((trouble.time, f"alert {trouble_sentence(trouble)}") for trouble in given.incidents)
    for time, text in (*alerts, *timed_events(given)):
        inside = [
            index
            for index, (fault, end) in enumerate(zip(given.restarts, ends, strict=True))
            if fault.time - BEFORE_SECONDS <= time <= end
        ]
        (found[inside[-1]] if inside else rest).append((time, text))
    episodes = [
        _Episode(fault, end, tuple(sorted(events)))
        for fault, end, events in zip(given.restarts, ends, found, strict=True)
    ]
    return episodes, sorted(rest)


def _section(episode: _Episode, zone: tzinfo | None, far: bool) -> Iterator[str]:
    fault = episode.fault
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
    done = [f"{clock(time, zone, far)}  {text}" for time, text in episode.events]
    done += [f"then: {fault.decision}"] if fault.decision else []
    for line in done or ["nothing is on record"]:
        yield from wrapped(line, "- ")
    yield ""
    yield from wrapped(_cost(fault), "")


def _cost(fault: ShiftInterruption) -> str:
    if fault.down is None:
        stood = "It has not trained since."
    else:
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
