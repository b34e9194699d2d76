"""Cold time and imports of `tr11 --help`, beside an interpreter that imports only typer and rich.

    python benchmarks/cli_start.py [--repeat N] [--json]

Each time is the smallest of N fresh interpreters, the two kinds taking turns so that both see the same machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

HEAVY = (
    "torch",
    "numpy",
    "deepspeed",
    "transformers",
    "tokenizers",
    "pydantic",
    "jinja2",
    "plotly",
    "gcsfs",
    "fsspec",
    "huggingface_hub",
)
BUDGET = 2.5
PEER = "import typer, rich"
HELP = "from tr11ops.cli.main import run; run(['--help'])"
IMPORTED = (
    "import sys\nfrom tr11ops.cli.main import execute\nexecute(['--help'])\n"
    "print('\\n' + ' '.join(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)"
)


def seconds(code: str) -> float:
    """Wall time of one fresh interpreter that runs `code`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def heavy_modules() -> list[str]:
    """Which of the heavy packages `tr11 --help` imports; the budget allows none."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True)
    loaded = set(done.stderr.split("\n")[-2].split())
    return [name for name in HEAVY if name in loaded]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rounds = [(seconds(PEER), seconds(HELP)) for _ in range(arguments.repeat + 1)][1:]
    peer, own = min(first for first, _ in rounds), min(second for _, second in rounds)
    heavy = heavy_modules()
    if arguments.json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "peer_seconds": peer,
                    "help_seconds": own,
                    "ratio": own / peer,
                    "budget": BUDGET,
                    "heavy": heavy,
                }
            )
        )
        return
    print(f"import typer, rich   {peer * 1000:6.0f} ms")
    print(f"tr11 --help          {own * 1000:6.0f} ms   {own / peer:.2f}x (budget {BUDGET}x)")
    print(f"heavy imports        {', '.join(heavy) or 'none'}")


if __name__ == "__main__":
    main()
