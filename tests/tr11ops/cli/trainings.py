"""A training that a command's test can stop."""

from __future__ import annotations

import json
import time

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from trainer.contract.compute_record import ComputeTimes
from trainer.contract.documents import document
from trainer.contract.files import write_unflushed

END = {
    "reason": "kill-switch", "iteration": 12, "checkpoint_step": 12, "restart": False, "message": "", "time": 1.0,
    "host": "here", "launch": 1,
}  # fmt: skip


def running(bench: LocalBench, script: str) -> str:
    """A job that belongs to the run by its comment and does what `script` says; returns its number."""
    directory = run_directory(bench)
    directory.root.mkdir(exist_ok=True)
    number = bench.submit(script, 1, "small", directory.comment("20260101-000000-00000000"))
    bench.wait(lambda jobs: any(job.raw_id == number and job.state.is_active for job in jobs))
    return number


def trainer_script(bench: LocalBench, end: dict[str, object] | None) -> str:
    """Waits for the kill switch as a trainer does, then leaves its end marker (or nothing)."""
    directory = run_directory(bench)
    attempt = f"{directory.paths.attempts}/$SLURM_JOB_ID"
    marker = json.dumps({**(end or {}), "job_id": "x"})
    leave = f"mkdir -p {attempt}; echo '{marker}' > {attempt}/end.json"
    return (
        f"while [ ! -e {directory.kill_switch} ]; do sleep 0.05; done\n{leave if end else 'true'}"
    )


def measure(bench: LocalBench, job: str, node: str, seconds: tuple[float, ...]) -> None:
    """What the ranks of this job's node have measured: each its own seconds of a step, of equal work."""
    for rank, each in enumerate(seconds):
        path = run_directory(bench).paths.compute(job, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        found = ComputeTimes(
            rank,
            node,
            launch=1,
            time=time.time(),
            iteration=90,
            steps=10,
            seconds={"forward": each},
            stage=0,
            part=0,
            recent=(each,) * 10,
        )
        write_unflushed(path, document(found), rank)
