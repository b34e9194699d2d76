"""What one round of backup did, in lines and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tr11ops.base.units import counted, size

if TYPE_CHECKING:
    from tr11ops.backup.round_values import ArchiveTally, RoundPruning, RoundResult

SCHEMA = 1
FAULTS_SHOWN = 10


def lines(done: RoundResult, pruned: RoundPruning | None) -> Iterator[str]:
    """One line for what each archive got, then what is wrong."""
    for tally in done.tallies:
        if tally.busy:
            yield f"{tally.archive}: {tally.busy}; nothing was done here"
            continue
        yield f"{tally.archive}: {'; '.join(_done(tally))}"
        for copy in tally.damaged:
            more = ""
            if len(copy.damaged) > 1:
                more = f" and {len(copy.damaged) - 1} more"
            yield f"{tally.archive}: DAMAGED: {copy.what}: {copy.damaged[0]}{more}"
        for fault in tally.faults[:FAULTS_SHOWN]:
            yield f"{tally.archive}: FAILED: {fault}"
        if len(tally.faults) > FAULTS_SHOWN:
            yield f"{tally.archive}: and {counted(len(tally.faults) - FAULTS_SHOWN, 'more fault')}"
        if tally.is_stopped:
            yield f"{tally.archive}: stopped before it was done; the next round goes on from there"
    if pruned is not None:
        early = ""
        if pruned.ended_early:
            early = f"; {pruned.ended_early}"
        yield f"pruned: {counted(len(pruned.steps), 'checkpoint')}, {size(pruned.bytes)}{early}"


def _done(tally: ArchiveTally) -> Iterator[str]:
    if tally.copied:
        rate = ""
        if tally.copy_seconds > 0:
            rate = f", {size(tally.copied_bytes / tally.copy_seconds)}/s"
        word = "copy" if len(tally.copied) == 1 else "copies"
        yield f"{len(tally.copied)} {word} made and read back ({size(tally.copied_bytes)}{rate})"
    if tally.logs:
        yield counted(tally.logs, "log file")
    if tally.reread_files:
        files = counted(tally.reread_files, "file")
        yield f"{files} read again ({size(tally.reread_bytes)})"
    if not (tally.copied or tally.logs or tally.reread_files):
        yield "nothing was done" if tally.faults or tally.is_stopped else "nothing was due"


def value(done: RoundResult, pruned: RoundPruning | None, code: int) -> dict[str, Any]:
    """The round as JSON values."""
    return {
        "schema": SCHEMA,
        "exit_code": code,
        "archives": [
            {
                "archive": tally.archive,
                "address": tally.address or None,
                "copied": [
                    {
                        "step": copy.step,
                        "kind": copy.kind,
                        "location": copy.location,
                        "bytes": copy.bytes,
                    }
                    for copy in tally.copied
                ],
                "log_files": tally.logs,
                "reread_files": tally.reread_files,
                "reread_bytes": tally.reread_bytes,
                "damaged": [
                    {
                        "step": copy.step,
                        "kind": copy.kind,
                        "location": copy.location,
                        "files": list(copy.damaged),
                    }
                    for copy in tally.damaged
                ],
                "faults": tally.faults,
                "busy": tally.busy or None,
                "away": tally.is_away,
                "stopped": tally.is_stopped,
            }
            for tally in done.tallies
        ],
        "pruned": None if pruned is None else list(pruned.steps),
    }
