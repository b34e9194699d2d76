"""Which messages a look makes of what is to be said: few for each person, whatever the number of
alerts. Pure.

- A CRITICAL alert is in a message of its own, but those of one detector, of which one look says the same, share one.
- What is over at one look shares one, whatever it was.
- All that is said of lesser alerts in one look is one message to each person.
- People who are told the same are told it in one message.
"""

from __future__ import annotations

from collections.abc import Iterable

from tr11ops.alerts.state import OVER, Alert
from tr11ops.detect.causes import lead
from tr11ops.detect.finding import Severity
from trainer.contract.record import Record

_ORDER = (
    "opened",
    "raised",
    "reopened",
    "cause",
    "uncured",
    "again",
    "escalated",
    "assigned",
    "repeated",
    "replaced",
    "cleared",
)


class MessagePart(Record):
    """That something is said of an alert, and to whom: kind of message and addresses."""

    alert: Alert
    kind: str
    to: tuple[str, ...]


class MessageGroup(Record):
    """One message: its parts, the most severe first, and who gets it; `urls`: the delivery URLs do
    too.
    """

    parts: tuple[MessagePart, ...]
    to: tuple[str, ...]
    urls: bool


def grouped(parts: Iterable[MessagePart]) -> tuple[MessageGroup, ...]:
    """The messages of one look, the critical ones first. The delivery URLs are told all, each part
    once.
    """
    ordered = sorted(parts, key=_place)
    bundles: dict[tuple[str, ...], list[MessagePart]] = {}
    for part in ordered:
        bundles.setdefault(_bundle_of(part), []).append(part)
    return tuple(group for bundle in bundles.values() for group in _by_person(bundle))


def _place(part: MessagePart) -> tuple[int, int, int, float]:
    """The most severe first; of equals what is newest to people, then the strongest cause, then the
    oldest.
    """
    alert = part.alert
    severity, strength = lead(alert.detector, alert.severity)
    return severity, _ORDER.index(part.kind), strength, alert.began


def _bundle_of(part: MessagePart) -> tuple[str, ...]:
    """What the parts of one message have in common."""
    if part.alert.severity < Severity.CRITICAL:
        return ()
    if part.kind in OVER:
        return (part.kind,)
    return (part.alert.detector, part.kind)


def _by_person(bundle: list[MessagePart]) -> list[MessageGroup]:
    people = dict.fromkeys(address for part in bundle for address in part.to)
    everything = tuple(range(len(bundle)))
    readers: dict[tuple[int, ...], list[str]] = {everything: []}
    for address in people:
        mine = tuple(index for index, part in enumerate(bundle) if address in part.to)
        readers.setdefault(mine, []).append(address)
    return [
        MessageGroup(tuple(bundle[index] for index in mine), tuple(to), urls=mine == everything)
        for mine, to in readers.items()
    ]
