"""What is read of a launch's folder: torch elastic's error files, the ranks' nodes, the nodes'
addresses.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tr11ops.agent.exit_records import NodeRecord, own_addresses
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.evidence import Evidence, Kind
from tr11ops.diagnose.attribution.records import (
    all_failures,
    read_elastic_errors,
    read_ranks,
    read_reports,
)
from tr11ops.rundir.attempts import LaunchRecord

NODES = ("n1", "n2")


def error_file(attempt: Path, node_rank: int, local: int, words: object) -> None:
    folder = attempt / "torchrun" / str(node_rank) / "none_x" / "attempt_0" / str(local)
    folder.mkdir(parents=True)
    (folder / "error.json").write_text(
        words if isinstance(words, str) else json.dumps({"message": words})
    )


def elastic(text: str, when: float) -> dict[str, object]:
    return {
        "message": text,
        "extraInfo": {"py_callstack": "Traceback", "timestamp": str(int(when))},
    }


def test_the_first_worker_to_fail_by_elastic_error_files(tmp_path: Path) -> None:
    error_file(
        tmp_path, 0, 1, elastic("RuntimeError: Connection closed by peer [10.0.0.2]:7", 1002)
    )
    error_file(
        tmp_path,
        1,
        0,
        elastic("RuntimeError: CUDA error: uncorrectable ECC error encountered", 1001),
    )
    error_file(tmp_path, 1, 1, '{"message": {"mess')  # half a file
    error_file(tmp_path, 1, 2, elastic("RuntimeError: of the launch before", 10))
    error_file(tmp_path, 9, 0, elastic("RuntimeError: of no node of this launch", 1000))
    first, second = read_elastic_errors(tmp_path, NODES, 900.0)
    assert (first.host, first.time, second.host) == ("n2", 1001.0, "n1")
    found = attribute(Evidence(NODES, 1, failures=(first, second)))
    assert (found.kind, found.blamed) == (Kind.NODE, ("n2",))


def test_a_ranks_own_record_counts_before_an_error_file(tmp_path: Path) -> None:
    error_file(tmp_path, 1, 0, elastic("RuntimeError: the wrapper's words", 1001))
    (tmp_path / "failures").mkdir()
    own = {"rank": 1, "host": "n2", "time": 1000.5, "launch": 1, "error": "KeyError: 'text'"}
    (tmp_path / "failures" / "rank-1.json").write_text(json.dumps(own))
    [only] = all_failures(tmp_path, LaunchRecord(1, NODES, 900.0))
    assert (only.rank, only.error) == (1, "KeyError: 'text'")


def test_a_rank_that_moved_is_where_it_wrote_last(tmp_path: Path) -> None:
    for node, rank, when in (("n1", 0, 100), ("n2", 1, 100), ("n3", 1, 200), ("n3", "x", 200)):
        path = tmp_path / "workers" / node / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (when, when))
    assert read_ranks(tmp_path) == {0: "n1", 1: "n3"}


def test_a_node_records_the_addresses_that_peers_use(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    NodeRecord(tmp_path, 0, 1).write()
    [report] = read_reports(tmp_path, 1)
    assert report.addresses == tuple(own_addresses())
    assert not {"127.0.0.1", "::1"} & set(report.addresses)


def test_the_first_worker_that_an_agent_missed(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    record = NodeRecord(tmp_path, 0, 1)
    workers = [
        {"rank": 0, "pid": 1, "how": "ended by SIGTERM", "time": 5.0},
        {"rank": 3, "pid": 2, "how": "exit status 7", "time": 9.0},
        {"rank": 1, "pid": 3, "how": "exit status 1", "time": 12.0},
        {"rank": "?"},
    ]
    record.write(failed_workers=workers)
    [report] = read_reports(tmp_path, 1)
    assert report.first_missed is not None
    assert (report.first_missed.rank, report.first_missed.time, report.first_missed.how) == (
        3,
        9.0,
        "exit status 7",
    )
