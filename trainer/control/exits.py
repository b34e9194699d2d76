"""The ways out that do not pass through the loop: an end at once, because someone asked for it, and
failures.
"""

from __future__ import annotations

import operator
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from trainer.contract.attempt import tell
from trainer.contract.paths import newest_step
from trainer.contract.requests import Request, read_request
from trainer.contract.state_file import read_json
from trainer.control.lifecycle import StopDecision, Worker, write_end_marker, write_failure

LOOK_AGAIN_SECONDS = (0.1, 0.4, 1.5)


def end_now(worker: Worker, request: Request) -> NoReturn:
    """End this rank at once, from any thread and without saving, because the request says just
    that.
    """
    worker.heartbeat.end_now(request.id)
    if worker.rank == 0:
        line = f"tr11: ended at once, without saving, as asked by {request}"
        tell(line)
        try:
            write_end_marker(
                worker.paths,
                worker.attempt,
                StopDecision("kill-switch", False, line),
                iteration=worker.heartbeat.iteration,
                checkpoint_step=newest_step(worker.paths),
            )
        except OSError as error:
            tell(f"tr11: the end could not be recorded: {error}", sys.stderr)
    os._exit(0)


def record_end(
    worker: Worker, decision: StopDecision, *, iteration: int, checkpoint_step: int | None
) -> str:
    """Leave the end marker, on one rank, after the last save; returns the end reason.

    Where it cannot be written (a full or unmounted file system) that is said, and the end is an
    error: exit status 0 without a marker would be taken for a death without a word.
    """
    try:
        write_end_marker(
            worker.paths,
            worker.attempt,
            decision,
            iteration=iteration,
            checkpoint_step=checkpoint_step,
        )
    except OSError as error:
        line = f"tr11: stopped: the end ({decision.reason}) could not be recorded: {error}"
        tell(line, sys.stderr)
        return "error"
    return decision.reason


def end_if_asked(worker: Worker) -> None:
    """After a failure: end as asked where an end at once was asked for, since the other ranks may
    have gone already.
    """
    request = read_request(worker.config.kill_switch, "kill")
    if request is not None and request.kind == "kill-now":
        end_now(worker, request)


def record_failure(
    worker: Worker, error: BaseException, reason: str, iteration: int, refusal: str = ""
) -> None:
    """Record a failure, and for a refusal the end marker too. `refusal` is as in `write_failure`."""
    paths, attempt = worker.paths, worker.attempt
    try:
        write_failure(
            paths, attempt, worker.rank, error=error, iteration=iteration, refusal=refusal
        )
        if reason == "refused":
            decision = StopDecision(reason, False, str(error))
            write_end_marker(paths, attempt, decision, iteration, checkpoint_step=None)
    except OSError as problem:
        tell(f"tr11: the failure could not be recorded: {problem}", sys.stderr)


def refusal_elsewhere(worker: Worker) -> tuple[str, str] | None:
    """The end reason of another rank of this launch for which one line of its own says all, and a
    line that says so.

    For a rank that has lost others. Who refuses writes it before it goes; on a shared file system
    it may be seen a moment later. Of several the first is meant.
    """
    for patience in (*LOOK_AGAIN_SECONDS, None):
        found = list(_refusals(worker))
        if found:
            first = min(found, key=operator.itemgetter("time"))
            word = "refused" if first["refusal"] == "refused" else "stopped"
            where = f"rank {first['rank']} on {first['host']}"
            return first[
                "refusal"
            ], f"tr11: ended with {where}, which {word}: its own line says why"
        if patience is not None:
            time.sleep(patience)
    return None


def _refusals(worker: Worker) -> Iterator[dict[str, Any]]:
    launch, rank = worker.attempt.launch, worker.rank
    folder = worker.paths.attempt(worker.attempt.job_id) / "failures"
    for path in folder.glob("rank-*.json"):
        try:
            found = read_json(path) or {}
        except (OSError, ValueError):  # of no use here; the node agent tells of it
            continue
        if found.get("refusal") and found["launch"] == launch and found["rank"] != rank:
            yield found
