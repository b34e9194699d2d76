"""How the run's data sets and tokenizer stand at each archive, in lines and as JSON values. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tr11ops.base.units import first_few, size

if TYPE_CHECKING:
    from tr11ops.backup.data_sets import DataState

NAMED = 6


def data_lines(found: Mapping[str, Sequence[DataState]]) -> Iterator[str]:
    """A line for each archive, then one for each of its faults; none where the card asks for no
    copies of data.
    """
    for archive, states in found.items():
        if states:
            yield f"{archive}: data: {data_summary(states)}"
        yield from (
            f"{archive}: data: {state.unit.name}: CANNOT BE COPIED: {state.why}"
            for state in _faulty(states)
        )


def data_summary(states: Sequence[DataState]) -> str:
    """How many are copied, and which are not."""
    copied = [state for state in states if state.state == "copied"]
    text = f"{len(copied)} of {len(states)} copied ({size(sum(state.bytes for state in copied))})"
    for word in ("due", "damaged"):
        those = [state for state in states if state.state == word]
        if those:
            names = first_few((state.unit.name for state in those), NAMED)
            text += f"; {word}: {names} ({size(sum(state.bytes for state in those))})"
    return text


def data_value(found: Mapping[str, Sequence[DataState]]) -> dict[str, list[dict[str, Any]]]:
    """The same as JSON values, by archive."""
    return {
        archive: [
            {
                "name": state.unit.name,
                "state": state.state,
                "bytes": state.bytes,
                "why": state.why or None,
            }
            for state in states
        ]
        for archive, states in found.items()
    }


def _faulty(states: Sequence[DataState]) -> list[DataState]:
    return [state for state in states if state.state == "fault"]
