"""What a drill has found of the way in which a foreign trainer is asked to stop, for the command that it
was found of: `state/drills/stop-DIGEST.json`. A command that has changed has no proof.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Literal

from tr11ops.base.observed import replace_json
from tr11ops.dialects.settings import TrainerSettings
from trainer.contract.documents import document, read_record
from trainer.contract.files import make_shared
from trainer.contract.paths import RunPaths
from trainer.contract.record import Count, Finite, Record

FOLDER = "drills"
SCHEMA = 1
LARGEST_SCRIPT = 4 << 20  # bytes; what is larger is no script
Result = Literal["under way", "proved", "failed", "unclear"]


class StopProof(Record):
    """What the newest drill of a command found. `unclear`: it neither saved nor failed to in a way that
    tells; `why` says it.

    `iteration`: the step at which it was asked; `checkpoint`, `checkpoint_step`: what it saved then;
    `went_on_at`: the first step of the launch that followed, `next_job` its attempt. The times are
    seconds since it was asked for; None: it never came to that.
    """

    dialect: str
    how: str
    command: str
    time: Finite
    result: Result = "under way"
    why: str = ""
    job_id: str = ""
    iteration: Count | None = None
    signalled_after: Finite | None = None
    checkpoint: str = ""
    checkpoint_step: Count | None = None
    saved_after: Finite | None = None
    left_after: Finite | None = None
    next_job: str = ""
    went_on_at: Count | None = None
    schema: int = SCHEMA

    @property
    def is_proved(self) -> bool:
        return self.result == "proved"


def stop_digest(settings: TrainerSettings, ranks: int) -> str:
    """What a proof holds for: the command with its script as it is now, where and how it is started, on
    how many ranks, and how it is asked.
    """
    dialect, rule = settings.dialect, settings.dialect.stop
    said = {
        "dialect": dialect.name,
        "stop": None if rule is None else document(rule),
        "start": settings.start,
        "command": settings.command,
        "python": settings.python,
        "directory": settings.directory,
        "environment": dict(settings.environment),
        "unset": settings.unset,
        "first": settings.first,
        "resume": settings.resume,
        "scripts": [_content(Path(settings.directory, word)) for word in settings.words],
        "ranks": ranks,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _content(path: Path) -> str:
    """The digest of a script that the command names; "" for any other word, and what cannot be read."""
    if path.suffix not in (".py", ".sh"):
        return ""
    with suppress(OSError), path.open("rb") as stream:
        data = stream.read(LARGEST_SCRIPT + 1)
        if len(data) <= LARGEST_SCRIPT:
            return hashlib.sha256(data).hexdigest()
    return ""


def proof_path(paths: RunPaths, digest: str) -> Path:
    """Where the proof of a command lies."""
    return paths.state / FOLDER / f"stop-{digest}.json"


def read_proof(paths: RunPaths, digest: str) -> StopProof | None:
    """What the newest drill of the command found; None where there was none, or its record cannot be
    read: what is not seen proves nothing.
    """
    try:
        found = read_record(StopProof, proof_path(paths, digest), "the record of a drill")
    except (OSError, ValueError):
        return None
    if found is None or found.command != digest:
        return None
    return found


def write_proof(paths: RunPaths, proof: StopProof) -> Path:
    """Keep what a drill found; returns where. Raises OSError, and NewerFileError where a newer tr11 did."""
    path = proof_path(paths, proof.command)
    make_shared(path.parent)
    replace_json(path, document(proof), SCHEMA)
    return path
