"""`make gpu`: its logic, on the processor, and what it says where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)


def test_without_a_gpu_it_says_so_and_writes_nothing() -> None:
    before = (ROOT / "benchmarks" / "RESULTS.md").read_bytes()
    done = script()
    assert done.returncode == 2 and done.stdout.count("\n") == 1 and done.stdout.startswith("no GPU here: ")
    assert (ROOT / "benchmarks" / "RESULTS.md").read_bytes() == before


def test_the_checks_hold_on_the_processor_and_become_a_table(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("# Measured\n\nOther figures.\n")
    done = script("--device", "cpu", "--results", str(results), "kernels", "resume")
    assert done.returncode == 0, done.stdout + done.stderr
    text = results.read_text()
    assert text.startswith("# Measured\n\nOther figures.\n\n## On a GPU\n")
    assert "| 4 steps after a save and a load | bit for bit | fine |" in text
    assert text.count("| attention kernel ") == 2 and "failed" not in text


def test_a_table_replaces_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    path = tmp_path / "RESULTS.md"
    path.write_text("# Measured\n")
    gpu.put_table(path, gpu.table("An H100:", [gpu.Row("a", "1 | 2", False), gpu.Row("b", "3")]))
    path.write_text(path.read_text() + "\n## After\n")
    gpu.put_table(path, "new")
    text = path.read_text()
    assert text.startswith("# Measured\n") and text.endswith("\n## After\n") and text.count(gpu.BEGIN) == 1
    assert "H100" not in text and "\nnew\n" in text
    assert "| a | 1 / 2 | **failed** |\n| b | 3 |  |" in gpu.table(
        "x", [gpu.Row("a", "1 | 2", False), gpu.Row("b", "3")]
    )
    (row,) = gpu.run_section("kernels", "cpu", 0.0)
    assert row.fine is False and "not reached within 8 minutes" in row.found
