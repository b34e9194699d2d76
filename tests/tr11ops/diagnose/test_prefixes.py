"""The node, the rank and the words of a line stand behind many prefixes; localhost is no node."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from tr11ops.diagnose.lines import split_prefixes
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.places import is_this_machine
from tr11ops.diagnose.signature import FaultClass

BODY = "NCCL WARN NET/IB : mlx5_9:1 Got async event : port error"
XID = "NVRM: Xid (PCI:0000:48:00): 79, pid=22884, GPU has fallen off the bus."
NCCL = f"gpu-a1:7001:7050 [0] {BODY}"
FAULT = "RuntimeError: CUDA error: unspecified launch failure"
PREFIXED = [
    ("CloudWatch", f"  | 2024-12-04T07:19:46.301Z | {NCCL}", "gpu-a1", None, BODY),
    ("CloudWatch without indentation", f"| 2024-12-04T07:19:46.301Z | [rank1]: {BODY}", None, 1, BODY),
    ("indentation", f"        {NCCL}", "gpu-a1", None, BODY),
    ("indentation and a rank", f"    [rank3]: {BODY}", None, 3, BODY),
    ("a tab", f"\t{NCCL}", "gpu-a1", None, BODY),
    ("Talos", f"10.21.8.119: kern: warning: [2026-04-22T21:25:20.505406921Z]: {XID}", "10.21.8.119", None, XID),
    ("Talos, aligned", f"gpu07: kern:     err: [2026-04-22T21:25:20.505406921Z]: {XID}", "gpu07", None, XID),
    ("syslog", f"Nov 23 05:25:41 n7 kernel: {XID}", "n7", None, f"kernel: {XID}"),
    ("syslog with a priority", f"<4>Nov 23 05:25:41 n7 kernel: {XID}", "n7", None, f"kernel: {XID}"),
    ("journald", f"2024-05-01T10:00:00+0200 n7 kernel: {XID}", "n7", None, f"kernel: {XID}"),
    ("a service", f"Nov 23 05:25:41 n7 python3[411]: {BODY}", "n7", None, BODY),
    ("Docker's JSON", json.dumps({"log": NCCL + "\n", "stream": "stderr", "time": "2024-05-01T10:00:00.1Z"}),
     "gpu-a1", None, BODY),
    ("JSON of a logger", json.dumps({"level": "ERROR", "host": "n7", "rank": 3, "message": BODY}), "n7", 3, BODY),
    ("JSON with quotes", json.dumps({"message": 'he said "no"', "hostname": "n7"}), "n7", None, 'he said "no"'),
    ("journald's JSON", json.dumps({"_HOSTNAME": "n7", "MESSAGE": XID}), "n7", None, XID),
    ("Kubernetes' JSON", json.dumps({"kubernetes": {"host": "n7"}, "log": f"[rank2]: {BODY}"}), "n7", 2, BODY),
    ("JSON that was cut", json.dumps({"host": "n7", "message": BODY, "more": "x"})[:-12], "n7", None, BODY),
    ("Ray", f"(RayTrainWorker pid=5137, ip=10.128.0.103) {BODY}", "10.128.0.103", None, BODY),
    ("SageMaker", f"[1,mpirank:3,algo-2]<stderr>:{BODY}", "algo-2", 3, BODY),
    ("a node in brackets", f"[node-1] {BODY}", "node-1", None, BODY),
    ("a host without a number", f"zkti:702444:702444 [0] {BODY}", "zkti", None, BODY),
    ("an address", f"10.0.0.7:702444:702444 [0] {BODY}", "10.0.0.7", None, BODY),
    ("slurmstepd with its node", f"slurmstepd-sp-0016: error: pyxis: {BODY}", "sp-0016", None, f"pyxis: {BODY}"),
    ("a time is no node", f"12:34:56 [3] {BODY}", None, None, f"12:34:56 [3] {BODY}"),
    ("a rank is no node", f"[rank-1] {BODY}", None, None, f"[rank-1] {BODY}"),
    ("stern", f"train-worker-3 pytorch [rank7]: {FAULT}", None, 7, FAULT),
    ("stern color", f"train-llm-worker-0 › pytorch [rank7]: {FAULT}", None, 7, FAULT),
    ("kubectl prefix", f"[pod/train-worker-0/pytorch] [rank0]: {FAULT}", "train-worker-0", 0, FAULT),
    ("kubectl ts", f"[pod/train-worker-0/pytorch] 2024-05-01T10:00:00.123456789Z [rank0]: {FAULT}", "train-worker-0", 0, FAULT),
    ("compose", f"trainer-1  | [rank0]: {FAULT}", None, 0, FAULT),
    ("compose v1", f"trainer_1  | [rank0]: {FAULT}", None, 0, FAULT),
    ("compose name", f"worker0    | [rank0]: {FAULT}", None, 0, FAULT),
    ("journald short", f"Nov 26 20:02:39 gpu17 kernel: {XID}", "gpu17", None, f"kernel: {XID}"),
    ("journald iso", f"2024-11-26T20:02:39+0000 gpu17 kernel: {XID}", "gpu17", None, f"kernel: {XID}"),
    ("journald iso precise", f"2024-11-26T20:02:39.123456+00:00 gpu17 kernel: {XID}", "gpu17", None, f"kernel: {XID}"),
    ("journald unit", f"Nov 26 20:02:39 gpu17 torchrun[4121]: [rank0]: {FAULT}", "gpu17", 0, FAULT),
    ("journald unit2", f"Nov 26 20:02:39 gpu17 train.sh[4121]: [rank0]: {FAULT}", "gpu17", 0, FAULT),
    ("dmesg", f"[12345.678901] {XID}", None, None, XID),
    ("dmesg -T", f"[Wed Jan 17 14:52:12 2024] {XID}", None, None, XID),
    ("rfc5424", f"<4>1 2024-11-26T20:02:39.123Z gpu17 kernel - - - {XID}", "gpu17", None, XID),
    ("vector json", '{"file":"/var/log/x","host":"gpu17","message":"[rank3]: ' + FAULT + '","source_type":"file"}', "gpu17", 3, FAULT),
    ("fluentd", '2024-11-26 20:02:39.000000000 +0000 kubernetes.var.log.x: {"log":"[rank3]: ' + FAULT
     + '\\n","stream":"stderr","kubernetes":{"host":"gpu17"}}', "gpu17", 3, FAULT),
    ("fluentbit", '[0] kube.train: [[1700000000.123, {}], {"log"=>"[rank3]: '
     + FAULT + '", "stream"=>"stderr"}]', None, 3, FAULT),
    ("gcp textPayload", '{"textPayload":"[rank3]: ' + FAULT
     + '","resource":{"labels":{"pod_name":"train-0","node_name":"gke-a3-17"}}}', "gke-a3-17", 3, FAULT),
    ("loki line", f"2024-11-26T20:02:39Z {{host=\"gpu17\", job=\"train\"}} [rank3]: {FAULT}", "gpu17", 3, FAULT),
    ("logcli", f"2024-11-26T20:02:39Z {{}} [rank3]: {FAULT}", None, 3, FAULT),
    ("cloudwatch tail", f"2024-11-26T20:02:39.123000+00:00 train/algo-1-1732 [rank3]: {FAULT}", None, 3, FAULT),
    ("cloudwatch group", f"2024-11-26T20:02:39 algo-1/train [rank3]: {FAULT}", None, 3, FAULT),
    ("skypilot", f"(worker1, rank=1, pid=4412, ip=10.0.0.7) [rank9]: {FAULT}", "10.0.0.7", 9, FAULT),
    ("skypilot2", f"(train, pid=4412) [rank9]: {FAULT}", None, 9, FAULT),
    ("ray dedup", f"(WorkerDict pid=31390, ip=10.60.4.21) [rank9]: {FAULT}", "10.60.4.21", 9, FAULT),
    ("ray func", f"(main_task pid=31390) [rank9]: {FAULT}", None, 9, FAULT),
    ("raylet", f"(raylet, ip=10.60.4.21) {FAULT}", "10.60.4.21", None, FAULT),
    ("raylet2", f"(raylet) {FAULT}", None, None, FAULT),
    ("torchrun tee2", f"[trainer3]:[rank3]: {FAULT}", None, 3, FAULT),
    ("torchrun role", f"[worker5]:{FAULT}", None, None, FAULT),
    ("srun -l", f"  17: [rank17]: {FAULT}", None, 17, FAULT),
    ("pdsh", f"gpu17: [rank17]: {FAULT}", "gpu17", 17, FAULT),
    ("deepspeed pdsh fqdn", f"gpu17.cluster: [rank17]: {FAULT}", "gpu17.cluster", 17, FAULT),
    ("clush", f"gpu17: {NCCL}", "gpu17", None, BODY),
    ("mpirun tag", f"[1,17]<stderr>:[rank17]: {FAULT}", None, 17, FAULT),
    ("mpirun tag5", f"[1,17]<stderr>: [gpu17:04121] {FAULT}", "gpu17", 17, FAULT),
    ("prte", f"[prterun-gpu17-4121@1,3]<stderr>: {FAULT}", "gpu17", 3, FAULT),
    ("lightning", f"[rank: 3] {FAULT}", None, 3, FAULT),
    ("megatron ts", f" [2024-11-26 20:02:39] [rank3]: {FAULT}", None, 3, FAULT),
    ("slurm node-tag", f"[gpu17] [rank3]: {FAULT}", "gpu17", 3, FAULT),
    ("xpanes", f"gpu17> [rank3]: {FAULT}", None, 3, FAULT),
    ("azureml", f"2024/11/26 20:02:39 [rank3]: {FAULT}", None, 3, FAULT),
    ("aml rank", f"[0]: [rank3]: {FAULT}", None, 3, FAULT),
    ("docker swarm", f"train_worker.2.abc123@gpu17    | [rank3]: {FAULT}", "gpu17", 3, FAULT),
    ("nomad", f"[gpu17/train.0/task] [rank3]: {FAULT}", None, 3, FAULT),
    ("volcano", f"10.0.0.7:[rank3]: {FAULT}", "10.0.0.7", 3, FAULT),
    ("epoch ts", f"1732651359.123 gpu17 [rank3]: {FAULT}", None, 3, FAULT),
    ("determined", f"<info>    [12, n3] || [rank=4] {FAULT}", None, 4, FAULT),
    ("determined2", f"[2024-11-26T20:02:39.123Z] 9f8e7d6c [rank=4] {FAULT}", None, 4, FAULT),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "node", "rank", "body"),
    [row[1:] for row in PREFIXED],
    ids=[row[0] for row in PREFIXED],
)
def test_node_rank_and_words(line: str, node: str | None, rank: int | None, body: str) -> None:
    origin, rest = split_prefixes(line)
    assert (origin.node, origin.rank, rest.strip()) == (node, rank, body)


TRACEBACK = """\
Traceback (most recent call last):
  File "/code/train.py", line 211, in <module>
    main()
