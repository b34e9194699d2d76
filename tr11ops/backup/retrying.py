"""Trying again when the far side is away: longer and longer waits, none of them alike, no longer than it pays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tr11ops.backup.base import ArchiveAway


class StillAway(ArchiveAway):
    """All tries were used up: nobody who hears of it tries again."""


T = TypeVar("T")
LONGEST_ASKED_SECONDS = 3600.0  # a far side that asks for more is not waited for so long


@dataclass(frozen=True)
class Retrying:
    """How often and how long. `tries` count failures without any progress between them. Seconds."""

    tries: int = 8
    first_seconds: float = 1.0
    longest_seconds: float = 300.0
    chance: Callable[[], float] = field(default=random.random, compare=False)

    def delay(self, failures: int, asked: float) -> float:
        """The wait after so many failures in a row: doubling, half of it by chance, never less than was asked for."""
        whole = min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 60))
        return max(whole * (0.5 + self.chance() / 2), min(max(asked, 0.0), LONGEST_ASKED_SECONDS))


def persist(
    action: Callable[[], T],
    retrying: Retrying,
    wait: Callable[[float], object],
    say: Callable[[str], None],
    progress: Callable[[], int] = lambda: 0,
) -> T:
    """`action()`, tried again after ArchiveAway; raises StillAway when the tries are used up, here or inside.

    `wait` sleeps; it may raise to give up sooner (a request to stop). `say` hears of each failure. `progress`: a number
    that grows with what was achieved; failures with some between them are counted anew.
    """
    failures, reached = 0, progress()
    while True:
        try:
            return action()
        except StillAway:
            raise
        except ArchiveAway as away:
            if progress() > reached:
                failures, reached = 0, progress()
            failures += 1
            if failures >= retrying.tries:
                raise StillAway(str(away), away.wait) from None
            seconds = retrying.delay(failures, away.wait)
            say(f"{away}; trying again in {seconds:.0f} s")
            wait(seconds)
