"""One worker's process: the training from its start to its exit status, whatever happens in between."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from trainer.checkpoint.agreement import lost_a_rank
from trainer.checkpoint.catalogue import CheckpointError
from trainer.config import CardError, TrainerConfig
from trainer.data.errors import DataError
from trainer.flight_recorder import record_path, write_record
from trainer.lease import Lease
from trainer.leaving import end_if_asked, leave_word
from trainer.lifecycle import Attempt, HeartbeatWriter, SignalFlag, exit_code, exit_process, tell
from trainer.loop import Trainer
from trainer.spikes import NotFiniteError

REFUSALS = (CardError, CheckpointError, DataError)


def run(
    config: TrainerConfig,
    card: Path,
    attempt: Attempt,
    heartbeat: HeartbeatWriter,
    flag: SignalFlag,
    start_time: float,
    lease: Lease | None,
) -> NoReturn:
    """Train until something says stop, leave an end marker, and end this process with its exit status.

    `start_time`: of the monotonic clock, when this process began. `lease`: of rank 0, where it was begun.
    """
    rank = int(os.environ.get("RANK", "0"))
    trainer = Trainer(config, card, attempt, heartbeat, flag, start_time, lease)
    try:
        reason = trainer.train()
    except Exception as error:  # whatever it is, it is recorded before the process goes
        end_if_asked(config.kill_switch, config.paths, attempt, heartbeat, rank)
        reason = "refused" if is_refusal(error, trainer.steps_done) else "error"
        tell(f"tr11: refused: {error}" if reason == "refused" else _words(error), sys.stderr)
        leave_word(config.paths, attempt, rank, error, reason, trainer.progress.iteration)
        if isinstance(error, RuntimeError) or lost_a_rank(error):
            _keep_operations(record_path(config.paths, attempt.job_id, attempt.launch, rank))
    heartbeat.beat("ended", trainer.progress.iteration)
    exit_process(exit_code(reason), trainer.close)


def _keep_operations(path: Path) -> None:
    """What this rank waited for, beside its failure: that is in place first."""
    try:
        write_record(path)
    except OSError as problem:
        tell(f"tr11: the operations between the ranks could not be kept: {problem}", sys.stderr)


def _words(error: Exception) -> str:
    """A divergence is the training's, and its line says all; of any other failure the place counts."""
    return f"tr11: stopped: {error}" if isinstance(error, NotFiniteError) else traceback.format_exc().rstrip()


def is_refusal(error: Exception, steps_done: int) -> bool:
    """Bad input, which the next try would meet again: not a rank that was lost on the way, nor what came after steps.

    The difference matters: after a refusal no later array task trains.
    """
    return isinstance(error, REFUSALS) and steps_done == 0 and not lost_a_rank(error)
