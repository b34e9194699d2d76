"""Reads what the watchdog's policy must know beside the snapshot: pause, lease, how attempts ended,
who is blamed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tr11ops.agent.recurrence import (
    NodeFault,
    all_failing_everywhere,
    rests_on,
    without_recurring,
)
from tr11ops.base.observed import observed
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.launch.margins import read_launches
from tr11ops.observe.lease import read_holder
from tr11ops.rundir.attempts import SUPERSEDED, AttemptVerdict, LaunchRecord
from tr11ops.rundir.exclusions import read_version
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
        suspects=observed(lambda: read_version(directory.exclusions).suspects),
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
    folders = _newest_attempts(directory)
    launches = [
        (folder.name, LaunchRecord.of(read_json(path) or {}))
        for folder in folders
        for path in sorted((folder / "launches").glob("*.json"))
    ]
    faults = [NodeFault.of(job_id, launch) for job_id, launch in launches]
    own = set(without_recurring([fault for fault in faults if fault.nodes]))
    failing = all_failing_everywhere(read_launches(folders))
    for fault, (job_id, launch) in zip(faults, launches, strict=True):
        if launch.cause != Kind.NODE or launch.confidence is None or fault not in own:
            continue
        when = launch.start if launch.end is None else launch.end
        if rests_on(failing, launch.evidence, when):
            continue
        for node in launch.blamed:
            yield Blame(
                node,
                launch.confidence,
                why=launch.summary,
                job_id=job_id,
                time=when,
                evidence=launch.evidence,
            )
