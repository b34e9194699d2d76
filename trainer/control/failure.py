"""What an exception that ends a training is: a refusal or a failure, and in which words. Without
torch: the twin's stand-in worker ends by it too.
"""

from __future__ import annotations

import sys
import traceback

from trainer.config.card import CardError
from trainer.contract.attempt import tell
from trainer.contract.errors import (
    CheckpointError,
    DataError,
    LostRanksError,
    LostWorkerError,
    NodeFilesError,
    NotFiniteError,
    lost_a_rank,
)
from trainer.control.exits import record_failure, refusal_elsewhere
from trainer.control.lifecycle import Worker

REFUSALS = (CardError, CheckpointError, DataError)


def is_refusal(error: Exception, steps_done: int) -> bool:
    """Bad input, which the next try would meet again: not a rank or data worker that was lost, nor
    what follows steps.

    The difference matters: after a refusal no later array task trains.
    """
    if isinstance(error, LostWorkerError) or (
        isinstance(error, NodeFilesError) and error.node_without_access
    ):
        return False
    return isinstance(error, REFUSALS) and steps_done == 0 and not lost_a_rank(error)


def says_all(error: Exception) -> bool:
    """Whether one line says all there is to know; of any other failure the place counts.

    Bad input does, a divergence, and a check that did not end.
    """
    if isinstance(error, NotFiniteError | LostRanksError):
        return True
    return isinstance(error, REFUSALS) and not lost_a_rank(error)


def failure_text(error: Exception) -> str:
    """What people read of a failure, and `tr11 diagnose`: of bad input the kind too, as a traceback
    ends with it.
    """
    if not says_all(error):
        return traceback.format_exc().rstrip()
    if isinstance(error, REFUSALS):
        return f"tr11: stopped: {type(error).__name__}: {error}"
    return f"tr11: stopped: {error}"


def end_with_another(worker: Worker, *, error: Exception, iteration: int) -> str | None:
    """Where another rank of this launch has refused or stopped with a line that says all: say and
    record that this one only lost it. Returns the end reason; None where there is no such rank.
    """
    other = refusal_elsewhere(worker)
    if other is None:
        return None
    reason, line = other
    tell(line, sys.stderr)
    record_failure(worker, error, "error", iteration)
    return reason


def end_by_itself(worker: Worker, *, error: Exception, steps_done: int, iteration: int) -> str:
    """Say and record why this rank ends, in an `except`; returns the end reason."""
    if is_refusal(error, steps_done):
        reason, line = "refused", f"tr11: refused: {error}"
    else:
        reason, line = "error", failure_text(error)
    tell(line, sys.stderr)
    refusal = reason if says_all(error) else ""
    record_failure(worker, error, reason, iteration, refusal=refusal)
    return reason
