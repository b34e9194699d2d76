"""Faults of links: who names whom is a witness; settings are no node's fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import STEP
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.signature import FaultClass, NextStep

BROKEN = "{0}:4123:4567 [3] NCCL WARN NET/IB : Got completion from peer {1}<47011> with error 12, opcode 0, vendor err 129\n"
REFUSED = "{0}:4123:4567 [3] misc/socket.cc:40 NCCL WARN Connect to {1}<41234> failed : Connection refused\n"
CLOSED = "{0}:4123:4567 [3] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer {1}<41109>\n"


def diagnosis_of(tmp_path: Path, text: str) -> Diagnosis:
    log = tmp_path / "main_log.txt"
    log.write_text(STEP % 1 + STEP % 2 + text, encoding="utf-8")
    [found] = diagnose_files([log])
    assert found.fault is FaultClass.NCCL_NETWORK
    return found


def node_of(found: Diagnosis) -> str | None:
    return found.root_cause.node if found.root_cause else None


@pytest.mark.parametrize("line", [BROKEN, REFUSED, CLOSED])
def test_the_peer_that_most_name_is_the_suspect(tmp_path: Path, line: str) -> None:
    three = [line.format(witness, "node04") for witness in ("node01", "node02", "node03")]
    found = diagnosis_of(tmp_path, "".join([*three, line.format("node04", "node02")]))
    assert (found.step, node_of(found)) == (NextStep.RESUBMIT, "node04")
    assert "node04: it is the suspect" in found.explanation
    # its own word came first
    first = diagnosis_of(tmp_path, "".join([line.format("node04", "node02"), *three]))
    assert (first.step, node_of(first)) == (NextStep.RESUBMIT, "node04")


@pytest.mark.parametrize("line", [BROKEN, REFUSED, CLOSED])
def test_two_ends_condemn_neither(tmp_path: Path, line: str) -> None:
    for text in (
        line.format("node01", "node02"),
        line.format("node01", "node02") + line.format("node02", "node01"),
    ):
        found = diagnosis_of(tmp_path, text)
        assert found.step is NextStep.RESUBMIT
        assert "two ends, node01 and node02: neither is accused" in found.explanation


@pytest.mark.parametrize(
    "line",
    [
        "n1:7:8 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory\n",
        "n1:7:8 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory\n",
        "n1:7:8 [0] misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable\n",
        "n1:7:8 [0] misc/ibvwrap.cc:187 NCCL WARN Call to ibv_modify_qp failed with error Invalid argument\n",
        "n1:7:8 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found\n",
        "n1:7:8 [0] NCCL WARN NET/OFI Unable to insert remote address into address vector for device 1. RC: -22\n",
        "n1:7:8 [0] NCCL WARN NET/OFI Request 0x7f completed with error. RC: 5. Error: 4126 (Unresponsive receiver "
        "(reachable by EFA device but handshake failed))\n",
    ],
)
def test_a_network_that_is_not_set_up_is_no_nodes_fault(tmp_path: Path, line: str) -> None:
    log = tmp_path / "main_log.txt"
    log.write_text(line, encoding="utf-8")
    [found] = diagnose_files([log])
    assert (found.fault, found.step) == (FaultClass.NCCL_NETWORK, NextStep.FIX_CONFIG)
    late = diagnosis_of(tmp_path, line)  # the same settings have served for steps
    assert late.step is NextStep.RESUBMIT


def test_what_many_nodes_say_alike_excludes_none(tmp_path: Path) -> None:
    line = (
        "{0}:4123:4567 [3] transport/net_ib.cc:74 NCCL WARN NET/IB : Got async event : port error\n"
    )
    one = diagnosis_of(tmp_path, line.format("node01"))
    assert (one.step, node_of(one)) == (NextStep.EXCLUDE_AND_RESUBMIT, "node01")
    many = diagnosis_of(tmp_path, "".join(line.format(f"node0{place}") for place in range(1, 5)))
    assert (many.step, node_of(many)) == (NextStep.PAGE, None)
