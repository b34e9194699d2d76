"""Names of queued jobs: a part of an array is changed without the rest, and what names cover is
never more.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tr11ops.cluster.arrays import covers, names_of, not_repeated, split, tasks_of, without
from tr11ops.cluster.base import Job, JobState

TASKS = st.sets(st.integers(0, 12), min_size=1)


def array(tasks: set[int] | range, number: str = "7") -> Job:
    return Job(
        f"{number}_x",
        number,
        number,
        None,
        "run",
        "ana",
        JobState.PENDING,
        pending_tasks=tuple(sorted(tasks)),
    )


SINGLE = Job("9", "9", None, None, "run", "ana", JobState.PENDING)


def test_an_array_goes_by_its_number_unless_a_part_is_left_out() -> None:
    assert names_of((array(range(1, 4)), array({5}), SINGLE), ()) == ("7", "9")
    assert names_of((array({1, 2, 3}), array({5})), (array({4}), SINGLE)) == ("7_[1-3,5]",)
    assert names_of((array({0}),), (array({1}),)) == ("7_0",)
    # as Slurm shows a task on its own
    one = replace(array(()), job_id="7_3", raw_id="12", task_id=3)
    assert (
        names_of((one,), (array({1}),)) == ("7_3",) and covers("7_3", one) and not covers("12", one)
    )


def test_a_part_covers_what_it_names_and_leaves_the_rest() -> None:
    job = array(range(1, 6))
    assert split(job, ("7",)) == (job, None) == split(job, ("7_[1-9]",))
    assert split(job, ("8", "7_9", "no name")) == (None, job)
    ours, rest = split(job, ("7_2", "7_[4-5]"))
    assert ours is not None and (ours.job_id, tasks_of(ours), ours.task_id) == (
        "7_[2,4-5]",
        (2, 4, 5),
        None,
    )
    assert rest is not None and (rest.job_id, tasks_of(rest)) == ("7_[1,3]", (1, 3))
    first, _ = split(array({0, 1}), ("7_0",))
    assert first is not None and (first.job_id, first.task_id, tasks_of(first)) == ("7_0", 0, (0,))
    high = array(range(3_000_000, 3_000_003))  # as far as Slurm's arrays go
    assert split(high, names_of((high,), (array({1}),))) == (high, None)
    assert not covers("7_[1-9,,]", job) and not covers("7_[0-9999999]", job)
    assert covers("9", SINGLE) and not covers("9_1", SINGLE)


@pytest.mark.parametrize(
    ("names", "gone", "left"),
    [
        (("7", "9"), ("9",), ("7",)),
        (("7_[1-5]",), ("7_2", "7_3"), ("7_[1,4-5]",)),
        (("7_[1-5]",), ("7",), ()),
        (("7",), ("7_2",), ()),  # what is left of a whole array has no name: it counts for gone
        (("7_1",), ("8",), ("7_1",)),
    ],
)
def test_names_less_names(
    names: tuple[str, ...], gone: tuple[str, ...], left: tuple[str, ...]
) -> None:
    assert without(names, gone) == left


@pytest.mark.parametrize(
    ("names", "more", "left"),
    [
        (("7",), ("7_2",), ("7",)),
        (("7", "7_3"), ("7_[2-3]",), ("7",)),
        (("7", "7_3"), ("7",), ()),
        (("7_[1-5]",), ("7_2", "8"), ("7_[1,3-5]",)),
    ],
)
def test_names_that_are_named_again(
    names: tuple[str, ...], more: tuple[str, ...], left: tuple[str, ...]
) -> None:
    assert not_repeated(names, more) == left


@given(chosen=TASKS, left=TASKS, more=TASKS)
def test_what_is_named_is_what_was_chosen_and_nothing_else(
    chosen: set[int], left: set[int], more: set[int]
) -> None:
    left -= chosen
    names = names_of((array(chosen),), (array(left),) if left else ())
    ours, rest = split(array(chosen | left), names)
    assert ours is not None and set(tasks_of(ours)) == chosen
    assert (set() if rest is None else set(tasks_of(rest))) == left
    ours, _ = split(
        array(range(13)), without(("7_[0-12]",), (f"7_[{','.join(map(str, sorted(more)))}]",))
    )
    assert (set() if ours is None else set(tasks_of(ours))) == set(range(13)) - more
