"""What an exception that ends a training is: a refusal or a failure, and in which words."""

from __future__ import annotations

import traceback

from torch.distributed import DistError

from trainer.config.card import CardError
from trainer.contract.errors import (
    CheckpointError,
    DataError,
    LostWorkerError,
    NodeFilesError,
    NotFiniteError,
)
from trainer.parallel.agreement import LostRanksError, lost_a_rank

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


def is_of_others(error: Exception) -> bool:
    """Whether it may say no more than that another rank has gone: gloo's errors have no type of
    their own.
    """
    return (
        type(error) is RuntimeError
        or isinstance(error, DistError | LostRanksError)
        or lost_a_rank(error)
    )


def failure_text(error: Exception) -> str:
    """What people read of a failure, and `tr11 diagnose`: of bad input the kind too, as a traceback
    ends with it.
    """
    if not says_all(error):
        return traceback.format_exc().rstrip()
    if isinstance(error, REFUSALS):
        return f"tr11: stopped: {type(error).__name__}: {error}"
    return f"tr11: stopped: {error}"
