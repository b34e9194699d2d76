"""The order of passes in stages of several parts: complete, never in a circle, and as short as the
formula says.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from trainer.schedule import flops
from trainer.schedule.flops import idle_passes
from trainer.schedule.interleaving import Pass, held_counts, passes, rounds

SHAPES = [
    (count, stages, parts)
    for stages in (2, 3, 5)
    for parts in (1, 2, 3)
    for count in (1, stages - 1, stages, stages + 1, 2 * stages - 1, 2 * stages, 3 * stages + 2)
]
Message = tuple[int, int]  # part and micro batch of the pass that takes it


def taker(stage: int, current: Pass, stages: int, parts: int) -> tuple[int, Message] | None:
    """Who takes a pass's result, as which message; None where nothing is sent."""
    step = 1 if current.is_forward else -1
    if 0 <= stage + step < stages:
        return stage + step, (current.part, current.micro_batch)
    part = current.part + step
    return ((stage + step) % stages, (part, current.micro_batch)) if 0 <= part < parts else None


class Played:
    """A step of all stages, each message and each pass as slow as chance has it. Sending never
    waits; a message that a pass says was taken must have been asked for, or its stage waits until
    it is.
    """

    def __init__(self, count: int, stages: int, parts: int, seed: int | None) -> None:
        self.orders = [passes(count, stages, parts, stage) for stage in range(stages)]
        self.chance = None if seed is None else random.Random(seed)
        self.sent: dict[tuple[int, bool], deque[tuple[Message, float]]] = {}
        self.taken: dict[tuple[int, int], float] = {}  # by stage and place of the sender: when
        self.senders: dict[tuple[int, bool, Message], tuple[int, int]] = {}
        self.most_held = [0] * stages
        self.end = max(self.play(stages, parts))

    def play(self, stages: int, parts: int) -> list[float]:
        done, free, held = [0] * stages, [0.0] * stages, [0] * stages
        while any(place < len(order) for place, order in zip(done, self.orders, strict=True)):
            before = list(done)
            for stage, order in enumerate(self.orders):
                while done[stage] < len(order):
                    current = order[done[stage]]
                    at = self.ready(stage, current, stages, parts)
                    if at is None:
                        break
                    begin = max(free[stage], at)
                    free[stage] = begin + (1 if current.is_forward else 2) * self.slowness()
                    self.send(stage, done[stage], current, free[stage], stages, parts)
                    held[stage] += 1 if current.is_forward else -1
                    self.most_held[stage] = max(self.most_held[stage], held[stage])
                    done[stage] += 1
            assert done != before, "the stages wait in a circle"
        return free

    def slowness(self) -> float:
        return 1.0 if self.chance is None else self.chance.uniform(0.2, 5)

    def ready(self, stage: int, current: Pass, stages: int, parts: int) -> float | None:
        """When what a pass waits for is there; None while that is not known."""
        if any((stage, place) not in self.taken for place in current.taken):
            return None
        settled = max((self.taken[stage, place] for place in current.taken), default=0.0)
        last = parts - 1 if current.is_forward else 0
        edge = 0 if current.is_forward else stages - 1
        if stage == edge and current.part == parts - 1 - last:
            return settled
        queue = self.sent.get((stage, current.is_forward))
        if not queue:
            return None
        message, arrived = queue[0]
        assert message == (current.part, current.micro_batch), (
            "messages come in another order than they are needed"
        )
        queue.popleft()
        self.taken[self.senders[stage, current.is_forward, message]] = arrived
        return max(settled, arrived)

    def send(
        self, stage: int, place: int, current: Pass, at: float, stages: int, parts: int
    ) -> None:
        target = taker(stage, current, stages, parts)
        if target is not None:
            to, message = target
            delay = 0.0 if self.chance is None else self.chance.uniform(0, 3)
            self.sent.setdefault((to, current.is_forward), deque()).append((message, at + delay))
            self.senders[to, current.is_forward, message] = (stage, place)


@pytest.mark.parametrize(("count", "stages", "parts"), SHAPES)
def test_every_pass_once_and_never_in_a_circle(count: int, stages: int, parts: int) -> None:
    for stage in range(stages):
        order = passes(count, stages, parts, stage)
        assert (
            len({(item.is_forward, item.part, item.micro_batch) for item in order})
            == len(order)
            == 2 * count * parts
        )
        alone = passes(count, stages, parts, stage, trains=False)
        assert [item for item in order if item.is_forward] == [
            Pass(True, item.part, item.micro_batch, order[place].taken)
            for item, place in zip(
                alone, (n for n, item in enumerate(order) if item.is_forward), strict=True
            )
        ]
    for seed in range(2):
        Played(count, stages, parts, seed)


@pytest.mark.parametrize(("count", "stages", "parts"), SHAPES)
def test_a_step_takes_as_long_as_the_formula_says(count: int, stages: int, parts: int) -> None:
    """And holds as much: that of plain 1F1B, where micro batches come in whole rounds."""
    played = Played(count, stages, parts, None)
    assert played.end == 3 * (count * parts + idle_passes(count, stages, parts))
    share = 1 - 3 * count * parts / played.end
    assert flops.bubble_share(count, stages, parts) == pytest.approx(share)
    for stage, most in enumerate(played.most_held):
        assert max(map(sum, held_counts(count, stages, parts, stage))) == most
        assert most == min(count * parts, stages - stage + (parts - 1) * rounds(count, stages)[0])
    if count % stages == 0:
        assert played.most_held[0] <= stages * parts


def test_rounds_are_even() -> None:
    assert rounds(31, 12) == [16, 15] and rounds(128, 12)[0] == 13 and rounds(24, 12) == [12, 12]
    assert rounds(5, 12) == [5]
