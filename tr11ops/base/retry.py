"""Trying again what may pass: longer and longer waits, none of them alike, no longer than it pays.

One loop for the hub, the archives, the remote status and the scheduler.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from tr11ops.base.errors import Unavailable
from tr11ops.base.units import duration
from trainer.contract.record import Record

T = TypeVar("T")
LONGEST_ASKED_SECONDS = 3600.0


def _silence(_: str) -> None:
    """Nothing is said."""


class RetryPolicy(Record):
    """How often, how long and how loudly something is tried again. All times in seconds.

    It is given up after `tries` failures in a row, or where a wait would end later than `seconds`
    after the first of them (None: never for that). The waits double from `first_seconds` to
    `longest_seconds`, times a factor between the two of `jitter` by chance. A longer wait that is
    asked for is kept to, and a factor above 1 stretches it too; one beyond `longest_asked_seconds`
    counts as that long, or ends it at once where `refuses_longer`. A try that took longer than
    `long_try_seconds` got on: failures are counted from there. `say` hears of each failure, or,
    unless `says_all`, of each that is another than the one before.
    """

    tries: int | None = None
    seconds: float | None = None
    first_seconds: float = 1.0
    longest_seconds: float = 300.0
    jitter: tuple[float, float] = (0.5, 1.0)
    longest_asked_seconds: float = LONGEST_ASKED_SECONDS
    refuses_longer: bool = False
    long_try_seconds: float = math.inf
    says_all: bool = False
    say: Callable[[str], object] = _silence
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random

    def delay(self, failures: int, asked: float = 0.0) -> float:
        """The wait after so many failures in a row, of which the last asked for one."""
        low, high = self.jitter
        factor = low + (high - low) * self.chance()
        own = min(self.longest_seconds, self.first_seconds * 2.0 ** min(failures - 1, 60)) * factor
        return max(own, min(asked, self.longest_asked_seconds) * (factor if low >= 1.0 else 1.0))


def retry(
    action: Callable[[], T],
    policy: RetryPolicy,
    on: type[Unavailable] = Unavailable,
    *,
    progress: Callable[[], int] = lambda: 0,
    must_end: Callable[[], bool] = lambda: False,
    restored: str = "",
) -> T:
    """`action()`, tried again after `on`, which is raised when the policy gives up, here or in a
    `retry` inside.

    `progress`: a number that grows with what was achieved; after a try that did, failures are
    counted from there. `must_end` is asked after each failure. `restored` is said once it works
    again. `policy.sleep` may raise, to end it.
    """
    failures, reached, said, end = 0, progress(), "", math.inf
    while True:
        began = policy.clock()
        try:
            found = action()
        except on as error:
            failure = error
        else:
            if said and restored:
                policy.say(restored)
            return found
        if failure.was_given_up:
            raise failure
        now = policy.clock()
        if progress() > reached or now - began > policy.long_try_seconds:
            failures, reached, said = 0, progress(), ""
        if not failures:
            if policy.seconds is None:
                end = math.inf
            else:
                end = now + policy.seconds
        failures += 1
        delay = policy.delay(failures, failure.wait)
        is_last = failures == policy.tries
        if not is_last and policy.refuses_longer and failure.wait > policy.longest_asked_seconds:
            words = f"{failure}, and asks for {duration(failure.wait)} of silence: not waited for"
            failure, is_last = type(failure)(words, failure.wait), True
        if is_last or now + delay > end or must_end():
            failure.was_given_up = True
            raise failure
        if policy.says_all or str(failure) != said:
            said = str(failure)
            policy.say(f"{said}: trying again in {duration(delay)}")
        policy.sleep(delay)
