"""Counting the commands that a scheduler is asked, for tests."""

from __future__ import annotations

import os
from pathlib import Path


def slurm_commands(folder: Path, squeue: str, scontrol: str) -> dict[str, str]:
    """Stand-ins for Slurm's commands that note each call; returns the environment that finds them."""
    tools = folder / "tools"
    tools.mkdir()
    for name, body in (
        ("squeue", squeue),
        ("scontrol", scontrol),
        ("sbatch", "exit 1"),
        ("sinfo", "true"),
    ):
        path = tools / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n{body}\n')
        path.chmod(0o755)
    (folder / "slurm.conf").touch()
    return {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_CONF": str(folder / "slurm.conf")}
