"""Start of `tr11 --help` and of `tr11 status`, beside an interpreter that imports only typer and
rich.

    python benchmarks/cli_start.py [--repeat N] [--json]

Each figure is the smallest of N fresh interpreters, the kinds taking turns so that all see the same
machine. Wall time, and processor time, which other work on the machine disturbs less. Modules are
compiled before, as an installer does it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tr11ops.runcard.card import shipped_folder

HEAVY = (
    "torch",
    "numpy",
    "deepspeed",
    "transformers",
    "tokenizers",
    "pydantic",
    "jinja2",
    "gcsfs",
    "fsspec",
    "huggingface_hub",
)
BUDGETS = {"help": 2.5, "status": 4.0}
RUN = "from tr11ops.cli.main import run; run("
KINDS = {
    "peer": "import typer, rich",
    # pydantic too: typer checks values with it
    "libraries": "import typer, rich.console, rich.table, typer._adapters",
    "help": f"{RUN}['--help'])",
    "status": f"{RUN}['status', '--run', 'demo.toml', '--scheduler', 'local'])",
}
IMPORTED = (
    "import sys\nfrom tr11ops.cli.main import execute\nexecute(['--help'])\n"
    "print('\\n' + ' '.join(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)"
)


def start(code: str, folder: Path) -> tuple[float, float]:
    """Wall and processor time of one fresh interpreter that runs `code` in a folder with a card and
    no run.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, check=False, capture_output=True
    )
    if done.stderr:  # status of a run that is not there is no failure, and says nothing there
        raise SystemExit(f"cli_start: {code}:\n{done.stderr.decode()}")
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def heavy_modules() -> list[str]:
    """Which of the heavy packages `tr11 --help` imports; the budget allows none."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True
    )
    loaded = set(done.stderr.split("\n")[-2].split())
    return [name for name in HEAVY if name in loaded]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tr11-start-") as name:
        shutil.copy(shipped_folder() / "demo.toml", name)
        rounds = [
            {kind: start(code, Path(name)) for kind, code in KINDS.items()}
            for _ in range(arguments.repeat + 1)
        ]
    best = {
        kind: [min(times[kind][way] for times in rounds[1:]) for way in (0, 1)] for kind in KINDS
    }
    ratios = {
        kind: [own / peer for own, peer in zip(best[kind], best["peer"], strict=True)]
        for kind in KINDS
    }
    heavy = heavy_modules()
    if arguments.json:
        print(
            json.dumps(
                {
                    "schema": 2,
                    "wall_seconds": {kind: wall for kind, (wall, _) in best.items()},
                    "processor_seconds": {kind: used for kind, (_, used) in best.items()},
                    "ratios": {
                        kind: {"wall": wall, "processor": used}
                        for kind, (wall, used) in ratios.items()
                    },
                    "budgets": BUDGETS,
                    "heavy": heavy,
                }
            )
        )
        return
    for kind in KINDS:
        (wall, used), (wall_ratio, used_ratio) = best[kind], ratios[kind]
        budget = f" (budget {BUDGETS[kind]}x)" if kind in BUDGETS else ""
        print(
            f"{kind:<10} {wall * 1000:6.0f} ms {wall_ratio:5.2f}x   processor {used * 1000:6.0f} ms {used_ratio:5.2f}x"
            f"{budget}"
        )
    print(f"heavy imports of --help: {', '.join(heavy) or 'none'}")


if __name__ == "__main__":
    main()
