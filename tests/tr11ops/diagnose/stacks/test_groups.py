"""Workers with one stack share a row; a row says for how many looks none of them has moved."""

from __future__ import annotations

from tests.tr11ops.diagnose.stacks.made import ALL_REDUCE, BARRIER, FORWARD, ranks, worker
from tr11ops.cluster.arrays import nodes_text
from tr11ops.diagnose.stacks.groups import grouped, looks_of, ranks_text
from tr11ops.diagnose.stacks.worker import GONE, Frame, WorkerStack


def test_identical_stacks_share_a_row_and_the_odd_one_is_on_top() -> None:
    found = grouped([*ranks(6, but=4, per_node=2), worker(4, BARRIER, per_node=2)])
    assert [group.ranks for group in found] == [(4,), (0, 1, 2, 3, 5)]
    assert found[1].nodes == ("tw00", "tw01", "tw02") and found[1].frames == ALL_REDUCE


def test_another_line_is_another_stack() -> None:
    moved = (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 2811), *ALL_REDUCE[1:])
    assert len(grouped([worker(0), worker(1, moved)])) == 2


def test_stopped_and_running_workers_are_told_apart() -> None:
    assert len(grouped([worker(0), worker(1, state="T")])) == 2


def numbered(*workers: WorkerStack) -> dict[int, WorkerStack]:
    return {one.rank: one for one in workers}


def test_looks_count_as_long_as_a_worker_does_not_move() -> None:
    first = [worker(0), worker(1), worker(2)]
    counts = looks_of({}, {}, first)
    assert counts == {0: 1, 1: 1, 2: 1}
    second = [worker(0), worker(1, FORWARD), worker(2, state="T")]
    counts = looks_of(numbered(*first), counts, second)
    assert counts == {0: 2, 1: 1, 2: 1}
    counts = looks_of(numbered(*second), counts, [*second, worker(3)])
    assert counts == {0: 3, 1: 2, 2: 2, 3: 1}
    assert [group.looks for group in grouped([*second, worker(3)], counts)] == [2, 2, 1], (
        "a row's least"
    )


def test_what_was_not_read_has_not_stood_still() -> None:
    unread, gone = worker(0, (), trouble="no right"), worker(1, (), state=GONE)
    assert looks_of(numbered(unread, gone), {0: 1, 1: 1}, [unread, gone]) == {0: 1, 1: 2}


def test_a_new_process_of_the_rank_has_not_stood_still() -> None:
    old = WorkerStack(0, "tw00", 5, "S", ALL_REDUCE)
    assert looks_of({0: old}, {0: 4}, [worker(0)]) == {0: 1}


def test_ranks_and_nodes_are_ranges() -> None:
    assert ranks_text([5, 0, 1, 2, 3]) == "0-3,5"
    assert nodes_text(["tw07", "tw01", "tw02"]) == "tw[01-02,07]"
    assert nodes_text(["odd name", "b"]) == "b,odd name"
