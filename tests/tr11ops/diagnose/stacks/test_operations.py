"""Flight records: which rank did not come to which operation; and that a pickle runs nothing."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from tr11ops.diagnose.stacks.operations import find_missing, parse
from tr11ops.diagnose.stacks.records import LARGEST_RECORD, look_at_records

RECORDED = Path(__file__).parents[3] / "data" / "stacks"
# 16 H100 ranks with two injected hangs each
REAL = Path(__file__).parents[5] / "shared" / "data" / "flight-recorder"
GUILTY = {
    "gpu_error_1st": (12, 14), "gpu_error_2nd": (9, 14), "lock_gil_1st": (9, 14), "lock_gil_2nd": (10, 15),
}  # fmt: skip


def entry(
    number: int,
    name: str = "nccl:all_reduce",
    group: str = "0",
    state: str = "started",
    size: int = 5,
) -> dict[str, Any]:
    return {
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "profiling_name": name, "is_p2p": False,
        "process_group": (group, "data" if group == "1" else "default_pg"), "state": state, "retired": False,
        "input_sizes": ((size,),), "frames": [{"name": "f", "filename": "x.py", "line": 1}],
    }  # fmt: skip


def record(*entries: dict[str, Any], members: str = "") -> bytes:
    return pickle.dumps(
        {
            "version": "2.10",
            "entries": list(entries),
            "pg_config": {"0": {"name": "0", "ranks": members}},
        }
    )


def found(*records: bytes) -> tuple[str, tuple[int, ...]]:
    finding = find_missing([parse(data, rank) for rank, data in enumerate(records)])
    assert finding is not None
    return finding.sentence, finding.ranks


def test_real_records_name_the_rank_that_did_not_come() -> None:
    look = look_at_records(RECORDED)
    assert (look.ranks, look.troubles) == (3, ()) and look.finding is not None
    assert (
        look.finding.sentence
        == "rank 2 did not enter all-reduce 2 of group default_pg; ranks 0-1 wait in it"
    )
    assert (look.finding.ranks, look.finding.group, look.finding.number) == ((2,), "default_pg", 2)


@pytest.mark.skipif(not REAL.is_dir(), reason="the records of other trainings are not there")
@pytest.mark.parametrize("name", GUILTY)
def test_real_records_of_sixteen_ranks_name_both_guilty_ones_and_no_other(name: str) -> None:
    records = [
        parse(path.read_bytes(), int(path.name.removeprefix("_dump_")))
        for path in (REAL / name).glob("_dump_*")
    ]
    finding = find_missing(records)
    assert finding is not None and finding.ranks == GUILTY[name]


def test_a_pickle_and_json_say_the_same() -> None:
    for path in RECORDED.glob("*.json"):
        value = json.loads(path.read_text())
        assert parse(path.read_bytes(), 1) == parse(pickle.dumps(value), 1)


def test_the_one_behind_is_named_not_those_that_wait_for_it() -> None:
    """Rank 3 holds up rank 2 in their own group; all others wait for both in the group of all."""
    all_of = [entry(4, state="completed"), entry(5)]
    behind = [entry(4, state="completed")]
    pair = [entry(7, group="1")], [entry(6, group="1", state="completed")]
    sentence, ranks = found(
        record(*all_of), record(*all_of), record(*behind, *pair[0]), record(*behind, *pair[1])
    )
    assert (
        ranks == (3,)
        and sentence == "rank 3 did not enter all-reduce 7 of group data; rank 2 waits in it"
    )


def test_an_operation_of_another_kind_or_size_is_named() -> None:
    usual = record(entry(9))
    sentence, ranks = found(usual, usual, record(entry(9, "nccl:broadcast")))
    assert (
        ranks == (2,)
        and sentence == "rank 2 came to broadcast 9 of group default_pg, ranks 0-1 to all-reduce"
    )
    sentence, ranks = found(usual, usual, record(entry(9, size=7)))
    assert ranks == (2,) and "came to all-reduce 9 with 7 values of group default_pg" in sentence
    uneven = [record(entry(9, "nccl:all_to_all", size=size)) for size in (3, 4, 5)]
    assert found(*uneven)[1] == (), "these may differ"
    assert found(record(entry(9)), record(entry(9, "nccl:broadcast")))[1] == (), (
        "one against one: no one stands out"
    )


def test_a_rank_without_a_record_is_named_where_the_group_is_known() -> None:
    waiting = record(entry(9), members="[0, 1, 2]")
    sentence, ranks = found(waiting, waiting)
    assert ranks == (2,) and sentence.endswith(
        "wait in all-reduce 9 of group default_pg; of rank 2 there is no record"
    )


def test_nothing_open_means_nothing_is_missing() -> None:
    done = record(entry(9, state="completed"))
    assert find_missing([parse(done, 0), parse(record(entry(8, state="completed")), 1)]) is None
    assert find_missing([]) is None and find_missing([parse(b'{"entries": []}', 0)]) is None


class Runs:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\x80\x04",
        b"[]",
        b"{}x",
        pickle.dumps([1]),
        b'{"entries": [{}]}',
        b'{"entries": 3}',
    ],
)
def test_what_is_no_record_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="is not a flight record"):
        parse(data, 0)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a flight record holds no classes"):
        parse(pickle.dumps({"entries": [Runs(tmp_path / "made")]}), 0)
    assert not (tmp_path / "made").exists()


def write(folder: Path, name: str, data: bytes, when: float) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    os.utime(folder / name, (when, when))


def test_only_records_that_belong_together_are_compared(tmp_path: Path) -> None:
    """Those of the newest launch, and there of the newest request or the time-out."""
    folder = tmp_path / "flight-recorder"
    assert look_at_records(folder).time is None
    write(folder, "launch-1-rank-0", record(entry(900)), 9e8)
    write(folder, "launch-2-rank-0", record(entry(5)), 1000.0)
    write(folder, "launch-2-rank-1", record(entry(4, state="completed")), 1000.0)
    write(folder, "launch-2-request-7-rank-0.json", b'{"entries": []}', 900.0)
    write(folder, "notes.txt", b"x", 2e9)
    look = look_at_records(folder)
    assert (
        (look.time, look.ranks) == (1000.0, 2)
        and look.finding is not None
        and look.finding.ranks == (1,)
    )
    write(folder, "launch-2-request-8-rank-0.json", b'{"entries": []}', 2000.0)
    assert look_at_records(folder).finding is None and look_at_records(folder).time == 2000.0
    assert look_at_records(folder, launch=3).time is None, (
        "an earlier launch says nothing of this one"
    )


def test_a_record_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "flight-recorder"
    write(folder, "launch-1-rank-0", record(entry(5)), 10.0)
    write(folder, "launch-1-rank-1", b"torn", 10.0)
    write(folder, "launch-1-rank-2", b"", 10.0)
    os.truncate(folder / "launch-1-rank-2", LARGEST_RECORD + 1)
    look = look_at_records(folder)
    assert look.ranks == 1 and len(look.troubles) == 2
    assert (
        "launch-1-rank-1: is not a flight record" in look.troubles[0]
        and "more than any such file" in look.troubles[1]
    )


def test_a_member_without_entries_of_the_group_did_not_come() -> None:
    """Its record is there, and holds other groups' operations or none at all."""
    everyone = "[0, 1, 2]"
    other = entry(3, group="1", state="completed")
    for silent in (record(members=everyone), record(other, members=everyone)):
        sentence, ranks = found(
            record(entry(5), members=everyone), record(entry(5), members=everyone), silent
        )
        assert (
            ranks == (2,)
            and sentence
            == "rank 2 did not enter all-reduce 5 of group default_pg; ranks 0-1 wait in it"
        )


