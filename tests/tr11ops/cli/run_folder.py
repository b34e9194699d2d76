"""The run directory of a bench, for tests of commands."""

from __future__ import annotations

from tests.tr11ops.cli.local_bench import LocalBench
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths


def run_directory(bench: LocalBench) -> RunDirectory:
    root = bench.folder / "run"
    return RunDirectory(RunPaths(root, "small", "main"), root / "kill-switch")
