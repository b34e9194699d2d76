"""`make bench`: every measurement in turn, each as its own process, with the machine described
first.

python benchmarks/run.py [NAME ...]      only these, e.g. twin_start training_speed
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from peers import peers_python

HERE = Path(__file__).parent
NOT_MEASUREMENTS = {"run", "demo", "gpu", "models", "peers"}
WITH_PEERS = {"data_path"}  # run where megatron-core is installed


def main() -> int:
    files = {path.stem: path for path in HERE.glob("*.py") if path.stem not in NOT_MEASUREMENTS}
    files |= {path.parent.name: path.parent for path in HERE.glob("*/__main__.py")}
    known = sorted(files)
    wanted = sys.argv[1:] or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no measurement {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, ",
        end="",
    )
    print(
        ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed")), flush=True
    )
    failed = []
    for name in wanted:
        print(f"\n== {name}", flush=True)
        python = (peers_python() if name in WITH_PEERS else None) or sys.executable
        if subprocess.run([python, str(files[name])], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nnot measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
