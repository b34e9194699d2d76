"""The stacks of a hanging job's workers, as the watchdog keeps them, and who stood out.

state/attempts/JOB/stacks/NODE.txt       every worker of the node
state/attempts/JOB/stacks/verdict.txt    who stood out, for people
state/attempts/JOB/stacks/verdict.json   the same, for tr11
"""

from __future__ import annotations

from pathlib import Path

from tr11ops.base.newer import replace_json
from trainer.contract.documents import document, read_record
from trainer.contract.paths import RunPaths
from trainer.contract.record import Finite, Record

SCHEMA = 1


class KeptStacks(Record, rename={"is_certain": "certain"}):
    """One look at the workers of an attempt, at `time` (seconds since the epoch, by the run's
    clock).

    `sentence` is for people. `ranks` and `nodes` hold the others up; none where no one stood out.
    `is_certain`: one look is enough to say so. A node that did not answer is among `nodes` without
    ranks.
    """

    job_id: str
    time: Finite
    sentence: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    is_certain: bool = False


def stacks_folder(paths: RunPaths, job_id: str) -> Path:
    """Where the stacks of an attempt are kept."""
    return paths.attempt(job_id) / "stacks"


def write_kept_stacks(paths: RunPaths, kept: KeptStacks) -> None:
    """Raises OSError."""
    value = {"schema": SCHEMA, **document(kept)}
    replace_json(stacks_folder(paths, kept.job_id) / "verdict.json", value, SCHEMA)


def read_kept_stacks(paths: RunPaths, job_id: str) -> KeptStacks | None:
    """What was kept last of an attempt; None where nothing was. Raises OSError and ValueError."""
    path = stacks_folder(paths, job_id) / "verdict.json"
    return read_record(KeptStacks, path, "a record of who held a hang up")
