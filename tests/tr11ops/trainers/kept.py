"""Foreign trainings of two ranks under a keeper, for tests: a run directory, its card, and the keeper as
the node agent starts it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.contract.attempt import EndMarker, Heartbeat, read_phases
from trainer.contract.metrics_record import MetricsRecord, records
from trainer.contract.paths import RunPaths

SCRIPTS = Path(__file__).with_name("scripts")

# of a run of two nodes under the agents
CARD = """
[run]
name = "toy"
directory = "{root}"
[slurm]
nodes = 2
gpus_per_node = 0
workers_per_node = 1
cpus_per_task = 1
time_limit = "00:10:00"
[trainer]
command = ["{script}", "{{folder}}", "20", "5", "0.1", "die-once-at-8"]
folder = "{root}/out"
python = "{python}"
[trainer.progress]
step_line = '^at (?P<step>\\d+)/(?P<total>\\d+) loss=(?P<loss>\\S+)'
[trainer.marks]
resumed = '^begin after step (?P<done>[1-9]\\d*)'
scratch = '^begin after step 0$'
[trainer.checkpoints]
name = "step-{{step}}"
complete = ["count rank_*.pt = {{world_size}}", "zip rank_*.pt"]
quiet = 1
"""
JOB = "4711"
PATIENCE = 300.0  # seconds: other tests run beside these
# the plain script's own dialect, as a card says it
PLAIN: dict[str, Any] = {
    "progress": {"step_line": r"^at (?P<step>\d+)/(?P<total>\d+) loss=(?P<loss>\S+)"},
    "marks": {"resumed": r"^begin after step (?P<done>[1-9]\d*)", "scratch": r"^begin after step 0$"},
    "checkpoints": {
        "name": "step-{step}", "complete": ["count rank_*.pt = {world_size}", "zip rank_*.pt"],
        "quiet": 1,
    },
    "stop": {"how": "signal TERM", "needs": "polite"},
}  # fmt: skip
QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
# of the plain script's ranks where only lines, files and signals count: they do without torch
LIGHT = {"PYTHONPATH": str(SCRIPTS / "light")}


class KeptTraining:
    """A run whose trainer knows nothing of tr11."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = RunPaths(root, "toy", "main")
        self.out = root / "out"
        self.card = root / "card.json"
        self.log = root / "keeper.log"
        self.port = free_port()
        root.mkdir(parents=True, exist_ok=True)

    def write_card(
        self, command: Sequence[str] | str, run: dict[str, Any] | None = None, **trainer: Any
    ) -> None:
        given = {
            "command": command if isinstance(command, str) else list(command),
            "python": sys.executable, "directory": str(self.root), "folder": str(self.out),
        }  # fmt: skip
        named = {"directory": str(self.root), "name": "toy", "variant": "main"}
        value = {"run": {**named, **(run or {})}, "trainer": {**given, **trainer}}
        self.card.write_text(json.dumps(value), encoding="utf-8")

    def plain(
        self, steps: int, interval: int, *words: str, seconds: float = 0.05, **more: Any
    ) -> None:
        """A card of the plain script, whose ranks the keeper starts, without torch."""
        light = {"start": "srun", "environment": LIGHT}
        self.with_torch(steps, interval, *words, seconds=seconds, **{**light, **more})

    def with_torch(
        self,
        steps: int,
        interval: int,
        *words: str,
        seconds: float = 0.05,
        saves_to: str = "{folder}",
        **more: Any,
    ) -> None:
        """A card of the plain script as it is, started by torchrun where nothing else is said."""
        numbers = (str(steps), str(interval), str(seconds))
        command = (str(SCRIPTS / "plain_train.py"), saves_to, *numbers, *words)
        self.write_card(command, **{**PLAIN, **more})

    @contextmanager
    def kept(
        self, job: str = JOB, launch: int = 1, nodes: int = 1, node_rank: int = 0, workers: int = 2
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The keeper of one node while it runs; ended, with all that it started, at the end."""
        command = [
            sys.executable, "-u", "-m", "tr11ops.trainers.keeper", f"--nnodes={nodes}",
            f"--node-rank={node_rank}", f"--nproc-per-node={workers}", "--master-addr=127.0.0.1",
            f"--master-port={self.port}", str(self.card),
        ]  # fmt: skip
        own = {"TR11_JOB_ID": job, "TR11_LAUNCH": str(launch), **QUIET}
        self.paths.attempt(job).mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **own}
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def run(self, **more: Any) -> int:
        """One launch to its end; its exit status."""
        with self.kept(**more) as process:
            return process.wait(timeout=PATIENCE)

    # ------------------------------------------------------------------ what is left behind
    def end(self, job: str = JOB) -> EndMarker | None:
        return EndMarker.read(self.paths.end_marker(job))

    def beat(self, rank: int = 0) -> Heartbeat | None:
        return Heartbeat.read(self.paths.heartbeat(rank))

    def phases(self, job: str = JOB) -> list[str]:
        return [one.phase for one in read_phases(self.paths.phases(job))]

    def steps(self) -> list[MetricsRecord]:
        return [one for one in records(self.paths.metrics) if one.is_step]

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def iteration(self) -> int:
        beat = self.beat()
        return 0 if beat is None else beat.iteration


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def wait_until(holds: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for something to come true; an AssertionError where it does not in time."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.1)
