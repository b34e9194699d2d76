"""Jobs that are a few lines of shell, and processes that run them, for the tests of the periodic
jobs.

python -m tests.tr11ops.cron.rounds daemon|once FOLDER SECONDS SCRIPT
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tr11ops.base.stop_signals import obeying
from tr11ops.cron.daemon import Daemon
from tr11ops.cron.jobs import Every, PeriodicJob
from tr11ops.cron.runner import CronContext, run_due
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths


def run_directory(folder: Path) -> RunDirectory:
    return RunDirectory(RunPaths(folder / "run", "small", "main"), folder / "run" / "kill-switch")


def job(
    name: str = "pulse", seconds: float = 3600, timeout: float = 30, **more: Any
) -> PeriodicJob:
    return PeriodicJob(name, (name,), Every(seconds), timeout, "a job of a test", **more)


def place(
    folder: Path,
    script: str,
    way: str = "once",
    clock: Callable[[], float] = time.time,
    **more: Any,
) -> CronContext:
    """Where the command of every job is a shell script."""
    directory = run_directory(folder)
    directory.root.mkdir(parents=True, exist_ok=True)
    return CronContext(
        directory,
        way,
        folder,
        {**os.environ, "HERE": str(folder)},
        lambda job: ["/bin/sh", "-c", script],
        clock,
        **more,
    )


def main(kind: str, folder: Path, seconds: float, script: str) -> None:
    there, jobs = place(folder, script, kind), (job(seconds=seconds),)
    if kind == "once":
        with obeying(lambda _: there.must_end.set()):
            print([done.result for done in run_due(there, jobs)], flush=True)
        return
    daemon = Daemon(there, jobs, lambda text: print(text, flush=True))
    with obeying(lambda _: daemon.stop()):
        print("ready", flush=True)
        daemon.run()
    print("ended", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)  # no process outlives its test for long
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
