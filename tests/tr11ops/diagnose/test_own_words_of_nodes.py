"""Which node a line is of: by its tag, the name of its file, the command that it answers, a table of addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.places import node_of_daemons_log
from tr11ops.diagnose.signature import FaultClass, Restart

STEPS = [f"2026-03-04 10:0{minute}:00 step {minute} loss 2.{9 - minute}" for minute in range(8)]
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
WAITED = "".join(
    f"[rank{rank}]:[E304 10:20:00.09 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7312, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600004 ms\n"
    for rank in (0, 1, 2, 5)
)
SMI = "|   1  NVIDIA H100 80GB HBM3          On  |   00000000:43:00.0 Off |                 {ecc:>4} |\n"


def diagnosed(folder: Path, **logs: str) -> Diagnosis:
    paths = []
    for name, text in logs.items():
        paths.append(folder / name)
        paths[-1].write_text(text, encoding="utf-8")
    [found] = diagnose_files(paths)
    return found


@pytest.mark.parametrize(
    "tag",
    [
        "[gx-17] ", "gx-17 | ", "gx-17> ", "gx-17: ", "(gx-17) ", "<gx-17> ", "gx-17 stderr: ", "[gx-17 err] ",
        "[stderr gx-17] ", "gx-17/3: ", "[3@gx-17] ", "[gx-17/rank3] ", "gx-17:rank3: ", "[gx-17][rank3] ",
        "10:08:00 gx-17 E ", "gx-17 rank 3: ",
    ],
)  # fmt: skip
def test_a_line_is_of_the_host_in_its_tag_whatever_a_launcher_writes_around_it(
    tmp_path: Path, tag: str
) -> None:
    others = "".join(f"{tag.replace('17', '18')}{line}\n" for line in STEPS)
    found = diagnosed(tmp_path, **{"main.log": f"{others}{tag}{ECC}\n"})
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("gx-17",))


def test_words_that_are_no_hosts_are_no_tags(tmp_path: Path) -> None:
    lines = "".join(f"layer{number}: step {number} loss 2.1\n" for number in range(9))
    assert diagnosed(tmp_path, **{"main.log": f"{lines}layer9: {ECC}\n"}).accused.nodes == ()


@pytest.mark.parametrize(
    ("file", "node"),
    [
        ("gx-17.dmesg", "gx-17"),
        ("gx-17-dmesg.log", "gx-17"),
        ("gx17_kern.log", "gx17"),
        ("gx-17.cluster.local.syslog.1.gz", "gx-17"),
        ("gx-17.ipmi-sel.txt", "gx-17"),
        ("nvidia-smi-gx-17.txt", "gx-17"),
        ("dmesg-gx-17.txt", "gx-17"),
        ("run-3.dmesg", None),
        ("attempt2-dmesg.txt", None),
        ("gpu0.dmesg", None),
        ("main.log", None),
    ],
)
def test_the_node_stands_before_or_behind_the_name_of_its_daemon(
    file: str, node: str | None
) -> None:
    assert node_of_daemons_log(f"/logs/{file}", ()) == node


@pytest.mark.parametrize(
    "asked",
    [
        "$ ssh gx-07 nvidia-smi\n",
        "--- nvidia-smi -q on gx-07 ---\n",
        "gx-07: nvidia-smi\n",
        "post-mortem of gx-07:\n",
    ],
)
@pytest.mark.parametrize(
    "answer",
    [SMI.format(ecc=3), SMI.format(ecc="ERR!"), "            DRAM Uncorrectable        : 2\n"],
)
def test_what_a_node_answers_after_a_hang_is_of_the_node_that_was_asked(
    tmp_path: Path, asked: str, answer: str
) -> None:
    hang = "\n".join(STEPS) + "\n" + WAITED
    found = diagnosed(tmp_path, **{"main.log": hang + asked + answer})
    assert (found.fault, found.accused.nodes) == (FaultClass.GPU_HARDWARE, ("gx-07",))
    well = diagnosed(tmp_path, **{"main.log": hang + asked + SMI.format(ecc=0)})
    assert well.fault is FaultClass.NCCL_TIMEOUT


@pytest.mark.parametrize(
    ("table", "node"),
    [
        ("NAME  READY  STATUS  RESTARTS  AGE  IP\nw-a-3  0/1  Error  0  2d3h  10.6.1.3\n", "w-a-3"),
        ("w-a-3  0/1  Error  0  2d3h  10.6.1.3  gx-07  <none>\n", "gx-07"),
        ("gx-07  Ready  <none>  41d  v1.31.2  10.6.1.3  <none>  Ubuntu\n", "gx-07"),
        ("10.6.1.3  gx-07 gx-07-ib\n", "gx-07"),
        ("   NodeAddr=10.6.1.3 NodeHostName=gx-07 Version=24.05\n", "gx-07"),
    ],
)
def test_a_peer_that_is_told_by_its_address_has_the_name_that_a_table_gives_it(
    tmp_path: Path, table: str, node: str
) -> None:
    peers = "".join(
        f"n{n}:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.6.1.3<4711> with status=12 opcode=0 len=0\n"
        for n in (1, 2)
    )
    found = diagnosed(tmp_path, **{"main.log": "\n".join(STEPS) + "\n" + peers, "table.txt": table})
    assert found.accused.nodes == (node,)


def test_an_accelerator_that_is_busy_on_one_of_many_hosts_is_that_hosts(tmp_path: Path) -> None:
    others = "".join(
        f"(run pid=1{n}, ip=10.1.2.{n}) INFO levanter: set up\n" for n in range(10, 15)
    )
    busy = "(run pid=7, ip=10.1.2.9) RuntimeError: TPU initialization failed: open(/dev/vfio/0): Device or resource busy\n"
    found = diagnosed(tmp_path, **{"main.log": others + busy})
    assert found.restart.answer is Restart.ELSEWHERE and found.accused.nodes == ("10.1.2.9",)


def test_neurons_runtime_and_its_collectives_are_read_in_their_own_words(tmp_path: Path) -> None:
    at = "2025-Mar-20 06:30:59.{n:06} 58093:58207 ERROR   NRT:nrt_infodump     {said}\n"
    dump = "".join(
        at.format(n=n, said=said)
        for n, said in enumerate(
            ("Failure: NRT_EXEC_HW_ERR_HBM_UE in nrt_execute()", "Nodename: ip-172-31-33-90")
        )
    )
    assert diagnosed(tmp_path, **{"a.log": dump}).accused.nodes == ("ip-172-31-33-90",)
    late = "2023-Aug-01 16:14:43.0210 7:8 [31] bootstrap.cc:89 CCOM WARN Timeout waiting for incoming connection (waited 120 sec)\n"
    raised = 'RuntimeError: INTERNAL: nrt_load status=1, error message="Non specific failure".\n'
    found = diagnosed(tmp_path, **{"b.log": late + raised})
    assert found.fault is FaultClass.RENDEZVOUS
    assert found.root_cause is not None and found.root_cause.line_number == 1


MORE = "".join(f"2026-03-04 10:{minute:02}:00 step {minute} loss 2.1\n" for minute in range(8, 14))


@pytest.mark.parametrize(
    "said",
    [
        "fabric-monitor: gx-07 mlx5_3 link width degraded 4x -> 1x, symbol errors 88123",
        "[net-watch] gx-07 rail 3: speed 100 Gb/s (expected 400)",
        "gx-07 kernel: mlx5_core 0000:5e:00.0: Port module event[error]: module 3, Cable error, Bus stuck",
    ],
)
def test_a_link_that_had_become_slower_is_not_overcome_by_steps_when_ranks_miss_each_other_later(
    tmp_path: Path, said: str
) -> None:
    before = "\n".join(STEPS) + f"\n2026-03-04 10:07:30 {said}\n" + MORE
    assert diagnosed(tmp_path, **{"a.log": before + WAITED}).fault is FaultClass.NCCL_NETWORK
    assert diagnosed(tmp_path, **{"b.log": before}).fault is not FaultClass.NCCL_NETWORK


def test_a_job_that_slurm_put_back_too_often_is_held(tmp_path: Path) -> None:
    shown = (
        "JobId=77 JobName=train\n   JobState=PENDING Reason=JobHoldMaxRequeue Dependency=(null)\n"
    )
    found = diagnosed(tmp_path, **{"a.log": shown})
    assert (found.fault, found.restart.answer) == (FaultClass.SLURM_SUBMIT, Restart.UNKNOWN)
    assert found.root_cause is not None and "JobHoldMaxRequeue" in found.root_cause.text