ValueError: hidden size 1000 cannot be divided by 16
"""


@pytest.mark.parametrize(
    "form",
    [
        "{line}",
        "        {line}",
        "  | 2024-12-04T07:19:46.484Z | {line}",
        "  | 2024-12-04T07:19:46.484Z | [rank1]: {bare}",
        "gpu07: {line}",
    ],
)
def test_a_traceback_is_read_behind_them(tmp_path: Path, form: str) -> None:
    log = tmp_path / "main_log.txt"
    lines = TRACEBACK.splitlines()
    log.write_text(
        "".join(form.format(line=line, bare=line.strip()) + "\n" for line in lines),
        encoding="utf-8",
    )
    [found] = diagnose_files([log])
    assert found.fault is FaultClass.USER_CODE
    assert found.root_cause is not None and "ValueError: hidden size" in found.root_cause.text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_a_log_of_another_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    marks = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}
    log = tmp_path / "main_log.txt"
    text = f"{NCCL}\r\n" + "".join(f"step {number} loss 2.5\r\n" for number in range(1, 6))
    log.write_bytes(marks.get(encoding, b"") + (text + NCCL + "\r\n").encode(encoding))
    [found] = diagnose_files([log])
    assert found.fault is FaultClass.NCCL_NETWORK
    assert found.root_cause is not None
    assert (found.root_cause.node, found.root_cause.line_number) == ("gpu-a1", 7)


REPORT = """\
[rank3]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered
Root Cause (first observed failure):
[0]:
  time      : 2025-08-19_07:34:10
  host      : {}
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: 2289)
"""


@pytest.mark.parametrize("host", ["localhost", "localhost.localdomain", "127.0.0.1"])
def test_localhost_is_no_node(tmp_path: Path, host: str) -> None:
    log = tmp_path / "main_log.txt"
    log.write_text(REPORT.format(host), encoding="utf-8")
    [found] = diagnose_files([log])
    assert found.fault is FaultClass.GPU_HARDWARE
    assert found.root_cause is not None and found.root_cause.node is None
    log.write_text(REPORT.format("gpu07"), encoding="utf-8")
    assert (root := diagnose_files([log])[0].root_cause) is not None and root.node == "gpu07"


@pytest.mark.parametrize(
    "name",
    ["localhost", "LOCALHOST", "localhost.localdomain", "localhost4", "ip6-localhost", "127.0.0.1", "127.0.1.1", "::1",
     "[::1]", "0.0.0.0", "::ffff:127.0.0.1", "localhost:29500"],
)  # fmt: skip
def test_no_spelling_of_the_own_machine_is_a_node(name: str) -> None:
    assert is_this_machine(name)


@pytest.mark.parametrize("name", ["localhost-7", "n1", "10.0.0.1", "12.7.0.1", "gpu-localhost1"])
def test_other_names_are_nodes(name: str) -> None:
    assert not is_this_machine(name)
