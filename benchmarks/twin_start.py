"""How long a twin of 52 nodes takes to come up, to run a step on 48 nodes, and to go; and the
memory it holds.

python benchmarks/twin_start.py [--nodes 52] [--repeat 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin


def measure(nodes: int, home: Path) -> tuple[float, float, float, float]:
    """Seconds up, seconds of `srun` on all but four nodes, seconds down, MiB of private memory of
    all daemons.
    """
    began = time.monotonic()
    twin = Twin.up(TwinPlan(name="bench", nodes=nodes, gpus=8), home)
    up = time.monotonic() - began
    try:
        began = time.monotonic()
        wide = max(1, nodes - 4)
        subprocess.run(
            ["srun", f"--nodes={wide}", f"--ntasks={wide}", "true"],
            env={**os.environ, **twin.environment},
            check=True,
        )
        step = time.monotonic() - began
        memory = (
            sum(psutil.Process(record.pid).memory_full_info().uss for record in twin.processes())
            / 2**20
        )
    finally:
        began = time.monotonic()
        twin.down()
        down = time.monotonic() - began
    return up, step, down, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=52)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tr11-") as folder:
        Path(folder).chmod(0o755)
        runs = [measure(options.nodes, Path(folder)) for _ in range(options.repeat)]
    up, step, down, memory = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"twin of {options.nodes} nodes, median of {options.repeat}:")
    print(f"  up    {up:6.2f} s (budget 15)")
    print(f"  srun  {step:6.2f} s on {max(1, options.nodes - 4)} nodes")
    print(f"  down  {down:6.2f} s")
    print(f"  holds {memory:6.0f} MiB")


if __name__ == "__main__":
    main()
