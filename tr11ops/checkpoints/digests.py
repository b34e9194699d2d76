"""What was found when all bytes of a checkpoint were last read: one small file each, replaced whole.

    state/checkpoints/VARIANT/digests/global_stepN.json

A record counts only for the checkpoint it was made of: a step that was trained anew has another identity.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tr11ops.rundir import RunDirectory, make_shared
from tr11ops.typed_fields import typed_fields
from trainer.contract import checkpoint_name, read_json, write_json

SCHEMA = 1
BAD_KEPT = 200


@dataclass(frozen=True)
class DigestRecord:
    """One whole reading. `bad`: one line for each file that differs; `time`: its end, seconds since the epoch."""

    step: int
    identity: str
    time: float
    files: int
    bytes: int
    bad: tuple[str, ...] = ()
    who: str = ""
    host: str = ""
    schema: int = SCHEMA

    @property
    def is_fine(self) -> bool:
        return not self.bad


def read_digest(directory: RunDirectory, step: int, identity: str) -> DigestRecord | None:
    """The record of this very checkpoint; None when it was never read whole. Raises OSError or ValueError."""
    path = directory.paths.digest_record(checkpoint_name(step))
    value = read_json(path)
    if value is None:
        return None
    try:
        record = DigestRecord(**typed_fields(DigestRecord, value))
    except TypeError as error:
        raise ValueError(f"{path} is not a record of digests: {error}") from None
    return record if identity and record.identity == identity else None


def write_digest(directory: RunDirectory, record: DigestRecord) -> None:
    """Put a reading on record. Raises OSError."""
    path = directory.paths.digest_record(checkpoint_name(record.step))
    make_shared(path.parent)
    kept = record.bad[:BAD_KEPT]
    write_json(path, {**asdict(record), "bad": kept})
