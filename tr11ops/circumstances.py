"""Reads what the watchdog's policy must know beside the snapshot: pause, lease, how attempts ended, who is blamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr11ops.actions import Blame, Circumstances, Ending, Holder, Limits
from tr11ops.agent.records import SUPERSEDED, AttemptVerdict
from tr11ops.agent.recurrence import without_recurring
from tr11ops.agent.traces import node_fault
from tr11ops.evidence import observed
from tr11ops.exclusions import AUTOMATIC_OWNER, INCLUDED
from tr11ops.journal import Ledger
from tr11ops.launch.surroundings import read_holder, read_pause
from tr11ops.rundir import RunDirectory
from tr11ops.snapshot import Unknown, known
from tr11ops.stacks import has_stacks
from trainer.contract import read_json

if TYPE_CHECKING:
    from tr11ops.runcard import RunCard

ATTEMPTS_LOOKED_AT = 8
ENDS_IN_ORDER = frozenset({"exit-duration", "exit-interval", "signal"})  # nothing but a switch holds what waits then
SWITCHES = frozenset({"kill-switch", "pause"})  # ends of attempts that hold what waits until somebody resumes


def limits_of(card: RunCard) -> Limits:
    """What the card allows the watchdog."""
    return Limits(
        resubmit_array=card.watch.resubmit_array,
        resubmissions=card.watch.resubmissions_per_day,
        exclusions=card.watch.exclusions_per_day,
        cancellations=card.watch.cancellations_per_day,
    )


def read_circumstances(directory: RunDirectory, ledger: Ledger, user: str, now: float) -> Circumstances:
    """Look once; what cannot be read is Unknown, and then nothing is done."""
    holder = observed(lambda: _holder(directory, now))
    verdicts = observed(lambda: tuple(_verdicts(directory)))
    return Circumstances(
        user=user,
        is_root=os.geteuid() == 0,
        pause=observed(lambda: read_pause(directory) or ""),
        holder=holder,
        endings=verdicts if isinstance(verdicts, Unknown) else tuple(_ending(one) for one in verdicts),
        blames=observed(lambda: tuple(_blames(directory))),
        releasable=_releasable(directory, known(verdicts, ())),
        cleared=tuple(
            (str(entry.data.get("node", "")), entry.time) for entry in ledger.entries if entry.kind == INCLUDED
        ),
        stacks=frozenset(_with_stacks(directory)),
    )


def _holder(directory: RunDirectory, now: float) -> Holder | None:
    found = read_holder(directory.paths, now)
    return None if found is None else Holder(found.job_id, found.text)


def _newest_attempts(directory: RunDirectory) -> list[Path]:
    return [directory.paths.attempt(name) for name in reversed(directory.attempt_ids()[-ATTEMPTS_LOOKED_AT:])]


def _verdicts(directory: RunDirectory) -> Iterator[AttemptVerdict]:
    for folder in _newest_attempts(directory):
        verdict = AttemptVerdict.read(folder)
        if verdict is not None and verdict.reason != SUPERSEDED:
            yield verdict


def _ending(verdict: AttemptVerdict) -> Ending:
    return Ending(
        verdict.job_id, verdict.time, verdict.restart, verdict.message, verdict.hold_failed, tuple(verdict.held)
    )


def _blames(directory: RunDirectory) -> Iterator[Blame]:
    """Raises OSError or ValueError when a record of a launch is there and cannot be read.

    A fault that came back elsewhere is no node's: its launches blame nobody.
    """
    records: list[tuple[str, dict[str, Any]]] = [
        (folder.name, read_json(path) or {})
        for folder in _newest_attempts(directory)
        for path in sorted((folder / "launches").glob("*.json"))
    ]
    faults = [fault for name, record in records if (fault := node_fault(name, record)) is not None]
    recurring = set(faults) - set(without_recurring(faults))
    for name, record in records:
        confidence, end = record.get("confidence"), record.get("end")
        if record.get("cause") != "node" or not isinstance(confidence, int | float):
            continue
        if node_fault(name, record) in recurring:
            continue
        for node in record.get("blamed") or ():
            why, lines = str(record.get("summary", "")), tuple(map(str, record.get("evidence") or ()))
            when = float(end) if isinstance(end, int | float) else float(record.get("start") or 0.0)
            yield Blame(str(node), float(confidence), why, name, when, lines)


def _releasable(directory: RunDirectory, verdicts: tuple[AttemptVerdict, ...]) -> frozenset[str]:
    """Numbers that were held for a kill switch or a pause alone: by a command, or by an attempt that it ended."""
    record = known(observed(lambda: read_json(directory.paths.requests / "holds.json")), None) or {}
    entries = [entry for entry in record.get("holds", ()) if isinstance(entry, dict)]
    by_switch = {str(entry.get("job")) for entry in entries if entry.get("switch") in SWITCHES}
    commands = {str(entry.get("job")) for entry in entries if entry.get("who") != AUTOMATIC_OWNER}
    ours = {str(entry.get("job")) for entry in entries if entry.get("who") == AUTOMATIC_OWNER} - by_switch
    switched = {number for verdict in verdicts if _is_for_switch(verdict) for number in verdict.held}
    faulty = {number for verdict in verdicts if not _is_for_switch(verdict) for number in verdict.held}
    return frozenset((commands | by_switch | switched) - faulty - ours)


def _is_for_switch(verdict: AttemptVerdict) -> bool:
    """Whether an attempt held what waited for a kill switch or a pause alone.

    After an end in order nothing else holds: verdicts that are older than `held_for` say it by that.
    """
    return verdict.held_for in SWITCHES or verdict.reason in SWITCHES | ENDS_IN_ORDER


def _with_stacks(directory: RunDirectory) -> Iterator[str]:
    for folder in known(observed(lambda: _newest_attempts(directory)), []):
        if known(observed(lambda name=folder.name: has_stacks(directory.paths, name)), False):  # type: ignore[misc]
            yield folder.name
