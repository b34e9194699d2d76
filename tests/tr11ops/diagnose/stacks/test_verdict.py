"""Who holds the others up, in one sentence; and that no one is named where no one can be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.tr11ops.diagnose.stacks.made import (
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    ELSEWHERE,
    FORWARD,
    LOADER,
    SAVE,
    SEND,
    ranks,
    worker,
)
from tr11ops.diagnose.stacks.groups import grouped
from tr11ops.diagnose.stacks.operations import OperationsFinding
from tr11ops.diagnose.stacks.verdict import StacksVerdict, judge
from tr11ops.diagnose.stacks.worker import GONE, Frame, WorkerStack


def of(workers: Sequence[WorkerStack], *silent: str, looks: int = 1) -> StacksVerdict:
    return judge(grouped(workers, dict.fromkeys(range(100), looks)), silent)


SEVEN = ranks(8, but=5)


@pytest.mark.parametrize(
    ("odd", "words", "kind", "is_certain"),
    [
        (worker(5, state="T"), "is stopped (SIGSTOP)", "stopped", True),
        (worker(5, state="t"), "is stopped (a debugger)", "stopped", True),
        (worker(5, (), state=GONE), "has ended", "dead", True),
        (worker(5, state="Z"), "has ended", "dead", True),
        (worker(5, LOADER), "waits for the data loader", "data-loader", False),
        (
            worker(5, LOADER, call="read", path="/f/x.bin"),
            "waits for a file (read /f/x.bin)",
            "file",
            False,
        ),
        (
            worker(5, SAVE),
            "waits for a file (_write_all, trainer/checkpoint/files.py:180)",
            "file",
            False,
        ),
        (worker(5, ELSEWHERE), "is in sleep_on_it (plugin/odd.py:3)", "other", False),
    ],
)
def test_one_rank_holds_seven_up(odd: WorkerStack, words: str, kind: str, is_certain: bool) -> None:
    found = of([*SEVEN, odd])
    assert found.sentence == f"rank 5 on node tw05 {words}; 7 ranks wait for it in all-reduce"
    assert (found.ranks, found.nodes, found.kind, found.is_certain) == (
        (5,),
        ("tw05",),
        kind,
        is_certain,
    )
    assert found.needs_person


def test_several_ranks_of_a_node_are_named_together() -> None:
    odd = [worker(rank, state="T", per_node=2) for rank in (2, 3)]
    others = [one for one in ranks(8, per_node=2) if one.rank not in (2, 3)]
    assert of([*others, *odd]).sentence == (
        "ranks 2-3 on node tw01 are stopped (SIGSTOP); 6 ranks wait for them in all-reduce"
    )


def test_a_rank_that_computes_is_named_only_when_it_stands() -> None:
    once = of([*SEVEN, worker(5, FORWARD)])
    assert (
        not once.needs_person
        and "rank 5 on node tw05 computes" in once.sentence
        and "--watch" in once.sentence
    )
    again = of([*SEVEN, worker(5, FORWARD)], looks=2)
    assert (
        again.ranks == (5,)
        and again.sentence == "rank 5 on node tw05 computes; 7 ranks wait for it in all-reduce"
    )


def test_a_healthy_training_names_no_one() -> None:
    for workers in (
        ranks(8, FORWARD),
        ranks(8),
        [*ranks(4, SEND), *(worker(rank) for rank in range(4, 8))],
    ):
        found = of(workers)
        assert not found.needs_person, found


def test_all_in_one_operation_for_long_is_the_network() -> None:
    found = of(ranks(8), looks=3)
    assert (
        found.ranks == tuple(range(8))
        and "since 3 looks: the network between the nodes" in found.sentence
    )


def test_no_rank_moves_and_none_waits_for_others() -> None:
    found = of(ranks(4, LOADER), looks=2)
    assert (
        found.ranks == (0, 1, 2, 3)
        and found.sentence
        == "all that were read (4 ranks) wait for their data; none has moved in 2 looks"
    )


def test_of_ranks_that_stand_in_different_places_none_has_moved() -> None:
    found = of([*ranks(3, LOADER), worker(3, FORWARD)], looks=2)
    assert found.sentence == "no rank has moved in 2 looks (3 ranks: data-loader, 1 rank: compute)"


def test_few_came_to_another_operation() -> None:
    workers = [*SEVEN, worker(5, BARRIER)]
    found = of(workers, looks=2)
    assert found.ranks == (5,) and found.sentence == (
        "rank 5 on node tw05 waits in barrier, 7 ranks in all-reduce: they came to different operations"
    )
    assert not of(workers).needs_person, "ranks come one after another"


def test_a_node_that_does_not_answer_is_named() -> None:
    found = of(SEVEN, "tw05")
    assert found.sentence == "node tw05 does not answer; 7 ranks wait for it in all-reduce"
    assert (found.ranks, found.nodes) == ((), ("tw05",))
    assert of([*SEVEN[1:], worker(0, state="T")], "tw05").ranks == (0,), (
        "what is certain comes first"
    )


def test_nothing_read_is_said_and_names_no_one() -> None:
    assert of([], "tw01", "tw02").sentence == "no node answered: nothing is known of the workers"
    assert "no worker of this attempt runs" in of([]).sentence
    unread = of([worker(0, (), trouble="py-spy is not installed")])
    assert (
        unread.sentence == "no stack could be read: py-spy is not installed"
        and not unread.needs_person
    )


def test_the_evaluation_hang_of_may_2022() -> None:
    """All nodes in broadcasts, sends and all-reduces but one rank of one, whose loader never
    answers (spec 2.1).
    """
    wait = (Frame("wait", "threading.py", 302), *LOADER[1:])
    workers = [worker(rank, BROADCAST, per_node=8) for rank in range(8)]
    workers += [worker(rank, SEND if rank < 12 else BROADCAST, per_node=8) for rank in range(8, 16)]
    workers += [worker(rank, ALL_REDUCE, per_node=8) for rank in range(16, 24)]
    workers += [worker(24, wait, per_node=8)]
    workers += [
        worker(rank, BROADCAST if rank < 28 else ALL_REDUCE, per_node=8) for rank in range(25, 32)
    ]
    found = of(workers)
    assert (found.ranks, found.nodes, found.kind) == ((24,), ("tw03",), "data-loader")
    assert found.sentence.startswith(
        "rank 24 on node tw03 waits for the data loader; 31 ranks wait for it in broadcast, "
    )


def test_the_flight_recorder_speaks_where_the_stacks_cannot() -> None:
    finding = OperationsFinding(
        "rank 5 did not enter all-reduce 9 of group default_pg; ranks 0-4 wait in it", (5,)
    )
    assert judge(grouped(ranks(8)), (), finding).sentence == finding.sentence
    assert judge(grouped(ranks(8)), (), finding).nodes == ("tw05",)
    stopped = judge(grouped([*SEVEN[1:], worker(0, state="T")]), (), finding)
    assert stopped.ranks == (0,), "a stopped process is no matter of opinion"
    nothing = OperationsFinding("ranks 0-7 are all in all-reduce 9", ())
    assert not judge(grouped(ranks(8)), (), nothing).needs_person
