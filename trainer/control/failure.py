"""What an exception that ends a training is: a refusal or a failure, and in which words."""

from __future__ import annotations

import traceback

from trainer.config.card import CardError
from trainer.contract.errors import CheckpointError, DataError, LostWorkerError, NodeFilesError, NotFiniteError
from trainer.parallel.agreement import LostRanksError, lost_a_rank

REFUSALS = (CardError, CheckpointError, DataError)
SAY_ALL = (NotFiniteError, LostRanksError)


def is_refusal(error: Exception, steps_done: int) -> bool:
    """Bad input, which the next try would meet again: not a rank or data worker that was lost, nor what follows steps.

    The difference matters: after a refusal no later array task trains.
    """
    if isinstance(error, LostWorkerError) or (isinstance(error, NodeFilesError) and error.node_without_access):
        return False
    return isinstance(error, REFUSALS) and steps_done == 0 and not lost_a_rank(error)


def failure_text(error: Exception) -> str:
    """Of a divergence, and of a check that did not end, the line says all; of any other failure the place counts."""
    return f"tr11: stopped: {error}" if isinstance(error, SAY_ALL) else traceback.format_exc().rstrip()
