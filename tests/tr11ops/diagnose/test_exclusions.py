"""Which names one log may exclude: only a machine's, by two facts, and by a line that is that
machine's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.diagnose.attribution.names import can_be_excluded, is_device
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.signature import NextStep

NODES = "launcher: nodes n[1-4]\n"
STEPS = "".join(f"step {number}/900 loss 2.{9 - number // 10}\n" for number in range(10, 100, 10))
BUS = "NVRM: Xid (PCI:0000:bb:00): 79, pid=4, name=python3, GPU has fallen off the bus."
DBE = "NVRM: Xid (PCI:0000:1b:00): 48, pid=1, name=python, DBE (double bit error)"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
SXID = "SXid (PCI:0000:86:00.0): 12028, Fatal, Link 28 egress non-posted PRIV error (First)"
GONE = "srun: error: {0}: task 0: Exited with exit code 3\n"
DCGM = "dcgmi diag -r 2: Memory: Fail  GPU 5: Detected 3 volatile uncorrectable DRAM errors"
OK = "".join(f"  ok   n{node}  dcgmi r2 pass  (91 s)\n" for node in (1, 2, 4))
PODS = (
    "Normal Scheduled pod/t-0 Successfully assigned ml/t-0 to gke-a3-k1\n"
    "Normal Scheduled pod/t-1 Successfully assigned ml/t-1 to gke-a3-k2\n"
)


def of(folder: Path, log: str, kernels: dict[str, str]) -> Diagnosis:
    paths = [folder / "train.log", *(folder / name for name in kernels)]
    for path, text in zip(paths, (log, *kernels.values()), strict=True):
        path.write_text(text, encoding="utf-8")
    [found] = diagnose_files(paths)
    return found


def excluded(found: Diagnosis) -> tuple[str, ...]:
    if found.action is NextStep.EXCLUDE_AND_RESUBMIT or found.accused.is_proved:
        return found.accused.nodes
    return ()


# ----------------------------------------------------------------------------- what is no machine
@pytest.mark.parametrize(
    "name",
    [
        "nvidia-nvswitch1", "nvswitch3", "nvidia0", "mlx5_0", "mlx5_bond_0", "ib0", "ibp12s0", "eth0", "ens2f0np0", "enp1s0",
        "eno1", "bond0", "docker0", "veth12ab34", "hsn2", "cxi0", "hfi1_0", "efa_0", "rdmap16s27", "nvme0n1", "nvme1", "sda1",
        "md127", "dm-3", "loop7", "ata3.00", "GPU-5b6e1c2d-8f3a-4c11-9d2e-0a1b2c3d4e5f", "MIG-5b6e1c2d-8f3a-4c11",
        "0000:3b:00.0", "00000000:3B:00.0", "3f2a9c1b7d4e", "cuda:3", "rank3", "npu4", "davinci2", "renderD128", "lo",
        "python3.11", "nfs4", "ipv6", "sha256",
    ],
)  # fmt: skip
def test_devices_interfaces_and_identifiers_are_no_machines(name: str) -> None:
    assert is_device(name) and not can_be_excluded(name)


@pytest.mark.parametrize(
    "name",
    [
        "10.0.0.7", "fe80::1", "10.0.0.7:29500", "root@n3", "mk@login1", "gpu3", "gpu-07", "llm-worker-3", "sft-master-0",
        "bert-7d9f8b6c5d-x2x9k", "train-launcher-0", "job-12-0-abcde",
    ],
)  # fmt: skip
def test_addresses_users_and_pods_are_not_to_be_excluded(name: str) -> None:
    assert not can_be_excluded(name)


@pytest.mark.parametrize(
    "name",
    ["n3", "node03", "dgx-017", "b200-r2-06", "ip-10-3-88-41", "nid005121", "r13c02n1", "x1001c2s7b1n0", "gke-a3-k2", "worker-3"],
)  # fmt: skip
def test_names_of_machines_may_be(name: str) -> None:
    assert can_be_excluded(name) and not is_device(name)


# ----------------------------------------------------------------------------- whom a log excludes
INNOCENT = [
    # a device's name in a kernel's words
    ("", {"dmesg-q9.txt": f"[77.120000] nvidia-nvswitch1: {SXID}\n"}),
    (NODES, {"dmesg.txt": f"[77.120000] nvidia-nvswitch1: {SXID}\n"}),
    (NODES + f"nvidia-nvswitch1: {SXID}\n", {}),
    (NODES + f"nvidia-nvswitch0: ready\nnvidia-nvswitch1: {SXID}\n", {}),
    (NODES + f"mlx5_0: {BUS}\n", {}),
    (NODES + f"ib0: {BUS}\nib1: ready\n", {}),
    (NODES + f"nvme0n1: {BUS}\n", {}),
    (NODES + f"eth0: {DBE}\neth1: up\n", {}),
    (NODES + f"[hsn0] {ECC}\n[hsn1] up\n", {}),
    (NODES + f"GPU-5b6e1c2d-8f3a-4c11-9d2e-0a1b2c3d4e5f: {ECC}\n", {}),
    (NODES + f"3f2a9c1b7d4e: {ECC}\n", {}),
    (NODES + f"gpu3: {ECC}\ngpu4: ready\n", {}),
    (NODES + f"[12.100000] amdgpu3: {BUS}\n", {}),
    ("", {"dmesg-gpu3.txt": f"{BUS}\n"}),
    ("", {"dmesg-nvswitch1.txt": f"nvidia-nvswitch1: {SXID}\n"}),
    # one fact alone
    ("", {"dmesg-q9.txt": f"{BUS}\n"}),
    ("", {"dmesg-attempt2.txt": f"{BUS}\n"}),
    ("", {"console-h100.log": f"{DBE}\n"}),
    (f"q9: {ECC}\n", {}),
    (f"q9:41:99 [3] NCCL WARN Cuda failure 'uncorrectable ECC error encountered'\n{ECC}\n", {}),
    # pods, containers, addresses, users
    (STEPS + f"llm-worker-3 | {ECC}\nllm-worker-2 | ready\n", {}),
    (f"host=llm-worker-3\nllm-worker-3: [rank8]: {ECC}\n", {"llm-worker-3.log": "ready\n"}),
    (f"host=bert-7d9f8b6c5d-x2x9k {ECC}\n", {"bert-7d9f8b6c5d-x2x9k.log": "ready\n"}),
    (f"nodes 10.0.0.7,10.0.0.8\n10.0.0.7: [rank3]: {ECC}\n", {}),
    (f"nodes 10.0.0.7,10.0.0.8\n(pid=41, ip=10.0.0.7) {ECC}\n", {}),
    (f"localhost: {ECC}\n", {"dmesg-localhost.txt": f"{BUS}\n"}),
    (f"127.0.0.1: [rank3]: {ECC}\n", {}),
    (f"root@n3 | {ECC}\n", {}),
    (f"nodes n[1-4]\nmk@login1 | {ECC}\n", {}),
    (f"python3[4711]: {ECC}\n", {}),
    (f"nodes n[1-4]\nsystemd-coredump1: {BUS}\n", {}),
    # the line is of another, or of no one
    (NODES + f"{ECC}\n" + GONE.format("n1"), {}),
    (NODES + f"rank 3: {ECC}\n" + GONE.format("n1"), {}),
    (NODES + f"[default3]:{ECC}\n" + GONE.format("n1") + GONE.format("n2"), {}),
    (NODES + f"{DCGM}\n" + GONE.format("n1"), {}),
    (NODES + OK + f"  FAIL q7  {DCGM}\n" + GONE.format("n1"), {}),
    (NODES + f"n1: collected from n3: {BUS}\n", {}),
    (NODES + f"n1: peer n3 says {ECC}\n", {}),
    (NODES + f"n1 | n3 | FAIL | {DCGM}\n", {}),
    (NODES + "n1: dcgmi diag on n2,n3: Memory: Fail GPU 5: DBE detected\n", {}),
    (NODES + '{"collector": "n1", "checks": [{"name": "dcgm memory", "result": "FAIL"}]}\n', {}),
    (NODES + '[{"host": "n1", "dcgm": "pass"}, {"host": "n3", "dcgm": "FAIL", "why": "DBE detected"}]\n', {}),
    (NODES + "dcgm report\n  host: n1\n  dcgm memory: Pass\n  host: n3\n  dcgm memory: Fail\n" + GONE.format("n1"), {}),
    # what is no fault of the hardware
    (NODES + "n3: dcgmi: failed to connect to the host engine\n" + GONE.format("n3"), {}),
    (NODES + "n3: dcgm-exporter failed to start: port 9400 is taken\n" + GONE.format("n3"), {}),
    (NODES + "n3: nv-hostengine: DCGM initialization failure\n" + GONE.format("n3"), {}),
    (NODES + "n3: dcgmi diag -r 2: 0 failed, 12 passed\nKeyError: 'x'\n", {}),
    (NODES + "n3: dcgmi diag: Fail: 0 Pass: 12\nKeyError: 'x'\n", {}),
    (NODES + "n3: DCGM diag failed: license of the plugin is not valid\n", {}),
    (NODES + "n3: dcgmi diag timed out, check failed to finish\n", {}),
    (NODES + f"# {BUS}\nn3: KeyError: 'x'\n", {}),
    (NODES + "n3: grep -c 'fallen off the bus' /var/log/kern.log\nn3: KeyError: 'x'\n", {}),
    (NODES + f"launcher: previous job 8 failed on n3 with {BUS}\nKeyError: 'x'\n", {}),
    (NODES + f"n3: WARNING: {ECC}, retrying (1/5)\nKeyError: 'x'\n", {}),
    (NODES + "n3: mlx5_0: link down\nn3: nccl-tests all_reduce_perf FAILED busbw 12 GB/s\n", {}),
    (NODES + "n1: all_reduce_perf n1-n3 busbw 12 GB/s FAIL\n", {}),
    (NODES + "gcm health: n3 check_ib FAIL: mlx5_0 Down\n", {}),
    (NODES + "nhc: n3: check_fs_mount: /data not mounted FAIL\n", {}),
    (NODES + "".join(f"n{node}: {ECC}\n" for node in (1, 2, 3, 4)), {}),
    (NODES + "n3: NVRM: Xid (PCI:0000:bb:00): 13, pid=4, Graphics Exception: ESR 0x1\n", {}),
    (NODES + "n3: NVRM: Xid (PCI:0000:bb:00): 31, pid=4, MMU Fault\n", {}),
    (NODES + "n3: NVRM: Xid (PCI:0000:bb:00): 43, pid=4, Ch 00000010\n", {}),
    (NODES + "n3: nvidia-nvswitch1: SXid (PCI:0000:86:00.0): 11012, Non-fatal, Link 28 Single bit ECC error\nKeyError: 'x'\n", {}),
    (PODS + f"t-9 | {ECC}\nt-0 | ready\n", {}),
    ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-03-04T10:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n", {}),
    ("srun: error: Node failure on mlx5_0\n", {}),
]  # fmt: skip


@pytest.mark.parametrize(("log", "kernels"), INNOCENT)
def test_no_one_is_excluded(tmp_path: Path, log: str, kernels: dict[str, str]) -> None:
    assert excluded(of(tmp_path, log, kernels)) == ()


@pytest.mark.parametrize(
    ("log", "kernels", "node"),
    [
        (NODES, {"dmesg-n3.txt": f"[77.120000] nvidia-nvswitch1: {SXID}\n"}, "n3"),
        (NODES, {"dmesg-n3.txt": f"[77.120000] {BUS}\n"}, "n3"),
        (NODES, {"kern.log": f"Jul 21 14:27:51 n3 kernel: {BUS}\n"}, "n3"),
        ("", {"n3.syslog": f"Jul 21 14:27:51 n3 kernel: {BUS}\n"}, "n3"),
        (NODES + OK + f"  FAIL n3  {DCGM}\n" + GONE.format("n1"), {}, "n3"),
        (NODES + OK + f"| n3 | FAIL | {DCGM}\n" + GONE.format("n1"), {}, "n3"),
        (NODES + f"n1: ready\nn3: {ECC}\n" + GONE.format("n1"), {}, "n3"),
        (NODES + f'{{"host": "n3", "msg": "kernel: {BUS}"}}\n', {}, "n3"),
        (NODES + f"node=n3 result=FAIL {DCGM}\n" + GONE.format("n1"), {}, "n3"),
        (PODS + f"t-0 | ready\nt-1 | [rank8]: {ECC}\n", {}, "gke-a3-k2"),
        ("srun: error: Node failure on n3\n", {}, "n3"),
        (f"SLURM_NODELIST=gpu[01-04]\nJul 21 14:27:51 gpu03.cl.lab kernel: {DBE}\n", {}, "gpu03.cl.lab"),
    ],
)  # fmt: skip
def test_who_is_surely_a_machine_and_says_it_of_itself_is_excluded(
    tmp_path: Path, log: str, kernels: dict[str, str], node: str
) -> None:
    assert excluded(of(tmp_path, log, kernels)) == (node,)
