"""What a log tells of a launch's nodes: srun's labels, torchrun's prefixes and reports, whose log a
file is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.evidence import Evidence, Kind
from tr11ops.diagnose.look import diagnose_files

START = "tr11: attempt 7 launch 2 on 2 nodes: n[1-2]\nusing world size: 8, data-parallel-size: 8\n"
ERROR = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.1.1.1]:6"
REPORT = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_04:42:20
  host      : n2.cluster.local
  rank      : 6 (local_rank: 2)
  exitcode  : %s (pid: 8787)
  error_file: <N/A>
"""


def log_evidence(path: Path, text: str) -> Evidence:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    [found] = diagnose_files([path])
    assert found.log_evidence is not None
    return found.log_evidence


@pytest.mark.parametrize(
    "line", [f"1: [default2]:{ERROR}", f"[rank6]: {ERROR}", f"1: [rank6]: {ERROR}"]
)
def test_prefixes_and_the_node_list_name_the_node(tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.log"
    left = log_evidence(path, f"{START}{line}\n0: [default1]:{LOST}\n")
    assert left.nodes == ("n1", "n2")
    assert [(one.host, one.rank) for one in left.failures if "ECC" in one.error] == [("n2", 6)]
    found = attribute(left)
    assert (found.kind, found.blamed) == (Kind.NODE, ("n2",))
    [diagnosis] = diagnose_files([path])
    assert diagnosis.root_cause is not None
    assert (diagnosis.root_cause.node, diagnosis.root_cause.rank) == ("n2", 6)
    assert (diagnosis.launch, diagnosis.number) == ("7", 2)


def test_a_local_rank_alone_names_no_node(tmp_path: Path) -> None:
    left = log_evidence(tmp_path / "train.log", f"{START}[default2]:{ERROR}\n")
    assert left.failures == () and attribute(left).blamed == ()


def test_torchruns_report_places_a_single_writer(tmp_path: Path) -> None:
    left = log_evidence(tmp_path / "train.log", f"{START}[default2]:{ERROR}\n{REPORT % 1}")
    assert attribute(left).blamed == ("n2",)
    dead = log_evidence(tmp_path / "dead.log", START + REPORT % "-11")
    [one] = dead.failures
    assert (one.host, one.rank, one.signal) == ("n2", 6, 11)
    assert (attribute(dead).blamed, attribute(dead).suspects) == ((), ("n2",))


def test_a_workers_log_is_that_of_its_path(tmp_path: Path) -> None:
    path = tmp_path / "attempts" / "7" / "workers" / "n2" / "rank-5.log"
    [one] = log_evidence(path, f"{ERROR}\n").failures
    assert (one.host, one.rank) == ("n2", 5)


def test_lines_of_the_scheduler_are_no_workers_words(tmp_path: Path) -> None:
    left = log_evidence(tmp_path / "train.log", f"{START}srun: error: Node failure on n2\n")
    assert left.failures == () and attribute(left).blamed == ("n2",)
