"""The keeper is loaded on each node before each launch: quickly, and without what only others need."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "pydantic", "httpx", "numpy", "typer", "rich", "yaml")


def test_it_loads_nothing_heavy() -> None:
    program = f"import sys, tr11ops.trainers.keeper; print([one for one in {HEAVY} if one in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
