"""The bandwidth limit and the waits between tries, with clocks that the test turns."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tr11ops.backup.base import ARCHIVE_RETRIES
from tr11ops.backup.transfer import BURST_SECONDS, RateLimiter, Transfer
from tr11ops.base.errors import ArchivePermanentError, ArchiveUnavailable, CopyStopped
from tr11ops.base.retry import LONGEST_ASKED_SECONDS, retry
from tr11ops.runcard.watching import BackupSection


class Clock:
    """Time passes only in sleep."""

    def __init__(self) -> None:
        self.now = 1e6
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds


@given(
    st.lists(st.tuples(st.integers(1, 5_000_000), st.floats(0, 3)), min_size=1),
    st.sampled_from([1e3, 1e6, 7e7]),
)
def test_the_rate_is_kept_and_used(takes: list[tuple[int, float]], rate: float) -> None:
    clock = Clock()
    limiter = RateLimiter(rate, clock, clock.sleep)
    began, passed, idle = clock.now, 0, 0.0
    for count, pause in takes:
        limiter.take(count)
        assert passed <= rate * (clock.now - began + BURST_SECONDS) * (1 + 1e-6) + 1e-3
        passed += count
        clock.now += pause
        idle += pause
    needed = passed / rate
    assert sum(clock.slept) <= needed + 1e-6, "no longer than the bytes take"


def test_without_a_limit_no_one_waits() -> None:
    clock = Clock()
    RateLimiter(0, clock, clock.sleep).take(10**15)
    assert not clock.slept


def test_many_threads_share_one_rate() -> None:
    clock, lock = Clock(), threading.Lock()
    total = 0.0

    def sleep(seconds: float) -> None:
        nonlocal total
        with lock:
            total = max(total, seconds)

    # the clock stands still: waits are places in the queue
    limiter = RateLimiter(1000.0, clock, sleep)
    threads = [threading.Thread(target=limiter.take, args=(500,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == pytest.approx(7 * 0.5 - BURST_SECONDS)


def test_waits_double_and_honour_what_is_asked() -> None:
    least, most = (
        replace(ARCHIVE_RETRIES, chance=lambda: 0.0),
        replace(ARCHIVE_RETRIES, chance=lambda: 1.0),
    )
    assert [most.delay(failures, 0) for failures in (1, 2, 3, 9, 10, 5000)] == [
        1,
        2,
        4,
        256,
        300,
        300,
    ]
    assert [least.delay(failures, 0) for failures in (1, 2, 3, 10)] == [0.5, 1, 2, 150]
    assert least.delay(1, 77.0) == 77.0
    assert least.delay(1, 1e9) == LONGEST_ASKED_SECONDS
    assert least.delay(1, -5.0) == 0.5
    chance = random.Random(3)
    assert (
        len({replace(ARCHIVE_RETRIES, chance=chance.random).delay(4, 0) for _ in range(20)}) == 20
    )


def test_tries_are_counted_again_after_progress() -> None:
    reached, calls, waits = 0, 0, []

    def action() -> str:
        nonlocal reached, calls
        calls += 1
        if calls % 2 == 0:
            reached += 1
        if calls < 9:
            raise ArchiveUnavailable("away")
        return "done"

    said: list[str] = []
    three = replace(ARCHIVE_RETRIES, tries=3, sleep=waits.append, say=said.append)
    assert retry(action, three, ArchiveUnavailable, progress=lambda: reached) == "done"
    assert len(waits) == len(said) == 8
    with pytest.raises(ArchiveUnavailable):
        retry(lambda: (_ for _ in ()).throw(ArchiveUnavailable("x")), three)
    assert len(waits) == 10


def test_a_refusal_is_not_retried_and_a_stop_ends_the_wait() -> None:
    with pytest.raises(ArchivePermanentError):
        retry(lambda: (_ for _ in ()).throw(ArchivePermanentError("no")), ARCHIVE_RETRIES)
    transfer = Transfer()
    transfer.stop.set()
    with pytest.raises(CopyStopped):
        transfer.wait(1e9)


def test_the_card_sets_the_limit() -> None:
    transfer = Transfer.of(BackupSection(parallel=3, megabytes_per_second=1.0))
    assert (
        transfer.parallel,
        transfer.sending.bytes_per_second,
        transfer.reading.bytes_per_second,
    ) == (3, 1e6, 1e6)
    assert transfer.piece_bytes == 250_000, "a piece takes a quarter of a second"
    assert Transfer.of(BackupSection()).sending.bytes_per_second == 0
