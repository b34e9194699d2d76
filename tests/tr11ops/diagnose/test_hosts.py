"""Hosts, ranks and machines that the head of a log names; the host that alone says otherwise;
proofs and suspects.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.diagnose.catalogue import rules
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.hosts import LogHead, hosts_in_columns, hosts_of_ranks, machines_of, odd_host
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.nvlink import nvlink_kind, nvlink_kinds, nvlink_rules
from tr11ops.diagnose.signature import FaultClass, NextStep, Proof, Restart

STEPS = "".join(
    f"2026-03-04 10:0{minute}:00 step {10 * minute} loss 2.{9 - minute}\n" for minute in range(9)
)
NVLINK = "NVRM: Xid (PCI:0018:01:00): {0}, {1} {2} XC0 i0 Link 09 ({3:#010x} {4:#010x} 0x00000000)"


def heads_of(text: str) -> list[LogHead]:
    return [LogHead("train.log", 1, text)]


def diagnosed(folder: Path, text: str) -> Diagnosis:
    path = folder / "train.log"
    path.write_text(text, encoding="utf-8")
    [found] = diagnose_files([path])
    return found


# --------------------------------------------------------------------------- hosts, ranks, machines
def test_hosts_stand_in_a_column_and_ranks_do_not() -> None:
    assert hosts_in_columns(heads_of("[w-1] ready\n[w-2] ready\n[w-1] go\n")) == {"w-1", "w-2"}
    assert hosts_in_columns(
        heads_of("2026-03-04 10:00:00 q7 | ready\n2026-03-04 10:00:01 q8 | ready\n")
    ) == {
        "q7",
        "q8",
    }
    assert (
        hosts_in_columns(heads_of("[rank1]: a\n[rank2]: b\ngpu0: a\ngpu1: b\n[w-1] alone\n"))
        == frozenset()
    )


@pytest.mark.parametrize(
    ("line", "rank", "host"),
    [
        ("launcher: ranks 8-15 on n-b12", 11, "n-b12"),
        ("n-b12: ranks 8..15", 15, "n-b12"),
        ("rank 3 (local 3) host=q7", 3, "q7"),
        ("[rank21]: started on host q9", 21, "q9"),
        ("[1,11]<stderr>: q2: df /tmp: /dev/sda3  98G  98G  20K 100%", 11, "q2"),
        ("nodes: 0=q6 (ranks 0-7) 1=q7 (ranks 8-15) 2=q8 (ranks 16-23)", 9, "q7"),
        ("Starting job, hosts q6 (ranks 0-7) q7 (8-15) q8 (16-23)", 17, "q8"),
        ("RANK_TABLE nodes: q6(0-7) q7(8-15) q8(16-23)", 17, "q8"),
        ("ranks 0-7 on q3, 8-15 on q4, 16-23 on q5", 13, "q4"),
        ("Rank 27 (q9): last recorded collective 91223", 27, "q9"),
        ("q7:41:99 [3] NCCL INFO ncclCommInitRank comm 0x5 rank 11 nranks 16 cudaDev 3", 11, "q7"),
    ],
)
def test_launchers_say_which_ranks_run_where(line: str, rank: int, host: str) -> None:
    assert hosts_of_ranks(heads_of(line))[rank] == host


def test_a_rank_that_two_hosts_claim_has_none() -> None:
    assert hosts_of_ranks(heads_of("ranks 0-7 on q1\nranks 4-11 on q2\n")) == (
        dict.fromkeys(range(4), "q1") | dict.fromkeys(range(8, 12), "q2")
    )


@pytest.mark.parametrize(
    ("line", "alias", "machine"),
    [
        ("ip map: 10.0.0.9=q9 10.0.0.8=q8", "10.0.0.9", "q9"),
        ("Normal Scheduled pod/t-0 Successfully assigned ml/t-0 to gke-a3-x7", "t-0", "gke-a3-x7"),
        ("deploy: pod llm-w-1 scheduled on vm-h100-b", "llm-w-1", "vm-h100-b"),
        ("kubectl get pods -o wide: t-0 pool-a-1, t-1 pool-a-2", "t-1", "pool-a-2"),
        ("q7:41:99 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>", "10.0.0.7", "q7"),
    ],
)
def test_addresses_and_pods_mean_machines(line: str, alias: str, machine: str) -> None:
    assert machines_of(heads_of(line))[alias] == machine


def test_who_is_accused_is_the_machine_and_not_its_pod(tmp_path: Path) -> None:
    placed = "Successfully assigned ml/t-0 to pool-7\nSuccessfully assigned ml/t-1 to pool-9\n"
    broken = (
        "t-1 | [rank8]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"
    )
    found = diagnosed(tmp_path, placed + "t-0 | ready\nt-1 | ready\n" + STEPS + broken)
    assert found.accused.nodes == ("pool-9",) and found.accused.is_proved


# ----------------------------------------------------------------------------- the odd one
@pytest.mark.parametrize(
    ("lines", "host", "fault"),
    [
        (
            "check {0}: gemm 612 TFLOP/s PASS\n",
            "check q3: gemm 209 TFLOP/s FAIL\n",
            FaultClass.GPU_HARDWARE,
        ),
        (
            "[check] {0}: ib 8/8 ACTIVE\n",
            "[check] q3: ib 7/8 ACTIVE, mlx5_3 DOWN\n",
            FaultClass.NCCL_NETWORK,
        ),
        ("{0}: mounts: /data mounted\n", "q3: mounts: /data NOT mounted\n", FaultClass.STORAGE),
        (
            "{0}: check /data/mm (beegfs) ... ok (2.1 PB)\n",
            "q3: check /data/mm (beegfs) ... dir exists, empty, fs=xfs (root disk)\n",
            FaultClass.STORAGE,
        ),
        ("[{0}] found 8 GPUs\n", "[q3] found 7 GPUs\n", FaultClass.GPU_HARDWARE),
    ],
)
def test_the_host_that_alone_lacks_something(
    tmp_path: Path, lines: str, host: str, fault: FaultClass
) -> None:
    text = "".join(lines.format(name) for name in ("q1", "q2", "q4")) + host
    odd = odd_host(heads_of(text))
    assert odd is not None and (odd.host, odd.fault, odd.line_number) == ("q3", fault, 4)
    found = diagnosed(tmp_path, text)
    assert (found.fault, found.accused.nodes) == (fault, ("q3",)) and not found.accused.is_proved
    assert (
        found.restart.answer is Restart.ELSEWHERE
        and found.action is not NextStep.EXCLUDE_AND_RESUBMIT
    )


@pytest.mark.parametrize(
    "text",
    [
        "q1: disk ok\nq2: disk full\n",  # two are no majority
        "q1: disk full\nq2: disk full\nq3: disk ok\nq4: disk ok\n",
        "".join(f"[check] q{n} driver 570.{n}.15 gpus 8\n" for n in range(4)),
        "".join(f"[check] q{n} fs {said}\n" for n, said in enumerate(("ok", "ok", "xfs", "ext"))),
        "".join(f"trainer{n}: state {said}\n" for n, said in enumerate(("ok", "ok", "ok", "FAIL"))),
        "".join(f"q{n} step 10 loss 2.{n}\n" for n in range(4)),
        "".join(f"q{n} | Map: {90 + n}%| not bad\n" for n in range(4)),
    ],
)
def test_no_host_is_odd_where_they_do_not_agree(text: str) -> None:
    assert odd_host(heads_of(text)) is None


def test_an_error_of_the_odd_host_is_its_own_and_one_of_another_is_not(tmp_path: Path) -> None:
    checks = (
        "".join(f"[{name}] found 8 GPUs\n" for name in ("q1", "q2", "q4")) + "[q3] found 7 GPUs\n"
    )
    error = "[{0}] RuntimeError: CUDA error: invalid device ordinal\n"
    own = diagnosed(tmp_path, checks + error.format("q3"))
    assert (own.fault, own.accused.nodes) == (FaultClass.GPU_HARDWARE, ("q3",))
    others = diagnosed(tmp_path, checks + error.format("q1"))
    assert others.accused.nodes != ("q3",)


# ----------------------------------------------------------------------------- proofs and suspects
def test_only_what_is_listed_is_a_proof() -> None:
    with_proof = {
        signature.id: signature.proof
        for rule in rules()
        for signature in (rule.signature, *rule.codes.values())
        if signature is not None and signature.proof is not None
    }
    families = {name.rpartition("-")[0] if name.startswith("xid-") else name for name in with_proof}
    assert families == {
        "xid", "cuda-ecc", "ascend-memory-error", "gpu-off-bus", "gpu-health-line", "slurm-node-fail",
        "kubernetes-node-lost", "ours-lost-host",
    }  # fmt: skip
    assert set(with_proof.values()) == set(Proof)


@pytest.mark.parametrize(
    "line",
    [
        "Warning  NodeNotReady  node/q3  node-controller  Node is not ready\n",
        "srun: error: q3: unable to contact slurmd\n",
        "q3: RuntimeError: No CUDA GPUs are available\n",
        "amdgpu 0000:c1:00.0: amdgpu: ring sdma0 timeout, signaled seq=1, emitted seq=3\n",
    ],
)
def test_what_is_no_proof_makes_a_suspect_and_excludes_no_one(tmp_path: Path, line: str) -> None:
    path = tmp_path / "dmesg-q3.txt"
    path.write_text(line, encoding="utf-8")
    [found] = diagnose_files([path])
    assert found.accused.nodes == ("q3",) and not found.accused.is_proved
    assert (
        found.action is not NextStep.EXCLUDE_AND_RESUBMIT
        and found.restart.answer is Restart.ELSEWHERE
    )


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python3, GPU has fallen off the bus.\n",
        "srun: error: Node failure on q3\n",
        "NodeLost: Node q3 which was running pod t-3 is unresponsive\n",
    ],
)
def test_a_proof_excludes(tmp_path: Path, line: str) -> None:
    paths = [tmp_path / "train.log", tmp_path / "dmesg-q3.txt"]
    paths[0].write_text("launcher: nodes q[1-4]\n", encoding="utf-8")
    paths[1].write_text(line, encoding="utf-8")
    [found] = diagnose_files(paths)
    assert found.accused.nodes == ("q3",) and found.accused.is_proved
    assert found.action is NextStep.EXCLUDE_AND_RESUBMIT


# ------------------------------------------------------------------- NVLink of the fifth generation
@pytest.mark.parametrize(
    ("code", "unit", "severity", "subcode", "status", "who"),
    [
        (149, "NETIR_LINK_EVT", "Fatal", 42, 0, "link"),
        (149, "NETIR_LINK_EVT", "Fatal", 37, 0, "peer"),
        (149, "NETIR_LINK_DOWN", "Fatal", 15, 0, "software"),
        (149, "NETIR_LINK_EVT", "Fatal", 40, 0, "host"),
        (149, "NETIR_LINK_EVT", "Fatal", 0, 0, "after"),
        (149, "NETIR_BER_EVENT", "Nonfatal", 0, 2, "none"),
        (150, "MSE_WATCHDOG", "Fatal", 0, 0, "own"),
        (145, "RLW_REMAP", "Fatal", 0, 0x40, "own"),
        (145, "RLW_REMAP", "Nonfatal", 0, 0x4, "access"),
        (145, "RLW_CTRL", "Nonfatal", 0, 0x80000000, "none"),
        (146, "TLW_RX_PIPE1", "Fatal", 0, 0x4, "own"),
        (144, "SAW_NEW", "Fatal", 0, 0x40, "own"),
        (144, "SAW_NEW", "Nonfatal", 0, 0x40, "none"),
    ],
)
def test_sub_codes_say_whose_fault_it_is(
    code: int, unit: str, severity: str, subcode: int, status: int, who: str
) -> None:
    assert nvlink_kind(NVLINK.format(code, unit, severity, subcode << 20 | 0x5C6, status)) == who


def test_the_table_of_sub_codes_is_whole() -> None:
    assert {rule.who for rule in nvlink_rules()} == set(nvlink_kinds())
    assert [name for name, kind in nvlink_kinds().items() if "proof" in kind] == ["own"]
    assert nvlink_kind("NVRM: Xid (PCI:0018:01:00): 149, pid=1") is None
