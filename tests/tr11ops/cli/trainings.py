"""A training that a command's test can stop."""

from __future__ import annotations

import json

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory

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
