"""Which files are read again: every byte within the stated days, whenever the rounds come, and
however many files.
"""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from tr11ops.backup.due import DAY_SECONDS, StoredFile, choose, oldest
from tr11ops.rundir.copies import CopiedFile, Receipt

NOW = 1.7e9
HOUR = 3600.0


COPY = Receipt(
    run="tr11-test",
    variant="main",
    step=1000,
    kind="full",
    identity="",
    location="checkpoints/main/global_step1000",
    format="files",
    files=(),
    copied=0.0,
    verified=0.0,
)


def archive(*files: tuple[str, int, float | None]) -> list[StoredFile]:
    return [StoredFile(COPY, CopiedFile(path, size, ""), read) for path, size, read in files]


def names(files: tuple[StoredFile, ...]) -> list[str]:
    return [file.file.path for file in files]


def test_never_read_first_then_the_oldest_by_share() -> None:
    files = archive(
        *((f"f{n}", 10, NOW - n * DAY_SECONDS) for n in range(1, 10)), ("new", 10, None)
    )
    # 100 bytes in 21 days of 30, one day since the last round: five bytes
    assert names(choose(files, NOW, NOW - DAY_SECONDS, 30, DAY_SECONDS)) == ["new"]
    assert names(choose(files[:-1], NOW, NOW - DAY_SECONDS, 30, DAY_SECONDS)) == ["f9"]


def test_what_would_be_too_old_is_read_whatever_the_share() -> None:
    files = archive(
        *((f"f{n:02d}", 1000, NOW - 28.5 * DAY_SECONDS) for n in range(20)),
        ("young", 10, NOW - 1e5),
    )
    assert len(choose(files, NOW, NOW - HOUR, 30, DAY_SECONDS)) == 20


def test_after_missed_rounds_all_that_is_late_is_read() -> None:
    files = archive(*((f"f{n}", 10, NOW - 90 * DAY_SECONDS) for n in range(50)))
    assert len(choose(files, NOW, NOW - 90 * DAY_SECONDS, 30, DAY_SECONDS)) == 50


def test_two_rounds_in_a_row_do_not_read_the_same_twice() -> None:
    files = archive(("a", 10, NOW - 60.0), ("b", 10, NOW - 120.0))
    assert choose(files, NOW, NOW - 60.0, 30, DAY_SECONDS) == ()
    assert choose(files, NOW, NOW - 60.0, 0.01, DAY_SECONDS) == (), (
        "rounds that are rarer than the rotation"
    )
    assert choose([], NOW, None, 30, DAY_SECONDS) == ()


def test_a_clock_that_was_set_back_or_forth_stops_nothing() -> None:
    ahead = archive(*((f"f{n}", 10, NOW + 400 * DAY_SECONDS) for n in range(10)))
    chosen = choose(ahead, NOW, NOW + 400 * DAY_SECONDS, 30, DAY_SECONDS)
    assert chosen and all(file.read is None for file in chosen), "what the future says is not known"
    assert oldest(ahead, NOW) is None
    assert len(choose(archive(("a", 10, NOW)), NOW + 4000 * DAY_SECONDS, NOW, 30, DAY_SECONDS)) == 1
    assert (
        oldest(archive(("a", 1, NOW - 5), ("b", 1, NOW - 9)), NOW) == 9 and oldest([], NOW) == 0.0
    )


@settings(max_examples=60, deadline=None)
@given(
    st.floats(8, 60),
    st.sampled_from([6 * HOUR, DAY_SECONDS]),
    st.lists(
        st.tuples(st.floats(0.05, 1.99), st.lists(st.integers(0, 10**12), max_size=6)),
        min_size=30,
        max_size=90,
    ),
)
def test_every_byte_is_read_in_time_while_the_archive_grows(
    days: float, interval: float, rounds: list[tuple[float, list[int]]]
) -> None:
    """Rounds come at any spacing up to two intervals (one was missed); each may bring new copies."""
    read: dict[str, tuple[int, float]] = {}
    now, last = NOW, None
    for spacing, arrived in rounds:
        now += spacing * interval
        assert all(now - moment <= days * DAY_SECONDS for _, moment in read.values())
        files = archive(*((name, size, moment) for name, (size, moment) in read.items()))
        for file in choose(files, now, last, days, interval):
            read[file.file.path] = (file.file.bytes, now)
        for size in arrived:
            read[f"{len(read)}"] = (size, now)
        last = now


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.5, 1.0), min_size=40, max_size=60), st.integers(20, 200))
def test_no_round_has_all_the_work(spacings: list[float], count: int) -> None:
    """Files of one size that came all at once: after the first rotation, each round reads about its
    share.
    """
    files = {f"{n}": NOW for n in range(count)}
    now, last, most = NOW, NOW, 0.0
    for spacing in spacings:
        now += spacing * DAY_SECONDS
        chosen = choose(
            archive(*((name, 10, read) for name, read in files.items())),
            now,
            last,
            30,
            DAY_SECONDS,
        )
        files.update({file.file.path: now for file in chosen})
        most, last = max(most, len(chosen)), now
    assert most <= count / 21 + 2
