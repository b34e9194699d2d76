"""Decisions of a synchronisation, on made-up files."""

from __future__ import annotations

import json

from hypothesis import given, strategies as st

from tr11ops.base.errors import HubPermanentError, HubUnavailable
from tr11ops.hub.base import HubFile
from tr11ops.hub.sync_plan import (
    MOST_BYTES,
    MOST_FILES,
    LocalFile,
    MeasuredFile,
    Note,
    Send,
    Stamp,
    batches,
    commit_message,
    is_wanted,
    judge,
    material,
    superseded_name,
)
from tr11ops.hub.sync_round import LoopClock, SyncOutcome, follow, seconds_of
from tr11ops.rundir.claims import ClaimTaken

paths = st.sampled_from(
    ["logs/main/a.txt", "tensorboard/main/events.out.tfevents.1", "logs/main/facts.json", "logs/b"]
)
files = st.builds(LocalFile, paths, st.builds(Stamp, st.integers(0, 100), st.just(0), st.just(1)))


@given(files, st.integers(0, 100), st.none() | st.integers(0, 100), st.booleans(), st.sets(paths))
def test_nothing_that_the_hub_has_is_ever_lost(file, end, there, continues, taken):
    far = None if there is None else HubFile(there, "oid", "sha")
    end = min(end, file.bytes)
    verdict = judge(MeasuredFile(file, end, "sha", None if far is None else continues), far, taken)
    if not isinstance(verdict, Send):
        assert verdict is None or isinstance(verdict, Note)
        return
    assert verdict.bytes == end > 0
    if far is not None and file.form != "whole":
        is_more = continues and end > far.bytes
        assert is_more or (verdict.superseded and verdict.superseded not in taken)


@given(st.lists(st.tuples(st.integers(0, 3 * MOST_BYTES // 2)), max_size=30))
def test_batches_hold_everything_once_within_their_limits(sizes):
    sends = [
        Send(LocalFile(f"{n}.txt", Stamp(size, 0, 0)), size, "", "new")
        for n, (size,) in enumerate(sizes)
    ]
    made = list(batches(sends))
    assert sorted(send.path for batch in made for send in batch) == sorted(
        send.path for send in sends
    )
    for batch in made:
        assert 1 <= len(batch) <= MOST_FILES and (
            len(batch) == 1 or sum(send.bytes for send in batch) <= MOST_BYTES
        )


def test_many_small_files_are_few_commits():
    sends = [Send(LocalFile(f"{n}.txt", Stamp(1, 0, 0)), 1, "", "new") for n in range(1200)]
    assert [len(batch) for batch in batches(sends)] == [500, 500, 200]
    assert (
        commit_message(sends) == "1200 files: 1200 new"
        and commit_message(sends[:1]) == "0.txt: new"
    )


def test_patterns_cross_slashes_and_never_take_hidden_files():
    historical = ("tensorboard/*/*tfevents*", "logs/*/*.txt")
    assert is_wanted("logs/main/deep/er.txt", historical)
    assert not is_wanted("logs/top.txt", historical) and not is_wanted(
        "logs/main/a.TXT", historical
    )
    assert not any(
        is_wanted(path, ("*",)) for path in (".git/config", "a/.git/b.txt", "logs/main/.a.txt.x1")
    )


def test_a_free_name_keeps_the_ending():
    assert (
        superseded_name("logs/main/a.txt", {"logs/main/a-superseded-1.txt"})
        == "logs/main/a-superseded-2.txt"
    )
    name = "tensorboard/main/events.out.tfevents.1.host"
    assert superseded_name(name, ()) == f"{name}-superseded-1"


def test_ages_are_not_material():
    old = {"verdict": "stopped", "time": "1", "last_checkpoint": {"step": 3, "age_seconds": 10}}
    new = {**old, "time": "2", "last_checkpoint": {"step": 3, "age_seconds": 3610}}
    assert material(json.dumps(old).encode()) == material(json.dumps(new).encode()) != ""
    assert material(json.dumps({**old, "verdict": "healthy"}).encode()) != material(
        json.dumps(old).encode()
    )
    assert material(b"{") == "" == material(b"[]")


def test_a_span_is_written_as_people_do():
    assert [seconds_of(text) for text in ("60s", "30m", "30 min", "1h", "1 H", "2d", "90")] == [
        60, 1800, 1800, 3600, 3600, 172_800, 5400,
    ]  # fmt: skip


# ----------------------------------------------------------------------------- on and on
class FakeTime:
    """A clock that only waiting moves; it ends after so many waits."""

    def __init__(self, waits: int) -> None:
        self.now, self.left, self.waited = 0.0, waits, []

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.waited.append(seconds)
        self.left -= 1
        return self.left <= 0

    @property
    def clock(self) -> LoopClock:
        return LoopClock(lambda: self.now, self.wait, lambda: 0.5)


def rounds(fake: FakeTime, *answers: Exception | None) -> tuple[list[str], int]:
    said: list[str] = []
    shown: list[SyncOutcome] = []
    remaining = list(answers)

    def one() -> SyncOutcome:
        fake.now += 5
        answer = remaining.pop(0)
        if answer is not None:
            raise answer
        return SyncOutcome("bot/logs")

    follow(one, 3600.0, fake.clock, shown.append, said.append)
    return said, len(shown)


def test_days_without_the_hub_are_said_once_and_that_it_is_back():
    fake = FakeTime(60)
    away = [HubUnavailable("the hub gives no answer")] * 57
    said, shown = rounds(fake, None, None, *away, None)
    assert said[0] == "the hub gives no answer; trying on" and said[1].startswith(
        "it works again, after 2 d"
    )
    assert len(said) == 2 and shown == 3
    assert (
        fake.waited[:2] == [3595, 3595]
        and fake.waited[2:6] == [60, 120, 240, 480]
        and max(fake.waited) == 3600
    )


def test_the_hub_is_left_alone_as_long_as_it_asks():
    fake = FakeTime(2)
    rounds(fake, HubUnavailable("429", wait=5000.0), None)
    assert fake.waited[0] == 5000


def test_a_refusal_and_another_one_at_it_do_not_end_it():
    fake = FakeTime(4)
    said, shown = rounds(
        fake,
        HubPermanentError("the token is wrong"),
        HubPermanentError("the token is wrong"),
        ClaimTaken(None),
        None,
    )
    assert [line.partition(";")[0] for line in said[:2]] == [
        "the token is wrong",
        "it runs already: someone else, since this moment",
    ] and shown == 1


def test_a_folder_that_is_not_there_yet_is_waited_for():
    fake = FakeTime(3)
    missing = FileNotFoundError(2, "No such file or directory", "/run/run-logs")
    said, shown = rounds(fake, missing, missing, None)
    assert (
        said[0] == "/run/run-logs: No such file or directory; trying on"
        and len(said) == 2
        and shown == 1
    )


def test_a_round_longer_than_the_interval_is_followed_at_once():
    fake = FakeTime(2)
    said, shown = [], []

    def slow() -> SyncOutcome:
        fake.now += 5000
        return SyncOutcome("bot/logs")

    follow(slow, 3600.0, fake.clock, shown.append, said.append)
    assert fake.waited == [0, 0]
