"""Workers that cannot run a signal handler: the agent ends them in time, and says who failed how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.waiting import is_gone, until
from tr11ops.agent.worker_environment import worker_defaults

ROOT = Path(__file__).parents[3]
# Both install the trainer's handlers, and then hang where Python never runs again: rank 0 in C with
# the interpreter's lock held, as in an operation between ranks; rank 1 stopped by the kernel.
# NCCL's watchdog ends rank 0 by SIGABRT.
WORKER = """
import ctypes, os, signal, subprocess, sys
from contextlib import suppress
from pathlib import Path
from trainer.control.lifecycle import SignalFlag

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
SignalFlag().install()
(folder / f"pid-{rank}").write_text(str(os.getpid()))
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
program = "while test ! -s $1/pid-1; do :; done; kill -ABRT $2"
subprocess.Popen(["sh", "-c", program, "sh", str(folder), str(os.getpid())])
ctypes.PyDLL(None).sleep(600)
"""


def test_workers_that_hear_no_signal_are_ended_and_named(tmp_path: Path) -> None:
    card = {
        "slurm": {"gpus_per_node": 0},
        "resilience": {"end_within_seconds": 4, "skip_checks": []},
    }
    (tmp_path / "card.json").write_text(json.dumps(card))
    (tmp_path / "worker.py").write_text(WORKER)
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from tr11ops.agent import node
        launcher = [sys.executable, "-u", "-m", "trainer.control.launcher", "--nnodes=1", "--nproc-per-node=2",
                    "--master-port=0", "--max-restarts=0", {str(tmp_path / "worker.py")!r}, {str(tmp_path)!r}]
        node.NodeTask.command = property(lambda self: launcher)
        folder = Path({str(tmp_path)!r})
        sys.exit(node.run(node.NodeTask(folder, folder / "card.json", "7", 1, 0, 1, 2, "127.0.0.1", 1)))
    """)
    environment = {**os.environ, "TR11_NODE_NAME": "x01", "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    shown, _ = child.communicate(timeout=300)
    assert child.returncode != 0, shown
    assert (tmp_path / "failures" / "killed-0-x01.json").exists(), shown
    death = json.loads((tmp_path / "failures" / "killed-0-x01.json").read_text())
    assert (death["rank"], death["host"], death["launch"]) == (0, "x01", 1) and "SIGABRT" in death[
        "error"
    ]
    assert "a worker failed, but the others stay: ending them" in shown
    workers = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    until(lambda: all(map(is_gone, workers)), "the end of both workers")


@pytest.mark.parametrize(("gpus", "tensor"), [(0, 2), (8, 1), (8, 4)])
def test_what_workers_get_unless_it_is_set(gpus: int, tensor: int) -> None:
    attempt, temporary = Path("/run/state/attempts/7"), Path("/node")
    found = worker_defaults({}, attempt, 2, temporary, gpus=gpus, tensor=tensor)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert found[name].startswith("/node/")
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in found) == (gpus > 0 and tensor > 1)
    if gpus:
        assert (
            found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
            and found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        )
        assert (
            found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{attempt}/flight-recorder/launch-2-rank-"
        )
        renamed = worker_defaults(
            {}, attempt, 2, temporary, gpus=gpus, tensor=tensor, torch="2.13.0+cpu"
        )
        assert {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"} < set(renamed)
        assert set(found) - set(renamed) == {
            "TORCH_NCCL_TRACE_BUFFER_SIZE",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        }
    assert "CUDA_LAUNCH_BLOCKING" not in found
    assert worker_defaults(found, attempt, 2, temporary, gpus=gpus, tensor=tensor) == {}
