"""A run's list of excluded nodes and the exclude lists of its queued jobs: one way to change both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.excluding import exclude
from tests.tr11ops.agent.queues import Queue, job
from tr11ops.base.errors import SchedulerError, SchedulerUnreachable
from tr11ops.nodes.queue_exclusions import (
    RunQueue,
    exclude_nodes,
    include_nodes,
    sync_queue_exclusions,
)
from tr11ops.runcard.card import OwnCard
from tr11ops.rundir.exclusion import Exclusion, ExclusionLimit
from tr11ops.rundir.exclusions import EXCLUDED, INCLUDED, include, read_version
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths

NODES = frozenset({"a", "b", "c", "z"})


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(RunPaths(tmp_path, "n", "main"), tmp_path / "kill-switch")


def of(queue: Queue, **changes: object) -> RunQueue:
    return RunQueue(
        **{
            "scheduler": queue,
            "look": queue.jobs,
            "known": lambda: NODES,
            "kept": (),
            "user": "me",
            **changes,
        }
    )  # type: ignore[arg-type]


def put_on(directory: RunDirectory, *nodes: str) -> None:
    for node in nodes:
        assert exclude(directory, node, why="", owner="tr11", days=1)


def lists(queue: Queue) -> list[tuple[str, ...]]:
    return [one.excluded for one in queue.waiting.values()]


def test_list_queue_and_journal_follow_one_call_each_way(directory: RunDirectory) -> None:
    queue = Queue(job("7", "7", excluded=("z",)), job("11", None))
    asked = [Exclusion(node, "Xid 79", "tr11") for node in ("a", "b")]
    done = exclude_nodes(directory, asked, of(queue), days=1, limit=ExclusionLimit(1))
    assert (
        done.nodes == ("a",)
        and done.refused[0][0] == "b"
        and "1 may be excluded" in done.refused[0][1]
    )
    assert lists(queue) == [("a", "z"), ("a",)]
    assert [(one.name, one.before, one.after) for one in done.changes] == [
        ("7", ("z",), ("a", "z")),
        ("11", (), ("a",)),
    ]
    assert done.failures == (f"b: {done.refused[0][1]}",)
    done = include_nodes(directory, ["a"], of(queue), why="fine again", owner="me")
    assert (done.nodes, done.failures, lists(queue)) == (("a",), (), [("z",), ()])
    entries = [(one.kind, one.why, one.who) for one in read_journal(directory.journal).entries]
    assert entries == [(EXCLUDED, "Xid 79", "tr11"), (INCLUDED, "fine again", "me")]


def test_what_cannot_be_recorded_leaves_the_queue_as_it_is(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tr11ops.rundir.exclusions._commit", refuse)
    queue = Queue(job("7", "7"))
    done = exclude_nodes(directory, [Exclusion("a", owner="me")], of(queue), days=1)
    assert done.nodes == () and "Read-only file system" in done.failures[0] and lists(queue) == [()]


def test_each_part_of_an_array_keeps_what_was_on_its_list(directory: RunDirectory) -> None:
    """A requeued task has a record of its own; the throttle that the scheduler shows is no part of
    a name.
    """
    put_on(directory, "a")
    rest = job("7", "7", pending_tasks=(4, 5), excluded=("b",), job_id="7_[4-5%1]")
    queue = Queue(rest, job("9", "7", task_id=3, excluded=("c",), job_id="7_3"))
    done = sync_queue_exclusions(directory, of(queue))
    assert lists(queue) == [("a", "b"), ("a", "c")]
    assert [(one.job_id, one.name) for one in done.changes] == [
        ("7_[4-5%1]", "7_[4-5]"),
        ("7_3", "7_3"),
    ]


@pytest.mark.parametrize(("is_done", "failed"), [(True, 0), (False, 1)])
def test_an_answer_is_not_believed_against_the_job(
    directory: RunDirectory, is_done: bool, failed: int
) -> None:
    put_on(directory, "a")
    queue = Queue(job("7", "7", pending_tasks=(4, 5), job_id="7_[4-5%1]"))
    queue.refuses = {"7_[4-5]": is_done}
    done = sync_queue_exclusions(directory, of(queue))
    assert len(done.failed) == failed and lists(queue) == [("a",) if is_done else ()]


def test_a_job_that_starts_meanwhile_is_no_failure(directory: RunDirectory) -> None:
    put_on(directory, "a")
    queue = Queue(job("7", "7"))
    queue.refuses = {"7": False}
    looks = iter((queue.jobs(), ()))
    assert sync_queue_exclusions(directory, of(queue, look=lambda: next(looks))).failed == ()


def test_the_cards_nodes_stay_excluded_whatever_leaves_the_list(directory: RunDirectory) -> None:
    card = OwnCard.model_construct(
        slurm=OwnCard.model_fields["slurm"].annotation.model_construct(exclude=["[b-c"])
    )
    assert card.slurm.excluded_nodes == ()
    put_on(directory, "a", "b")
    queue = Queue(job("7", "7"))
    assert sync_queue_exclusions(directory, of(queue)).failures == ()
    include_nodes(directory, ["a", "b"], of(queue, kept=("b",)), why="", owner="me")
    assert lists(queue) == [("b",)]


def test_an_unreadable_queue_is_said_and_the_list_changed(directory: RunDirectory) -> None:
    queue = Queue(job("7", "7"))
    queue.silent = 10
    done = exclude_nodes(directory, [Exclusion("a", owner="me")], of(queue), days=1)
    assert done.nodes == ("a",) and isinstance(done.unread, SchedulerUnreachable)
    with pytest.raises(SchedulerUnreachable):
        _ = done.failures

    def patient(request: Callable[[], object]) -> object:
        while True:
            try:
                return request()
            except SchedulerUnreachable:
                continue

    assert sync_queue_exclusions(directory, of(queue, retry=patient)).failures == ()
    assert lists(queue) == [("a",)]


def test_what_another_host_excludes_reaches_the_queue_too(directory: RunDirectory) -> None:
    put_on(directory, "a")
    queue = Queue(job("7", "7"))
    others = iter((lambda: put_on(directory, "b"),))

    def look() -> tuple[object, ...]:
        found = queue.jobs()
        next(others, lambda: None)()
        return found

    assert sync_queue_exclusions(directory, of(queue, look=look)).failures == ()
    assert lists(queue) == [("a", "b")]
    include(directory, "a", why="", owner="me")
    assert sync_queue_exclusions(directory, of(queue), remove=["a"]).failures == ()
    assert lists(queue) == [("b",)]


def test_a_change_that_was_cut_off_is_completed_by_the_next(directory: RunDirectory) -> None:
    """Killed between the list and the queue; and a node that the scheduler no longer knows spoils
    no list.
    """
    put_on(directory, "a", "gone")
    queue = Queue(job("7", "7"))
    done = sync_queue_exclusions(directory, of(queue))
    assert done.failures == () and done.left_out == ("gone",) and lists(queue) == [("a",)]


def test_anothers_job_is_said_to_be_anothers(directory: RunDirectory) -> None:
    put_on(directory, "a")
    queue = Queue(job("7", None, user="anna"))

    def refuse(job_id: str, nodes: tuple[str, ...]) -> None:
        raise SchedulerError("Access/permission denied")

    queue.exclude = refuse  # type: ignore[method-assign]
    [fault] = sync_queue_exclusions(directory, of(queue)).failures
    assert "belongs to anna, who can" in fault and "permission denied" in fault
    assert [entry.node for entry in read_version(directory.exclusions).exclusions] == ["a"]
