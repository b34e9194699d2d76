"""Counters, schedule, data and random state of two states: which of them do not go on as they should. Pure rules."""

from __future__ import annotations

from typing import Any

from trainer.contract.resumable import OPTIMIZER_SUMS
from trainer.debug.snapshot import StateSnapshot
from trainer.debug.verdict import DiffFinding, FaultKind, show_value

_SCHEDULE = ("learning_rate", "loss_scale")
_DATA = ("consumed_samples", "consumed_tokens", "samples_digest", "consumed_valid_samples")
_STEP = "optimizer_step"
_ALIKE = (_STEP, "learning_rate", "consumed_samples", "consumed_tokens")  # on all ranks
# Names of the state itself, what is no property of the training's course, and what follows from the tensors.
_IGNORED = {"step", "iteration", OPTIMIZER_SUMS}


def fact_findings(a: StateSnapshot, b: StateSnapshot) -> list[DiffFinding]:
    """Facts that both know: equal after the same number of steps, else moved on by what lies between."""
    one, other = _shared(a), _shared(b)
    steps = b.completed - a.completed
    found: dict[FaultKind, dict[str, str]] = {}
    for name in sorted((one.keys() & other.keys()) - _IGNORED):
        if name == "samples_digest":
            line = _samples_fault(a, b, one[name] == other[name])
        elif steps:
            line = _continuity_fault(name, one[name], other[name], steps)
        else:
            line = None if one[name] == other[name] else _unequal(name, one[name], other[name])
        if line is not None:
            found.setdefault(_kind_of(name), {})[name] = line
    return [
        DiffFinding(kind, (a.title, b.title), tuple(lines), detail=tuple(lines.values()))
        for kind, lines in found.items()
    ]


def _unequal(name: str, one: Any, other: Any) -> str:
    return f"{name} is {show_value(one)} in A and {show_value(other)} in B"


def _samples_fault(a: StateSnapshot, b: StateSnapshot, equal: bool) -> str | None:
    if equal or a.moment != b.moment or a.completed != b.completed:
        return None
    return f"step {a.iteration} was trained on other samples in A than in B"


def _continuity_fault(name: str, one: Any, other: Any, steps: int) -> str | None:
    """What is wrong with a counter that is known `steps` steps apart."""
    if name not in {_STEP, *_DATA}:
        return None
    moved, low, high = other - one, min(0, steps), max(0, steps)
    # A step that was skipped for a gradient that was not finite counts as a step, not as an update.
    good = low <= moved <= high if name == _STEP else moved * steps > 0
    return None if good else f"{_unequal(name, one, other)}, which has done {steps:+d} steps"


def _kind_of(name: str) -> FaultKind:
    if name == _STEP:
        return "optimizer-step"
    if name in _DATA:
        return "data-order"
    return "schedule" if name.startswith(_SCHEDULE) else "counters"


def _shared(state: StateSnapshot) -> dict[str, Any]:
    """The facts of the first rank that has each; of the samples' digests the sum over the first stage's replicas."""
    facts: dict[str, Any] = {}
    for rank in sorted(state.facts):
        for name, value in state.facts[rank].items():
            facts.setdefault(name, value)
    if "samples_digest" in facts:
        places = {copy.place.rank: copy.place for copy in state.copies if copy.place is not None}
        readers = [rank for rank, place in places.items() if (place.stage, place.tensor) == (0, 0)]
        facts["samples_digest"] = sum(state.facts[rank].get("samples_digest", 0) for rank in readers) % (1 << 64)
    return facts


def random_state_findings(a: StateSnapshot, b: StateSnapshot) -> list[DiffFinding]:
    """Generators that should be in the same state: after the same steps, on the same shape."""
    if a.completed != b.completed or dict(a.topology) != dict(b.topology):
        return []
    wrong: dict[str, list[int]] = {}
    for rank, states in a.random_state.items():
        for name, state in states.items():
            if b.random_state.get(rank, {}).get(name, state) != state:
                wrong.setdefault(name, []).append(rank)
    if not wrong:
        return []
    lines = tuple(f"the state of generator {name} differs on {ranks_text(ranks)}" for name, ranks in wrong.items())
    return [DiffFinding("random-state", (a.title, b.title), tuple(wrong), detail=lines)]


def disagreeing_facts(state: StateSnapshot) -> list[DiffFinding]:
    """Facts inside one state that all ranks must agree on, and do not."""
    found = []
    for name in _ALIKE:
        values: dict[Any, list[int]] = {}
        for rank, facts in state.facts.items():
            if name in facts:
                values.setdefault(facts[name], []).append(rank)
        if len(values) > 1:
            said = "; ".join(f"{show_value(value)} on {ranks_text(ranks)}" for value, ranks in values.items())
            line = f"the ranks disagree on {name}: {said}"
            found.append(DiffFinding(_kind_of(name), (state.title,), (name,), detail=(line,)))
    return found


def ranks_text(ranks: list[int]) -> str:
    """A few ranks by number, many by count."""
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
