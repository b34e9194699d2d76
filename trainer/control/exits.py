"""The ways out that do not pass through the loop: an end at once, because someone asked for it, and failures."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from trainer.contract.attempt import AttemptIdentity, tell
from trainer.contract.paths import RunPaths, newest_step
from trainer.contract.requests import Request, read_request
from trainer.control.lifecycle import HeartbeatWriter, write_end_marker, write_failure


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