def test_who_holds_up_different_groups_is_named_together() -> None:
    left, right = [entry(9, group="1")], [entry(9, group="2")]
    late_left, late_right = (
        [entry(8, group="1", state="completed")],
        [entry(8, group="2", state="completed")],
    )
    finding = find_missing(
        [
            parse(record(*own), rank)
            for rank, own in enumerate((left, left, late_left, right, late_right, right))
        ]
    )
    assert finding is not None and finding.ranks == (2, 4)
    assert "rank 2 did not enter" in finding.sentence and "rank 4 did not enter" in finding.sentence


def test_a_rank_that_does_not_end_what_the_others_have_ended_is_stuck() -> None:
    ahead, stuck = [entry(7), entry(8)], [entry(number) for number in range(4, 9)]
    sentence, ranks = found(record(*ahead), record(*stuck), record(*ahead))
    assert ranks == (1,) and sentence.startswith("rank 1 did not end what the others have ended")
    by_one = [entry(6), *ahead]  # two ranks may see one end at two moments
    assert found(record(*ahead), record(*by_one), record(*ahead))[1] == ()
    # who sends is done before who receives
    sent = [entry(number, "nccl:broadcast") for number in range(4, 9)]
    assert found(record(*sent[-2:]), record(*sent), record(*sent[-2:]))[1] == ()
