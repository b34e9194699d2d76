"""How long Slurm lets a job wait that goes back into the queue, with and without an expedited requeue:
from the request, or the loss of its node, to the next start of its script.

python benchmarks/requeue_gap.py [--repeat 3] [--quick]    (Slurm 25.11 or newer: .ci/slurm-version forky ...)
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

PATIENCE_SECONDS = 400.0
SCRIPT = """#!/bin/bash
echo "$(date +%s.%N) $SLURMD_NODENAME"
sleep 1000
"""


def starts(path: Path) -> list[tuple[float, str]]:
    """Each start of the job so far: when, in seconds since the epoch, and on which node."""
    if not path.exists():
        return []
    rows = [line.split() for line in path.read_text().splitlines()]
    return [(float(row[0]), row[1]) for row in rows if len(row) == 2 and row[1].startswith("node")]


def wait_for(path: Path, count: int) -> list[tuple[float, str]]:
    """The starts, once there are so many."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(starts(path)) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"no start {count} within {PATIENCE_SECONDS:g} s: {path.read_text()}")
        time.sleep(0.01)
    return starts(path)


def gap(environment: dict[str, str], folder: Path, option: str, is_node_lost: bool) -> float:
    """Seconds from the request, or the node's end, to the next start."""

    def asked(*words: str) -> str:
        done = subprocess.run(
            words, env=environment, cwd=folder, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    script = folder / "job.sh"
    script.write_text(SCRIPT)
    output = folder / f"{time.monotonic_ns()}.out"
    number = asked(
        "sbatch", "--parsable", option, "--open-mode=append", f"--output={output}", str(script)
    )
    [(_, node)] = wait_for(output, 1)
    began = time.time()
    if is_node_lost:
        asked("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=benchmark")
    else:
        asked("scontrol", "requeue", number)
    found = wait_for(output, 2)[1][0] - began
    asked("scancel", number)
    while asked("squeue", "--noheader") or asked("sinfo", "--noheader", "--format=%T") != "idle":
        time.sleep(0.1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="without those that wait two minutes")
    options = parser.parse_args()
    plan = TwinPlan(
        name="requeue", nodes=2, gpus=0, cpu_nodes=0, node_prefix="node",
        slurm_settings=("SlurmctldParameters=enable_expedited_requeue",),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tr11-") as name:
        Path(name).chmod(0o755)
        with Twin.up(plan, Path(name)) as twin:
            environment = {**os.environ, **twin.environment}
            for option in ("--requeue=expedite", "--requeue"):
                repeat = options.repeat if option != "--requeue" else 0 if options.quick else 1
                for words, is_node_lost in (("scontrol requeue", False), ("node down", True)):
                    gaps = [
                        gap(environment, Path(name), option, is_node_lost) for _ in range(repeat)
                    ]
                    if gaps:
                        print(
                            f"{words:<17} {option:<20} {statistics.median(gaps):7.2f} s (median of {repeat})",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
