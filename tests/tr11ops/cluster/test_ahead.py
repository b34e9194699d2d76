"""Asking before the answer is wanted: the same answers and errors, once, and never old ones."""

from __future__ import annotations

import threading

import pytest

from tests.tr11ops.status_cases import pending, running
from tr11ops.base.errors import SchedulerUnreachable
from tr11ops.cluster import select
from tr11ops.cluster.base import Job, Node
from tr11ops.cluster.select import AskedAhead


class Slow:
    """A scheduler that answers when it is let."""

    name = "slow"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.calls: list[str] = []
        self.is_away = False

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        self.calls.append(f"jobs {name}")
        self.gate.wait(30)
        if self.is_away:
            raise SchedulerUnreachable("away")
        return (running(),) if name else (running(), pending())

    def nodes(self) -> tuple[Node, ...]:
        self.calls.append("nodes")
        self.gate.wait(30)
        return (Node("n01", frozenset({"idle"})),)


def test_both_are_asked_at_once_and_each_answer_is_given_once() -> None:
    slow = Slow()
    asked = AskedAhead(slow, "r")
    slow.gate.set()
    assert asked.jobs(name="r") == (running(),)
    assert [node.name for node in asked.nodes()] == ["n01"]
    assert sorted(slow.calls) == ["jobs r", "nodes"]
    asked.jobs(name="r")
    asked.nodes()
    assert len(slow.calls) == 4
    assert (asked.name, len(asked.jobs())) == ("slow", 2)


def test_an_error_comes_with_the_answer() -> None:
    slow = Slow()
    slow.is_away = True
    asked = AskedAhead(slow, "r")
    slow.gate.set()
    with pytest.raises(SchedulerUnreachable, match="away"):
        asked.jobs(name="r")


def test_another_question_is_another_answer() -> None:
    slow = Slow()
    slow.gate.set()
    assert len(AskedAhead(slow, "r").jobs()) == 2


def test_an_old_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    slow.gate.set()
    asked = AskedAhead(slow, "r")
    asked._jobs._thread.join(30)  # type: ignore[union-attr]
    asked._nodes._thread.join(30)  # type: ignore[union-attr]
    monkeypatch.setattr(select, "FRESH_SECONDS", -1.0)
    asked.jobs(name="r")
    asked.nodes()
    assert sorted(slow.calls) == ["jobs r", "jobs r", "nodes", "nodes"]
