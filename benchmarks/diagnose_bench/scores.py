"""Answers beside labels: right, wrong, and how sure it was. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from labels import Incident
from msgspec import field
from programs import Answer

from trainer.contract.record import Record

CONFIDENT = 0.9
BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
GOES_ON = frozenset({"plain", "elsewhere", "go"})
STOPS = frozenset({"change", "none", "stop"})
UNKNOWN = "unknown"
_FIVE = frozenset({"plain", "elsewhere", "change", UNKNOWN, "none"})


class Judged(Record):
    """One answer beside its label. None: the label does not tell, or the program does not say.

    `node`: of who is accused; `place`: of the line. `goes_on`: whether it rightly goes on or stops;
    `restart`: whether its word of five is right. `innocent`: nodes that it would exclude and that
    are innocent; `misnamed`: nodes that it names as at fault, or maybe so, and that are not.
    """

    name: str
    fault: bool | None
    line: bool | None
    node: bool | None
    place: bool | None
    restart: bool | None
    goes_on: bool | None
    innocent: frozenset[str]
    misnamed: frozenset[str]
    answer: Answer
    label: Incident

    @property
    def confident_mistakes(self) -> list[str]:
        """Of what, who and restart those that it is wrong about and more than CONFIDENT of."""
        wrong = {
            "what": self.fault is False,
            "who": bool(self.misnamed),
            "restart": self.restart is False,
        }
        return [
            part
            for part, is_wrong in wrong.items()
            if is_wrong and self.answer.confidence.get(part, 0) > CONFIDENT
        ]

    @property
    def mistakes(self) -> list[str]:
        """Each mistake in words."""
        answer, label = self.answer, self.label
        found = []
        if self.fault is False:
            found.append(f"class {answer.fault}, is {_words(label.faults)}{_sure(answer, 'what')}")
        if self.line is False:
            at = "none" if answer.line is None else f"{answer.file}:{answer.line}"
            found.append(f"line {at}, is {_words(f'{file}:{line}' for file, line in label.lines)}")
        if self.node is False:
            found.append(f"node {_words(answer.nodes)}, is {label.node}{_sure(answer, 'who')}")
        elif self.place is False:
            found.append(f"place {answer.place or 'none'}, is {label.node}")
        if self.innocent:
            found.append(f"excludes {_words(self.innocent)}, innocent{_sure(answer, 'who')}")
        elif self.misnamed and self.node is None:
            found.append(f"names {_words(self.misnamed)}, innocent{_sure(answer, 'who')}")
        if self.restart is False or (self.restart is None and self.goes_on is False):
            found.append(
                f"restart {answer.restart}, is {_words(label.restarts)}{_sure(answer, 'restart')}"
            )
        return found


def _words(values: Iterable[str]) -> str:
    return " or ".join(sorted(values)) or "none"


def _sure(answer: Answer, part: str) -> str:
    return f" ({answer.confidence[part]:.2f})" if part in answer.confidence else ""


def judge(incident: Incident, answer: Answer) -> Judged:
    """One answer beside its label."""
    wanted = {_short(incident.node)} if incident.node else set()
    guilty = wanted if incident.is_guilty else set()
    restart = None
    if answer.restart in _FIVE and incident.restarts:
        restart = answer.restart in incident.restarts
    return Judged(
        name=incident.name,
        fault=None if answer.fault is None else answer.fault in incident.faults,
        line=(answer.file, answer.line) in incident.lines if incident.lines else None,
        node=_node(incident, answer),
        place=_place(incident, answer),
        restart=restart,
        goes_on=_goes_on(incident, answer),
        innocent=_not_in(answer.excluded, guilty) if incident.judges_nodes else frozenset(),
        misnamed=_not_in(answer.nodes, wanted) if incident.judges_nodes else frozenset(),
        answer=answer,
        label=incident,
    )


def _node(incident: Incident, answer: Answer) -> bool | None:
    """Whether the guilty node is accused, and no other; None where the label has none, or allows to
    accuse no one.
    """
    is_spared = incident.may_be_no_one and not answer.nodes
    if incident.node is None or not incident.is_guilty or is_spared:
        return None
    return {_short(node) for node in answer.nodes} == {_short(incident.node)}


def _place(incident: Incident, answer: Answer) -> bool | None:
    """Whether the line's node is the label's, guilty or not."""
    if incident.node is None:
        return None
    return answer.place is not None and _short(answer.place) == _short(incident.node)


def _goes_on(incident: Incident, answer: Answer) -> bool | None:
    """Whether it rightly starts again or stops; None where a label allows both, or neither, or not
    to know.
    """
    may_go, may_stop = bool(incident.restarts & GOES_ON), bool(incident.restarts & STOPS)
    is_rightly_unknown = answer.restart == UNKNOWN and UNKNOWN in incident.restarts
    if answer.restart is None or may_go == may_stop or is_rightly_unknown:
        return None
    return answer.restart in (GOES_ON if may_go else STOPS)


def _short(node: str) -> str:
    """A host's name without its domain; an address as it is."""
    name = node.lower()
    return name if name.replace(".", "").isdigit() or ":" in name else name.partition(".")[0]


