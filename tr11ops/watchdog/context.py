"""Reads what the watchdog's policy must know beside the snapshot: pause, lease, how attempts ended,
who is blamed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tr11ops.agent.recurrence import all_failing_everywhere, rests_on, without_recurring
from tr11ops.agent.traces import node_fault, read_launch_checks
from tr11ops.base.observed import observed
from tr11ops.observe.lease import read_holder
from tr11ops.rundir.attempts import SUPERSEDED, AttemptVerdict
from tr11ops.rundir.hold_store import read_holds, releasable
from tr11ops.rundir.kill_switch import read_pause
from tr11ops.rundir.paths import RunDirectory
from tr11ops.watchdog.actions import Blame, PolicyContext
from trainer.contract.state_file import read_json

ATTEMPTS_LOOKED_AT = 8


def read_policy_context(
    directory: RunDirectory, user: str, now: float, may_act: bool = True
) -> PolicyContext:
    """Look once; what cannot be read is Unknown, and then nothing is done."""
    return PolicyContext(
        user=user,
        is_root=os.geteuid() == 0,
        may_act=may_act,
        pause=observed(lambda: read_pause(directory) or ""),
        holder=observed(lambda: read_holder(directory.paths, now)),
        endings=observed(lambda: tuple(_verdicts(directory))),
        blames=observed(lambda: tuple(_blames(directory))),
        releasable=releasable(read_holds(directory)),
    )


def _newest_attempts(directory: RunDirectory) -> list[Path]:
    return [
        directory.paths.attempt(name)
        for name in reversed(directory.attempt_ids()[-ATTEMPTS_LOOKED_AT:])
    ]


def _verdicts(directory: RunDirectory) -> Iterator[AttemptVerdict]:
    for folder in _newest_attempts(directory):
        verdict = AttemptVerdict.read(folder)
        if verdict is not None and verdict.reason != SUPERSEDED:
            yield verdict


def _blames(directory: RunDirectory) -> Iterator[Blame]:
    """Raises OSError or ValueError when a record of a launch is there and cannot be read.

    A fault that came back elsewhere is no node's, nor is a health check that fails everywhere:
    these blame no one.
    """
    records: list[tuple[str, dict[str, Any]]] = [
        (folder.name, read_json(path) or {})
        for folder in _newest_attempts(directory)
        for path in sorted((folder / "launches").glob("*.json"))
    ]
    faults = [fault for name, record in records if (fault := node_fault(name, record)) is not None]
    recurring = set(faults) - set(without_recurring(faults))
    failing = all_failing_everywhere(read_launch_checks(_newest_attempts(directory)))
    for name, record in records:
        confidence, end = record.get("confidence"), record.get("end")
        if record.get("cause") != "node" or not isinstance(confidence, int | float):
            continue
        if node_fault(name, record) in recurring:
            continue
        why, lines = str(record.get("summary", "")), tuple(map(str, record.get("evidence") or ()))
        if isinstance(end, int | float):
            when = float(end)
        else:
            when = float(record.get("start") or 0.0)
        if rests_on(failing, lines, when):
            continue
        for node in record.get("blamed") or ():
            yield Blame(
                str(node), float(confidence), why=why, job_id=name, time=when, evidence=lines
            )
