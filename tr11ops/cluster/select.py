"""Which scheduler to use: `slurm`, `local`, or what this machine has."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

from tr11ops.cluster.base import Scheduler

SchedulerKind = Literal["slurm", "local", "auto"]

USUAL_CONFIGURATIONS = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/usr/local/etc/slurm.conf",
)


def has_slurm() -> bool:
    """Is Slurm installed and configured here? Inside a job of the embedded scheduler the answer is
    no.
    """
    if os.environ.get("TR11_SCHEDULER") == "local" or shutil.which("sbatch") is None:
        return False
    named = os.environ.get("SLURM_CONF")
    if named:
        return Path(named).is_file()
    return any(Path(path).is_file() for path in USUAL_CONFIGURATIONS)


def start_of_watchdog() -> str:
    """The words of tr11 that have a watchdog look from here: where nothing starts it by itself, in
    a terminal.
    """
    if shutil.which("crontab") is not None or has_slurm():
        return "cron install"
    return "cron run"


def choose_scheduler(kind: SchedulerKind) -> Scheduler:
    """The scheduler of that kind; `auto` is Slurm where it is configured, else the embedded one.

    Raises ValueError for another kind.
    """
    if kind not in {"slurm", "local", "auto"}:
        raise ValueError(f"scheduler {kind!r}: use slurm, local or auto")
    if kind == "slurm" or (kind == "auto" and has_slurm()):
        from tr11ops.cluster.slurm import SlurmScheduler

        return SlurmScheduler()
    from tr11ops.cluster.local import LocalScheduler

    return LocalScheduler()
