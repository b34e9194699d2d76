"""What a health job runs on a node: the node agent's checks, and nothing else.

python -m tr11ops.nodes.health_job REQUEST     REQUEST: one JSON object; prints one line, the results
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tr11ops.base.processes import adopt_orphans, end_descendants
from tr11ops.health.base import CheckResult, NodeRequirements, System
from tr11ops.health.host import exported_folder
from tr11ops.health.registry import chosen, run_checks
from trainer.contract.documents import document, record_of
from trainer.contract.record import JsonObject, Record

MARK = "tr11-health-results:"  # before the results, where other programs may write lines too
# these judge a node on which nothing runs yet
OF_AN_EMPTY_NODE = ("shared-memory", "memory", "leftovers")


class HealthRequest(Record):
    """What is to be checked on one node: plain values, which travel as JSON.

    `inside` is the job in which the check runs beside the training, or empty. `sweeps`: whether
    stale files of ours may be removed on the way.
    """

    node: str
    inside: str = ""
    gpus: int = 0
    workers: int = 1
    folder: str | None = None
    controller_time: float | None = None
    seconds: float = 30.0
    scripts: tuple[str | JsonObject, ...] = ()
    skip: tuple[str, ...] = ()
    sweeps: bool = True


def check_here(request: Mapping[str, Any]) -> list[JsonObject]:
    """Run the checks of a HealthRequest (as a mapping) on this node; the results as plain values."""
    asked = record_of(HealthRequest, request)
    wanted = NodeRequirements(
        node=asked.node,
        job_id=asked.inside,
        gpus=asked.gpus,
        workers=asked.workers,
        folder=Path(asked.folder) if asked.folder else None,
        temporary=exported_folder(os.environ),
        controller_time=asked.controller_time,
        seconds=asked.seconds,
        sweeps=asked.sweeps,
    )
    if asked.inside:
        skip = (*asked.skip, *OF_AN_EMPTY_NODE)
    else:
        skip = asked.skip
    return [
        document(result)
        for result in run_checks(chosen(wanted, asked.scripts, skip), System(), wanted)
    ]


def results_of(values: list[Any]) -> tuple[CheckResult, ...]:
    """The results from `check_here`'s values. Raises ValueError when they are something else."""
    try:
        return tuple(record_of(CheckResult, value) for value in values)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"no results of health checks: {error}") from None


def main(arguments: list[str]) -> int:
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        print(MARK + json.dumps(check_here(json.loads(arguments[0]))), flush=True)
    finally:
        end_descendants(grace_seconds=1.0)  # a check script that hangs has a session of its own
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
