"""What the scheduler says of an attempt's own job: the last answer counts, and none is no answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.agent.queues import job
from tr11ops.agent.allocation import Allocation
from tr11ops.agent.attempt_context import (
    LOOK_SECONDS,
    NEAR_LOOK_SECONDS,
    AttemptContext,
    AttemptObservations,
    JobWatch,
    seconds_to_next_look,
)
from tr11ops.agent.job_follower import of_ended_job
from tr11ops.agent.step import LineTee
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.base import Job, JobState
from tr11ops.runcard.card import load_card, shipped_folder

NODES = ("n1", "n2", "n3")
RUNNING = replace(
    job("7", "6"), state=JobState.RUNNING, start_time=1000.0, end_time=1600.0, nodes=NODES
)


class Answers:
    """A scheduler that gives these answers, one after another."""

    def __init__(self, *answers: Job | SchedulerError | None) -> None:
        self.answers: Iterator[Job | SchedulerError | None] = iter(answers)

    def job(self, job_id: str) -> Job | None:
        answer = next(self.answers)
        if isinstance(answer, SchedulerError):
            raise answer
        return answer


def observations(
    folder: Path, *answers: Job | SchedulerError | None
) -> tuple[JobWatch, AttemptObservations]:
    card = load_card(shipped_folder() / "demo.toml", [f"run.directory={folder}"], {})
    watch = JobWatch(Answers(*answers), "7")
    context = AttemptContext(card, Allocation("slurm", "7", "6", 1, NODES), {}, "t", watch=watch)
    return watch, AttemptObservations(context, LineTee(folder / "log.txt"))


def test_it_is_asked_more_often_towards_the_end() -> None:
    assert seconds_to_next_look(None, 1000.0) == LOOK_SECONDS
    assert seconds_to_next_look(5000.0, 1000.0) == LOOK_SECONDS
    assert seconds_to_next_look(1100.0, 1000.0) == NEAR_LOOK_SECONDS
    assert seconds_to_next_look(900.0, 1000.0) == LOOK_SECONDS


def test_no_answer_keeps_the_last_one(tmp_path: Path) -> None:
    later = replace(RUNNING, end_time=2600.0)
    watch, seen = observations(tmp_path, RUNNING, SchedulerUnreachable("silent"), None, later)
    watch.look()
    first = seen.job_time()
    assert first is not None and (first.start, first.end) == (1000.0, 1600.0)
    assert watch.look() is None and watch.look() is None and seen.job_time() == first
    watch.look()
    assert seen.job_time() != first and seen.job_time() is not None


def test_before_the_first_answer_the_cards_limit_counts(tmp_path: Path) -> None:
    watch, seen = observations(tmp_path, SchedulerUnreachable("silent"))
    assert watch.look() is None
    assumed = seen.job_time()
    assert assumed is not None and assumed.end is not None and assumed.end > time.time()
    assert seen.lost_nodes() == () and seen.too_short() == ""


@pytest.mark.parametrize(
    ("told", "is_over"),
    [
        (RUNNING, False),
        (None, False),
        (SchedulerUnreachable("silent"), False),
        (replace(RUNNING, state=JobState.UNKNOWN), False),
        (replace(RUNNING, nodes=("n1", "n2")), False),
        (replace(RUNNING, nodes=("n2", "n3")), True),
        (replace(RUNNING, state=JobState.TIMEOUT), True),
        (replace(RUNNING, state=JobState.COMPLETING), True),
        (replace(RUNNING, state=JobState.PENDING, nodes=()), True),
    ],
)
def test_a_job_is_over_only_when_the_scheduler_says_so(
    tmp_path: Path, told: Job | SchedulerError | None, is_over: bool
) -> None:
    _, seen = observations(tmp_path, told)
    assert (seen.why_over() is not None) is is_over


def test_who_is_to_blame_for_the_end_of_a_job(tmp_path: Path) -> None:
    """A batch host that is lost; no other node, whatever its workers said as they were ended."""
    _, seen = observations(
        tmp_path, replace(RUNNING, nodes=("n2", "n3")), replace(RUNNING, state=JobState.CANCELLED)
    )
    lost, cancelled = seen.why_over(), seen.why_over()
    assert lost is not None and cancelled is not None
    assert of_ended_job(lost, NODES).blamed == ("n1",)
    found = of_ended_job(cancelled, NODES)
    assert (found.blamed, found.suspects, found.fault) == ((), (), "its job was ended: CANCELLED")


def test_a_node_that_has_left_the_job_is_not_used_again(tmp_path: Path) -> None:
    watch, seen = observations(tmp_path, replace(RUNNING, nodes=("n1", "n3")))
    assert seen.situation().usable == NODES
    watch.look()
    assert seen.lost_nodes() == ("n2",) and seen.situation().usable == ("n1", "n3")
