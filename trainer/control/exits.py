"""The ways out that do not pass through the loop: an end at once, because someone asked for it, and failures."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from trainer.config.card import CardError
from trainer.contract.attempt import AttemptIdentity, tell
from trainer.contract.errors import CheckpointError, DataError, LostWorkerError, NodeFilesError, NotFiniteError
from trainer.contract.paths import RunPaths, newest_step
from trainer.contract.requests import Request, read_request
from trainer.control.lifecycle import HeartbeatWriter, write_end_marker, write_failure
from trainer.parallel.agreement import LostRanksError, lost_a_rank


def end_now(
    paths: RunPaths, attempt: AttemptIdentity, heartbeat: HeartbeatWriter, rank: int, request: Request
) -> NoReturn:
    """End this rank at once, from any thread and without saving, because the request says just that."""
    heartbeat.end_now(request.id)
    if rank == 0:
        line = f"tr11: ended at once, without saving, as asked by {request}"
        tell(line)
        try:
            write_end_marker(
                paths,
                attempt,
                "kill-switch",
                restart=False,
                iteration=heartbeat.iteration,
                checkpoint_step=newest_step(paths),
                message=line,
            )
        except OSError as error:
            tell(f"tr11: the end could not be recorded: {error}", sys.stderr)
    os._exit(0)


def end_if_asked(
    kill_switch: Path, paths: RunPaths, attempt: AttemptIdentity, heartbeat: HeartbeatWriter, rank: int
) -> None:
    """After a failure: end as asked where an end at once was asked for, since the other ranks may have gone already."""
    request = read_request(kill_switch, "kill")
    if request is not None and request.kind == "kill-now":
        end_now(paths, attempt, heartbeat, rank=rank, request=request)


def record_failure(
    paths: RunPaths, attempt: AttemptIdentity, rank: int, error: BaseException, reason: str, iteration: int
) -> None:
    """Record a failure, and for a refusal the end marker too."""
    try:
        write_failure(paths, attempt, rank, error=error, iteration=iteration)
        if reason == "refused":
            write_end_marker(
                paths, attempt, reason, restart=False, iteration=iteration, checkpoint_step=None, message=str(error)
            )
    except OSError as problem:
        tell(f"tr11: the failure could not be recorded: {problem}", sys.stderr)


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
