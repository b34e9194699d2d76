"""`tr11 diagnose` and `tr11 logs --summary` of a large log, beside `grep -c`: rate and memory.

    python benchmarks/diagnose.py [--gigabytes 1] [--repeat 3] [--json]

The log is that of a healthy training of three ranks that raises an exception at its end: for each
step one line of it and some of what workers print. The programs take turns; each is a process of
its own, of which the smallest processor time and the largest resident memory count. The file comes
from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUDGET_RATE = 200.0  # MB/s
BUDGET_MEMORY = 200.0  # MB
TR11 = (sys.executable, "-c", "from tr11ops.cli.main import run; run()")
STEP = (
    "[default7]: iteration %8d/  115311 | consumed samples: %12d | consumed tokens: %12d | elapsed time per iteration "
    "(s): 104.92 | learning rate: 5.704E-05 | global batch size:  2048 | lm loss: 2.204112E+00 | grad norm: 0.171 | "
    "num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 19.520 | "
    "TFLOPs: 149.35 |\n"
)
NOISE = (
    "[default3]:time (ms) | forward-compute: 40201.11 | backward-compute: 61210.20 | optimizer: 811.20\n"
    "node07:41230:41544 [3] NCCL INFO Channel 01/02 : 3[b2000] -> 4[1b000] via P2P/IPC\n"
    "[default0]:  successfully saved checkpoint at iteration   31200 to /scratch/checkpoints/tr11-176B-ml\n"
)
END = (
    "[default3]:[rank3]: Traceback (most recent call last):\n"
    '[default3]:[rank3]:   File "t.py", line 1, in <module>\n'
    "[default3]:[rank3]: KeyError: 'input_ids'\n"
)


def write_log(path: Path, size: int) -> None:
    """A log of about `size` bytes."""
    step, written = 1, 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            block = "".join(
                STEP % (number, 2048 * number, 4_194_304 * number) + NOISE
                for number in range(step, step + 2000)
            )
            written += file.write(block)
            step += 2000
        file.write(END)


def measured(command: tuple[str, ...]) -> tuple[float, float, float]:
    """Wall seconds, processor seconds, and MB of resident memory of one process."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return (
        time.perf_counter() - began,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024 / 1e6,
    )


def run(gigabytes: float, repeat: int) -> dict[str, dict[str, float]]:
    """For each program its rates and its memory."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "main_log.txt"
        write_log(log, int(gigabytes * 1e9))
        commands = {
            "grep -c": ("grep", "-c", "CUDA error", str(log)),
            "tr11 diagnose": (*TR11, "diagnose", str(log)),
            "tr11 logs --summary": (*TR11, "logs", "--file", str(log), "--summary"),
        }
        for _ in range(repeat):
            for name, command in commands.items():
                found.setdefault(name, []).append(measured(command))
        size = log.stat().st_size / 1e6
    return {
        name: {
            "wall_mb_s": size / min(wall for wall, _, _ in runs),
            "cpu_mb_s": size / min(cpu for _, cpu, _ in runs),
            "memory_mb": max(memory for _, _, memory in runs),
        }
        for name, runs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options.gigabytes, options.repeat)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, rates in found.items():
        print(
            f"{name:20} {rates['wall_mb_s']:8.0f} MB/s  {rates['cpu_mb_s']:8.0f} MB per processor second "
            f" {rates['memory_mb']:6.0f} MB of memory"
        )
    ours = found["tr11 diagnose"]
    print(f"budget: {BUDGET_RATE:.0f} MB/s, {BUDGET_MEMORY:.0f} MB; load {os.getloadavg()[0]:.0f}")
    sys.exit(0 if ours["cpu_mb_s"] >= BUDGET_RATE and ours["memory_mb"] <= BUDGET_MEMORY else 1)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
