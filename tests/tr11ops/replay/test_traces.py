"""Traces as they are read: the two known formats, windows of them, and what is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tr11ops.replay.small_trace import CRASHED, DAY, ECC, FAN, write_trace
from tr11ops.base.errors import WrongUsage
from tr11ops.replay.traces import SERVERS, FaultSign, read_trace, window

LANL = """\
System,nodes,nodenumz,Prob Started,Down Time,Facilities,Hardware,Human Error,Network,Undetermined,Software
20,256,0,06/21/2005 10:00,60,,Memory Dimm,,,,
20,256,7,06/21/2005 16:00,30,,,,Network,,
8,164,1,06/21/2005 10:00,6,,,,,,Other Software
"""
# where the real ones lie; see docs/how-to/replay.md
REAL = Path(os.environ.get("TR11_TRACES", Path(__file__).parents[4] / "shared/data/traces"))


def test_a_fault_lasts_until_its_node_was_repaired(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", ("a", 1.0, 1.5, ECC), ("b", 2.0, 9.0, FAN))
    trace = read_trace(path)
    first, second = trace.faults
    assert (first.node, first.start, first.end) == ("a", DAY, 1.5 * DAY)
    assert (first.kind, second.kind) == (FaultSign.HARDWARE, FaultSign.DEGRADED)
    assert (len(trace.nodes), trace.seconds) == (SERVERS, 9.0 * DAY)


def test_the_failures_of_one_of_lanls_clusters_count_from_its_first(tmp_path: Path) -> None:
    path = tmp_path / "lanl.csv"
    path.write_text(LANL)
    trace = read_trace(path)
    first, second = trace.faults
    assert len(trace.nodes) == 256
    assert (first.node, first.start, first.end) == ("node-0000", 0.0, 3600.0)
    assert (second.start, second.kind) == (6 * 3600.0, FaultSign.NETWORK)
    assert len(read_trace(path, system="8").faults) == 1
    with pytest.raises(WrongUsage, match=r"--system 5: .* has 8, 20"):
        read_trace(path, system="5")


def test_a_window_has_its_own_nodes_and_time(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.json",
        *((f"node{number}", 1.0, 3.0, CRASHED) for number in range(SERVERS)),
        ("node0", 9.0, 10.0, CRASHED),
    )
    trace = read_trace(path)
    part = window(trace, nodes=6, seconds=8 * DAY, seed=3)
    assert part.nodes == ("n001", "n002", "n003", "n004", "n005", "n006")
    assert part == window(trace, nodes=6, seconds=8 * DAY, seed=3)
    assert part != window(trace, nodes=6, seconds=8 * DAY, seed=4)
    assert {fault.node for fault in part.faults} == set(part.nodes)
    assert all(fault.end - fault.start <= 2 * DAY for fault in part.faults)


@pytest.mark.parametrize(
    ("nodes", "days", "words"), [(401, 1.0, "has 400 nodes"), (4, 11.0, "covers 10 d")]
)
def test_a_window_that_is_too_large(tmp_path: Path, nodes: int, days: float, words: str) -> None:
    trace = read_trace(write_trace(tmp_path / "t.json", ("a", 1.0, 10.0, ECC)))
    with pytest.raises(WrongUsage, match=words):
        window(trace, nodes, days * DAY, seed=0)


@pytest.mark.parametrize("text", ["", "[]", "[1]", '[{"node_id": 3}]', "a,b\n1,2\n", "\x00\xff"])
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(WrongUsage, match=r"t\.json: it is neither a fault trace"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("garbage,line", "line 4: it has fewer columns than the first line"),
        (LANL.splitlines()[1].replace("/", "-"), "line 4: time data .* does not match"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "lanl.csv"
    path.write_text("\n".join([*LANL.splitlines()[:3], line, *LANL.splitlines()[3:]]))
    with pytest.raises(WrongUsage, match=says):
        read_trace(path)


def test_which_cluster_is_asked_for_must_be_there_to_choose(tmp_path: Path) -> None:
    path = tmp_path / "lanl.csv"
    path.write_text(LANL.replace(",256,", ",64,").replace(",164,", ",64,"))
    with pytest.raises(WrongUsage, match=r"no cluster has 128 nodes; --system names one of 8, 20"):
        read_trace(path)
    assert len(read_trace(path, system="20").nodes) == 64
    servers = write_trace(tmp_path / "t.json", ("a", 1.0, 1.5, ECC))
    with pytest.raises(WrongUsage, match=r"--system 20: .* is of one cluster"):
        read_trace(servers, system="20")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WrongUsage, match="there is no such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "t.xz").write_text("no archive")
    with pytest.raises(WrongUsage, match="cannot be read"):
        read_trace(tmp_path / "t.xz")


@pytest.mark.skipif(
    not REAL.is_dir(), reason="the real traces are not here (TR11_TRACES names their folder)"
)
def test_the_real_traces_are_read_whole() -> None:
    servers = read_trace(REAL / "fault_trace.json")
    assert (len(servers.faults), round(servers.seconds / DAY)) == (584, 349)
    lanl = read_trace(REAL / "lanl.csv.xz", system="20")
    assert (len(lanl.nodes), len(lanl.faults)) == (512, 2478)