def _not_in(nodes: Iterable[str], guilty: set[str]) -> frozenset[str]:
    return frozenset(node for node in nodes if _short(node) not in guilty)


class Count(Record):
    """So many right of so many that are judged."""

    right: int
    total: int

    @classmethod
    def of(cls, values: Iterable[bool | None]) -> Count:
        told = [value for value in values if value is not None]
        return cls(sum(told), len(told))

    def __str__(self) -> str:
        if not self.total:
            return "-"
        return f"{self.right}/{self.total} {100 * self.right / self.total:.0f}%"


class Scores(Record):
    """All of one program on one set."""

    incidents: int
    fault: Count
    line: Count
    node: Count
    place: Count
    restart: Count
    goes_on: Count
    excluded_innocent: int
    named_innocent: int
    confident_mistakes: int
    seconds: float
    reliability: Mapping[str, Sequence[tuple[str, int, float, float]]] = field(default_factory=dict)
    brier: Mapping[str, float] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """For --json."""
        counts = {
            name: getattr(self, name)
            for name in ("fault", "line", "node", "place", "restart", "goes_on")
        }
        return {
            "incidents": self.incidents,
            **{name: {"right": count.right, "of": count.total} for name, count in counts.items()},
            "excluded_innocent": self.excluded_innocent,
            "named_innocent": self.named_innocent,
            "confident_mistakes": self.confident_mistakes,
            "seconds": round(self.seconds, 3),
            "brier": {part: round(value, 4) for part, value in self.brier.items()},
            "reliability": {
                part: [
                    {
                        "range": where,
                        "answers": count,
                        "said": round(said, 3),
                        "right": round(right, 3),
                    }
                    for where, count, said, right in rows
                ]
                for part, rows in self.reliability.items()
            },
        }


def total(judged: Sequence[Judged]) -> Scores:
    """What all answers of one program come to."""
    sure = {part: _said_and_right(judged, part) for part in ("what", "who", "restart")}
    return Scores(
        incidents=len(judged),
        fault=Count.of(one.fault for one in judged),
        line=Count.of(one.line for one in judged),
        node=Count.of(one.node for one in judged),
        place=Count.of(one.place for one in judged),
        restart=Count.of(one.restart for one in judged),
        goes_on=Count.of(one.goes_on for one in judged),
        excluded_innocent=sum(bool(one.innocent) for one in judged),
        named_innocent=sum(bool(one.misnamed) for one in judged),
        confident_mistakes=sum(len(one.confident_mistakes) for one in judged),
        seconds=sum(one.answer.seconds for one in judged),
        reliability={part: reliability(pairs) for part, pairs in sure.items() if pairs},
        brier={part: brier_score(pairs) for part, pairs in sure.items() if pairs},
    )


def _said_and_right(judged: Sequence[Judged], part: str) -> list[tuple[float, bool]]:
    pairs = []
    for one in judged:
        is_right = {"what": one.fault, "who": who_is_right(one), "restart": one.restart}[part]
        if is_right is not None and part in one.answer.confidence:
            pairs.append((one.answer.confidence[part], is_right))
    return pairs


def who_is_right(one: Judged) -> bool | None:
    """Whether what it says of who is right: the guilty node, or no one. None where the label does
    not judge nodes.
    """
    label = one.label
    if not label.judges_nodes:
        return None
    if not one.answer.nodes and label.may_be_no_one:
        return True
    guilty = {_short(label.node)} if label.node is not None and label.is_guilty else set()
    return {_short(node) for node in one.answer.nodes} == guilty


def brier_score(pairs: Sequence[tuple[float, bool]]) -> float:
    """The mean square of what was said beside what was so."""
    return sum((said - right) ** 2 for said, right in pairs) / len(pairs)


def reliability(pairs: Sequence[tuple[float, bool]]) -> list[tuple[str, int, float, float]]:
    """(range, answers, mean of what was said, share that was right) of each range of confidence
    that has any.
    """
    found = []
    for low, high in pairwise(BINS):
        here = [
            (said, right) for said, right in pairs if low < said <= high or (low == said == 0.0)
        ]
        if here:
            said = sum(value for value, _ in here) / len(here)
            right = sum(is_right for _, is_right in here) / len(here)
            found.append((f"{low:.1f} to {high:.1f}", len(here), said, right))
    return found
