"""What the twin's faults do to a stand-in training, while they last: read by each worker from the
twin's own records.

The kinds are bad-sample, save-error, step-hang, data-wait, slow-steps, weights-drift, clock-ahead
and loss-spike of `tr11ops.twin.fault_kinds`.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tr11ops.base.errors import TwinError
from tr11ops.twin.fault_store import FaultStore, InjectedFault
from tr11ops.twin.plan import TwinFolders
from trainer.config.card import TrainerConfig
from trainer.contract.recovery import read_recovery

LOOK_SECONDS = 0.1  # between two looks at the records
BAD_SAMPLE_RANK = 1
# Of so many lines of a wild training these are not as before: a minority of each kind. The
# detectors learn from the last hundred lines, so what is wild on each line would become the usual
# within seconds where steps are fast.
WILD_PERIOD = 20
WILD_NORMS = (0, 1, 2)
ORDINARY_LOSSES = (4, 12)
WILD_LOSSES = (8,)
WILD_NORM = 500.0
WILD_LOSS = 40.0


class Ailments:
    """The faults of this worker's node, job and run, by the twin's records beside the slurm.conf in
    use.
    """

    def __init__(self, config: TrainerConfig, environment: Mapping[str, str]) -> None:
        self._config = config
        self._node = environment.get("SLURMD_NODENAME", "")
        self._job = environment.get("SLURM_JOB_ID", "")
        conf = environment.get("SLURM_CONF")
        self._store = FaultStore(TwinFolders(Path(conf).parent)) if conf else None
        self._run = str(config.paths.root.resolve())
        self._looked = -math.inf
        self._faults: tuple[InjectedFault, ...] = ()

    def step_hangs(self) -> bool:
        """Whether this worker's step does not end."""
        fault = self._find("step-hang", self._node)
        return fault is not None and fault.details.get("job") == self._job

    def data_are_missing(self) -> bool:
        """Whether this job has no data; the node's own name does not matter: all ranks wait
        together.
        """
        return any(
            fault.kind == "data-wait" and fault.details.get("job") == self._job
            for fault in self._active()
        )

    def slowness(self) -> float:
        """How many times as long a step takes here."""
        fault = self._find("slow-steps", self._node)
        if fault is not None:
            return float(fault.details["factor"])
        return 1.0

    def weights_drift(self) -> bool:
        """Whether this worker's weights are not those of the others after this step."""
        return self._find("weights-drift", self._node) is not None

    def refuse_save(self, folder: Path) -> None:
        """Raises OSError where this worker's node can write no checkpoint, as with a broken file
        system client.
        """
        if self._find("save-error", self._node) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    def die_of_bad_sample(self, iteration: int, rank: int, world: int) -> None:
        """The end of this process (SIGSEGV) where its run trains the iteration whose data are bad,
        on one rank alone.

        An iteration that is passed over is not trained, so its data harm no one.
        """
        fault = self._find("bad-sample", self._run)
        if fault is None or rank != min(BAD_SAMPLE_RANK, world - 1):
            return
        if iteration == int(fault.details["iteration"]) + 1:
            os.kill(os.getpid(), signal.SIGSEGV)

    def mistake_the_time(self) -> None:
        """From now on this process's time of day is what a fault of the node's clock makes of it."""
        right_time = time.time

        def wrong_time() -> float:
            fault = self._find("clock-ahead", self._node)
            return right_time() + (float(fault.details["seconds"]) if fault is not None else 0.0)

        time.time = wrong_time

    def numbers(self, iteration: int, loss: float, gradient_norm: float) -> tuple[float, float]:
        """Loss and gradient norm that an iteration logs: wild with the data, unless card or
        roll-back skips any.
        """
        fault = self._find("loss-spike", self._run)
        if fault is None:
            return loss, gradient_norm
        place = (iteration - int(fault.details["iteration"])) % WILD_PERIOD
        if iteration < int(fault.details["iteration"]) or self._skips_data():
            return loss, gradient_norm
        if place not in ORDINARY_LOSSES:
            loss = WILD_LOSS if place in WILD_LOSSES else math.nan
        return loss, WILD_NORM if place in WILD_NORMS else gradient_norm

    def _skips_data(self) -> bool:
        return bool(self._config.data.skip_ranges or read_recovery(self._config.paths).ranges)

    def _find(self, kind: str, target: str) -> InjectedFault | None:
        return next(
            (fault for fault in self._active() if fault.kind == kind and fault.target == target),
            None,
        )

    def _active(self) -> tuple[InjectedFault, ...]:
        """The faults that are wholly there, as seen a moment ago; as before where the records
        cannot be read.
        """
        now = time.monotonic()
        if self._store is not None and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            with suppress(TwinError):
                self._faults = tuple(fault for fault in self._store.active() if fault.is_complete)
        return self._faults
