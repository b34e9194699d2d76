"""`tr11 train`: a real training in the foreground; Ctrl-C saves and stops, the next one goes on,
two at once never.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.launch.run_inputs import write_dataset
from tests.waiting import until
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.state_file import read_json

SETTINGS = (
    "slurm.nodes=1", "batch.train_samples=1_000_000", "data.split='98,1,1'", "run.exit_duration_minutes=none",
    "checkpoint.interval=1000",
)  # fmt: skip


def start(bench: LocalBench, *overrides: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-c",
        "from tr11ops.cli.main import run; run()",
        "train",
        "--run",
        str(bench.card),
    ]
    for setting in (*SETTINGS, *overrides):
        command += ["--set", setting]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with (bench.folder / "out.txt").open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def test_ctrl_c_saves_and_the_next_training_goes_on(bench: LocalBench) -> None:
    write_dataset(bench.folder / "data" / "corpus", (500,) * 100)
    directory = run_directory(bench)
    log = directory.paths.main_log
    process = start(bench)
    try:
        until(
            lambda: (
                process.poll() is not None
                or (log.exists() and b" iteration        5/" in log.read_bytes())
            ),
            "step 5",
            context=(bench.folder / "out.txt").read_text,
        )
        assert process.poll() is None, (bench.folder / "out.txt").read_text()
        running = "this run is already running: tr11 train, process"
        assert running in bench.launch("--set", "slurm.nodes=1").out
        assert running in bench.tr11("train", "--run", str(bench.card)).err
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 0
    finally:
        end(process)
    [attempt] = directory.attempt_ids()
    verdict = read_json(directory.paths.attempt(attempt) / "verdict.json") or {}
    step = read_latest(directory.paths.checkpoints)
    assert (
        verdict["reason"] == "signal"
        and step == verdict["checkpoint_step"]
        and step is not None
        and step >= 5
    )
    assert (
        f"resumes at step {step + 1} from global_step{step}"
        in bench.launch("--dry-run", "--set", "slurm.nodes=1").out
    )
    again = start(bench, f"run.exit_interval={step + 2}")
    try:
        assert again.wait(timeout=300) == 0, (bench.folder / "out.txt").read_text()
    finally:
        end(again)
    logged = [int(number) for number in re.findall(r" iteration +(\d+)/", log.read_text())]
    assert logged == list(range(1, step + 3))
    assert (
        bench.tr11("logs", "--run", str(bench.card), "--rank", "0", "-n", "500").out.count(
            " iteration "
        )
        >= 2
    )
