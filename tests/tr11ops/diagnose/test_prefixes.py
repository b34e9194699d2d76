"""The node, the rank and the words of a line stand behind many prefixes; localhost is no node."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from tr11ops.diagnose.lines import split_prefixes
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.signature import FaultClass

BODY = "NCCL WARN NET/IB : mlx5_9:1 Got async event : port error"
XID = "NVRM: Xid (PCI:0000:48:00): 79, pid=22884, GPU has fallen off the bus."
NCCL = f"gpu-a1:7001:7050 [0] {BODY}"
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
    ("a time is no node", f"12:34:56 [3] {BODY}", None, None, f"12:34:56 [3] {BODY}"),
    ("a rank is no node", f"[rank-1] {BODY}", None, None, f"[rank-1] {BODY}"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "node", "rank", "body"), [row[1:] for row in PREFIXED], ids=[row[0] for row in PREFIXED]
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
    log.write_text("".join(form.format(line=line, bare=line.strip()) + "\n" for line in lines), encoding="utf-8")
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
