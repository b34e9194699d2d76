"""One reader of array expressions: what the card, the embedded scheduler and the names of queued
tasks say agrees.
"""

from __future__ import annotations

import pytest

from tr11ops.base.errors import ArraySyntaxError, SchedulerError
from tr11ops.cluster.arrays import covers, named_tasks, parse_array, task_numbers
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.local_rules import array_of, parse_job_id
from tr11ops.runcard.card import CardError, parse_attempts

FAULTS = [
    "",
    "a",
    "5-1",
    "1-9:0",
    "1-4000001",
    "1-10001",
    "\u0661-\u0665",
    "1-999999999",
    "1,,2",
    "9" * 5000,
]


@pytest.mark.parametrize("text", FAULTS)
def test_what_is_no_array_is_none_to_everyone(text: str) -> None:
    with pytest.raises(ArraySyntaxError):
        parse_array(text)
    with pytest.raises(CardError):
        parse_attempts(text)
    with pytest.raises(SchedulerError):
        array_of(text)


@pytest.mark.parametrize(
    ("text", "tasks"), [("4000000", (4_000_000,)), ("100000-100002%1", (100_000, 100_001, 100_002))]
)
def test_an_array_of_the_card_is_one_of_the_embedded_scheduler(
    text: str, tasks: tuple[int, ...]
) -> None:
    assert parse_attempts(text).indices == array_of(text).indices == tasks == task_numbers(text)


def test_a_task_named_twice_counts_once_and_a_launch_refuses_it() -> None:
    assert array_of("1-3,2").indices == (1, 2, 3) and array_of("1-3,2").throttle is None
    with pytest.raises(CardError, match="names a task twice"):
        parse_attempts("1-3,2")


@pytest.mark.parametrize("name", ["7_[0-8:4]", "7_[0,4-8:4%1]", "7_[0,4,8%1]"])
def test_names_of_tasks_are_read_as_the_queue_shows_them(name: str) -> None:
    job = Job(name, "7", "7", None, "run", "ana", JobState.PENDING, pending_tasks=(0, 4, 8))
    assert covers(name, job) and parse_job_id(name).tasks == frozenset({0, 4, 8})
    assert not covers("7_[1-3,5-7]", job)


def test_a_queue_row_keeps_what_is_readable_but_for_the_name() -> None:
    assert task_numbers("1-3,5,...%1") == (1, 2, 3, 5)
    assert named_tasks("[1-3,5,...]") is None and parse_array("0-15:4").step == 4
