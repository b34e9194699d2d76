"""A trainer leaves by the limit of its job as that is now: earlier or later than its card says, or
by no clock at all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.courses import card, worker_of
from trainer.contract.attempt import ExitTime
from trainer.control.control_signals import ControlSignals
from trainer.control.lifecycle import StopConditions

START = 1000.0


class Attempt:
    """The control signals of one attempt of one rank, whose card has it leave after ten minutes."""

    def __init__(self, folder: Path) -> None:
        config = card(folder, run={"exit_duration_minutes": 10.0})
        self.paths, self.now = config.paths, START
        worker = worker_of(config, "7", rank=0)
        worker.clock = self.clock
        self.signals = ControlSignals(worker, StopConditions.of(config, START), list)

    def clock(self) -> float:
        return self.now

    def leaves_at(self, now: float) -> bool:
        self.now = now
        decision = self.signals.agree(5, trained=True).decision
        assert decision is None or (decision.reason, decision.restart, decision.save) == (
            "exit-duration",
            True,
            True,
        )
        return decision is not None

    def tell(self, time: float | None) -> None:
        ExitTime(time, "a test").write(self.paths.exit_time("7"))


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


def test_without_a_word_the_card_counts(attempt: Attempt) -> None:
    assert not attempt.leaves_at(START + 599)
    assert attempt.leaves_at(START + 601)


def test_a_shortened_limit_is_heard(attempt: Attempt) -> None:
    assert not attempt.leaves_at(START + 100)
    attempt.tell(START + 150)
    assert not attempt.leaves_at(START + 149)
    assert attempt.leaves_at(START + 155)


def test_a_longer_limit_and_none_are_used(attempt: Attempt) -> None:
    attempt.tell(START + 5000)
    assert not attempt.leaves_at(START + 4999)
    attempt.tell(None)
    assert not attempt.leaves_at(START + 10**7)


@pytest.mark.parametrize("text", ["", "{", '{"time": "soon"}', '{"why": "no time"}'])
def test_what_cannot_be_read_changes_nothing(attempt: Attempt, text: str) -> None:
    attempt.tell(START + 200)
    assert not attempt.leaves_at(START + 100)
    attempt.paths.exit_time("7").write_text(text)
    assert not attempt.leaves_at(START + 190)
    assert attempt.leaves_at(START + 205)
