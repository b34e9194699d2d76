"""The ways out that do not pass through the loop: an end at once, because someone asked for it, and
failures.
"""

from __future__ import annotations

import operator
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

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
from trainer.contract.paths import newest_step
from trainer.contract.record import JsonObject, Record
from trainer.contract.requests import Request, read_request
from trainer.contract.state_file import read_json
from trainer.control.lifecycle import StopDecision, Worker, write_end_marker, write_failure

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
        reason = "refused"
        line = f"tr11: refused: {error}"
    else:
        reason = "error"
        line = failure_text(error)
    tell(line, sys.stderr)
    refusal = reason if says_all(error) else ""
    record_failure(worker, error, reason, iteration, refusal=refusal)
    return reason


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
    paths = worker.paths
    attempt = worker.attempt
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
    launch = worker.attempt.launch
    rank = worker.rank
    folder = worker.paths.attempt(worker.attempt.job_id) / "failures"
    for path in folder.glob("rank-*.json"):
        try:
            found = read_json(path) or {}
        except (OSError, ValueError):  # of no use here; the node agent tells of it
            continue
        if found.get("refusal") and found["launch"] == launch and found["rank"] != rank:
            yield found


# saves in a row: one may be a hiccup, and two are facts that do not depend on each other
ENOUGH = 2


class FailedSaves(Record):
    """The saves in a row that one node alone could not write; others wrote to the same folder at
    the same time.

    `node` is "" where the last save did not fail, or not on one node alone. `why`: the last fault.
    """

    node: str = ""
    steps: tuple[int, ...] = ()
    others: int = 0
    why: str = ""

    def after(self, step: int, fault: CheckpointError) -> FailedSaves:
        """With one more failed save."""
        if not isinstance(fault, NodeFilesError) or len(fault.failed) != 1:
            return FailedSaves()
        [node] = fault.failed
        before = self.steps if node == self.node else ()
        return FailedSaves(node, (*before, step), len(fault.served), str(fault))

    @property
    def unable(self) -> str:
        """The node with which no save comes about; "" as long as that is not certain."""
        if len(self.steps) >= ENOUGH:
            return self.node
        return ""

    def event(self, step: int, fault: CheckpointError) -> JsonObject:
        """What `metrics.jsonl` keeps of the save of `step`, which failed. `node`: where alone; ""
        where not on one.
        """
        return {
            "step": step,
            "why": str(fault),
            "node": self.node,
            "said": str(self) if self.node else "",
        }

    def line(self, saved_step: int | None) -> str:
        """Why the training ends, in one line."""
        if saved_step is None:
            lost = "nothing was saved"
        else:
            lost = f"all steps after {saved_step} are lost"
        return f"{self}, so {lost}: {self.why}"

    def __str__(self) -> str:
        steps = " and ".join(map(str, self.steps))
        if self.others == 1:
            wrote = "1 other node"
        else:
            wrote = f"{self.others} other nodes"
        return f"{self.node} alone could not write the save of step {steps}, to which {wrote} wrote"
