"""The screen of `tr11 stacks` in 80 columns, its document and exit code, and what a second look
adds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.diagnose.stacks.made import ALL_REDUCE, FORWARD, LOADER, ranks, worker
from tr11ops.diagnose.stacks.look import StacksLook
from tr11ops.diagnose.stacks.operations import OperationsFinding
from tr11ops.diagnose.stacks.records import RecordsLook
from tr11ops.diagnose.stacks.screen import MOST_ROWS, lines, text_of
from tr11ops.diagnose.stacks.worker import CollectedStacks, Frame, NodeStacks, WorkerStack

NOW = 1_700_000_000.0


def look(
    workers: Sequence[WorkerStack],
    *silent: str,
    before: StacksLook | None = None,
    records: RecordsLook | None = None,
    trouble: str = "",
) -> StacksLook:
    nodes = sorted({one.node for one in workers})
    answers = tuple(
        NodeStacks(node, tuple(one for one in workers if one.node == node)) for node in nodes
    )
    collected = CollectedStacks(answers, silent, trouble)
    return StacksLook.after(
        before, "1234_7", NOW, collected, records or RecordsLook(Path("/r/flight-recorder"))
    )


STOPPED = [*ranks(8, but=5), worker(5, state="T")]


def test_the_verdict_is_on_top_and_the_odd_one_first() -> None:
    shown = list(lines(look(STOPPED)))
    assert shown[0].startswith("rank 5 on node tw05 is stopped (SIGSTOP); 7 ranks wait")
    table = shown[shown.index("") + 1 :]
    assert table[0].split() == ["RANKS", "NODES", "WAITS", "IN", "WHERE"]
    assert table[1].split()[:3] == ["5", "tw05", "stopped"]
    assert table[2].split()[:3] == ["0-4,6-7", "tw[00-04,06-07]", "collective"]
    assert "rank 5, process 1005, innermost first:" in shown
    assert "  all_reduce (torch/distributed/distributed_c10d.py:2810)" in shown


def test_a_node_is_named_in_full() -> None:
    """All names of a group in a common list, of a cluster whose names are long."""
    workers = [
        replace(one, node=f"jean-zay-iam{one.rank // 2:02}")
        for one in (*ranks(8, but=5), worker(5, state="T"))
    ]
    shown = "\n".join(lines(look(workers)))
    assert "jean-zay-iam[00-03]" in shown and ".." not in shown.split("\n\n")[1].split("WHERE")[0]


@pytest.mark.parametrize("count", [1, 8, 384])
def test_every_line_fits_80_columns(count: int) -> None:
    long = tuple(
        Frame("a_very_long_function_name_indeed" * 3, "a/long/path/to/some/where" * 5 + ".py", 7)
        for _ in range(40)
    )
    moved = [worker(rank, (Frame("f", "x.py", rank), *long), per_node=8) for rank in range(count)]
    records = RecordsLook(
        Path("/r"),
        NOW - 90,
        7,
        OperationsFinding("rank 5 did not enter " + "it " * 60, (5,)),
        ("x " * 90,),
    )
    before = look(moved)
    for one in (
        before,
        look(moved, "tw99", before=before, records=records, trouble="srun: error: " + "y " * 90),
    ):
        shown = list(lines(one))
        assert max(map(len, shown)) <= 80, max(shown, key=len)
    assert len(shown) < 45
    assert (f"and {count - MOST_ROWS} more groups" in "\n".join(shown)) == (count > MOST_ROWS)


def test_a_second_look_marks_what_has_not_moved() -> None:
    first = look([*ranks(7), worker(7, LOADER)])
    assert "same in" not in "\n".join(lines(first))
    second = look([*ranks(6), worker(6, FORWARD), worker(7, LOADER)], before=first)
    rows = [line for line in lines(second) if line[:1].isdigit()]
    marked = {row.split()[0]: "same in 2 looks" in row for row in rows}
    assert marked == {"0-5": True, "6": False, "7": True}
    document = second.document()
    assert {tuple(group["ranks"]): group["looks"] for group in document["groups"]} == {
        (7,): 2, (6,): 1, (0, 1, 2, 3, 4, 5): 2,
    }  # fmt: skip


def test_another_attempt_begins_anew_in_the_document() -> None:
    assert [group["looks"] for group in look(ranks(3), before=None).document()["groups"]] == [1]


def test_the_document_is_json_with_a_schema() -> None:
    records = RecordsLook(
        Path("/r"), NOW - 90, 7, OperationsFinding("rank 5 did not enter it", (5,), "data", 9)
    )
    document = json.loads(json.dumps(look(STOPPED, records=records).document()))
    assert document["schema"] == 1 and document["job"] == "1234_7" and document["exit_code"] == 1
    assert document["odd"] == {"ranks": [5], "nodes": ["tw05"], "kind": "stopped", "certain": True}
    assert (
        document["flight_recorder"]["missing_ranks"] == [5]
        and document["flight_recorder"]["sequence"] == 9
    )
    assert document["groups"][0]["frames"][0] == {
        "function": "all_reduce", "file": "torch/distributed/distributed_c10d.py", "line": 2810,
    }  # fmt: skip
    assert {"rank", "node", "pid", "state", "call", "path", "trouble"} == set(
        document["workers"][0]
    )


def test_exit_codes() -> None:
    assert look(ranks(8, FORWARD)).exit_code == 0
    assert look(STOPPED).exit_code == 1
    assert look(ranks(8), "tw09").exit_code == 1
    assert look([], "tw00", "tw01").exit_code == 3
    assert look([worker(0, (), trouble="no right")]).exit_code == 3
    assert look([]).exit_code == 0, "between two launches there is nothing to see"


def test_an_old_flight_record_is_shown_but_judges_nothing() -> None:
    finding = OperationsFinding("rank 5 did not enter all-reduce 9", (5,))
    fresh = look(ranks(8), records=RecordsLook(Path("/r"), NOW - 30, 8, finding))
    assert fresh.verdict.ranks == (
        5,
    ) and "told by the flight recorder of 8 ranks, 30 s ago" in list(lines(fresh))
    old = look(ranks(8), records=RecordsLook(Path("/r"), NOW - 7200, 8, finding))
    assert not old.verdict.needs_person
    assert any(
        line.startswith("flight recorder (8 ranks, 2 h 00 min ago): rank 5") for line in lines(old)
    )


def test_why_stacks_are_missing_is_said_once() -> None:
    unread = [worker(rank, (), trouble="py-spy is not installed") for rank in range(3)]
    shown = list(lines(look(unread)))
    assert "not read: py-spy is not installed (and 2 more like it)" in shown
    assert shown[0] == "no stack could be read: py-spy is not installed"


def test_the_kept_text_has_every_frame() -> None:
    text = text_of(
        "tw05", [worker(5, ALL_REDUCE, state="T", call="futex"), worker(6, (), trouble="no right")]
    )
    assert text.startswith("rank 5, process 1005, state T, in futex\n    all_reduce (torch/")
    assert "rank 6, process 1006, state S (no right)" in text
