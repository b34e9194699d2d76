"""`diff A B`: two states of a training, number by number: checkpoints, or dumps of all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

from msgspec.structs import replace

from trainer.checkpoint.reader import open_checkpoint
from trainer.contract.errors import CheckpointError, UsageError
from trainer.contract.resumable import OPTIMIZER_SUMS
from trainer.data.progress import progress_bar
from trainer.debug.compare import Difference, OnNumbers, Violation, differences, violations
from trainer.debug.record import MOMENTS, Moment, companions
from trainer.debug.report import (
    KINDS,
    DiffFinding,
    DiffVerdict,
    FaultKind,
    describe,
    document,
    show_value,
)
from trainer.debug.snapshot import StateSnapshot, checkpoint_snapshot, dump_snapshots

# What kind of fault a difference is: pure rules over what two states, or the ranks of one, show.

_SCHEDULE = ("learning_rate", "loss_scale")
_DATA = ("consumed_samples", "consumed_tokens", "samples_digest", "consumed_valid_samples")
_STEP = "optimizer_step"
_ALIKE = (_STEP, "learning_rate", "consumed_samples", "consumed_tokens")  # on all ranks
# Names of the state itself, what is no property of the training's course, and what follows from the
# tensors.
_IGNORED = {"step", "iteration", OPTIMIZER_SUMS}


def fact_findings(a: StateSnapshot, b: StateSnapshot) -> list[DiffFinding]:
    """Facts that both know: equal after the same number of steps, else moved on by what lies
    between.
    """
    one, other = _shared(a), _shared(b)
    steps = b.completed - a.completed
    found: dict[FaultKind, dict[str, str]] = {}
    for name in sorted((one.keys() & other.keys()) - _IGNORED):
        if name == "samples_digest":
            line = _samples_fault(a, b, one[name] == other[name])
        elif steps:
            line = _continuity_fault(name, one[name], other[name], steps)
        elif one[name] == other[name]:
            line = None
        else:
            line = _unequal(name, one[name], other[name])
        if line is not None:
            found.setdefault(_kind_of_fact(name), {})[name] = line
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
    if name == _STEP:
        good = low <= moved <= high
    else:
        good = moved * steps > 0
    if good:
        return None
    return f"{_unequal(name, one, other)}, which has done {steps:+d} steps"


def _kind_of_fact(name: str) -> FaultKind:
    if name == _STEP:
        return "optimizer-step"
    if name in _DATA:
        return "data-order"
    if name.startswith(_SCHEDULE):
        return "schedule"
    return "counters"


def _shared(state: StateSnapshot) -> dict[str, Any]:
    """The facts of the first rank that has each; of the samples' digests the sum over the first
    stage's replicas.
    """
    facts: dict[str, Any] = {}
    for rank in sorted(state.facts):
        for name, value in state.facts[rank].items():
            facts.setdefault(name, value)
    if "samples_digest" in facts:
        places = {copy.place.rank: copy.place for copy in state.copies if copy.place is not None}
        readers = [rank for rank, place in places.items() if (place.stage, place.tensor) == (0, 0)]
        facts["samples_digest"] = sum(
            state.facts[rank].get("samples_digest", 0) for rank in readers
        ) % (1 << 64)
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
    lines = tuple(
        f"the state of generator {name} differs on {ranks_text(ranks)}"
        for name, ranks in wrong.items()
    )
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
            said = "; ".join(
                f"{show_value(value)} on {ranks_text(ranks)}" for value, ranks in values.items()
            )
            line = f"the ranks disagree on {name}: {said}"
            found.append(DiffFinding(_kind_of_fact(name), (state.title,), (name,), detail=(line,)))
    return found


def ranks_text(ranks: list[int]) -> str:
    """A few ranks by number, many by count."""
    shown = ", ".join(map(str, ranks[:4])) + (
        f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    )
    if len(ranks) == 1:
        return f"rank {shown}"
    return f"ranks {shown}"


_KIND_OF_AXIS: dict[str, FaultKind] = {
    "stage": "tied-copy",
    "tensor": "tensor-duplicate",
    "data": "data-replica",
}
_AMONG = {"tied-copy": "stages", "tensor-duplicate": "tensor ranks", "data-replica": "data ranks"}
_FIRST_VALUES = {0.0, 1.0}
Pair = tuple[StateSnapshot, StateSnapshot]


def judge(
    pairs: Sequence[Pair], states: Sequence[StateSnapshot], tolerance: float, on_numbers: OnNumbers
) -> DiffVerdict:
    """Compare all pairs, look inside every state, and sort out what was found; `on_numbers` is told
    of the progress.
    """
    counted = _Counter(on_numbers)
    broken = {id(state): violations(state, counted) for state in states}
    found: list[tuple[tuple[int, ...], DiffFinding]] = []
    explained: set[tuple[int, str, str]] = set()
    for one, other in pairs:
        when = max(one.order, other.order)
        for finding in _compare(
            one,
            other,
            (broken[id(one)], broken[id(other)]),
            tolerance=tolerance,
            on_numbers=counted,
        ):
            found.append(((*when, KINDS.index(finding.kind)), finding))
            explained |= {
                (id(state), finding.kind, name) for state in (one, other) for name in finding.names
            }
    for state in states:
        own = _unexplained(state, broken[id(state)], explained)
        for finding in (*_inside(state, own), *disagreeing_facts(state), *_missing(state)):
            found.append(((*state.order, KINDS.index(finding.kind)), finding))
    found.sort(key=lambda item: item[0])
    return DiffVerdict(
        tuple(_merged(finding for _, finding in found)),
        tuple((one.title, other.title) for one, other in pairs),
        counted.total,
        tuple(dict.fromkeys(remark for one, other in pairs for remark in _remarks(one, other))),
    )


def _unexplained(
    state: StateSnapshot, broken: list[Violation], explained: set[tuple[int, str, str]]
) -> list[Violation]:
    """The violations to be told by themselves: those along an axis of which two states do not show
    everything.

    What two states show of a copy says more than what one shows.
    """
    left = {
        item.axis
        for item in broken
        if (id(state), _KIND_OF_AXIS[item.axis], item.name) not in explained
    }
    return [item for item in broken if item.axis in left]


class _Counter:
    def __init__(self, on_numbers: OnNumbers):
        self.total = 0
        self._on_numbers = on_numbers

    def __call__(self, count: int) -> None:
        self.total += count
        self._on_numbers(count)


def _merged(findings: Iterable[DiffFinding]) -> list[DiffFinding]:
    """The first finding of each kind, with the number of those that follow.

    Where copies inside one state were found unequal first, it also tells what the next comparison
    of two states shows.
    """
    by_kind: dict[FaultKind, list[DiffFinding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    merged = []
    for first, *later in by_kind.values():
        told = next(
            (finding for finding in later if len(first.between) == 1 and len(finding.between) == 2),
            None,
        )
        detail = first.detail
        if told is not None:
            head = f"later, in {' against '.join(told.between)}, {told.names[0]} differs on {told.place}:"
            detail = (*detail, " ".join([head, "; ".join(told.detail)]))
        merged.append(replace(first, detail=detail, later=len(later)))
    return merged


def _remarks(a: StateSnapshot, b: StateSnapshot) -> list[str]:
    lines = []
    if dict(a.topology) != dict(b.topology):
        lines.append(
            "A and B are of different shapes: whole tensors were compared, random generators were not"
        )
    if a.completed != b.completed:
        apart = abs(b.completed - a.completed)
        lines.append(
            f"{apart} steps lie between A and B: their weights must differ, their counters must have moved on"
        )
    kinds = [{copy.kind for copy in state.copies} for state in (a, b)]
    if kinds[0] != kinds[1] and a.is_checkpoint and b.is_checkpoint:
        lines.append("one of the two is without its optimizer: only what both hold was compared")
    return lines


# ----------------------------------------------------------------------------- two states
def _compare(
    a: StateSnapshot,
    b: StateSnapshot,
    broken: tuple[list[Violation], list[Violation]],
    tolerance: float,
    on_numbers: OnNumbers,
) -> list[DiffFinding]:
    found = [*_model(a, b), *fact_findings(a, b), *random_state_findings(a, b)]
    by_kind: dict[FaultKind, list[Difference]] = {}
    for item in differences(a, b, tolerance, on_numbers):
        by_kind.setdefault(_kind_of(item, broken), []).append(item)
    for kind, items in by_kind.items():
        names = tuple(dict.fromkeys(map(_full_name, items)))
        same = [item for item in items if _full_name(item) == names[0]]
        places = tuple(item.place for item in same if item.place is not None)
        detail = tuple(_detail(kind, same[0], (a, b), broken))
        found.append(
            DiffFinding(
                kind,
                (a.title, b.title),
                names,
                detail=detail,
                place=same[0].place,
                places=places,
                delta=same[0].delta,
            )
        )
    return found


def _full_name(item: Difference) -> str:
    if item.kind == "weight":
        return item.name
    return f"{item.name}/{item.kind}"


def _kind_of(item: Difference, broken: tuple[list[Violation], list[Violation]]) -> FaultKind:
    if item.only is not None:
        return "model"
    if item.kind != "weight":
        if item.kind == "fp32":
            return "master-weight"
        return "moment"
    axes = {violation.axis for side in broken for violation in side if violation.name == item.name}
    return next((kind for axis, kind in _KIND_OF_AXIS.items() if axis in axes), "weight")


def _detail(
    kind: FaultKind,
    first: Difference,
    states: Pair,
    broken: tuple[list[Violation], list[Violation]],
) -> list[str]:
    a, b = states
    if first.only is not None:
        return [f"only {(a if first.only == 'a' else b).title} has {first.name}"]
    if kind not in _AMONG:
        return []
    in_a, in_b = (
        any(_KIND_OF_AXIS[item.axis] == kind and item.name == first.name for item in side)
        for side in broken
    )
    among = _AMONG[kind]
    if in_a and in_b:
        lines = [f"its copies on the {among} differ from each other in both states"]
    elif in_a:
        lines = [
            f"its copies on the {among} differ from each other in A and agree in B: they had drifted"
        ]
    else:
        lines = [f"its copies on the {among} agree in A and differ from each other in B"]
    constant = _constant(b, first)
    if kind == "tied-copy" and in_b and constant is not None and _constant(a, first) != constant:
        lines.append(
            f"in B this copy is {constant:g} throughout, as at the start: nothing saves and restores it"
        )
    return lines


def _constant(state: StateSnapshot, item: Difference) -> float | None:
    """The number that a copy consists of, when it is a single one that parameters start with."""
    for copy in state.copies:
        numbers = copy.numbers
        if numbers is not None and (copy.kind, copy.name, copy.place) == (
            item.kind,
            item.name,
            item.place,
        ):
            if numbers.minimum == numbers.maximum and numbers.minimum in _FIRST_VALUES:
                return numbers.minimum
            return None
    return None


def _model(a: StateSnapshot, b: StateSnapshot) -> list[DiffFinding]:
    keys = [key for key in a.model if key in b.model and a.model[key] != b.model[key]]
    if not keys:
        return []
    lines = tuple(f"{key} is {a.model[key]!r} in A and {b.model[key]!r} in B" for key in keys)
    return [DiffFinding("model", (a.title, b.title), tuple(keys), detail=lines)]


# ----------------------------------------------------------------------------- one state
def _inside(state: StateSnapshot, broken: list[Violation]) -> list[DiffFinding]:
    found = []
    for axis, kind in _KIND_OF_AXIS.items():
        items = [item for item in broken if item.axis == axis]
        if not items:
            continue
        first = items[0]
        names = tuple(dict.fromkeys(item.name for item in items))
        places = tuple(item.place for item in items if item.name == first.name)
        detail = (f"it holds other numbers there than on {first.against}",)
        found.append(
            DiffFinding(
                kind,
                (state.title,),
                names,
                detail=detail,
                place=first.place,
                places=places,
                delta=first.delta,
            )
        )
    for remark in state.remarks:
        found.append(DiffFinding("tensor-duplicate", (state.title,), (), (remark,)))
    return found


def _missing(state: StateSnapshot) -> list[DiffFinding]:
    if not state.missing:
        return []
    line = (
        f"there is no dump of {ranks_text(list(state.missing))}: nothing is known of what it holds"
    )
    return [
        DiffFinding(
            "missing", (state.title,), tuple(f"rank {rank}" for rank in state.missing), (line,)
        )
    ]


# ----------------------------------------------------------------------------- which states to
# compare
def pair_up(a: Sequence[StateSnapshot], b: Sequence[StateSnapshot]) -> list[Pair]:
    """What is compared with what, by time.

    One state each: these two. Else, for each count of completed steps: neighbours on one side
    (between a step, its save and the next step nothing may change), and B's first with A's state of
    that moment or the last one before it. Without such a meeting of A and B the answer is empty.
    """
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    counts = sorted({state.completed for state in a} & {state.completed for state in b})
    if not counts:
        return []
    pairs: list[Pair] = []
    for completed in sorted({state.completed for state in (*a, *b)}):
        ones, others = (
            [state for state in side if state.completed == completed] for side in (a, b)
        )
        pairs += itertools.pairwise(ones)
        if ones and others:
            pairs.append((_partner(ones, others[0]), others[0]))
        pairs += itertools.pairwise(others)
    return pairs


def _partner(ones: Sequence[StateSnapshot], other: StateSnapshot) -> StateSnapshot:
    earlier = [
        state for state in ones if MOMENTS.index(state.moment) <= MOMENTS.index(other.moment)
    ]
    if earlier:
        return earlier[-1]
    return ones[0]


__all__ = ["describe", "exit_code", "run"]


def run(options: SimpleNamespace) -> dict[str, Any]:
    """Compare; the result's "equal" is True when nothing differs and nothing is corrupt inside A or
    B.
    """
    if not 0.0 <= options.tolerance < math.inf:
        raise UsageError(f"--tolerance {options.tolerance}: must be a number from 0 on")
    a, b = open_states(options.a, "A"), open_states(options.b, "B")
    pairs = pair_up(a, b)
    if not pairs:
        raise CheckpointError(
            f"A and B have no moment in common: A holds {_held(a)}, B holds {_held(b)}; name one state of each "
            "(FOLDER:ITERATION:MOMENT) to compare them all the same"
        )
    total = sum(math.prod(copy.shape) for pair in pairs for copy in pair[-1].copies)
    with progress_bar("{task.completed:,.0f} numbers") as bar:
        task = bar.add_task("comparing", total=total)
        verdict = judge(pairs, [*a, *b], options.tolerance, partial(bar.advance, task))
        bar.update(task, completed=total)
    return {
        "a": options.a,
        "b": options.b,
        "tolerance": options.tolerance,
        **document(verdict),
    }


def exit_code(result: dict[str, Any]) -> int:
    """0 equal, 1 different."""
    if result["equal"]:
        return 0
    return 1


def open_states(text: str, label: str) -> list[StateSnapshot]:
    """The states that an operand names, by time. Raises UsageError, CheckpointError,
    OSError.
    """
    folder, iteration, moment = _parsed(text)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; give a checkpoint's folder, or one with debug dumps"
        )
    if iteration is None and not companions(folder):
        return [checkpoint_snapshot(open_checkpoint(folder), folder, label)]
    states = dump_snapshots(folder, label)
    found = [
        state
        for state in states
        if iteration in {None, state.iteration} and moment in {None, state.moment}
    ]
    if not found:
        if states:
            held = f"it holds {_held(states)}"
        else:
            held = "it holds no dump (debug-*.json)"
        raise CheckpointError(f"{folder} has no dump of {text.removeprefix(f'{folder}:')}; {held}")
    return found


def _parsed(text: str) -> tuple[Path, int | None, Moment | None]:
    """FOLDER, FOLDER:ITERATION or FOLDER:ITERATION:MOMENT; a folder that exists under the whole
    name is that folder.
    """
    if ":" not in text or Path(text).is_dir():
        return Path(text), None, None
    folder, *rest = text.split(":")
    number, moment = rest[0], rest[1] if len(rest) > 1 else None
    if len(rest) > 2 or not number.isdecimal() or moment not in {None, *get_args(Moment)}:
        raise UsageError(
            f"{text}: must be FOLDER:ITERATION:MOMENT, where MOMENT is one of {', '.join(MOMENTS)}"
        )
    return Path(folder), int(number), cast("Moment | None", moment)


def _held(states: Sequence[StateSnapshot]) -> str:
    shown = [f"{state.moment} {state.iteration}" for state in states]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:2], "...", *shown[-2:]])
