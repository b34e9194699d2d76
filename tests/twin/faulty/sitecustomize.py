"""Makes the stand-in training really ill, while it runs and for as long as a file says so; read by every Python at start.

Only a process of a stand-in training whose environment names the file is touched. The file is JSON:

hangs: {node: attempt}; a step of that attempt's number never ends there, and no one hears of it
waits: an attempt's number; it waits for its data from the next step on
scale: what is logged of a step's seconds is so many times as long, as in a training of full size
slow: {node: factor}; a step takes so many times longer there
ahead: {node: seconds}; the clock there is ahead
spike: an iteration; from it on loss and gradient are wild, unless the card passes over the data
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "TR11_TEST_FAULTS"
MODULE = "tr11ops.twin.stand_in"
# Of so many lines of a wild training these are not as before: a minority of each kind. The detectors learn from the last
# hundred lines, so what is wild on each line would become the usual within seconds where steps are fast.
WILD_PERIOD, WILD_NORMS, ORDINARY_LOSSES, WILD_LOSSES = 20, (0, 1, 2), (4, 12), (8,)


def faults() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def mistake_the_time() -> None:
    node, right_time = os.environ.get("SLURMD_NODENAME", ""), time.time
    time.time = lambda: right_time() + float(faults().get("ahead", {}).get(node, 0.0))


def passes_over(config: Any) -> bool:
    """Whether card or roll-backs pass over data."""
    from trainer.contract.recovery import read_recovery

    return bool(config.data.skip_ranges or read_recovery(config.paths).ranges)


def wrap(worker: Any) -> None:
    """Put the faults between the stand-in and its own functions."""
    node = os.environ.get("SLURMD_NODENAME", "")
    agree, log, let_pass = worker.Switches.agree, worker.StandIn._log, worker.StandIn._pass
    record = worker.StepRecord

    def agree_or_wait(self: Any, iteration: int, trained: bool, save_is_due: bool = False, waits: bool = False) -> Any:
        told = faults().get("waits") == os.environ.get("SLURM_JOB_ID")
        return agree(self, iteration, trained, save_is_due, waits or (told and trained))

    def pass_slowly(self: Any, seconds: float, phase: str) -> None:
        while phase == "training" and faults().get("hangs", {}).get(node) == os.environ.get("SLURM_JOB_ID"):
            time.sleep(0.1)
        factor = float(faults().get("slow", {}).get(node, 1.0)) if phase == "training" else 1.0
        let_pass(self, seconds * factor, phase)

    def log_wildly(self: Any, total: int, samples: int, length: int, loss: float, seconds: float) -> None:
        first = faults().get("spike")
        wild = first is not None and self.progress.iteration >= first and not passes_over(self.config)
        place = (self.progress.iteration - first) % WILD_PERIOD if wild else None
        if wild and place not in ORDINARY_LOSSES:
            loss = 40.0 if place in WILD_LOSSES else math.nan
        norm = {"grad_norm": 500.0} if place in WILD_NORMS else {}
        worker.StepRecord = lambda **values: record(**(values | norm))
        steady = max(0.1, round(seconds, 1))  # without the noise of a machine that others use too
        log(self, total, samples, length, loss, steady * float(faults().get("scale", 1.0)))

    worker.Switches.agree, worker.StandIn._pass, worker.StandIn._log = agree_or_wait, pass_slowly, log_wildly


if os.environ.get(VARIABLE) and MODULE in sys.orig_argv:
    mistake_the_time()  # before others have taken the function along
    from tr11ops.twin.stand_in import worker as stand_in

    wrap(stand_in)
